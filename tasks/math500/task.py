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

from kvbench.tasks.base import Data
from kvbench.tasks.download import Piece
from kvbench.tasks.published import Row
from kvbench.tasks.reasoning.task import Params, Reasoning
from kvbench.tasks.rows import Text

FILE = "math500/test.jsonl"
PIECE = Piece("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test.jsonl", FILE)


class Math500(Reasoning):
    """One sample per row, in the file's order."""

    name = "math500"
    data = Data((FILE,), "fetched when asked for", pieces=(PIECE,))
    Params = Params
    usual_tokens = 16_384
    place, fields = FILE, {"problem": Text, "answer": Text}
    upstream = "hub dataset HuggingFaceH4/MATH-500 (`kvbench fetch math500`)"

    def more(self, row: Row) -> dict[str, str]:
        graded = ("solution",) if self.params.grader == "rkv" else ()
        return {name: row[name] for name in ("subject", "unique_id", *graded) if isinstance(row.get(name), str)}
