"""What bytes buy, for the page of `plots/frontier.py`: its sets of runs, its heights, its figures.

Not here: the figure itself (`plots/figures/declared.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.plots.figures.declared import BY_NAME, OUTPUT_ERROR
from kvbench.plots.figures.rows import Data
from kvbench.plots.read import Run
from kvbench.plots.run_sets import Estimate, RunSet, score_of
from kvbench.plots.scored import Scored
from kvbench.plots.style import Canvas, Picture
from kvbench.results import SampleRow


@dataclass(frozen=True)
class Height:
    """A measure on the y axis; scores are 0 to 100."""

    label: str
    falls: bool  # lower is better

    def of(self, rows: Sequence[SampleRow]) -> Estimate | None:
        if not self.falls:
            return score_of(rows)
        found = Scored.of(rows, lambda row: row.fields.get("measures", {}).get("output_error"), OUTPUT_ERROR[1])
        ends = found.interval
        low, high = (None, None) if ends is None else (ends.low, ends.high)
        return None if found.mean is None else Estimate(found.mean, low, high, found.n)


def frontier(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    return BY_NAME["frontier"].draw(Data(runs), canvas)


def sets_with_bytes(runs: Sequence[Run]) -> list[RunSet]:
    """Runs with a byte budget that may share a figure, with those of full attention; two methods at least."""
    found = [part.run_set for part in Data(runs).parts(BY_NAME["frontier"].runs)]
    return [each for each in found if len({run.result.method_label for run in each.runs if not run.is_full}) > 1]


def height_of(run_set: RunSet) -> Height:
    return Height("output error", True) if run_set.task == "fidelity" else Height("mean score", False)
