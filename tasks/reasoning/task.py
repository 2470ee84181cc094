"""`Reasoning`: a task of short questions and long answers, one sample per row of a file.

The whole prompt is the context: it is compressed together with what the model generates. A `max_new_tokens` that is
null is the task's own limit, or what the window leaves after the prompt; a given one must fit.

Not here: prompts, room and grades (`answers.py`), pass@k (`results`), the files of each task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from kvbench.engine.declared import Count
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.tasks.base import Sample
from kvbench.tasks.checks import OnBadRow
from kvbench.tasks.published import Row, RowsTask
from kvbench.tasks.reasoning.answers import (
    AnswerPart,
    Grading,
    Room,
    Template,
    after_thought,
    check_grader,
    fitted,
    grader_notes,
    question_text,
    refuse_template,
)
from kvbench.tasks.rows import BadRow

LONGEST = 100_000  # characters of a question


@dataclass(frozen=True)
class Params:
    source: Literal["auto", "hub", "local"]
    template: Template
    grader: Literal["math_verify", "rkv", "kvpress"]
    answer_part: AnswerPart
    max_new_tokens: Count | None  # None: the task's own limit, or what the window leaves
    max_total_tokens: Count | None  # of prompt and answer together; None: no limit
    on_bad_row: OnBadRow


class LongAnswers(RowsTask):
    """Rows whose answers may have what the window leaves behind the prompt, up to a usual length."""

    usual_tokens: Any  # the longest answer where none is given

    def prepare(self, shape: ModelShape) -> None:
        given = self.params.max_new_tokens
        if given is not None and given >= shape.window:
            raise ConfigError(
                f"task.max_new_tokens={given} leaves no room for a prompt in the window of {shape.name}, "
                f"{shape.window} tokens; give less"
            )

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        given, total = self.params.max_new_tokens, getattr(self.params, "max_total_tokens", None)
        room = Room(self.usual_tokens, given, total, self.window)
        samples, notes = fitted(tokenizer, super().samples(tokenizer), room)
        self.notes = [*(note for note in self.notes if note not in notes), *notes]
        return samples


class Reasoning(LongAnswers):
    """Questions with one answer each, which a grader of formulas judges."""

    Params: ClassVar[Any] = Params
    version = 2
    packages: ClassVar[Mapping[str, str]] = {"math-verify": ""}

    def title(self) -> str:
        return f"{self.names[0]}/{self.params.template}"

    def prepare(self, shape: ModelShape) -> None:
        check_grader(self.params.grader)
        super().prepare(shape)
        self.notes += grader_notes(self.params.grader, self.params.answer_part)

    def check_row(self, name: str, row: Row) -> None:
        """Raise `BadRow` for what no answer could be graded against."""
        if not str(row["answer"]).strip():
            raise BadRow("field 'answer' is empty")
        if not question_of(row).strip():
            raise BadRow("field 'problem' is missing or empty")
        if len(question_of(row)) > LONGEST:
            raise BadRow(f"field 'problem' has {len(question_of(row))} characters, more than {LONGEST}")

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        refuse_template(self.params.template, tokenizer)
        return super().samples(tokenizer)

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        return Sample(
            id=f"{name}-{number}",
            context=question_text(question_of(row), self.params.template),
            question="",
            references=(str(row["answer"]),),
            use_chat=self.params.template == "chat",
            thinks=True,
            fields={"template": self.params.template, **self.more(row)},
        )

    def more(self, row: Row) -> dict[str, str]:
        """What graders want to know besides the answer; kept in the sample's columns."""
        return {}

    @cached_property
    def grading(self) -> Grading:
        return Grading(self.params.grader, self.params.answer_part)

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        more = {key: sample.fields[key] for key in ("solution", "dataset") if key in sample.fields}
        return self.grading.verdict(prediction, self.gold(sample), **more)

    def gold(self, sample: Sample) -> str:
        """What an answer is compared with."""
        return sample.references[0]

    def right_answer(self, sample: Sample) -> str:
        return after_thought(f"\\boxed{{{self.gold(sample)}}}", self.params.answer_part)


def question_of(row: Row) -> str:
    """The question, by either of its names."""
    found = row.get("problem", row.get("question"))
    return found if isinstance(found, str) else ""
