"""Pages of docs/ and all files beside them are what the command makes of the answers that are committed there."""

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvbench.plots import pages
from kvbench.plots.pages import asked as pages_of
from kvbench.plots.pages.__main__ import main
from kvbench.plots.pages.asked import HERE, HIDDEN, SHOWN
from kvbench.plots.pages.read import COLUMNS, KEPT, SOURCES, keep, load
from kvbench.plots.pages.write import PAGES
from kvbench.tests.plots import made_runs
from kvbench.tests.plots.made_pages import DOCS, answers, frame_of

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
        assert [*mine["score"].isna()].count(True) == 0


def test_labels_say_what_a_variant_is() -> None:
    frame = pages.kept("results")
    rows = zip(frame["protocol"], frame["method"], frame["method_label"], strict=True)
    label = {(protocol, method): label for protocol, method, label in rows}
    assert label[SHOWN, "kvzip"] == "KVzip, whole prompt" and label[HIDDEN, "kvzip"] == "KVzip"
    assert label[HIDDEN, "keydiff"] == "KeyDiff (simulated blocks)" and label[HIDDEN, "kivi"] == "KIVI 2 bit"


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
    assert {path.name for path in tmp_path.glob("*.md")} == {"results.md"}
    beside = {path.name for path in (tmp_path / "results").iterdir()}
    assert beside == {KEPT, "budgets.md", "budgets.svg", "budgets.csv", "kept.svg"}


def test_answers_of_runs_are_kept_and_change_every_page_that_they_stand_on(tmp_path: Path) -> None:
    out, n = tmp_path / "docs", 60
    for i, (method, memory) in enumerate((("full", None), ("snapkv", "1/4"), ("random", "1/4"))):
        rows = [{"score": float(j < n - 20 * i), "prompt_tokens": 838} for j in range(n)]
        asked = pages_of.page("register").sets["needle"]
        made_runs.write(tmp_path / f"runs-{i}", method, asked.task, rows, memory=memory, ratio=None, comm="0", seed=1,
                        label=method,
                        task_params=dict(asked.where), model=asked.model)  # fmt: skip
        assert main(["register", str(tmp_path / f"runs-{i}"), "--out", str(out)]) == 0
    assert {path.name for path in out.glob("*.md")} == {"register.md"}
    assert (
        "| [A needle of seven digits](results/needle.md) | finding | `smollm2-135m` | 60 of 60 |"
        in (out / "register.md").read_text()
    )
    assert len(load(out / "register" / KEPT)) == 3 * n


@pytest.mark.parametrize(
    "words",
    [[], ["results"], ["register"], ["no-such-page"]],
    ids=lambda words: " ".join(words) or "all",
)
def test_answers_that_are_not_there_are_one_sentence(words: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main([*words, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvbench.plots.pages: ") and said.count("\n") == 1


@pytest.mark.parametrize("name", SOURCES)
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
