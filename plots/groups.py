"""Runs sorted for figures: what may share one, which of them are one line, and what a point says.

Not here: reading (`plots/read.py`), drawing (`plots/figures.py`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from evals.results import METRICS, SampleRow, combined, combined_ci95
from plots.read import Conditions, Run, conditions


@dataclass(frozen=True)
class Group:
    """Runs of one task with the same parameters, on the same model, data and machine; budgets and comm may differ."""

    task: str
    where: Conditions
    runs: list[Run]

    @property
    def about(self) -> str:
        label = "EMBEDDED DATA · " if self.where.data_source == "embedded" else ""
        return f"{label}{self.task} · {str(self.where).replace('no comm · ', '')}"

    def datasets(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.datasets()))

    def only(self, keep: Callable[[Run], bool]) -> "Group":
        return replace(self, runs=[run for run in self.runs if keep(run)])


def groups(runs: Iterable[Run], keep: Callable[[Run], bool] = lambda run: True) -> list[Group]:
    """Those that may share a figure, the largest first."""
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in filter(keep, runs):
        params = json.dumps(run.setting("task", "params"), sort_keys=True)
        found.setdefault((conditions(run, ""), run.result.task, params), []).append(run)
    made = [Group(key[1], key[0], members) for key, members in found.items()]
    return sorted(made, key=lambda group: (-len(group.runs), str(group.where), group.task))


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """Runs that differ in what stands on the x axis only."""

    method: str
    label: str
    nth: int  # among the lines of its method
    points: list[Point]


def lines(
    group: Group,
    x: Callable[[Run], float | None],
    point: Callable[[Run], tuple[float, float, float] | None],
    apart: Callable[[Run], Any] = lambda run: "",
) -> list[Line]:
    """The group's lines. Settings that differ besides `x` make several lines of a method; `apart` says by what."""
    found: dict[tuple[str, str, str], dict[float, Point]] = {}
    for run in sorted(group.runs, key=lambda run: run.folder.name):
        where, what = x(run), point(run)
        if where is not None and what is not None:
            key = (run.method, run.result.method_label, str(apart(run)))
            found.setdefault(key, {}).setdefault(where, Point(where, *what))
    made: list[Line] = []
    for (method, label, tail), points in sorted(found.items()):
        nth = sum(line.method == method for line in made)
        ordered = [points[where] for where in sorted(points)]
        made.append(Line(method, f"{label} {tail}".strip(), nth, ordered))
    return made


def score_of(rows: Sequence[SampleRow]) -> tuple[float, float, float] | None:
    """Score and interval; those of 0 to 1 as percent."""
    metric = str(rows[0].fields.get("metric", "score")) if rows else "score"
    mean, bounds = combined(rows, metric), combined_ci95(rows, metric)
    if mean is None or bounds is None:
        return None
    scale = 100 if METRICS[metric].highest == 1 else 1
    return scale * mean, scale * bounds[0], scale * bounds[1]


def by_dataset(dataset: str) -> Callable[[Run], tuple[float, float, float] | None]:
    return lambda run: score_of(run.datasets().get(dataset, ()))


def other_setting(group: Group) -> Callable[[Run], str]:
    """The parameters by which runs of one method differ in this group, as words."""

    def params(run: Run) -> dict[str, Any]:
        flat = {**run.result.params, **run.file}
        flat |= {f"cache.{key}": value for key, value in (run.setting("cache") or {}).items()}
        return flat

    def tail(run: Run) -> str:
        others = [params(other) for other in group.runs if other.method == run.method]
        mine = params(run)
        differing = [k for k in mine if any(other.get(k) != mine[k] for other in others)]
        return " ".join(f"{k}={mine[k]}" for k in differing)

    return tail


def budget_of(run: Run) -> float | None:
    """The share or the number of tokens that was asked for."""
    return run.result.ratio if run.result.budget is None else float(run.result.budget)


def reports(run: Run) -> Iterator[dict[str, Any]]:
    """What the method said of each sample."""
    for row in run.rows:
        if (found := row.fields.get("method_report")) is not None:
            yield found


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None
