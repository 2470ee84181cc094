"""Folders that earlier code wrote still make tables and a report."""

from pathlib import Path

import pytest

from kvbench.plots.read import load
from kvbench.plots.site import report
from kvbench.plots.site.overview import overview
from kvbench.plots.tables import command as tables

RECORDED = Path(__file__).parents[1] / "results" / "recorded"


def test_a_recorded_folder_is_tabulated_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = load(RECORDED)
    assert (run.method, run.result.n_samples, len(run.rows)) == ("snapkv", 3, 3)
    assert len(run.ledger()["step"]) > 0
    assert report.main([str(RECORDED), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 90_000
    (told,) = overview([run], RECORDED)["runs"]
    assert told["label"] == "SnapKV (C)"
    tables.main([str(RECORDED), "--out", str(tmp_path / "tables")])
    assert "left out" not in capsys.readouterr().err
