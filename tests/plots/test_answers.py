"""The figure of budgets that count the answer."""

from dataclasses import replace
from pathlib import Path

import matplotlib

from kvbench.plots.figures.declared import BY_NAME
from kvbench.plots.figures.rows import Data
from kvbench.plots.read import Run, load
from kvbench.plots.style import Canvas
from kvbench.tests.plots.report_runs import write_run

FOOTPRINT = BY_NAME["score_vs_footprint"]


def runs(tmp_path: Path) -> list[Run]:
    """Full attention, and R-KV at three budgets, with entries that fall with the budget."""
    found = []
    asked = (("full", None, 1000.0), ("rkv", 96, 300.0), ("rkv", 128, 500.0), ("rkv", 160, 700.0))
    for method, budget, entries in asked:
        write_run(tmp_path / f"{method}-{budget}", method, [0, 1, 1, 0])
        (run,) = load(tmp_path / f"{method}-{budget}")
        rows = tuple(replace(row, ledger=row.ledger | {"footprint_entries": entries}) for row in run.rows)
        counts = None if method == "full" else "target"
        result = replace(
            run.result, method=method, method_label=method, budget=budget, budget_counts=counts, params={},
            ratio_exact="1" if budget is None else None, ratio=None, task="gsm8k",
        )  # fmt: skip
        config = {**run.config, "method": {"name": method, "params": {}}, "budget": budget}
        found.append(replace(run, rows=rows, result=result, config=config))
    return found


def test_a_method_is_a_line_over_the_entries_of_its_answers(tmp_path: Path) -> None:
    with matplotlib.rc_context(Canvas().rc):
        (picture,) = FOOTPRINT.draw(Data(runs(tmp_path)), Canvas())
    (line,) = [line for line in picture.axes.lines if line.get_label() == "rkv"]
    assert sorted(line.get_xdata()) == [0.3, 0.5, 0.7]
    assert any(said.startswith("Tokens of an answer: full") for said in picture.said)


def test_without_full_attention_nothing_is_drawn(tmp_path: Path) -> None:
    assert FOOTPRINT.draw(Data(runs(tmp_path)[1:]), Canvas()) == []
