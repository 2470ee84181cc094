"""Files and texts from elsewhere: read without trusting them, and written so that they do no harm.

Only regular files are read (a pipe would wait for ever), up to the sizes below, and only JSON that all further code can
handle. A file that cannot be used is a `ConfigError` that names it; JSON that cannot be used is a `NoJson` with the
reason.

    LONGEST_LINE     measured: reading one of 32 MB takes a second and 0.2 GB; published files were not measured
    LARGEST_FILE     of texts and tables read whole: ten times War and Peace, half a minute to tokenise
    DEEPEST          benchmarks nest three deep, and Python's own reader and writer end somewhere below 1000
    MOST_NODES       lists and objects of one level: half a gigabyte of them; rows have some thousands
    LONGEST_NUMBER   digits: one more than 308, and a number does not fit into a float

Not here: what rows mean (`tasks/rows.py`), where files are (`tasks/sources.py`).
"""

import csv
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO

from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import printable

LONGEST_LINE = 32 << 20  # bytes
LARGEST_FILE = 32 << 20  # bytes
DEEPEST = 64
LONGEST_NUMBER = 308  # digits
MOST_NODES = 1_000_000

KINDS = {  # by how a file begins: what it is, and what makes text of it
    b"\x1f\x8b": ("packed with gzip", "unpack it with gunzip"),
    b"PK\x03\x04": ("a zip archive", "unpack it with unzip"),
    b"BZh": ("packed with bzip2", "unpack it with bunzip2"),
    b"\xfd7zXZ\x00": ("packed with xz", "unpack it with unxz"),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", "unpack it with unzstd"),
    b"PAR1": ("a Parquet file", "save its rows as JSON lines"),
    b"\xff\xfe": ("UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
}
BOM = b"\xef\xbb\xbf"
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what makes a spreadsheet compute a cell


class NoJson(ValueError):
    """Why a text is no JSON that can be used."""


class NoText(NoJson):
    """The text is not even UTF-8."""


# --- reading -----------------------------------------------------------------------------------


def cache_home() -> Path:
    """Where converted checkpoints, hashes, profiles and frames are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbench"


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A regular file; `ConfigError` for anything else and for whatever goes wrong while it is read."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path} cannot be read (it is no regular file); put a copy of the file there")
            yield file
    except OSError as error:
        remedy = {
            PermissionError: "let yourself read it with chmod u+r",
            FileNotFoundError: "put it there",
        }.get(type(error), "put a copy of the file there")
        raise ConfigError(f"{path} cannot be read ({error.strerror}); {remedy}") from None


def without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe that nobody writes to would else block here for ever."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_bytes(path: Path, most: int = LARGEST_FILE) -> bytes:
    """A whole file, unless it is larger than can be used."""
    with opened(path) as file:
        # Not `most` at once: so many addresses are reserved, which a process with a limit has not.
        content = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > most:
        raise ConfigError(f"{path} is larger than {most >> 20} MB; split it, or give the file that was meant")
    return content


def read_text(path: Path) -> str:
    """A whole text in UTF-8, with something in it; line ends become newlines."""
    content = read_bytes(path)
    refuse_kind(path, content)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: byte {error.start} of the file is no UTF-8; convert the file, for example with iconv"
        ) from None
    if (at := content.find(b"\0")) >= 0:
        line = content.count(b"\n", 0, at) + 1
        raise ConfigError(
            f"{path}, line {line}: byte {at} of the file is NUL, which no text has; give a text file in UTF-8"
        )
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty; fetch it again")
    return text.replace("\r\n", "\n")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a file, from 1, without what ends them and without a byte order mark; None: too long."""
    with opened(path) as file:
        refuse_kind(path, file.read(8))
        file.seek(0)
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                while line and not line.endswith(b"\n"):
                    line = file.readline(LONGEST_LINE)
                yield number, None
            else:
                yield number, line.removeprefix(BOM if number == 1 else b"").rstrip(b"\r\n")


def refuse_kind(path: Path, beginning: bytes) -> None:
    """Refuse what is no text from its first bytes on."""
    for magic, (kind, remedy) in KINDS.items():
        if beginning.startswith(magic):
            raise ConfigError(f"{path}, line 1: the file is {kind}, no text in UTF-8; {remedy}")


def read_json(path: Path, remedy: str) -> Any:
    """A whole file of JSON; `remedy` ends the sentence on a damaged one."""
    try:
        return parse_json(read_bytes(path))
    except NoJson as error:
        raise ConfigError(f"{path} is no JSON ({error}); {remedy}") from None


def parse_json(content: str | bytes, is_ours: bool = False) -> Any:
    """JSON that all further code can take: no deeper, no larger numbers, no key twice, whole characters.

    Of what we wrote only the depth is asked: somebody may have changed it, and it is read twice as fast.
    """
    hooks: dict[str, Any] = {
        "parse_constant": no_constant, "parse_int": whole_number, "parse_float": number,
        "object_pairs_hook": with_single_keys,
    }  # fmt: skip
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        found = json.loads(text, **({} if is_ours else hooks))
    except UnicodeDecodeError as error:
        raise NoText(f"byte {error.start} is no UTF-8") from None
    except RecursionError:
        raise NoJson(f"it is nested too deeply, more than {DEEPEST} levels") from None
    except json.JSONDecodeError as error:
        raise NoJson(str(error)) from None
    refuse_depth(found)
    if not is_ours and "\\ud" in text.lower():
        refuse_half_characters(found)
    return found


def no_constant(name: str) -> float:
    raise NoJson(f"{name} is no JSON")


def whole_number(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise NoJson(f"it holds a number of {len(digits)} digits, more than {LONGEST_NUMBER}")
    return int(digits)


def number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise NoJson(f"it holds the number {digits[:40]}, which is too large")
    return value


def with_single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise NoJson(f"it has the key {name[:40]!r} twice")
    return content


def refuse_depth(found: Any) -> None:
    """Walk level by level: recursion is what must not be relied on."""
    level: list[Any] = [found]
    for _ in range(DEEPEST + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
        if len(level) > MOST_NODES:
            raise NoJson(f"it holds more than {MOST_NODES:,} lists and objects")
    raise NoJson(f"it is nested too deeply, more than {DEEPEST} levels")


def refuse_half_characters(found: Any) -> None:
    """Refuse one half of a surrogate pair: JSON can escape it, and no tokenizer takes it."""
    named = found.items() if isinstance(found, dict) else [("", found)]
    for name, value in named:
        half = half_character(name)
        if half is not None:
            raise NoJson(f"the key {name[:40]!r}: character {half} is half a surrogate pair")
        half = half_character(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        if half is not None:
            raise NoJson(f"field {name!r}: character {half} is half a surrogate pair")


def half_character(text: str) -> int | None:
    """The index of the first half of a surrogate pair that stands alone in a text, if any."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


# --- writing -----------------------------------------------------------------------------------


def one_line(text: str, most: int = 500) -> str:
    """A text for a terminal: what cannot be printed is escaped, and what is too long is cut."""
    shown = text if len(text) <= most else f"{text[:most]}…"
    return printable(" ".join(shown.split()))


def write_csv(path: Path, header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> None:
    """A table as a file, safe to open in a spreadsheet."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = CsvWriter(file)
        writer.writerow(header)
        for row in rows:
            writer.writerow(row)


class CsvWriter:
    """A `csv.writer` with which no text becomes a formula, which a spreadsheet would run. Numbers stay numbers."""

    def __init__(self, file: TextIO, lineterminator: str = "\r\n") -> None:
        self.out = csv.writer(file, lineterminator=lineterminator)

    def writerow(self, row: Iterable[Any]) -> None:
        self.out.writerow([cell(value) for value in row])


def cell(value: Any) -> Any:
    """A text that a spreadsheet would compute, with the apostrophe that makes it show it."""
    is_formula = isinstance(value, str) and value.startswith(FORMULA) and not is_number(value)
    return f"'{value}" if is_formula else value


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and text == text.strip() and "_" not in text
    except ValueError:
        return False
