"""HMMT: 30 problems of the Harvard-MIT tournament a set, whose answers are formulas.

Names       HMMT
Asks        competition problems whose answer is a formula, or several of them
Lengths     100 to 800 tokens
Answers     32,768 tokens, thinking
Licence     CC-BY-NC-SA-4.0

Rows        hmmt/hmmt_feb_2025.jsonl or hmmt/hmmt_nov_2025.jsonl from the data folder, by `task.set`; downloaded with
            `source=hub`, and where they are missing and `data_dir` names no folder. Fields `problem` and `answer`;
            `problem_type`, a list, is kept where it is there (February).
Grader      `math_verify`, `rkv` or `kvpress`. MathArena has a parser of its own. As there, the last box counts, several
            answers come in any order, in brackets or not, and whole numbers, fractions, roots, powers, factorials and
            degrees are equal by value. `math_verify` alone takes a formula without a box (of which MathArena takes the
            last whole number), logarithms and sines, decimals and per cent for fractions, `x=3, x=5`, and 3,5,5 for
            3,5; to it boxes are one list where less than ten characters stand between them, or less than 70 with a
            comma, `and` or `or`. MathArena alone takes `42.`, `[3,5]`, `1e3`, a root sign and digits of full width, and
            answers that its authors corrected.
Scope       the context ends with the problem.

Not here: prompts and grades (`tasks/reasoning`), the years before 2025.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvbench.tasks.base import Data, Sample
from kvbench.tasks.download import Piece
from kvbench.tasks.published import Row
from kvbench.tasks.reasoning import task as reasoning
from kvbench.tasks.reasoning.answers import question_parts
from kvbench.tasks.reasoning.task import Reasoning, question_of
from kvbench.tasks.rows import Id, Text

SETS: Mapping[str, str] = {"feb25": "hmmt_feb_2025", "nov25": "hmmt_nov_2025"}
PLACE = "hmmt/{name}.jsonl"
REVISIONS = {
    "hmmt_feb_2025": "6fdc4277120810ff75aa22d2d5489b91f7a262a1",
    "hmmt_nov_2025": "118dbfb45c4c9467c672268ed55166642897aa46",
}
PIECES = tuple(
    Piece(f"MathArena/{name}", commit, "data/train-00000-of-00001.parquet", PLACE.format(name=name))
    for name, commit in REVISIONS.items()
)


@dataclass(frozen=True)
class Params(reasoning.Params):
    set: Literal["feb25", "nov25"]

    @property
    def names(self) -> tuple[str, ...]:
        return (SETS[self.set],)


class Hmmt(Reasoning):
    """One sample per problem, in the file's order."""

    name = "hmmt"
    version = 1
    data = Data(tuple(piece.target for piece in PIECES), "fetched when asked for", pieces=PIECES)
    Params = Params
    usual_tokens = 32_768
    place, fields = PLACE, {"problem": Text, "answer": Id}
    upstream = "hub datasets MathArena/hmmt_feb_2025 and MathArena/hmmt_nov_2025 (`kvbench fetch hmmt`)"

    def sample(self, tokenizer: Any, name: str, number: int, row: Row) -> Sample:
        whole = super().sample(tokenizer, name, number, row)
        context, question = question_parts(question_of(row), self.params.template)
        return replace(whole, context=context, question=question)

    def more(self, row: Row) -> dict[str, str]:
        kinds = row.get("problem_type")
        return {"problem_type": ", ".join(map(str, kinds))} if isinstance(kinds, list) else {}
