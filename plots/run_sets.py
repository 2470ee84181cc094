"""Which runs may share a table or a figure, which of them are one line of a figure, and what a point of it says.

Not here: reading (`plots/read.py`), drawing (`plots/figures/`), tables (`plots/tables/pivot.py`).
"""

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import fsum, inf, nan
from typing import Any, TypeVar

import yaml

from kvbench.plots.read import ROOT, Conditions, Run, conditions, over_budget, score
from kvbench.plots.scored import Scored
from kvbench.plots.stats import front
from kvbench.results import METRICS, SampleRow, combined, combined_ci95
from kvbench.results.names import shown_task

Name = TypeVar("Name", bound=Hashable)

# Parameters that say which rows a task takes, not how it makes prompts of them.
CHOOSES_ROWS = {"source", "datasets", "rows", "on_bad_row"}
MOST_NAMES = 8  # of datasets that a line names


@dataclass(frozen=True)
class RunSet:
    """Runs of one task with the same parameters, on the same model, data and machine; budgets and comm may differ."""

    task: str
    where: Conditions
    runs: list[Run]

    @property
    def name(self) -> str:
        """The task as readers see it."""
        return shown_task(self.task, self.where.data_source)

    @property
    def about(self) -> str:
        label = "EMBEDDED DATA · " if self.where.data_source == "embedded" else ""
        return f"{label}{self.name} · {str(self.where).replace('no comm · ', '')}"

    def datasets(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.datasets()))

    def only(self, keep: Callable[[Run], bool]) -> "RunSet":
        return replace(self, runs=[run for run in self.runs if keep(run)])


def dataset_words(runs: Iterable[Run]) -> str:
    """The samples' datasets, where they say so: the same name of a set may stand for different choices."""
    names = dict.fromkeys(str(row.fields["dataset"]) for run in runs for row in run.rows if "dataset" in row.fields)
    if len(names) > MOST_NAMES:
        return f"{len(names)} datasets"
    return ", ".join(names)


def run_sets(runs: Iterable[Run], keep: Callable[[Run], bool] = lambda run: True) -> list[RunSet]:
    """Sets of runs that may share a figure, the largest first."""
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in filter(keep, runs):
        params = json.dumps(run.setting("task", "params"), sort_keys=True)
        found.setdefault((conditions(run, ""), run.result.task, params), []).append(run)
    made = [RunSet(key[1], key[0], members) for key, members in found.items()]
    return sorted(made, key=lambda run_set: (-len(run_set.runs), str(run_set.where), run_set.task))


def prompt_settings(run: Run) -> str:
    """The settings of a run's task and chat that make other prompts than the defaults do, as words."""
    usual = usual_params(run.result.task)
    params = run.setting("task", "params") or {}
    words = [
        f"{key}={value}"
        for key, value in params.items()
        if key not in CHOOSES_ROWS and key in usual and str(value) != str(usual[key])
    ]
    chat, system = run.setting("model", "chat"), run.setting("model", "system_prompt")
    words += [f"chat={chat}"] if chat not in (None, "auto") else []
    words += [f"system prompt {system!r}"] if system else []
    return " ".join(words)


@cache
def usual_params(task: str) -> dict[str, Any]:
    """The defaults of a task, from its file; {} where there is none of this name (any more)."""
    path = ROOT / "conf" / "task" / f"{task}.yaml"
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a name that no file can have
        return {}


@dataclass(frozen=True)
class Estimate:
    """A score, 0 to 1 as 0 to 100, and its 95 % interval where there is one."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def bars(self) -> tuple[float, float]:
        """How far the interval goes down and up; NaN, which is not drawn, without one."""
        if self.low is None or self.high is None:
            return nan, nan
        return self.mean - self.low, self.high - self.mean


@dataclass(frozen=True)
class Point:
    x: float
    y: Estimate
    outside: str = ""  # why what it was given is no budget that it kept; see `outside_budget`


@dataclass(frozen=True)
class Line:
    """Runs that differ in what stands on the x axis only."""

    method: str
    label: str
    nth: int  # among the lines of its method
    points: list[Point]
    runs: list[Run]


Rows = Sequence[SampleRow]


def lines(
    run_set: RunSet,
    x: Callable[[Rows], float | None],
    rows_of: Callable[[Run], Rows] = lambda run: run.rows,
    apart: Callable[[Run], Any] = lambda run: "",
) -> list[Line]:
    """The set's lines, from what each run's samples say.

    Settings that differ besides `x` make several lines of a method; `apart` says by what. Full attention, whose budgets
    are all the same, is one point.
    """
    found: dict[tuple[str, str, str], dict[Any, tuple[Point, Run]]] = {}
    for run in sorted(run_set.runs, key=lambda run: run.folder.name):
        rows = rows_of(run)
        where, what = x(rows), score_of(rows)
        if where is not None and what is not None:
            key = (run.method, run.result.method_label, "" if run.is_full else str(apart(run)))
            points = found.setdefault(key, {})
            if not (run.is_full and points):
                # What was asked is part of the key: some costs, such as bytes moved, are 0 at every budget.
                at = where, budget_of(run) or 0, inf if run.result.comm is None else run.result.comm
                points.setdefault(at, (Point(where, what, outside_budget(run, rows)), run))
    made: list[Line] = []
    for (method, label, tail), points in sorted(found.items()):
        nth = sum(line.method == method for line in made)
        ordered = [points[at] for at in sorted(points)]
        made.append(Line(method, f"{label} {tail}".strip(), nth, [p for p, _ in ordered], [run for _, run in ordered]))
    return made


def is_deployable(run: Run) -> bool:
    """Whether the budgets bound what the method reads: not so full attention, nor a search that no budget prices."""
    return not run.is_full and not run.result.bytes_searched_per_step


FRONT_SAID = "Front: shown to be better than all that cost no more, by the corrected paired test"


def front_of_lines(
    drawn: Iterable["Line"], of: Callable[[SampleRow], float | None] = score, better: str = "higher"
) -> list[tuple[float, float]]:
    """`front_of` the points of lines, as points."""
    points = [(point, run) for line in drawn for point, run in zip(line.points, line.runs, strict=True)]
    found = front_of({i: (run, run.rows, point.x) for i, (point, run) in enumerate(points)}, of, better)
    return [(points[i][0].x, points[i][0].y.mean) for i in found]


def n_variants(drawn: Iterable["Line"]) -> int:
    """The runs of lines that are compared with full attention, or with each other."""
    return len({run.folder for line in drawn for run in line.runs if not run.is_full})


def front_of(
    points: Mapping[Name, tuple[Run, Rows, float]],
    of: Callable[[SampleRow], float | None] = score,
    better: str = "higher",
    family: int = 0,
) -> list[Name]:
    """The names on the front, by the one rule of `kvbench.plots.stats.front`, of runs with their samples and what they
    cost.

    Only methods that could be deployed and kept their budgets can be on it; the others beat nobody either.
    """
    asked = {
        name: (cost, Scored.of(rows, of).samples)
        for name, (run, rows, cost) in points.items()
        if is_deployable(run) and not over_budget(rows)
    }
    return front(asked, better, family)


def outside_budget(run: Run, rows: Rows) -> str:
    """Why a point is marked: what is no part of the budget that others keep; "" for most."""
    if over_budget(rows):
        return "over its budget"
    whole = 0 if run.is_full else run.whole_layers
    return f"first {whole} layers left whole, outside the budget" if whole else ""


def score_of(rows: Rows) -> Estimate | None:
    """Score and interval; those of 0 to 1 as percent."""
    metric = str(rows[0].fields.get("metric", "score")) if rows else "score"
    found = combined(rows, metric)
    if found is None:
        return None
    scale = 100 if METRICS[metric].highest == 1 else 1
    low, high = (None if bound is None else scale * bound for bound in combined_ci95(rows, metric) or (None, None))
    return Estimate(scale * found, low, high, sum(row.score is not None for row in rows))


def by_dataset(dataset: str) -> Callable[[Run], Rows]:
    return lambda run: run.datasets().get(dataset, ())


def asked(run: Run) -> str:
    """The budget in words, as people give it: a ratio is no number of tokens."""
    return run.result.asked


def other_setting(run_set: RunSet) -> Callable[[Run], str]:
    """The parameters by which runs of one method differ within this set, as words."""

    def params(run: Run) -> dict[str, Any]:
        flat = {**run.result.params, **run.file}
        flat |= {f"cache.{key}": value for key, value in (run.setting("cache") or {}).items()}
        return flat

    def tail(run: Run) -> str:
        others = [params(other) for other in run_set.runs if other.method == run.method]
        mine = params(run)
        differing = [k for k in mine if any(other.get(k) != mine[k] for other in others)]
        return " ".join(f"{k}={mine[k]}" for k in differing)

    return tail


def budget_of(run: Run) -> float | None:
    """The share, or the number of tokens or bytes, that was asked for; where nothing was, the share attended to."""
    if run.result.adapts:
        return run.result.effective_ratio
    return run.result.size


def reports(run: Run) -> Iterator[dict[str, Any]]:
    """What the method said of each sample."""
    for row in run.rows:
        if (found := row.fields.get("method_report")) is not None:
            yield found


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None
