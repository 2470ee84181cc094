"""The figures of docs/results.md: scores by budget, and against measured bytes.

Not here: what a cell of a grid is (`plots/grids.py`), the page (`plots/results.py`).
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from plots import style
from plots.grids import MORE, Grid, device_bytes, moved_bytes
from plots.style import Canvas, Picture

LONG = re.compile(r"(\.\d\d)\d+")
MANY = 16  # methods, beyond which their lines need more room
WIDE = 40  # times the lowest number of a logarithmic axis, beyond which only powers of ten have room
SVG: dict[Any, Any] = {"svg.hashsalt": "kvbench", "svg.fonttype": "none"}  # the same bytes again, and text as text


def by_budget(title: str, grids: Sequence[Grid]) -> Picture:
    """A column per measure against the ratio; methods that retrieve above, those that drop below."""
    picture = Canvas().new(title, about(grids), (), style.PAGE, tall(grids, 4.4), **layout(grids))
    ringed: set[str] = set()
    for column, grid in zip(picture.axes.T, grids, strict=True):
        for ax, retrieves in zip(column, (True, False), strict=True):
            methods = [name for name in grid.methods if grid.retrieves(name) == retrieves]
            ringed |= draw_spread(ax, grid, methods)
            draw_full(ax, grid)
            ax.set_xticks(grid.ratios, [f"{ratio:g}" for ratio in grid.ratios])
            ax.set(ylabel=grid.measure.ylabel)
        column[0].set_title(f"{grid.measure.title}\nmethods that retrieve")
        column[1].set(title="methods that drop", xlabel="ratio")
    if ringed:
        names = ", ".join(sorted(ringed, key=str.lower))
        picture.note(f"Ringed: holds more than {MORE:g} times the ratio's share of the full cache's bytes: {names}")
    return picture.finish(columns=5)


def against_bytes(title: str, grids: Sequence[Grid]) -> Picture:
    """A column per measure against bytes on the device, and against bytes moved per step by methods that retrieve."""
    picture = Canvas().new(title, about(grids), (), style.PAGE, tall(grids, 4.6), **layout(grids))
    for column, grid in zip(picture.axes.T, grids, strict=True):
        for ax, of, scale in zip(column, (device_bytes, moved_bytes), (1e-6, 1e-3), strict=True):
            for line in grid.lines(lambda ratio, cell, of=of, scale=scale: scaled(of(cell), scale), grid.methods):
                xs, ys = [point.x for point in line.points], [point.y.mean for point in line.points]
                ax.plot(xs, ys, label=line.label, **style.look(line.method))
            draw_full(ax, grid)
            ax.set(xscale="log", ylabel=grid.measure.ylabel)
            low, high = ax.get_xlim()
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < WIDE * low else (1,)))
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.xaxis.set_minor_formatter("")
        column[0].set(title=grid.measure.title, xlabel="on the device, MB")
        column[1].set(title="methods that retrieve", xlabel="moved per step, KB")
    return picture.finish(columns=5)


def draw_spread(ax: Axes, grid: Grid, methods: Sequence[str]) -> set[str]:
    """Lines with their intervals, side by side where they would hide each other.

    A ring is around what holds more bytes than its ratio says, in which tokens do not count all: whose these are.
    """
    lines, ringed = grid.lines(lambda ratio, cell: ratio, methods), set[str]()
    gap = min((b - a for a, b in pairwise(grid.ratios)), default=1.0) / (2 * max(1, len(lines)))
    for i, line in enumerate(lines):
        looks = style.look(line.method)
        xs = [point.x + (i - (len(lines) - 1) / 2) * gap for point in line.points]
        ax.plot(xs, [point.y.mean for point in line.points], label=line.label, **looks)
        ends = [(x, p.y.low, p.y.high) for x, p in zip(xs, line.points, strict=True) if p.y.low is not None]
        low, high = ([float(end[i] or 0) for end in ends] for i in (1, 2))
        ax.vlines([end[0] for end in ends], low, high, color=looks["color"], alpha=0.5, linewidth=0.7)
        more = [(x, p.y.mean) for x, p in zip(xs, line.points, strict=True) if grid.holds_more(line.method, p.x)]
        if more:
            ringed.add(line.label)
            ax.plot(*zip(*more, strict=True), "o", markersize=7, fillstyle="none", color=looks["color"], linewidth=0)
    return ringed


def layout(grids: Sequence[Grid]) -> dict[str, Any]:
    return {"nrows": 2, "ncols": len(grids), "squeeze": False, "sharey": "col"}


def tall(grids: Sequence[Grid], inches: float) -> float:
    """Panels of many lines are taller."""
    return inches * max(1.0, min(1.6, max(len(grid.methods) for grid in grids) / MANY))


def about(grids: Sequence[Grid]) -> str:
    return " | ".join(dict.fromkeys(grid.about for grid in grids))


def draw_full(ax: Axes, grid: Grid) -> None:
    if grid.full is not None and grid.full.mean is not None:
        ax.axhline(grid.measure.scale * grid.full.mean, color="black", linestyle="--", linewidth=0.9, label="Full")


def scaled(value: float | None, by: float) -> float | None:
    """None for what moves nothing, which a logarithmic axis has no place for."""
    return None if not value else value * by


def save(picture: Picture, path: Path) -> None:
    """As SVG without date or version, to a hundredth of a point: the same runs make the same bytes."""
    picture.figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    text = LONG.sub(r"\1", path.read_text(encoding="utf-8"))
    path.write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()), encoding="utf-8")
