"""AIME: 30 competition problems a year whose answer is a whole number below 1,000.

Names       AIME
Asks        competition problems whose answer is a whole number
Lengths     100 to 800 tokens
Answers     32,768 tokens, thinking
Licence     not stated; for evaluation only

Rows        aime/aime24.jsonl or aime/aime25.jsonl from the data folder, by `task.year`; 2025 is downloaded with
            `source=hub`, 2024 is put there by hand. Fields `problem` or `question`, and `answer`, a number or its
            digits.
Grader      `math_verify`, `rkv` (which takes 7300 for 73) or `kvpress` (the last box, as text).
Answers     up to 32,768 tokens.

Not here: prompts and grades (`tasks/reasoning`).
"""

from dataclasses import dataclass
from typing import Literal

from kvbench.tasks.base import Data
from kvbench.tasks.download import Piece
from kvbench.tasks.published import Row
from kvbench.tasks.reasoning import task as reasoning
from kvbench.tasks.reasoning.task import Reasoning
from kvbench.tasks.rows import BadRow, Id

YEARS = (24, 25)
REVISION = "563bb8404243c5f09de6ec262f2db674fe5bce9b"
PIECE = Piece("math-ai/aime25", REVISION, "test.jsonl", "aime/aime25.jsonl")


@dataclass(frozen=True)
class Params(reasoning.Params):
    year: Literal[24, 25]

    @property
    def names(self) -> tuple[str, ...]:
        return (f"aime{self.year}",)


class Aime(Reasoning):
    """One sample per problem, in the file's order."""

    name = "aime"
    data = Data(
        tuple(f"aime/aime{year}.jsonl" for year in YEARS), "2025 is fetched when asked for", pieces=(PIECE,),
        by_hand="2024 by hand, from GitHub Zefan-Cai/R-KV",
    )  # fmt: skip
    Params = Params
    usual_tokens = 32_768
    upstream = (
        "GitHub Zefan-Cai/R-KV (data/aime24.jsonl), hub datasets HuggingFaceH4/aime_2024 and math-ai/aime25 "
        "(`kvbench fetch aime` has 2025)"
    )

    place, fields = "aime/{name}.jsonl", {"answer": Id}

    def check_row(self, name: str, row: Row) -> None:
        super().check_row(name, row)
        digits = str(row["answer"]).strip()
        if not (digits.isascii() and digits.isdigit()):
            raise BadRow(f"field 'answer' is no whole number: {digits[:60]!r}")

    def more(self, row: Row) -> dict[str, str]:
        return {"dataset": "aime"}
