"""Rows of figures: which runs stand in one figure, their samples as a frame, and values of groups of these.

A figure's runs are chosen by a query on what each run is (`facts`); its values are means of the samples' frame by
`kvbench.plots.scored.places`, which tables stand on too. Numbers within lists, a layer each, become rows of a frame by
`nested`. What runs cost is measured (`AXES`): a method's budgets are one line.

Not here: the figures (`plots/figures/declared.py`), how rows are drawn (`plots/figures/chart.py`).
"""
# pyright: basic

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series

from kvbench.plots.read import OLDER_KEYS, Run, conditions, prompt
from kvbench.plots.run_sets import RunSet, asked, budget_of, is_deployable, other_setting, outside_budget, run_sets
from kvbench.plots.scored import places
from kvbench.plots.stats import front
from kvbench.results import METRICS
from kvbench.results.frame import of_samples, to_pandas, together
from kvbench.results.intervals import ANYWHERE, Bounds
from kvbench.results.read import Whole

Row = dict[str, Any]


def facts(run: Run) -> Row:
    """What queries may ask of a run; parameters of its method are `method.NAME`."""
    result, metric = run.result, METRICS[run.result.metric or "score"]
    own = {
        "run": str(run.folder), "task": result.task, "who": run.method, "label": result.method_label,
        "full": run.is_full, "scored": not metric.of_reading, "better": metric.better, "asked": asked(run),
        "comm": run.comm, "by_tokens": result.budget is not None, "by_bytes": result.memory_exact is not None,
        "model": run.model, "by_answers": result.budget_counts is not None, "by_share": result.ratio is not None,
        "size": budget_of(run) or 0, "percent": 100 * (result.ratio or 0),
        "cached": run.setting("cache", "tokens") or 0, "k_cache": run.setting("cache", "k_cache"),
        "policy": str(run.setting("cache", "policy")).upper(), "rounds": str(result.params.get("iterations")),
        "but_rounds": str(({**result.params, "iterations": 0}, asked(run), run.comm, run.setting("cache"))),
    }  # fmt: skip
    return own | {f"method.{key}": value for key, value in result.params.items()}


@dataclass(frozen=True)
class Part:
    """Runs of one figure: of one task, model, data and machine, and alike in what the figure is split by."""

    run_set: RunSet
    whole: RunSet  # before it was split
    facts: dict[str, Row]  # by run
    samples: Any
    at: Row  # facts by which it was split

    @cached_property
    def runs(self) -> dict[str, Run]:
        return {str(run.folder): run for run in self.run_set.runs}

    @cached_property
    def tails(self) -> dict[str, str]:
        """Settings by which runs of one method differ, as words."""
        tail = other_setting(self.run_set)
        return {run: "" if found.is_full else tail(found) for run, found in self.runs.items()}

    def variants(self, runs: Iterable[str]) -> Iterator[tuple[str, Row]]:
        """Full attention once, then others with what each was asked, and how a line of it is drawn."""
        seen = Counter[str]()
        for run in sorted(set(runs), key=lambda run: (not self.facts[run]["full"], self.facts[run]["who"], run)):
            fact = self.facts[run]
            words = "" if fact["full"] else f" {fact['asked']} {self.tails[run]}".rstrip()
            if not (fact["full"] and seen[fact["who"]]):
                yield run, {"run": run, "line": fact["label"] + words, "look": fact["who"], "nth": seen[fact["who"]]}
                seen[fact["who"]] += 1


class Data:
    """Runs that were read, and their samples."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = sorted(runs, key=lambda run: run.folder.as_posix())
        self.facts = {str(run.folder): facts(run) for run in self.runs}
        self.tables: dict[Path, Any] = {}

    def query(self, words: str) -> list[Run]:
        """The runs of which a query of facts is true; what no run has is missing."""
        table = DataFrame([*self.facts.values()])
        if table.empty:
            return []
        missing = [name for name in re.findall(r"`([^`]+)`", words) if name not in table]
        kept = set(table.assign(**dict.fromkeys(missing)).query(words, engine="python")["run"])
        return [run for run in self.runs if str(run.folder) in kept]

    def samples(self, runs: Iterable[Run]) -> Any:
        """The samples of some runs, as `kvbench.results` has them."""
        tables = []
        for run in runs:
            if run.folder not in self.tables:
                self.tables[run.folder] = of_samples(run.folder, Whole(run.result, [*run.rows], run.config))
            tables.append(self.tables[run.folder])
        return to_pandas(together(tables))

    def parts(self, words: str, split: Sequence[str] = (), outer: int = 0, by_set: bool = True) -> list[Part]:
        """The figures that these runs fill, the largest set first; full attention is in each part of a split."""
        made: list[tuple[tuple[Any, ...], Part]] = []
        chosen = self.query(words)
        sets = run_sets(chosen) if by_set else [RunSet("", conditions(run), chosen) for run in chosen[:1]]
        for run_set in sets:
            of = {str(run.folder): tuple(self.facts[str(run.folder)][key] for key in split) for run in run_set.runs}
            keys = {key for run, key in of.items() if not (by_set and self.facts[run]["full"])} if split else {()}
            for key in sorted(keys):
                here = run_set.only(lambda run, key=key, of=of: (by_set and run.is_full) or of[str(run.folder)] == key)
                own = {str(run.folder): self.facts[str(run.folder)] for run in here.runs}
                part = Part(here, run_set, own, self.samples(here.runs), dict(zip(split, key, strict=True)))
                made.append((key[:outer], part))
        return [part for _, part in sorted(made, key=lambda each: each[0])]


def nested(runs: Iterable[Run], *path: str) -> Any:
    """A row for each number within lists and dictionaries of samples: its `name`, and `at`, its place in a list."""
    rows: list[Row] = []
    for run in runs:
        for line in run.rows:
            node: Any = line.fields
            for key in path:
                node = node.get(key) if isinstance(node, Mapping) else None
            own = {"run": str(run.folder), "sample": line.sample_id, "prompt": prompt(line), "status": line.status}
            own |= {key: line.fields.get(key) for key in ("length", "batch")}
            for name, values in (node.items() if isinstance(node, Mapping) else [("", node)]) if node else ():
                for at, value in enumerate(values if isinstance(values, list) else [values]):
                    rows.append(own | {"name": name, "at": at, "value": value})
    return DataFrame(rows, columns=["run", "sample", "prompt", "status", "length", "batch", "name", "at", "value"])


def timed(samples: Any) -> Any:
    """Rows of task=latency that ended, of each run's smallest batch, by length."""
    if "batch" not in samples:
        return samples[:0]
    done = samples[(samples["status"] == "ok") & samples["batch"].notna()]
    return done[done["batch"] == done.groupby("run", observed=True)["batch"].transform("min")].sort_values("length")


def mean_of(samples: Any, by: Sequence[str], value: str, scale: float = 1) -> dict[tuple[Any, ...], float]:
    """Means of a column that is no score, by other columns."""
    if value not in samples or samples.empty:
        return {}
    found = places(samples, by, value, ANYWHERE)
    means = {key: replace(place, by_sample=True).mean for key, place in found.items()}
    return {key: scale * mean for key, mean in means.items() if mean is not None}


# --- costs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """One kind of cost: a mean over samples of what their ledgers counted."""

    name: str
    label: str
    words: str  # in a title
    unit: float
    keys: tuple[str, ...]  # of a sample's ledger, added up
    hides: str = ""  # of what the Oracle takes, what is not on this axis

    def of(self, samples: Any) -> float | None:
        parts = [measured(samples, key) for key in self.keys]
        known = [part for part in parts if part is not None]
        return sum(known) / self.unit if len(known) == len(parts) else None


def measured(samples: Any, key: str) -> float | None:
    """The mean of a ledger's key over the rows that have it."""
    values: Any = samples.get(key, Series(index=samples.index, dtype=float))
    if (older := OLDER_KEYS.get(key)) in samples:
        values = values.fillna(samples[older])
    return None if values.isna().all() else float(values.mean())


AXES = {
    axis.name: axis
    for axis in (
        Axis("device", "K, V and what finds them on the device, MB", "bytes on the device", 1e6,
             ("bytes_resident_device",), "its reading of all keys"),
        Axis("moved", "moved or read per step, MB", "bytes moved per step", 1e6,
             ("bytes_moved_kv_per_step", "bytes_index_read_per_step", "bytes_searched_per_step")),
        Axis("attended", "tokens attended to per head, step and layer", "tokens attended to", 1,
             ("tokens_attended_mean",), "its reading of all keys"),
        Axis("share", "share of the full cache", "bytes on the device", 1, ("resident_share",)),
        Axis("reads", "device + moved, MB", "bytes that a step can read", 1e6,
             ("bytes_resident_device", "moved_bytes_per_step"), "its reading of all keys"),
        Axis("find", "read per step to find tokens, KB", "bytes read to find tokens", 1e3,
             ("bytes_index_read_per_step",), "its reading of all keys"),
        Axis("footprint", "entries of an answer, relative to Full's", "entries of an answer", 1,
             ("footprint_entries",)),
    )
}  # fmt: skip
CHOICES = ("device", "moved", "attended")


def points(
    part: Part, axis: Axis | None = None, facet: str = "", value: str = "score", limits: Bounds | None = None
) -> list[Row]:
    """Each run's value, of a dataset or of all, against what it cost."""
    if value not in part.samples:
        return []
    by, made = ["run", facet] if facet else ["run"], list[Row]()
    groups = part.samples.groupby(by, sort=False, observed=True)
    costs = {key: 0.0 if axis is None else axis.of(rows) for key, rows in groups}
    for key, place in places(part.samples, by, value, limits).items():
        whole = replace(place, by_sample=True)  # as in result.json: all datasets' samples count alike
        if costs[key] is None or whole.mean is None:
            continue
        scale, ends = METRICS[place.metric].scale if limits is None else 1, whole.interval
        why = "over its budget" if place.over else outside_budget(part.runs[key[0]], ())
        row = {"run": key[0], "panel": key[-1] if facet else "", "x": costs[key], "y": scale * whole.mean, "why": why}
        row |= {} if ends is None else {"low": scale * ends.low, "high": scale * ends.high}
        made.append(row | {"n": whole.n, "place": place})
    return made


def as_lines(part: Part, found: Sequence[Row], tail: Callable[[str], str], fewest: int = 1) -> list[Row]:
    """Points of runs that differ in their budget only are one line of a method; others are other lines of it."""
    lines: dict[tuple[str, str, str, str], dict[Any, Row]] = {}
    for row in found:
        fact, comm = part.facts[row["run"]], part.runs[row["run"]].result.comm
        words = "" if fact["full"] else tail(row["run"])
        line = lines.setdefault((row["panel"], fact["who"], fact["label"], words), {})
        if not (fact["full"] and line):
            # What was asked is part of the key: some costs, such as bytes moved, are 0 at every budget.
            line.setdefault((row["x"], fact["size"], inf if comm is None else comm), row)
    made, seen, panels = list[Row](), Counter[tuple[str, str]](), [*dict.fromkeys(row["panel"] for row in found)]
    for (panel, who, label, words), line in sorted(lines.items(), key=lambda line: (panels.index(line[0][0]), line[0])):
        name = f"{label} {words}".strip() + (": reference" if who == "oracle" else "")
        own = {"line": name, "look": who, "nth": seen[panel, who]}
        seen[panel, who] += 1
        made += [line[at] | own for at in sorted(line)] if len(line) >= fewest else []
    return made


def front_of(part: Part, rows: Sequence[Row], better: str = "higher") -> list[Row]:
    """The points that are shown to be better than all that cost no more, where there are some.

    Only methods that could be deployed and kept their budgets can be on it; the others beat nobody either.
    """
    bounded = {
        i: (row["x"], row["place"].samples)
        for i, row in enumerate(rows)
        if is_deployable(part.runs[row["run"]]) and not row["place"].over
    }
    on = front(bounded, better)
    made = [{key: rows[i][key] for key in ("panel", "x", "y")} | {"mark": "front", "line": "front"} for i in on]
    return made if len(made) > 1 else []
