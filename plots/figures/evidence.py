"""The figures of docs/results.md: panels below each other, one per budget in bytes, a row per method, the best on top.

A filled mark is with the question hidden from the method, a hollow one with the question shown; where only one of them
was asked its marks are filled. Not here: the scores (`plots/evidence.py`), the page (`plots/findings.py`).
"""

from math import fsum
from typing import Any

from matplotlib.axes import Axes

from kvbench.plots import style
from kvbench.plots.evidence import FULL, SHOWN, Scores, listed, mean
from kvbench.plots.stats import rank_ranges
from kvbench.plots.style import Canvas, Picture
from kvbench.results import interval

WIDTH = 4.2  # inches: on a phone its words are as large as the page's
SMALL = 6.5  # points, of names and ranks next to rows
ROW = 0.16  # inches of a method
PANEL = 0.42  # of a panel's title and numbers
BESIDE = 0.18  # of a row, by which a hollow mark stands above its filled one
NOTES = (
    "Bars: 95 % intervals over samples. Dashed: full attention. On the right: the ranks that a method may have, behind "
    "those shown to be better and ahead of those shown to be worse (paired test, corrected for its comparisons)"
)


def picture(scores: Scores) -> Picture:
    ns = sorted({scores.n(*column) for column in scores.columns})
    n = f"{ns[0]}" if len(ns) == 1 else f"{ns[0]} to {ns[-1]}"
    rows = [ROW * len(named(scores, memory)) + PANEL for memory in scores.memories]
    canvas = Canvas().new(
        scores.asked.title, f"{scores.model} · n = {n}", (), WIDTH, fsum(rows),
        nrows=len(rows), squeeze=False, sharex=True, height_ratios=rows,
    )  # fmt: skip
    for (ax,), memory in zip(canvas.axes, scores.memories, strict=True):
        panel(ax, scores, memory)
    canvas.axes[-1][0].set_xlabel(style.SCORE)
    both = [
        "Filled: the question hidden while the prompt was compressed; hollow: shown. Ranks are with it hidden, where "
        "that was asked"
    ]
    canvas.note(*(both if len(scores.scopes) > 1 else []), *longer(scores), NOTES)
    return canvas.finish(legend=False)


def main_scope(scores: Scores, memory: str) -> str:
    """The scope of a budget's figure: with the question hidden, where that was asked."""
    return [scope for scope, each in scores.columns if each == memory][-1]


def named(scores: Scores, memory: str) -> list[str]:
    """The methods that were asked at a budget, the worst first."""
    of = {name: scores.of.get((main_scope(scores, memory), memory, name)) for name in scores.methods}
    return sorted((name for name in of if of[name]), key=lambda name: mean(of[name] or {}))


def longer(scores: Scores) -> list[str]:
    """Names of rows whose hollow marks are of a variant with another name than the filled ones."""
    found: dict[str, str] = {}
    for scope, memory in scores.columns:
        main = main_scope(scores, memory)
        for name in named(scores, memory):
            one, other = scores.label((main, memory, name)), scores.label((scope, memory, name))
            if (scope, memory, name) in scores.of and one != other:
                found[one] = other
    return [f"Hollow marks of {listed(f'{one} are {other}' for one, other in found.items())}"] if found else []


def panel(ax: Axes, scores: Scores, memory: str) -> None:
    main, names = main_scope(scores, memory), named(scores, memory)
    ranks = rank_ranges({name: scores.of[main, memory, name] for name in names})
    for scope in scores.scopes:
        is_main = scope == main
        is_hollow = scope == SHOWN and len(scores.scopes) > 1
        for y, name in enumerate(names):
            if (scope, memory, name) not in scores.of:
                continue
            values, look = scores.of[scope, memory, name], style.look(name)
            at, y_at = 100 * mean(values), y if is_main else y + 2 * BESIDE
            if (spread := interval([*values.values()])) is not None:
                ax.hlines(
                    y_at, 100 * spread.low, 100 * spread.high, color=look["color"], linewidth=1 if is_main else 0.6
                )
            face: dict[str, Any] = {"markerfacecolor": "none"} if is_hollow else {}
            face |= {"linestyle": "", "markersize": 0.9 * look["markersize"]}
            ax.plot([at], [y_at], clip_on=False, **(look | face))
        if (scope, memory, FULL) in scores.of:
            ax.axvline(
                100 * mean(scores.full(scope, memory)), color="black", linestyle="--", linewidth=0.9 if is_main else 0.5
            )
    across = ax.get_yaxis_transform()
    for y, name in enumerate(names):
        first, last = ranks[name]
        words = f"{first}" if first == last else f"{first} to {last}"
        ax.text(1.02, y, words, transform=across, va="center", fontsize=SMALL)
    ax.text(1.02, len(names) - 0.05, "rank", transform=across, va="center", fontsize=SMALL)
    ax.set_yticks(range(len(names)), [scores.label((main, memory, name)) for name in names], fontsize=SMALL)
    ax.set_ylim(-0.6, len(names) - 0.1)
    ax.set_xlim(-2, 102)
    ax.grid(axis="y", visible=False)
    share = scores.asked.share(memory)
    ax.set_title(share if scores.asked.has_tokens else f"{share} of the bytes")
