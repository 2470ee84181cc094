"""Statistics of scores as pure functions: intervals, paired differences, who is best, corrections for many looks.

Samples are the unit: two variants that answered the same samples are compared sample by sample, because most of what
varies is the samples' difficulty and cancels. Randomness comes from a seed, so a figure made again is the same figure.

    interval             of a mean: Wilson's of hits and misses, else Student's of few samples and the bootstrap of more
    macro_interval       of a mean over datasets' means: datasets and samples are both resampled; None of one sample
    paired               mean difference, its interval, a sign-flip permutation p-value, wins, ties, losses
    paired_over_datasets the same of averages over datasets
    corrected            paired differences with the p-values that count (Holm): what colours follow
    standings            of one column: which is best, which is no worse by the corrected test, or that none can be told
    small_n              in words, what few samples cannot show
    holm, benjamini_hochberg   p-values adjusted for how many were looked at

What is drawn, coloured or printed bold as better or worse is what `corrected` and `standings` say. Scores are those of
result.json, 0 to 1 or a measured number; `scaled` makes percents of an interval.

Not here: reading runs (`evals/results/`), drawing (`plots/*.py`).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, fsum, log2, sqrt
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from evals.results.intervals import ANYWHERE, FEW, Z95, Bounds, Interval, mean_ci95
from evals.results.intervals import interval as interval_of_scores

Array = NDArray[np.float64]
Name = TypeVar("Name", bound=Hashable)

LEVEL = 0.05  # of a corrected p-value below which a difference is one
N_RESAMPLES = 10_000
EXACT_UP_TO = 14  # differences other than zero whose 2^n signs are all tried
CHUNK = 1 << 22  # numbers drawn at a time
# Signs multiplied at a time: OpenBLAS gives larger products to threads, which takes 7 ms where one thread takes 0.3.
BLOCK = 1 << 18
ROUNDING = 1e-12  # scores that differ by less are equal


@dataclass(frozen=True)
class Paired:
    """A variant against a reference on the same samples; above 0 the variant is better where more is better."""

    mean: float  # of the differences
    difference: Interval | None  # 95 %; None where one sample, or equal differences, say nothing of the spread
    p: float  # of a difference this large in either direction if the two were alike
    wins: int
    ties: int
    losses: int

    @property
    def n(self) -> int:
        return self.wins + self.ties + self.losses


def interval(scores: Sequence[float] | Array, bounds: Bounds = ANYWHERE) -> Interval | None:
    """The mean of scores and its 95 % interval, as a run's own result has it; None of a single one."""
    return interval_of_scores(finite(scores).tolist(), bounds)


def scaled(found: Interval | None, by: float) -> Interval | None:
    """An interval in other units: `scaled(found, 100)` is in percent."""
    return None if found is None else Interval(by * found.mean, by * found.low, by * found.high)


def macro_interval(datasets: Sequence[Sequence[float]], seed: int = 0, bounds: Bounds = ANYWHERE) -> Interval | None:
    """Mean over datasets of their means, and its 95 % interval; None of a single score.

    The bootstrap draws datasets and, of each one drawn, samples: other datasets of the kind could as well have been
    chosen. Seven single samples have an interval therefore, which is Student's, as of any so few; where all are hits,
    or all misses, it is Wilson's.
    """
    groups = sorted(sorted(finite(scores).tolist()) for scores in datasets)
    together = [score for scores in groups for score in scores]
    if len(groups) == 1 or len(together) < 2 or min(together) == max(together):
        return interval_of_scores(together, bounds)
    centre = fsum(fsum(scores) / len(scores) for scores in groups) / len(groups)
    return _around(centre, [np.array(scores) for scores in groups], seed, bounds)


def _around(centre: float, groups: Sequence[Array], seed: int, bounds: Bounds) -> Interval:
    """The interval of a mean over groups of their means."""
    together = np.concatenate(groups)
    if len(together) < FEW:
        shares = [1 / len(values) for values in groups for _ in values]
        low, high = mean_ci95(together.tolist(), shares, bounds) or (centre, centre)
    else:
        low, high = np.quantile(_two_stage(groups, seed), [0.025, 0.975])
    return Interval(centre, min(float(low), centre), max(float(high), centre))


def _two_stage(groups: Sequence[Array], seed: int) -> Array:
    """Resampled means over groups of their means: groups are drawn, then the values of each."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(groups), size=(N_RESAMPLES, len(groups)))
    means = np.empty(drawn.shape)
    for i, values in enumerate(groups):
        here = drawn == i
        at_once = max(1, CHUNK // len(values))
        n = int(here.sum())
        parts = [
            values[rng.integers(0, len(values), size=(min(at_once, n - start), len(values)))].mean(axis=1)
            for start in range(0, n, at_once)
        ]
        means[here] = np.concatenate(parts) if parts else []
    return means.mean(axis=1)


def paired(
    scores: Sequence[float] | Array,
    reference: Sequence[float] | Array,
    seed: int = 0,
    tolerance: float = ROUNDING,
    bounds: Bounds = ANYWHERE,
) -> Paired:
    """A variant's scores against a reference's on the same samples, in the same order; `bounds` are of the scores.

    The interval of hits and misses is Agresti and Min's (2005), else `mean_ci95` of the differences. It holds 0
    wherever the test finds nothing, as the set of differences that the test does not refuse would: of few samples the
    two would disagree.
    """
    ours, theirs, differences = _differences(scores, reference, tolerance)
    p = sign_flip_p(differences, seed)
    if all(value in (0.0, 1.0) for value in (*ours, *theirs)):
        spread = _of_hits(int((differences > 0).sum()), int((differences < 0).sum()), len(differences))
    elif len(differences) < 2 or np.ptp(differences) <= tolerance:
        spread = None
    else:
        widest = bounds[1] - bounds[0]
        low, high = mean_ci95(differences.tolist(), bounds=(-widest, widest)) or (0.0, 0.0)
        spread = Interval(float(differences.mean()), low, high)
    return _paired(differences, spread, p)


def paired_over_datasets(
    scores: Sequence[Sequence[float] | Array],
    reference: Sequence[Sequence[float] | Array],
    seed: int = 0,
    tolerance: float = ROUNDING,
    bounds: Bounds = ANYWHERE,
) -> Paired:
    """As `paired`, of the means over datasets of their means: every dataset counts as much, however long it is."""
    if len(scores) != len(reference):
        raise ValueError(f"{len(scores)} datasets against {len(reference)}: not the same samples")
    if len(scores) == 1:
        return paired(scores[0], reference[0], seed, tolerance, bounds)
    groups = [_differences(ours, theirs, tolerance)[2] for ours, theirs in zip(scores, reference, strict=True)]
    weighted = _weighted(groups)
    mean = fsum(weighted)
    together = np.concatenate(groups)
    spread = None
    if np.ptp(together) > tolerance:
        widest = bounds[1] - bounds[0]
        spread = _around(mean, groups, seed, (-widest, widest))
    found = _paired(together, spread, sign_flip_p(weighted, seed))
    return Paired(mean, found.difference, found.p, found.wins, found.ties, found.losses)


def _weighted(groups: Sequence[Array]) -> Array:
    """Values whose sum is the mean over groups of their means."""
    return np.concatenate([values / (len(values) * len(groups)) for values in groups])


def _differences(
    scores: Sequence[float] | Array, reference: Sequence[float] | Array, tolerance: float
) -> tuple[Array, Array, Array]:
    ours, theirs = finite(scores), finite(reference)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} scores against {len(theirs)}: not the same samples")
    differences = ours - theirs
    differences[np.abs(differences) <= tolerance] = 0.0
    return ours, theirs, differences


def _paired(differences: Array, spread: Interval | None, p: float) -> Paired:
    if spread is not None and p >= LEVEL:
        spread = Interval(spread.mean, min(spread.low, 0.0), max(spread.high, 0.0))
    wins, losses = int((differences > 0).sum()), int((differences < 0).sum())
    return Paired(float(differences.mean()), spread, p, wins, len(differences) - wins - losses, losses)


def _of_hits(wins: int, losses: int, n: int) -> Interval | None:
    """The interval of a difference of two shares of the same n samples (Agresti and Min, 2005); None of one."""
    if n < 2:
        return None
    more, fewer, total = wins + 0.5, losses + 0.5, n + 2  # half a pair of each of the four kinds
    centre = (more - fewer) / total
    spread = Z95 * sqrt(more + fewer - (more - fewer) ** 2 / total) / total
    mean = (wins - losses) / n
    return Interval(mean, max(-1.0, min(mean, centre - spread)), min(1.0, max(mean, centre + spread)))


@dataclass(frozen=True)
class Corrected:
    """A paired difference and the p-value that counts, corrected for all that were looked at together."""

    paired: Paired
    p: float  # Holm's
    family: int  # comparisons that were looked at together

    @property
    def sign(self) -> int:
        """1 where the variant's score is higher, -1 where it is lower, 0 where no difference was shown: the colour."""
        if self.p >= LEVEL:
            return 0
        return 1 if self.paired.mean > 0 else -1

    @property
    def words(self) -> str:
        """What a reader should take from it, in a sentence's part."""
        test = f"p {self.p:.3f}" + (f" after Holm over {self.family}" if self.family > 1 else "")
        if self.sign:
            return f"{'higher' if self.sign > 0 else 'lower'} ({test}, n {self.paired.n})"
        few = small_n(self.paired.n, self.family)
        return f"no difference shown ({test}, n {self.paired.n}{f'; {few}' if few else ''})"


def corrected(pairs: Mapping[Name, Paired]) -> dict[Name, Corrected]:
    """All comparisons that a reader sees together: the cells of a table, the lines of a figure."""
    adjusted = map(float, holm([found.p for found in pairs.values()]) if pairs else ())
    return {name: Corrected(found, p, len(pairs)) for (name, found), p in zip(pairs.items(), adjusted, strict=True)}


BEST, TIED, WORSE, UNDECIDED = "best", "tied", "worse", "undecided"


@dataclass(frozen=True)
class Standings:
    """Who is best in a column.

    `of` says of each name `BEST`: the highest mean; `TIED`: not shown to be worse than that; `WORSE`: shown to be; or
    `UNDECIDED`: of all of them, where `why` says why none can be best. `p` is of the comparison with the best.

    Bold is right for `BEST` alone where nothing is `TIED`; ties are marked as ties, all of them, the best one too.
    """

    of: dict[str, str]
    p: dict[str, float] = field(default_factory=dict[str, float])
    why: str = ""

    def marked(self, name: str) -> str:
        """How a cell shows: "bold" for the one that is best, "tie" for several that may be, "" for others."""
        at = self.of.get(name, UNDECIDED)
        if at not in (BEST, TIED):
            return ""
        return "bold" if [*self.of.values()].count(BEST) == 1 and TIED not in self.of.values() else "tie"


def standings(column: Mapping[str, Mapping[Name, float]], better: str = "higher", seed: int = 0) -> Standings:
    """Who is best of a column's names, from the scores of their samples, by sample.

    Each is compared with the highest mean on the samples that both have. Which one that is the data say, so p-values
    are corrected (Holm) for all pairs of names that could have been compared. For averages over datasets give
    `(dataset, sample)` pairs as samples: every dataset counts as much.
    """
    names = [name for name in column if column[name]]
    if len(names) < 2:
        return _undecided(column, "there is nothing to compare with")
    sign = {"higher": 1.0, "lower": -1.0}[better]
    means = {name: sign * _mean(column[name]) for name in names}
    if all(score == 0 for name in names for score in column[name].values()):
        return _undecided(column, "all scores are 0")
    first = max(names, key=lambda name: means[name])
    equal = [name for name in names if means[first] - means[name] <= ROUNDING]
    if len(equal) == len(names):
        return _undecided(column, "all means are equal")
    against = {name: _against(column[name], column[first], seed) for name in names if name not in equal}
    n_pairs = len(names) * (len(names) - 1) // 2
    tested = {name: found for name, found in against.items() if found is not None}
    if not tested:
        return _undecided(column, "no sample was answered by the best and another")
    if few := small_n(max(n for _, n in tested.values()), n_pairs):
        return _undecided(column, few)
    p = dict(zip(tested, map(float, holm([found for found, _ in tested.values()], n_pairs)), strict=True))
    of = {name: WORSE if p.get(name, 1.0) < LEVEL else TIED for name in names}
    return Standings(of | dict.fromkeys(equal, BEST) | dict.fromkeys(column.keys() - set(names), UNDECIDED), p)


def _undecided(column: Mapping[str, object], why: str) -> Standings:
    return Standings(dict.fromkeys(column, UNDECIDED), why=why)


def _groups(scores: Mapping[Name, float]) -> dict[Hashable, list[Name]]:
    """Samples by dataset; all in one where samples do not say."""
    groups: dict[Hashable, list[Name]] = {}
    for key in scores:
        name: object = key
        dataset = cast(tuple[Hashable, Hashable], name)[0] if isinstance(name, tuple) else ""
        groups.setdefault(dataset, []).append(key)
    return groups


def _mean(scores: Mapping[Name, float]) -> float:
    groups = _groups(scores).values()
    return fsum(fsum(scores[key] for key in keys) / len(keys) for keys in groups) / len(groups)


def _against(ours: Mapping[Name, float], theirs: Mapping[Name, float], seed: int) -> tuple[float, int] | None:
    """The p-value of a difference on the samples that both have, and how many those are."""
    shared = _groups({key: value for key, value in ours.items() if key in theirs}).values()
    sides = [([ours[key] for key in keys], [theirs[key] for key in keys]) for keys in shared]
    groups = [_differences(*both, ROUNDING)[2] for both in sides]
    return (sign_flip_p(_weighted(groups), seed), sum(map(len, groups))) if groups else None


def small_n(n: int, comparisons: int = 1) -> str:
    """What so few samples cannot show, in words; "" where they can.

    The smallest p-value that a sign-flip test of n samples has is 2 / 2^n; corrected for all comparisons it must be
    below the level.
    """
    needed = 1 + ceil(log2(comparisons / LEVEL))
    needed += 2 * comparisons / 2**needed >= LEVEL
    if n >= needed:
        return ""
    samples = "one sample shows" if n == 1 else f"{n} samples show"
    return f"{samples} no difference, whatever the scores: it takes {needed}"


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


def holm(p_values: Sequence[float] | Array, family: int | None = None) -> Array:
    """Adjusted p-values that keep the chance of any false finding at the level (Holm, 1979).

    `family`: how many comparisons there were, where these are the ones looked at; the others count as if theirs were
    larger, which makes these no smaller than Holm's of all.
    """
    p = finite(p_values)
    order = np.argsort(p, kind="stable")
    stepped = p[order] * ((family or len(p)) - np.arange(len(p)))
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
