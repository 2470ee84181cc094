"""The figures of docs/results.md: panels below each other, one per budget in bytes, a row per method, the best on top.

A filled mark is with the question hidden from the method, a hollow one with the question shown; where only one of them
was asked its marks are filled. SVGs have no ground of their own and turn their ink light where the reader's page is
dark.

Not here: the answers (`columns.py`), the page (`results.md.j2`).
"""

import re
from math import fsum
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes

from kvbench.plots import style
from kvbench.plots.pages.asked import SHOWN, page, share
from kvbench.plots.pages.columns import Column, Task
from kvbench.plots.pages.methods import BITS, BOTH, TOKENS, kind
from kvbench.plots.pages.words import label, listed
from kvbench.plots.style import Canvas, Picture

WIDTH = 4.2  # inches: on a phone its words are as large as the page's
SMALL = 6.5  # points, of names and ranks next to rows
ROW = 0.16  # inches of a method
PANEL = 0.42  # of a panel's title and numbers
LEAST = 1.0  # inches of all panels: less has no room for its axis
BESIDE = 0.18  # of a row, by which a hollow mark stands above its filled one
LONG = re.compile(r"(\.\d\d)\d+")
HASHED = re.compile(r"(?<=[\"#])[mp][0-9a-f]{10}(?=[\")])")  # of what is clipped, to digits that differ from run to run
SVG: dict[Any, Any] = {"svg.hashsalt": "kvbench", "svg.fonttype": "none"}  # the same bytes again, and text as text


def picture(task: Task) -> Picture:
    ns = sorted({column.n for column in task.columns})
    n = f"{ns[0]}" if len(ns) == 1 else f"{ns[0]} to {ns[-1]}"
    panels = [at_budget(task, asked) for asked in task.budgets]
    rows = [ROW * len(named(columns[-1])) + PANEL for columns in panels]
    canvas = Canvas().new(
        task.asked.title, f"{task.model} · n = {n}", (), WIDTH, max(LEAST, fsum(rows)),
        nrows=len(rows), squeeze=False, sharex=True, height_ratios=rows,
    )  # fmt: skip
    for (ax,), columns in zip(canvas.axes, panels, strict=True):
        panel(ax, task, columns)
    canvas.axes[-1][0].set_xlabel(style.SCORE)
    notes = page("results").more["notes"]
    said = [notes["both"]] if len(task.protocols) > 1 else []
    said += [notes["kinds"]] if task.asked.by_kind else []
    canvas.note(*said, *longer(task, panels), notes["all"])
    return canvas.finish(legend=False)


def look_of(task: Task, method: str) -> dict[str, Any]:
    """A method's own look, or that of its kind."""
    if not task.asked.by_kind:
        return style.look(method)
    return style.numbered((BITS, TOKENS, BOTH).index(kind(method))) | {"markersize": rcParams["lines.markersize"]}


def at_budget(task: Task, asked: str) -> list[Column]:
    """The columns of a panel; its figure is of the last one: with the question hidden, where that was asked."""
    return [column for column in task.columns if column.at.asked == asked]


def named(column: Column) -> list[str]:
    """The methods that were asked at a budget, the worst first."""
    return sorted(column.methods, key=column.mean)


def longer(task: Task, panels: list[list[Column]]) -> list[str]:
    """Names of rows whose hollow marks are of a variant with another name than the filled ones."""
    found: dict[str, str] = {}
    for *others, main in panels:
        for column in others:
            for name in filter(column.of.__contains__, named(main)):
                one, other = label(task, main.at, name), label(task, column.at, name)
                if one != other:
                    found[one] = other
    return [f"Hollow marks of {listed(f'{one} are {other}' for one, other in found.items())}"] if found else []


def panel(ax: Axes, task: Task, columns: list[Column]) -> None:
    main, names = columns[-1], named(columns[-1])
    for column in columns:
        is_main = column is main
        is_hollow = column.at.protocol == SHOWN and len(task.protocols) > 1
        for y, name in enumerate(names):
            if name not in column.of:
                continue
            place, look = column.of[name], look_of(task, name)
            at, y_at = 100 * column.mean(name), y if is_main else y + 2 * BESIDE
            if (spread := place.interval) is not None:
                width = 1 if is_main else 0.6
                ax.hlines(y_at, 100 * spread.low, 100 * spread.high, color=look["color"], linewidth=width)
            face: dict[str, Any] = {"markerfacecolor": "none"} if is_hollow else {}
            face |= {"linestyle": "", "markersize": 0.9 * look["markersize"]}
            ax.plot([at], [y_at], clip_on=False, **(look | face))
        full = 100 * (column.full.mean or 0.0)
        ax.axvline(full, color="black", linestyle="--", linewidth=0.9 if is_main else 0.5)
    across = ax.get_yaxis_transform()
    for y, name in enumerate(names):
        first, last = main.ranks[name]
        words = f"{first}" if first == last else f"{first} to {last}"
        ax.text(1.02, y, words, transform=across, va="center", fontsize=SMALL)
    ax.text(1.02, len(names) - 0.05, "rank", transform=across, va="center", fontsize=SMALL)
    ax.set_yticks(range(len(names)), [label(task, main.at, name) for name in names], fontsize=SMALL)
    ax.set_ylim(-0.6, len(names) - 0.1)
    ax.set_xlim(-2, 102)
    ax.grid(axis="y", visible=False)
    asked = share(main.at.asked)
    ax.set_title(asked if task.asked.has_tokens else f"{asked} of the bytes")


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
