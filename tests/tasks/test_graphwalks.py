"""GraphWalks: the two readings of an answer, truths of graphs, rows of files, and the cases."""

import json
from pathlib import Path

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.graphwalks import graphs
from kvbench.tasks.graphwalks.scores import nodes_of, verdict
from kvbench.tasks.graphwalks.task import GraphWalks
from kvbench.tests.golden_metrics import TOLERANCE, metrics_3
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer
from kvbench.tests.vectors import Check

REPO = Path(__file__).resolve().parents[2]
PROMPT = "Do it.\nThe graph has the following edges:\n{}\n\nOperation:\n{}\n\nReply."
EDGES = "a1 -> b1\nb1 -> b1\nb1 -> c1\nc1 -> a1"
ROW = {"prompt": PROMPT.format(EDGES, "Find the parents of node b1."), "problem_type": "parents",
       "answer_nodes": ["a1", "b1"]}  # fmt: skip


def task(folder: Path, **given) -> GraphWalks:
    values = yaml.safe_load((REPO / "conf" / "task" / "graphwalks.yaml").read_text())
    del values["_target_"]
    made = GraphWalks(build_params(GraphWalks, values | given, "task"), str(folder), 0)
    made.check(ModelShape("tiny", 2, 4, 2, 8, 8192, (0, 1)))
    return made


def write(folder: Path, *rows: object) -> None:
    (folder / "graphwalks").mkdir(exist_ok=True)
    (folder / "graphwalks" / "short.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_the_cards_code_never_counts_the_first_node() -> None:
    text = "Final Answer: [a1, b1]"
    assert nodes_of(text) == ["a1", "b1"] and nodes_of(text, "card") == ["Final Answer: [a1", "b1"]
    assert verdict(text, ["a1", "b1"]).f1 == 1.0 and verdict(text, ["a1", "b1"], "card").f1 == 0.5
    assert verdict("Final Answer: []", []).f1 == 1.0 and verdict("", []).f1 == 0.0
    assert verdict(f"{text}\n", ["a1", "b1"]).failed


def test_a_way_back_to_the_start_does_not_count() -> None:
    edges = [("a", "b"), ("b", "a"), ("b", "c"), ("a", "c"), ("c", "c")]
    assert graphs.answer(edges, graphs.Walk("bfs", "a", 1)) == {"b", "c"}
    assert graphs.answer(edges, graphs.Walk("bfs", "a", 2)) == frozenset()
    assert graphs.answer(edges, graphs.Walk("parents", "c", 1)) == {"a", "b"}


def test_published_answers_are_made_again_from_the_edges(tmp_path: Path) -> None:
    search = PROMPT.format(EDGES, "Perform a BFS from node a1 with depth 2.")
    write(tmp_path, ROW, {"prompt": search, "problem_type": "bfs", "answer": ["c1"]})
    tokenizer = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
    made = task(tmp_path)
    parents, bfs = made.samples(tokenizer)
    assert (parents.references, bfs.references) == (("a1",), ("c1",))
    assert parents.question.startswith("Operation:\nFind") and parents.context.endswith("c1 -> a1\n\n")
    assert "truth: recomputed; 1 of 2 published answers differ from the edges'" in made.notes
    assert made.verdict(bfs, "Final Answer: [c1]\n\n") == (0.0, {"exact": 0.0, "no_answer": 0.0, "f1_harness": 1.0})
    assert "extraction: card, as published" in made.notes[0]
    ours = task(tmp_path, extraction="harness")
    assert ours.verdict(bfs, "Final Answer: [c1]\n\n") == (1.0, {"exact": 1.0, "no_answer": 0.0, "f1_card": 0.0})
    as_published = task(tmp_path, truth="file", strip_end=False, extraction="harness")
    assert as_published.samples(tokenizer)[0].references == ("a1", "b1")
    assert as_published.score(bfs, "Final Answer: [c1]\n") == 0.0


def test_some_drawn_parents_are_none_and_searches_have_one_to_twenty_nodes(tmp_path: Path) -> None:
    made = task(tmp_path, source="embedded", lengths=[1500], rows=40)
    samples = made.samples(tiny_tokenizer(None, adds_bos=False))
    assert "extraction: harness" in made.notes[0]
    sizes = [(sample.fields["dataset"], len(sample.references)) for sample in samples]
    assert 1 <= sum(size == ("parents", 0) for size in sizes) <= 12
    assert all(1 <= n <= 20 for kind, n in sizes if kind == "bfs")


# --- cases -------------------------------------------------------------------------------------------------------


def run_scores(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        for extraction in ("harness", "card"):
            ours, nodes = (
                verdict(row["prediction"], row["reference"], extraction),
                nodes_of(row["prediction"], extraction),
            )
            want = row[extraction]
            wrong = [key for key in ("precision", "recall", "f1", "exact") if key in want
                     and abs(getattr(ours, key) - want[key]) > TOLERANCE]  # fmt: skip
            wrong += ["parsed"] * ((nodes or []) != want["parsed"]) + ["failed"] * (ours.failed != want["failed"])
            found.append((f"scores[{i}].{extraction}", f"{', '.join(wrong)} differ" if wrong else None))
    return found


def run_graphs(path: Path) -> list[Check]:
    found: list[Check] = []
    for i, row in enumerate(json.loads(path.read_text(encoding="utf-8"))["rows"]):
        walk = graphs.Walk(row["problem_type"], row["node"], row["depth"] or 1)
        edges = [(a, b) for a, b in row["edges"]]
        is_same = sorted(graphs.answer(edges, walk)) == row["answer"]
        is_same = is_same and walk.words == row["operation"] and graphs.walk_of(row["operation"]) == walk
        found.append((f"graphs[{i}]", None if is_same else "another answer or operation"))
    return found


RUNNERS = {"graphwalks_scores": run_scores, "graphwalks_graphs": run_graphs}


@pytest.mark.parametrize("name", RUNNERS)
def test_the_cases_agree(name: str) -> None:
    assert [case for case in RUNNERS[name](metrics_3(name)) if case[1]] == []
