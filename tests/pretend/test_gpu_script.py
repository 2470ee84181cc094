"""The GPU's benchmark from end to end on a pretended GPU: what mixes devices or reads too early shows itself here."""

import csv
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.pretend.cuda import Machine


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_row_is_written_before_the_next_is_measured(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"

    def found():
        yield gpu.Result("first", "-", True)
        assert [row["what"] for row in rows_of(path)] == ["first"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu.collect(found(), path, gpu.torch.device("cuda"))
    (row,) = rows_of(path)
    assert (row["what"], row["ok"], row["device"]) == ("first", "True", "pretended 0")
