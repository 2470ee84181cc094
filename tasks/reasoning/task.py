"""`Reasoning`: a task of short questions and long answers, one sample per row of a file.

The whole prompt is the context: it is compressed together with what the model generates. A `max_new_tokens` that is
null is the task's own limit, or what the window leaves after the prompt; a given one must fit.

Not here: prompts, room and grades (`answers.py`), pass@k (`results`), the files of each task.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.checks import check_choices, check_counts
from kvbench.tasks.reasoning.answers import (
    PARTS,
    TEMPLATES,
    Grading,
    Room,
    check_grader,
    fitted,
    grader_notes,
    known_graders,
    question_text,
    refuse_template,
)
from kvbench.tasks.rows import ON_BAD_ROW, BadRow, Rows, read_rows
from kvbench.tasks.texts import digest

LONGEST = 100_000  # characters of a question


@dataclass(frozen=True)
class Params:
    source: str
    template: str
    grader: str
    answer_part: str  # what the grader sees: all, or after_think
    max_new_tokens: int | None  # None: the task's own limit, or what the window leaves
    max_total_tokens: int | None  # of prompt and answer together; None: no limit
    on_bad_row: str

    def __post_init__(self) -> None:
        check_choices(
            self,
            source=("auto", "hub", "local"),
            template=TEMPLATES,
            grader=known_graders(),
            answer_part=PARTS,
            on_bad_row=ON_BAD_ROW,
        )
        check_counts(self, "max_new_tokens", "max_total_tokens")


class Reasoning(Task):
    """Rows of one file, each a question with one answer."""

    Params: ClassVar[Any] = Params
    version = 2
    packages: ClassVar[Mapping[str, str]] = {"math-verify": ""}
    usual_tokens: ClassVar[int]  # the longest answer where none is given
    upstream: ClassVar[str]

    def __init__(self, params: Any, data_dir: str | None, seed: int) -> None:
        self.params, self.data_dir = params, data_dir  # draws are the runner's
        self.data_source = "hub" if params.source == "hub" else "local"
        self.dataset = f"{self.part()}/{params.template}"
        self.rows: Rows | None = None
        self.window = 0

    # -- each task's own --

    @abstractmethod
    def part(self) -> str:
        """Which part of the benchmark is asked."""

    @abstractmethod
    def file(self) -> str:
        """The benchmark's file below a data folder."""

    @abstractmethod
    def columns(self) -> Mapping[str, type | tuple[type, ...]]:
        """The fields that every row must have."""

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `BadRow` for what no answer could be graded against."""
        if not str(row["answer"]).strip():
            raise BadRow("field 'answer' is empty")
        if not question_of(row).strip():
            raise BadRow("field 'problem' is missing or empty")
        if len(question_of(row)) > LONGEST:
            raise BadRow(f"field 'problem' has {len(question_of(row))} characters, more than {LONGEST}")

    def more(self, row: Mapping[str, Any]) -> dict[str, str]:
        """What graders want to know besides the answer; kept in the sample's columns."""
        return {}

    # -- the same for all --

    def check(self, shape: ModelShape) -> None:
        check_grader(self.params.grader)
        self.window = shape.window
        given = self.params.max_new_tokens
        if given is not None and given >= shape.window:
            raise ConfigError(
                f"task.max_new_tokens={given} leaves no room for a prompt in the window of {shape.name}, "
                f"{shape.window} tokens; give less"
            )
        (path,) = self.find()
        self.data_digest = digest([path])
        self.rows = read_rows(path, self.columns(), self.params.on_bad_row, check=self.check_row)
        self.notes = [*grader_notes(self.params.grader, self.params.answer_part), *self.rows.notes]

    def find(self) -> list[Path]:
        return sources.obtain([self.file()], self.params.source, self.data_dir, self.upstream)

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        assert self.rows is not None, "check was not called"
        refuse_template(self.params.template, tokenizer)
        room = Room(self.usual_tokens, self.params.max_new_tokens, self.params.max_total_tokens, self.window)
        asked = [self._sample(line, row) for line, row in self.rows.rows]
        samples, notes = fitted(tokenizer, asked, room, lambda sample, n: replace(sample, max_new_tokens=n))
        self.notes = [*(note for note in self.notes if note not in notes), *notes]
        return samples

    def _sample(self, line: int, row: Mapping[str, Any]) -> Sample:
        return Sample(
            id=f"{self.part()}-{line}",
            context=question_text(question_of(row), self.params.template),
            question="",
            references=(str(row["answer"]),),
            use_chat=self.params.template == "chat",
            thinks=True,
            fields={"template": self.params.template, **self.more(row)},
        )

    @cached_property
    def grading(self) -> Grading:
        return Grading(self.params.grader, self.params.answer_part)

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        more = {key: sample.fields[key] for key in ("solution", "dataset") if key in sample.fields}
        return self.grading.verdict(prediction, sample.references[0], **more)


def question_of(row: Mapping[str, Any]) -> str:
    """The question, by either of its names."""
    found = row.get("problem", row.get("question"))
    return found if isinstance(found, str) else ""
