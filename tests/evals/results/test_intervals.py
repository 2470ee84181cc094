import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from evals.results import Interval, bootstrap_ci95, interval, wilson


def test_a_bootstrap_is_deterministic_and_holds_the_mean() -> None:
    scores = [float(x) for x in np.random.default_rng(3).random(200)]
    found = bootstrap_ci95(scores)
    assert found is not None and found == bootstrap_ci95(scores[::-1])
    low, high = found
    expected = 1.96 * np.std(scores) / np.sqrt(len(scores))  # of a normal approximation
    assert np.mean(scores) - low == pytest.approx(expected, rel=0.1)
    assert high - np.mean(scores) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("scores", [[0.3], [0.1] * 7, [1.0] * 300, [0.0, 0.0]])
def test_equal_values_have_a_bootstrap_of_no_width(scores: list[float]) -> None:
    assert bootstrap_ci95(scores) == [scores[0], scores[0]]


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_share_has_the_interval_of_scipy(counts: tuple[int, int]) -> None:
    hits, n = counts
    theirs = scipy.stats.binomtest(hits, n).proportion_ci(method="wilson")
    ours = wilson(hits, n)
    assert (ours.mean, ours.low, ours.high) == pytest.approx((hits / n, theirs.low, theirs.high), abs=1e-12)
    assert 0 <= ours.low <= ours.mean <= ours.high <= 1


def test_hits_and_misses_are_never_certain() -> None:
    for scores in ([1.0] * 7, [0.0] * 7):
        found = interval(scores)
        assert found is not None and found.high - found.low > 0.3
    assert interval([1, 0, 1]) == wilson(2, 3)


@pytest.mark.parametrize("scores", [[], [1.0], [0.4]])
def test_a_single_sample_has_no_interval(scores: list[float]) -> None:
    assert interval(scores) is None


def test_parts_of_a_hit_are_resampled() -> None:
    scores = [0.5, 1.0, 0.0, 0.25]
    bounds = bootstrap_ci95(scores)
    assert bounds is not None
    assert interval(scores) == Interval(0.4375, *bounds)


def test_the_interval_of_a_share_covers_it_about_as_often_as_it_says() -> None:
    """Over 400 runs of ten samples, at a share where the bootstrap covers it four times of five."""
    drawn = np.random.default_rng(4).random((400, 10)) < 0.15
    ours = [interval(row.astype(float).tolist()) for row in drawn]
    assert np.mean([found is not None and found.low <= 0.15 <= found.high for found in ours]) > 0.92
    theirs = [bootstrap_ci95(row.astype(float).tolist()) or [0, 0] for row in drawn]
    assert np.mean([low <= 0.15 <= high for low, high in theirs]) < 0.85
