"""`ConfigError`, `RunError`, and the sentence for a name that does not exist.

Not here: errors of our own making. Those are assertions, and they print a traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(Exception):
    """Wrong input of a user: one sentence with what was given, what is allowed, what to do. Ends a run with code 2."""


class RunError(Exception):
    """A run that had begun cannot go on, such as on a full disk: one sentence with the file, the reason, what to do.

    Ends a run with code 1; what was done stays.
    """


def unknown_name(kind: str, name: str, allowed: Iterable[str]) -> ConfigError:
    """The error for a misspelt `kind` (method, task, key …), with near misses first."""
    allowed = sorted(allowed)
    near = get_close_matches(name, allowed, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return ConfigError(f"no {kind} {name!r}{hint} (all: {', '.join(allowed)})")


def first_line(error: BaseException) -> str:
    """What went wrong, short enough for a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:150]
