"""Comparisons that were fixed beforehand, and what came of them: each is made once, when all samples of its set were
answered.

Whoever looks at scores and then picks what to test finds something in any noise. So p is corrected over all comparisons
of the register, and one that is not made yet counts as if its p were the largest.

Not here: which comparisons (docs/register.yaml).
"""
# pyright: basic

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvbench.plots.pages.asked import FULL, Asked, Comparison, Page
from kvbench.plots.pages.columns import Frame, Place, scored, values
from kvbench.plots.stats import Corrected, Paired, corrected_over, paired
from kvbench.results.intervals import LEVEL, chance_below


@dataclass(frozen=True)
class Registered:
    """A comparison of the register; it is made when all samples of its set were answered by both."""

    one: Comparison
    asked: Asked
    n: int
    found: Corrected | None = None


def registered(of: Page, frame: Frame) -> list[Registered]:
    """The outcomes of a register, in its order, corrected over all that it holds."""
    margin, seed, ns, pairs = of.more["margin"], of.more["seed"], dict[Comparison, int](), dict[Comparison, Paired]()
    for one in of.comparisons:
        asked = of.sets[one.set]
        ours, theirs = (values(scored(rows_at(frame, one.set, place))) for place in one.places)
        both = sorted(ours.keys() & theirs.keys())
        ns[one] = len(both)
        if len(both) >= asked.n:
            a, b = (np.array([side[sample] for sample in both]) for side in (ours, theirs))
            pair = paired(a, b, seed)
            pairs[one] = pair if one.asks == "difference" else replace(pair, p=p_within(a - b, margin))
    made = corrected_over(pairs, len(of.comparisons))
    return [Registered(one, of.sets[one.set], ns[one], made.get(one)) for one in of.comparisons]


def within(made: Iterable[Registered]) -> list[Registered]:
    """Those that ask for a margin and are shown."""
    return [one for one in made if one.one.asks == "margin" and one.found is not None and one.found.p < LEVEL]


def differences(made: Iterable[Registered]) -> list[Registered]:
    """Those that ask for a difference and are shown."""
    return [one for one in made if one.one.asks == "difference" and one.found is not None and one.found.sign]


def rows_at(frame: Frame, key: str, place: Place) -> Frame:
    at, method = place
    asked = "" if method == FULL else at.asked
    is_there = (frame["set"] == key) & (frame["protocol"] == at.protocol) & (frame["asked"] == asked)
    return frame[is_there & (frame["method"] == method)]


def p_within(differences: Any, margin: float) -> float:
    """The p-value of a mean loss of `margin` or more, twice: 0.05 is where the 95 % interval's lower end is."""
    found = np.array([-1.0, *sorted(differences)])
    return min(1.0, 2 * chance_below(found, np.ones(len(found)), -margin))
