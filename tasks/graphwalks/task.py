"""GraphWalks: nodes at a depth of a breadth-first search, or the parents of a node, in a graph given by its edges.

Names       GraphWalks; walks in drawn graphs
Asks        which nodes of a graph lie at a depth, or lead to a node
Lengths     2.6k to 1.75M characters published, any with source=embedded
Answers     up to 512 tokens, 8,192 with task.thinking=true
Licence     MIT by its card

Sources     graphwalks/short.jsonl and long.jsonl of the data folder, or what is fetched: the hub's parquet files as
            JSON lines. With `source=embedded` graphs are drawn (`graphs.py`) and asked about in words of our own.
Truth       `task.truth=recomputed` from the edges; `file` as published, where some rows count a node among its own
            parents. The result says how many rows differ.
Score       F1 of the nodes, both empty is 1. `task.extraction=card` reads an answer as the published code does, with
            which the first node never counts; `harness`, ours, reads the list from its bracket. `auto` is the card's
            for published rows, and ours for drawn ones, which nothing published is compared with. `exact` and
            `no_answer` stand next to it, and the F1 by the other reading (`f1_card` or `f1_harness`). With
            `task.strip_end=true` blank lines after an answer are forgiven, which the card does not.
Rows        that do not fit are left out and counted, never cut.

Not here: graphs (`graphs.py`), scores (`scores.py`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from kvbench.engine.declared import Count, Once, Some
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import SLACK, Lengths, OnBadRow
from kvbench.tasks.download import Piece
from kvbench.tasks.graphwalks import graphs
from kvbench.tasks.graphwalks.scores import CUE, verdict
from kvbench.tasks.lazy import Drawn, fitting, in_turns, n_tokens, note_left_out
from kvbench.tasks.published import Fields, Row, RowsTask
from kvbench.tasks.rows import BadRow, write_means

REVISION = "f338bb265735a56a79f4b0f5def722c9c3268ead"
UPSTREAM = "hub dataset openai/graphwalks (kvbench fetch graphwalks)"
KINDS = ("parents", "bfs")
PARTS = {"short": "graphwalks_128k_and_shorter", "long": "graphwalks_256k_to_1mil"}
PIECES = tuple(
    Piece("openai/graphwalks", REVISION, f"{name}.parquet", f"graphwalks/{part}.jsonl") for part, name in PARTS.items()
)
NEW_TOKENS, THINKING_TOKENS = 512, 8192
READINGS = {
    "card": "card, as published: the first node of an answer never counts (task.extraction=harness counts it)",
    "harness": "harness: every node of an answer counts (the card's first one never does)",
}
CHARACTERS = 8  # of a token at most, by which rows are left out before they are tokenised
HEAD = f"""\
Below is a directed graph as a list of its edges, and behind it an operation to carry out on it. A breadth-first \
search (BFS) with depth N asks for the nodes whose shortest way from the start has N edges; the start does not count. \
The parents of a node are the other nodes with an edge to it.

An example, with the edges
red -> blue
blue -> gold
gray -> blue

{graphs.OPERATION}
Perform a BFS from node red with depth 2.
{CUE} [gold]

{graphs.OPERATION}
Find the parents of node blue.
{CUE} [red, gray]

{graphs.HEADING}
"""
TAIL = f"""

Give all nodes of the answer, between commas, in a last line as in the example: {CUE} [node1, node2]"""


@dataclass(frozen=True)
class Params:
    source: Literal["auto", "local", "hub", "embedded"]  # auto: the files; embedded: drawn graphs
    parts: Annotated[tuple[str, ...], Some(tuple(PARTS))]  # files
    problems: Annotated[tuple[str, ...], Some(KINDS)]
    depths: Annotated[tuple[Count, ...], Once()]  # of drawn searches
    out_degree: Count  # edges from each drawn node
    lengths: Lengths  # of drawn prompts
    rows: Count | None  # of each problem and length; None: all, or 30 drawn ones
    truth: Literal["recomputed", "file"]
    extraction: Literal["auto", "harness", "card"]  # auto: the card's of published rows, the harness's of drawn ones
    strip_end: bool
    thinking: bool
    max_new_tokens: Count | None  # None: 512, or 8192 with thinking
    on_bad_row: OnBadRow

    @property
    def n_new(self) -> int:
        return self.max_new_tokens or (THINKING_TOKENS if self.thinking else NEW_TOKENS)


class GraphWalks(RowsTask):
    """The rows of each chosen problem, in turns."""

    name = "graphwalks"
    version = 1
    Params = Params
    data = Data(
        tuple(piece.target for piece in PIECES), "without them drawn graphs (task.source=embedded)", pieces=PIECES
    )
    place, upstream, instead = "graphwalks/{name}.jsonl", UPSTREAM, "drawn graphs"
    fields: ClassVar[Fields] = {"prompt": str, "problem_type": str}

    def title(self) -> str:
        params = self.params
        depths = f"-{'+'.join(map(str, params.depths))}" if "bfs" in params.problems and self.is_embedded else ""
        size = f"{'+'.join(map(str, params.lengths))}-tokens" if self.is_embedded else "+".join(params.parts)
        return f"{size}/{'+'.join(params.problems)}{depths}"

    @property
    def names(self) -> Sequence[str]:
        return self.params.parts

    @property
    def extraction(self) -> str:
        """How answers are read."""
        usual = "harness" if self.params.source == "embedded" else "card"
        return usual if self.params.extraction == "auto" else self.params.extraction

    def prepare(self, shape: ModelShape) -> None:
        params, self.room = self.params, shape.window - self.params.n_new - SLACK
        self.notes = [f"extraction: {READINGS[self.extraction]}", f"blank lines behind an answer: {params.strip_end}"]
        longest = max(params.lengths) if self.is_embedded else 0
        if self.room < max(longest, SLACK):
            raise ConfigError(
                f"answers of {params.n_new} tokens leave {max(0, self.room)} of the {shape.window} of {shape.name} for "
                "a prompt; give a smaller task.max_new_tokens or task.lengths, or use a longer model"
            )
        if self.is_embedded:
            self.notes.append("drawn graphs, not comparable with GraphWalks")

    def read(self) -> None:
        super().read()
        rows = [row for each in self.rows.values() for _, row in each]
        n_differ = sum(recomputed(row) != sorted(set(given(row))) for row in rows)
        self.notes.append(
            f"truth: {self.params.truth}; {n_differ} of {len(rows)} published answers differ from the edges'"
        )

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        if self.is_embedded:
            cells = [(kind, length) for length in self.params.lengths for kind in self.params.problems]
            return Graphs(self, tokenizer, dict.fromkeys(cells, self.params.rows or 30))
        every = [(f"{part}-{number}", row) for part, rows in self.rows.items() for number, row in rows]

        def make(one: tuple[str, Row]) -> Sample | None:
            id, row = one
            right = recomputed(row) if self.params.truth == "recomputed" else sorted(set(given(row)))
            sample = self.walk(id, row["prompt"], asked(row), right, {})
            is_long = len(row["prompt"]) > CHARACTERS * self.room or n_tokens(tokenizer, sample) > self.room
            return None if is_long else sample

        by_kind = [
            fitting((one for one in every if one[1]["problem_type"] == kind), self.params.rows, make)
            for kind in self.params.problems
        ]
        note_left_out(self.notes, sum(n for _, n in by_kind), "rows", self.room)
        if not any(found for found, _ in by_kind):
            raise ConfigError("no row of GraphWalks fits the model's window; use a longer model")
        return in_turns([found for found, _ in by_kind])

    def walk(self, id: str, prompt: str, walk: graphs.Walk, right: Sequence[str], fields: Row) -> Sample:
        cut = prompt.rindex(graphs.OPERATION)
        return Sample(
            id=id,
            context=prompt[:cut],
            question=prompt[cut:],
            references=tuple(right),
            max_new_tokens=self.params.n_new,
            thinks=self.params.thinking,
            fields={"dataset": walk.kind, "depth": walk.depth, "n_right": len(right), **fields},
        )

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        text = prediction.rstrip() if self.params.strip_end else prediction
        (other,) = set(READINGS) - {self.extraction}
        found, beside = (verdict(text, sample.references, one) for one in (self.extraction, other))
        return found.f1, {"exact": found.exact, "no_answer": float(found.failed), f"f1_{other}": beside.f1}

    def right_answer(self, sample: Sample) -> str:
        return f"{CUE} [{', '.join(sample.references)}]"

    def artifacts(self, folder: Path, rows: Sequence[Row], title: str) -> None:
        """graphwalks.csv: by problem and depth."""
        write_means(folder / "graphwalks.csv", rows, {"problem": "dataset", "depth": "depth"}, is_sorted=True)

    def check_row(self, name: str, row: Row) -> None:
        if row["problem_type"] not in KINDS:
            raise BadRow(f"field 'problem_type' is {row['problem_type'][:40]!r}, none of {', '.join(KINDS)}")
        answer = row.get("answer_nodes", row.get("answer"))
        if not isinstance(answer, list) or not all(isinstance(node, str) for node in answer):
            raise BadRow("field 'answer_nodes' is no list of texts")
        walk = graphs.walk_of(row["prompt"].rpartition(graphs.OPERATION)[2])
        if graphs.OPERATION not in row["prompt"] or walk is None or walk.kind != row["problem_type"]:
            raise BadRow("field 'prompt' asks for no operation of this problem_type behind its last 'Operation:'")
        if not graphs.edges_of(row["prompt"]):
            raise BadRow("field 'prompt' has no edges")


def given(row: Row) -> list[str]:
    """The published answer, under its newer or its older name."""
    return row["answer_nodes"] if "answer_nodes" in row else row["answer"]


def asked(row: Row) -> graphs.Walk:
    walk = graphs.walk_of(row["prompt"].rpartition(graphs.OPERATION)[2])
    assert walk is not None, "the row was checked"
    return walk


def recomputed(row: Row) -> list[str]:
    return sorted(graphs.answer(graphs.edges_of(row["prompt"]), asked(row)))


class Graphs(Drawn):
    """Drawn graphs, whose units are edges."""

    fewest, of_fewest, per_unit = 8, "a graph of eight edges", 20

    def size(self, sample: Sample) -> int:
        return n_tokens(self.tokenizer, sample)

    def draw(self, kind: str, length: int, number: int, n_edges: int) -> Sample:
        params, walk, edges = self.task.params, None, []
        for again in range(51):
            rng = random.Random(f"graphwalks {self.task.seed} {kind} {length} {number} {n_edges} {again}")
            edges = graphs.draw_edges(rng, n_edges, params.out_degree)
            if walk := graphs.draw_walk(rng, edges, kind, params.depths):
                break
        else:
            raise ConfigError(
                f"graphs of {n_edges} edges have no node at the depths {list(params.depths)}; give other "
                "task.depths or a larger task.out_degree"
            )
        lines = "\n".join(f"{a} -> {b}" for a, b in edges)
        prompt = f"{HEAD}{lines}\n\n{graphs.OPERATION}\n{walk.words}{TAIL}"
        right = sorted(graphs.answer(edges, walk))
        nodes = len({node for edge in edges for node in edge})
        fields = {"length": length, "nodes": nodes, "edges": n_edges}
        return self.task.walk(f"{kind}-{length}-{number}", prompt, walk, right, fields)
