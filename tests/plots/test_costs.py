import csv
import json
from pathlib import Path
from typing import Any

import pytest

from plots.costs import main, records, sheets
from plots.read import Run, load
from plots.tables import command as tables
from results import sheet
from tests.plots.made_runs import timing, timings, write

ASKED: dict[str, Any] = {"task_params": {"n_new": 32}, "metric": "tpot_ratio"}


def markdown(runs: list[Run]) -> str:
    return "\n".join(map(sheet.markdown, sheets(runs)))


def cells(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_has_what_was_timed_length_by_length(tmp_path: Path) -> None:
    timings(tmp_path)
    text = markdown(load(tmp_path))
    assert "4,000, 8,000, 16,000 tokens · batch of 1" in text and "EMBEDDED DATA" in text
    found = cells(text, "SnapKV (C)")
    times = [timing(n, 0.7) for n in (4000, 8000, 16_000)]
    assert found[2].split() == [f"{each['tt2t_s']:.2f}" for each in times]
    assert found[4].split() == [f"{1e3 * each['tpot_s']:.1f}" for each in times]
    assert found[6] == f"{times[2]['tpot_s'] / times[0]['tpot_s']:.2f}"
    assert found[7] == "2.0 2.0 2.0"
    # Runs of one method that differ in more than the budget say so.
    assert cells(text, "PQCache iterations=10 cache.tokens=2048")[2:3] != found[2:3]
    assert text.index("| Full |") < text.index("| PQCache")


def test_what_did_not_fit_is_said(tmp_path: Path) -> None:
    def fields(length: int, **more: Any) -> dict[str, Any]:
        return {"metric": "tpot_ratio", "length": length, "batch": 1} | more

    rows: list[dict[str, Any]] = [
        {"score": 0.7, "fields": fields(4000, timing=timing(4000, 0.7)), "ledger": {"cache_hit_rate": 0.5}},
        {"score": None, "fields": fields(8000)},
    ]
    write(tmp_path, "h2o", "latency", rows, **ASKED)
    found = cells(markdown(load(tmp_path)), "H2O (C)")
    assert found[2].endswith(" oom") and found[6] == "-" and found[9] == "0.50 oom"


def test_the_csv_has_quartiles_and_every_sample(tmp_path: Path) -> None:
    timings(tmp_path)
    lines = list(csv.DictReader(sheet.as_csv(records(load(tmp_path))).splitlines()))
    assert len(lines) == 3 * 7
    for line in lines:
        low, high = (float(bound) for bound in line["tpot_s_q"].split())
        assert low < float(line["tpot_s"]) < high
    first = json.loads(next(tmp_path.glob("latency-full*/samples.jsonl")).read_text().splitlines()[0])
    assert float(lines[0]["tt2t_s"]) == first["timing"]["tt2t_s"]


def test_commands_write_it_or_say_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "task=latency" in capsys.readouterr().err
    timings(tmp_path)
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "| Full |" in capsys.readouterr().out
    # With the papers' tables it is written too, though here none of them can be.
    assert tables.main([str(tmp_path), "--out", str(tmp_path / "all")]) == 2
    assert (tmp_path / "all" / "costs.md").read_bytes() == (tmp_path / "out" / "costs.md").read_bytes()
