"""The pictures of pages: what methods keep by budget, and a set's scores as a map of heat.

SVGs have no ground of their own and turn their ink light where the reader's page is dark; a map, whose cells have
colours, keeps its white ground.

Not here: the answers (`columns.py`), the pages (`*.md.j2`).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from kvbench.plots.pages.asked import FULL, SCOPES, share
from kvbench.plots.pages.columns import Column, Task, asked_everywhere, by_all_columns
from kvbench.plots.pages.methods import BITS, BOTH, TOKENS, kind
from kvbench.plots.pages.queries import Cost, unlike_floor
from kvbench.plots.pages.words import plain_name
from kvbench.plots.style import SMALL, Canvas, Picture

ROW = 0.17  # inches of a method in a map
WIDTH = 6.4  # inches
MARKS = "oD^s"  # a budget each, the largest first
SPREAD = 0.24  # of a row, between the marks of two budgets
HEAT, SHADE = colormaps["Blues"], colormaps["cividis_r"]
LONG = re.compile(r"(\.\d\d)\d+")
HASHED = re.compile(r"(?<=[\"#])[mp][0-9a-f]{10}(?=[\")])")  # of what is clipped, to digits that differ from run to run
SVG: dict[Any, Any] = {"svg.hashsalt": "kvbench", "svg.fonttype": "none"}  # the same bytes again, and text as text


# --- what is kept, by budget ---------------------------------------------------------------------


def kept(task: Task, costs: Mapping[str, Cost], note: str) -> Picture:
    """A panel for each scope, a row for each method that was asked at all budgets, a mark for each budget."""
    names = asked_everywhere(task)[::-1]
    height = 0.33 * len(names) + 0.5
    canvas = Canvas().new(
        task.asked.title, f"{task.model} · n = {task.asked.n}", (), WIDTH, height,
        ncols=len(task.protocols), squeeze=False, sharey=True,
    )  # fmt: skip
    times = [costs[name].step for name in names if name in costs]
    norm = Normalize(min(times, default=0.0), max(times, default=1.0))
    for ax, protocol in zip(canvas.axes[0], task.protocols, strict=True):
        columns = [column for column in task.columns if column.at.protocol == protocol]
        panel(ax, names, columns, costs, norm)
        ax.set_title(SCOPES[protocol])
        ax.set_xlabel("share kept, %")
        ax.tick_params(axis="y", length=0)
    first = canvas.axes[0][0]
    first.set_yticks(range(len(names)), [plain_name(task, name) for name in names])
    first.set_ylim(-0.6, len(names) - 0.4)
    if times:
        canvas.figure.colorbar(
            ScalarMappable(norm, SHADE), ax=canvas.axes[0].tolist(), label="step at 1/4, full attention: 1"
        )
    canvas.note(note)
    return canvas.finish(columns=3)


def panel(
    ax: Axes, names: Sequence[str], columns: Sequence[Column], costs: Mapping[str, Cost], norm: Normalize
) -> None:
    for i, column in enumerate(columns):
        for y, name in enumerate(names):
            if (found := column.share(name) if name in column.of else None) is None:
                continue
            cost, at = costs.get(name), y + SPREAD * (1 - i)
            colour = "#999999" if cost is None else SHADE(norm(cost.step))
            if (ends := column.ends(name)) is not None:
                ax.hlines(at, 100 * ends[0], 100 * ends[1], color="#999999", linewidth=0.7)
            ax.plot(100 * found, at, marker=MARKS[i], color=colour, linestyle="", markersize=4.5, markeredgewidth=0)
        ax.plot([], [], marker=MARKS[i], color="#777777", linestyle="", label=f"{share(column.at.asked)} of the bytes")
    for at in (0, 100):  # random tokens, full attention
        ax.axvline(at, color="black", linestyle="--", linewidth=0.7)
    ax.set_xlim(-50, 130)
    ax.grid(axis="y", visible=False)


# --- a map of heat -------------------------------------------------------------------------------


def heat(task: Task, note: str) -> Picture:
    """A row a method, a column a budget and scope: its score, and as colour what it keeps of full attention's lead."""
    names = [FULL, *rows_of(task)]
    canvas = Canvas().new(
        task.asked.title, f"{task.model} · n = {task.asked.n or task.columns[0].n}", (),
        1.9 + 0.72 * len(task.columns), ROW * len(names) + 0.4,
    )  # fmt: skip
    ax = canvas.axes
    for x, column in enumerate(task.columns):
        unlike = {*unlike_floor(column)} if column.floor else {*column.of}
        for y, name in enumerate(names):
            if name in column.of:
                cell(ax, x, y, column, name, name in unlike or name in (FULL, column.floor))
    ax.set_xlim(-0.5, len(task.columns) - 0.5)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xticks(range(len(task.columns)), [head(column) for column in task.columns], fontsize=SMALL)
    ax.set_yticks(range(len(names)), [plain_name(task, name) for name in names], fontsize=SMALL)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(False)
    any_over = any(column.is_over(name) for column in task.columns for name in column.of)
    canvas.note(f"{note}; !: over its budget" if any_over else note)
    return canvas.finish(legend=False)


def rows_of(task: Task) -> list[str]:
    """The best first, of each kind by itself where kinds are told apart."""
    names = by_all_columns(task.columns)
    return sorted(names, key=lambda name: (BITS, BOTH, TOKENS).index(kind(name))) if task.asked.by_kind else names


def head(column: Column) -> str:
    """What was seen of the question, and the budget."""
    return f"{SCOPES[column.at.protocol].removeprefix('question ')}\n{share(column.at.asked)}"


def cell(ax: Axes, x: int, y: int, column: Column, name: str, is_told: bool) -> None:
    mean = column.mean(name)
    found = 1.0 if name == FULL else column.share(name)
    heat = mean / (column.mean(FULL) or 1.0) if found is None else found
    colour = HEAT(0.65 * min(1.0, max(0.0, heat)))
    ax.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour, linewidth=0))
    words = f"{'!' * column.is_over(name)}{100 * mean:.0f}"
    ax.text(x, y, words if is_told else f"({words})", ha="center", va="center", fontsize=SMALL)


DARK = """<style>
@media (prefers-color-scheme: dark) {
 text, [style*="fill: #000000"] { fill: #e6e9ec !important }
 [style*="stroke: #000000"] { stroke: #e6e9ec !important }
 [style*="stroke: #dddddd"] { stroke: #3a424b !important }
}
</style>
"""


def save(picture: Picture, path: Path, has_ground: bool = False) -> None:
    """Save as SVG without date or version, to a hundredth of a point: the same runs make the same bytes."""
    metadata: dict[str, None] = {"Date": None, "Creator": None}
    picture.figure.savefig(path, format="svg", metadata=metadata, transparent=not has_ground)
    text = LONG.sub(r"\1", path.read_text(encoding="utf-8"))
    if not has_ground:
        text = text.replace(" <defs>\n", f"{DARK} <defs>\n", 1)
    ids = {found: f"s{i}" for i, found in enumerate(dict.fromkeys(HASHED.findall(text)))}
    text = HASHED.sub(lambda found: ids[found[0]], text)
    path.write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines()), encoding="utf-8")
