"""`Judge`: grades one answer at a time in a worker process that can be killed.

A grader parses what a model wrote, and some of it never comes back (`5^{5^{5^{5}}}`), takes all memory or ends the
process: it costs this answer's score and nothing else.

Not here: the worker's life and its limits (`engine/workers`), what is graded and how (`grade.py`).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from kvbench.engine.workers.limited import Limited

WORKER = "kvbench.tasks.reasoning.grade"
LIMIT_S = 5.0  # of one answer, on a processor
# The parser runtime that math-verify's answers are pinned with. Hydra's configuration files need an older one, with
# which math-verify reads no per cent sign; so this one lies next to the environment's packages, for the worker alone.
RUNTIME = Path(sys.prefix) / "grader"


@dataclass(frozen=True)
class Graded:
    """A grader's verdict on one answer."""

    correct: bool
    predicted: str | None  # what was taken for the answer; None: nothing was found
    status: str = "ok"  # "ok", "timeout", "died" (the worker ended) or "failed" (the grader raised)


class Judge(Limited):
    """One worker for all answers."""

    def __init__(self, limit_s: float = LIMIT_S, module: str = WORKER) -> None:
        super().__init__(module, limit_s, [RUNTIME])

    def grade(self, grader: str, text: str, gold: str, **more: str) -> Graded:
        """The verdict on one answer; a worker that hangs or dies is a verdict too."""
        status, found = self.ask({"grader": grader, "text": text, "gold": gold, **more})
        return Graded(False, None, status) if found is None else Graded(**found)
