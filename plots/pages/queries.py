"""What pages ask of committed answers: the one library behind all templates.

    tasks       the answers of each set by column, to the samples that all methods of the column have
    against_full, between, groups, ranks     how a column's methods compare, with the p-values that count
    outcomes    comparisons that were fixed beforehand, corrected over all of them
    standings   who is in front by skill
    kept_share  of full attention's lead over random tokens, what a method keeps

Not here: reading (`read.py`), words (`words.py` and the templates), statistics (`plots/stats.py`).
"""
# pyright: basic

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from itertools import combinations
from math import ceil, floor, fsum, log2
from statistics import median
from typing import Any

import numpy as np

from kvbench.plots.pages.asked import (
    FLOOR,
    FULL,
    HIDDEN,
    ITSELF,
    SCOPES,
    SHOWN,
    Asked,
    At,
    Comparison,
    Finding,
    Page,
    page,
    share,
    size,
)
from kvbench.plots.pages.words import fetches
from kvbench.plots.scored import Answer, Scored
from kvbench.plots.stats import Corrected, Paired, corrected, corrected_over, paired, paired_over_datasets, rank_ranges
from kvbench.results import few_samples
from kvbench.results.intervals import LEVEL, chance_below

Frame = Any  # of pandas, whose own types leave open what a cell is
Place = tuple[At, str]  # a column and a method
BESIDE = "snapkv"  # what papers compare with first
TWICE = "kvzip"
HEADS = {"qwen2.5-coder-0.5b": 64, "smollm2-135m": 64}  # channels of a head's keys, by model


# --- answers by column ---------------------------------------------------------------------------


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
        return few_samples(self.n, len(self.methods))

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
    import pandas as pd

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


# --- comparisons that were fixed beforehand --------------------------------------------------------


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


def answered_so_far(frame: Frame, key: str) -> int:
    """The most samples of a set that a method has answered in a column."""
    rows = frame[frame["set"] == key]
    return max(rows.groupby(["protocol", "asked", "method"])["sample"].nunique(), default=0)


def by_all_columns(task: Task) -> list[str]:
    """Methods by their mean over all columns of a task, in which one that it lacks counts as nothing."""
    sums = {name: fsum(c.mean(name) for c in task.columns if name in c.of) for name in task.methods}
    return sorted(sums, key=lambda name: (-sums[name] / len(task.columns), name))


def by_mean(every: Iterable[Task]) -> list[str]:
    """All methods but full attention; the best on the mean of their columns first, and of equals by name."""
    means: dict[str, list[float]] = {}
    for task in every:
        for column in task.columns:
            for name in column.methods:
                means.setdefault(name, []).append((1 if task.asked.is_loss else -1) * column.mean(name))
    return sorted(means, key=lambda name: (fsum(means[name]) / len(means[name]), name))


def by_samples(task: Task, protocol: str) -> dict[int, list[str]]:
    """The budgets that have so many samples."""
    found: dict[int, list[str]] = {}
    for column in task.columns:
        if column.at.protocol == protocol:
            found.setdefault(column.n, []).append(share(column.at.asked))
    return found


def kept_share(column: Column, method: str) -> float | None:
    """Of full attention's lead over random tokens, what a method keeps; None where there is no lead."""
    if FLOOR not in column.of or method in (FULL, FLOOR):
        return None
    floor, lead = column.mean(FLOOR), column.mean(FULL) - column.mean(FLOOR)
    return (column.mean(method) - floor) / lead if lead > 0 else None


def ends(task: Task, method: str, key: str) -> tuple[float, float] | None:
    """The least and the most of a cost, each the mean of a column; None where it was not measured."""
    each = task.rows[task.rows["method"] == method].groupby(["protocol", "asked"])[key].mean().dropna()
    return None if each.empty else (float(each.min()), float(each.max()))


def least(task: Task, method: str, key: str) -> float | None:
    """The least that any answer has; None where it was not measured."""
    found = task.rows[task.rows["method"] == method][key].dropna()
    return None if found.empty else float(found.min())


# --- who is in front, by skill ---------------------------------------------------------------------


@dataclass(frozen=True)
class OfSkill:
    """A method on the tasks of one skill, at a budget."""

    is_in_front: bool  # on each task no other method is shown to be better
    paired: Paired  # its scores less full attention's, each task as much as another

    @property
    def distance(self) -> float:
        """Distance to full attention's score, of 100."""
        return 100 * self.paired.mean


def shared(every: Iterable[Task]) -> list[Task]:
    """Tasks of the methods that papers compare first, by bytes: what happens in an answer is another question."""
    return [task for task in every if not task.asked.has_tokens and not task.asked.others_of]


@lru_cache(maxsize=256)
def standings(every: tuple[Task, ...], protocol: str, asked: str, has_host: bool) -> dict[str, dict[str, OfSkill]]:
    """Standings by skill, of the methods that such a machine can run and that were asked all its tasks, the best first.

    A task that full attention hardly does does not count.
    """
    by_skill: dict[str, list[Column]] = {}
    for task in shared(every):
        column = task.at(At(protocol, asked))
        if column is not None and not task.is_tight(column):
            by_skill.setdefault(task.asked.skill, []).append(column)
    found: dict[str, dict[str, OfSkill]] = {}
    for skill in page("which-method").more["skills"]:
        columns = by_skill.get(skill, [])
        if not columns:
            continue
        runnable = [[name for name in one.methods if has_host or not fetches(name)] for one in columns]
        best = [groups(*one)[0] for one in zip(columns, runnable, strict=True)]
        full = [[*values(one.full).values()] for one in columns]
        standing = {
            name: OfSkill(
                all(name in of for of in best),
                paired_over_datasets([[*values(one.of[name]).values()] for one in columns], full),
            )
            for name in runnable[0]
            if all(name in of for of in runnable)
        }
        if standing:
            found[skill] = dict(sorted(standing.items(), key=lambda item: (-item[1].distance, item[0])))
    return found


def columns_by_bytes(every: Iterable[Task]) -> list[At]:
    """The columns that any of these tasks has, budgets from the largest on."""
    found = {column.at for task in shared(every) for column in task.columns}
    return sorted(found, key=lambda at: (at.protocol != SHOWN, -size(at.asked)))


def budgets(every: Iterable[Task]) -> list[str]:
    return sorted({at.asked for at in columns_by_bytes(every)}, key=size, reverse=True)


def skills_in(every: tuple[Task, ...], protocol: str, has_host: bool) -> list[str]:
    found = [standings(every, protocol, asked, has_host) for asked in budgets(every)]
    return [skill for skill in page("which-method").more["skills"] if any(skill in each for each in found)]


def standings_of(every: tuple[Task, ...], columns: Iterable[At]) -> list[dict[str, dict[str, OfSkill]]]:
    return [standings(every, at.protocol, at.asked, True) for at in columns]


def in_front(standing: Mapping[str, OfSkill]) -> list[str]:
    return [name for name, one in standing.items() if one.is_in_front]


def counted(every: Iterable[Task]) -> list[Task]:
    """Tasks that say something of a method at any budget."""
    return [task for task in shared(every) if not all(map(task.is_tight, task.columns))]


def by_front(found: Sequence[Mapping[str, Mapping[str, OfSkill]]]) -> list[str]:
    """Methods by how often they are in front, then by their distances."""
    each: dict[str, list[OfSkill]] = {}
    for standing in found:
        for of in standing.values():
            for name, one in of.items():
                each.setdefault(name, []).append(one)

    def order(name: str) -> tuple[float, float, str]:
        mine = each[name]
        return -sum(one.is_in_front for one in mine) / len(mine), -fsum(one.distance for one in mine), name

    return sorted(each, key=order)


def losses(every: Sequence[Task]) -> dict[str, tuple[int, list[tuple[Task, Column]]]]:
    """In how many columns a method was compared, and in which it is shown to lose; the least losing first."""
    compared, lost = Counter[str](), dict[str, list[tuple[Task, Column]]]()
    for task in every:
        for column in task.columns:
            if column.is_at_chance or column.few:
                continue
            for name in column.methods:
                if name == "oracle":  # nobody can run it
                    continue
                compared[name] += 1
                if loses(task, column, name):
                    lost.setdefault(name, []).append((task, column))
    order = sorted(compared, key=lambda name: (len(lost.get(name, ())) / compared[name], name))
    return {name: (compared[name], lost.get(name, [])) for name in order}


def losing(task: Task, column: Column) -> list[str]:
    return [name for name in column.methods if loses(task, column, name)]


def loses(task: Task, column: Column, method: str) -> bool:
    """Whether a method is shown to do worse than full attention."""
    return task.against_full[column.at, method].sign == (1 if task.asked.is_loss else -1)


# --- conditions of all runs of a page ------------------------------------------------------------


@dataclass(frozen=True)
class SecondBudget:
    """What `comm` left of an index, where it was on."""

    comms: Sequence[str]  # from the least on
    heads: set[int]  # channels of the models' keys
    channels: int  # that the least pays for, of one kind of heads
    pages: tuple[int, int]  # of Quest: how many, and their tokens
    prompt: int  # tokens of the prompt with the fewest pages; 0: not known
    chosen: int  # pages that a head gets of those
    memory: str


def second_budget(comms: Iterable[str], models: Iterable[str], every: Sequence[Task] = ()) -> SecondBudget | None:
    on = sorted({comm for comm in comms if comm and Fraction(comm)}, key=Fraction)
    if not on:
        return None
    least, heads = Fraction(on[0]), {HEADS[model] for model in models if model in HEADS}
    channels = floor(least * max(heads, default=0))
    fewest: list[tuple[tuple[int, int], int, str]] = []
    for task in every:
        asked = [column.at.asked for column in task.columns if "quest" in column.of]
        if asked and task.typical:
            fewest.append((pages(least, task.typical), task.typical, max(asked, key=size)))
    if not fewest:
        return SecondBudget(on, heads, channels, (0, round(2 / least)), 0, 0, "")
    (n, length), prompt, memory = min(fewest, key=lambda one: one[0][0])
    chosen = max(1, floor(size(memory) * prompt) // length)
    return SecondBudget(on, heads, channels, (n, length), prompt, chosen, memory)


def pages(comm: Fraction, prompt: int) -> tuple[int, int]:
    """How many pages of a prompt Quest has whose bounds `comm` pays for, and their tokens."""
    length = max(round(2 / comm), ceil(prompt / max(1, floor(comm * prompt / 2))))
    return ceil(prompt / length), length


def comms_of(every: Sequence[Task]) -> SecondBudget | None:
    """The second budget of some tasks, with the lengths of their prompts."""
    return second_budget({comm for task in every for comm in task.comms}, {task.model for task in every}, every)


def comms_alone(every: Sequence[Task]) -> SecondBudget | None:
    """The second budget of tasks by tokens, whose prompts' lengths are not kept."""
    used = [task for task in every if any(fetches(name) for name in task.methods)]
    return second_budget({comm for task in every for comm in task.comms}, {task.model for task in used})


def collapses(every: Sequence[Task]) -> list[tuple[Column, Column]]:
    """Columns at the smallest budget where KVzip answers documents less than half as well as at the next larger one."""
    docs = next((task for task in every if task.asked.key == "docs"), None)
    if docs is None or len(docs.budgets) < 2:
        return []
    (larger, least), found = docs.budgets[-2:], list[tuple[Column, Column]]()
    for protocol in SCOPES:
        now, before = (docs.at(At(protocol, asked)) for asked in (least, larger))
        if now is not None and before is not None and {TWICE, BESIDE} <= now.of.keys() and TWICE in before.of:
            if now.mean(TWICE) < before.mean(TWICE) / 2:
                found.append((now, before))
    return found


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
