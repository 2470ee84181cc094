"""Where the mean of a run's scores may as well lie: the one answer for result.json, the terminal, tables and figures.

    interval         Wilson's where every score is 0 or 1, else `mean_ci95`; None for a single sample
    wilson           of a share, by what would have to be true for it to surprise; never of no width
    wilson_of_groups of hits that come in groups, such as draws of one prompt, which are not independent of each other
    mean_ci95        of a mean, of differences too: Student's t of fewer than `FEW` samples, else the bootstrap
    student_ci95     by the spread of the samples, as far out as so few of them allow
    bootstrap_ci95   percentile bootstrap

The bootstrap says nothing where all samples agree: it can draw no other value than they have. Seven hits of seven are
no proof of 100 %, so hits and misses have Wilson's interval. Nor can it go further out than the samples lie: of two of
them it holds the true mean every other time, of three three times of four. So few have Student's interval.

Not here: comparisons of runs and corrections for many of them (`plots/stats.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum, inf, sqrt
from typing import Any

N_RESAMPLES = 10_000
BOOTSTRAP_SEED = 20_240_229  # any fixed number: an interval must not change when it is made again
Z95 = 1.959963984540054  # standard deviations of a normal distribution that 95 % lie within
FEW = 8  # samples; from here on the bootstrap holds the mean nine times of ten, measured in its test
# What Z95 is where the deviation is estimated from n samples, for n from 2.
T95 = (
    12.706204736432102,
    4.302652729696144,
    3.182446305284263,
    2.776445105197793,
    2.570581835636314,
    2.446911851144969,
)
Bounds = tuple[float, float]  # of what is averaged, and so of its mean
ANYWHERE: Bounds = (-inf, inf)


@dataclass(frozen=True)
class Interval:
    """A mean and where it may as well lie."""

    mean: float
    low: float
    high: float


def interval(scores: Sequence[float], bounds: Bounds = ANYWHERE) -> Interval | None:
    """The mean of scores and its 95 % interval; None where one sample, or none, says nothing of the spread.

    Not for differences: a 1 among them is no hit. They take `mean_ci95`.
    """
    values = [float(score) for score in scores]
    if len(values) < 2:
        return None
    if all(value in (0.0, 1.0) for value in values):
        return wilson(round(fsum(values)), len(values))
    ends = mean_ci95(values, bounds=bounds)
    assert ends is not None, "only an empty list has no interval"
    return Interval(fsum(values) / len(values), *ends)


def wilson(hits: float, n: float) -> Interval:
    """A share of n and its 95 % score interval (Wilson, 1927)."""
    share = hits / n
    spread = Z95 * sqrt(share * (1 - share) / n + Z95**2 / (4 * n * n))
    middle, scale = share + Z95**2 / (2 * n), 1 + Z95**2 / n
    low = 0.0 if hits == 0 else (middle - spread) / scale
    return Interval(share, low, 1.0 if hits == n else (middle + spread) / scale)


def wilson_of_groups(groups: Sequence[Sequence[float]]) -> Interval:
    """The share of hits in two or more groups, and Wilson's interval of as many answers as these are worth.

    An answer is worth a whole one where the groups' means differ no more than chance makes them, and the group counts
    once where its answers all agree. Near 0 and 1 the bootstrap over groups is too narrow: a single hit in ten groups
    of four would end at 0.08, though no hit at all ends at 0.28.
    """
    m, n, hits = len(groups), sum(map(len, groups)), fsum(map(fsum, groups))
    share = hits / n
    moved = fsum((fsum(group) - len(group) * share) ** 2 for group in groups)
    variance = m / (m - 1) * moved / n**2
    reach = T95[m - 2] if m < FEW else Z95
    worth = share * (1 - share) / variance * (Z95 / reach) ** 2 if variance else 0.0
    worth = min(max(worth, m), n)
    found = wilson(share * worth, worth)
    return Interval(share, 0.0 if hits == 0 else found.low, 1.0 if hits == n else found.high)


def mean_ci95(
    scores: Sequence[float], weights: Sequence[float] | None = None, bounds: Bounds = ANYWHERE
) -> list[float] | None:
    """The interval of a mean, weighted or not, as far as it lies within what the mean can be; None of no scores."""
    found = (student_ci95 if 2 <= len(scores) < FEW else bootstrap_ci95)(scores, weights)
    return None if found is None else [min(max(end, bounds[0]), bounds[1]) for end in found]


def student_ci95(scores: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Of 2 to 7 samples, by Student's t; weighted ones by how far each moves the mean. Of equal ones of no width."""
    n = len(scores)
    if min(scores) == max(scores):
        return [float(scores[0])] * 2
    counts = [1.0] * n if weights is None else weights
    total = fsum(counts)
    mean = fsum(count * score for score, count in zip(scores, counts, strict=True)) / total
    moved = fsum((count * (score - mean)) ** 2 for score, count in zip(scores, counts, strict=True))
    spread = T95[n - 2] * sqrt(n / (n - 1) * moved) / total
    return [mean - spread, mean + spread]


def bootstrap_ci95(scores: Sequence[float], weights: Sequence[float] | None = None) -> list[float] | None:
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
