"""Calls of tools: the kinds of damage of each variant's answers, and what is lost turn by turn.

    python -m kvbench.plots.calls [RUNS] [--out outputs/calls]

The table has a row for each method and mode: the share of answers of each kind (`kvbench/tasks/calls/damage.py`), full
attention's first. The figure shows the same shares, and the score of each turn less full attention's on the same
samples. Intervals (95 %) are over samples: turns of one sample are not independent of each other.

Not here: scores of turns of other tasks (`plots/turns.py`), docs/calls.md (`plots/pages`), which draws by this file.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kvbench.plots import style
from kvbench.plots.command import Page
from kvbench.plots.looks import told_apart
from kvbench.plots.read import Run
from kvbench.plots.scored import Answer, Scored
from kvbench.plots.stats import Paired
from kvbench.plots.style import PAGE, Canvas, Picture
from kvbench.plots.turns import budget_of, groups, lost, mode_rank
from kvbench.results.intervals import SHARE, few_samples
from kvbench.results.sheet import Sheet, as_csv, markdown
from kvbench.results.sheet import write as write_texts
from kvbench.tasks.calls.damage import KINDS

COLOURS = ("#CFD8DC", "#000000", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#0072B2")  # of KINDS
ROW = 0.24  # inches of a bar
WIDTH = 0.3  # of a turn, over which lines stand next to each other, so that their intervals can be seen
NOTE = "Left: shares of answers. Right: the score of a turn less full attention's; bars are 95 % intervals over samples"


class CallAnswer(NamedTuple):
    """An answer that should call a tool."""

    sample: str
    turn: int
    kind: str  # of KINDS
    score: float
    is_again: bool = False  # it is asked for the first call once more


@dataclass(frozen=True)
class VariantCalls:
    """The answers of a variant."""

    label: str
    method: str
    budget: str
    mode: str
    answers: Sequence[CallAnswer]
    is_full: bool

    def share(self, kind: str) -> Scored:
        """Whether each answer is of a kind; answers of one sample count as one, with their mean."""
        return scored([one._replace(score=float(one.kind == kind)) for one in self.answers])

    @cached_property
    def turns(self) -> dict[int, Scored]:
        """The scores of each turn."""
        numbers = sorted({one.turn for one in self.answers})
        return {turn: scored([one for one in self.answers if one.turn == turn]) for turn in numbers}

    def lost(self, full: "VariantCalls") -> dict[int, Paired]:
        return lost(self.turns, full.turns)

    @property
    def stays(self) -> tuple[int, int]:
        """Samples whose first call was damaged, of which the last turn asks again; and of how many it still is."""
        first = {one.sample for one in self.answers if one.turn == 1 and one.kind != KINDS[0]}
        again = [one.kind != KINDS[0] for one in self.answers if one.is_again and one.sample in first]
        return len(again), sum(again)


def scored(answers: Sequence[CallAnswer]) -> Scored:
    return Scored([Answer(one.score, one.sample, one.sample) for one in answers], limits=SHARE, by_sample=True)


def calls_of(run: Run) -> VariantCalls | None:
    """A run's answers that should call a tool; None where there are none."""
    answers = [
        CallAnswer(row.sample_id, row.fields.get("turn", 1), kind, row.score, row.fields.get("group") == "again")
        for row in run.rows
        if row.score is not None and (kind := kind_of(row.fields.get("measures", {}))) is not None
    ]
    if not answers:
        return None
    return VariantCalls(run.result.method_label, run.method, budget_of(run), run.result.protocol, answers, run.is_full)


def kind_of(measures: Any) -> str | None:
    """The kind of damage that an answer's measures say, where they say one."""
    return next((kind for kind in KINDS if measures.get(kind) == 1), None)


# --- the table -----------------------------------------------------------------------------------


def sheet_of(title: str, variants: Sequence[VariantCalls]) -> Sheet:
    full = {one.mode: one for one in variants if one.is_full}
    head = ["method", "budget", "mode", "answers", *(kind.replace("_", " ") for kind in KINDS)]
    head += ["first turn, Δ vs Full", "last turn, Δ vs Full", "still damaged when asked again"]
    lines = []
    for one in variants:
        pairs = list(one.lost(full[one.mode]).values()) if one.mode in full and not one.is_full else []
        n, still = one.stays
        lines.append(
            [one.label, one.budget or "-", one.mode, str(len(one.answers)), *(words(one.share(kind)) for kind in KINDS)]
            + [difference(pair) for pair in (pairs[:1] + pairs[-1:] if len(pairs) > 1 else [None, None])]
            + [f"{still} of {n}" if n else "-"]
        )
    return Sheet(head, lines, title=title)


def words(share: Scored) -> str:
    """A share in percent, with its interval where there are samples enough."""
    ends = "" if share.few or share.interval is None else f" ({span(share.interval)})"
    return f"{100 * (share.mean or 0):.0f}{ends}"


def difference(pair: Paired | None) -> str:
    if pair is None:
        return "-"
    ends = "" if few_samples(pair.n) or pair.difference is None else f" ({span(pair.difference, '+')})"
    return f"{100 * pair.mean:+.0f}{ends}"


def span(interval: Any, sign: str = "") -> str:
    return f"{100 * interval.low:{sign}.0f} to {100 * interval.high:{sign}.0f}"


# --- the figure ----------------------------------------------------------------------------------


def draw(title: str, about: str, variants: Sequence[VariantCalls], runs: Sequence[Run] = ()) -> Picture:
    """Two panels for each mode: the kinds of damage, and what is lost turn by turn."""
    modes: dict[str, list[VariantCalls]] = {}
    for one in variants:
        modes.setdefault(one.mode, []).append(one)
    tallest = max(map(len, modes.values()))
    height = len(modes) * (max(1.2, ROW * tallest) + 0.45)
    canvas = Canvas().new(title, about, runs, PAGE, height, nrows=len(modes), ncols=2, squeeze=False)
    for (left, right), (mode, drawn) in zip(canvas.axes, modes.items(), strict=True):
        bars(left, drawn)
        lines(right, drawn)
        for ax in (left, right):
            ax.set_title(mode if len(modes) > 1 else "")
    canvas.note(NOTE)
    return canvas.finish(columns=7)


def bars(ax: Axes, variants: Sequence[VariantCalls]) -> None:
    """A bar for each variant, of the shares of the kinds."""
    several = len({one.budget for one in variants}) > 2  # full attention's and another
    names = [f"{one.label} {one.budget}" if several else one.label for one in variants]
    start = [0.0] * len(variants)
    for kind, colour in zip(KINDS, COLOURS, strict=True):
        shares = [100 * (one.share(kind).mean or 0) for one in variants]
        ax.barh(range(len(variants)), shares, left=start, color=colour, label=kind.replace("_", " "), height=0.75)
        start = [a + b for a, b in zip(start, shares, strict=True)]
    ax.set_yticks(range(len(variants)), names)
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.set_xlabel("share of answers, %")
    ax.grid(axis="y", visible=False)


def lines(ax: Axes, variants: Sequence[VariantCalls]) -> None:
    """A line for each variant, of its score less full attention's by turn."""
    full = next((one for one in variants if one.is_full), None)
    ax.axhline(0, color=style.ink(), linewidth=0.7)
    others = [one for one in variants if not one.is_full] if full is not None else []
    for i, one in enumerate(others):
        assert full is not None
        pairs = one.lost(full)
        look, beside = style.look(one.method), WIDTH * (i / max(1, len(others) - 1) - 0.5)
        x = [turn + beside for turn in pairs]
        for at, pair in zip(x, pairs.values(), strict=True):
            if pair.difference is not None and not few_samples(pair.n):
                ax.vlines(at, 100 * pair.difference.low, 100 * pair.difference.high, color=look["color"], linewidth=0.6)
        ax.plot(x, [100 * pair.mean for pair in pairs.values()], label=one.label, **look)
    ax.set_xlabel("turn")
    ax.set_ylabel("score, Δ vs Full")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


# --- the page ------------------------------------------------------------------------------------


def write(out: Path, runs: Sequence[Run]) -> list[Path]:
    """calls.md, calls.csv, and a figure for each group of runs; nothing without answers that should call a tool."""
    found = {run.folder: one for run in runs if (one := calls_of(run)) is not None}
    of_calls = sorted((run for run in runs if run.folder in found), key=lambda run: (mode_rank(run), not run.is_full))
    sets = groups(of_calls)
    records, pages, drawn = list[dict[str, Any]](), list[str](), list[Path]()
    for i, (title, each) in enumerate(sets.items(), 1):
        variants = [found[run.folder] for run in each]
        pages.append(markdown(sheet_of(title, variants)))
        for one in variants:
            row = {
                "set": title,
                "method": one.label,
                "budget": one.budget,
                "mode": one.mode,
                "answers": len(one.answers),
            }
            records += [row | {"kind": kind, **ends(one.share(kind))} for kind in KINDS]
        with matplotlib.rc_context(Canvas().rc), told_apart(run.method for run in each):
            picture = draw("What becomes of calls", title, variants, each)
            drawn += style.save(picture, out, f"calls-{i}", ["png", "svg"])[:2]
    texts = {"md": "\n".join(pages), "csv": as_csv(records)}
    return [*write_texts(out, "calls", texts), *drawn] if sets else []


def ends(share: Scored) -> dict[str, float | None]:
    spread = share.interval
    return {"share": share.mean} | {end: spread and float(getattr(spread, end)) for end in ("low", "high")}


NOTHING = "no run below {} has answers that should call a tool"
main = Page("kvbench.plots.calls", (__doc__ or "").partition("\n")[0], write, NOTHING, "outputs/calls").main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
