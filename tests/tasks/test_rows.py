"""Bad rows of a JSON-lines file: each kind is named with file and line, refused or skipped, never dropped silently."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.tasks.rows import BadRow, Fields, read_rows

FIELDS: Fields = {"id": int | str, "text": str, "labels": list[Any] | None}
GOOD = [{"id": i, "text": f"text {i}", "labels": None} for i in range(3)]


def write(folder: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(line + end for line in lines))
    return path


def good(i: int) -> bytes:
    return json.dumps(GOOD[i]).encode()


BAD = {
    "truncated": (good(1)[:-9], r"is no whole JSON object"),
    "empty": (b"", r"the line is empty"),
    "no object": (b"[1, 2]", r"is no JSON object"),
    "missing field": (b'{"id": 1, "labels": null}', r"field 'text' is missing"),
    "wrong type": (b'{"id": 1, "text": 7, "labels": null}', r"field 'text' is not a text: 7"),
    "a truth value": (b'{"id": true, "text": "x", "labels": null}', r"'id' is not a whole number, or a text: True"),
    "null elsewhere": (b'{"id": 1, "text": null, "labels": 3}', r"field 'text' is not a text"),
    "neither of two": (b'{"id": 1, "text": "x", "labels": 3}', r"field 'labels' is not a list"),
    "wrong encoding": ('{"id": 1, "text": "é", "labels": null}'.encode("latin-1"), r"byte 19 is no UTF-8"),
    "not a number": (b'{"id": 1, "text": "x", "labels": [NaN]}', r"is no whole JSON object"),
    "duplicate": (good(0), r"id=0 stands in line 1 already"),
    "duplicate as a text": (b'{"id": "0", "text": "x", "labels": null}', r"id='0' stands in line 1 already"),
    "half a character": (b'{"id": 1, "text": "x \\uD83d", "labels": null}', r"'text': character 2 is half a surrogate"),
    "half in a list": (b'{"id": 1, "text": "x", "labels": ["\\ude00"]}', r"'labels': character 2 is half a surrogate"),
    "its own check": (b'{"id": 1, "text": "never", "labels": null}', r"says never"),
}  # fmt: skip


def refuse_never(row) -> None:
    if row["text"] == "never":
        raise BadRow("says never")


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_named_and_refused_or_skipped(tmp_path: Path, kind: str) -> None:
    line, message = BAD[kind]
    path = write(tmp_path, good(0), line, good(2))
    with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 2: .*{message}.*on_bad_row=skip"):
        read_rows(path, FIELDS, "refuse", unique="id", check=refuse_never)
    rows = read_rows(path, FIELDS, "skip", unique="id", check=refuse_never)
    assert [(number, row["id"]) for number, row in rows.rows] == [(1, 0), (3, 2)]
    assert len(rows.notes) == 1
    assert "line 2" in rows.notes[0]
    assert rows.notes[0].startswith("row skipped: ")


def test_a_last_line_without_newline_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path, good(0), good(1), end=b"\r\n")
    path.write_bytes(path.read_bytes() + good(2))
    rows = read_rows(path, FIELDS, "refuse", unique="id")
    assert [row["id"] for _, row in rows.rows] == [0, 1, 2]
    assert rows.notes == []


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + good(0))
    assert read_rows(path, FIELDS, "refuse").rows[0][1]["id"] == 0


@pytest.mark.parametrize("line", [(), (b"",), (b"{",)])
def test_a_file_without_a_good_row_is_refused_either_way(tmp_path: Path, line) -> None:
    path = write(tmp_path, *line)
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        read_rows(path, FIELDS, "refuse")
    with pytest.raises(ConfigError, match="the file is empty" if not line else "no row can be used"):
        read_rows(path, FIELDS, "skip")


def test_a_folder_or_a_file_that_cannot_be_read_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path, FIELDS, "refuse")


def test_the_same_id_is_free_again_where_its_first_row_was_bad(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"id": 0, "labels": null}', good(0))
    rows = read_rows(path, FIELDS, "skip", unique="id")
    assert [number for number, _ in rows.rows] == [2]


def test_both_halves_of_a_surrogate_pair_are_one_character(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"id": 0, "text": "\\ud83d\\ude00", "labels": null}')
    assert read_rows(path, FIELDS, "refuse").rows[0][1]["text"] == "\N{GRINNING FACE}"
