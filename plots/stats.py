"""Statistics of scores as pure functions: intervals, paired differences, who is best, corrections for many looks.

Samples are the unit: two variants that answered the same samples are compared sample by sample, because most of what
varies is the samples' difficulty and cancels. Randomness comes from a seed, so a figure made again is the same figure.

    interval             of a mean: that of `results/intervals.py`, which decides it for all
    macro_interval       of a mean over datasets' means: of several datasets each is a sample; None of one sample
    paired               mean difference, its interval, a sign-flip permutation p-value, wins, ties, losses
    paired_over_datasets the same of averages over datasets
    corrected            paired differences with the p-values that count (Holm): what colours follow
    standings            of one column: which is best, which is no worse by the corrected test, or that none can be told
    rank_ranges          of one column: the ranks that each name may have
    front                of points with a cost: which are shown to be better than all that cost no more
    holm                 p-values adjusted for how many were looked at
    p_words              a p-value as readers get it: "< 1e-06" where it is only known to be below

What is drawn, coloured or printed bold as better or worse is what `corrected`, `standings` and `front` say, and of
so few samples as `few_samples` has it they say nothing. Scores are
those of result.json, 0 to 1 or a measured number; `scaled` makes percents of an interval.

Not here: reading runs (`results/`), drawing (`plots/*.py`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import floor, fsum, log10
from sys import float_info
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvbench.results.intervals import LEVEL, SHARE, Bounds, Interval, few_samples
from kvbench.results.intervals import interval as interval_of_scores

Array = NDArray[np.float64]
Name = TypeVar("Name", bound=Hashable)
Sample = TypeVar("Sample", bound=Hashable)

N_DRAWS = 1_000_000  # of signs, where not all can be counted: 20 ms of 100 differences, 0.3 s of 1,000
BOUND = 1 / (N_DRAWS + 1)  # the p-value of what no draw reaches, and no other test has: all that is known is "below"
EXACT_UP_TO = 32  # differences other than zero whose 2^n signs are all counted; more would take longer than draws
SMALLEST = 1e-6  # p-value that is shown as a number
AT_ONCE = 16  # signs that one drawn number decides: a table of their sums has 512 KB and stays in a core's cache
CHUNK = 1 << 15  # draws at a time
ROUNDING = 1e-12  # scores that differ by less are equal
SAME_SUM = 1e-9  # share of all differences' sizes; sums that are closer are equal


@dataclass(frozen=True)
class Paired:
    """A variant against a reference on the same samples; above 0 the variant is better where more is better."""

    mean: float  # of the differences
    difference: Interval | None  # 95 %; None of one sample, and of equal differences of what has no bounds
    p: float  # of a difference this large in either direction if the two were alike
    wins: int
    ties: int
    losses: int

    @property
    def n(self) -> int:
        return self.wins + self.ties + self.losses

    @property
    def lead(self) -> float:
        """The mean where its interval lies above 0, else 0: a share of what may be nothing says nothing."""
        return self.mean if self.difference is not None and self.difference.low > 0 else 0.0

    @property
    def turned(self) -> "Paired":
        """The reference against the variant."""
        spread = self.difference
        ends = None if spread is None else Interval(-spread.mean, -spread.high, -spread.low)
        return Paired(-self.mean, ends, self.p, self.losses, self.ties, self.wins)


def interval(scores: Sequence[float] | Array, bounds: Bounds = SHARE) -> Interval | None:
    """The mean of scores and its 95 % interval, as a run's own result has it; None of a single one."""
    return interval_of_scores(finite(scores).tolist(), bounds)


def scaled(found: Interval | None, by: float) -> Interval | None:
    """An interval in other units: `scaled(found, 100)` is in percent."""
    return None if found is None else Interval(by * found.mean, by * found.low, by * found.high)


def macro_interval(datasets: Sequence[Sequence[float]], bounds: Bounds = SHARE) -> Interval | None:
    """Mean over datasets of their means, and its 95 % interval; None of a single score.

    Other datasets of the kind could as well have been chosen, so of several datasets each is one sample: their means
    vary by what tells datasets apart and by what tells samples apart.
    """
    groups = [finite(scores).tolist() for scores in datasets]
    if len(groups) == 1:
        return interval_of_scores(groups[0], bounds)
    return interval_of_scores([fsum(scores) / len(scores) for scores in groups], bounds)


def paired(
    scores: Sequence[float] | Array,
    reference: Sequence[float] | Array,
    seed: int = 0,
    tolerance: float = ROUNDING,
    bounds: Bounds = SHARE,
) -> Paired:
    """A variant's scores against a reference's on the same samples, in the same order; `bounds` are of the scores.

    The interval holds 0 wherever the test finds nothing. It assumes nothing of the differences but their bounds, while
    the test takes them to be as likely up as down by chance: of many small differences that all point one way the test
    shows one, while the interval still allows for a rare large one.
    """
    return paired_over_datasets([scores], [reference], seed, tolerance, bounds)


def paired_over_datasets(
    scores: Sequence[Sequence[float] | Array],
    reference: Sequence[Sequence[float] | Array],
    seed: int = 0,
    tolerance: float = ROUNDING,
    bounds: Bounds = SHARE,
) -> Paired:
    """`paired` for the means over datasets of their means: every dataset counts as much, however long it is.

    It holds for these datasets, as the test does: samples are compared with each other, and no other dataset is meant.
    """
    if len(scores) != len(reference):
        raise ValueError(f"{len(scores)} datasets against {len(reference)}: not the same samples")
    groups = [_differences(ours, theirs, tolerance) for ours, theirs in zip(scores, reference, strict=True)]
    together, widest = np.concatenate(groups), bounds[1] - bounds[0]
    shares = [1 / len(values) for values in groups for _ in values]
    weighted = _weighted(groups)
    mean, p = fsum(weighted), sign_flip_p(weighted, seed)
    if found := interval_of_scores(together.tolist(), (-widest, widest), shares):
        zero = 0.0 if p >= LEVEL else mean
        found = Interval(mean, min(found.low, mean, zero), max(found.high, mean, zero))
    wins, losses = int((together > 0).sum()), int((together < 0).sum())
    return Paired(mean, found, p, wins, len(together) - wins - losses, losses)


def _weighted(groups: Sequence[Array]) -> Array:
    """Values whose sum is the mean over groups of their means."""
    return np.concatenate([values / (len(values) * len(groups)) for values in groups])


def _differences(scores: Sequence[float] | Array, reference: Sequence[float] | Array, tolerance: float) -> Array:
    ours, theirs = finite(scores), finite(reference)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} scores against {len(theirs)}: not the same samples")
    differences = ours - theirs
    differences[np.abs(differences) <= tolerance] = 0.0
    return differences


@dataclass(frozen=True)
class Corrected:
    """A paired difference and the p-value that counts, corrected for all that were looked at together."""

    paired: Paired
    p: float  # Holm's
    family: int  # comparisons that were looked at together
    is_bound: bool = False  # True: the p-value is below that, as no drawn sign was so extreme (`BOUND`)

    @property
    def turned(self) -> "Corrected":
        """The reference against the variant."""
        return replace(self, paired=self.paired.turned)

    @property
    def sign(self) -> int:
        """1 where the variant's score is higher, -1 where it is lower, 0 where no difference was shown: the colour."""
        if self.p >= LEVEL or self.few:
            return 0
        return 1 if self.paired.mean > 0 else -1

    @property
    def few(self) -> str:
        """Why so few samples show no difference, whatever it is; "" where they are enough."""
        return few_samples(self.paired.n)


def corrected(
    pairs: Mapping[Name, Paired], column: Callable[[Name], Hashable] = lambda name: None
) -> dict[Name, Corrected]:
    """Comparisons with full attention, corrected by columns: all variants that were asked the same samples.

    Every table, figure and page takes a column for one family, at whatever budgets its variants are, so that the same
    runs have the same p-values everywhere. A further task is another question and does not make this one harder.
    """
    families: dict[Hashable, list[Name]] = {}
    for name in pairs:
        families.setdefault(column(name), []).append(name)
    found: dict[Name, Corrected] = {}
    for names in families.values():
        found |= corrected_over({name: pairs[name] for name in names}, len(names))
    return {name: found[name] for name in pairs}


def corrected_over(pairs: Mapping[Name, Paired], family: int) -> dict[Name, Corrected]:
    """Comparisons of one family, of which there may be more than these.

    Holm's value of a comparison is no less than that of those with a smaller p, so that it is a bound, too, where a
    bound of one of them decides it.
    """
    if not pairs:
        return {}
    p = [pair.p for pair in pairs.values()]
    adjusted, least = holm(p, family), holm([0.0 if is_bound(one) else one for one in p], family)
    return {
        name: Corrected(pair, float(high), family, bool(high > low))
        for (name, pair), high, low in zip(pairs.items(), adjusted, least, strict=True)
    }


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


def standings(
    column: Mapping[str, Mapping[Name, float]], better: str = "higher", seed: int = 0, family: int = 0
) -> Standings:
    """Who is best of a column's names, from the scores of their samples, by sample.

    Each is compared with the highest mean on the samples that both have. Which one that is the data say; still one
    comparison for each name is enough to correct for (Holm; Bonferroni's bound over who may be it): the truly best one
    is called worse, or one of equals the only best, in 5 % of cases at most. `family` is how many variants the column
    has in all, where these are those of one budget. For averages over datasets give `(dataset, sample)` pairs as
    samples: every dataset counts as much.
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
    n_compared = max(family, len(names))
    tested = {name: found for name, found in against.items() if found is not None}
    if not tested:
        return _undecided(column, "no sample was answered by the best and another")
    if few := few_samples(max(n for _, n in tested.values())):
        return _undecided(column, few)
    p = dict(zip(tested, map(float, holm([found for found, _ in tested.values()], n_compared)), strict=True))
    of = {name: WORSE if p.get(name, 1.0) < LEVEL else TIED for name in names}
    return Standings(of | dict.fromkeys(equal, BEST) | dict.fromkeys(column.keys() - set(names), UNDECIDED), p)


def rank_ranges(
    column: Mapping[str, Mapping[Name, float]], better: str = "higher", seed: int = 0
) -> dict[str, tuple[int, int]]:
    """The ranks that each name of a column may have, 1 for the best; names that cannot be told apart share theirs.

    A name ranks after those that are shown to be better and ahead of those that are shown to be worse. Its comparisons
    with all others are corrected for their number (Holm), so that each range holds its own name's rank in 95 %.
    """
    names, sign = [name for name in column if column[name]], {"higher": 1.0, "lower": -1.0}[better]
    means = {name: sign * _mean(column[name]) for name in names}
    found: dict[tuple[str, str], float] = {}
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            against = _against(column[one], column[other], seed)
            found[one, other] = found[other, one] = 1.0 if against is None or few_samples(against[1]) else against[0]
    ranges: dict[str, tuple[int, int]] = {}
    for name in names:
        others = [other for other in names if other != name]
        adjusted = holm([found[name, other] for other in others]) if others else ()
        apart = [other for other, p in zip(others, adjusted, strict=True) if p < LEVEL]
        n_better = sum(means[other] > means[name] for other in apart)
        ranges[name] = 1 + n_better, len(names) - (len(apart) - n_better)
    return ranges


def front(
    points: Mapping[Name, tuple[float, Mapping[Sample, float]]], better: str = "higher", family: int = 0, seed: int = 0
) -> list[Name]:
    """The names on the front, from cheap to dear, of points with a cost and the scores of their samples.

    On it is a point that is shown to be better than every one that costs no more: paired by sample, each p-value times
    the points that there are (or the `family` that they are of) below the level. Once there is such a point, the
    cheapest of all begins the front. Else there is none: of runs that answer alike, or of a single sample, none wins.
    """
    sign = {"higher": 1.0, "lower": -1.0}[better]
    scored = {name: (cost, scores) for name, (cost, scores) in points.items() if scores}
    means = {name: sign * _mean(scores) for name, (_, scores) in scored.items()}
    cheapest: list[Name] = []
    shown: list[Name] = []
    n_compared = max(family, len(scored))
    for name in sorted(scored, key=lambda name: scored[name][0]):
        cost, ours = scored[name]
        rivals = [other for other, (theirs, _) in scored.items() if other != name and theirs <= cost]
        if not rivals:
            cheapest.append(name)
        elif means[name] > max(means[other] for other in rivals) and all(
            _p_of_gain(ours, scored[other][1], sign, seed) * n_compared < LEVEL for other in rivals
        ):
            shown.append(name)
    return [*cheapest, *shown] if shown else []


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
    weighted = _shared(ours, theirs)
    return (sign_flip_p(weighted, seed), len(weighted)) if len(weighted) else None


def _p_of_gain(ours: Mapping[Name, float], theirs: Mapping[Name, float], sign: float, seed: int) -> float:
    """The p-value of a difference in our favour; 1 where there is none, or samples are few."""
    weighted = _shared(ours, theirs)
    return 1.0 if few_samples(len(weighted)) or sign * fsum(weighted) <= 0 else sign_flip_p(weighted, seed)


def _shared(ours: Mapping[Name, float], theirs: Mapping[Name, float]) -> Array:
    """Differences on the samples that both have, whose sum is the mean over datasets of their means."""
    shared = _groups({key: value for key, value in ours.items() if key in theirs}).values()
    sides = [([ours[key] for key in keys], [theirs[key] for key in keys]) for keys in shared]
    return _weighted([_differences(*both, ROUNDING) for both in sides]) if sides else np.zeros(0)


def sign_flip_p(differences: Array, seed: int = 0) -> float:
    """Two-sided p-value of the mean difference when the sign of each one is a coin's.

    It is exact where all differences are of one size (the binomial test) and where there are up to `EXACT_UP_TO`, whose
    signs are all counted. Of more, a million signs are drawn, the observed ones counted among them, so that it is never
    below `BOUND`. Samples without a difference say nothing and are left out. Neither order nor direction counts.
    """
    sizes = np.sort(np.abs(differences[differences != 0]))
    if len(sizes) == 0:
        return 1.0
    total = fsum(sizes)
    if sizes[-1] - sizes[0] <= SAME_SUM * sizes[-1]:
        ups = int((differences > 0).sum())
        return _binomial_p(len(sizes), max(ups, len(sizes) - ups))
    least = abs(fsum(differences)) - SAME_SUM * total  # of a sum that is as far from 0
    if least <= 0:
        return 1.0
    return _general_p(sizes.tobytes(), least, seed)


@lru_cache(maxsize=4096)
def _general_p(stored: bytes, least: float, seed: int) -> float:
    """The p-value, kept since a page says of the same pair who is best, who is worse, and what rank it may have."""
    sizes = np.frombuffer(stored)
    return _p_of_all(sizes, least) if len(sizes) <= EXACT_UP_TO else _p_of_draws(sizes, least, seed)


@lru_cache(maxsize=4096)
def _binomial_p(n: int, more: int) -> float:
    """The chance that one side of `n` coins comes up at least `more` times, which are half of them or more."""
    ways = tail = 1  # to choose what comes up on the other side
    for k in range(n - more):
        ways = ways * (n - k) // (k + 1)
        tail += ways
    return min(1.0, max(2 * tail / 2**n, float_info.min))


def _p_of_all(sizes: Array, least: float) -> float:
    """The share of all signs whose sum is so far from 0: each half's sums are listed, and their pairs counted."""
    ones, others = (np.sort(_sums(half)) for half in (sizes[::2], sizes[1::2]))
    n_below = int(np.searchsorted(others, least - ones).sum())
    return 2 * (len(ones) * len(others) - n_below) / 2 ** len(sizes)


def _p_of_draws(sizes: Array, least: float, seed: int) -> float:
    sums, room = np.zeros(N_DRAWS), np.empty(CHUNK)  # without room of its own, `take` spends its time on getting some
    for block, start in enumerate(range(0, len(sizes), AT_ONCE)):
        table, drawn = _sums(sizes[start : start + AT_ONCE]), _drawn(seed, block)
        for first in range(0, N_DRAWS, CHUNK):
            part = drawn[first : first + CHUNK] & (len(table) - 1)
            sums[first : first + CHUNK] += table.take(part, out=room[: len(part)], mode="clip")
    return (int((np.abs(sums) >= least).sum()) + 1) / (N_DRAWS + 1)


@lru_cache(maxsize=16)
def _drawn(seed: int, block: int) -> NDArray[np.uint16]:
    """Signs of a block of differences, a number for each draw: kept for the next test, 2 MB a block."""
    return np.random.default_rng((seed, block)).integers(0, 1 << AT_ONCE, N_DRAWS, dtype=np.uint16)


def _sums(sizes: Array) -> Array:
    """The sums of all signs of some sizes."""
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate([sums - size, sums + size])
    return sums


def is_bound(p: float) -> bool:
    """Whether no drawn sign came as far as what was observed, so that the p-value is below this one."""
    return p == BOUND


def p_words(p: float, is_bound: bool = False) -> str:
    """A p-value with two digits: "0.0063", or "< 1e-06" where draws tell no more. Bounds are rounded up."""
    if p < SMALLEST:
        return f"< {SMALLEST:.0e}"
    return f"< {_rounded_up(p, 1 - floor(log10(p))):.2g}" if is_bound else f"{p:.2g}"


def _rounded_up(p: float, places: int) -> float:
    shown = round(p, places)
    return shown if shown >= p else shown + 10.0**-places


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


def finite(values: Sequence[float] | Array) -> Array:
    """A flat copy as float64; refuses what has no mean."""
    array = np.array(values, dtype=np.float64)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"expected a list of numbers, got an array of shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{int((~np.isfinite(array)).sum())} of {len(array)} numbers are not finite")
    return array
