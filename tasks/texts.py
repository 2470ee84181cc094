"""Plain text as a benchmark: where it is, and windows of tokens out of it.

A text is a file of prose or code in UTF-8, a line of a JSONL file with a `text`, or the embedded prose. Files are read
and checked before a model is loaded, and their content is part of a run's identity. A text is tokenised once, without
special tokens. Every window then begins with the tokens that the tokenizer puts before a text (mostly one BOS or none);
a window of n tokens has exactly n, these included.

Not here: what is done with a window (`tasks/pg19.py`, `tasks/fidelity.py`).
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import opened, read_text
from kvbench.methods.calibration.prose import embedded_prose, prose_name
from kvbench.tasks.rows import LONGEST_ID, BadRow, read_rows


@dataclass(frozen=True)
class Corpus:
    """Texts, each with a name of its own."""

    name: str  # of them all, as tables print it
    texts: tuple[tuple[str, str], ...]
    data_source: str
    digest: str | None  # of the files; None: embedded
    notes: tuple[str, ...] = ()  # what was left out of JSONL files


@cache
def sentences() -> tuple[str, ...]:
    """Sentences of the embedded prose, in its order."""
    parts = embedded_prose().split("\n\n")
    return tuple(text for part in parts for text in re.split(r"(?<=[.!?])\s+", part) if text)


def embedded() -> Corpus:
    """The prose of Python's help topics."""
    return Corpus(prose_name(), (("pydoc", embedded_prose()),), "embedded", None)


def read_files(files: Iterable[Path], on_bad_row: str = "refuse", n: int | None = None) -> Corpus:
    """The first `n` texts of these files, or all; files that are not needed for them are not opened."""
    texts: list[tuple[str, str]] = []
    used: list[Path] = []
    notes: list[str] = []
    for file in files:
        if n is not None and len(texts) >= n:
            break
        used.append(file)
        if file.suffix == ".jsonl":
            lines = read_rows(file, {"text": str}, on_bad_row, check=new_row(["text"]))
            texts += [(f"{file.stem}:{number}", row["text"]) for number, row in lines.rows]
            notes += lines.notes
        else:
            texts.append((file.stem, read_text(file)))
    name = used[0].stem + (f"-and-{len(used) - 1}" if used[1:] else "")
    return Corpus(name, tuple(texts[:n]), "local", digest(used), tuple(notes))


def digest(files: Iterable[Path]) -> str:
    """16 hex digits of the sha256 over what the files hold."""
    whole = hashlib.sha256()
    for file in files:
        with opened(file) as content:
            whole.update(hashlib.file_digest(content, "sha256").digest())
    return whole.hexdigest()[:16]


def new_row(texts: Sequence[str]) -> Callable[[Mapping[str, Any]], None]:
    """A check for rows: exactly one of the fields `texts` is there and holds a text; an `id`, if any, is new."""
    seen: set[str] = set()

    def check(row: Mapping[str, Any]) -> None:
        present = [key for key in texts if key in row]
        if len(present) != 1:
            fields = " and ".join(repr(key) for key in texts)
            raise BadRow(f"give one of the fields {fields}")
        check_text(row, present[0])
        id = row.get("id")
        if id is None:
            return
        if not isinstance(id, int | str) or isinstance(id, bool) or len(str(id)) > LONGEST_ID:
            raise BadRow(f"field 'id' is not a whole number or a text of up to {LONGEST_ID} characters")
        if str(id) in seen:
            raise BadRow(f"id={id!r} stands in an earlier line already")
        seen.add(str(id))

    return check


def check_text(row: Mapping[str, Any], key: str) -> None:
    """Raise `BadRow` for a field that is no text, or a text of nothing but blanks."""
    if not isinstance(row[key], str) or not row[key].strip():
        raise BadRow(f"field {key!r} is no text or an empty one")


def given_file(path: str) -> Path:
    """The file that the user named."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"task.path={path} is no file; give a text file in UTF-8 or a .jsonl file, or null")
    return file


@dataclass(frozen=True)
class Tokens:
    """One text as ids, and the ids that every window of it begins with."""

    name: str
    opening: tuple[int, ...]
    ids: tuple[int, ...]

    def __len__(self) -> int:
        """Tokens of the longest window."""
        return len(self.opening) + len(self.ids)

    def window(self, start: int, n: int) -> tuple[int, ...]:
        """`n` tokens, of which those after the opening begin at `start` of the text."""
        stop = start + n - len(self.opening)
        assert len(self.opening) < n and stop <= len(self.ids), (start, n, len(self))
        return self.opening + self.ids[start:stop]

    def starts(self, n: int, count: int) -> list[int] | None:
        """Where `count` windows of `n` tokens begin, spread evenly over the text; None: they do not fit."""
        room = len(self) - n
        if room < count - 1:
            return None
        return [room * i // max(1, count - 1) for i in range(count)]


def tokens(tokenizer: Any, name: str, text: str) -> Tokens:
    """The ids of a text; the opening is apart, because windows begin anywhere in the text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Tokens(name, opening(tokenizer), tuple(ids))


def opening(tokenizer: Any) -> tuple[int, ...]:
    """The ids that the tokenizer puts before every text: mostly one BOS or nothing."""
    plain, whole = tokenizer.encode("x", add_special_tokens=False), tokenizer.encode("x")
    n = len(whole) - len(plain)
    return tuple(whole[:n]) if whole[n:] == plain else ()
