"""Rows of a JSON-lines file, each checked; a bad one is named with file and line.

`on_bad_row` says what then: `refuse` ends the run, `skip` leaves the row out and the result says so. A file without
any good row is refused either way.

Not here: what a row means (its task's file), and where files come from (`evals/tasks/sources.py`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

BOM = b"\xef\xbb\xbf"
ON_BAD_ROW = ("refuse", "skip")
TYPE_NAMES = {
    str: "a text",
    int: "a whole number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


@dataclass(frozen=True)
class Rows:
    rows: tuple[tuple[int, Mapping[str, Any]], ...]  # line number from 1, and the row
    skipped: tuple[str, ...]  # one sentence per bad row

    @property
    def notes(self) -> list[str]:
        """What the result says about rows that were left out."""
        return [f"row skipped: {problem}" for problem in self.skipped]


class BadRow(ValueError):
    """Why a row cannot be used."""


class NoJson(ValueError):
    """What Python's reader takes and JSON has not."""


def no_constant(name: str) -> float:
    raise NoJson(f"{name} is no JSON")


def read_rows(
    path: Path,
    fields: Mapping[str, type | tuple[type, ...]],
    on_bad_row: str,
    *,
    unique: str | None = None,
    check: Callable[[Mapping[str, Any]], None] | None = None,
) -> Rows:
    """All rows of a file that hold `fields`; `unique` names a field that must not repeat; `check` may raise BadRow."""
    rows: list[tuple[int, Mapping[str, Any]]] = []
    skipped: list[str] = []
    seen: dict[str, int] = {}  # 1 and "1" would be one sample
    for number, line in numbered_lines(path):
        try:
            row = parse(line, fields)
            if check is not None:
                check(row)
            if unique is not None and str(row[unique]) in seen:
                line_before = seen[str(row[unique])]
                raise BadRow(f"{unique}={row[unique]!r} stands in line {line_before} already")
        except BadRow as error:
            problem = f"{path}, line {number}: {error}"
            if on_bad_row == "refuse":
                raise ConfigError(
                    f"{problem}; mend the file, or leave such rows out with task.on_bad_row=skip"
                ) from None
            skipped.append(problem)
            continue
        if unique is not None:
            seen[str(row[unique])] = number
        rows.append((number, row))
    if not rows:
        what = "no row can be used" if skipped else "the file is empty"
        raise ConfigError(f"{path}: {what}; fetch it again" + (f" ({skipped[0]})" if skipped else ""))
    return Rows(tuple(rows), tuple(skipped))


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, from 1, without what ends them and without a byte order mark."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.removeprefix(BOM if number == 1 else b"").rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None


def parse(line: bytes, fields: Mapping[str, type | tuple[type, ...]]) -> Mapping[str, Any]:
    """One line as an object with these fields."""
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=no_constant)
    except UnicodeDecodeError as error:
        raise BadRow(f"byte {error.start} is no UTF-8") from None
    except RecursionError:
        raise BadRow("the line is nested too deeply") from None
    except (json.JSONDecodeError, NoJson) as error:
        cut = "is empty" if not line.strip() else f"is no whole JSON object ({error})"
        raise BadRow(f"the line {cut}") from None
    if not isinstance(row, dict):
        raise BadRow("the line is no JSON object")
    for name, types in fields.items():
        if name not in row:
            raise BadRow(f"field {name!r} is missing")
        if not isinstance(row[name], types) or isinstance(row[name], bool):
            kinds = types if isinstance(types, tuple) else (types,)
            wanted = " or ".join(TYPE_NAMES.get(kind, kind.__name__) for kind in kinds)
            raise BadRow(f"field {name!r} is not {wanted}")
    if rb"\ud" in line.lower():
        check_characters(row)
    return row


def check_characters(row: Mapping[str, Any]) -> None:
    """Refuse one half of a surrogate pair: JSON can escape it, and no tokenizer takes it."""
    for name, value in row.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRow(f"field {name!r}: character {error.start} is half a surrogate pair") from None
