"""Answers by column: those of all methods of a set to the samples that all of them have, and how they compare.

    tasks       the sets of a page that have answers
    Task        one set: differences to full attention with Holm's correction, what a loss must be to be shown
    Column      one budget and scope of it: groups that cannot be told apart, what is kept above the floor

Not here: reading (`read.py`), comparisons fixed beforehand (`fixed.py`), what is asked of several sets (`queries.py`).
"""
# pyright: basic

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations
from math import floor, fsum, log2
from typing import Any

from kvbench.plots.pages.asked import FLOORS, FULL, SCOPES, SHOWN, Asked, At, Page, size
from kvbench.plots.pages.methods import BITS, BOTH, TOKENS, default_of, kind
from kvbench.plots.scored import Answer, Scored
from kvbench.plots.stats import Corrected, Paired, corrected
from kvbench.results.intervals import LEVEL

Frame = Any  # of pandas, whose own types leave open what a cell is
Place = tuple[At, str]  # a column and a method


def scored(rows: Frame) -> Scored:
    """Answers as samples: those to one context, dialogue or prompt count as one, with their mean."""
    together: dict[str, list[float]] = {}
    for sample, value in zip(rows["sample"], rows["score"], strict=True):
        together.setdefault(sample, []).append(float(value))
    return Scored(tuple(Answer(fsum(each) / len(each), sample, sample) for sample, each in together.items()))


def values(place: Scored) -> Mapping[str, float]:
    """A place's values by sample."""
    return place.values.get("", {})


@cache
def less(one: Scored, other: Scored) -> Paired:
    """Values less another's on the samples that both have; once, though a page compares the same two in many places."""
    found = one.against(other)
    assert found is not None, "no sample was answered by both"
    return found


@dataclass(frozen=True, eq=False)
class Column:
    """The answers of all methods to the samples that all of them have."""

    asked: Asked
    at: At
    of: Mapping[str, Scored]  # by method, full attention's among them
    rows: Mapping[str, Frame]

    @property
    def full(self) -> Scored:
        return self.of[FULL]

    @property
    def n(self) -> int:
        return self.full.n

    @property
    def methods(self) -> list[str]:
        return [name for name in self.of if name != FULL]

    @property
    def words(self) -> str:
        return self.asked.words(self.at)

    def mean(self, method: str) -> float:
        return self.of[method].mean or 0.0

    def cost(self, method: str, key: str) -> float | None:
        """The mean of something else that is kept of each answer; None where it was not measured."""
        found = self.rows[method][key].dropna() if method in self.rows else None
        return None if found is None or found.empty else float(found.mean())

    def held(self, method: str) -> float | None:
        """Share of full attention's bytes."""
        mine, full = (self.cost(name, "bytes_resident_device") for name in (method, FULL))
        return mine / full if mine is not None and full else None

    def is_over(self, method: str) -> bool:
        """Whether an answer took more than the budget, as some papers' settings do; unknown of the oldest answers."""
        within = self.cost(method, "within_budget")
        return within is not None and within < 1

    @cached_property
    def answered(self) -> int:
        """Samples on which full attention scores, so that a method has something to lose."""
        return sum(value > 0 for value in values(self.full).values())

    @cached_property
    def between(self) -> dict[tuple[str, str], Corrected]:
        """Every two methods, the first less the second; corrected over all pairs."""
        return between(self, self.methods)

    @cached_property
    def told_from_floor(self) -> dict[str, Corrected]:
        """Each method less random tokens; corrected over all that were asked at this budget."""
        if self.floor is None:
            return {}
        return corrected(
            {name: less(self.of[name], self.of[self.floor]) for name in self.methods if name != self.floor}
        )

    @property
    def floor(self) -> str | None:
        """The method that chooses at random, where it was asked."""
        return next((name for name in FLOORS if name in self.of), None)

    @cached_property
    def lead(self) -> float:
        """Full attention's over random tokens; 0 where none is shown."""
        return 0.0 if self.floor is None else less(self.full, self.of[self.floor]).lead

    def share(self, method: str) -> float | None:
        """Of full attention's lead, what a method keeps; None where no lead is shown."""
        return (self.mean(method) - self.mean(self.floor)) / self.lead if self.floor and self.lead else None

    def ends(self, method: str) -> tuple[float, float] | None:
        """The same for the ends of the interval of its difference to full attention."""
        spread = less(self.of[method], self.full).difference
        return (1 + spread.low / self.lead, 1 + spread.high / self.lead) if spread is not None and self.lead else None


def settings(column: Column) -> dict[tuple[str, str], Corrected]:
    """Each preset less its method as it is here, where both were asked; corrected over all of these."""
    pairs = [(default_of(name), name) for name in column.methods if default_of(name) in {*column.of} - {name}]
    return corrected({(ours, theirs): less(column.of[theirs], column.of[ours]) for ours, theirs in pairs})


def between(column: Column, names: Sequence[str]) -> dict[tuple[str, str], Corrected]:
    return corrected({(a, b): less(column.of[a], column.of[b]) for a, b in combinations(names, 2)})


def groups(column: Column, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The best method with those that are not shown to be worse, and the others, each in the order of scores."""
    if not names:
        return [], []
    found = column.between if [*names] == column.methods else between(column, names)
    names = sorted(names, key=lambda name: -column.mean(name))
    apart = {name for pair, one in found.items() if one.sign and names[0] in pair for name in pair} - {names[0]}
    return [name for name in names if name not in apart], [name for name in names if name in apart]


@dataclass(frozen=True, eq=False)
class Task:
    """The answers of one set."""

    asked: Asked
    model: str
    columns: Sequence[Column]
    rows: Frame  # all, whether their column counts or not

    def at(self, at: At) -> Column | None:
        return next((column for column in self.columns if column.at == at), None)

    @property
    def protocols(self) -> list[str]:
        return [protocol for protocol in SCOPES if any(column.at.protocol == protocol for column in self.columns)]

    @cached_property
    def methods(self) -> list[str]:
        return by_all_columns(self.columns)

    @cached_property
    def labels(self) -> dict[Place, str]:
        """What runs call their methods, by place."""
        found: dict[Place, dict[str, None]] = {}
        keys = zip(*(self.rows[name] for name in ("protocol", "asked", "method")), strict=True)
        for (*at, method), label in zip(keys, self.rows["method_label"], strict=True):
            if label:
                found.setdefault((At(*at), method), {})[label] = None
        return {place: " or ".join(each) for place, each in found.items()}

    @cached_property
    def against_full(self) -> dict[Place, Corrected]:
        """Corrected over all variants that were asked with the same scope, at whatever budget."""
        pairs = {
            (column.at, name): less(column.of[name], column.full) for column in self.columns for name in column.methods
        }
        return corrected(pairs, lambda place: place[0].protocol)

    def least_lost(self, protocol: str) -> int:
        """Number of samples on which a method must do worse, and on none better, to be shown to be worse.

        Of so many differences that all point one way the sign-flip test finds 2 of 2^j signs as extreme.
        """
        family = sum(len(column.methods) for column in self.columns if column.at.protocol == protocol)
        return floor(1 + log2(max(1, family) / LEVEL)) + 1

    def is_tight(self, column: Column) -> bool:
        """Whether a method must lose more than half of what full attention answers before that is shown."""
        return column.answered < 2 * self.least_lost(column.at.protocol)


def tasks(of: Page, frame: Frame) -> tuple[Task, ...]:
    """The sets of a page that have answers; of several models that with the most counts."""
    found = list[Task]()
    for asked in of.sets.values():
        rows = frame[frame["set"] == asked.key]
        if len(rows) and not asked.is_cost:
            model = Counter(rows["model"]).most_common(1)[0][0]
            rows = rows[rows["model"] == model]
            if columns := columns_of(asked, rows):
                order = [FULL, *Task(asked, model, columns, rows).methods]
                columns = [replace(one, of={name: one.of[name] for name in order if name in one.of}) for one in columns]
                found.append(Task(asked, model, columns, rows))
    return tuple(found)


def columns_of(asked: Asked, rows: Frame) -> list[Column]:
    """The columns of a set; one that `is_ordered` counts when all of its samples were answered."""
    by_place: dict[At, dict[str, Frame]] = {}
    for (*at, method), part in rows.groupby(["protocol", "asked", "method"], sort=False):
        by_place.setdefault(At(*at), {})[method] = part.drop_duplicates("id", keep="last").set_index("id", drop=False)
    found = list[Column]()
    for at, methods in by_place.items():
        full = by_place.get(at._replace(asked=""), {}).get(FULL)
        if not at.asked or full is None:
            continue
        mine = {FULL: full} | {name: part for name, part in methods.items() if len(part) >= asked.enough * len(full)}
        both = [id for id in full.index if all(id in part.index for part in mine.values())]
        mine = {name: part.loc[both] for name, part in mine.items()}
        if both and (not asked.is_ordered or mine[FULL]["sample"].nunique() >= asked.n):
            found.append(Column(asked, at, {name: scored(part) for name, part in mine.items()}, mine))
    return sorted(found, key=lambda one: (one.at.protocol != SHOWN, -size(one.at.asked)))


def by_all_columns(columns: Sequence[Column]) -> list[str]:
    """All methods but full attention by their mean over columns, where one that a method lacks counts as nothing."""
    names = {name for column in columns for name in column.methods}
    sums = {name: fsum(column.mean(name) for column in columns if name in column.of) for name in names}
    return sorted(sums, key=lambda name: (-sums[name], name))


def asked_everywhere(task: Task) -> list[str]:
    """The methods that have more than the one column in which all methods stand, the best first."""
    columns_of_each = {name: sum(name in column.of for column in task.columns) for name in task.methods}
    return [name for name, n in columns_of_each.items() if n > 1 and name not in FLOORS]


def best_of_kinds(column: Column) -> list[str]:
    """The best of the variants that have fewer bits, fewer tokens, and both; "" of a kind that is not there."""
    best = sorted(column.methods, key=lambda name: (-column.mean(name), name))
    return [next((name for name in best if kind(name) == one), "") for one in (BITS, TOKENS, BOTH)]
