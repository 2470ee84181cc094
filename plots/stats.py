"""Statistics of scores as pure functions: intervals, paired differences, wins, and corrections for many comparisons.

Samples are the unit: two variants that answered the same samples are compared sample by sample, because most of what
varies is the samples' difficulty and cancels. Randomness comes from a seed, so a figure made again is the same figure.

    interval             percentile bootstrap of the mean
    macro_interval       the same of a mean over datasets' means
    paired               mean difference, its bootstrap interval, a sign-flip permutation p-value, wins, ties, losses
    holm, benjamini_hochberg   p-values adjusted for how many were looked at

Not here: reading runs (`evals/results/`), drawing (`plots/*.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum

import numpy as np
from numpy.typing import NDArray

from evals.results import bootstrap_ci95

Array = NDArray[np.float64]

N_RESAMPLES = 10_000
EXACT_UP_TO = 14  # differences other than zero whose 2^n signs are all tried
CHUNK = 1 << 22  # numbers drawn at a time
# Signs multiplied at a time: OpenBLAS gives larger products to threads, which takes 7 ms where one thread takes 0.3.
BLOCK = 1 << 18


@dataclass(frozen=True)
class Interval:
    """A mean and where it may as well lie."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """A variant against a reference on the same samples; above 0 the variant is better where more is better."""

    difference: Interval
    p: float  # of a difference this large in either direction if the two were alike
    wins: int
    ties: int
    losses: int

    @property
    def n(self) -> int:
        return self.wins + self.ties + self.losses


def interval(scores: Sequence[float] | Array) -> Interval:
    """The mean of scores and its 95 % percentile bootstrap interval, as a run's own result has it."""
    values = finite(scores)
    bounds = bootstrap_ci95(values.tolist())
    assert bounds is not None, "finite() refuses an empty list"
    return Interval(float(values.mean()), *bounds)


def macro_interval(datasets: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """Mean over datasets of their means, with a bootstrap that resamples the samples of each dataset by itself."""
    rng = np.random.default_rng(seed)
    means = np.zeros(N_RESAMPLES)
    for scores in datasets:
        values = np.sort(np.asarray(scores, dtype=np.float64))
        means += values[rng.integers(0, len(values), size=(N_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means / len(datasets), [0.025, 0.975])
    mean = fsum(fsum(scores) / len(scores) for scores in datasets) / len(datasets)
    return Interval(mean, float(low), float(high))


def paired(
    scores: Sequence[float] | Array,
    reference: Sequence[float] | Array,
    seed: int = 0,
    tolerance: float = 1e-12,
) -> Paired:
    """A variant's scores against a reference's on the same samples, in the same order."""
    ours, theirs = finite(scores), finite(reference)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} scores against {len(theirs)}: not the same samples")
    differences = ours - theirs
    differences[np.abs(differences) <= tolerance] = 0.0
    return Paired(
        difference=interval(differences),
        p=sign_flip_p(differences, seed),
        wins=int((differences > 0).sum()),
        ties=int((differences == 0).sum()),
        losses=int((differences < 0).sum()),
    )


def sign_flip_p(differences: Array, seed: int = 0, n: int = N_RESAMPLES) -> float:
    """Two-sided p-value of the mean difference when the sign of each one is a coin's.

    All signs are tried where there are few, else `n` random ones, the observed signs counted among them, so that it is
    never 0. Samples without a difference say nothing and are left out.
    """
    rest = np.abs(differences[differences != 0])
    if len(rest) == 0:
        return 1.0
    # Sums that are equal in exact arithmetic must count as equal.
    observed = abs(differences.sum()) * (1 - 1e-9)
    if len(rest) <= EXACT_UP_TO:
        bits = np.arange(1 << len(rest))[:, None] >> np.arange(len(rest)) & 1
        return float((np.abs((2 * bits - 1) @ rest) >= observed).mean())
    extreme = 0
    at_once = max(1, BLOCK // len(rest))
    for signs in _kept_signs(seed, n, len(rest)) if len(rest) <= 256 else _signs(seed, n, len(rest)):
        for start in range(0, len(signs), at_once):
            extreme += int((np.abs(signs[start : start + at_once] @ rest) >= observed).sum())
    return (extreme + 1) / (n + 1)


def _signs(seed: int, n: int, length: int) -> Iterator[NDArray[np.int8]]:
    """`n` rows of random signs, as many at a time as fit."""
    rng = np.random.default_rng(seed)
    at_once = max(1, CHUNK // length)
    for start in range(0, n, at_once):
        drawn = rng.integers(0, 2, size=(min(n - start, at_once), length)) * 2 - 1
        yield drawn.astype(np.int8)


@lru_cache(maxsize=32)
def _kept_signs(seed: int, n: int, length: int) -> tuple[NDArray[np.int8], ...]:
    """All of `_signs`, kept: a report compares hundreds of runs of as many samples; 2.6 MB at most each."""
    return tuple(_signs(seed, n, length))


def holm(p_values: Sequence[float] | Array) -> Array:
    """Adjusted p-values that keep the chance of any false finding at the level (Holm, 1979)."""
    p = finite(p_values)
    order = np.argsort(p, kind="stable")
    stepped = p[order] * (len(p) - np.arange(len(p)))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(stepped))
    return adjusted


def benjamini_hochberg(p_values: Sequence[float] | Array) -> Array:
    """Adjusted p-values that keep the share of false findings at the level (Benjamini and Hochberg, 1995)."""
    p = finite(p_values)
    order = np.argsort(p, kind="stable")
    stepped = p[order] * len(p) / np.arange(1, len(p) + 1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.minimum.accumulate(stepped[::-1])[::-1])
    return adjusted


def finite(values: Sequence[float] | Array) -> Array:
    """A flat copy as float64; refuses what has no mean."""
    array = np.array(values, dtype=np.float64)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"expected a list of numbers, got an array of shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{int((~np.isfinite(array)).sum())} of {len(array)} numbers are not finite")
    return array
