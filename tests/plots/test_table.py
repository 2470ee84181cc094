"""`kvbench table`: any runs, rows and columns by their keys."""

import csv
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pandas import concat

from kvbench.plots.table import main
from kvbench.plots.tables.pivot import Pivot, WrongKey, pivots
from kvbench.plots.tables.shown import records, sheet_of
from kvbench.plots.tables.words import samples_below
from kvbench.results import sheet as printing
from kvbench.results.intervals import FEW
from kvbench.tests.plots.made_runs import write

HITS = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]


def markdown(pivot: Pivot) -> str:
    return printing.markdown(sheet_of(pivot))


def rows(scores: list[float], **fields: Any) -> list[dict[str, Any]]:
    return [{"score": score, "fields": fields} for score in scores]


def needles(root: Path, n: int = FEW) -> None:
    """Full once, two methods at two ratios."""
    write(root, "full", "needle", rows([1.0] * n))
    for ratio in ("1/10", "1/5"):
        write(root, "pqcache", "needle", rows([1.0] * n), ratio=ratio)
        write(root, "snapkv", "needle", rows([0.0] * n), ratio=ratio)


def one(root: Path, **asked: Any) -> Pivot:
    (sheet,) = pivots(samples_below(root), **asked)
    return sheet


def test_without_a_word_it_is_methods_by_what_varies_and_full_stands_once_beside_all(tmp_path: Path) -> None:
    needles(tmp_path)
    sheet = one(tmp_path)
    assert sheet.column_keys == ("budget",) and sheet.columns == [("ratio 0.1",), ("ratio 0.2",)]
    assert [row[0] for row in sheet.rows] == ["Full", "PQCache", "SnapKV (C)"]
    assert {sheet.cells[("Full",), column].mean for column in sheet.columns} == {1.0}
    assert "| Full | 100.0 (" in markdown(sheet) and markdown(sheet).count("| Full |") == 1


def test_what_varies_in_one_table_is_no_column_of_another(tmp_path: Path) -> None:
    needles(tmp_path)
    write(tmp_path, "pqcache", "needle", rows([1.0] * 12), model="large")
    write(tmp_path, "pqcache", "gsm8k", rows([1.0] * 12))
    across = {sheet.where["task"]: sheet.column_keys for sheet in pivots(samples_below(tmp_path))}
    assert across == {"needle": ("budget", "model"), "gsm8k": ("budget",)}


def test_a_table_holds_the_score_of_result_json_with_its_interval(tmp_path: Path) -> None:
    _, result = write(tmp_path, "snapkv", "needle", rows(HITS))
    write(tmp_path, "pqcache", "needle", rows([1.0] * 12))
    cell = one(tmp_path).cells[("SnapKV (C)",), ("ratio 0.2",)]
    assert (cell.mean, [cell.low, cell.high]) == (result.score, result.score_ci95)


def test_one_sample_and_zeros_have_no_winner(tmp_path: Path) -> None:
    for n in (1, 20):
        write(tmp_path / str(n), "snapkv", "needle", rows([1.0 * (n == 1)] * n))
        write(tmp_path / str(n), "pqcache", "needle", rows([0.0] * n))
    single, zeros = one(tmp_path / "1"), one(tmp_path / "20")
    assert all(cell.low is None for cell in single.cells.values()) and "±" not in markdown(single)
    assert not any(cell.mark for sheet in (single, zeros) for cell in sheet.cells.values())
    assert "- ratio 0.2: one sample is too few to compare." in markdown(single)
    assert "| SnapKV (C) | 1 of 1 |" in markdown(single) and "| SnapKV (C) | 0.0 (" in markdown(zeros)
    assert "all scores are 0" in markdown(zeros)


def test_few_samples_stand_as_hits_or_means_without_interval_and_test(tmp_path: Path) -> None:
    sizes = {"few": FEW - 1, "enough": FEW, "parts": FEW - 1}
    for method, level in (("full", 1.0), ("snapkv", 0.0)):
        levels = {name: level or 0.1 * (name == "parts") for name in sizes}
        made = [row for name, n in sizes.items() for row in rows([levels[name]] * n, dataset=name)]
        write(tmp_path, method, "longbench", made)
    said = markdown(one(tmp_path, columns=["dataset"]))
    assert "| Full | 100.0 (83.2 to 100.0) n=20 | 19 of 19 n=19 | 19 of 19 n=19 |" in said
    assert "| SnapKV (C) | 0.0 (0.0 to 16.8) n=20 | 0 of 19 n=19 | 10.0 n=19 |" in said
    assert "- few; parts: 19 samples are too few to compare." in said
    less = one(tmp_path, columns=["dataset"], value="difference")
    assert "| SnapKV (C) | **-100.0** (-100.0 to " in markdown(less) and "| -100.0 n=19 | -90.0 n=19 |" in markdown(
        less
    )
    for line in csv.DictReader(printing.as_csv(records([less])).splitlines()):
        assert line["method"] == "Full" or (line["low"] and line["p_holm"]), "files for programs keep the numbers"


def test_best_and_tied_follow_the_corrected_test_without_full_and_oracle(tmp_path: Path) -> None:
    for method, scores in (
        ("full", [1.0] * 20),
        ("oracle", [1.0] * 20),
        ("pqcache", [1.0] * 20),
        ("snapkv", [0.0] * 20),
    ):
        write(tmp_path, method, "needle", rows(scores))
    marks = {row[0]: cell.mark for (row, _), cell in one(tmp_path).cells.items()}
    assert marks == {"Full": "", "Oracle": "", "PQCache": "bold", "SnapKV (C)": ""}
    write(tmp_path, "infllm", "needle", rows([1.0] * 19 + [0.0]))
    marks = {row[0]: cell.mark for (row, _), cell in one(tmp_path).cells.items()}
    assert marks["PQCache"] == marks["InfLLM"] == "tie" and marks["SnapKV (C)"] == ""


def test_a_run_over_its_budget_is_marked_and_not_ranked(tmp_path: Path) -> None:
    over = [{"score": 1.0, "ledger": {"within_budget": False}} for _ in range(20)]
    write(tmp_path, "sparq", "needle", over)
    for method, score in (("pqcache", 1.0), ("snapkv", 0.0)):
        write(tmp_path, method, "needle", rows([score] * 20))
    sheet = one(tmp_path)
    assert sheet.cells[("SPARQ",), ("ratio 0.2",)].mark == "" and "100.0 (83.2 to 100.0) †" in markdown(sheet)
    assert sheet.cells[("PQCache",), ("ratio 0.2",)].mark == "bold"


def test_the_average_of_a_benchmark_is_over_its_datasets(tmp_path: Path) -> None:
    many = rows([1.0] * 9, dataset="trec") + rows([0.0, 1.0, 0.0], dataset="qasper")
    write(tmp_path, "snapkv", "longbench", many)
    write(tmp_path, "pqcache", "longbench", many)
    assert one(tmp_path).cells[("SnapKV (C)",), ("ratio 0.2",)].mean == pytest.approx((1 + 1 / 3) / 2)
    by_dataset = one(tmp_path, columns=["dataset"], rows=["method", "budget"])
    assert by_dataset.columns == [("qasper",), ("trec",)]
    assert by_dataset.cells[("PQCache", "ratio 0.2"), ("qasper",)].n == 3


def test_runs_that_may_not_stand_together_have_tables_of_their_own(tmp_path: Path) -> None:
    for model in ("tiny", "large"):
        write(tmp_path, "snapkv", "needle", rows(HITS), model=model)
        write(tmp_path, "full", "needle", rows(HITS), model=model)
    write(tmp_path, "snapkv", "needle", rows(HITS), model="tiny", task_params={"style": "data_engineering"})
    made = pivots(samples_below(tmp_path), columns=["budget"])
    assert sorted((sheet.where["model"], len(sheet.cells)) for sheet in made) == [
        ("large", 2),
        ("tiny", 1),
        ("tiny", 2),
    ]
    beside = pivots(samples_below(tmp_path), columns=["model"], keep={"prompts": ""})
    assert [sheet.columns for sheet in beside] == [[("large",), ("tiny",)]]


def test_differences_are_paired_with_full(tmp_path: Path) -> None:
    write(tmp_path, "full", "needle", rows([1.0] * 24))
    write(tmp_path, "snapkv", "needle", rows([*HITS, *[1.0] * 12]))
    cell = one(tmp_path, value="difference").cells[("SnapKV (C)",), ("ratio 0.2",)]
    assert cell.mean == pytest.approx(-0.125) and cell.against is not None and cell.against.p > 0.05 and not cell.mark
    said = markdown(one(tmp_path, value="difference"))
    assert "-12.5 (" in said and "Paired with Full" in said and "best of its column" not in said


def test_shares_of_memory_stand_by_size(tmp_path: Path) -> None:
    for memory in ("1/2", "1/32", "1/8"):
        write(tmp_path, "snapkv", "fidelity", rows(HITS), memory=memory, ratio=memory)
    shares = [column.removeprefix("memory ") for (column,) in one(tmp_path, columns=["budget"]).columns]
    assert sorted(shares, key=Fraction) == shares and len(shares) == 3


def test_any_value_can_be_compared_with_any_method(tmp_path: Path) -> None:
    for ratio in ("1/10", "1/5"):
        for method, mass in (("full", 1.0), ("snapkv", 0.25), ("pqcache", 0.75)):
            measured = [{"score": 0.5, "fields": {"measures": {"mass": mass + i / 100}}} for i in range(FEW)]
            write(tmp_path, method, "fidelity", measured, ratio=ratio)
    sheet = one(tmp_path, value="mass", against="SnapKV (C)")
    found = {row[0]: cell.mean for (row, column), cell in sheet.cells.items() if column == ("ratio 0.1",)}
    assert found == {"PQCache": pytest.approx(0.5), "Full": pytest.approx(0.75), "SnapKV (C)": None}
    said = markdown(sheet)
    assert "mass, difference to SnapKV (C) by method" in said and "| PQCache | **+0.500**" in said
    assert "Paired with SnapKV (C) on the same prompts" in said
    assert "difference_to_snapkv_c" in printing.as_csv(records([sheet])).splitlines()[0]
    with pytest.raises(WrongKey, match=r"no run is of 'SnapKV'; there is .*SnapKV"):
        one(tmp_path, against="SnapKV")


def test_a_row_is_compared_with_the_one_that_is_else_alike(tmp_path: Path) -> None:
    for m, hit in (("2", 0.0), ("4", 1.0)):
        write(tmp_path, "pqcache", "needle", rows([hit] * 12), params={"m": m}, comm="0.125")
        write(tmp_path, "snapkv", "needle", rows([1.0] * 12), params={"m": m}, comm="0.125")
    sheet = one(tmp_path, rows=["method", "method.m"], against="SnapKV (C)")
    assert {row: cell.mean for (row, _), cell in sheet.cells.items() if row[0] == "PQCache"} == {
        ("PQCache", "2"): -1.0,
        ("PQCache", "4"): 0.0,
    }


def test_draws_and_turns_are_no_samples_of_their_own(tmp_path: Path) -> None:
    """Of four draws every one counts, and n is the number of prompts."""

    def drawn(right: list[int]) -> list[dict[str, Any]]:
        return [
            {"score": float(j < n), "prompt": i, "fields": {"draw": j, "sample": str(i)}}
            for i, n in enumerate(right)
            for j in range(4)
        ]

    write(tmp_path, "full", "gsm8k", drawn([4] * 12))
    write(tmp_path, "snapkv", "gsm8k", drawn([1] * 12))
    cell = one(tmp_path, value="difference").cells[("SnapKV (C)",), ("ratio 0.2",)]
    assert cell.mean == pytest.approx(-0.75) and cell.n == 12
    assert cell.against is not None and cell.against.paired.losses == 12


def test_measured_values_and_parameters_are_keys_too(tmp_path: Path) -> None:
    for m in (2, 4):
        write(tmp_path, "pqcache", "needle", rows(HITS), params={"m": m, "b": 6}, comm="0.125")
    sheet = one(tmp_path, columns=["method.m"], value="tokens")
    assert sheet.columns == [("2",), ("4",)] and sheet.rows == [("PQCache",)] and sheet.where["comm"] == "1/8"
    assert [row[0] for row in one(tmp_path).rows] == ["PQCache m=2", "PQCache m=4"]


def test_a_cell_can_say_what_the_task_measures_beside_its_score(tmp_path: Path) -> None:
    measured = [{"score": 0.5, "fields": {"measures": {"recall": 0.5, "mass": mass}}} for mass in (0.75, 0.25)]
    write(tmp_path, "pqcache", "fidelity", measured)
    write(tmp_path, "snapkv", "fidelity", [{"score": 0.5, "fields": {"measures": {"recall": 0.5, "mass": None}}}] * 2)
    sheet = one(tmp_path, value="mass")
    assert {row[0]: cell.mean for (row, _), cell in sheet.cells.items()} == {"PQCache": 0.5, "SnapKV (C)": None}
    assert "| 0.500 |" in markdown(sheet)


def test_any_column_of_numbers_can_be_a_value_and_any_column_a_key(tmp_path: Path) -> None:
    for tokens, kept in ((0, 3.0e6), (2048, 5.0e6)):
        measured = [
            {"score": 1.0, "fields": {"turn": turn, "sample": "a"}, "ledger": {"bytes_resident_device": kept + turn}}
            for turn in (1, 2)
        ]
        write(tmp_path, "pqcache", "needle", measured, cache={"tokens": tokens})
    sheet = one(tmp_path, columns=["config.cache.tokens"], value="bytes_resident_device")
    assert sheet.columns == [("0",), ("2048",)] and sheet.value.unit == "bytes"
    assert [sheet.cells[("PQCache",), column].mean for column in sheet.columns] == [3_000_001.5, 5_000_001.5]
    said = markdown(sheet)
    assert "bytes_resident_device (bytes) by method" in said and "| 3,000,002 | 5,000,002 |" in said
    by_turn = one(tmp_path, rows=["config.cache.tokens"], columns=["turn"], value="device")
    assert by_turn.rows == [("0",), ("2048",)] and by_turn.columns == [("1",), ("2",)]
    assert by_turn.cells[("2048",), ("2",)].mean == pytest.approx(5.000002)
    assert one(tmp_path, columns=["turn"], rows=["config.cache.tokens"], keep={"method.m": "-"}).columns


def test_a_parameter_that_is_null_is_told_from_one_that_a_run_has_not(tmp_path: Path) -> None:
    for i, params in enumerate(({"m": 2}, {"m": None}, {})):
        write(tmp_path, "pqcache", "needle", rows(HITS), params=params, comm=f"1/{64 * 2**i}")
    assert sorted(row[0] for row in one(tmp_path).rows) == ["PQCache", "PQCache m=2", "PQCache m=null"]
    assert {row[1] for row in one(tmp_path, rows=["method", "method.m"]).rows} == {"2", "null", "-"}
    write(tmp_path / "task", "pqcache", "needle", rows(HITS), task_params={"style": None})
    (sheet,) = pivots(samples_below(tmp_path / "task"))
    assert sheet.where["prompts"] == "style=null", "its prompts are not those of the default"


def test_both_scopes_stand_side_by_side(tmp_path: Path) -> None:
    needles(tmp_path)
    shown: Any = samples_below(tmp_path)
    hidden = shown.assign(run=shown["run"].astype(str) + "-hidden", protocol="context_only")
    (sheet,) = pivots(concat([shown, hidden]), columns=["ratio", "scope"])
    assert sheet.columns == [(ratio, scope) for ratio in ("0.1", "0.2") for scope in ("context_only", "full_prompt")]
    assert len(sheet.cells) == 3 * 4 and [row for (row,) in sheet.rows] == ["Full", "PQCache", "SnapKV (C)"]


def test_a_run_behind_others_samples_has_a_table_of_its_own(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "snapkv", "needle", rows(HITS))
    write(tmp_path, "snapkv", "needle", rows(HITS), cache={"policy": "lru"})
    samples: Any = samples_below(tmp_path)
    samples["config.offset"] = [8 if run == str(folder) else 0 for run in samples["run"]]
    assert sorted(sheet.where["limit"] for sheet in pivots(samples)) == ["all", "all behind the first 8"]


def test_a_parquet_file_is_as_good_as_folders_and_a_broken_one_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needles(tmp_path / "runs")
    samples: Any = samples_below(tmp_path / "runs")
    samples.to_parquet(tmp_path / "samples.parquet")
    assert main([str(tmp_path / "runs"), "--format", "html"]) == 0
    of_folders = capsys.readouterr().out
    assert of_folders.count("<table>") == 1 and "<td>PQCache</td><td><b>100.0</b> (83.2 to 100.0)</td>" in of_folders
    assert main([str(tmp_path / "samples.parquet"), "--format", "html"]) == 0
    assert capsys.readouterr().out == of_folders
    (tmp_path / "samples.parquet").write_text("mine")
    assert main([str(tmp_path / "samples.parquet")]) == 2
    assert "cannot be read as Parquet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "config.sead"], "did you mean 'config.seed'?"),
        (["--value", "bytes_resident_devise"], "did you mean 'bytes_resident_device'?"),
        (["--value", "task"], "a cell cannot say 'task'"),
        (["--rows", "metod"], "did you mean 'method'?"),
        (["--value", "scores"], "did you mean 'score'?"),
        (["--filter", "task=none"], "no run has task=none; there is needle"),
        (["--filter", "task"], "no KEY=VALUE"),
        (["--rows", "method", "--columns", "method"], "a key stands twice"),
        (["--columns", "method."], "runs have no 'method.'"),
    ],
)
def test_a_wrong_word_is_one_sentence(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "snapkv", "needle", rows(HITS))
    assert main([str(tmp_path), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err


def test_no_runs_and_no_room_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    write(tmp_path / "runs", "snapkv", "needle", rows(HITS))
    (tmp_path / "file").write_text("mine")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "mine"
    assert "choose another --out" in capsys.readouterr().err


def test_all_formats_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needles(tmp_path / "runs")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".csv", ".html", ".md", ".tex"]
    assert capsys.readouterr().out.count("table.") == 4


def test_prefills_by_method_say_what_each_computed_beside_its_score(tmp_path: Path) -> None:
    for method in ("full", "snapkv"):
        write(tmp_path, method, "needle", rows([1.0] * 12))
        for density, share in ((0.1, 0.094), (0.5, 0.47)):
            asked = {"n_slash": 64, "density": density}
            write(tmp_path, method, "needle", rows(HITS, prefill_share=share), prefill=asked)
    made = one(tmp_path, rows=["prefill"], columns=["method"])
    assert made.columns == [("Full",), ("SnapKV (C)",)]
    assert [row for (row,) in made.rows] == ["exact", "minference density=0.1", "minference density=0.5"]
    text = markdown(made)
    assert text.count("[0.09]") == text.count("[0.47]") == 2 and "In square brackets the share of the pairs" in text
    shares = one(tmp_path, rows=["prefill"], columns=["method"], value="prefill_share")
    assert shares.cells[("minference density=0.5",), ("Full",)].mean == pytest.approx(0.47)
    assert "In square brackets" not in markdown(shares)
