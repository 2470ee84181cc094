"""How all figures look: one column wide, a method's look the same in each, files that are the same when made again.

Lines that are no methods, such as layers, have Okabe and Ito's colours.

Not here: what is drawn (`plots/figures/`), the look of each method (`plots/looks.py`).
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from evals.foreign import printable
from plots import looks
from plots.looks import DASHES as DASHES
from plots.looks import HEAT as HEAT

COLUMN = 3.5  # inches, a column of a two-column paper
PAGE = 7.16
RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that files do not depend on the machine
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "legend.fontsize": 6,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
}
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vPX*"  # of lines that are no methods


def new(title: str, about: str, width: float = COLUMN, height: float = 2.6, **grid: Any) -> tuple[Figure, Any]:
    """A figure and its axes; below the title, in small print, what was run."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(**grid)
    small = textwrap.fill(about, int(width * 21), break_on_hyphens=False)
    figure.suptitle(f"{textwrap.fill(title, int(width * 18))}\n{small}", fontsize=5.5)
    return figure, axes


def look(method: str, nth: int = 0) -> dict[str, Any]:
    """A method's look as matplotlib has it; `nth` tells several lines of one method apart, by dash and edge alone."""
    found = looks.look(method)
    corners = looks.SHAPES[found.shape]
    # Matplotlib draws all shapes as wide as each other.
    size = max((abs(x) for corner in corners for x in corner), default=0.9)
    return {
        "color": found.colour,
        "marker": [*corners, corners[0]] if corners else "o",
        "markersize": 1.25 * size * rcParams["lines.markersize"],
        "markeredgecolor": looks.INK if nth % 2 else found.colour,
        "markeredgewidth": 0.6,
        "linestyle": DASHES[(DASHES.index(found.dash) + nth) % len(DASHES)],
    }


def numbered(i: int, dash: str = "-") -> dict[str, Any]:
    """The i-th of lines that are no methods."""
    return {
        "color": PALETTE[i % 6],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": dash,
    }


FREE_ROWS, ROW_INCHES = (
    3,
    0.16,
)  # of a legend: what a figure has room for, and what a row more takes


def legend(figure: Figure, axes: Sequence[Axes] | Axes, columns: int = 4) -> None:
    """One legend for all panels, below them."""
    entries: dict[str, Any] = {}
    for ax in [axes] if isinstance(axes, Axes) else axes:
        handles, labels = ax.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            entries.setdefault(label, handle)
    if entries:
        longest = max(len(label) for label in entries)
        fit = max(1, int(figure.get_figwidth() * 20 / (longest + 6)))
        n_columns = min(columns, fit, len(entries))
        # The axes keep their height, whatever stands below them.
        n_more = max(0, -(-len(entries) // n_columns) - FREE_ROWS)
        figure.set_figheight(figure.get_figheight() + ROW_INCHES * n_more)
        figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=n_columns)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """PDF and PNG without a date or a version, so that the same runs make the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text("\n".join(map(printable, text.get_text().split("\n"))))
    paths = [folder / f"{name}.pdf", folder / f"{name}.png"]
    figure.savefig(paths[0], metadata={"CreationDate": None, "Producer": None, "Creator": None})
    figure.savefig(paths[1], metadata={"Software": None})
    return paths
