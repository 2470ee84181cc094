"""What bytes buy: which points are on the frontier of the figure."""

from fractions import Fraction
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


def test_a_point_is_on_the_front_where_it_is_shown_to_be_better_than_all_as_cheap(tmp_path: Path) -> None:
    for method, points in {"snapkv": {"1/8": 0.4, "1/2": 0.2}, "pqcache": {"1/4": 0.41, "3/4": 0.19}}.items():
        for memory, error in points.items():
            share = float(Fraction(memory))
            made_runs.write(
                tmp_path, method, "fidelity", rows(error, share, 20), ratio=memory, memory=memory, metric="recall"
            )
    (picture,) = BY_NAME["frontier"].draw(Data(load(tmp_path)), Canvas())
    (front,) = [each for each in picture.axes[0].lines if each.get_label() == "front"]
    assert FRONT_SAID in picture.said
    assert [*front.get_xdata()] == [0.125, 0.5, 0.75] and [*front.get_ydata()] == pytest.approx([0.419, 0.219, 0.209])
