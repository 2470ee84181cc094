"""Methods inside a serving engine at the same memory: which rows share a table, what is marked, what is drawn."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.plots import serving
from kvbench.plots.read import load
from kvbench.results.served import FILE, groups, served, sheets
from kvbench.results.sheet import Sheet
from kvbench.tests.plots.made_runs import write

NOTE = "served by vLLM; on a CPU its times say nothing of a GPU's"
ALONE = ("as shipped", "with the method's restrictions", "method")


def figures(at_once: int, blocks: int, goodput: float | None) -> dict[str, Any]:
    times = {"p50": 0.5, "p90": 1.0, "p99": 1.5}
    limits = {} if goodput is None else {"ttft": 500, "tpot": 50}
    return {
        "requests": 8, "steps": 40, "at_once": at_once, "preemptions": 1, "blocks": blocks, "blocks_mean": 20.25,
        "blocks_over_time": [10, 30, 20], "tokens_per_s": 64.0, "ttft_s": times, "tpot_s": times, "score": 0.75,
        "prompt_tokens_cached": 1234, "bench": {"request_goodput": goodput, "goodput": limits},
    }  # fmt: skip


def run_of(root: Path, method: str, at_once: int, blocks: int = 59, goodput: float | None = 0.5, **params: Any) -> None:
    keys = {"rung": "auto", "rate": None, "blocks": 60} | params
    ratio = "1" if method == "full" else "1/5"
    folder, _ = write(root, method, "serving", [{"score": 0.75}], task_params=keys, notes=[NOTE], ratio=ratio)
    names = ALONE if method == "full" else ALONE[2:]
    (folder / FILE).write_text(json.dumps({name: figures(at_once, blocks, goodput) for name in names}))


def tables(root: Path) -> list[Sheet]:
    return sheets([(run.folder, run.result) for run in load(root)])


def test_full_attention_has_three_rows_and_stands_first(tmp_path: Path) -> None:
    run_of(tmp_path, "snapkv", 8)
    run_of(tmp_path, "full", 4)
    (sheet,) = tables(tmp_path)
    heads = [str(head).replace("\n", " ") for head in sheet.heads]
    rows = [dict(zip(heads, row, strict=True)) for row in sheet.rows]
    assert [row["method"] for row in rows] == [*(f"Full, {name}" for name in ALONE[:2]), "Full", "SnapKV (C)"]
    assert rows[3] == {
        "method": "SnapKV (C)", "budget": "ratio 0.2", "requests at once": "8", "goodput, requests/s": "0.500",
        "score": "75.0", "blocks": "59", "in use, mean": "20.2", "preempted": "1", "steps": "40",
        "prompt tokens from cache": "1,234", "answer tokens/s": "64.0", "TTFT ms, median (p99)": "500 (1,500)",
        "TPOT ms, median (p99)": "500 (1,500)",
    }  # fmt: skip
    limits = "first token within 500 ms and time per token after it within 50 ms"
    assert sheet.notes == [f"goodput counts requests with {limits}", NOTE]


def test_a_pool_that_is_not_the_first_row_s_is_marked(tmp_path: Path) -> None:
    run_of(tmp_path, "full", 4)
    run_of(tmp_path, "snapkv", 8, blocks=118)
    (sheet,) = tables(tmp_path)
    column = [str(head) for head in sheet.heads].index("blocks")
    assert [row[column] for row in sheet.rows] == ["59", "59", "59", "118 *"]
    assert "* its pool is not the first row's: not at the same memory" in sheet.notes


def test_rows_with_other_memory_have_a_table_of_their_own_and_other_loads_a_column(tmp_path: Path) -> None:
    run_of(tmp_path, "snapkv", 8)
    run_of(tmp_path, "snapkv", 8, rate=2.0)
    folder, _ = write(tmp_path, "h2o", "serving", [{"score": 1.0}], task_params={"rate": None, "blocks": 30})
    (folder / FILE).write_text(json.dumps({"method": figures(3, 29, None)}))
    first, second = sorted(tables(tmp_path), key=lambda sheet: -len(sheet.rows))
    assert "rate" in first.heads and "rate" not in second.heads
    assert any("without a limit" in note for note in second.notes)


def test_the_page_has_the_table_the_pool_and_goodput_by_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate, goodput in ((1.0, 1.0), (4.0, 2.5)):
        run_of(tmp_path / "runs", "full", 4, goodput=goodput / 2, rate=rate)
        run_of(tmp_path / "runs", "snapkv", 8, goodput=goodput, rate=rate)
    assert serving.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "Served with 59 blocks" in said and "Full, as shipped" in said
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made >= {"serving.md", "serving.csv", "pool-1.png", "pool-1.svg", "goodput-1.png"}
    lines = [*csv.DictReader((tmp_path / "out" / "serving.csv").read_text().splitlines())]
    assert len(lines) == 8 and {line["request_goodput"] for line in lines} == {"0.5", "1.0", "1.25", "2.5"}


def test_without_served_runs_or_with_a_damaged_file_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "full", "needle", [{"score": 1.0}], ratio="1")
    assert serving.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "is of task=serving" in capsys.readouterr().err
    run_of(tmp_path, "snapkv", 8)
    (path,) = tmp_path.glob(f"*/{FILE}")
    for text in ("{", '{"method": {"steps": 3}}', '{"method": 3}', "[]"):
        path.write_text(text)
        assert serving.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
        assert "run it again" in capsys.readouterr().err


def test_a_run_of_an_earlier_version_stands_without_what_it_did_not_measure(tmp_path: Path) -> None:
    run_of(tmp_path, "snapkv", 8)
    (path,) = tmp_path.glob(f"*/{FILE}")
    older = json.loads(path.read_text())
    for key in ("bench", "score", "prompt_tokens_cached"):
        del older["method"][key]
    path.write_text(json.dumps(older))
    (run,) = load(tmp_path)
    (one,) = served(run.folder, run.result)
    assert one.bench("request_goodput") is None
    (sheet,) = tables(tmp_path)
    assert sheet.rows[0][3:5] == ["-", "-"]


def test_keys_that_were_swept_have_a_panel_each_and_no_line_goes_back(tmp_path: Path) -> None:
    """vLLM as shipped is told nothing of the prefix cache."""
    for caching in (True, False):
        run_of(tmp_path, "full", 4, prefix_caching=caching)
        run_of(tmp_path, "snapkv", 8, prefix_caching=caching)
    (sheet,) = tables(tmp_path)
    column = [str(head) for head in sheet.heads].index("prefix_caching")
    assert sorted(f"{row[column]}" for row in sheet.rows) == ["-", "-", *["False"] * 3, *["True"] * 3]
    (group,) = groups([one for run in load(tmp_path) for one in served(run.folder, run.result)])
    rows = serving.of_pool(group)
    assert len({row["panel"] for row in rows}) == 2
    points = [(row["panel"], row["line"], row["x"]) for row in rows]
    assert len({*points}) == len(points)
