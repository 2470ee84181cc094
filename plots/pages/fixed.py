"""Comparisons that were fixed beforehand, and what came of them.

    outcomes     of docs/results.md: on the samples that nobody had seen when a comparison was chosen
    findings     those that a reader should remember, where they are shown
    registered   of docs/register.md: each is made once, when all samples of its set were answered

Whoever looks at scores and then picks what to test finds something in any noise. So a comparison says how many samples
were known when it was chosen, and those do not test it. One chosen when all were known is no test: it is told as chosen
afterwards, and corrected for all comparisons of its kind. Else p is corrected over all comparisons of the page; one
without samples counts as if its p were the largest.

Not here: which comparisons (the YAML files).
"""
# pyright: basic

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvbench.plots.pages.asked import FULL, ITSELF, Asked, Comparison, Finding, Page
from kvbench.plots.pages.columns import Frame, Place, Task, less, scored, values
from kvbench.plots.scored import Scored
from kvbench.plots.stats import Corrected, Paired, corrected_over, paired
from kvbench.results.intervals import chance_below


def task_of(one: Comparison, every: Sequence[Task]) -> Task | None:
    """The task of a comparison, where both of its places were asked."""
    task = next((task for task in every if task.asked.key == one.set), None)
    return task if task is not None and None not in map(task.place, one.places) else None


def fresh(one: Comparison, every: Sequence[Task]) -> tuple[Scored, Scored] | None:
    """Both places' scores on the samples that test it; None where there are none, or nothing can be lost."""
    task = task_of(one, every)
    if task is None or not has_room(one, task):
        return None
    places = [place for place in map(task.place, one.places) if place is not None]
    unseen = [replace(place, answers=place.answers[one.seen :]) for place in places]
    both = [sample for sample in values(unseen[0]) if sample in values(unseen[1])]
    return (unseen[0], unseen[1]) if both else None


def is_low(one: Comparison, every: Sequence[Task]) -> bool:
    """Whether both places were asked, and full attention answers too little for a method to lose."""
    return (task := task_of(one, every)) is not None and not has_room(one, task)


def has_room(one: Comparison, task: Task) -> bool:
    return all(column is not None and task.has_room(column) for column in (task.at(at) for at, _ in one.places))


def outcomes(comparisons: Sequence[Comparison], every: Sequence[Task]) -> dict[Comparison, Corrected]:
    """Outcomes of those that can be tested so far; the others count in the correction as if their p were larger."""
    pairs = {one: less(*found) for one in comparisons if (found := fresh(one, every)) is not None}
    return corrected_over(pairs, len(comparisons))


def looked_at(one: Comparison, task: Task) -> Corrected | None:
    """A comparison on all samples, among all comparisons of its kind."""
    if one.other == FULL:
        return task.against_full.get((one.at, one.one))
    if one.other == ITSELF:
        return task.hiding.get((one.at, one.one))
    column = task.at(one.at)
    pairs = {} if column is None else column.between
    turned = pairs.get((one.other, one.one))
    return pairs.get((one.one, one.other)) or (None if turned is None else turned.turned)


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
        ours, theirs = (values(scored(rows_at(frame, one.set, place), asked)) for place in one.places)
        both = sorted(ours.keys() & theirs.keys())
        ns[one] = len(both)
        if len(both) >= asked.n:
            a, b = (np.array([side[sample] for sample in both]) for side in (ours, theirs))
            pair = paired(a, b, seed)
            pairs[one] = pair if one.asks == "difference" else replace(pair, p=p_within(a - b, margin))
    made = corrected_over(pairs, len(of.comparisons))
    return [Registered(one, of.sets[one.set], ns[one], made.get(one)) for one in of.comparisons]


def rows_at(frame: Frame, key: str, place: Place) -> Frame:
    at, method = place
    asked = "" if method == FULL else at.asked
    is_there = (frame["set"] == key) & (frame["protocol"] == at.protocol) & (frame["asked"] == asked)
    return frame[is_there & (frame["method"] == method)]


def p_within(differences: Any, margin: float) -> float:
    """The p-value of a mean loss of `margin` or more, twice: 0.05 is where the 95 % interval's lower end is."""
    found = np.array([-1.0, *sorted(differences)])
    return min(1.0, 2 * chance_below(found, np.ones(len(found)), -margin))


@dataclass(frozen=True)
class Told:
    """A comparison that shows a difference, on the samples that test it or else on all."""

    one: Comparison
    task: Task
    found: Corrected
    places: Sequence[Scored]
    is_fresh: bool


def told(one: Comparison, of: Page, every: Sequence[Task]) -> Told | None:
    task, unseen = task_of(one, every), fresh(one, every)
    if task is None:
        return None
    found = outcomes(of.comparisons, every).get(one) or looked_at(one, task)
    if found is None or not found.sign:
        return None
    whole = [place for place in map(task.place, one.places) if place is not None]
    return Told(one, task, found, unseen or whole, unseen is not None)


def findings(of: Page, every: Sequence[Task]) -> list[tuple[Finding, Told, Told | None]]:
    """Each finding that is shown, with its comparison and the one beside it, where that belongs to it."""
    found = list[tuple[Finding, Told, Told | None]]()
    for finding in of.findings:
        first = told(finding.of, of, every)
        second = None if finding.beside is None else told(finding.beside, of, every)
        if first is None:
            continue
        if second is not None and (second.found.sign != first.found.sign) != finding.is_turned:
            second = None
        if second is not None or not finding.is_turned:
            found.append((finding, first, second))
    return found[: of.more["most"]]
