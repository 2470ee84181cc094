"""Where the mean of scores may as well lie: the one place that decides it for result.json, terminal, tables, figures.

    interval        of a mean: of bounded scores by `bounded_ends`, of others by `student_ends`; None of one sample
    share_interval  of so many hits among so many answers
    few_samples     why so few samples say nothing of a difference, in words
    hits            what tables say of so few that are all right or wrong

Scores of 0 to 1, and differences of such, have Gaffke's interval (Gaffke, 2005; Learned-Miller and Thomas, 2020): the
mean under all weights that the samples may have (flat over the simplex, as in a Bayesian bootstrap), with one more
sample at the bound that the end leans to. Nothing is assumed of the scores but their bounds. Of hits and misses it is
Clopper and Pearson's exact interval; of samples that all agree it has the width that so many unseen others allow. One
formula for every n, so that no width jumps. Its coverage is conjectured. docs/intervals.md holds what was measured: it
covers 95 % or more of every shape of scores at every n that was tried, where bootstraps and Student's t cover down to
35 % at n = 8, 66 % at n = 20.

Below `FEW` samples it holds nearly everything: tables have hits or a plain mean there, no interval and no mark of a
test, while files for programs keep the numbers.

Samples must be independent: draws of one prompt and turns of one conversation count as one, with their mean.

Scores without a bound (losses, seconds) have no interval that holds for all of them; theirs is Student's t, which is
right for means of about normal scores, and none where all samples agree.

Not here: tests of differences and corrections for many of them (`plots/stats.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum, inf, isfinite, log, sqrt
from typing import Any

FEW = 20  # samples, below which readers get no interval and no test
LEVEL = 0.05  # of a corrected p-value below which a difference is one; what an interval leaves out
TAIL = LEVEL / 2
Z95 = 1.959963984540054  # standard deviations of a normal distribution that 95 % lie within
# What Z95 is where the deviation is estimated from n samples, for n from 2; `student_reach` goes on.
T95 = (
    *(12.706204736432102, 4.302652729696144, 3.182446305284263, 2.776445105197793, 2.570581835636314),
    *(2.446911851144969, 2.364624251592785, 2.306004135033371, 2.262157162740992, 2.228138851964939),
)
ROUNDING = 1e-9  # of the bounds' width: how far rounding may carry a score out, and how exact an end is
UNLIKELY = 1e-17  # a course of `race` that adds nothing to a probability of 0.025
Bounds = tuple[float, float]  # of what is averaged, and so of its mean
SHARE: Bounds = (0.0, 1.0)
ANYWHERE: Bounds = (-inf, inf)
Array = Any  # numpy's, which is imported only where an interval is wanted


@dataclass(frozen=True)
class Interval:
    """A mean and where it may as well lie."""

    mean: float
    low: float
    high: float


def interval(
    scores: Sequence[float], bounds: Bounds = SHARE, weights: Sequence[float] | None = None
) -> Interval | None:
    """The mean of scores, weighted or not, and its 95 % interval; None where the samples say nothing of the spread.

    The same scores give the same interval in whatever order. ValueError for scores outside of their bounds.
    """
    n = len(scores)
    if n < 2:
        return None
    low, high = bounds
    wide = (high - low) * ROUNDING if isfinite(high - low) else 0.0
    for score in scores:
        if not low - wide <= score <= high + wide:
            raise ValueError(f"a score of {score} lies outside of its bounds, {low} to {high}")
    values, counts = together(scores, [1.0] * n if weights is None else weights)
    mean = min(max(fsum(c * v for v, c in zip(values, counts, strict=True)) / fsum(counts), values[0]), values[-1])
    if isfinite(high - low):
        ends = bounded_ends(tuple(values), tuple(counts), bounds)
    elif values[0] == values[-1]:
        return None
    else:
        ends = student_ends(values, counts, bounds)
    return Interval(mean, min(max(low, ends[0]), mean), max(min(high, ends[1]), mean))


def together(scores: Sequence[float], weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """Scores in ascending order, each with its weight."""
    pairs = sorted((float(score), float(weight)) for score, weight in zip(scores, weights, strict=True))
    return [score for score, _ in pairs], [weight for _, weight in pairs]


def share_interval(hits: int, n: int) -> Interval | None:
    """A share of hits among `n` answers, and its interval; None of one answer."""
    return interval([1.0] * hits + [0.0] * (n - hits))


# --- scores with bounds ---


@lru_cache(maxsize=4096)
def bounded_ends(values: tuple[float, ...], weights: tuple[float, ...], bounds: Bounds) -> tuple[float, float]:
    """Gaffke's interval of ascending scores, kept since a page says it of the same samples in several places.

    The sample that is added weighs as much as the heaviest one. The upper end is the lower end of the mirrored scores.
    """
    low, high = bounds
    exact = ROUNDING * (high - low)
    upper = lower_end([-value for value in reversed(values)], [*reversed(weights)], -high, exact)
    return lower_end(values, weights, low, exact), -upper


def lower_end(values: Sequence[float], weights: Sequence[float], bound: float, exact: float) -> float:
    """The value below which the mean lies with a chance of `TAIL`, from ascending scores and one at their bound."""
    import numpy as np

    if values[-1] <= bound + exact:
        return bound
    heaviest = max(weights)
    xs, counts = np.array([bound, *values]), np.array([heaviest, *weights]) / heaviest

    def surplus(at: float) -> float:
        """Below 0 where a mean below `at` is less likely than `TAIL`; on a scale on which it is nearly straight."""
        below = chance_below(xs, counts, at)
        return log(below / TAIL) if below > 0 else -inf

    centre = float((xs * counts).sum() / counts.sum())
    spread = float(np.sqrt((counts**2 * (xs - centre) ** 2).sum())) / float(counts.sum())
    return root(surplus, bound, values[-1], centre - Z95 * spread, max(spread, exact), exact)


def chance_below(xs: Array, weights: Array, at: float) -> float:
    """The chance that the mean of `xs` is at most `at`, whose weights are `weights` times flat ones of the simplex.

    Flat weights are exponential numbers over their sum, so the mean is below where what the samples above `at` add is
    less than what those below take off.
    """
    below, above = xs < at, xs > at
    return race(weights[below] * (at - xs[below]), weights[above] * (xs[above] - at))


def race(left: Array, right: Array) -> float:
    """The chance that a sum of exponential numbers with means `right` is at most one with means `left`.

    Two queues of waits, both at their first one: an exponential wait has no memory, so of the two that go on the left
    one ends first with chance right / (left + right), and the other goes on as if new. `course[k]` is the chance that
    `first + k` waits of the left have ended after so many ends of both; what remains when the right has none left is
    the answer. Only sums and products of chances: no digits are lost, whatever the numbers.
    """
    import numpy as np

    n_left, n_right = len(left), len(right)
    if n_left == 0 or n_right == 0:
        return 0.0 if n_right else 1.0
    course, first, ended = np.ones(1), 0, 0.0
    backwards = right[::-1]
    for step in range(n_left + n_right - 1):
        of_left = left[first : first + len(course)]
        last = n_right - 1 - (step - first)  # the place in `backwards` of what goes with `of_left[0]`
        of_right = backwards[last : last + len(course)]
        ends_left = course * (of_right / (of_left + of_right))
        after = np.zeros(len(course) + 1)
        after[1:] = ends_left
        after[:-1] += course - ends_left
        if step + 1 - first == n_right:
            ended += float(after[0])
            after, first = after[1:], first + 1
        if first + len(after) > n_left:
            after = after[:-1]
        if step % 64 == 63 and len(after) > 2:  # of thousands of samples most courses are as good as impossible
            likely = np.flatnonzero(after > UNLIKELY)
            if len(likely) == 0:
                break
            after, first = after[likely[0] : likely[-1] + 1], first + int(likely[0])
        course = after
        if len(course) == 0:
            break
    return min(ended, 1.0)


def root(of: Callable[[float], float], low: float, high: float, guess: float, step: float, exact: float) -> float:
    """Where a rising function is 0 between `low` and `high`: out from a guess, then regula falsi (Illinois)."""
    guess = min(max(guess, low), high)
    a, b = max(low, guess - step), min(high, guess + step)
    at_a, at_b = of(a), of(b)
    while at_a > 0 and a > low:
        b, at_b, step = a, at_a, 2 * step
        a = max(low, a - step)
        at_a = of(a)
    while at_b < 0 and b < high:
        a, at_a, step = b, at_b, 2 * step
        b = min(high, b + step)
        at_b = of(b)
    side = 0
    while b - a > exact:
        middle = (a + b) / 2
        if isfinite(at_a) and isfinite(at_b) and at_a < 0 < at_b:
            middle = min(max((a * at_b - b * at_a) / (at_b - at_a), a + exact / 2), b - exact / 2)
        value = of(middle)
        if value < 0:
            a, at_a = middle, value
            at_b = at_b / 2 if side < 0 else at_b
            side = -1
        else:
            b, at_b = middle, value
            at_a = at_a / 2 if side > 0 else at_a
            side = 1
    return (a + b) / 2


# --- scores without ---


def student_ends(values: Sequence[float], weights: Sequence[float], bounds: Bounds) -> tuple[float, float]:
    """An interval by Student's t, of weighted samples by how far each moves the mean. As far as the mean can lie."""
    n, total = len(values), fsum(weights)
    mean = fsum(weight * value for value, weight in zip(values, weights, strict=True)) / total
    moved = fsum((weight * (value - mean)) ** 2 for value, weight in zip(values, weights, strict=True))
    spread = student_reach(n) * sqrt(n / (n - 1) * moved) / total
    return max(bounds[0], mean - spread), min(bounds[1], mean + spread)


def student_reach(n: int) -> float:
    """The 97.5 % quantile of Student's t for n samples; after the table's end Fisher's expansion, right to 1e-5."""
    if n - 2 < len(T95):
        return T95[n - 2]
    z, freedom = Z95, n - 1
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + fsum(term / freedom**i for i, term in enumerate(terms, 1))


# --- few samples ---


def few_samples(n: int) -> str:
    """Why so few samples say nothing of a difference, in words; "" where they are enough."""
    return "" if n >= FEW else f"{'one sample is' if n == 1 else f'{n} samples are'} too few to compare"


def hits(samples: Sequence[float]) -> str:
    """ "9 of 10" where samples are few and all of them right or wrong; "" of others."""
    if not samples or not few_samples(len(samples)) or not {*samples} <= {0.0, 1.0}:
        return ""
    return f"{fsum(samples):.0f} of {len(samples)}"
