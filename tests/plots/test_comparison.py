"""One table and one picture of methods against full attention."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.plots.comparison import about, compare, draw, is_comparable, made_otherwise, print_comparison, remarks
from kvbench.plots.read import read_one
from kvbench.tests.plots.made_runs import write

N = 20


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Needles that PQCache finds and SnapKV does not, and a dataset of two samples."""
    made = []
    for method, hit, ratio, comm in (
        ("pqcache", 1.0, "1/10", "1/64"),
        ("full", 1.0, "1", "0"),
        ("snapkv", 0.0, "1/10", "1/64"),
    ):
        for task, n in (("needle", N), ("longbench", 2)):
            rows = [{"score": hit}] * n
            made.append(write(tmp_path, method, task, rows, ratio=ratio, comm=comm)[0])
    return made


def test_a_method_is_compared_with_full_attention_on_the_same_samples(folders: list[Path]) -> None:
    found = compare(folders)
    assert [row.label for row in found.rows] == ["Full", "PQCache", "SnapKV (C)"]
    assert found.full.against == {}
    by_label = {row.label: row.against for row in found.rows}
    assert by_label["PQCache"]["needle"].paired.mean == 0
    snapkv = by_label["SnapKV (C)"]["needle"]
    assert (snapkv.paired.mean, snapkv.paired.losses, snapkv.sign, snapkv.family) == (-1, N, -1, 2)
    assert by_label["SnapKV (C)"]["embedded texts"].sign == 0  # of two samples nothing follows


def test_the_table_says_what_so_few_samples_cannot_show(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = compare(folders)
    print_comparison(found)
    shown = capsys.readouterr().out
    snapkv = next(line for line in shown.splitlines() if line.startswith("SnapKV"))
    assert snapkv.split().count("0.0") == 1 and snapkv.count("-100.0 to") == 1 and snapkv.count("*") == 1
    full = next(line for line in shown.splitlines() if line.startswith("Full "))
    assert "0 of 2     -100.0   100 %" in snapkv and "2 of 2" in full
    assert "ratio 0.1" in about(found)
    assert "embedded texts: 2 samples are too few to compare" in remarks(found)
    assert max(map(len, shown.splitlines()[: 3 + len(found.rows)])) <= 100


def test_turns_of_one_sample_are_one_sample_without_an_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []
    for method, hit in (("full", 1.0), ("snapkv", 0.0)):
        rows = [{"score": hit, "fields": {"sample": "a", "turn": turn}} for turn in range(3)]
        made.append(write(tmp_path, method, "shared_context", rows, ratio="1/10")[0])
        made.append(write(tmp_path, method, "needle", [{"score": hit}] * N, ratio="1/10")[0])
    print_comparison(compare(made))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split().count("n") == 2 and f"n = {N}" in lines[2] and "n = 3" not in lines[2]
    assert lines[3].count("95 % of Δ") == 1


def test_the_picture_is_the_same_when_it_is_made_again(folders: list[Path], tmp_path: Path) -> None:
    first = draw(compare(folders), tmp_path / "a").read_bytes()
    assert first == draw(compare(folders), tmp_path / "b").read_bytes()
    assert first.startswith(b"\x89PNG")


def test_the_picture_of_an_old_folder_has_the_intervals_of_its_samples(folders: list[Path], tmp_path: Path) -> None:
    """Its result says the bootstrap's, which a table of today does not."""
    new, old = compare(folders), compare(folders)
    for row in old.rows:
        for task, run in row.runs.items():
            row.runs[task] = replace(run, result=replace(run.result, score_ci95=[0.2, 0.3]))
    assert draw(new, tmp_path / "new").read_bytes() == draw(old, tmp_path / "old").read_bytes()


def test_only_runs_that_differ_in_task_method_and_budget_are_one_comparison(folders: list[Path]) -> None:
    results = [read_one(folder).result for folder in folders]
    assert is_comparable(results)
    assert not is_comparable([result for result in results if result.method != "full"])
    assert not is_comparable([*results, results[0]])


def test_runs_that_were_made_with_other_threads_are_named(tmp_path: Path) -> None:
    folders = []
    for method, threads in (("full", 1), ("snapkv", 4), ("pqcache", 4)):
        env = {"arithmetic": {"dtype": "bfloat16", "threads": threads, "blas": "mkl"}}
        folders.append(write(tmp_path, method, "needle_short", [{"score": 1.0}], ratio="1/10", env=env)[0])
    (line,) = made_otherwise(compare(folders), {"dtype": "bfloat16", "threads": 4, "blas": "mkl"})
    assert "threads 1 and 4 (here 4);" in line and "blas" not in line and "dtype" not in line
    (line,) = made_otherwise(compare(folders[1:] + folders[:1]), {"dtype": "bfloat16", "threads": 4, "blas": "open"})
    assert "blas mkl (here open); threads" in line


def test_runs_that_were_made_alike_are_not(folders: list[Path], tmp_path: Path) -> None:
    here = {"dtype": "bfloat16", "threads": 4}
    assert made_otherwise(compare(folders), here) == []  # of earlier code, which does not say it
    same = [
        write(tmp_path / "same", method, "needle_short", [{"score": 1.0}], ratio="1/10", env={"arithmetic": here})[0]
        for method in ("full", "snapkv")
    ]
    assert made_otherwise(compare(same), here) == []
