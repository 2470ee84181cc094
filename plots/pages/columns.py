"""Answers by column: those of all methods of a set to the samples that all of them have, and how they compare.

    tasks       the sets of a page that have answers
    Task        one set: differences to full attention with Holm's correction, what a loss must be to be shown
    Column      one budget and scope of it: groups that cannot be told apart, ranks, costs

Not here: reading (`read.py`), comparisons fixed beforehand (`fixed.py`), what is asked of several sets (`queries.py`).
"""
# pyright: basic

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations
from math import floor, fsum, log2
from statistics import median
from typing import Any

import pandas as pd

from kvbench.plots.pages.asked import FULL, HIDDEN, SCOPES, SHOWN, Asked, At, Page, share, size
from kvbench.plots.pages.methods import BITS, BOTH, TOKENS, fetches, kind
from kvbench.plots.scored import Answer, Scored
from kvbench.plots.stats import Corrected, Paired, corrected, rank_ranges
from kvbench.results import few_samples
from kvbench.results.intervals import LEVEL

Frame = Any  # of pandas, whose own types leave open what a cell is
Place = tuple[At, str]  # a column and a method
BESIDE = "snapkv"  # what papers compare with first


def scored(rows: Frame, asked: Asked) -> Scored:
    """Answers as samples: those to one context, dialogue or prompt count as one, with their mean."""
    together: dict[str, list[float]] = {}
    for sample, value in zip(rows["sample"], rows[asked.value], strict=True):
        together.setdefault(sample, []).append(float(value))
    answers = tuple(Answer(fsum(each) / len(each), sample, sample) for sample, each in together.items())
    return Scored(answers, limits=asked.bounds, is_score=not asked.is_loss)


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

    def cost(self, method: str, key: str) -> float:
        """The mean of something else that is kept of each answer."""
        found = self.rows[method][key]
        return fsum(found) / len(found)

    def held(self, method: str) -> float:
        """Share of full attention's bytes."""
        key = "bytes_resident_device"
        return self.cost(method, key) / self.cost(FULL, key)

    @cached_property
    def answered(self) -> int:
        """Samples on which full attention scores, so that a method has something to lose."""
        return sum(value > 0 for value in values(self.full).values())

    @property
    def is_at_chance(self) -> bool:
        """Whether full attention may as well be guessing."""
        spread = self.full.interval
        return not self.asked.is_loss and (spread is None or self.asked.is_at_chance(self.at, spread.low))

    @property
    def few(self) -> str:
        """Why so few samples cannot show a loss, whatever it is; "" where they can."""
        return few_samples(self.n)

    @cached_property
    def between(self) -> dict[tuple[str, str], Corrected]:
        """Every two methods, the first less the second; corrected over all pairs."""
        return between(self, self.methods)

    @cached_property
    def groups(self) -> tuple[list[str], list[str]]:
        return groups(self, self.methods)

    @cached_property
    def ranks(self) -> dict[str, tuple[int, int]]:
        return rank_ranges({name: values(self.of[name]) for name in self.methods})

    @cached_property
    def ahead(self) -> set[str]:
        """Methods that are shown to be better than the one that papers compare with first, corrected over all."""
        if BESIDE not in self.of:
            return set()
        pairs = {name: less(self.of[name], self.of[BESIDE]) for name in self.methods if name != BESIDE}
        return {name for name, one in corrected(pairs).items() if one.sign > 0}


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

    def place(self, place: Place) -> Scored | None:
        column = self.at(place[0])
        return None if column is None else column.of.get(place[1])

    @property
    def protocols(self) -> list[str]:
        return [protocol for protocol in SCOPES if any(column.at.protocol == protocol for column in self.columns)]

    @property
    def budgets(self) -> list[str]:
        """From the largest on."""
        return sorted({column.at.asked for column in self.columns}, key=size, reverse=True)

    @cached_property
    def methods(self) -> list[str]:
        return by_mean([self])

    @cached_property
    def labels(self) -> dict[Place, str]:
        """What runs call their methods, by place."""
        found: dict[Place, dict[str, None]] = {}
        keys = zip(*(self.rows[name] for name in ("protocol", "asked", "column", "method")), strict=True)
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
        return corrected(pairs, lambda place: (place[0].protocol, place[0].column))

    @cached_property
    def hiding(self) -> dict[Place, Corrected]:
        """Each variant's score with the question hidden less with the question shown; corrected over all variants."""
        pairs: dict[Place, Paired] = {}
        for column in self.columns:
            shown = self.at(column.at._replace(protocol=SHOWN))
            if column.at.protocol == HIDDEN and shown is not None:
                both = [name for name in column.methods if name in shown.of]
                pairs |= {(column.at, name): less(column.of[name], shown.of[name]) for name in both}
        return corrected(pairs)

    def least_lost(self, protocol: str) -> int:
        """Number of samples on which a method must do worse, and on none better, to be shown to be worse.

        Of so many differences that all point one way the sign-flip test finds 2 of 2^j signs as extreme.
        """
        family = sum(len(column.methods) for column in self.columns if column.at.protocol == protocol)
        return floor(1 + log2(max(1, family) / LEVEL)) + 1

    def has_room(self, column: Column) -> bool:
        """Whether a method that loses all that full attention answers is shown to be worse."""
        return column.answered >= self.least_lost(column.at.protocol)

    def is_tight(self, column: Column) -> bool:
        """Whether a method must lose more than half of what full attention answers before that is shown."""
        return column.answered < 2 * self.least_lost(column.at.protocol)

    @property
    def tightest(self) -> Column | None:
        """Of the columns where only a large loss can be shown, that with the fewest answers."""
        return min(filter(self.is_tight, self.columns), key=lambda column: column.answered, default=None)

    @property
    def is_comparable(self) -> bool:
        return all(map(self.has_room, self.columns))

    @cached_property
    def prompts(self) -> list[int]:
        """Tokens of each sample's prompt, the question in it; empty where they are not kept."""
        full = self.rows[(self.rows["method"] == FULL) & (self.rows["protocol"] == SHOWN)]
        return sorted(round(n) for n in full.groupby("sample", sort=False)["prompt_tokens"].mean() if n > 0)

    @property
    def typical(self) -> int:
        """The median of its prompts' tokens; 0 where they are not known."""
        return round(median(self.prompts)) if self.prompts else 0

    @property
    def comms(self) -> set[str]:
        """What the runs of methods that fetch were given as `comm`."""
        used = self.rows[[fetches(name) for name in self.rows["method"]]]
        return {*used["comm_exact"]}


def tasks(of: Page, frame: Frame) -> tuple[Task, ...]:
    """The sets of a page that have answers; of several models that with the most counts."""
    found = list[Task]()
    for asked in of.sets.values():
        rows = frame[frame["set"] == asked.key]
        if asked.others_of:
            rows = beside(rows, frame[frame["set"] == asked.others_of])
        if len(rows):
            model = Counter(rows["model"]).most_common(1)[0][0]
            rows = rows[rows["model"] == model]
            if columns := columns_of(asked, rows):
                order = [FULL, *Task(asked, model, columns, rows).methods]
                columns = [replace(one, of={name: one.of[name] for name in order if name in one.of}) for one in columns]
                found.append(Task(asked, model, columns, rows))
    return tuple(found)


def beside(others: Frame, first: Frame) -> Frame:
    """Other methods with full attention and those asked first, in the columns where all were asked."""
    keys = ["protocol", "asked"]
    both = {*zip(*(others[key] for key in keys), strict=True)} & {*zip(*(first[key] for key in keys), strict=True)}
    full = {(protocol, "") for protocol, _ in both}
    taken = [
        rows[[pair in wanted for pair in zip(*(rows[key] for key in keys), strict=True)]]
        for rows, wanted in ((first, both | full), (others, both))
    ]
    return pd.concat(taken)


def columns_of(asked: Asked, rows: Frame) -> list[Column]:
    """The columns of a set; one that `is_ordered` counts when all of its samples were answered."""
    by_place: dict[At, dict[str, Frame]] = {}
    for (*at, method), part in rows.groupby(["protocol", "asked", "column", "method"], sort=False):
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
            found.append(Column(asked, at, {name: scored(part, asked) for name, part in mine.items()}, mine))
    order = [*asked.columns]
    return sorted(
        found,
        key=lambda one: (
            one.at.protocol != SHOWN, -size(one.at.asked), order.index(one.at.column) if one.at.column else 0,
        ),
    )  # fmt: skip


def by_mean(every: Iterable[Task]) -> list[str]:
    """All methods but full attention; the best on the mean of their columns first, and of equals by name."""
    means: dict[str, list[float]] = {}
    for task in every:
        for column in task.columns:
            for name in column.methods:
                means.setdefault(name, []).append((1 if task.asked.is_loss else -1) * column.mean(name))
    return sorted(means, key=lambda name: (fsum(means[name]) / len(means[name]), name))


def by_all_columns(task: Task) -> list[str]:
    """Methods by their mean over all columns of a task, in which one that it lacks counts as nothing."""
    sums = {name: fsum(c.mean(name) for c in task.columns if name in c.of) for name in task.methods}
    return sorted(sums, key=lambda name: (-sums[name] / len(task.columns), name))


def best_of_kinds(column: Column) -> list[str]:
    """The best of the variants that have fewer bits, fewer tokens, and both; "" of a kind that is not there."""
    best = sorted(column.methods, key=lambda name: (-column.mean(name), name))
    return [next((name for name in best if kind(name) == one), "") for one in (BITS, TOKENS, BOTH)]


def by_samples(task: Task, protocol: str) -> dict[int, list[str]]:
    """The budgets that have so many samples."""
    found: dict[int, list[str]] = {}
    for column in task.columns:
        if column.at.protocol == protocol:
            found.setdefault(column.n, []).append(share(column.at.asked))
    return found
