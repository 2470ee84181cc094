"""How the runs of a report compare: with full attention on the same prompts, and with each other under one budget.

Differences are paired by sample and corrected for all that one column of the page compares (Holm). Who is best is asked
among the runs of one column and budget that somebody could deploy: full attention, a search that no budget prices and
runs over their budget are none of them.

Not here: the statistics (`plots/stats.py`), what else the page says of a run (`plots/site/overview.py`).
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import fsum, log
from typing import Any

from kvbench.plots.read import Run, score
from kvbench.plots.run_sets import front_of, is_deployable
from kvbench.plots.scored import Scored, best
from kvbench.plots.stats import Paired, corrected, is_bound
from kvbench.results import METRICS, SampleRow
from kvbench.results.intervals import ANYWHERE

AVERAGE = "average"  # the name of the column that stands for all datasets of a benchmark
SAME = ("model", "model_digest", "task", "task_version", "data_digest", "compression_scope", "seed", "dtype", "device")
FLOOR = "random"  # the method whose score quality is measured from
Rows = Sequence[SampleRow]


class Baselines:
    """The samples of full attention and of random tokens, by what a run must share with one to be compared with it."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.rows: dict[str, dict[str, SampleRow]] = {}
        self.random: dict[tuple[str, str], dict[str, SampleRow]] = {}
        self.leads: dict[tuple[str, str, tuple[str, ...]], float | None] = {}
        for run in runs:
            if run.method in ("full", FLOOR) and run.is_exact:
                of_random = (
                    self.random.setdefault((self.key(run), run.result.asked), {}) if run.method == FLOOR else None
                )
                rows = self.rows.setdefault(self.key(run), {}) if of_random is None else of_random
                for row in run.rows:
                    if row.score is not None:
                        rows.setdefault(row.id, row)

    def rows_of(self, run: Run) -> dict[str, SampleRow]:
        """Full attention's samples, by id."""
        return self.rows.get(self.key(run), {})

    def levels(self, run: Run, metric: str, datasets: Sequence[Rows]) -> list[float | None] | None:
        """Full attention's score on a run's samples, and its lead over random tokens; None for what is no share."""
        full = self.rows_of(run)
        if not METRICS[metric].is_share or not full:
            return None
        whole = level([[full[row.id] for row in rows if row.id in full] for rows in datasets])
        return [whole, self.lead(run, tuple(row.id for rows in datasets for row in rows if row.id in full))]

    def lead(self, run: Run, asked: tuple[str, ...]) -> float | None:
        """What random tokens under the same budget lack of full attention's score on these samples.

        0 where none is shown, None where no run chose at random on samples of each dataset.
        """
        of = (self.key(run), run.result.asked)
        if (*of, asked) not in self.leads:
            full, random = (
                [rows[id] for id in asked if id in rows] for rows in (self.rows_of(run), self.random.get(of, {}))
            )
            found = Scored.of(full).against(Scored.of(random))
            self.leads[*of, asked] = None if found is None else found.lead
        return self.leads[*of, asked]

    @staticmethod
    def key(run: Run) -> str:
        return json.dumps([run.setting(key) for key in SAME], sort_keys=True)

    def compare(self, run: Run, metric: str, datasets: Sequence[Rows]) -> Paired | None:
        """A run against full attention on the samples with the same prompt; None without such a sample."""
        # Perplexities are compared as losses, whose differences can be averaged.
        is_loss = METRICS[metric].weight is not None
        of, limits = (loss, ANYWHERE) if is_loss else (score, None)
        full = Scored.of([*self.rows_of(run).values()], of, limits)
        return Scored.of([row for rows in datasets for row in rows], of, limits).against(full)


def level(datasets: Sequence[Rows]) -> float | None:
    """The mean score, over datasets of their means; None where one of them has no sample."""
    means = [Scored.of(rows).mean for rows in datasets]
    known = [mean for mean in means if mean is not None]
    return fsum(known) / len(means) if means and len(known) == len(means) else None


def loss(row: SampleRow) -> float | None:
    return None if row.score is None else log(row.score)


def correct(described: Sequence[dict[str, Any]]) -> None:
    """Give each `paired` of a part its corrected p-value and what that says, by columns of the page."""
    parts = [(column_of(run, part), part) for run in described for part in run["parts"] if part["paired"]]
    found = corrected({(column, i): part["paired"] for i, (column, part) in enumerate(parts)}, lambda name: name[0])
    for (_, part), one in zip(parts, found.values(), strict=True):
        part["paired"] = as_plain(one.paired) | {
            "holm": one.p,
            "holm_is_bound": one.is_bound,
            "family": one.family,
            "sign": one.sign,
            "unit": "nats" if METRICS[part["metric"]].weight is not None else "",
        }


def column_of(told: Mapping[str, Any], part: Mapping[str, Any]) -> tuple[str, str, str]:
    """The key of one column of the page: all variants that were asked the same samples."""
    return told["group"], told["task"], part["dataset"]


def variants(described: Iterable[Mapping[str, Any]]) -> Counter[tuple[str, str, str]]:
    """How many variants each column has, full attention left out: what its p-values are corrected for."""
    return Counter(column_of(told, part) for told in described for part in told["parts"] if not told["full"])


def as_plain(found: Paired) -> dict[str, Any]:
    spread = found.difference
    return {
        "mean": found.mean,
        "ci": None if spread is None else [spread.low, spread.high],
        "p": found.p,
        "p_is_bound": is_bound(found.p),
        "n": found.n,
        "more": found.wins,
        "same": found.ties,
        "less": found.losses,
    }


def rank(runs: Sequence[Run], described: Sequence[dict[str, Any]]) -> None:
    """Say of each part of a run how it stands among those of the same column, budget and comm."""
    families = variants(described)
    parts = {
        (i, j): (told, part)
        for i, (run, told) in enumerate(zip(runs, described, strict=True))
        for j, part in enumerate(told["parts"])
        if is_deployable(run) and not part["over"] and part["n"]
    }
    places = {name: Scored.of(rows_of(runs[name[0]], part)) for name, (_, part) in parts.items()}

    def column(name: tuple[int, int]) -> tuple[str, ...]:
        told, part = parts[name]
        return *column_of(told, part), told["budget"], told["comm"]

    marks, _ = best(places, column, lambda name: families[column_of(*parts[name])])
    for name, mark in marks.items():
        parts[name][1]["standing"] = mark


def rows_of(run: Run, part: Mapping[str, Any]) -> list[SampleRow]:
    """The samples of a dataset, or of those that an average is over."""
    parts = run.datasets()
    names = [part["dataset"]] if part.get("of") is None else part["of"]
    return [row for name in names for row in parts[name]]


def put_on_fronts(runs: Sequence[Run], described: Sequence[dict[str, Any]]) -> None:
    """Say of each part of a run, as `front`, by which costs it is on the front of its column.

    The front is of all runs of the page: one that a filter hides still beats the others.
    """
    columns: dict[tuple[str, str, str], list[tuple[Run, dict[str, Any], dict[str, Any]]]] = {}
    families = variants(described)
    for run, told in zip(runs, described, strict=True):
        for part in told["parts"]:
            part["front"] = []
            columns.setdefault(column_of(told, part), []).append((run, told, part))
    for key, column in columns.items():
        metrics = {part["metric"] for _, _, part in column}
        if len(metrics) > 1:
            continue
        metric = METRICS[metrics.pop()]
        of = loss if metric.weight is not None else score
        for axis in (*column[0][2]["cost"], "tpot"):
            points = {
                i: (run, rows_of(run, part), cost)
                for i, (run, told, part) in enumerate(column)
                if (cost := told["audit"]["tpot_s"] if axis == "tpot" else part["cost"][axis]) is not None
            }
            for i in front_of(points, of, metric.better, families[key]):
                column[i][2]["front"].append(axis)
