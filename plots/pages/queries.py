"""What pages ask of several sets at once, and of what answers cost.

    in_front     who is in front, of those that a machine can run
    Cost         what a method takes: times relative to full attention, bytes held, read and moved
    break_even   after how many questions reading a prompt twice has paid

Not here: one set and its columns (`columns.py`), comparisons fixed beforehand (`fixed.py`), words (`words.py`).
"""
# pyright: basic

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path

import yaml

from kvbench.engine.budget import show
from kvbench.plots.pages.asked import REFERENCES, At, Page, size
from kvbench.plots.pages.columns import Column, Frame, Task, groups
from kvbench.plots.pages.methods import fetches

ARCHITECTURES = Path(__file__).parents[2] / "conf" / "architecture"

# --- one set -------------------------------------------------------------------------------------


def answered_so_far(frame: Frame, key: str) -> int:
    """The most samples of a set that a method has answered in a column."""
    rows = frame[frame["set"] == key]
    return max(rows.groupby(["protocol", "asked", "method"])["sample"].nunique(), default=0)


# --- what a method takes -------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Times of a method relative to full attention's, of pairs in one process."""

    first: float  # to the first token
    second: float  # to the second, which waits for an index
    step: float


def costs(of: Page, frame: Frame) -> dict[str, Cost]:
    """What was timed, by method."""
    keys = [key for key, asked in of.sets.items() if asked.is_cost]
    rows = frame[frame["set"].isin(keys)]
    return {
        row["method"]: Cost(row["timing.ttft_ratio"], row["timing.tt2t_ratio"], row["score"])
        for row in rows.to_dict("records")
    }


def cache_bytes(model: str, tokens: int) -> int:
    """What a model's whole cache takes at 16 bits a number."""
    shape = yaml.safe_load((ARCHITECTURES / f"{model.lower()}.yaml").read_text(encoding="utf-8"))
    return 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * tokens


def break_even(twice: Cost, again: Cost) -> int:
    """From how many questions on a text on reading it twice takes less time than reading it again for each."""
    return ceil(twice.first / again.first)


# --- who is in front, by skill ---------------------------------------------------------------------


@dataclass(frozen=True)
class Heading:
    """A column of the table of what is kept and what it takes."""

    words: str
    task: Task
    column: Column


def by_key(every: Iterable[Task]) -> dict[str, Task]:
    return {task.asked.key: task for task in every}


def table_columns(of: Page, every: Iterable[Task]) -> list[Heading]:
    """Those of the columns that a page names which were asked, and in which full attention leads."""
    found, known = list[Heading](), by_key(every)
    for one in of.more["table"]:
        at = At(one["scope"], f"memory {show(Fraction(one['memory']))}")
        if one["set"] in known and (column := known[one["set"]].at(at)) is not None and column.lead:
            found.append(Heading(one["words"], known[one["set"]], column))
    return found


def of_skills(of: Page, every: Iterable[Task]) -> dict[str, Task]:
    """The set that stands for each skill, which counts once however many sets ask for it."""
    known = by_key(every)
    return {skill: known[key] for skill, key in of.more["skills"].items() if key in known}


def budgets(every: Iterable[Task]) -> list[str]:
    """Shares of the bytes that any of these sets was asked at, the largest first."""
    return sorted({column.at.asked for task in every for column in task.columns}, key=size, reverse=True)


def contenders(column: Column) -> list[str]:
    """The methods that somebody would run and that keep to the budget."""
    return [name for name in column.methods if name not in REFERENCES and not column.is_over(name)]


def in_front(column: Column, has_host: bool) -> list[str]:
    """Of the methods that such a machine can run, the best and all that are not shown to be worse, the best first."""
    return groups(column, [name for name in contenders(column) if has_host or not fetches(name)])[0]


def unlike_floor(column: Column) -> list[str]:
    """The methods that are told from random tokens, whichever way."""
    return [name for name, one in column.told_from_floor.items() if one.sign]
