"""MATH-500: competition problems whose answer is a formula.

Names       MATH-500
Asks        competition problems whose answer is a formula
Lengths     50 to 800 tokens
Answers     16,384 tokens, thinking
Licence     MIT

Rows        math500/test.jsonl from the data folder (hub `HuggingFaceH4/MATH-500`); downloaded with `source=hub`, and
            where it is missing and `data_dir` names no folder. 500 rows; any number of them is read.
Grader      `math_verify`, `rkv` (which takes the reference out of the row's solution) or `kvpress`.
Answers     up to 16,384 tokens; R-KV's and TriAttention's scripts allow 8,192 for prompt and answer together:
            `task.max_total_tokens=8192`.

Not here: prompts and grades (`tasks/reasoning`).
"""

from collections.abc import Mapping
from typing import Any

from kvbench.tasks.base import Data
from kvbench.tasks.download import Piece
from kvbench.tasks.reasoning.task import Params, Reasoning

REVISION = "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
PIECE = Piece("HuggingFaceH4/MATH-500", REVISION, "test.jsonl", "math500/test.jsonl")


class Math500(Reasoning):
    """One sample per row, in the file's order."""

    name = "math500"
    data = Data(("math500/test.jsonl",), "fetched when asked for", pieces=(PIECE,))
    Params = Params
    usual_tokens = 16_384
    upstream = "hub dataset HuggingFaceH4/MATH-500 (`kvbench fetch math500`)"

    def part(self) -> str:
        return "math500"

    def file(self) -> str:
        return "math500/test.jsonl"

    def columns(self) -> Mapping[str, type | tuple[type, ...]]:
        return {"problem": str, "answer": str}

    def more(self, row: Mapping[str, Any]) -> dict[str, str]:
        kept = {name: row[name] for name in ("subject", "unique_id") if isinstance(row.get(name), str)}
        if self.params.grader == "rkv" and isinstance(row.get("solution"), str):
            kept["solution"] = row["solution"]
        return kept
