"""BABILong: where people and things are, by a few facts that are hidden in a long text; tasks qa1 to qa20.

Names       BABILong; facts hidden in prose
Asks        where a person or thing is, by facts that are hidden in a long text
Lengths     0k to 1M published, any with source=embedded
Answers     up to 20 tokens
Licence     Apache-2.0; bAbI BSD, PG19 Apache-2.0

Sources     babilong/LENGTH/qa1.json (a list) or .jsonl of the data folder, as the hub dataset RMT-team/babilong has
            them. With `source=embedded` worlds of qa1 to qa10 are drawn (`worlds.py`) and hidden in Python's help
            topics; those rows are not comparable. A sentence that holds one of the task's labels is left out there.
Prompts     babilong/prompts.json or the authors' prompts.py; without them wording of our own, and the result says
            `prompts: own`.
Length      tokens of text and facts, as the authors count them: prompt and question come on top.
Score       `task.scoring=official`: labels as parts of words, with which qa7's `none` is never right; `words`: ours,
            whole words. A finished run's babilong.csv has the mean of each task and length, in percent.

Not here: scores (`scores.py`), wording (`prompts.py`).
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration import prose
from kvbench.tasks import sources
from kvbench.tasks.babilong import worlds
from kvbench.tasks.babilong.prompts import END, OWN, PARTS, filled, official
from kvbench.tasks.babilong.prompts import UPSTREAM as PROMPTS_SOURCE
from kvbench.tasks.babilong.scores import LABELS, MADE, is_right
from kvbench.tasks.base import Data, Sample, Task
from kvbench.tasks.checks import OfDatasets, check_choices, check_counts, check_datasets
from kvbench.tasks.download import Piece
from kvbench.tasks.lazy import LazySamples, in_turns
from kvbench.tasks.rows import ON_BAD_ROW, BadRow, read_rows, write_means
from kvbench.tasks.texts import digest, sentences

DATASETS = tuple(f"qa{i}" for i in range(1, 21))
LENGTHS = ("0k", "1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k", "256k", "512k", "1M")  # published ones
LISTS = {"first": DATASETS[:5], "made": worlds.MADE, "all": DATASETS}
LENGTH = re.compile(r"(\d+)([kM])")
PROMPTS = "babilong/prompts.json"
THEIR_PROMPTS = "babilong/prompts.py"
CODE = "38da79d79519ef87aa46ae804f838e1eab7f86d7"
UPSTREAM = "hub dataset RMT-team/babilong (kvbench fetch babilong)"
REVISION = "ee0d588794c7ac098062ee0d247c733d62e94fe2"
SHORTEST = 10  # tokens of a sentence of the long text
AROUND = 500  # tokens that prompt and question may take


@dataclass(frozen=True)
class Params(OfDatasets):
    lists = LISTS
    source: str  # auto: the files; embedded: drawn worlds
    datasets: str | tuple[str, ...]  # names, or a list's: first (qa1 to qa5), made, all
    lengths: tuple[str, ...]  # of text and facts, as folders are called
    rows: int | None  # of each dataset and length; None: all, or 100 that are drawn
    prompts: str
    instruction: bool
    examples: bool
    post_prompt: bool
    scoring: str
    max_new_tokens: int
    on_bad_row: str

    def __post_init__(self) -> None:
        check_choices(
            self, source=("auto", "local", "hub", "embedded"), prompts=("auto", "official", "own"),
            scoring=("official", "words"), on_bad_row=ON_BAD_ROW,
        )  # fmt: skip
        check_counts(self, "rows", "max_new_tokens")
        check_datasets(self.names, DATASETS, LISTS)
        if (
            not self.lengths
            or len(set(self.lengths)) < len(self.lengths)
            or not all(map(LENGTH.fullmatch, self.lengths))
        ):
            raise ConfigError(f"task.lengths={list(self.lengths)} are no lengths; give some as 4k or 1M, each once")
        real = [name for name in self.names if name not in worlds.MADE]
        if self.source == "embedded" and real:
            raise ConfigError(
                f"task.source=embedded draws {worlds.MADE[0]} to {worlds.MADE[-1]} only, not {real[0]}; leave it out "
                "of task.datasets, or choose another source"
            )

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the prompt that are used."""
        return tuple(part for part in PARTS if getattr(self, part))


def n_tokens(length: str) -> int:
    """4k as a number."""
    found = LENGTH.fullmatch(length)
    assert found, length
    return int(found[1]) * {"k": 1000, "M": 1_000_000}[found[2]]


class BabiLong(Task):
    """The rows of each chosen task and length, in turns."""

    name = "babilong"
    version = 2
    Params = Params
    data = Data(
        (THEIR_PROMPTS, *(f"babilong/{length}/{name}.json" for length in ("4k", "16k") for name in LISTS["first"])),
        "without them drawn worlds (task.source=embedded)",
        pieces=(
            Piece("booydar/babilong", CODE, "babilong/prompts.py", THEIR_PROMPTS, site="github"),
            *(
                Piece("RMT-team/babilong", REVISION, f"data/{name}/{length}.json", f"babilong/{length}/{name}.json")
                for length in LENGTHS[:10] for name in DATASETS[:10]
            ),
        ),
    )  # fmt: skip

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.params, self.data_dir, self.seed = params, data_dir, seed
        self.data_source = {"embedded": "embedded", "hub": "hub"}.get(params.source, "local")
        self.dataset = f"{'+'.join(params.lengths)}/{params.listed}"
        self.rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        self.words: Mapping[str, Mapping[str, str]] = OWN
        self.notes: list[str] = []

    def check(self, shape: ModelShape) -> None:
        longest = max(map(n_tokens, self.params.lengths))
        if longest + AROUND + self.params.max_new_tokens > shape.window:
            raise ConfigError(
                f"task.lengths={list(self.params.lengths)} and the prompt around them do not fit the {shape.window} "
                f"tokens of {shape.name}; give shorter ones, or use a longer model"
            )
        path = None if self.params.prompts == "own" else sources.find(PROMPTS, self.data_dir)
        if self.params.prompts != "own" and path is None:
            path = sources.find(THEIR_PROMPTS, self.data_dir)
            if path is None and (self.params.prompts == "official" or self.params.source == "hub"):
                (path,) = sources.obtain([THEIR_PROMPTS], self.params.source, self.data_dir, PROMPTS_SOURCE)
        if path is not None:
            self.words = official(path, self.params.names)
        used = [] if path is None else [path]
        self.notes = [f"prompts: {'own' if path is None else 'official'}", f"scoring: {self.params.scoring}"]
        if "qa7" in self.params.names and self.params.scoring == "official":
            self.notes.append("qa7: the answer none is never right by the official scoring")
        if self.is_embedded:
            self.notes += ["drawn worlds, not comparable with BABILong", f"long text: {prose.prose_name()}"]
        else:
            used += self._read()
        self.data_digest = digest(used) if used else None

    def _read(self) -> list[Path]:
        used: list[Path] = []
        for length in self.params.lengths:
            for name in self.params.names:
                stem = f"babilong/{length}/{name}"
                path = sources.find(f"{stem}.jsonl", self.data_dir) if self.params.source != "hub" else None
                instead = "drawn worlds" if name in worlds.MADE else ""
                path = path or sources.obtain(
                    [f"{stem}.json"], self.params.source, self.data_dir, UPSTREAM, instead=instead
                )[0]  # fmt: skip
                fields = {"input": str, "question": str, "target": str}
                found = read_rows(path, fields, self.params.on_bad_row, check=check_row(name))
                self.notes += found.notes
                self.rows[name, length] = [{**row, "number": number} for number, row in found.rows]
                used.append(path)
        return used

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        return Rows(self, tokenizer)

    def sample(self, name: str, length: str, row: Mapping[str, Any]) -> Sample:
        words = {part: self.words[name][part] for part in self.params.parts}
        prompt = filled(words, row["input"], row["question"])
        cut = prompt.rindex(f"\n{END}\n") + len(END) + 1
        return Sample(
            id=f"{name}-{length}-{row['number']}",
            context=prompt[:cut],
            question=prompt[cut:],
            references=(row["target"],),
            max_new_tokens=self.params.max_new_tokens,
            evidence=tuple(row.get("facts", ())),
            fields={"dataset": name, "length": length, "question": row["question"]},
        )

    def score(self, sample: Sample, prediction: str) -> float:
        name, asked = sample.fields["dataset"], sample.fields["question"]
        labels = MADE.get(name, LABELS[name]) if self.params.source == "embedded" else LABELS[name]
        return float(
            is_right(labels, sample.references[0], prediction, asked, whole_words=self.params.scoring == "words")
        )

    def artifacts(self, folder: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """babilong.csv: per task and length its rows and their mean in percent."""
        write_means(folder / "babilong.csv", rows, {"dataset": "dataset", "length": "length"})


class Rows(LazySamples):
    """The first row of every task and length, then the second of every one."""

    def __init__(self, task: BabiLong, tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.sentences: dict[str, list[list[int]]] = {}  # of the long text as tokens, by task
        cells = [(name, length) for length in task.params.lengths for name in task.params.names]
        self.places = in_turns([[(*cell, i) for i in range(self.n_rows(cell))] for cell in cells])

    def n_rows(self, cell: tuple[str, str]) -> int:
        n = self.task.params.rows
        return (n or 100) if self.task.is_embedded else min(n or len(self.task.rows[cell]), len(self.task.rows[cell]))

    def sample(self, i: int) -> Sample:
        name, length, number = self.places[i]
        drawn = self.drawn(name, length, number) if self.task.is_embedded else self.task.rows[name, length][number]
        return self.task.sample(name, length, drawn)

    def drawn(self, name: str, length: str, number: int) -> Mapping[str, Any]:
        """A world in a text of so many tokens."""
        rng = random.Random(f"babilong {self.task.seed} {name} {length} {number}")
        asked = worlds.draw(name, rng)
        facts = [self.ids(fact) for fact in asked.facts]
        text = worlds.background(self.shuffled(name, rng, n_tokens(length)), n_tokens(length) - sum(map(len, facts)))
        positions = sorted(rng.choices(range(len(text) + 1), k=len(facts)))
        ids = worlds.mixed(text, facts, positions)
        return {
            "input": self.tokenizer.decode(ids), "question": asked.question, "target": asked.answer,
            "number": number, "facts": asked.facts,
        }  # fmt: skip

    def ids(self, sentence: str) -> list[int]:
        return self.tokenizer.encode(f" {sentence}", add_special_tokens=False)

    @cached_property
    def encoded(self) -> list[tuple[str, list[int]]]:
        """All sentences of the long text with their tokens, in one call: one by one takes seconds."""
        texts = sentences()
        ids = self.tokenizer([f" {text}" for text in texts], add_special_tokens=False)["input_ids"]
        return [*zip(texts, ids, strict=True)]

    def shuffled(self, name: str, rng: random.Random, n: int) -> list[list[int]]:
        """Sentences of n tokens or more, from a drawn one on; all of them come up before one comes again."""
        known = self.sentences.get(name)
        if known is None:
            labels = {label.lower() for label in MADE.get(name, LABELS[name])}
            texts = ((text.lower(), ids) for text, ids in self.encoded if len(ids) >= SHORTEST)
            known = [ids for text, ids in texts if not any(label in text for label in labels)]
            self.sentences[name] = known
        start, has = rng.randrange(len(known)), sum(map(len, known))
        around = known[start:] + known[:start]
        return around * (n // has + 1)


def check_row(name: str) -> Any:
    """A check of what a row must hold beyond the types of its fields."""

    def check(row: Mapping[str, Any]) -> None:
        for key in ("question", "target"):
            if not row[key].strip():
                raise BadRow(f"field {key!r} is empty")
        if row["target"].lower() not in {label.lower() for label in LABELS[name]} and "," not in row["target"]:
            raise BadRow(f"field 'target' is {row['target'][:40]!r}, no answer to {name}")

    return check
