"""`--list` has a line for everything that can stand on a command line."""

import shutil
import sys
from pathlib import Path

import pytest

import kvbench.tasks
from kvbench.engine import terminal
from kvbench.engine.errors import ConfigError
from kvbench.evals.overrides import CONF
from kvbench.evals.screen import listing
from kvbench.evals.screen.fits import shipped
from kvbench.evals.screen.listing import main
from kvbench.results.names import own_methods, own_tasks
from kvbench.tests.test_start_up import MOST_CPU_SECONDS, WRONG, python


def test_each_method_has_its_line_and_its_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = {line.split(" ")[0]: line for line in lines if line}
    assert own_methods().keys() <= first.keys()
    assert "SnapKV (Li et al., 2024)" in first["snapkv"] and "kvpress, paper" in first["snapkv"]
    assert "drop after the prompt, by its last queries" in lines


@pytest.mark.parametrize("name", [*sorted(own_methods()), "snapkv_paper"])
def test_a_method_has_its_keys_with_default_choices_and_what_they_do(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["methods", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1 and lines[1].split()[:2] == ["key", "default"]
    if name == "snapkv_paper":
        assert any(line.split()[:4] == ["pooling", "max", "max", "or"] for line in lines)


def test_no_method_has_no_keys() -> None:
    with pytest.raises(ConfigError, match="no method 'snapkw'; did you mean 'snapkv'"):
        main(["methods", "snapkw"])


def test_each_model_has_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = {line.split(" ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert {one.name for one in shipped()} <= lines.keys()
    assert lines["llama-3.1-8b-instruct"][2:] == ["32", "32", "/", "8", "131,072"]


def test_each_task_has_its_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    said = capsys.readouterr().out
    assert own_tasks().keys() <= {line.split(" ")[0] for line in said.splitlines()}
    assert "a sentence hidden at a known depth of a text" in said and "licence MIT" in said
    assert "cannot be asked" not in said


TASK = """
from dataclasses import dataclass
from kvbench.tasks.base import Task

class Mine(Task):
    name, version = "mine", 1

    @dataclass(frozen=True)
    class Params:
        path: str

    def __init__(self, {arguments}): ...
    def check(self, shape): ...
    def samples(self, tokenizer): ...
"""


@pytest.mark.parametrize(
    ("file", "tree", "says"),
    [
        (
            TASK.format(arguments="params"),
            "path: x",
            "too many positional arguments); its __init__ takes (self, params,",
        ),
        (TASK.format(arguments="params, data_dir, seed"), "path: ???", "task.path is not given; add task.path=…"),
        (TASK.format(arguments="params, data_dir, seed"), "paht: x", "no task key 'paht'"),
        ("def broken(:", "path: x", "SyntaxError: "),
        ("import sys; sys.exit(3)", "path: x", "SystemExit: 3"),
        (None, "path: x", "is no Task of kvbench.tasks"),
        ("", "- a", "no task is chosen"),
        ("", "[", "ParserError: "),
    ],
    ids=["another __init__", "a missing value", "another key", "no Python", "an end", "no file", "a list", "no YAML"],
)
def test_a_task_that_cannot_be_asked_has_a_line_beside_the_others(
    file: str | None, tree: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = shutil.copytree(CONF / "task", tmp_path / "conf" / "task")
    (folder / "mine.yaml").write_text(f"_target_: kvbench.tasks.mine.Mine\n{tree}\n" if tree[0].isalpha() else tree)
    if file is not None:
        (tmp_path / "mine.py").write_text(file)
    monkeypatch.setattr(kvbench.tasks, "__path__", [*kvbench.tasks.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "kvbench.tasks.mine", raising=False)
    monkeypatch.setattr(listing, "CONF", tmp_path / "conf")
    assert main(["tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert own_tasks().keys() <= {line.split(" ")[0] for line in lines}
    (line,) = [line for line in lines if "mine" in line]
    assert line.startswith("task=mine cannot be asked: ") and says in line


@pytest.mark.parametrize("words", [["tasks"], ["methods"], ["models"]], ids=" ".join)
@pytest.mark.parametrize("columns", [None, 120])
def test_no_list_is_wider_than_the_terminal(
    words: list[str], columns: int | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns is not None:
        monkeypatch.setattr(terminal, "WIDTH", columns)  # as of a terminal of this width
    assert main(words) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= (columns or 100)
    assert "…" not in said.replace("task.path=…", "")


@pytest.mark.parametrize("words", [["tasks"], ["methods"], ["models"]], ids=" ".join)
def test_a_list_is_there_at_once(words: list[str]) -> None:
    said = python(WRONG, "--list", *words).splitlines()
    code, seconds, *imported = said[-1].split()
    assert (code, imported) == ("0", [])
    assert float(seconds) < MOST_CPU_SECONDS


@pytest.mark.parametrize("words", [[], ["tasks", "needle"], ["metods"]])
def test_another_list_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"a list is one of tasks, methods, models|no list .metods.; did you mean"):
        main(words)
