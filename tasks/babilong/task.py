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
from typing import Annotated, Any, ClassVar, Literal

from kvbench.engine.declared import Count, Matches, Once, Some
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration import prose
from kvbench.tasks import sources
from kvbench.tasks.babilong import worlds
from kvbench.tasks.babilong.prompts import END, OWN, PARTS, filled, official
from kvbench.tasks.babilong.prompts import UPSTREAM as PROMPTS_SOURCE
from kvbench.tasks.babilong.scores import LABELS, MADE, is_right
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import OfDatasets, OnBadRow, Prompts
from kvbench.tasks.download import Piece
from kvbench.tasks.lazy import Drawn
from kvbench.tasks.published import Fields, Row, RowsTask
from kvbench.tasks.rows import BadRow
from kvbench.tasks.texts import sentences

DATASETS = tuple(f"qa{i}" for i in range(1, 21))
LENGTHS = ("0k", "1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k", "256k", "512k", "1M")  # published ones
LISTS = {"first": DATASETS[:5], "made": worlds.MADE, "all": DATASETS}
LENGTH = r"(\d+)([kM])"
PROMPTS = "babilong/prompts.json"
THEIR_PROMPTS = "babilong/prompts.py"
CODE = "38da79d79519ef87aa46ae804f838e1eab7f86d7"
UPSTREAM = "hub dataset RMT-team/babilong (kvbench fetch babilong)"
REVISION = "ee0d588794c7ac098062ee0d247c733d62e94fe2"
SHORTEST = 10  # tokens of a sentence of the long text
AROUND = 500  # tokens that prompt and question may take


@dataclass(frozen=True)
class Params(OfDatasets):
    lists, drawn = LISTS, worlds.MADE
    source: Literal["auto", "local", "hub", "embedded"]  # auto: the files; embedded: drawn worlds
    datasets: Annotated[str | tuple[str, ...], Some(DATASETS, tuple(LISTS))]
    lengths: Annotated[tuple[Annotated[str, Matches(LENGTH, "a length like 4k or 1M")], ...], Once()]  # text and facts
    rows: Count | None  # of each dataset and length; None: all, or 100 that are drawn
    prompts: Prompts
    instruction: bool
    examples: bool
    post_prompt: bool
    scoring: Literal["official", "words"]
    max_new_tokens: Count
    on_bad_row: OnBadRow

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the prompt that are used."""
        return tuple(part for part in PARTS if getattr(self, part))


def n_tokens(length: str) -> int:
    """4k as a number."""
    found = re.fullmatch(LENGTH, length)
    assert found, length
    return int(found[1]) * {"k": 1000, "M": 1_000_000}[found[2]]


class BabiLong(RowsTask):
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

    place, upstream, instead = "babilong/{name}.json", UPSTREAM, "drawn worlds"
    fields: ClassVar[Fields] = {"input": str, "question": str, "target": str}
    means: ClassVar[Row] = {"dataset": "dataset", "length": "length"}
    prompts: Mapping[str, Mapping[str, str]] = OWN

    def title(self) -> str:
        return f"{'+'.join(self.params.lengths)}/{self.params.listed}"

    @property
    def names(self) -> Sequence[str]:
        """A file for each length and task."""
        return [f"{length}/{name}" for length in self.params.lengths for name in self.params.names]

    def prepare(self, shape: ModelShape) -> None:
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
        self.words, self.prompts = ([], OWN) if path is None else ([path], official(path, self.params.names))
        self.notes = [f"prompts: {'own' if path is None else 'official'}", f"scoring: {self.params.scoring}"]
        if "qa7" in self.params.names and self.params.scoring == "official":
            self.notes.append("qa7: the answer none is never right by the official scoring")
        if self.is_embedded:
            self.notes += ["drawn worlds, not comparable with BABILong", f"long text: {prose.prose_name()}"]

    def files(self, only: Sequence[str] | None = None) -> dict[str, Path]:
        """JSON lines that somebody made, else upstream's lists."""
        found = dict[str, Path]()
        for name in self.names:
            lines = sources.find(f"babilong/{name}.jsonl", self.data_dir) if self.params.source != "hub" else None
            instead = self.instead if name.rpartition("/")[2] in worlds.MADE else ""
            found[name] = lines or sources.obtain(
                [f"babilong/{name}.json"], self.params.source, self.data_dir, UPSTREAM, instead=instead
            )[0]  # fmt: skip
        return found

    def check_row(self, name: str, row: Row) -> None:
        for key in ("question", "target"):
            if not row[key].strip():
                raise BadRow(f"field {key!r} is empty")
        dataset = name.rpartition("/")[2]
        if row["target"].lower() not in {label.lower() for label in LABELS[dataset]} and "," not in row["target"]:
            raise BadRow(f"field 'target' is {row['target'][:40]!r}, no answer to {dataset}")

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        if not self.is_embedded:
            return super().samples(tokenizer)
        cells = [(name, length) for length in self.params.lengths for name in self.params.names]
        return Worlds(self, tokenizer, dict.fromkeys(cells, self.params.rows or 100))

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        length, _, name = name.partition("/")
        words = {part: self.prompts[name][part] for part in self.params.parts}
        prompt = filled(words, row["input"], row["question"])
        cut = prompt.rindex(f"\n{END}\n") + len(END) + 1
        return Sample(
            id=f"{name}-{length}-{number}",
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


class Worlds(Drawn):
    """A drawn world in a text of exactly so many tokens."""

    def sample(self, i: int) -> Sample:
        name, length, number = self.places[i]
        rng = random.Random(f"babilong {self.task.seed} {name} {length} {number}")
        asked = worlds.draw(name, rng)
        facts = [self.ids(fact) for fact in asked.facts]
        text = worlds.background(self.background(name, rng, n_tokens(length)), n_tokens(length) - sum(map(len, facts)))
        positions = sorted(rng.choices(range(len(text) + 1), k=len(facts)))
        ids = worlds.mixed(text, facts, positions)
        row = {"input": self.tokenizer.decode(ids), "question": asked.question, "target": asked.answer}
        return self.task.sample(self.tokenizer, f"{length}/{name}", number, row | {"facts": asked.facts})

    def ids(self, sentence: str) -> list[int]:
        return self.tokenizer.encode(f" {sentence}", add_special_tokens=False)

    def background(self, name: str, rng: random.Random, n: int) -> list[list[int]]:
        """Sentences of n tokens or more, from a drawn one on; all of them come up before one comes again."""
        known = self.sentences[name]
        start, has = rng.randrange(len(known)), sum(map(len, known))
        around = known[start:] + known[:start]
        return around * (n // has + 1)

    @cached_property
    def sentences(self) -> dict[str, list[list[int]]]:
        """Those of the long text, as tokens, that have no answer to a task; in one call, as each takes its time."""
        ids = self.tokenizer([f" {text}" for text in sentences()], add_special_tokens=False)["input_ids"]
        every = [(text.lower(), some) for text, some in zip(sentences(), ids, strict=True) if len(some) >= SHORTEST]
        labels = {name: [label.lower() for label in MADE.get(name, LABELS[name])] for name in self.task.params.names}
        return {
            name: [some for text, some in every if not any(label in text for label in answers)]
            for name, answers in labels.items()
        }
