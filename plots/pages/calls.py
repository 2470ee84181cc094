"""docs/calls.md: the kept answers of conversations that ask for calls, as `plots/calls.py` takes them.

Not here: the kinds of damage and the figure (`plots/calls.py`), words (`calls.md.j2`).
"""
# pyright: basic

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvbench.plots.calls import CallAnswer, VariantCalls, draw
from kvbench.plots.pages.asked import FULL, share
from kvbench.plots.pages.columns import Task
from kvbench.plots.pages.methods import title
from kvbench.plots.pages.words import label
from kvbench.plots.style import Picture
from kvbench.tasks.calls.damage import KINDS

BROKEN = ("no_call", "broken_json")  # nothing that an agent could run


def of_calls(tasks: Iterable[Task]) -> list[Task]:
    """The sets whose answers say what became of a call, those where the right one is fed first."""
    found = [task for task in tasks if (task.rows["damage"] != "").any()]
    return sorted(found, key=lambda task: task.asked.where["mode"] != "golden")


def variants(task: Task) -> dict[str, VariantCalls]:
    """The answers of each method of a set, by turn; the last turn asks for the first call again."""
    (column,) = task.columns
    found = dict[str, VariantCalls]()
    for method, rows in column.rows.items():
        answers = [
            CallAnswer(row["sample"], turn := int(row["id"].rpartition("/")[2]), row["damage"], row["score"],
                 turn == task.asked.where["turns"])
            for row in rows.to_dict("records")
        ]  # fmt: skip
        name = "Full" if method == FULL else label(task, column.at, method)
        mode = {"golden": "the right call is fed", "dialogue": "its own call stays"}[task.asked.where["mode"]]
        found[method] = VariantCalls(name, method, "", f"{mode}, n = {column.n}", answers, method == FULL)
    return dict(sorted(found.items(), key=lambda item: (not item[1].is_full, -right_share(item[1]))))


def picture(tasks: Iterable[Task]) -> Picture:
    """The figure of the page, a row of panels for each set."""
    every = list(of_calls(tasks))
    first = every[0]
    about = f"{first.model} · {share(first.columns[0].at.asked)} of the bytes"
    return draw("What becomes of calls", about, [one for task in every for one in variants(task).values()])


HEADS = ("set", "method", "turn", "kind", "n", "share", "low", "high")


def numbers(tasks: Iterable[Task]) -> Iterator[list[Any]]:
    """The share of each kind, of all turns and of each."""
    for task in tasks:
        for one in variants(task).values():
            for turn in (None, *one.turns):
                answers = [each for each in one.answers if turn in (None, each.turn)]
                for kind in KINDS:
                    found = replace(one, answers=answers).share(kind)
                    ends = (found.interval.low, found.interval.high) if found.interval is not None else ()
                    shares = [f"{100 * share:.1f}" for share in (found.mean or 0.0, *ends)]
                    yield [task.asked.key, one.label, turn or "all", kind, found.n, *shares]


def right_share(of: VariantCalls) -> float:
    return of.share(KINDS[0]).mean or 0.0


def whole(of: VariantCalls, kinds: Iterable[str]) -> str:
    """The share of answers of some kinds, in percent."""
    return f"{100 * sum(of.share(kind).mean or 0 for kind in kinds):.0f}"


def right(of: VariantCalls) -> str:
    return whole(of, KINDS[:1])


def ranking(every: Mapping[str, VariantCalls]) -> str:
    """The methods by their right calls, the best first."""
    return ", ".join(f"{title(one.method)} {right(one)}" for one in every.values() if not one.is_full)


def stays_of(of: VariantCalls) -> tuple[int, int]:
    """Of how many conversations whose first call was damaged it is when asked again, and how many those are."""
    n, still = of.stays
    return still, n


def behind(of: VariantCalls, full: VariantCalls, which: int) -> int:
    """Points behind full attention in the first turn (0) or the last (-1)."""
    return round(-100 * [*of.lost(full).values()][which].mean)
