"""How often 95 % intervals hold the true mean: ours beside the ones that others use, on scores as benchmarks have them.

    python -m kvbench.benchmarks.coverage [--n 3,5,8] [--out docs]    with --n "" the page is made again from the CSV

Scores are drawn from shapes whose mean is known, an interval is made of each draw by every rule, and what counts is the
share of intervals that hold the mean. benchmarks/coverage.csv gets a line for each shape, n and rule (those of other n
stay), docs/intervals.md the tables and what follows. All of it takes 15 minutes on one core; the seed is fixed.

Not here: our rule itself (`results/intervals.py`), tests that hold it (`tests/results/test_intervals.py`).
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from kvbench.plots.stats import paired
from kvbench.results.intervals import ANYWHERE, SHARE, Bounds, Interval, interval, student_reach
from kvbench.results.sheet import pipes

NS = (3, 5, 8, 10, 20, 50, 100, 200)
N_RESAMPLES = 1000
CSV = Path(__file__).with_name("coverage.csv")
ROOT = Path(__file__).resolve().parents[1]
N_DRAWS = 4  # of a prompt
OURS, STUDENT, PERCENTILE, BCA, BOOTSTRAP_T, WILSON = "ours", "Student", "bootstrap", "BCa", "bootstrap-t", "Wilson"
NORMAL = NormalDist()
Z = NORMAL.inv_cdf(0.975)
Array = NDArray[np.float64]
Generator = np.random.Generator
Ends = tuple[float, float]


# --- what is drawn ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """`draw` gives n scores, n rows of draws of a prompt, or n pairs of scores, ours and the reference's."""

    kind: str
    name: str
    mean: float
    draw: Callable[[Generator, int], Array]
    bounds: Bounds = SHARE


def hits(share: float) -> Callable[[Generator, int], Array]:
    return lambda rng, n: (rng.random(n) < share).astype(float)


def draws_of_prompts(a: float, b: float) -> Callable[[Generator, int], Array]:
    """Hits of draws, whose chance differs from prompt to prompt."""
    return lambda rng, n: (rng.random((n, N_DRAWS)) < rng.beta(a, b, (n, 1))).astype(float)


def lost_and_gained(lost: float, gained: float) -> Callable[[Generator, int], Array]:
    """Hits of the reference that are lost, and misses that become hits."""

    def draw(rng: Generator, n: int) -> Array:
        theirs = (rng.random(n) < 0.5).astype(float)
        changed = np.where(theirs == 1, rng.random(n) < 2 * lost, rng.random(n) < 2 * gained)
        return np.stack([np.where(changed, 1 - theirs, theirs), theirs])

    return draw


def less(of: Callable[[Generator, int], Array]) -> Callable[[Generator, int], Array]:
    """Pairs of a reference of 1 and a score that is lower by what is drawn."""
    return lambda rng, n: np.stack([1 - of(rng, n), np.ones(n)])


def near(rng: Generator, n: int) -> Array:
    theirs = rng.uniform(0.3, 0.7, n)
    return np.stack([theirs + rng.normal(0, 0.05, n).clip(-0.2, 0.2), theirs])


def zeros_and_ones(rng: Generator, n: int) -> Array:
    kind = rng.integers(0, 5, n)
    return np.where(kind == 4, rng.random(n), kind % 2)


SCORES, HITS, DRAWS, DIFFERENCES, OTHERS = "scores", "hits", "draws", "differences", "no bounds"
SHAPES = (
    Shape(SCORES, "skewed, beta(2, 5)", 2 / 7, lambda rng, n: rng.beta(2, 5, n)),
    Shape(SCORES, "mostly near 0, beta(0.3, 3)", 0.3 / 3.3, lambda rng, n: rng.beta(0.3, 3, n)),
    Shape(SCORES, "all or nothing, beta(0.5, 0.5)", 0.5, lambda rng, n: rng.beta(0.5, 0.5, n)),
    Shape(SCORES, "40 % zeros, 40 % ones", 0.5, zeros_and_ones),
    Shape(SCORES, "85 % ones, else uniform", 0.925, lambda rng, n: np.where(rng.random(n) < 0.85, 1, rng.random(n))),
    Shape(
        SCORES, "30 % zeros, else beta(3, 2)", 0.42, lambda rng, n: np.where(rng.random(n) < 0.3, 0, rng.beta(3, 2, n))
    ),
    Shape(HITS, "half", 0.5, hits(0.5)),
    Shape(HITS, "9 of 10", 0.9, hits(0.9)),
    Shape(HITS, "1 of 20", 0.05, hits(0.05)),
    Shape(DRAWS, "prompts differ much, half", 0.5, draws_of_prompts(0.3, 0.3)),
    Shape(DRAWS, "prompts differ little, 3 of 20", 0.15, draws_of_prompts(1.5, 8.5)),
    Shape(DIFFERENCES, "10 % of the hits lost", -0.1, lost_and_gained(0.1, 0)),
    Shape(DIFFERENCES, "15 % lost, 5 % gained", -0.1, lost_and_gained(0.15, 0.05)),
    Shape(
        DIFFERENCES, "30 % lose a part", -0.15, less(lambda rng, n: np.where(rng.random(n) < 0.3, rng.beta(2, 2, n), 0))
    ),
    Shape(DIFFERENCES, "small ones, both ways", 0.0, near),
    Shape(OTHERS, "normal", 2.0, lambda rng, n: rng.normal(2, 1, n), ANYWHERE),
    Shape(OTHERS, "log-normal", float(np.exp(0.5)), lambda rng, n: rng.lognormal(0, 1, n), ANYWHERE),
)


# --- rules --------------------------------------------------------------------------------------


def ours(shape: Shape, drawn: Array) -> Ends:
    """As tables and figures have it."""
    if shape.kind == DIFFERENCES:
        return ends_of(paired(*drawn).difference)
    values = drawn.mean(axis=1) if shape.kind == DRAWS else drawn
    return ends_of(interval(values.tolist(), shape.bounds))


def ends_of(found: Interval | None) -> Ends:
    assert found is not None
    return found.low, found.high


def student(values: Array) -> Ends:
    spread = student_reach(len(values)) * values.std(ddof=1) / sqrt(len(values))
    return float(values.mean() - spread), float(values.mean() + spread)


def bootstraps(values: Array, indices: NDArray[np.int64]) -> dict[str, Ends]:
    """The percentile bootstrap, BCa (Efron, 1987) and bootstrap-t, from the same resamples."""
    mean, n = float(values.mean()), len(values)
    if np.ptp(values) == 0:
        return dict.fromkeys((PERCENTILE, BCA, BOOTSTRAP_T), (mean, mean))
    resamples = values[indices]
    means, deviations = resamples.mean(axis=1), resamples.std(axis=1, ddof=1) / sqrt(n)
    below = ((means < mean).mean() + (means <= mean).mean()) / 2
    z0 = NORMAL.inv_cdf(min(max(float(below), 1e-3), 1 - 1e-3))
    moved = (values - mean) / (n - 1)  # how far the mean moves without each
    skew = float((moved**3).sum() / (6 * (moved**2).sum() ** 1.5))
    levels = [NORMAL.cdf(z0 + (z0 + z) / (1 - skew * (z0 + z))) for z in (-Z, Z)]
    vary = deviations > 0
    ts = (means[vary] - mean) / deviations[vary]
    high, low = mean - np.quantile(ts, [0.025, 0.975]) * values.std(ddof=1) / sqrt(n)
    return {
        PERCENTILE: ends(np.quantile(means, [0.025, 0.975])),
        BCA: ends(np.quantile(means, levels)),
        BOOTSTRAP_T: (float(low), float(high)),
    }


def ends(pair: Array) -> Ends:
    return float(pair[0]), float(pair[1])


def wilson(values: Array) -> Ends:
    """Of hits that are taken to be independent, draws of one prompt too."""
    n, share = values.size, float(values.mean())
    spread = Z * sqrt(share * (1 - share) / n + Z**2 / (4 * n * n)) / (1 + Z**2 / n)
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    return middle - spread, middle + spread


def by_rule(shape: Shape, drawn: Array, indices: NDArray[np.int64]) -> dict[str, Ends]:
    values = drawn[0] - drawn[1] if shape.kind == DIFFERENCES else drawn.mean(axis=1) if shape.kind == DRAWS else drawn
    found = {OURS: ours(shape, drawn), STUDENT: student(values), **bootstraps(values, indices)}
    return found | ({WILSON: wilson(drawn)} if shape.kind in (HITS, DRAWS) else {})


# --- the simulation -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of coverage.csv."""

    kind: str
    shape: str
    n: int
    rule: str
    runs: int
    coverage: float
    width: float  # mean, as far as the bounds let an end go


def measure(shape: Shape, n: int) -> Iterator[Line]:
    """A line for each rule."""
    runs = 2000 if n <= 50 else 1000
    rng = np.random.default_rng([SHAPES.index(shape), n])
    indices = rng.integers(0, n, (N_RESAMPLES, n))
    low, high = (-1.0, 1.0) if shape.kind == DIFFERENCES else shape.bounds
    held: dict[str, int] = {}
    widths: dict[str, list[float]] = {}
    for _ in range(runs):
        for rule, (a, b) in by_rule(shape, shape.draw(rng, n), indices).items():
            held[rule] = held.get(rule, 0) + (a - 1e-9 <= shape.mean <= b + 1e-9)
            widths.setdefault(rule, []).append(min(b, high) - max(a, low))
    for rule, n_held in held.items():
        yield Line(shape.kind, shape.name, n, rule, runs, n_held / runs, float(np.mean(widths[rule])))


def read() -> list[Line]:
    if not CSV.exists():
        return []
    with CSV.open(newline="", encoding="utf-8") as file:
        return [
            Line(kind, shape, int(n), rule, int(runs), float(coverage), float(width))
            for kind, shape, n, rule, runs, coverage, width in list(csv.reader(file))[1:]
        ]


def write(lines: Sequence[Line]) -> None:
    with CSV.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Line.__annotations__)
        writer.writerows(
            [each.kind, each.shape, each.n, each.rule, each.runs, f"{each.coverage:.4f}", f"{each.width:.4f}"]
            for each in lines
        )


# --- the page -----------------------------------------------------------------------------------

HEAD = """\
# Intervals

Every 95 % interval of this harness comes from one function, `interval` of `results/intervals.py`: those of
result.json, of the terminal's table, of all tables, figures and the report.

- **Scores with bounds** (0 to 1) and **differences** of such (-1 to 1) have Gaffke's interval (2005; Learned-Miller and
  Thomas, 2020), whose coverage is measured below and conjectured in general. Its lower end is where the mean lies
  below with a chance of 2.5 % under flat random weights of the samples and of one more sample at the lower bound; the
  upper end likewise. It assumes nothing but the bounds. Of hits and misses it is Clopper and Pearson's exact interval.
  Samples that all agree have a width: of eight scores of 0.6 it is 0.38 to 0.75, as one of eight unseen others may be
  anything.
- **Draws of a prompt and turns of a conversation** count as one sample, with their mean. **An average over datasets**
  takes each dataset for one sample; a difference of averages is of the datasets at hand, as its test is.
- **Numbers without a bound** (losses, seconds, output errors) have Student's t, and none where all samples agree.
- **Fewer than 20 samples** have no interval, no test and no mark in tables: scores that are all right or wrong stand
  as hits ("9 of 10"), others as their mean, and a sentence says which columns are too few to compare. An average over
  fewer than 20 datasets has no interval either. Files for programs keep the numbers, and figures their bars. `FEW` and
  `few_samples` of the same file decide it for all.
- **One sample** has no interval anywhere.

A difference is marked by the paired sign-flip test, corrected for all variants that were asked the same samples (a
column), not by its interval. Where that test finds nothing the interval holds 0. The reverse need not be: of many small
differences that all point one way the test shows one, while the interval still allows for a rare large loss.

The test's p is the share of all signs of the differences whose mean is as far from 0 as theirs, equal means among them.
Samples without a difference are left out. **It is exact where the differences are of one size**, such as hits against
misses (the binomial test), **and where there are up to 32**. Of more, a million signs are drawn from seed 0, and p is
(b + 1) / 1,000,001, where b of them are as far from 0: at p = 0.01 another seed moves it by 0.0001. Where none is, all
that is known is that p is lower, and it is written "p < 1e-06"; so is an exact one below that. Holm's correction
multiplies p by up to as many as there were comparisons, and such a bound with it: of 19 comparisons "p < 1.9e-05".
Tables for programs say so in a column beside the number.

[register.md](register.md) also asks whether a loss is smaller than a margin: it is shown where the lower end lies above
the margin with the p-value that the correction leaves, so the rows "differences" below are the coverage of that rule
too. Nobody has proven Gaffke's coverage for every distribution.

Tables, figures and the report compute intervals from the samples, whatever an older result.json has.

## Coverage

The share of intervals that hold the true mean, in %, over {most} draws of n samples each ({least} from n = 100 on): a
standard error of 0.5 (0.7) points. `python -m kvbench.benchmarks.coverage` makes all numbers; they are, with the
widths, in [coverage.csv](../benchmarks/coverage.csv).

Ours:
"""
WORST = """
The lowest share of any shape with bounds ({n_shapes} above), by rule. Wilson's is of hits and draws alone, with draws
taken for independent:
"""
END = """
What is paid for the coverage is width, where samples are few and nearly alike. From n = 50 on ours is wider than
Student's t by less than a half, but for small differences, far from what their bounds allow: there the test says more.
"""


def page(lines: Sequence[Line]) -> str:
    """The tables, made of the lines alone."""
    found = {(each.kind, each.shape, each.n, each.rule): each for each in lines}
    ns = sorted({each.n for each in lines})
    shapes = [shape for shape in SHAPES if (shape.kind, shape.name, ns[0], OURS) in found]
    bounded = [shape for shape in shapes if shape.kind != OTHERS]
    runs = [each.runs for each in lines]
    parts = [HEAD.format(most=f"{max(runs):,}", least=f"{min(runs):,}")]
    parts += pipes(
        ["", *(f"n = {n}" for n in ns)],
        [
            [title(shape), *(f"{100 * found[shape.kind, shape.name, n, OURS].coverage:.1f}" for n in ns)]
            for shape in shapes
        ],
    )
    parts.append(WORST.format(n_shapes=len(bounded)))
    rows = []
    for rule in (OURS, STUDENT, PERCENTILE, BCA, BOOTSTRAP_T, WILSON):
        at = [[found[k] for shape in bounded if (k := (shape.kind, shape.name, n, rule)) in found] for n in ns]
        rows.append([rule, *(f"{100 * min(each.coverage for each in of):.1f}" for of in at)])
    parts += pipes(["", *(f"n = {n}" for n in ns)], rows)
    return "\n".join([*parts, END])


def title(shape: Shape) -> str:
    return f"{shape.kind}: {shape.name}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.benchmarks.coverage", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--n", default=",".join(map(str, NS)), help="numbers of samples, with commas; none: the page alone"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="where intervals.md is written")
    given = parser.parse_args(arguments)
    ns = [int(word) for word in given.n.split(",") if word]
    lines = [line for line in read() if line.n not in ns]
    for n in ns:
        for shape in SHAPES:
            made = list(measure(shape, n))
            print(n, title(shape), *(f"{line.rule} {line.coverage:.3f}" for line in made))
            lines += made
    lines.sort(key=lambda line: ([shape.name for shape in SHAPES].index(line.shape), line.n))
    write(lines)
    (given.out / "intervals.md").write_text(page(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
