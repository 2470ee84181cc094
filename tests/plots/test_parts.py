"""Instruction types against the ratio: which runs stand in the figure, and what is written."""

import csv
from pathlib import Path

import pytest

from kvbench.plots import parts
from kvbench.plots.read import load
from kvbench.tests.plots.made_runs import write


def run_with(root: Path, method: str, ratio: str, shares: dict[str, tuple[int, float]]) -> Path:
    folder, _ = write(root, method, "ifeval_system", [{"score": 0.5}], ratio=ratio)
    lines = [f"{kind},{n},{right},{min(1.0, right + 0.1)}" for kind, (n, right) in shares.items()]
    (folder / "instructions.csv").write_text("\n".join(["instruction,n,strict,loose", *lines]) + "\n")
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    run_with(root, "full", "1", {"no_comma": (10, 0.9), "title": (6, 0.5), "rare": (2, 1.0)})
    for ratio, right in (("1/2", 0.7), ("1/5", 0.2)):
        run_with(root, "snapkv", ratio, {"no_comma": (10, right), "title": (6, 0.5)})
    write(root, "h2o", "longbench", [{"score": 0.5}])
    return root


def test_each_method_has_its_runs_by_share_and_ends_with_full_attention(runs: Path) -> None:
    (methods,) = parts.groups(load(runs)).values()
    assert {label: [parts.share_of(run) for run in each] for label, each in methods.items()} == {
        "SnapKV (C)": [0.2, 0.5, 1.0]
    }


def test_the_figure_and_the_table_are_written(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert parts.main([str(runs), "--out", str(out)]) == 0
    table, picture, drawing = capsys.readouterr().out.split()
    assert Path(picture).stat().st_size > 0 and "<svg" in Path(drawing).read_text()
    lines = list(csv.DictReader(Path(table).read_text().splitlines()))
    fallen = [line["right"] for line in lines if line["part"] == "no_comma" and line["by"] == "strict"]
    assert fallen == ["0.2", "0.7", "0.9"]
    (rare,) = [line for line in lines if line["part"] == "rare" and line["by"] == "strict"]
    assert rare["n"] == "2" and float(rare["high"]) - float(rare["low"]) > 0.5
    about = Path(picture).with_suffix(".txt").read_text()
    assert "at least 5 answers" in about
    low, high = (float(line[end]) for line in lines[:1] for end in ("low", "high"))
    assert 0 <= low < high <= 1


def test_without_such_runs_or_with_a_damaged_table_it_says_so(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parts.main([str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "instructions.csv" in capsys.readouterr().err
    damaged = next(runs.glob("*/instructions.csv"))
    damaged.write_text("instruction,n,strict,loose\ntitle,many,0.5,0.5\n")
    assert parts.main([str(runs), "--out", str(tmp_path)]) == 2
    assert "no table of parts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        *("title,6,inf,0.5", "title,6,nan,0.5", "title,6,2.5,0.5", "title,6,-1,0.5", "title,-6,0.5,0.5"),
        *("title,999999999999999,1,1", f"title,{'9' * 400},1,1", f"{'a' * 200_000},6,1,1"),
    ],
)
def test_a_share_of_no_answers_is_refused_in_a_sentence(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with(tmp_path, "full", "1", {"no_comma": (10, 0.9)})
    (path,) = tmp_path.glob("*/instructions.csv")
    path.write_text(f"instruction,n,strict,loose\n{line}\n")
    assert parts.main([str(tmp_path), "--out", str(tmp_path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "no table of parts" in said and len(said) < 500
