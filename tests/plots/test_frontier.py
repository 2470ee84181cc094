"""What bytes buy: which points are on the frontier of the figure."""

from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvbench.plots.figures.declared import BY_NAME
from kvbench.plots.figures.rows import Data
from kvbench.plots.read import load
from kvbench.plots.run_sets import FRONT_SAID
from kvbench.plots.style import Canvas
from kvbench.tests.plots import made_runs


def rows(error: float, share: float, n: int = 4) -> list[dict[str, Any]]:
    """Samples of a fidelity run."""
    ledger = {"resident_share": share, "moved_bytes_per_step": 1e4 * share, "bytes_resident_device": 1e7 * share}
    ledger["bytes_searched_per_step"] = 0.0
    measures = [{"output_error": error + 2 * i / 1000, "recall": 1 - error} for i in range(n)]
    return [
        {"ledger": ledger, "fields": {"dataset": "pydoc", "measures": each, "metric": "recall"}} for each in measures
    ]


def front_of(root: Path) -> list[tuple[float, float]] | None:
    """The band of the only figure; None without one."""
    (picture,) = BY_NAME["frontier"].draw(Data(load(root)), Canvas())
    drawn = [each for each in picture.axes[0].lines if each.get_label() == "front"]
    assert bool(drawn) == (FRONT_SAID in picture.said)
    return [*zip(drawn[0].get_xdata(), drawn[0].get_ydata(), strict=True)] if drawn else None


def test_a_point_is_on_the_front_where_it_is_shown_to_be_better_than_all_as_cheap(tmp_path: Path) -> None:
    for method, points in {"snapkv": {"1/8": 0.4, "1/2": 0.2}, "pqcache": {"1/4": 0.41, "3/4": 0.19}}.items():
        for memory, error in points.items():
            share = float(Fraction(memory))
            made_runs.write(
                tmp_path, method, "fidelity", rows(error, share, 12), ratio=memory, memory=memory, metric="recall"
            )
    assert front_of(tmp_path) == [
        (0.125, pytest.approx(0.411)),
        (0.5, pytest.approx(0.211)),
        (0.75, pytest.approx(0.201)),
    ]


def test_runs_with_equal_errors_have_no_front(tmp_path: Path) -> None:
    for method, memory in product(("snapkv", "pqcache"), ("1/8", "1/2")):
        share = float(Fraction(memory))
        made_runs.write(
            tmp_path, method, "fidelity", rows(0.2, share, 12), ratio=memory, memory=memory, metric="recall"
        )
    assert front_of(tmp_path) is None
