"""Text of others on the terminal and on pages: it is shown, and neither obeyed nor rendered."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.table import Table

from kvbench import checkout
from kvbench.engine import terminal
from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import EXTRAS, as_started, lacks
from kvbench.evals.screen.progress import Progress
from kvbench.evals.screen.table import print_table
from kvbench.plots import costs, turns
from kvbench.plots.comparison import compare, print_comparison
from kvbench.plots.table import main as table
from kvbench.results import RunResult
from kvbench.results.sheet import plain_markdown
from kvbench.tests.plots.made_runs import write

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("engine", "methods", "tasks", "results", "evals", "plots", "hydra_plugins")
FILES = [ROOT / "run.py", *(ROOT / "kvbench").glob("*.py"), *(f for room in ROOMS for f in (ROOT / room).rglob("*.py"))]
CLEAR = "\x1b[2J\x1b]0;title\x07"  # clears the screen and renames the window
HOSTILE = (
    CLEAR,
    "\x9b31m",  # the same sequences in one byte
    "a\rb",  # overwrites its line
    "a\x08\x08b",
    "\u202egnp.exe",  # turns the direction
    "\ud800",  # half a character
    "a\u2028b",
    "[red]markup[/red] :smile:",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[link](javascript:alert(1))",
    "a | b\n# heading",
    "`code`",
)


def is_harmless(text: str) -> bool:
    """Whether nothing in it could act on a terminal; ends of lines are what the printed lines have."""
    return all(c.isprintable() or c == "\n" for c in text)


def calls(file: Path) -> list[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [name for name in found if name in ("print", "Console") or name.endswith((".stdout.write", ".stderr.write"))]


def test_no_module_prints_but_the_one_that_escapes() -> None:
    assert [file for file in FILES if calls(file)] == [ROOT / "engine" / "terminal" / "__init__.py"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_line_obeys_nothing(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say("before", text, "behind")
    terminal.console().print(text, soft_wrap=True)
    view = Table(text)
    view.add_row(text)
    terminal.console(width=200).print(view)
    shown = capsys.readouterr().out
    assert is_harmless(shown)
    assert (shown.startswith("before ") and "markup" not in text) or "[red]markup[/red] :smile:" in shown


@pytest.mark.parametrize("line", ["one\ntwo\n", "a,b\r\nc,d\r\n", "a\tb"])
def test_ends_of_lines_and_tabs_stay(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say(line, end="")
    assert capsys.readouterr().out == line


def test_progress_obeys_no_sample(capsys: pytest.CaptureFixture[str]) -> None:
    for text in HOSTILE:
        with Progress(text, 2, 0) as shown:
            shown.reading(text, 10, 2)
            shown.sample_done(text, [])
            shown.say(text)
    found = capsys.readouterr().err
    assert found and is_harmless(found)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_sentence_on_wrong_input_obeys_no_template(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from kvbench import run

    assert run.refuse(ConfigError(f"the chat template refuses the prompt: {text}")) == 2
    assert is_harmless(capsys.readouterr().err)


def hostile_runs(root: Path, text: str) -> list[tuple[Path, RunResult]]:
    """Finished runs whose every text is hostile; half a character cannot stand in a file."""
    text = text.encode("utf-8", "replace").decode()
    return [
        write(
            root, method, "needle", [{"score": hit, "fields": {"turn": 1, "sample": "a", "dataset": text}}] * 3,
            ratio=ratio, model=text.replace("/", ""), label=f"{method}{text}", notes=[text],
        )
        for method, hit, ratio in (("full", 1.0, "1"), ("snapkv", 0.0, "1/10"))
    ]  # fmt: skip


@pytest.mark.parametrize("text", [text for text in HOSTILE if "/" not in text and "\n" not in text])
def test_results_of_others_are_shown_and_not_obeyed(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    done = hostile_runs(runs, text)
    print_table(done)
    print_comparison(compare([folder for folder, _ in done]))
    for kind in ("markdown", "latex", "csv", "html"):
        assert table([str(runs), "--format", kind]) == 0
    for page in (turns, costs):
        page.main([str(runs), "--out", str(out)])
    shown = capsys.readouterr()
    assert is_harmless(shown.out) and is_harmless(shown.err)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_page_renders_nothing_of_others(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    hostile_runs(runs, text.replace("/", "\\"))
    assert table([str(runs), "--rows", "method,dataset", "--columns", "budget", "--out", str(out)]) == 0
    turns.main([str(runs), "--out", str(out)])
    for page in (out / "table.md", out / "turns.md"):
        words = page.read_text(encoding="utf-8")
        assert is_harmless(words)
        assert not re.search(r"<|(?<!\\)\[", words), page
        heads = [line for line in words.splitlines() if line.startswith("#")]
        assert all(line.startswith("## ") for line in heads), heads


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_leaves_its_place_in_markdown(text: str) -> None:
    shown = plain_markdown(text)
    assert is_harmless(shown) and "\n" not in shown and "<" not in shown
    assert "|" not in shown.replace("\\|", "") and "[" not in shown.replace("\\[", "")


def test_the_commands_themselves_are_wrapped(tmp_path: Path) -> None:
    """As a user starts them: a result.json with escapes, and `plots.table` and `plots.site.report` on it."""
    folder, _ = hostile_runs(tmp_path / "runs", CLEAR)[0]
    assert "\\u001b" in json.dumps(json.loads((folder / "result.json").read_text()))
    for module in ("kvbench.plots.table", "kvbench.plots.site.report"):
        found = subprocess.run(
            [sys.executable, "-m", module, str(tmp_path / "runs")], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert is_harmless(found.stdout + found.stderr)


def test_sentences_name_the_commands_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout those of the checkout, behind `kvbench` its words, outside a checkout no make."""
    text = "python run.py --list methods, python run.py --check and python run.py x=1; run `make setup`"
    behind = "kvbench ls methods, kvbench check and kvbench run x=1; run `make setup`"
    for program, said in (("run.py", text), ("/bin/kvbench", behind), ("/x/kvbench/__main__.py", behind)):
        monkeypatch.setattr(sys, "argv", [program])
        assert as_started(text) == said
    monkeypatch.setattr(checkout, "ROOMS", frozenset())
    monkeypatch.setattr(sys, "argv", ["notebook"])
    assert as_started(text) == behind.replace("make setup", "pip install 'kvbench[demo,tasks]'")
    error = ModuleNotFoundError("no", name="wandb.sdk")
    assert lacks(error).endswith("has no wandb.sdk; pip install 'kvbench[wandb]'")
    assert lacks(ModuleNotFoundError("no", name="yaml")).endswith("has no yaml; pip install 'yaml'")


def test_every_extra_that_a_sentence_names_has_its_packages() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, names in EXTRAS.items():
        asked = {line.replace("-", "_") for line in extras[extra]}
        assert all(any(line.startswith(name) for line in asked) for name in names), extra
    assert {"demo", "tasks"} <= extras.keys()
