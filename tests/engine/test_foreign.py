"""Files that others made: whatever is in them, there are rows or a sentence that names the file, in bounded time."""

import csv
import gzip
import io
import os
import random
import socket
import time
from pathlib import Path

import pytest

from kvbench.engine import foreign
from kvbench.engine.errors import ConfigError
from kvbench.tasks import prompt
from kvbench.tasks.gsm8k import Gsm8k
from kvbench.tasks.infinitebench.prompts import check_row, upstream_templates
from kvbench.tasks.longbench.task import checked_config
from kvbench.tasks.needle import task as needle
from kvbench.tasks.rows import read_rows
from kvbench.tasks.sources import find, read_json
from kvbench.tasks.texts import digest, given_file, new_row, read_text
from kvbench.tests.tiny_tokenizer import tiny_tokenizer

GOOD = b'{"id": 1, "text": "x"}'
DEEP = b'{"id": 2, "text": "x", "more": %s}'
LINES = {  # a line, and what is said of it
    "deeper than Python reads": (DEEP % (b"[" * 100_000 + b"]" * 100_000), "nested too deeply"),
    "deeper than Python writes": (DEEP % (b"[" * 300 + b"]" * 300), "nested too deeply"),
    "deep with half a pair": (DEEP % (b"[" * 300 + rb'"\ud800"' + b"]" * 300), "nested too deeply"),
    "a number of 5,000 digits": (DEEP % (b"7" * 5000), "number of 5000 digits"),
    "a number beyond floats": (DEEP % b"1e999", "1e999, which is too large"),
    "half a pair in a key": (rb'{"id": 2, "text": "x", "\ud800": 1}', "half a surrogate pair"),
    "half a pair in a deeper key": (DEEP % rb'{"\udfff": 1}', "half a surrogate pair"),
    "a key twice": (b'{"id": 2, "text": "x", "text": "y"}', "key 'text' twice"),
    "an id as long as a text": (b'{"id": "%s", "text": "x"}' % (b"i" * 1001), "1001 characters"),
    "NUL bytes": (b"\0" * 99, "NUL"),
    "old line ends": (GOOD + b"\r" + GOOD, "carriage return"),
}  # fmt: skip
FILES = {  # a file's content, and what is said of it
    "gzip": (gzip.compress(GOOD), "gunzip"),
    "zip": (b"PK\x03\x04" + b"\0" * 99, "unzip"),
    "xz": (b"\xfd7zXZ\x00" + b"\0" * 99, "unxz"),
    "UTF-16": ("x\n".encode("utf-16"), "UTF-16"),
    "UTF-16 without a mark": ("x\n".encode("utf-16-be"), "NUL"),
    "nothing": (b"", "empty"),
}


@pytest.mark.parametrize("kind", LINES)
def test_a_line_that_nothing_can_read_is_one_sentence_or_left_out(tmp_path: Path, kind: str) -> None:  # fmt: skip
    line, said = LINES[kind]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n")
    fields = {"id": int | str, "text": str}
    with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 2: .*{said}.*on_bad_row=skip"):
        read_rows(path, fields, "refuse", unique="id")
    rows = read_rows(path, fields, "skip", unique="id")
    assert [number for number, _ in rows.rows] == [1]
    assert "line 2" in rows.notes[0]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("on_bad_row", ["refuse", "skip"])
def test_a_file_that_is_no_text_is_named_with_a_remedy(tmp_path: Path, kind: str, on_bad_row: str) -> None:  # fmt: skip
    content, said = FILES[kind]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    for read in (lambda: read_rows(path, {}, on_bad_row), lambda: read_text(path)):
        with pytest.raises(ConfigError, match=rf"rows\.jsonl.*{said}"):
            read()


def made(folder: Path, kind: str) -> Path:
    """Something at a file's place that is no file."""
    path = folder / "there"
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(os.path.relpath(path))  # a name holds 107 characters
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
    return path


READERS = {
    "rows": lambda path: read_rows(path, {}, "skip"),
    "text": read_text,
    "digest": lambda path: digest([path]),
    "words": lambda path: read_json(path, "upstream"),
    "tables": lambda path: checked_config(path, ["qasper"], str),
    "templates": lambda path: upstream_templates(path, "gpt4"),
}


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device", "loop"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str, reader: str) -> None:
    path = made(tmp_path, kind)
    with pytest.raises(ConfigError, match=r"there cannot be read \(.*\); "):
        READERS[reader](path)
    if kind == "loop":
        assert find("there", str(tmp_path)) is None
    with pytest.raises(ConfigError, match="is no file"):
        given_file(str(path))


def test_a_file_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, flags: int, *rest: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD)
    monkeypatch.setattr(os, "open", refused)  # root may read everything
    with pytest.raises(ConfigError, match=r"rows\.jsonl cannot be read \(Permission denied\); .*chmod"):
        read_rows(path, {}, "refuse")


def test_a_line_that_is_too_long_is_never_in_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(foreign, "LONGEST_LINE", 100)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * 1050 + b"\n" + GOOD + b"\n" + b"y" * 101)
    lines = list(foreign.numbered_lines(path))
    assert lines == [(1, None), (2, GOOD), (3, None)]
    assert [n for n, _ in read_rows(path, {}, "skip").rows] == [2]
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 1: the line is longer than"):
        read_rows(path, {}, "refuse")


def test_a_sparse_file_of_64_gb_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(64 << 30)
    with pytest.raises(ConfigError, match="larger than 32 MB"):
        read_text(path)
    with pytest.raises(ConfigError, match="larger than 32 MB"):
        read_json(path, "upstream")


def test_json_of_upstream_must_hold_the_texts_that_are_used(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    like = {"a": {"b": "", "c": "{context}"}}
    for content, said in (
        ('{"a": {"b": 1, "c": "{context}"}}', "no usable a.b"),
        ('{"a": {"b": "x", "c": "nowhere"}}', "no usable a.c"),
        ('{"a": []}', "no usable a.b"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("[]", "no JSON object"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=f"words.json .*{said}.*; get it again from upstream"):
            read_json(path, "upstream", like)
    path.write_text('{"a": {"b": "x", "c": "{context}", "d": 1}}')
    assert read_json(path, "upstream", like)["a"]["b"] == "x"


@pytest.mark.parametrize("code", ["-" * 100_000, "(" * 300, "gpt4_templates = 3", "gpt4_templates = {'passkey': 1}"])
def test_upstreams_python_file_may_hold_anything(tmp_path: Path, code: str) -> None:
    path = tmp_path / "prompt.py"
    path.write_text(code)
    with pytest.raises(ConfigError, match=r"prompt\.py holds no templates of gpt4"):
        upstream_templates(path, "gpt4")


def test_what_math_find_asks_for_is_found_in_one_pass() -> None:
    check_row("math_find", {"input": "The largest number of", "answer": 3})
    start = time.perf_counter()
    with pytest.raises(ValueError, match="which number"):
        check_row("math_find", {"input": "The" * 300_000, "answer": 3})
    assert time.perf_counter() - start < 5


def test_an_id_of_a_text_is_a_number_or_a_short_text() -> None:
    check = new_row(["text"])
    check({"text": "x", "id": "\x1b[31m"})  # kept as it is; printing makes it harmless
    for id in ([1], True, 1.5, "i" * 1001):
        with pytest.raises(ValueError, match="'id' is not"):
            check({"text": "x", "id": id})


# --- what is written ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-", "=", "-1_0", "+inf"]
)
def test_no_text_becomes_a_formula(text: str) -> None:
    out = io.StringIO(newline="")
    foreign.CsvWriter(out).writerow([text, "plain"])
    assert next(csv.reader(io.StringIO(out.getvalue(), newline=""))) == ["'" + text, "plain"]


@pytest.mark.parametrize("value", [-0.5, "-0.5", "+1e-3", "-3", None, True, "", "a=b", "1-2"])
def test_numbers_and_harmless_texts_stay_as_they_are(value: object) -> None:
    assert foreign.cell(value) == value


def test_every_csv_of_ours_goes_through_the_same_function() -> None:
    root = Path(__file__).resolve().parents[2]
    files = [file for room in ("engine", "evals", "tasks", "results", "plots") for file in (root / room).rglob("*.py")]
    direct = {f.name for f in files if "csv.writer(" in f.read_text() or "DictWriter" in f.read_text()}
    assert direct == {"foreign.py"}


# --- long texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prose", "one word", "blanks"])
def test_the_middle_of_a_huge_text_is_cut_before_all_of_it_is_tokenised(kind: str, monkeypatch) -> None:  # fmt: skip
    tokenizer = tiny_tokenizer(None, adds_bos=True)
    words = random.Random(0).choices(["times", "wisdom", "it was", "best", "worst"], k=4000)
    text = {"prose": " ".join(words), "one word": "x" * 20_000, "blanks": " " * 20_000}[kind]
    wanted = prompt.middle_truncate(tokenizer, text, 20)
    lengths: list[int] = []
    encode = type(tokenizer).encode

    def counting(self, text, *args, **more):
        lengths.append(len(text))
        return encode(self, text, *args, **more)

    monkeypatch.setattr(type(tokenizer), "encode", counting)
    monkeypatch.setattr(prompt, "LONG", 5000)
    monkeypatch.setattr(prompt, "PIECE", 1000)
    cut, before, after = prompt.middle_truncate(tokenizer, text, 20)
    assert (cut, after) == (wanted[0], wanted[2])
    assert abs(before - wanted[1]) <= 3 * (len(text) // 1000 + 2)  # a few tokens a seam
    assert max(lengths) <= 2 * prompt.CHARACTERS * 20


def test_a_question_of_gsm8k_is_no_book() -> None:
    with pytest.raises(ValueError, match="'question' has 100001 characters"):
        object.__new__(Gsm8k).check_row("test", {"question": "q" * 100_001, "answer": "7"})


def test_the_haystack_is_tokenised_as_far_as_it_is_needed(tmp_path: Path, monkeypatch) -> None:
    prose = " ".join(random.Random(0).choices(["times.", "wisdom", "it was", "best"], k=60_000))
    tokenizer = tiny_tokenizer(None, adds_bos=False)
    lengths: list[int] = []
    encode = type(tokenizer).encode

    def counting(self, text, *args, **more):
        lengths.append(len(text))
        return encode(self, text, *args, **more)

    monkeypatch.setattr(type(tokenizer), "encode", counting)

    class Haystack:
        def haystack(self) -> str:
            return prose

    cells = object.__new__(needle.Cells)
    cells.tokenizer, cells.task = tokenizer, Haystack()  # type: ignore[assignment]
    found = cells._haystack_ids(300)
    assert found == encode(tokenizer, prose, add_special_tokens=False)[:300]
    assert max(lengths) <= 300 * needle.CHARACTERS
