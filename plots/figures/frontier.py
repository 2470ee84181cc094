"""What bytes buy: output error or score against the measured share of the full cache on the device.

A method is a line over its byte budgets; what stands on the axis is what its ledger measured, not what was asked for.
Full attention is a level. Next to it the same against what a step can read: what lies on the device or is brought.

Not here: scores against tokens (`plots/figures/scores.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvbench.plots.figures.axes import AXES, Axis, scale, tick
from kvbench.plots.figures.scores import draw_front, draw_line, explain, full_score, scored
from matplotlib.ticker import LogLocator

from kvbench.plots.read import Run
from kvbench.plots.run_sets import Estimate, Line, Point, RunSet, front_of_lines, outside_budget, run_sets, score_of
from kvbench.plots.style import Canvas, Picture
from kvbench.results import SampleRow
from kvbench.results.intervals import interval

ERROR = "output_error"
WIDE = 6.75  # inches of two panels and a legend below them


@dataclass(frozen=True)
class Height:
    """A measure on the y axis; scores are 0 to 100."""

    label: str
    falls: bool  # lower is better

    def value(self, row: SampleRow) -> float | None:
        """The height of one sample."""
        found = row.fields.get("measures", {}).get(ERROR) if self.falls else row.score
        return None if found is None else float(found)

    def of(self, rows: Sequence[SampleRow]) -> Estimate | None:
        if not self.falls:
            return score_of(rows)
        values = [value for row in rows if (value := self.value(row)) is not None]
        if not values:
            return None
        ends = interval(values, (0.0, inf))
        low, high = (None, None) if ends is None else (ends.low, ends.high)
        return Estimate(sum(values) / len(values), low, high, len(values))


def frontier(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """Two panels for each set of runs with a byte budget; full attention is taken along."""
    made = []
    for here in sets_with_bytes(runs):
        height = height_of(here)
        is_error = height.falls
        axes = [AXES["share"], AXES["reads"]]
        found = [drawn_over(here, axis, height) for axis in axes]
        used = list({run.folder: run for line in found[0] for run in line.runs}.values())
        full = [run for run in here.runs if run.is_full][:1]
        title = "Output error" if is_error else "Score"
        picture = canvas.new(
            f"{title} against the bytes on the device", here.about, [*full, *used], WIDE, 2.8, ncols=2, sharey=True
        )
        for ax, axis, each in zip(picture.axes, axes, found, strict=True):
            for line in each:
                draw_line(ax, line)
            if not is_error and (level := full_level(here)) is not None:
                ax.axhline(level, color="black", linestyle="--", linewidth=0.9, label="Full", zorder=1)
            scale(ax, axis, [point.x for line in each for point in line.points])
        draw_front(picture, picture.axes[0], front_of_lines(found[0], height.value, "lower" if is_error else "higher"))
        if is_error:
            picture.axes[0].set_yscale("log")
            picture.axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            picture.axes[0].yaxis.set_major_formatter(tick)
            picture.axes[0].minorticks_off()
        picture.axes[0].set_ylabel(height.label if is_error else f"{height.label}, 0 to 100")
        explain(picture, axes[0], found[0])
        made.append(picture.finish(columns=3))
    return made


def sets_with_bytes(runs: Sequence[Run]) -> list[RunSet]:
    """Runs with a byte budget that may share a figure, with those of full attention; two methods at least."""
    found = [
        run_set.only(lambda run: run.is_full or run.result.memory_exact is not None)
        for run_set in run_sets(runs, lambda run: run.result.task == "fidelity" or scored(run))
    ]
    return [here for here in found if len(drawn_over(here, AXES["share"], height_of(here))) > 1]


def height_of(run_set: RunSet) -> Height:
    return Height("output error", True) if run_set.task == "fidelity" else Height("mean score", False)


def drawn_over(run_set: RunSet, axis: Axis, height: Height) -> list[Line]:
    """A line for each method, by its label, which names who makes codes and of how many bits."""
    points: dict[tuple[str, str], list[tuple[Point, Run]]] = {}
    for run in sorted(run_set.runs, key=lambda run: run.folder.name):
        where, what = axis.of(run.rows), height.of(run.rows)
        if not run.is_full and where is not None and what is not None:
            key = run.method, run.result.method_label
            points.setdefault(key, []).append((Point(where, what, outside_budget(run, run.rows)), run))
    lines: list[Line] = []
    for (method, label), pairs in sorted(points.items()):
        pairs.sort(key=lambda pair: pair[0].x)
        nth = sum(line.method == method for line in lines)
        lines.append(Line(method, label, nth, [point for point, _ in pairs], [run for _, run in pairs]))
    return lines


def full_level(run_set: RunSet) -> float | None:
    """Full attention's mean over all datasets."""
    levels = [full_score(run_set, dataset) for dataset in run_set.datasets()]
    known = [level for level in levels if level is not None]
    return sum(known) / len(known) if known else None
