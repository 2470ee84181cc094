"""How all figures look: one column wide, a colour and a marker per method, files that are the same when made again.

Colours are Okabe and Ito's, which people with any colour vision tell apart; markers and dashes say the same again. A
method that is not known here, such as one from a user's own file, has a colour and a marker that follow from its name:
the same in every figure, whatever else is drawn, and none of ours.

Not here: what is drawn (`plots/figures/`).
"""

import colorsys
import hashlib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from evals.foreign import printable

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
MARKERS = "osD^vPX*"
OTHER_MARKERS = "<>phd8"  # of methods that are not in METHODS
DASHES = ("-", "--", ":", "-.")
METHODS = (
    *("full", "oracle", "pqcache", "h2o", "snapkv", "pyramidkv", "infllm", "sparq"),
    *("clusterkv", "quest", "infinigen", "xkv", "streamingllm", "pyramidinfer"),
)
SPECIAL = {"full": ("#000000", "", "--"), "oracle": ("#777777", "X", ":")}
HEAT = "cividis"  # even in lightness, and nearly the same for all colour vision


def new(title: str, about: str, width: float = COLUMN, height: float = 2.6, **grid: Any) -> tuple[Figure, Any]:
    """A figure and its axes; below the title, in small print, what was run."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(**grid)
    small = textwrap.fill(about, int(width * 21), break_on_hyphens=False)
    figure.suptitle(f"{textwrap.fill(title, int(width * 18))}\n{small}", fontsize=5.5)
    return figure, axes


def look(method: str, nth: int = 0) -> dict[str, Any]:
    """Colour, marker and dash of a method; `nth` tells several lines of one method apart."""
    if method in SPECIAL:
        color, marker, dash = SPECIAL[method]
        return {"color": color, "marker": marker, "linestyle": dash}
    hollow = {"markerfacecolor": "white"} if nth % 2 else {}
    if method not in METHODS:
        return unknown(method) | {"linestyle": DASHES[nth % len(DASHES)]} | hollow
    place = METHODS.index(method) - 2
    looks = numbered(place, DASHES[(place // 6 + nth) % len(DASHES)])
    looks["marker"] = MARKERS[(place + nth) % len(MARKERS)]
    return looks | hollow


def unknown(method: str) -> dict[str, Any]:
    """Colour and marker of a method by its name alone, dark enough for white paper and light enough for a dark page."""
    digest = hashlib.sha256(method.encode()).digest()
    hue, lightness, saturation = digest[0] / 256, 0.32 + 0.16 * digest[1] / 256, 0.50 + 0.50 * digest[2] / 256
    red, green, blue = (round(255 * x) for x in colorsys.hls_to_rgb(hue, lightness, saturation))
    return {"color": f"#{red:02X}{green:02X}{blue:02X}", "marker": OTHER_MARKERS[digest[3] % len(OTHER_MARKERS)]}


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
