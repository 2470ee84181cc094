"""Maps of needles: the score at each length and depth, a panel per method.

Not here: the picture that a single run leaves (`tasks/needle/heatmap.py`).
"""

from collections.abc import Sequence
from itertools import islice
from math import ceil, isnan
from typing import Any

from kvbench.plots import style
from kvbench.plots.figures.axes import tick
from kvbench.plots.read import Run
from kvbench.plots.run_sets import RunSet, asked, budget_of, other_setting, run_sets, score_of
from kvbench.plots.style import Canvas, Picture
from kvbench.tasks.needle.heatmap import pivot

MOST = 24  # panels
INCHES = 0.26  # that a number in a cell takes


def needle_heatmaps(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """A figure for each budget, from small to large."""
    made = []
    for run_set in run_sets(runs, lambda run: run.result.task == "needle"):
        tail = other_setting(run_set)
        settings = {
            (run.result.budget is not None, budget_of(run) or 0, asked(run), run.comm)
            for run in run_set.runs
            if not run.is_full
        }
        for _, _, budget, comm in sorted(settings):
            chosen: dict[str, Run] = {}
            for run in sorted(
                run_set.runs, key=lambda run: (not run.is_full, run.result.method_label, run.folder.name)
            ):
                if run.is_full or (asked(run), run.comm) == (budget, comm):
                    label = run.result.method_label if run.is_full else f"{run.result.method_label} {tail(run)}".strip()
                    chosen.setdefault(label, run)
            if len(chosen) > 1:
                title = f"A needle by length and depth, {budget}, comm {comm}"
                made.append(maps(canvas, run_set, title, dict(islice(chosen.items(), MOST))))
    return made


def maps(canvas: Canvas, run_set: RunSet, title: str, chosen: dict[str, Run]) -> Picture:
    columns = canvas.columns(len(chosen), 1.6)
    rows = ceil(len(chosen) / columns)
    picture = canvas.new(
        title, run_set.about, chosen.values(), 1.0 + 1.7 * columns, 1.6 * rows, nrows=rows, ncols=columns, squeeze=False
    )
    flat = picture.axes.ravel()
    for ax in flat[len(chosen) :]:
        ax.remove()
    image = None
    for i, (ax, (label, run)) in enumerate(zip(flat, chosen.items(), strict=False)):
        table = pivot([r.to_dict() for r in run.rows])
        percent = [[100 * value for value in line] for line in table.scores]
        image = ax.imshow(percent, cmap=style.HEAT, vmin=0, vmax=100, aspect="auto")
        wide = 0.75 * picture.figure.get_figwidth() / columns
        if len(table.lengths) * INCHES <= wide and len(table.depths) * 0.13 <= 1.2:
            write_numbers(ax, percent)
        some = range(0, len(table.lengths), max(1, ceil(len(table.lengths) * 0.4 / wide)))
        ax.set_xticks(some, [tick(table.tokens[t]) for t in some], rotation=45 if len(some) > 1 else 0)
        some = range(0, len(table.depths), max(1, len(table.depths) // 5))
        ax.set_yticks(some, [f"{table.depths[t]:g}" for t in some])
        overall = score_of(run.rows)
        ax.set_title(
            style.wrapped(label if overall is None else f"{label}: {overall.mean:.0f}", int(wide * 18)), fontsize=7
        )
        ax.grid(visible=False)
        if i % columns == 0:
            ax.set_ylabel("depth in %")
        if i + columns >= len(chosen):
            ax.set_xlabel("tokens")
    if image is not None:
        picture.figure.colorbar(image, ax=list(flat[: len(chosen)]), label=style.SCORE, shrink=0.8, aspect=2 + 8 * rows)
    picture.said.append("Lengths are those of the prompts, in tokens; beside each name its mean score")
    return picture.finish()


def write_numbers(ax: Any, percent: Sequence[Sequence[float]]) -> None:
    for y, line in enumerate(percent):
        for x, value in enumerate(line):
            if not isnan(value):
                color = "white" if value < 60 else "black"
                ax.text(x, y, f"{value:.0f}", ha="center", va="center", color=color, fontsize=style.SMALL)
