"""Budgets of launches and waits per decode step: raised by nobody who does not say so in `benchmarks/launches.py`."""

import pytest

from kvbench.benchmarks import launches
from kvbench.benchmarks.pretend.cuda import Machine

# Heads with counts of their own. The interpreter takes up to half a minute for each of the others.
QUICK = ("adakv",)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in launches.BUDGETS]
)
def test_a_step_stays_within_its_budget(machine: Machine, method: str) -> None:
    cost = launches.cost_of(machine, method)
    assert not launches.exceeds(cost, launches.BUDGETS[method]), cost


def test_the_command_exits_with_1_above_the_budget(machine: Machine, capsys, monkeypatch) -> None:
    spent = launches.Cost(42, 4, 2)
    monkeypatch.setattr(launches, "cost_of", lambda *_: spent)
    monkeypatch.setitem(launches.BUDGETS, "snapkv", spent)
    assert launches.run(machine, ["snapkv"], is_goal=False) == 0
    assert launches.run(machine, ["snapkv"], is_goal=True) == 1
    monkeypatch.setitem(launches.BUDGETS, "snapkv", launches.Cost(41, 4, 2))
    assert launches.run(machine, ["snapkv"], is_goal=False) == 1
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("method,launches_row,launches_further_row,waits_step")
    assert [row.split(",")[:4] for row in rows[-1:]] == [["snapkv", "42.0", "4.0", "2.0"]]


@pytest.mark.slow
def test_uploads_are_counted_row_by_row(machine: Machine, capsys) -> None:
    """Rows that drop are told where everything lies, and nothing more at the steps behind."""
    assert launches.uploads(machine, ["snapkv"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header == "method,rows,step,copies_layer,bytes_layer"
    cells = [row.split(",") for row in rows]
    assert [cell[:3] for cell in cells] == [["snapkv", n, step] for n in "12" for step in "15"]
    copies = [float(cell[3]) for cell in cells]
    assert copies[0] > 0 < copies[2] and copies[1] == copies[3] == 0
