"""Rows of a file, each checked; a bad one is named with file and line or row.

A file has JSON lines, or a list in a .json file, or a .csv table, whose first line names the fields; all of them are
texts there.

`on_bad_row` says what then: `refuse` ends the run, `skip` leaves the row out and the result says so. A file without
any good row is refused either way.

Not here: what a row means (its task's file), where files come from (`tasks/sources.py`), what JSON can be used
(`engine/foreign.py`).
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

from kvbench.engine.declared import Is, reader, words
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import (
    LONGEST_LINE,
    NoJson,
    NoText,
    numbered_lines,
    parse_json,
    read_bytes,
    read_text,
    write_csv,
)

LARGEST_LIST = 1 << 30  # bytes of a .json file, twice the largest published one; it is read whole
LONGEST_ID = 1000  # characters; it stands in every table, message and log


def is_empty(value: Any) -> bool:
    """Whether a value is a text of blanks, or a list without elements."""
    return not value.strip() if isinstance(value, str) else isinstance(value, list) and not value


@dataclass(frozen=True)
class Something:
    """A text or a list that is not empty."""

    def holds(self, value: Any) -> bool:
        return not is_empty(value)


Fields = Mapping[str, Any]  # what a row has under each name, as a type that engine/declared.py reads
Id = str | int
Text = Annotated[str, Something()]
Texts = Annotated[list[str], Something(), Is("a list of texts")]


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


def read_rows(
    path: Path,
    fields: Fields,
    on_bad_row: str,
    *,
    unique: str | None = None,
    suffix: str | None = None,
    check: Callable[[Mapping[str, Any]], None] | None = None,
) -> Rows:
    """All rows of a file that hold `fields`.

    `unique` names a field that must not repeat; `suffix` says how the file is read where its own does not; `check` may
    raise BadRow.
    """
    rows: list[tuple[int, Mapping[str, Any]]] = []
    skipped: list[str] = []
    seen: dict[str, int] = {}  # 1 and "1" would be one sample
    suffix = path.suffix if suffix is None else suffix
    for number, one in READERS.get(suffix, numbered_values)(path):
        try:
            if isinstance(one, BadRow):
                raise one
            row = with_fields(one, fields)
            if check is not None:
                check(row)
            if unique is not None:
                check_id(unique, row[unique], seen)
        except BadRow as error:
            problem = f"{path}, {'row' if suffix == '.json' else 'line'} {number}: {error}"
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


def check_id(name: str, id: Any, seen: Mapping[str, int]) -> None:
    """Refuse an id that an earlier line has, or that is too long for a name. Any character may stand in it."""
    if len(str(id)) > LONGEST_ID:
        raise BadRow(f"field {name!r} has {len(str(id))} characters, more than {LONGEST_ID}")
    if str(id) in seen:
        raise BadRow(f"{name}={id!r} stands in line {seen[str(id)]} already")


# --- rows with their numbers; in the place of a row that cannot be read stands a `BadRow` ---------


def numbered_values(path: Path) -> Iterator[tuple[int, Any]]:
    """The values of JSON lines, from 1."""
    for number, line in numbered_lines(path):
        try:
            yield number, parse(line)
        except BadRow as error:
            yield number, error


def numbered_records(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a table by the names of its first line, each with the line where it begins."""
    table = csv.reader(StringIO(read_text(path), newline="\n"), strict=True)
    names: list[str] | None = None
    while True:
        number = table.line_num + 1
        try:
            cells = next(table)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, BadRow(f"the row is no CSV ({error})")
            continue
        if names is None:
            if twice := next((name for i, name in enumerate(cells) if name in cells[:i]), None):
                raise ConfigError(f"{path}, line 1: the column {twice!r} stands there twice; rename one")
            names = cells
        elif len(cells) == len(names):
            yield number, dict(zip(names, cells, strict=True))
        elif cells:
            yield number, BadRow(f"the row has {len(cells)} cells, the first line {len(names)}")


def numbered_items(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a list, from 0."""
    try:
        content = parse_json(read_bytes(path, LARGEST_LIST))
    except NoJson as error:
        raise ConfigError(f"{path} is no JSON ({error}); fetch it again") from None
    if not isinstance(content, list):
        raise ConfigError(f"{path} holds no list of rows; fetch it again")
    yield from enumerate(content)


READERS = {".json": numbered_items, ".csv": numbered_records}


def parse(line: bytes | None) -> Any:
    """The value that a line holds."""
    if line is None:
        raise BadRow(f"the line is longer than {LONGEST_LINE >> 20} MB")
    try:
        return parse_json(line)
    except NoText as error:
        raise BadRow(str(error)) from None
    except NoJson as error:
        raise BadRow(f"the line {unusable(line, str(error))}") from None


def with_fields(row: Any, fields: Fields) -> Mapping[str, Any]:
    """An object that has these fields."""
    if not isinstance(row, dict):
        raise BadRow("the line is no JSON object")
    for name, hint in fields.items():
        if name not in row:
            raise BadRow(f"field {name!r} is missing")
        try:
            reader(hint, exact=True)(row[name], name)
        except ConfigError:
            if is_empty(row[name]):
                raise BadRow(f"field {name!r} is empty") from None
            given = "" if isinstance(row[name], list | dict) else f": {row[name]!r:.60}"
            raise BadRow(f"field {name!r} is not {words(hint)}{given}") from None
    return row


def percent_of(scores: Sequence[float]) -> float:
    """The mean in percent, to two decimals."""
    return round(100 * sum(scores) / len(scores), 2)


def write_means(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    *,
    is_sorted: bool = False,
    mean: Callable[[Sequence[float]], float] = percent_of,
) -> None:
    """A run's table of means: its rows by the fields that `columns` names, each under its column's name."""
    scores: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row["score"] is not None:
            scores.setdefault(tuple(row[field] for field in columns.values()), []).append(row["score"])
    groups = sorted(scores.items()) if is_sorted else scores.items()
    write_csv(path, [*columns, "rows", "score_percent"], [[*key, len(each), mean(each)] for key, each in groups])


def unusable(line: bytes, why: str) -> str:
    """The reason why a line is unusable, and where that is plain, what makes it right."""
    if not line.strip():
        return "is empty"
    if b"\0" in line:
        return "holds NUL bytes: the file is binary, or UTF-16, which iconv converts"
    if b"\r" in line:
        return "holds carriage returns: tr '\\r' '\\n' makes lines of them"
    return f"is no whole JSON object ({why})"
