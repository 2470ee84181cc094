"""The GPU's benchmark from end to end on a pretended GPU: what mixes devices or reads too early shows itself here."""

import csv
from pathlib import Path

import pytest
import torch

from kvbench.benchmarks.gpu.__main__ import main
from kvbench.benchmarks.gpu.results import Result, collect
from kvbench.benchmarks.pretend.cuda import Machine


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_row_is_written_before_the_next_is_measured(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"

    def found():
        yield Result("first", "-", True)
        assert [row["what"] for row in rows_of(path)] == ["first"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(found(), path, torch.device("cuda"))
    (row,) = rows_of(path)
    assert (row["what"], row["ok"], row["device"]) == ("first", "True", "pretended 0")


def test_what_needs_no_times_runs_to_its_end(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cuda", "--small", "--only", "agreement", "baseline", "--methods", "snapkv"]
    assert main([*words, "--lengths", "64", "--n-new", "3"]) == 0
    shown, said = capsys.readouterr()
    assert "SnapKV: as on a CPU" in shown and "WRONG" not in shown
    captured = next(line for line in said.splitlines() if line.startswith("transformers, static cache, smollm2"))
    assert " ms" in captured and "none" not in captured


@pytest.mark.slow
def test_all_parts_that_need_a_model_run_to_their_end(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cuda", "--small", "--only", "agreement", "methods", "baseline", "sweep"]
    assert main([*words, "--methods", "full", "snapkv", "--lengths", "128", "160", "--n-new", "4"]) == 0
    shown, said = capsys.readouterr()
    for line in ("SnapKV: as on a CPU", "SnapKV: decode", "transformers, static cache", "2 variants", "goal: sweep"):
        assert line in shown
        assert line in said
    assert "WRONG" not in shown and "oom" not in shown


@pytest.mark.slow
def test_a_device_with_other_numbers_is_found_out(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agreement is no matter of course: a GPU whose attention looks elsewhere answers something else."""
    from kvbench.engine import attend

    right = attend.attend_rows_triton

    def wrong(q, tokens, scale, *more):
        return right(q, tokens, -scale, *more)

    monkeypatch.setattr(attend, "attend_rows_triton", wrong)
    assert main(["--device", "cuda", "--small", "--only", "agreement", "--methods", "snapkv"]) == 1
