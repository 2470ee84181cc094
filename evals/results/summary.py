"""From the rows of a run to its result, as pure functions: means, intervals, `summarise`.

The order of the rows never matters, so a run that was stopped says the same as one that was not.

Not here: statistics over runs (`plots/stats.py`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import exp, fsum, log
from typing import Any, cast

from evals.results.schema import LEDGER_MEANS, METRICS, RunFacts, RunResult, SampleRow
from evals.results.scores import Scores, describe

N_RESAMPLES = 10_000
BOOTSTRAP_SEED = 20_240_229  # any fixed number: an interval must not change when it is made again


def mean(values: Iterable[float | None]) -> float | None:
    """Mean over what was measured; fsum is exact, so the order of the samples does not matter."""
    measured = [value for value in values if value is not None]
    return fsum(measured) / len(measured) if measured else None


def combined(rows: Iterable[SampleRow], metric: str | None = None) -> float | None:
    """The score of a run from those of its samples: their mean, or of perplexities exp of the mean loss."""
    key = METRICS[metric or "score"].weight
    scored = [(row.score, row) for row in rows if row.score is not None]
    if key is None or not scored:
        return mean(score for score, _ in scored)
    weights = [int(row.fields[key]) for _, row in scored]
    losses = (log(score) * n for (score, _), n in zip(scored, weights, strict=True))
    return exp(fsum(losses) / sum(weights))


def combined_ci95(rows: Iterable[SampleRow], metric: str | None = None) -> list[float] | None:
    """As `bootstrap_ci95`, of what `combined` says."""
    key = METRICS[metric or "score"].weight
    scored = [(row.score, row) for row in rows if row.score is not None]
    if key is None:
        return bootstrap_ci95([score for score, _ in scored])
    weights = [int(row.fields[key]) for _, row in scored]
    bounds = bootstrap_ci95([log(score) for score, _ in scored], weights)
    return None if bounds is None else [exp(bound) for bound in bounds]


def means_of_measures(rows: Sequence[SampleRow]) -> dict[str, float | None] | None:
    """Means of what a task's samples carry as `measures`, a null being no measurement; None without any."""
    each = [cast(dict[str, Any], row.fields["measures"]) for row in rows if "measures" in row.fields]
    names = dict.fromkeys(name for measures in each for name in measures)
    return {name: mean(measures.get(name) for measures in each) for name in names} or None


def bootstrap_ci95(scores: Sequence[float], weights: Sequence[int] | None = None) -> list[float] | None:
    """Percentile bootstrap over samples: [score, score] of a single one, null of none.

    The same scores give the same interval, in whatever order and on every machine.
    """
    import numpy as np

    n = len(scores)
    if n < 2:
        return [float(scores[0])] * 2 if n else None
    order = np.argsort(np.asarray(scores, dtype=np.float64), kind="stable")
    values = np.asarray(scores, dtype=np.float64)[order]
    counts = None if weights is None else np.asarray(weights, dtype=np.float64)[order]
    weighted = values if counts is None else values * counts
    means: list[Any] = []
    for drawn in first_draws(n) if n <= 256 else draws(n):
        part = weighted[drawn].mean(axis=1)
        means.append(part if counts is None else part / counts[drawn].mean(axis=1))
    # Without the bounds, rounding could put equal scores outside of their own interval.
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975]).clip(values[0], values[-1])
    return [float(low), float(high)]


def draws(n: int) -> Iterator[Any]:
    """Which samples each resample has, some resamples at a time."""
    import numpy as np

    rng = np.random.default_rng(BOOTSTRAP_SEED + n)
    chunk = max(1, 1_000_000 // n)  # resamples at a time: 8 MB of indices
    for start in range(0, N_RESAMPLES, chunk):
        yield rng.integers(0, n, size=(min(chunk, N_RESAMPLES - start), n))


@lru_cache(maxsize=2)
def first_draws(n: int) -> tuple[Any, ...]:
    """All of `draws`, kept: a report asks for hundreds of intervals of as many samples; 20 MB at most each."""
    return tuple(draws(n))


def summarise(rows: Sequence[SampleRow], facts: RunFacts) -> RunResult:
    """What a finished run says of itself; the order of `rows` does not matter."""
    ok = [row for row in rows if row.status == "ok"]
    means: dict[str, Any] = {name: mean(row.ledger[key] for row in ok) for name, key in LEDGER_MEANS.items()}
    return RunResult(
        **vars(facts),
        **means,
        status="ok" if len(ok) == len(rows) else "oom",
        n_samples=len(ok),
        n_oom=len(rows) - len(ok),
        score=combined(ok, facts.metric),
        score_ci95=combined_ci95(ok, facts.metric),
        ratio=None if facts.ratio_exact is None else float(Fraction(facts.ratio_exact)),
        comm=float(Fraction(facts.comm_exact)),
        within_budget=all(row.ledger["within_budget"] for row in ok) if ok else None,
        prefill_s=mean(row.prefill_s for row in ok),
        tpot_s=mean(row.tpot_s for row in ok),
        batch_rows_mean=mean(row.batch_rows for row in ok),
        measures=means_of_measures(ok),
    )


def with_scores(result: RunResult, rows: Sequence[SampleRow], scores: Scores | None) -> RunResult:
    """The result of a run whose rows have other scores now; `scores` are laid over the rows already."""
    ok = [row for row in rows if row.status == "ok"]
    metric = next((row.fields.get("metric") for row in ok), result.metric)
    return replace(
        result,
        score=combined(ok, metric),
        score_ci95=combined_ci95(ok, metric),
        metric=metric,
        measures=means_of_measures(ok),
        **describe(scores),
    )


def disagreement(result: RunResult, rows: Collection[SampleRow]) -> str | None:
    """What a result says that its samples do not, or None."""
    n_oom = sum(row.status == "oom" for row in rows)
    counts = len(rows) - n_oom, n_oom
    if (result.n_samples, result.n_oom) != counts:
        return "{} samples and {} oom, samples.jsonl {} and {}".format(result.n_samples, result.n_oom, *counts)
    same = result.score == combined(rows, result.metric)
    return None if same else "another score than samples.jsonl"
