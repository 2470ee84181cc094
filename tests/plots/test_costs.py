import csv
import json
from pathlib import Path
from typing import Any

import pytest
from pandas import DataFrame

from kvbench.plots.costs import AT_ONCE, main, records, sheets
from kvbench.plots.read import load
from kvbench.plots.site.overview import overview
from kvbench.plots.tables import command as tables
from kvbench.plots.tables.words import samples_below
from kvbench.results import sheet
from kvbench.tests.plots.made_runs import timing, timings, write

HEADS = ["method", "budget", "tokens", *(head for head, *_ in AT_ONCE)]
ASKED: dict[str, Any] = {"task_params": {"n_new": 32}, "metric": "tpot_ratio"}


def markdown(samples: DataFrame) -> str:
    return "\n".join(map(sheet.markdown, sheets(samples)))


def csv_lines(root: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(sheet.as_csv(records(samples_below(root))).splitlines()))


def cells(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_has_what_was_timed_length_by_length(tmp_path: Path) -> None:
    timings(tmp_path)
    text = markdown(samples_below(tmp_path))
    assert all(made.heads != HEADS for made in sheets(samples_below(tmp_path))), "nobody asked how many requests fit"
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
    found = cells(markdown(samples_below(tmp_path)), "H2O (C)")
    assert found[2].endswith(" oom") and found[6] == "-" and found[9] == "0.50 oom"


def at_once(root: Path) -> None:
    """Runs at a fixed memory: batches of 1 and 32, of which some fit."""

    def rows(request: int, largest: tuple[int, int], tokens: float, ratio: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for length, n in zip((4000, 8000), largest, strict=True):
            counted: dict[str, Any] = {
                "request_bytes": request * length,
                "prefill_bytes": 50_000 * length,
                "largest_batch": n,
            }
            counted |= {"weight_bytes": 270_000_000, "batch_run": min(n, 64), "tokens_per_s_at_largest": tokens}
            counted |= {"throughput_ratio": ratio, "batch_bound": "task.most_rows" if n > 64 else None}
            for batch in (1, 32):
                fields: dict[str, Any] = {"metric": "tpot_ratio", "length": length, "batch": batch}
                if batch <= n:
                    fields["timing"] = timing(length, 1.0) | counted
                found.append({"score": 1.0 if batch <= n else None, "prompt_tokens": length, "fields": fields})
        return found

    asked: dict[str, Any] = ASKED | {"task_params": {"n_new": 32, "memory_gb": 1.0}}
    write(root, "full", "latency", rows(46_080, (8, 0), 30.25, 1.0), ratio="1", **asked)
    write(root, "snapkv", "latency", rows(2_000, (80, 40), 55.5, 1.835), **asked)


def test_a_second_table_says_how_many_requests_fit(tmp_path: Path) -> None:
    at_once(tmp_path)
    made = sheets(samples_below(tmp_path))
    assert [sheet.heads[0] for sheet in made] == ["method"] * 3 and made[2].heads == HEADS
    assert "requests at once in 1 GB, of which weights take 0.27 GB" in made[2].about
    assert [[*map(str, row)] for row in made[2].rows] == [
        ["Full", "-", "4,000", "184.3", "200.0", "8", "8", "30.2", "1.00"],
        ["Full", "-", "8,000", "oom", "oom", "oom", "oom", "oom", "oom"],
        ["SnapKV (C)", "ratio 0.2", "4,000", "8.0", "200.0", "80", "64", "55.5", "1.83"],
        ["SnapKV (C)", "ratio 0.2", "8,000", "16.0", "400.0", "40", "40", "55.5", "1.83"],
    ]
    (line, *_) = [x for x in csv_lines(tmp_path) if x["batch"] == "32"]
    assert line["status"] == "oom" and line["largest_batch"] == ""
    lines = [x for x in csv_lines(tmp_path) if x["method"] == "snapkv"]
    assert {x["largest_batch"] for x in lines} == {"80", "40"} and lines[0]["batch_bound"] == "task.most_rows"


def test_the_report_says_how_many_requests_of_the_longest_prompt_fit(tmp_path: Path) -> None:
    at_once(tmp_path)
    told = {run["method"]: run["audit"] for run in overview(load(tmp_path), tmp_path)["runs"]}
    assert (told["snapkv"]["largest_batch"], told["snapkv"]["throughput_ratio"]) == (40, 1.835)
    assert told["full"]["largest_batch"] == 8, "nothing was run at 8,000 tokens"
    timings(tmp_path / "older")
    assert all("largest_batch" not in run["audit"] for run in overview(load(tmp_path / "older"), tmp_path)["runs"])


def test_the_csv_has_quartiles_and_every_sample(tmp_path: Path) -> None:
    timings(tmp_path)
    lines = csv_lines(tmp_path)
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
