"""The figures of docs/hour.md: methods in the order of their scores, and families against a cost.

SVGs have no ground of their own and turn their ink light where the reader's page is dark.

Not here: what a cell of a grid is (`plots/grids.py`), the page (`plots/results.py`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from kvbench.plots import style
from kvbench.plots.grids import MORE, Grid, device_bytes
from kvbench.plots.looks import FAMILIES, OTHERS, family_of
from kvbench.plots.run_sets import Line
from kvbench.plots.scored import Scored
from kvbench.plots.stats import rank_ranges
from kvbench.plots.style import Canvas, Picture

LONG = re.compile(r"(\.\d\d)\d+")
HASHED = re.compile(r"(?<=[\"#])[mp][0-9a-f]{10}(?=[\")])")  # of what is clipped, to digits that differ from run to run
PANELS = 3  # side by side
ROW = 0.135  # inches of a method in the order of scores
ORACLE = "oracle"
TINY = 5.5  # points, of names next to rows
BESIDE = 0.03  # of a budget, by which lines of a family stand next to each other
WIDE = 40  # times the lowest number of a logarithmic axis, beyond which only powers of ten have room
SVG: dict[Any, Any] = {"svg.hashsalt": "kvbench", "svg.fonttype": "none"}  # the same bytes again, and text as text


@dataclass(frozen=True)
class Cost:
    """A cost on the x axis."""

    label: str
    of: Callable[[float, Scored], float | None]
    is_ratio: bool = False

    def ticks(self, ax: Axes, grid: Grid) -> None:
        ax.set_xscale("log")
        if self.is_ratio:
            ax.set_xticks(grid.ratios, [f"{ratio:g}" for ratio in grid.ratios])
        else:
            low, high = ax.get_xlim()
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < WIDE * low else (1,)))
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.minorticks_off()


RATIO = Cost("share of the prompt's tokens", lambda ratio, cell: ratio, is_ratio=True)
DEVICE = Cost("keys, values and index on the device, MB", lambda ratio, cell: scaled(device_bytes(cell), 1e-6))


def ranked(title: str, grid: Grid) -> Picture:
    """A panel per budget, and in it a row per method, the best at the top; next to each the ranks that it may have."""
    ratios = grid.ratios if len(grid.ratios) <= PANELS else [grid.ratios[i] for i in (0, len(grid.ratios) // 2, -1)]
    lines = grid.lines(lambda ratio, cell: ratio, grid.methods)
    picture = Canvas().new(
        title, grid.about, (), style.PAGE, 1.2 + ROW * len(lines), ncols=len(ratios), squeeze=False, sharex=True
    )
    scale, better = grid.measure.scale, grid.measure.better
    for ax, ratio in zip(picture.axes[0], ratios, strict=True):
        points = {line.method: point.y for line in lines for point in line.points if point.x == ratio}
        order = sorted(points, key=lambda name: points[name].mean, reverse=better == "lower")
        ranges = rank_ranges({name: grid.cells[name][ratio].samples for name in order}, better)
        for y, name in enumerate(order):
            point, look = points[name], style.look(name)
            ax.errorbar(point.mean, y, xerr=[[bar] for bar in point.bars], color=look["color"], linewidth=0.9)
            ax.plot(point.mean, y, **(look | {"linestyle": ""}))
            first, last = ranges[name]
            words = f"{first}" if first == last else f"{first} to {last}"
            ax.text(1.01, y, words, transform=ax.get_yaxis_transform(), va="center", fontsize=TINY)
        if grid.full is not None and grid.full.mean is not None and grid.measure.against_full:
            ax.axvline(scale * grid.full.mean, color="black", linestyle="--", linewidth=0.9, label="Full")
        ax.set_yticks(range(len(order)), [grid.labels[name] for name in order], fontsize=TINY)
        ax.set_ylim(-0.7, len(lines) - 0.3)
        ax.grid(axis="y", visible=False)
        ax.set_title(f"ratio {ratio:g}")
        ax.text(1.01, len(order) - 0.3, "rank", transform=ax.get_yaxis_transform(), va="center", fontsize=TINY)
    picture.axes[0][len(ratios) // 2].set_xlabel(grid.measure.ylabel)
    n = max(cell.n for cells in grid.cells.values() for cell in cells.values())
    picture.note(
        f"n = {n}. Bars: 95 % intervals over samples. On the right: the ranks that a method may have, behind those "
        "shown to be better and ahead of those shown to be worse (paired test, corrected for its comparisons)"
    )
    return picture.finish()


def by_family(title: str, grid: Grid, cost: Cost) -> Picture:
    """A panel per family, its methods in colour and all others grey, against one cost; the Oracle is in each."""
    lines = grid.lines(lambda ratio, cell: cost.of(ratio, cell), grid.methods)
    families = list(dict.fromkeys(family_of(line.method) for line in lines if line.method != ORACLE)) or [OTHERS]
    families.sort(key=[*FAMILIES, OTHERS].index)
    columns = min(len(families), PANELS)
    rows = ceil(len(families) / columns)
    picture = Canvas().new(
        title,
        grid.about,
        (),
        style.PAGE,
        2.7 * rows,
        nrows=rows,
        ncols=columns,
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    ringed: set[str] = set()
    for ax, family in zip(picture.axes.flat, families, strict=False):
        for line in lines:
            xs, ys = [point.x for point in line.points], [point.y.mean for point in line.points]
            if line.method == ORACLE:
                ax.plot(xs, ys, color="#777777", linestyle=":", linewidth=0.9, label="Oracle", zorder=1)
            elif family_of(line.method) != family:
                ax.plot(xs, ys, color="#999999", alpha=0.35, linewidth=0.6, zorder=1)
        own = [line for line in lines if line.method != ORACLE and family_of(line.method) == family]
        ringed |= draw_spread(ax, grid, own, cost)
        draw_full(ax, grid)
        ax.set_title(family, fontsize=style.SMALL)
        cost.ticks(ax, grid)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "ncols": 2, "columnspacing": 1.0}
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=TINY, handlelength=1.6, labelspacing=0.25, **below)
        ax.tick_params(labelbottom=True)
    for ax in picture.axes.flat[len(families) :]:
        ax.remove()
    for row in picture.axes:
        row[0].set_ylabel(grid.measure.ylabel)
    picture.note(f"Across: {cost.label}. Grey: all other methods")
    if ringed:
        names = ", ".join(sorted(ringed, key=str.lower))
        picture.note(f"Ringed: holds more than {MORE:g} times the ratio's share of the full cache's bytes: {names}")
    return picture.finish(legend=False)


def draw_spread(ax: Axes, grid: Grid, lines: Sequence[Line], cost: Cost) -> set[str]:
    """A family's lines with their intervals, side by side where they would hide each other.

    A ring is around what holds more bytes than its ratio says, in which tokens do not count all: whose these are.
    """
    ringed = set[str]()
    for i, line in enumerate(lines):
        looks, beside = style.look(line.method), 1.0
        if cost.is_ratio:
            beside = 1 + BESIDE * (i - (len(lines) - 1) / 2)
        xs = [point.x * beside for point in line.points]
        ax.plot(xs, [point.y.mean for point in line.points], label=line.label, **looks)
        ends = [(x, p.y.low, p.y.high) for x, p in zip(xs, line.points, strict=True) if p.y.low is not None]
        low, high = ([float(end[i] or 0) for end in ends] for i in (1, 2))
        ax.vlines([end[0] for end in ends], low, high, color=looks["color"], alpha=0.5, linewidth=0.7)
        more = [x for x, p in zip(xs, line.points, strict=True) if cost.is_ratio and grid.holds_more(line.method, p.x)]
        if more:
            ringed.add(line.label)
            ys = [p.y.mean for x, p in zip(xs, line.points, strict=True) if x in more]
            ax.plot(more, ys, "o", markersize=7, fillstyle="none", color=looks["color"], linewidth=0)
    return ringed


def draw_full(ax: Axes, grid: Grid) -> None:
    if grid.full is not None and grid.full.mean is not None:
        ax.axhline(grid.measure.scale * grid.full.mean, color="black", linestyle="--", linewidth=0.9, label="Full")


def scaled(value: float | None, by: float) -> float | None:
    """A scaled value; None for what moves nothing, which a logarithmic axis has no place for."""
    return None if not value else value * by


DARK = """<style>
@media (prefers-color-scheme: dark) {
 text, [style*="fill: #000000"] { fill: #e6e9ec !important }
 [style*="stroke: #000000"] { stroke: #e6e9ec !important }
 [style*="stroke: #dddddd"] { stroke: #3a424b !important }
}
</style>
"""


def save(picture: Picture, path: Path) -> None:
    """Save as SVG without date or version, to a hundredth of a point: the same runs make the same bytes."""
    picture.figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = LONG.sub(r"\1", path.read_text(encoding="utf-8")).replace(" <defs>\n", f"{DARK} <defs>\n", 1)
    ids = {found: f"s{i}" for i, found in enumerate(dict.fromkeys(HASHED.findall(text)))}
    text = HASHED.sub(lambda found: ids[found[0]], text)
    path.write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()), encoding="utf-8")
