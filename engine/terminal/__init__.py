"""The only way to the terminal: whatever a text holds, it is shown and not obeyed.

Names, answers and messages come from files of others: a result, a method's title, a chat template. An escape sequence
among them could clear the screen or write a line that was never printed. `say` prints lines, `console` gives rich's
console for tables; both escape every character that cannot be printed, before it is measured. A test holds that no
other module prints. A command that this Python lacks a package for says so here.

Not here: Markdown (`results/sheet.py`), CSV and JSON (`engine/foreign.py`), HTML (the report's scripts set text).
"""

import os
import signal
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

WIDTH = 100  # columns, where no terminal says how many there are


def printable(text: str) -> str:
    """A text in which what cannot be printed is escaped: control characters, halves of pairs, changes of direction."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def lines_of(text: str) -> str:
    """As `printable`, of a text of several lines, whose ends and tabs stay."""

    def line(words: str) -> str:
        end = "\r" if words.endswith("\r") else ""
        return "\t".join(map(printable, words.removesuffix(end).split("\t"))) + end

    *whole, last = text.split("\n")
    return "\n".join([*map(line, whole), "\t".join(map(printable, last.split("\t")))])


def say(*words: object, file: TextIO | None = None, end: str = "\n") -> None:
    """As `print`: to standard output, or another stream. Where its reader has left (`| head`), the command ends."""
    stream = sys.stdout if file is None else file
    try:
        print(lines_of(" ".join(map(str, words))), file=stream, end=end, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is still buffered goes nowhere at exit
        raise SystemExit(128 + signal.SIGPIPE) from None


def console(**options: Any) -> "Console":
    """rich's console, which takes texts as they are: names may look like its markup, and hold anything.

    It is as wide as the terminal, and `WIDTH` where there is none.
    """
    from rich.console import Console
    from rich.text import Text

    class Shown(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(lines_of(text), **options)

    shown = Shown(markup=False, emoji=False, **options)
    if not shown.is_terminal and "width" not in options:
        shown.width = WIDTH
    return shown


def lacks(error: ModuleNotFoundError) -> str:
    return f"{sys.executable} has no {error.name}; `make setup`, then `. .venv/bin/activate`"


def refuse_without_packages() -> None:
    """For `python -m ROOM.COMMAND`, which imports the room first: a missing package is a sentence and exit code 2.

    A program that imports the room keeps its own ways.
    """
    if sys.argv[0] == "-m":  # what Python puts there until it has found the command
        sys.excepthook = refuse_missing


def refuse_missing(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
    """As `sys.excepthook`; a module that is missing from a package that is there is a fault, not a package."""
    if not isinstance(error, ModuleNotFoundError) or find_spec(str(error.name).partition(".")[0]) is not None:
        return sys.__excepthook__(kind, error, trace)
    say(lacks(error), file=sys.stderr)
    sys.exit(2)
