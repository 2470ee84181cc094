"""The worker that checks answers, and `followed`, which asks it: some rows hold regular expressions that never end.

An instruction whose check does not end in time, takes too much memory or raises counts as not followed, in a sample
that says so (`checks_stopped`). The official checkers hang there, or end.

Not here: the checks (`checks.py`), limits of time and memory (`engine/workers`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvbench.engine.workers.limited import Limited
from kvbench.engine.workers.serve import serve
from kvbench.tasks.ifeval_system import checks

LIMIT_S = 5.0  # of one instruction, strict and loose, on a processor; an ordinary one takes milliseconds


@dataclass(frozen=True)
class Followed:
    """Which instructions an answer follows."""

    strict: list[bool]
    loose: list[bool]
    n_stopped: int  # whose checks did not come to an end


@cache
def worker() -> Limited:
    """The worker of all tasks of this process."""
    return Limited(__name__, LIMIT_S)


def followed(kinds: Sequence[str], values: Sequence[checks.Values], answer: str) -> Followed:
    """Each instruction is asked by itself, so that one that does not end costs no other."""
    found = [
        worker().ask({"kind": kind, "values": each, "answer": answer})[1]
        for kind, each in zip(kinds, values, strict=True)
    ]
    pairs = [one or (False, False) for one in found]
    return Followed([bool(a) for a, _ in pairs], [bool(b) for _, b in pairs], sum(one is None for one in found))


def reply(question: Mapping[str, Any]) -> tuple[bool, bool] | None:
    """Strict and loose; None where the check raises."""
    kinds, values, answer = [question["kind"]], [question["values"]], question["answer"]
    try:
        return checks.strict(kinds, values, answer)[0], checks.loose(kinds, values, answer)[0]
    except Exception:  # a check parses what a model wrote; MemoryError and RecursionError included
        return None


def warm_up() -> None:
    """Import what the first reply needs, before its clock starts."""
    checks.is_language("warm", "en")
    checks.words_of("Warm.")


if __name__ == "__main__":
    serve(reply, warm_up)
