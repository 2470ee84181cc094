"""One function that draws every figure from a tidy table: a row a point, bar or cell, with the columns of `COLUMNS`.

    panel, line    title of the panel; entry of the legend
    x, y           numbers, or names of categories
    low, high      ends of the interval of y
    mark           line, points, hollow, dash, rule (no markers), faint, level (over all x), front, bar, pale bar, cell
    look, nth      a method's name or a colour, and which of its lines; without a look the nth line that is no method
    why            why a point is outside its budget: it is open, and a note says so
    group, hatch, words    bars side by side; a bar's pattern; a text above it

Not here: values (`plots/figures/rows.py`), which figures there are (`plots/figures/declared.py`).
"""
# pyright: basic

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import rcParams
from matplotlib.ticker import LogLocator, MaxNLocator
from pandas import DataFrame

from kvbench.plots import style
from kvbench.plots.looks import told_apart
from kvbench.plots.read import Run
from kvbench.plots.style import Canvas, Picture

COLUMNS: dict[str, Any] = {
    "panel": "", "line": "", "x": np.nan, "y": np.nan, "low": np.nan, "high": np.nan, "mark": "line", "look": "",
    "nth": 0, "why": "", "group": "", "hatch": "", "words": "", "value": np.nan,
}  # fmt: skip
ORACLE = "oracle"
NAMED = 3  # methods that a note names before it counts
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "--", "**", "||", "OO")
MANY = 10  # points of a line, whose marks are small
CELL = 0.26, 0.13  # inches that a number in a cell takes


@dataclass(frozen=True)
class Scale:
    """An axis: its words, and how its values stand on it."""

    label: str = ""
    kind: str = ""  # cost, names, whole, log (of 1, 2, 5), powers, log2 and each (a tick a value)
    limits: tuple[float | None, float | None] | None = None
    ticks: Sequence[float] = ()
    names: Sequence[str] = ()  # of all categories; (): those of the panel

    def apply(self, axis: Any, values: Sequence[Any]) -> None:
        ax, which = axis.axes, axis.axis_name
        set_scale, set_ticks = getattr(ax, f"set_{which}scale"), getattr(ax, f"set_{which}ticks")
        low, high = (min(values), max(values)) if self.kind == "cost" and values else (0.0, 0.0)
        if self.kind == "names":
            set_ticks(range(len(values)), [each if isinstance(each, str) else tick(each) for each in values])
            ax.grid(axis=which, visible=False)
        elif self.kind in ("log2", "each"):
            set_scale("log", **({"base": 2} if self.kind == "log2" else {}))
            set_ticks(sorted(set(values)), [f"{x:g}" for x in sorted(set(values))])
        else:
            if self.kind in ("log", "powers") or (low > 0 and high > 4 * low):
                set_scale("log")
                if self.kind != "powers":
                    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low or not low else (1,)))
            elif self.kind in ("cost", "whole"):
                axis.set_major_locator(MaxNLocator(5, integer=self.kind == "whole"))
            axis.set_major_formatter(tick)
        if self.kind in ("log2", "each", "log", "cost"):
            ax.minorticks_off()
        if self.ticks:
            set_ticks(self.ticks, [tick(x) for x in self.ticks])
            ax.minorticks_off()
        if self.limits is not None:
            getattr(ax, f"set_{which}lim")(*self.limits)


@dataclass(frozen=True)
class Chart:
    """How a table is drawn."""

    title: str
    x: Scale | Sequence[Scale]  # one for all panels, or one each
    y: Scale | Sequence[Scale]
    height: float = 2.1  # inches of a row of panels
    width: float = 0.0  # of the figure; 0: a column, or as its panels need
    columns: int = 0  # panels side by side; 0: as many as fit
    legend: int = 4  # columns of it; 0: none
    band: bool = False  # intervals are bands
    share: bool = False  # the y axis
    colour: tuple[str, float | None, float | None, bool] = ("", None, None, False)  # label, ends, logarithmic
    titled: bool | None = None  # whether panels are; None: where there are several
    flat: bool = False  # what is measured stands across, what is named stands on the y axis
    ratios: Sequence[float] = ()  # widths of panels


def tick(value: float, _: Any = None) -> str:
    """A number without powers of ten: figures draw dollar signs as they are, so no formula is set."""
    return f"{value / 1000:.4g}k" if value >= 10_000 else f"{value:g}"


def draw(
    chart: Chart, rows: Iterable[dict[str, Any]], canvas: Canvas, about: str = "", runs: Iterable[Run] = ()
) -> Picture:
    """The picture of a table's rows, before `Picture.finish`; `about` says what all runs share."""
    table: Any = DataFrame([COLUMNS | row for row in rows], columns=[*COLUMNS])
    panels = [*table.groupby("panel", sort=False)]
    n_columns = chart.columns or canvas.columns(len(panels))
    n_rows = ceil(len(panels) / n_columns)
    width = chart.width or (style.COLUMN if len(panels) == 1 or n_columns == 1 else 2.3 * n_columns)
    grid = {"width_ratios": chart.ratios} if chart.ratios else {}
    picture = canvas.new(
        chart.title, about, runs, width, chart.height * n_rows, nrows=n_rows, ncols=n_columns, squeeze=False,
        sharey=chart.share, gridspec_kw=grid,
    )  # fmt: skip
    axes = picture.axes.ravel()
    for ax in axes[len(panels) :]:
        ax.remove()
    scales = [[each] * len(panels) if isinstance(each, Scale) else each for each in (chart.x, chart.y)]
    image = None
    for i, (ax, (name, part), x, y) in enumerate(zip(axes, panels, *scales, strict=False)):
        if chart.colour[0]:
            image = draw_cells(ax, chart, part, x, y, 0.75 * picture.figure.get_figwidth() / n_columns)
        else:
            draw_panel(ax, chart, part, x, y)
        fit = int(picture.figure.get_figwidth() / n_columns * (14 if chart.colour[0] else 99) / canvas.text)
        ax.set_title(style.wrapped(name, fit) if chart.titled or (chart.titled is None and len(panels) > 1) else "")
        is_last, is_first = i + n_columns >= len(panels), i % n_columns == 0
        across, up = (y.label, x.label) if chart.flat else (x.label, y.label)
        ax.set_ylabel(up if is_first or not isinstance(chart.y, Scale) else "")
        if chart.flat or not isinstance(chart.x, Scale):
            ax.set_xlabel(across)
        elif is_last and i % n_columns == (n_columns - 1) // 2:  # once, in the middle: they would overlap
            ax.set_xlabel(across, x=0.5 if n_columns % 2 else 1.08)
    if image is not None:
        bar = {"shrink": 0.8, "aspect": 2 + 8 * n_rows} if len(panels) > 1 else {}
        picture.figure.colorbar(image, ax=list(axes[: len(panels)]), label=chart.colour[0], format=tick, **bar)
    why = table[table.why != ""].groupby("why")["line"].unique()
    picture.note(*(f"Open: {reason} ({shortened(names)})" for reason, names in why.items()))
    picture.axes = axes[0] if len(panels) == 1 else axes[: len(panels)]
    return picture


def written(
    chart: Chart, rows: Iterable[dict[str, Any]], about: str, runs: Sequence[Run], folder: Path, name: str, note: str
) -> list[Path]:
    """A figure of a page of its own, as PNG and SVG."""
    with matplotlib.rc_context(Canvas().rc), told_apart(run.method for run in runs):
        picture = draw(chart, rows, Canvas(), about, runs)
        picture.note(note)
        return style.save(picture.finish(chart.legend), folder, name, ["png", "svg"])[:2]


def shortened(names: Iterable[str]) -> str:
    ordered = sorted(set(names))
    more = len(ordered) - NAMED
    return ", ".join(ordered) if more <= 0 else f"{', '.join(ordered[:NAMED])} and {more} more"


def look_of(look: str, nth: int, mark: str) -> dict[str, Any]:
    """How a line is drawn: as its method is, or as one of a number of lines."""
    if mark == "dash":
        return {"color": style.ink(), "marker": "_", "markersize": 12, "linestyle": ""}
    if mark == "faint" and not look:
        return {"color": style.ink(), "alpha": 0.25}
    found = (
        style.look(look, nth)
        if look and look[0] != "#"
        else style.numbered(nth, style.DASHES[nth // 6 % len(style.DASHES)])
    )
    if look == ORACLE:
        found |= {"linewidth": 0.8, "zorder": 1.5}
    if mark == "rule":
        found |= {"marker": "", "linestyle": style.DASHES[nth % 3]}
    found |= {"color": look, "marker": "o", "markeredgecolor": look} if look[:1] == "#" else {}
    return found | ({"linestyle": ""} if mark in ("points", "hollow") else {})


def draw_panel(ax: Any, chart: Chart, part: Any, x: Scale, y: Scale) -> None:
    names = [*x.names] or list(dict.fromkeys(part.loc[part.mark != "level", "x"])) if x.kind == "names" else []
    names = names if any(isinstance(name, str) for name in names) else sorted(names)
    if names:
        part = part.assign(x=[names.index(value) if value in names else np.nan for value in part.x])
    groups = list(dict.fromkeys(part.loc[part.mark == "bar", "group"]))
    bottoms = dict[tuple[str, float], float]()
    for (mark, line, look, nth, _), rows in part.groupby(["mark", "line", "look", "nth", "group"], sort=False):
        label, colours = line or None, look_of(look, nth, mark)
        xs, ys = rows.x.to_numpy(float), rows.y.to_numpy(float)
        if mark == "level":
            put = ax.axvline if chart.flat else ax.axhline
            dash = {"linestyle": ":", "linewidth": 0.6} if chart.flat else {"linestyle": "--", "linewidth": 0.9}
            put(ys[0], color=colours["color"], **dash, label=label, zorder=1)
        elif mark == "front":
            ax.step(xs, ys, where="post", color="#999999", linewidth=2.5, alpha=0.5, label=label, zorder=1)
        elif mark == "faint":
            faint = {key: colours[key] for key in ("color", "alpha") if key in colours}
            ax.plot(xs, ys, **faint, linewidth=0.7, zorder=1.2, label=label)
        elif mark in ("bar", "pale bar"):
            draw_bars(ax, rows, groups, bottoms, {"color": colours["color"], "alpha": 1 if mark == "bar" else 0.55})
        else:
            across = (ys, xs) if chart.flat else (xs, ys)
            if mark == "hollow":
                colours["markerfacecolor"] = "none"
            if not look and len(xs) > MANY:
                colours["markersize"] = 2.5
            ax.plot(*across, label=label, **colours)
            draw_spread(ax, chart, rows, colours)
            is_open = (rows.why != "").to_numpy()
            if is_open.any():
                hollow = {"linestyle": "", "markerfacecolor": "none", "markeredgewidth": 1.0, "zorder": 3}
                ax.plot(xs[is_open], ys[is_open], **(colours | hollow))
    along, up = (ax.yaxis, ax.xaxis) if chart.flat else (ax.xaxis, ax.yaxis)
    x.apply(along, names or [value for value in part.x if isfinite(value)])
    y.apply(up, [value for value in part.y if isfinite(value)])
    if chart.flat:
        ax.set_ylim(len(names) - 0.5, -0.5)


def draw_spread(ax: Any, chart: Chart, rows: Any, colours: dict[str, Any]) -> None:
    """The intervals of a line."""
    if rows.low.isna().all():
        return
    xs, ys, low, high = (rows[name].to_numpy(float) for name in ("x", "y", "low", "high"))
    if chart.band:
        ax.fill_between(xs, low, high, color=colours["color"], alpha=0.12, linewidth=0)
        return
    bars = {"xerr" if chart.flat else "yerr": [np.maximum(ys - low, 0), np.maximum(high - ys, 0)]}
    ax.errorbar(
        *((ys, xs) if chart.flat else (xs, ys)), **bars, fmt="none", ecolor=colours["color"], elinewidth=0.8,
        capsize=0 if chart.flat else 1.5, capthick=0.7, alpha=1.0 if chart.flat else 0.6,
    )  # fmt: skip


def draw_bars(ax: Any, rows: Any, groups: list[str], bottoms: dict[Any, float], how: Any) -> None:
    """Bars of one line: groups stand side by side, and a group's lines upon each other."""
    width = 0.8 / len(groups) if len(groups) > 1 else 0.6
    for i, row in enumerate(rows.itertuples()):
        at = row.x + (groups.index(row.group) - (len(groups) - 1) / 2) * width
        bottom = bottoms.get((row.group, row.x), 0.0)
        ax.bar(
            at, row.y, width, bottom=bottom, **how, hatch=row.hatch, edgecolor=rcParams["axes.facecolor"],
            linewidth=0.3, label=row.line if row.line and i == 0 else None,
        )  # fmt: skip
        bottoms[row.group, row.x] = bottom + row.y
        if isfinite(row.low):
            ends = [[row.y - row.low], [row.high - row.y]]
            ax.errorbar(at, row.y, ends, color=style.ink(), capsize=1.5, linewidth=0.7)
        if row.words:
            beside = {"ha": "center", "xytext": (0, 3), "textcoords": "offset points"}
            ax.annotate(row.words, (at, row.high), fontsize=rcParams["legend.fontsize"], **beside)
            ax.margins(y=0.15)


def draw_cells(ax: Any, chart: Chart, part: Any, x: Scale, y: Scale, wide: float) -> Any:
    """A heat map; of few cells each says its number."""
    _, low, high, is_log = chart.colour
    table = part.pivot(index="y", columns="x", values="value")
    values, (down, across) = table.to_numpy(float), (list(table.index), list(table.columns))
    named = x.kind == "names"
    half = [0.5 if named or len(each) < 2 else (each[1] - each[0]) / 2 for each in (across, down)]
    ends = (across[0] - half[0], across[-1] + half[0], down[-1] + half[1], down[0] - half[1])
    extent = (-0.5, len(across) - 0.5, len(down) - 0.5, -0.5) if named else ends
    image = ax.imshow(
        values, cmap=style.HEAT, vmin=low, vmax=high, aspect="auto", extent=extent, interpolation="nearest",
        norm="log" if is_log else None,
    )  # fmt: skip
    ax.grid(visible=False)
    if not named:
        return image
    if len(across) * CELL[0] <= wide and len(down) * CELL[1] <= 1.2:
        for (i, j), value in np.ndenumerate(values):
            if isfinite(value):
                colour, at = "white" if value < 60 else "black", {"ha": "center", "va": "center"}
                ax.text(j, i, f"{value:.0f}", color=colour, fontsize=rcParams["legend.fontsize"], **at)
    words = part.groupby("x")["words"].first()
    some = range(0, len(across), max(1, ceil(len(across) * 0.4 / wide)))
    ax.set_xticks(some, [words[across[t]] for t in some], rotation=45 if len(some) > 1 else 0)
    some = range(0, len(down), max(1, len(down) // 5))
    ax.set_yticks(some, [f"{down[t]:g}" for t in some])
    return image
