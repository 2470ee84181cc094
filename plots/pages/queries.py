"""What pages ask of several sets at once, and of what answers cost.

    standings       who is in front by skill
    losses          in how many columns a method is shown to lose
    kept_share      of full attention's lead over random tokens, what a method keeps
    second_budget   what `comm` left of an index; collapses: where a budget is too small for a method

Not here: one set and its columns (`columns.py`), comparisons fixed beforehand (`fixed.py`), words (`words.py`).
"""
# pyright: basic

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, fsum

from kvbench.plots.pages.asked import FLOOR, FULL, SCOPES, SHOWN, At, page, size
from kvbench.plots.pages.columns import BESIDE, Column, Frame, Task, groups, values
from kvbench.plots.pages.methods import fetches
from kvbench.plots.stats import Paired, paired_over_datasets

TWICE = "kvzip"  # reads the prompt twice
HEADS = {"qwen2.5-coder-0.5b": 64, "smollm2-135m": 64}  # channels of a head's keys, by model


# --- one set -------------------------------------------------------------------------------------


def answered_so_far(frame: Frame, key: str) -> int:
    """The most samples of a set that a method has answered in a column."""
    rows = frame[frame["set"] == key]
    return max(rows.groupby(["protocol", "asked", "method"])["sample"].nunique(), default=0)


def kept_share(column: Column, method: str) -> float | None:
    """Of full attention's lead over random tokens, what a method keeps; None where there is no lead."""
    if FLOOR not in column.of or method in (FULL, FLOOR):
        return None
    lead = column.mean(FULL) - column.mean(FLOOR)
    return (column.mean(method) - column.mean(FLOOR)) / lead if lead > 0 else None


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
