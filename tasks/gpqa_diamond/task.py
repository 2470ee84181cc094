"""GPQA Diamond: questions of biology, chemistry and physics for people with a doctorate, with four choices.

Names       GPQA-Diamond
Asks        one of four choices, after any amount of thought
Lengths     100 to 2k tokens
Answers     32,768 tokens, thinking
Licence     CC-BY-4.0, gated: rows must not be shown in public

Rows        gpqa_diamond/gpqa_diamond.csv from the data folder, as the hub dataset Idavidrein/gpqa has it, or
            gpqa_diamond.jsonl with the same fields, which goes first; 198 rows. The dataset is gated: it is downloaded
            with `source=hub`, and where it is missing and `data_dir` names no folder, by an account that accepted its
            terms, with this account's token in HF_TOKEN. Fields: `Record ID`, `Question`, `Correct Answer`,
            `Incorrect Answer 1` to `3`; `High-level domain` is kept where it is there.
Choices     are drawn into an order by the run's seed and the row's `Record ID`, hence alike for all methods, draws and
            parts of a run. Guessing scores 25 of 100. Blanks round a choice are cut off.
Prompt      simple-evals' form, in our own words: what is asked for stands last. `chat` is one user's turn.
Score       the letter of the last `Answer: X` or `\\boxed{X}` is right or wrong; marks of Markdown, LaTeX and brackets
            round it are ignored, and letters of full width are letters. Two letters there are no answer. simple-evals
            takes the first `Answer: X`, and of two letters the first.
Figures     `no_answer` is the share of answers without a letter; gpqa_diamond.csv of a finished run has the means of
            each domain.
Scope       the context ends with the choices.

Not here: the other GPQA sets, answers by likelihood, exemplars.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal
from unicodedata import normalize

from kvbench.engine.declared import Count
from kvbench.engine.shapes import ModelShape
from kvbench.tasks import sources
from kvbench.tasks.base import Data, Sample
from kvbench.tasks.checks import OnBadRow
from kvbench.tasks.download import Piece
from kvbench.tasks.published import Row
from kvbench.tasks.reasoning.answers import AnswerPart, Template, after_thought, graded_part, refuse_template
from kvbench.tasks.reasoning.task import LONGEST, LongAnswers
from kvbench.tasks.rows import BadRow, Text

FILE = "gpqa_diamond/gpqa_diamond.csv"
PIECE = Piece("Idavidrein/gpqa", "633f5ee89ab8ad4522a9f850766b73f62147ffdd", "gpqa_diamond.csv", FILE)
ID, QUESTION, DOMAIN = "Record ID", "Question", "High-level domain"
CHOICES = ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))  # the right one first
LETTERS = "ABCD"
ASK = (
    "\n\nThink step by step before you choose. The last line of your answer must read 'Answer: $LETTER', without "
    "quotes, and in place of $LETTER one of A, B, C and D."
)
MARKS = r"(?:[*_$`'\"\s(\[{]|\\[(\[]|\\[a-z]+\{){0,16}"  # bold, LaTeX, quotes and brackets before a letter
# No letter of a word or a formula, such as C_2, D4 or B = 5.
ONE = r"[A-D](?![^\W_]|_[\w{]|-\w|\s{0,4}[\^=+])"
AND = r"[\s)\]*}$]{0,4}(?:,|/|&|;|(?:\\text\{)?\s{0,4}(?:and|or)\b[\s}]{0,4})"
CHOICE = re.compile(rf"(?:(?i:answer)[*_\s]{{0,8}}:|\\boxed\s{{0,4}}\{{){MARKS}({ONE})({AND}{MARKS}{ONE})?")


def chosen_letter(answer: str) -> str | None:
    """The letter that an answer gives last; None where it gives none, or two."""
    found = [*CHOICE.finditer(normalize("NFKC", answer))]
    return found[-1][1] if found and not found[-1][2] else None


@dataclass(frozen=True)
class Params:
    source: Literal["auto", "hub", "local"]
    template: Template
    answer_part: AnswerPart
    max_new_tokens: Count | None  # None: the task's own limit, or what the window leaves
    max_total_tokens: Count | None  # of prompt and answer together; None: no limit
    on_bad_row: OnBadRow


class GpqaDiamond(LongAnswers):
    """One sample per row, in the file's order."""

    Params = Params
    name = "gpqa_diamond"
    version = 1
    data = Data((FILE,), "fetched when asked for, with a token", pieces=(PIECE,))
    usual_tokens = 32_768
    place, unique = FILE, ID
    fields: ClassVar[Mapping[str, Any]] = dict.fromkeys((ID, QUESTION, *CHOICES), Text)
    means: ClassVar[Mapping[str, str]] = {"domain": "domain"}
    upstream = (
        "hub dataset Idavidrein/gpqa (accept its terms there, then `kvbench fetch gpqa_diamond` with this account's "
        "token in HF_TOKEN)"
    )

    def title(self) -> str:
        return f"{self.name}/{self.params.template}"

    def prepare(self, shape: ModelShape) -> None:
        super().prepare(shape)
        if self.params.answer_part != "all":
            self.notes.append(f"answer_part: {self.params.answer_part}")

    def files(self, only: Sequence[str] | None = None) -> dict[str, Path]:
        """JSON lines that somebody made, else the published table."""
        lines = sources.find(FILE.replace(".csv", ".jsonl"), self.data_dir) if self.params.source != "hub" else None
        return {self.name: lines} if lines else super().files(only)

    def check_row(self, name: str, row: Row) -> None:
        """Raise `BadRow` for texts of absurd length."""
        for key in (QUESTION, *CHOICES):
            if len(row[key]) > LONGEST:
                raise BadRow(f"field {key!r} has {len(row[key])} characters, more than {LONGEST}")

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        refuse_template(self.params.template, tokenizer)
        return super().samples(tokenizer)

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        order = Random(f"{self.seed} {row[ID]}").sample(CHOICES, len(CHOICES))
        choices = "\n".join(f"{letter}) {row[key].strip()}" for letter, key in zip(LETTERS, order, strict=True))
        domain = row.get(DOMAIN)
        return Sample(
            id=row[ID],
            context=f"{row[QUESTION].strip()}\n\n{choices}",
            question=ASK,
            references=(LETTERS[order.index(CHOICES[0])],),
            use_chat=self.params.template == "chat",
            thinks=True,
            fields={"template": self.params.template, "domain": domain if isinstance(domain, str) else ""},
        )

    def verdict(self, sample: Sample, prediction: str) -> tuple[float, dict[str, float | None]]:
        letter = chosen_letter(graded_part(prediction, self.params.answer_part))
        return float(letter == sample.references[0]), {"no_answer": float(letter is None)}

    def right_answer(self, sample: Sample) -> str:
        return after_thought(f"Answer: {sample.references[0]}", self.params.answer_part)
