"""Bad rows of JSON lines and tables: each is named with file and line, refused or skipped, never dropped silently."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.errors import ConfigError
from kvbench.tasks.rows import BadRow, Fields, Text, read_rows

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


TABLE = b'id,text,labels\r\n0,"text, 0\nof two lines",\r\n%s\r\n2,text 2,x\r\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1,text", "the row has 2 cells, the first line 3"),
        (b"1,text,,", "the row has 4 cells, the first line 3"),
        (b'1,"text"s,', "the row is no CSV"),
        (b"1,te\rxt,", "the row is no CSV"),
        (b"1," + b"x" * 200_000 + b",", "the row is no CSV .field larger than"),
        (b"1, ,", "field 'text' is empty"),
        (b"0,text,", "id='0' stands in line 2 already"),
        (b"1,never,", "says never"),
    ],
)
def test_a_bad_row_of_a_table_is_named_by_the_line_where_it_begins(tmp_path: Path, line: bytes, message: str) -> None:
    fields: Fields = {"id": Text, "text": Text, "labels": str}
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xef\xbb\xbf" + TABLE % line)
    with pytest.raises(ConfigError, match=rf"rows\.csv, line 4: .*{message}.*on_bad_row=skip"):
        read_rows(path, fields, "refuse", unique="id", check=refuse_never)
    rows = read_rows(path, fields, "skip", unique="id", check=refuse_never)
    assert [(number, row["text"]) for number, row in rows.rows] == [(2, "text, 0\nof two lines"), (5, "text 2")]
    assert rows.rows[1][1] == {"id": "2", "text": "text 2", "labels": "x"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"id,text\n", "the file is empty"),
        (b"id,id\n0,1\n", "line 1: the column 'id' stands there twice"),
        (b'"id\n', "no row can be used"),
        (b"id,text\n0,\0\n", "line 2: byte 10 of the file is NUL"),
        (b"id,text\n0,\xe9\n", "line 2: byte 10 of the file is no UTF-8"),
        (b"id,other\n0,x\n", "field 'text' is missing"),
        (b'id,text\n0,"x\n1,y\n', "the row is no CSV"),
        (b"PK\x03\x04", "a zip archive"),
    ],
)
def test_a_table_that_cannot_be_used_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"rows\.csv.*{message}"):
        read_rows(path, {"id": Text, "text": Text}, "skip")


@given(st.lists(st.sampled_from([*b'\n\r",;\0x\xe9', *b"id,text"]), max_size=60), st.sampled_from(["refuse", "skip"]))
def test_any_table_becomes_rows_or_one_sentence(content: list[int], on_bad_row: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        path.write_bytes(b"id,text\n" + bytes(content))
        try:
            rows = read_rows(path, {"id": Text, "text": Text}, on_bad_row, unique="id").rows
        except ConfigError as error:
            assert "\n" not in str(error) and str(path) in str(error)
        else:
            assert all(number > 1 and row.keys() == {"id", "text"} for number, row in rows)


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
