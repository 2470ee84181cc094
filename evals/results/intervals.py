"""Where the mean of a run's scores may as well lie: the one answer for result.json, the terminal, tables and figures.

    interval         Wilson's where every score is 0 or 1, else the bootstrap; None for a single sample
    wilson           of a share, by what would have to be true for it to surprise; never of no width
    bootstrap_ci95   percentile bootstrap of a mean, of differences too

The bootstrap says nothing where all samples agree: it can draw no other value than they have. Seven hits of seven are
no proof of 100 %, so hits and misses have Wilson's interval.

Not here: comparisons of runs and corrections for many of them (`plots/stats.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum, sqrt
from typing import Any

N_RESAMPLES = 10_000
BOOTSTRAP_SEED = 20_240_229  # any fixed number: an interval must not change when it is made again
Z95 = 1.959963984540054  # standard deviations of a normal distribution that 95 % lie within


@dataclass(frozen=True)
class Interval:
    """A mean and where it may as well lie."""

    mean: float
    low: float
    high: float


def interval(scores: Sequence[float]) -> Interval | None:
    """The mean of scores and its 95 % interval; None where one sample, or none, says nothing of the spread.

    Not for differences: a 1 among them is no hit. They take `bootstrap_ci95`.
    """
    values = [float(score) for score in scores]
    if len(values) < 2:
        return None
    if all(value in (0.0, 1.0) for value in values):
        return wilson(round(fsum(values)), len(values))
    bounds = bootstrap_ci95(values)
    assert bounds is not None, "only an empty list has no bounds"
    return Interval(fsum(values) / len(values), *bounds)


def wilson(hits: int, n: int) -> Interval:
    """A share of n and its 95 % score interval (Wilson, 1927)."""
    share = hits / n
    spread = Z95 * sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n))
    middle, scale = share + Z95**2 / (2 * n), 1 + Z95**2 / n
    low = 0.0 if hits == 0 else (middle - spread) / scale
    return Interval(share, low, 1.0 if hits == n else (middle + spread) / scale)


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
