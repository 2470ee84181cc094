from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kvbench.benchmarks import coverage
from kvbench.plots.stats import holm, sign_flip_p
from kvbench.results import Interval, combined_ci95, interval, share_interval
from kvbench.results.intervals import ANYWHERE, FEW, LEVEL, SHARE, few_samples, hits, student_reach
from kvbench.tests.results.made_rows import ok_row

SHARES = st.lists(st.floats(0, 1), min_size=2, max_size=40)
Draw = Callable[[np.random.Generator, int], np.ndarray]


def found_of(scores: Sequence[float], bounds: tuple[float, float] = SHARE) -> Interval:
    found = interval(scores, bounds)
    assert found is not None
    return found


@given(st.integers(2, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_hits_have_clopper_and_pearsons_interval(counts: tuple[int, int]) -> None:
    hits, n = counts
    theirs = scipy.stats.binomtest(hits, n).proportion_ci(method="exact")
    ours = share_interval(hits, n)
    assert ours is not None and ours == interval([1.0] * hits + [0.0] * (n - hits))
    assert (ours.mean, ours.low, ours.high) == pytest.approx((hits / n, theirs.low, theirs.high), abs=1e-8)
    assert 0 <= ours.low <= ours.mean <= ours.high <= 1


@pytest.mark.parametrize("n", [2, 7, 60])
def test_the_ends_are_quantiles_of_a_mean_under_flat_weights(n: int) -> None:
    """The definition, drawn: the samples and one more at the end's bound, under weights flat over the simplex."""
    rng = np.random.default_rng(n)
    scores = rng.beta(2, 5, n)
    waits = rng.standard_exponential((200_000, n + 1))
    added = waits[:, :n] @ scores
    low = np.quantile(added / waits.sum(axis=1), LEVEL / 2)
    high = np.quantile((added + waits[:, n]) / waits.sum(axis=1), 1 - LEVEL / 2)
    ours = found_of(scores.tolist())
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=2e-3)


@given(SHARES)
def test_the_interval_is_the_same_in_any_order_and_mirrored(scores: list[float]) -> None:
    found, mirrored = found_of(scores), found_of([1 - score for score in scores])
    assert found == interval(scores[::-1])
    assert (found.low, found.high) == pytest.approx((1 - mirrored.high, 1 - mirrored.low), abs=1e-7)
    assert 0 <= found.low <= found.mean <= found.high <= 1


@given(SHARES)
def test_no_sample_is_certain(scores: list[float]) -> None:
    """Also where all agree: so many others could have been missed."""
    n = len(scores)
    unseen = 1 - (LEVEL / 2) ** (1 / n)  # what a bound could have without being seen, as likely as an end may be
    found, same = found_of(scores), found_of([0.6] * n)
    assert found.high - found.low > unseen / 3
    assert (same.low, same.high) == pytest.approx((0.6 * (1 - unseen), 0.6 + 0.4 * unseen), abs=1e-7)


@pytest.mark.parametrize("bounds", [SHARE, (-1.0, 1.0), ANYWHERE])
def test_no_width_jumps_from_one_n_to_the_next(bounds: tuple[float, float]) -> None:
    """The bars narrowed by a fifth where n crossed 8 and the bootstrap took over."""
    widths = []
    for n in range(3, 40):
        scores = scipy.stats.norm.ppf((np.arange(n) + 0.5) / n, 0.5, 0.1).clip(0, 1)  # as even as samples can be
        found = found_of(scores.tolist(), bounds)
        widths.append(found.high - found.low)
    steps = [after / before for before, after in pairwise(widths)]
    assert all(step < 1 for step in steps) and all(a < b + 1e-3 for a, b in pairwise(steps)), steps


def test_a_part_of_a_hit_changes_little() -> None:
    """Hits and misses had Wilson's interval, and another one where a single score was 0.999."""
    hits, nearly = found_of([1.0] * 9 + [0.0] * 3), found_of([1.0] * 8 + [0.999] + [0.0] * 3)
    assert (nearly.low, nearly.high) == pytest.approx((hits.low, hits.high), abs=1e-3)


@pytest.mark.parametrize("scores", [[], [1.0], [0.4]])
def test_a_single_sample_has_no_interval(scores: list[float]) -> None:
    assert interval(scores) is None


def test_a_score_outside_of_its_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.2 lies outside of its bounds, 0\.0 to 1\.0"):
        interval([0.2, 1.2])
    assert interval([0.2, 1.0 + 1e-12]) is not None, "rounding is no mistake"


def test_equal_numbers_without_a_bound_have_no_interval() -> None:
    assert interval([2.5, 2.5, 2.5], ANYWHERE) is None
    assert interval([2.5, 2.5, 2.5], (0.0, float("inf"))) is None


@given(st.lists(st.floats(-9, 9).filter(lambda x: x == 0 or abs(x) > 1e-6), min_size=2, max_size=60))
def test_numbers_without_bounds_have_the_interval_of_scipys_t(scores: list[float]) -> None:
    found = interval(scores, ANYWHERE)
    if min(scores) == max(scores):
        assert found is None
        return
    assert found is not None
    spread = scipy.stats.t.ppf(0.975, len(scores) - 1) * scipy.stats.sem(scores)
    mean = np.mean(scores)
    assert (found.low, found.high) == pytest.approx((mean - spread, mean + spread), abs=1e-9 + 1e-4 * spread)
    assert student_reach(len(scores)) == pytest.approx(scipy.stats.t.ppf(0.975, len(scores) - 1), abs=1e-5)


def test_an_interval_ends_where_what_it_is_of_does() -> None:
    found = found_of([0.2, 0.6], (0.0, float("inf")))
    assert found.low == 0 and found.high > 1


def test_weights_that_are_equal_change_no_interval() -> None:
    scores = [0.3, 0.7, 0.9]
    for bounds in (SHARE, ANYWHERE):
        one, seven = interval(scores, bounds), interval(scores, bounds, [7, 7, 7])
        assert one is not None and seven is not None
        assert (one.low, one.high) == pytest.approx((seven.low, seven.high))
    light = interval([0.3, 0.7, 1.9], ANYWHERE, [100, 100, 1])
    assert light is not None and light.mean == pytest.approx((0.3 * 100 + 0.7 * 100 + 1.9) / 201)
    even = found_of([0.3, 0.7, 1.9], ANYWHERE)
    assert light.high - light.low < 0.7 * (even.high - even.low), "what weighs little moves the mean little"


# --- coverage; docs/intervals.md has the whole table --------------------------------------------

SHAPES: dict[str, tuple[Draw, float]] = {
    "skewed": (lambda rng, n: rng.beta(0.3, 3, n), 0.3 / 3.3),
    "zeros and ones": (lambda rng, n: rng.choice([0, 0, 1, 1, 0.5], n), 0.5),
    "near the ceiling": (lambda rng, n: np.where(rng.random(n) < 0.85, 1, rng.random(n)), 0.925),
    "rare hits": (lambda rng, n: (rng.random(n) < 0.05).astype(float), 0.05),
    "rare losses": (lambda rng, n: -(rng.random(n) < 0.1).astype(float), -0.1),
}


@pytest.mark.parametrize("n", [3, 8, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_interval_holds_the_mean_as_often_as_it_says(shape: str, n: int) -> None:
    """Bootstrap and Student's t hold 0.2 to 0.9 of these."""
    draw, mean = SHAPES[shape]
    rng = np.random.default_rng(n)
    bounds = (-1.0, 1.0) if mean < 0 else SHARE
    found = [found_of(draw(rng, n).tolist(), bounds) for _ in range(600)]
    assert np.mean([each.low <= mean <= each.high for each in found]) >= 0.95


@pytest.mark.parametrize(
    ("share", "prompts", "alike"),
    [
        *((0.05, 4, 1.0), (0.5, 10, 0.3)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.5, 4, 1.0), (0.05, 10, 0.3), (0.05, 10, 5.0))),
        pytest.param(0.05, 40, 1.0, marks=pytest.mark.slow),
    ],
)
def test_the_interval_of_draws_covers_the_share_as_often_as_it_says(share: float, prompts: int, alike: float) -> None:
    """Four draws a prompt, whose chance of a hit differs from prompt to prompt; a small `alike` sets it near 0 or 1.

    Intervals hold least where hits are rare, prompts few or their draws alike; half and many are left out together.
    """
    random = np.random.default_rng(prompts)
    covered = 0
    for _ in range(300):
        chances = random.beta(alike * share, alike * (1 - share), prompts)
        rows = [
            ok_row(i, id=f"{i}#{draw}", score=float(random.random() < chance), fields={"sample": f"{i}", "draw": draw})
            for i, chance in enumerate(chances)
            for draw in range(4)
        ]
        low, high = combined_ci95(rows) or [0, 0]
        covered += low <= share <= high
    assert covered / 300 >= 0.94


def test_the_page_of_coverage_is_made_of_its_numbers_and_they_say_what_we_say() -> None:
    lines = coverage.read()
    assert (coverage.ROOT / "docs" / "intervals.md").read_text(encoding="utf-8") == coverage.page(lines)
    ours = [line for line in lines if line.rule == coverage.OURS and line.kind != coverage.OTHERS]
    assert {line.n for line in ours} == set(coverage.NS)
    assert len(ours) == len(coverage.NS) * sum(shape.kind != coverage.OTHERS for shape in coverage.SHAPES)
    assert min(line.coverage for line in ours) >= 0.95


@pytest.mark.parametrize("shape", coverage.SHAPES, ids=coverage.title)
def test_a_shape_has_the_mean_that_it_says(shape: coverage.Shape) -> None:
    rng = np.random.default_rng(1)
    drawn = shape.draw(rng, 200_000)
    values = drawn[0] - drawn[1] if shape.kind == coverage.DIFFERENCES else drawn
    assert values.mean() == pytest.approx(shape.mean, abs=0.02 if shape.kind == coverage.OTHERS else 0.005)


# --- few samples --------------------------------------------------------------------------------


def test_few_samples_are_called_few_and_enough_could_show_a_difference_among_thousands() -> None:
    assert (
        few_samples(19) == "19 samples are too few to compare" and few_samples(1) == "one sample is too few to compare"
    )
    assert few_samples(FEW) == ""
    assert holm([sign_flip_p(np.ones(FEW))], 20_000)[0] < LEVEL


def test_few_samples_stand_as_hits_where_all_are_right_or_wrong() -> None:
    assert hits([1.0] * 9 + [0.0]) == "9 of 10" and hits([0.0]) == "0 of 1"
    assert hits([1.0, 0.5]) == hits([]) == hits([1.0] * FEW) == ""
