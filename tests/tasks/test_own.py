"""Tasks in files of the user's own: rows with a YAML file, or a class in one Python file."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.evals.overrides import check_overrides
from kvbench.evals.rescore import main as rescore
from kvbench.evals.settings import Settings, from_words, load_class
from kvbench.plots.site.origin import words as words_of
from kvbench.plots.table import main as table
from kvbench.results import read_config, read_runs, read_samples
from kvbench.results.names import ROOT
from kvbench.run import main
from kvbench.tasks.own import task as own
from kvbench.tasks.own.scorers import SCORERS
from kvbench.tasks.own.task import OwnTask
from kvbench.tests.task_conformance import SHAPE
from kvbench.tests.tiny_run import example_task, save_tiny

GOOD: dict[str, Any] = {"rows": "mine.jsonl", "context": "{text}\n", "references": "answer", "score": "contains"}
ROW: dict[str, Any] = {"text": "It is red.", "answer": "red", "meta": {"title": "Colours"}}


def write(folder: Path, lines: list[Any] | None = None, **changes: Any) -> Path:
    (folder / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lines or [ROW]))
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in (GOOD | changes).items() if v != "LEFT OUT"}))
    return path


def made(path: Path, *words: str) -> OwnTask:
    asked = from_words([f"task={path}", *words])
    kind = load_class(asked.task)
    task = kind(build_params(kind, asked.task.params, "task"), None, 0)
    task.check(SHAPE)
    return task


def refused(path: Path, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        made(path, *words)
    return str(caught.value)


def test_the_pages_commands_run_and_print_its_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, page = example_task(tmp_path / "path" / "to"), (ROOT / "docs" / "adding-a-task.md").read_text()
    (command,) = re.findall(r"^kvbench run (.* task=\S+notices\.yaml .*)$", page, re.MULTILINE)
    words = command.replace("path/to/notices.yaml", str(files["notices.yaml"])).split()
    assert main([*words, f"out={tmp_path / 'runs'}"]) == 0
    capsys.readouterr()
    assert table([str(tmp_path / "runs"), "--format", "markdown"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n| {name} | " in printed for name in ("Full", "SnapKV (C)", "Random tokens (C)"))


def test_the_page_names_every_key_and_every_scorer() -> None:
    page = (ROOT / "docs" / "adding-a-task.md").read_text()
    named = {name for line in page.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)}
    assert {*SCORERS, *(field.name for field in fields(own.Params))} <= named
    assert len(page.split()) <= 900


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_both_files_identify_a_run_and_the_task_goes_by_its_files_name(model: Path, tmp_path: Path) -> None:
    path, out = write(tmp_path, question="What colour?", licence="CC0"), tmp_path / "out"
    words = ["-m", "method=full,snapkv", "ratio=0.5,0.7", f"model={model}", "dtype=float32", "device=cpu", f"out={out}"]
    assert main([*words, f"task={path}", "task.max_new_tokens=4"]) == 0
    runs = read_runs(out)
    assert len(runs) == 3 and {result.task for _, result in runs} == {"mine"}
    folder, result = runs[0]
    assert folder.name.startswith("mine-") and result.data_source == "local"
    assert result.notes[0] == "licence: CC0"
    config = read_config(folder)
    assert config["task"]["file"] == "mine.yaml" and config["task"]["params"]["max_new_tokens"] == 4
    assert len(config["task"]["digest"]) == len(config["data_digest"]) == 16
    assert [word for word in words_of(config) if word.startswith("task")][:2] == [
        "task=mine.yaml",
        "task.rows=mine.jsonl",
    ]
    assert rescore([str(folder)]) == 2  # the file is not in the folder
    write(tmp_path, [ROW, ROW], question="What colour?", licence="CC0")  # other rows under the same name
    assert main([*words, f"task={path}", "task.max_new_tokens=4", "limit=1", "offset=1"]) == 0
    assert len(read_runs(out)) == 6
    assert {row.id for folder, _ in read_runs(out) for row in read_samples(folder)} == {"1", "2"}


def test_an_edited_file_is_another_run_and_a_worker_refuses_it(tmp_path: Path) -> None:
    path = write(tmp_path)
    before = from_words([f"task={path}"])
    assert load_class(before.task) is load_class(before.task), "cells with one class share their samples"
    write(tmp_path, question="What?")
    assert identity(from_words([f"task={path}"])) != identity(before)
    with pytest.raises(ConfigError, match="is not what it was when the command was given"):
        load_class(before.task)


def identity(settings: Settings) -> Any:
    return settings.resolved()["task"]


def test_templates_take_fields_lists_and_what_only_looks_like_one(tmp_path: Path) -> None:
    row = ROW | {"text": ["One.", "Two ${x}."], "n": 3, "a.b": "dotted"}
    path = write(tmp_path, [row], context='{"k": {text}} ${n} {a.b}', question="On {meta.title}: {n}?", references="n")
    (sample,) = [*made(path).samples(None)]
    assert sample.context == '{"k": One.\nTwo ${x}.} $3 dotted'
    assert (sample.question, sample.references, sample.id) == ("On Colours: 3?", ("3",), "1")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"score": "contain"}, "no task.score 'contain'; did you mean 'contains' or 'contains_all'? (all:"),
        ({"contxt": "x"}, "mine.yaml: no key of a task 'contxt'; did you mean 'context'?"),
        ({"score": "LEFT OUT", "rows": "LEFT OUT"}, "mine.yaml has no rows and no score; see docs/adding-a-task.md"),
        ({"references": "anwser"}, "mine.jsonl, line 1: task.references: no field 'anwser'; did you mean 'answer'?"),
        ({"context": "{txt}"}, "mine.jsonl, line 1: task.context: no field 'txt'; did you mean 'text'?"),
        ({"question": "{meta.titel}"}, "task.question: no field 'meta.titel'; did you mean"),
        ({"references": "meta"}, "field 'meta', which task.references names, is no text, no number and no list"),
        ({"context": "words"}, "task.context='words' names no field of the rows; write one, like {text}"),
        ({"score": "number"}, "line 1: field 'answer' is 'red', in which task.score=number finds nothing"),
        ({"score": "choice"}, "line 1: field 'answer' is 'red', in which task.score=choice finds nothing"),
        ({"rows": "none.jsonl"}, "none.jsonl cannot be read (No such file or directory)"),
        ({"rows": "org/name"}, "task.rows=org/name is a dataset of the hub, which may change; give task.revision="),
        ({"max_new_tokens": 0}, "task.max_new_tokens=0"),
        ({"rows": "mine.csv"}, "task.rows=mine.csv is no file of rows by its name; give a .jsonl file, such as pandas"),
        ({"rows": "mine"}, "task.rows=mine is no file of rows by its name"),
        ({"context": {"text": None}}, "mine.yaml: context begins with a brace, which means something to YAML; put it"),
        ({"question": ["x"]}, "task.question=[x] is not a text"),
        ({"name": "needle"}, "has the name of another task, needle; rename it"),
        ({"name": "a b"}, "would be called 'a b', which folders cannot be named by; rename it"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_file_is_a_sentence(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refused(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rows: [", "mine.yaml is no YAML ("),
        ("- rows", "mine.yaml holds no task; write the keys rows, context, references, score"),
        ("", "mine.yaml: the file is empty"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert says in refused(tmp_path / "mine.yaml")


def test_bad_rows_are_named_and_may_be_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, [ROW, {"text": "", "answer": "red"}, {"text": "x", "answer": []}])
    assert "mine.jsonl, line 2: field 'text', which task.context names, is empty" in refused(path)
    task = made(path, "task.on_bad_row=skip")
    assert [sample.id for sample in task.samples(None)] == ["1"]
    assert len([note for note in task.notes if note.startswith("row skipped: ")]) == 2


def test_rows_of_the_hub_are_kept_by_their_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = list[Any]()

    def load(*words: Any, **more: Any) -> list[Any]:
        asked.append((words, more))
        return [ROW]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path / "cache"))
    path = write(tmp_path, rows="org/name", revision="abc", split="validation")
    task = made(path)
    assert (task.data_source, task.dataset, len(task.samples(None))) == ("hub", "org/name/validation", 1)
    assert made(path).data_digest == task.data_digest
    assert asked == [(("org/name", None), {"revision": "abc", "split": "validation"})], "once"

    def fail(*words: Any, **more: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert "task.rows=org/name cannot be loaded (no network); check its name" in refused(path, "task.revision=abd")


@pytest.mark.parametrize(
    ("score", "answer", "references", "worth"),
    [
        ("exact", " The Red.\n", ["blue", "red"], 1),
        ("exact", "red one", ["red"], 0),
        ("contains", "it is RED", ["red"], 1),
        ("contains_all", "red and blue", ["red", "green"], 0.5),
        ("f1", "the red house", ["red"], 2 / 3),
        ("rouge", "a red house", ["a red house"], 1),
        ("choice", "I think that the answer is (B).", ["B"], 1),
        ("choice", "A cat.\nB", ["B"], 1),
        ("choice", "**C**", ["(C)"], 1),
        ("choice", "none of them", ["B"], 0),
        ("number", "12 + 30 = 1,042", ["1042"], 1),
        ("number", "no", ["0"], 0),
        ("code", "x = 1\ny", ["x = 1"], 1),
    ],
)
def test_scorers(score: str, answer: str, references: list[str], worth: float) -> None:
    assert SCORERS[score].of(answer, references) == pytest.approx(worth)


def test_a_task_in_a_python_file_runs_under_the_files_name(model: Path, tmp_path: Path) -> None:
    path, out = example_task(tmp_path)["phone_book.py"], tmp_path / "out"
    words = [
        "method=full",
        f"model={model}",
        "dtype=float32",
        "device=cpu",
        f"out={out}",
        "task.rows=2",
        "task.entries=9",
    ]
    assert main([*words, f"task={path}"]) == 0
    ((folder, result),) = read_runs(out)
    config = read_config(folder)["task"]
    assert (result.task, config["params"]) == ("phone_book", {"entries": 9, "rows": 2})
    assert config.keys() == {"name", "params", "digest"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "mine.py holds no task; write a class that inherits from Task (docs/adding-a-task.md)"),
        ("from kvbench.tasks.base import Task\nclass Mine(Task): pass", "Mine of "),
    ],
)
def test_a_python_file_without_a_whole_task_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        check_overrides([f"task={tmp_path / 'mine.py'}"])
    assert says in str(caught.value)
