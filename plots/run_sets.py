"""Which runs may share a table or a figure, by what they differ within it, and which of them no other beats.

Not here: reading (`plots/read.py`), drawing (`plots/figures/`), tables (`plots/tables/pivot.py`).
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import yaml

from kvbench.plots.read import ROOT, Conditions, Run, conditions, over_budget, score
from kvbench.plots.scored import Scored
from kvbench.plots.stats import front
from kvbench.results import SampleRow
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


Rows = Sequence[SampleRow]


def is_deployable(run: Run) -> bool:
    """Whether the budgets bound what the method reads: not so full attention, nor a search that no budget prices."""
    return not run.is_full and not run.result.bytes_searched_per_step


FRONT_SAID = "Front: shown to be better than all that cost no more, by the corrected paired test"


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
