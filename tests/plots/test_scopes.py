"""Both scopes side by side: which runs stand there, and what `make paper-tables` writes of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.plots import scopes
from kvbench.plots.read import Run, load
from kvbench.tests.tiny_run import run, save_tiny


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods in both scopes, and a third in one of them."""
    out = tmp_path_factory.mktemp("scopes")
    tiny = ["model=any", f"model.id={save_tiny(tmp_path_factory.mktemp('models') / 'tiny')}", "model.name=tiny"]
    for i, (method, scope) in enumerate(
        [("snapkv", "full_prompt"), ("snapkv", "context_only"), ("full", "full_prompt"), ("full", "context_only"),
         ("h2o", "full_prompt")]
    ):  # fmt: skip
        words = [f"method={method}", "ratio=0.5", f"compression_scope={scope}", "task=needle", "task.style=own", *tiny]
        run([*words, "task.source=embedded", "task.lengths=[300]", "task.depths=[50]"], out / str(i))
    return out


def test_a_table_has_runs_of_both_scopes_side_by_side(runs: Path) -> None:
    (sheet,) = scopes.tables(load(runs))
    assert {row for (row,) in sheet.rows} == {"Full", "SnapKV (C)"}
    assert {column[1] for column in sheet.columns} >= {"full_prompt", "context_only"}


def test_the_tables_are_written(runs: Path, tmp_path: Path) -> None:
    paths = scopes.write_tables(tmp_path / "tables", load(runs))
    assert [path.suffix for path in paths] == [".md", ".tex", ".csv"] and all(path.stat().st_size for path in paths)
    assert scopes.write_tables(tmp_path / "none", []) == []


def test_other_settings_are_no_pair(runs: Path) -> None:
    made = load(runs)
    one = next(run for run in made if run.result.protocol == "full_prompt" and run.method == "snapkv")
    other = changed(one, "seed", 7)
    assert scopes.in_both([one, other]) == []


def changed(run: Run, key: str, value: Any) -> Run:
    return replace(run, config={**run.config, key: value}, result=replace(run.result, protocol="context_only"))
