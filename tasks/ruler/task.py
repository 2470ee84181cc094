"""RULER: thirteen tasks that ask for what a long text hides, chains together or repeats.

Names       RULER; rows like RULER's
Asks        what a long text hides, chains together or repeats
Lengths     any
Answers     30 to 128 tokens
Licence     Apache-2.0

Sources     files ruler/LENGTH/TASK.jsonl from the data folder, or with `source=embedded` rows generated at any length
            (`synthetic.py`); the two never share a run.
Prompts     ruler/templates.json from the data folder; without it wording of our own, and the result says
            `prompts: own`. The answer prefix follows the chat template's reply header. Older files of rows have
            it at the end of their text, where we split it off.
Haystacks   the needle's essays from the data folder, else Python's help topics, as the result says.
Length      generated rows fill `task.length` tokens, answer included, as full as their units allow.
Score       the share of references that the answer contains, whatever the case; qa_1 and qa_2: whether it contains one.
            Control characters become newlines first. A finished run's datasets.csv has the means in percent.

Not here: the published rows' seed; ours are other draws of the same recipes.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from kvbench.engine.declared import Count, Some
from kvbench.engine.foreign import read_text
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration import prose
from kvbench.tasks import sources
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import OfDatasets, OnBadRow, Prompts, check_length
from kvbench.tasks.lazy import Alike
from kvbench.tasks.needle.task import ESSAYS, UPSTREAM
from kvbench.tasks.published import Fields, Row, RowsTask
from kvbench.tasks.rows import BadRow, write_means
from kvbench.tasks.ruler.synthetic import KINDS, OWN_TEMPLATES, Material
from kvbench.tasks.ruler.synthetic import Row as Parts

TEMPLATES = "ruler/templates.json"
TEMPLATES_SOURCE = "GitHub NVIDIA/RULER (scripts/data/synthetic/constants.py), put into JSON"
ROWS_SOURCE = "GitHub NVIDIA/RULER, whose scripts generate it"
DATASETS = tuple(KINDS)
LISTS = {
    "niah": tuple(name for name in DATASETS if name.startswith("niah")),
    "all": DATASETS,
}
N_ROWS = 500  # of a published file
CONTROL = re.compile(r"[\x00-\x1f]")
REPLACEMENTS = {"newline": "\n", "delete": ""}


# --- scores ------------------------------------------------------------------------------------


def cleaned(prediction: str, control_characters: str = "newline") -> str:
    """Trimmed, control characters replaced, trimmed again."""
    return CONTROL.sub(REPLACEMENTS[control_characters], prediction.strip()).strip()


def match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that occur in a cleaned prediction."""
    text = prediction.lower()
    return sum(one.lower() in text for one in references) / len(references)


def match_part(prediction: str, references: Sequence[str]) -> float:
    """Whether any reference occurs in a cleaned prediction."""
    text = prediction.lower()
    return float(any(one.lower() in text for one in references))


def percent(scores: Sequence[float]) -> float:
    """A task's score as published: the mean over rows, of 100, in the authors' order: the last bit decides a tie."""
    return round(sum(scores) / len(scores) * 100, 2)


# --- rows of files -----------------------------------------------------------------------------


def split(dataset: str, row: Row) -> Parts:
    """A file's row in its parts, whichever release wrote it."""
    kind, text = KINDS[dataset], row["input"]
    start = text.rfind(kind.question)
    if start < 0:
        raise BadRow(f"field 'input' holds no question that begins with {kind.question!r}")
    prefix = row.get("answer_prefix")
    if prefix is None:
        cue = text.find(kind.cue, start)
        if cue < 0:
            raise BadRow(f"field 'input' does not end in an answer that begins with {kind.cue!r}")
        text, prefix = text[:cue], text[cue:]
    return Parts(text[:start], text[start:], prefix, tuple(row["outputs"]))


# --- the task ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Params(OfDatasets):
    lists = LISTS
    source: Literal["auto", "local", "embedded"]  # auto: the files; embedded: generated rows
    datasets: Annotated[str | tuple[str, ...], Some(DATASETS, tuple(LISTS))]
    length: Count  # tokens of a row, answer included
    rows: Count | None  # generated rows per task; None: as many as a published file has
    prompts: Prompts
    haystack: Literal["auto", "essays", "embedded"]  # auto: the essays if they are there
    max_new_tokens: Count | None  # None: the task's own
    control_characters: Literal["newline", "delete"]
    on_bad_row: OnBadRow

    def new_tokens(self, dataset: str) -> int:
        """Longest answer, in tokens."""
        return self.max_new_tokens or KINDS[dataset].new_tokens


class Ruler(RowsTask):
    """The rows of the chosen tasks, the first of each and then the second of each: `limit` sees all of them."""

    name = "ruler"
    version = 1
    Params = Params
    data = Data((TEMPLATES,), "without them own words (task.source=embedded)", by_hand=TEMPLATES_SOURCE)
    place, upstream, instead, unique = "ruler/{length}/{name}.jsonl", ROWS_SOURCE, "generated rows", "index"
    fields: ClassVar[Fields] = {"index": int, "input": str, "outputs": list[Any]}
    prompts = "official"

    @property
    def most(self) -> None:
        """All rows of a file are asked: task.rows is of generated ones."""

    def title(self) -> str:
        return f"{self.params.length}-tokens/{self.params.listed}"

    def prepare(self, shape: ModelShape) -> None:
        check_length(self.params.length, shape)
        self.notes = ["prompts: official", "rows: of files"]
        if self.is_embedded:
            self._gather()

    def _gather(self) -> None:
        """Read templates and essays, and note what the result says about them."""
        used: list[Path] = []
        templates, prompts = OWN_TEMPLATES, "own"
        path = None if self.params.prompts == "own" else sources.find(TEMPLATES, self.data_dir)
        if self.params.prompts == "official":
            path = sources.require(TEMPLATES, self.data_dir, TEMPLATES_SOURCE)
        if path is not None:
            templates, prompts = sources.read_json(path, TEMPLATES_SOURCE, OWN_TEMPLATES), "official"
            used.append(path)
        self.notes = [
            f"prompts: {prompts}",
            f"synthetic: true ({self.params.length} tokens)",
            "words: own" + (", documents: own" if {"qa_1", "qa_2"} & {*self.params.names} else ""),
        ]
        essays: tuple[str, ...] = ()
        if any(KINDS[name].needs_essays for name in self.params.names):
            files = self._essays()
            texts = [read_text(file) for file in files] or [prose.embedded_prose()]
            essays = tuple(" ".join(texts).split())
            haystack = f"essays-{len(files)}" if files else prose.prose_name()
            self.notes.append(f"haystack: {haystack}")
            used += files
        self.prompts = prompts
        self.material = Material(templates, essays, self.params.length)
        self.words = used

    def _essays(self) -> list[Path]:
        """The files of the essays; none where Python's help topics stand in."""
        if self.params.haystack == "embedded":
            return []
        files = sources.find_all(ESSAYS, self.data_dir, "*.txt")
        if self.params.haystack == "essays" and not files:
            sources.require(f"{ESSAYS}/*.txt", self.data_dir, UPSTREAM)
        return files

    def check_row(self, name: str, row: Row) -> None:
        outputs = row["outputs"]
        if not outputs or not all(isinstance(one, str) and one for one in outputs):
            raise BadRow("field 'outputs' is not a list of texts with something in them")
        if not isinstance(row.get("answer_prefix", ""), str):
            raise BadRow("field 'answer_prefix' is not a text")
        split(name, row)

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        if not self.is_embedded:
            return super().samples(tokenizer)
        cells = [(name, self.params.length) for name in self.params.names]
        return Generated(self, tokenizer, dict.fromkeys(cells, self.params.rows or N_ROWS))

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        return self.asked(name, row["index"], split(name, row), {})

    def asked(self, dataset: str, index: int, row: Parts, fields: Row) -> Sample:
        return Sample(
            id=f"{dataset}-{index}",
            context=row.context,
            question=row.question,
            answer_prefix=row.answer_prefix,
            references=row.outputs,
            max_new_tokens=self.params.new_tokens(dataset),
            fields={
                "dataset": dataset,
                "prompts": self.prompts,
                "synthetic": self.is_embedded,
                **fields,
            },
        )

    def score(self, sample: Sample, prediction: str) -> float:
        match = match_part if sample.fields["dataset"].startswith("qa_") else match_all
        return match(cleaned(prediction, self.params.control_characters), sample.references)

    def artifacts(self, folder: Path, rows: Sequence[Row], title: str) -> None:
        """datasets.csv: per task its rows and their mean in percent."""
        write_means(folder / "datasets.csv", rows, {"dataset": "dataset"}, mean=percent)


class Generated(Alike):
    """Rows in the units of their task."""

    def least(self, dataset: str) -> int:
        return KINDS[dataset].fewest

    def surplus(self, units: int, excess: int) -> int:
        return units // 100

    def draw(self, dataset: str, length: int, number: int, units: int) -> Sample:
        rng = random.Random(f"ruler {self.task.seed} {dataset} {number}")
        row = KINDS[dataset].make(self.task.material, rng, units)
        return self.task.asked(dataset, number, row, {"length": length, "units": units})
