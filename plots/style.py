"""How all figures look: as wide as paper, page or phone, a method's look the same in each, text that can be read there.

Lines that are no methods, such as layers, have Okabe and Ito's colours. Files hold no date: the same runs make the same
bytes.

Not here: how a table is drawn (`plots/figures/chart.py`), the look of each method (`plots/looks.py`).
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvbench.engine.terminal import printable
from kvbench.plots import looks
from kvbench.plots.looks import DASHES as DASHES
from kvbench.plots.looks import HEAT as HEAT
from kvbench.plots.read import Run

COLUMN = 3.5  # inches, a column of a two-column paper
PAGE = 7.16
PHONE = 390 / 96
SCORE = "score, 0 to 100"  # of axes
SMALL = 7  # points; nothing is smaller, at the width that it is printed in
RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that files do not depend on the machine
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "figure.titlesize": SMALL,
    "figure.labelsize": 8,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "legend.fontsize": SMALL,
    "legend.title_fontsize": SMALL,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "pdf.fonttype": 42,
    "svg.hashsalt": "kvbench",
    "savefig.dpi": 300,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
}
GROUNDS = ("#FFFFFF", "#14171A")  # of pages, as the report's are
INKS = ("#000000", "#E6E9EC")
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vPX*"  # of lines that are no methods
FORMATS: dict[str, dict[str, None]] = {  # what each would say of today, left out
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}
CHARACTERS = 18  # of small print in an inch
LINE = 0.135  # inches, of small print
HANDLE = 5  # characters that a legend's picture takes


@dataclass(frozen=True)
class Canvas:
    """How figures are drawn: how wide they will be printed, with titles or without, the cost on their x axes."""

    width: float | None = None  # inches; None: as each figure needs
    titled: bool = True
    axis: str | None = None  # a name of `AXES` in `plots/figures/rows.py`; None: each figure's own
    is_dark: bool = False
    text: float = 1.0  # how much larger than on paper; a phone is held further away than its width says

    @property
    def rc(self) -> dict[Any, Any]:
        """Matplotlib's settings, within which everything of a figure is drawn."""
        ground, ink = GROUNDS[self.is_dark], INKS[self.is_dark]
        sizes = {key: self.text * value for key, value in RC.items() if key.endswith("size") and value in (SMALL, 8)}
        inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        grounds = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
        own = dict.fromkeys(inks, ink) | dict.fromkeys(grounds, ground)
        return RC | sizes | own | ({"grid.color": "#3A424B"} if self.is_dark else {})

    def new(
        self, title: str, about: str, runs: Iterable[Run], width: float = COLUMN, height: float = 2.1, **grid: Any
    ) -> "Picture":
        """A figure whose axes take `height`; titles, legend and notes come on top."""
        figure = Figure(figsize=(self.width or min(width, PAGE), height), layout="constrained")
        FigureCanvasAgg(figure)
        return Picture(figure, figure.subplots(**grid), title, about, list(runs), self.titled, text=self.text)

    def columns(self, n: int, each: float = 1.75) -> int:
        """How many of n panels fit side by side."""
        return max(1, min(n, 4, int((self.width or PAGE) / (each * self.text))))


@dataclass
class Picture:
    """A figure and what must be said next to it."""

    figure: Figure
    axes: Any
    title: str
    about: str  # what was run
    runs: list[Run]  # that were drawn
    titled: bool
    notes: list[str] = field(default_factory=list[str])  # that explain marks; in the figure too
    said: list[str] = field(default_factory=list[str])  # next to the figure only
    text: float = 1.0

    def note(self, *sentences: str) -> None:
        self.notes += [each for each in sentences if each and each not in self.notes]

    @property
    def caption(self) -> str:
        """The caption as text, to stand below the figure."""
        return " ".join(f"{part.rstrip('.')}." for part in (self.title, self.about, *self.notes, *self.said) if part)

    def finish(self, columns: int = 4, legend: bool = True) -> "Picture":
        """Finish with a title, and below all panels one legend and the notes; the panels keep their height."""
        figure, fit = self.figure, int(self.figure.get_figwidth() * CHARACTERS / self.text)
        more = 0
        if self.titled:
            words = [wrapped(self.title, fit), *([wrapped(self.about, fit)] if self.about else [])]
            figure.suptitle("\n".join(words))
            more += sum(word.count("\n") + 1 for word in words)
        entries: dict[str, Any] = {}
        for ax in figure.axes if legend else ():
            handles, labels = ax.get_legend_handles_labels()
            for handle, label in zip(handles, labels, strict=True):
                entries.setdefault(wrapped(label, fit - HANDLE - 2), handle)
        notes = "\n".join(wrapped(sentence, fit) for sentence in self.notes)
        if entries or notes:
            longest = max((len(line) for label in entries for line in label.split("\n")), default=0)
            n_columns = max(1, min(columns, fit // (longest + HANDLE + 2), len(entries)))
            figure.legend(
                list(entries.values()), list(entries), loc="outside lower center", ncols=n_columns, title=notes or None,
                alignment="left",
            )  # fmt: skip
            rows = [list(entries)[i : i + n_columns] for i in range(0, len(entries), n_columns)]
            more += sum(max(label.count("\n") + 1 for label in row) * 1.15 for row in rows) + 1.5
            more += notes.count("\n") + 1 if notes else 0
        figure.set_figheight(figure.get_figheight() + LINE * self.text * more)
        return self


def wrapped(text: str, fit: int) -> str:
    return textwrap.fill(text, fit, break_on_hyphens=False)


def ink() -> str:
    """The colour of text: black, or light where the page is dark."""
    return to_hex(rcParams["text.color"]).upper()


def look(method: str, nth: int = 0) -> dict[str, Any]:
    """A method's look as matplotlib has it; `nth` tells several lines of one method apart, by dash and edge alone."""
    found = looks.look(method)
    corners, colour = looks.SHAPES[found.shape], ink() if found.colour == looks.INK else found.colour
    # Matplotlib draws all shapes as wide as each other.
    size = max((abs(x) for corner in corners for x in corner), default=0.9)
    return {
        "color": colour,
        "marker": [*corners, corners[0]] if corners else "o",
        "markersize": 1.25 * size * rcParams["lines.markersize"],
        "markeredgecolor": ink() if nth % 2 else colour,
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


def save(picture: Picture, folder: Path, name: str, formats: Sequence[str]) -> list[Path]:
    """A file per format without a date or a version, and the caption as text next to them."""
    folder.mkdir(parents=True, exist_ok=True)
    for text in picture.figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_text("\n".join(map(printable, text.get_text().split("\n"))))
    picture.figure.draw_without_rendering()  # laid out once for all formats: that takes most of the time
    picture.figure.set_layout_engine("none")
    paths = [folder / f"{name}.{kind}" for kind in formats]
    for path, kind in zip(paths, formats, strict=True):
        picture.figure.savefig(path, metadata=FORMATS[kind])
    caption = folder / f"{name}.txt"
    caption.write_text(printable(picture.caption) + "\n", encoding="utf-8", errors="replace")
    return [*paths, caption]
