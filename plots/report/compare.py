"""How the runs of a report compare: with full attention on the same prompts, and with each other under one budget.

Differences are paired by sample and corrected for all that one column of the page compares (Holm). Who is best is asked
among the runs of one column and budget that somebody could deploy: full attention, a search that no budget prices and
runs over their budget are none of them.

Not here: the statistics (`plots/stats.py`), what else the page says of a run (`plots/report/overview.py`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import log
from typing import Any

from evals.results import METRICS, SampleRow
from evals.results.intervals import ANYWHERE
from plots.read import Run, per_prompt, score
from plots.stats import Paired, corrected, paired_over_datasets, small_n, standings

AVERAGE = "average"  # the name of the column that stands for all datasets of a benchmark
SAME = ("model", "model_digest", "task", "task_version", "data_digest", "compression_scope", "seed", "dtype", "device")
Rows = Sequence[SampleRow]


class Baselines:
    """The samples of full attention, by what a run must share with one to be compared with it."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.rows: dict[str, dict[str, SampleRow]] = {}
        for run in runs:
            if run.is_full and run.is_exact:
                rows = self.rows.setdefault(self.key(run), {})
                for row in run.rows:
                    if row.score is not None:
                        rows.setdefault(row.id, row)

    @staticmethod
    def key(run: Run) -> str:
        return json.dumps([run.setting(key) for key in SAME], sort_keys=True)

    def compare(self, run: Run, metric: str, datasets: Sequence[Rows]) -> Paired | None:
        """A run against full attention on the samples with the same prompt; None without such a sample."""
        full = self.rows.get(self.key(run), {})
        # Perplexities are compared as losses, whose differences can be averaged.
        is_loss = METRICS[metric].weight is not None
        of = loss if is_loss else score
        whole = per_prompt(full.values(), of)
        pairs = [
            [(mine, whole[prompt]) for prompt, mine in per_prompt(rows, of).items() if prompt in whole]
            for rows in datasets
        ]
        if not all(pairs):
            return None
        ours, theirs = ([[pair[side] for pair in part] for part in pairs] for side in (0, 1))
        return paired_over_datasets(ours, theirs, bounds=ANYWHERE if is_loss else METRICS[metric].bounds)


def loss(row: SampleRow) -> float | None:
    return None if row.score is None else log(row.score)


def correct(described: Sequence[dict[str, Any]]) -> None:
    """Give each `paired` of a part its corrected p-value and what that says, by columns of the page."""
    families: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for run in described:
        for part in run["parts"]:
            if part["paired"]:
                family = families.setdefault((run["group"], run["task"], part["dataset"]), {})
                family[len(family)] = part
    for family in families.values():
        found = corrected({i: part["paired"] for i, part in family.items()})
        for i, part in family.items():
            part["paired"] = as_plain(found[i].paired) | {
                "holm": found[i].p,
                "family": found[i].family,
                "sign": found[i].sign,
                "unit": "nats" if METRICS[part["metric"]].weight is not None else "",
            }


def as_plain(found: Paired) -> dict[str, Any]:
    spread = found.difference
    return {
        "mean": found.mean,
        "ci": None if spread is None else [spread.low, spread.high],
        "p": found.p,
        "n": found.n,
        "more": found.wins,
        "same": found.ties,
        "less": found.losses,
    }


def few_words(described: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What so few samples cannot show, by `n|family` of all comparisons on the page."""
    pairs = {(p["n"], p["family"]) for run in described for part in run["parts"] if (p := part["paired"])}
    return {f"{n}|{family}": words for n, family in sorted(pairs) if (words := small_n(n, family))}


def is_deployable(run: Run) -> bool:
    """Whether the budgets bound what the method reads: not so full attention, nor a search that no budget prices."""
    return not run.is_full and not run.result.bytes_searched_per_step


def rank(runs: Sequence[Run], described: Sequence[dict[str, Any]]) -> None:
    """Say of each part of a run how it stands among those of the same column, budget and comm."""
    columns: dict[tuple[str, ...], dict[str, tuple[Run, dict[str, Any]]]] = {}
    for run, told in zip(runs, described, strict=True):
        for part in told["parts"]:
            if is_deployable(run) and not part["over"] and part["n"]:
                key = told["group"], told["task"], part["dataset"], told["budget"], told["comm"]
                columns.setdefault(key, {})[told["key"]] = run, part
    for (_, _, dataset, _, _), column in columns.items():
        metrics = {part["metric"] for _, part in column.values()}
        if len(metrics) > 1:
            continue
        better = METRICS[metrics.pop()].better
        scores = {name: scores_of(run, dataset, part.get("of")) for name, (run, part) in column.items()}
        found = standings(scores, better)
        for name, (_, part) in column.items():
            part["standing"] = found.marked(name)


def scores_of(run: Run, dataset: str, datasets: Sequence[str] | None) -> dict[tuple[str, str], float]:
    """The scores of a dataset, or of those that an average is over, by dataset and prompt."""
    parts = run.datasets()
    names = [dataset] if datasets is None else datasets
    return {(name, prompt): of_prompt for name in names for prompt, of_prompt in per_prompt(parts[name]).items()}
