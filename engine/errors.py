"""`ConfigError`, `LengthError`, `RunError`, `NotFiniteError`, and the sentence for a name that does not exist.

Not here: errors of our own making. Those are assertions, and they print a traceback.
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from traceback import extract_tb

LISTED = ("method", "task", "model", "experiment")  # kinds that have a command which lists them
FEW, MANY = 12, 30  # names that a sentence lists besides near misses, and where it has none


class ConfigError(Exception):
    """Wrong input of a user: one sentence with what was given, what is allowed, what to do. Ends a run with code 2."""


class LengthError(ConfigError):
    """A prompt and its answer are of a length that this model cannot be asked with. One sentence."""


class RunError(Exception):
    """A run that had begun cannot go on, such as on a full disk: one sentence with the file, the reason, what to do.

    Ends a run with code 1; what was done stays.
    """


class NotFiniteError(RunError):
    """The model's numbers for a prompt are NaN or infinite: no answer to it means anything. One sentence."""


def unknown_name(kind: str, name: str, allowed: Iterable[str]) -> ConfigError:
    """The error for a misspelt `kind` (method, task, key …): near misses, and all that there are or what lists them."""
    allowed = sorted(allowed)
    near = get_close_matches(name, allowed, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    if kind in LISTED:
        hint += f" (all: python run.py --list {kind}s)"
    elif not near or len(allowed) <= FEW:
        hint += f" (all: {', '.join(allowed)})"
    return ConfigError(f"no {kind} {name!r}{hint}")


def first_line(error: BaseException) -> str:
    """What went wrong, short enough for a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:150]


def is_panic(error: BaseException) -> bool:
    """Whether a tokenizer written in Rust gave up, which Python does not count among its exceptions."""
    return type(error).__name__ == "PanicException"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def said(error: BaseException, files: Collection[str]) -> str:
    """An error of a user's code in one line: where in these files it arose, of which kind it is, what it says."""
    places = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__) if frame.filename in files]
    if isinstance(error, SyntaxError) and (file := error.filename) and file in files:
        places, error = [(file, error.lineno)], type(error)(error.msg)
    where = ""
    if places:
        file, line = places[-1]
        where = f"line {line}: " if len(files) == 1 else f"line {line} of {Path(file).name}: "
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
