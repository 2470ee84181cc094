"""Pages of docs/ and all files beside them are what the command makes of the answers that are committed there."""

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvbench.plots import pages
from kvbench.plots.pages.__main__ import main
from kvbench.plots.pages.asked import HERE
from kvbench.plots.pages.read import COLUMNS, KEPT, SOURCES, keep, load
from kvbench.plots.pages.write import PAGES
from kvbench.tests.plots import made_runs
from kvbench.tests.plots.made_pages import DOCS, answers, frame_of, losses

BESIDE = sorted(path.relative_to(DOCS) for name in SOURCES for path in (DOCS / name).iterdir())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything, made anew from the committed answers alone."""
    out = tmp_path_factory.mktemp("docs")
    for name in SOURCES:
        (out / name).mkdir()
        shutil.copy(DOCS / name / KEPT, out / name / KEPT)
    assert main(["--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_command_makes(name: str, made: Path) -> None:
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert (made / f"{name}.md").read_text(encoding="utf-8") == page, "make pages was not run"
    for link in re.findall(rf"\]\(((?:{'|'.join(SOURCES)})/[^)]+)\)", page):
        assert (DOCS / link).is_file()


def test_the_files_beside_pages_are_those_that_the_command_makes(made: Path) -> None:
    assert sorted(path.relative_to(made) for name in SOURCES for path in (made / name).iterdir()) == BESIDE
    for path in BESIDE:
        assert (made / path).read_bytes() == (DOCS / path).read_bytes(), path


@pytest.mark.parametrize("name", SOURCES)
def test_kept_answers_are_written_as_they_are_read(name: str, tmp_path: Path) -> None:
    kept = load(DOCS / name / KEPT)
    keep(tmp_path / KEPT, kept)
    assert (tmp_path / KEPT).read_bytes() == (DOCS / name / KEPT).read_bytes()
    assert {*kept} <= {*COLUMNS} and (DOCS / name / KEPT).stat().st_size < 500_000


def test_all_pages_answers_are_one_frame() -> None:
    found = pages.committed()
    assert {*found["page"]} == {*SOURCES} and [*found] == [*COLUMNS, "page"]
    for name in SOURCES:
        mine = pages.kept(name)
        assert len(mine) == (found["page"] == name).sum() == len(load(DOCS / name / KEPT))
        assert "" not in {*mine["sample"], *mine["method_label"]}
        assert mine[["score", *(key for key in mine if key.startswith("measures."))]].notna().sum(axis=1).eq(1).all()


def test_labels_say_what_a_variant_is() -> None:
    kept = {name: pages.kept(name) for name in SOURCES}
    label = {
        (name, protocol, method): label
        for name, frame in kept.items()
        for protocol, method, label in zip(frame["protocol"], frame["method"], frame["method_label"], strict=True)
    }
    shown, hidden = "full_prompt", "context_only"
    assert label["results", shown, "kvzip"] == "KVzip, whole prompt" and label["results", hidden, "kvzip"] == "KVzip"
    assert label["results", shown, "retroinfer"] == "RetroInfer (budget in the mean, 79 tokens a cluster)"
    assert label["results", shown, "kivi"] == "KIVI 2 bit"
    assert label["results", shown, "keydiff"] == "KeyDiff (simulated blocks)"
    assert (label["cited", shown, "quest"], label["cited", shown, "h2o"]) == ("Quest (matched)", "H2O (C)")
    assert label["cited", shown, "kvzip"] == "KVzip (C), whole prompt"


def test_no_python_of_pages_holds_prose() -> None:
    """Sentences stand in the templates and YAML files."""
    for path in HERE.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        texts = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
        ]
        assert not [text for text in texts if re.search(r"[a-z]\. [A-Z]", text)], path


# --- the command ---------------------------------------------------------------------------------


def test_somebodys_own_answers_make_the_pages_that_they_are_for(tmp_path: Path) -> None:
    keep(tmp_path / "results" / KEPT, answers())
    assert main(["--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.md")} == {"results.md", "which-method.md"}
    text = (tmp_path / "which-method.md").read_text()
    assert "| PQCache | host memory |" in text and "cited now" not in text
    assert "## On the tasks that are cited now" in (DOCS / "which-method.md").read_text()


def test_answers_of_runs_are_kept_and_change_every_page_that_they_stand_on(tmp_path: Path) -> None:
    out, task = tmp_path / "docs", {"style": "own", "needles": 1}
    for i, (method, memory) in enumerate((("full", None), ("snapkv", "1/4"), ("h2o", "1/4"))):
        rows = [{"score": float(i < 60 - 20 * (method == "h2o")), "prompt_tokens": 838} for i in range(60)]
        runs = tmp_path / f"runs-{i}"
        made_runs.write(runs, method, "needle", rows, memory=memory, ratio=None, task_params=task)
        assert main(["results", str(runs), "--out", str(out)]) == 0
    assert {path.name for path in out.glob("*.md")} == {"results.md", "which-method.md"}
    assert sorted(path.name for path in (out / "results").iterdir()) == ["needle.csv", "needle.svg", KEPT]
    text = (out / "results.md").read_text()
    assert "| Full | 100 |" in text and "| H2O (C) | 67 (53 to 78) * |" in text and "prompts of 838 tokens" in text
    assert len(load(out / "results" / KEPT)) == 3 * 60


@pytest.mark.parametrize(
    "words",
    [[], ["results"], ["cited"], ["which-method"], ["no-such-page"]],
    ids=lambda words: " ".join(words) or "all",
)
def test_answers_that_are_not_there_are_one_sentence(words: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main([*words, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvbench.plots.pages: ") and said.count("\n") == 1


@pytest.mark.parametrize("name", ["results", "cited", "register"])
@pytest.mark.parametrize("text", [None, "lr: 0.1\n", "[1, 2]\n"])
def test_a_folder_without_runs_leaves_what_is_kept(
    name: str, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, runs = tmp_path / "docs", tmp_path / "runs"
    keep(out / name / KEPT, frame_of([{"set": "docs", "id": "a", "method": "full", "score": 1}]))
    before = (out / name / KEPT).read_bytes()
    runs.mkdir()
    if text is not None:
        (runs / "config.yaml").write_text(text)
    assert main([name, str(runs), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert ("holds no sample of a run" in said or "is no mapping" in said) and said.count("\n") == 1
    assert (out / name / KEPT).read_bytes() == before


def test_a_page_of_cited_tasks_says_which_were_not_asked(tmp_path: Path) -> None:
    keep(tmp_path / "cited" / KEPT, losses({"full": ([0.5, 0.6], "Full"), "snapkv": ([0.6, 0.7], "SnapKV (C)")}))
    assert main(["cited", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "cited.md").read_text().count("Nothing was asked yet.") == 6
