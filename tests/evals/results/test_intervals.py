import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from evals.results import Interval, bootstrap_ci95, interval, mean_ci95, wilson
from evals.results.intervals import FEW, T95, student_ci95, wilson_of_groups


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


def test_parts_of_a_hit_are_resampled_where_they_are_many() -> None:
    scores = [0.5, 1.0, 0.0, 0.25] * 2
    ends = bootstrap_ci95(scores)
    assert ends is not None
    assert interval(scores) == Interval(0.4375, *ends)
    few = interval(scores[:7])
    assert few is not None and (few.low, few.high) == tuple(student_ci95(scores[:7]))


@given(st.integers(2, FEW - 1).flatmap(lambda n: st.lists(st.floats(-9, 9), min_size=n, max_size=n)))
def test_few_samples_have_the_interval_of_scipys_t(scores: list[float]) -> None:
    found = mean_ci95(scores)
    assert found is not None
    spread = T95[len(scores) - 2] * scipy.stats.sem(scores)
    assert found == pytest.approx([np.mean(scores) - spread, np.mean(scores) + spread], abs=1e-9)
    assert T95[len(scores) - 2] == pytest.approx(scipy.stats.t.ppf(0.975, len(scores) - 1), rel=1e-9)


def test_an_interval_ends_where_what_it_is_of_does() -> None:
    assert mean_ci95([0.2, 0.6], bounds=(0, 1)) == [0, 1]
    narrow = mean_ci95([0.4, 0.41, 0.42], bounds=(0, 1))
    assert narrow is not None and 0.38 < narrow[0] < 0.4 and 0.42 < narrow[1] < 0.44


def test_weights_that_are_equal_change_no_interval() -> None:
    scores = [0.3, 0.7, 1.9]
    assert student_ci95(scores, [7, 7, 7]) == pytest.approx(student_ci95(scores))
    low, high = student_ci95(scores, [100, 100, 1])
    assert (low + high) / 2 == pytest.approx((0.3 * 100 + 0.7 * 100 + 1.9) / 201)
    assert high - low < 0.7 * np.ptp(student_ci95(scores)), "what weighs little moves the mean little"


@pytest.mark.parametrize(("n", "least"), [(2, 0.93), (3, 0.93), (5, 0.93), (8, 0.88)])
def test_an_interval_of_any_length_holds_the_mean_about_as_often_as_it_says(n: int, least: float) -> None:
    """The bootstrap of two samples does so every other time, of three three times of four."""
    drawn = np.random.default_rng(n).normal(0.4, 0.1, size=(400, n)).tolist()
    ours = [mean_ci95(scores) or [0, 0] for scores in drawn]
    assert np.mean([low <= 0.4 <= high for low, high in ours]) > least
    theirs = [bootstrap_ci95(scores) or [0, 0] for scores in drawn]
    covered = np.mean([low <= 0.4 <= high for low, high in theirs])
    assert n > 3 or covered < (0.55 if n == 2 else 0.8)


@pytest.mark.parametrize("share", [0.05, 0.15, 0.5])
@pytest.mark.parametrize(("prompts", "alike"), [(4, 1.0), (10, 0.3), (10, 5.0), (40, 1.0)])
def test_the_interval_of_draws_covers_the_share_about_as_often_as_it_says(
    share: float, prompts: int, alike: float
) -> None:
    """Four draws a prompt, whose chance of a hit differs from prompt to prompt; a small `alike` sets it near 0 or 1."""
    random = np.random.default_rng(prompts)
    chances = random.beta(alike * share, alike * (1 - share), (400, prompts, 1))
    hits = (random.random((400, prompts, 4)) < chances).astype(float).tolist()
    found = [wilson_of_groups(groups) for groups in hits]
    assert np.mean([each.low <= share <= each.high for each in found]) > 0.88
    theirs = [mean_ci95([sum(group) / 4 for group in groups], bounds=(0, 1)) or [0, 0] for groups in hits]
    covered = np.mean([low <= share <= high for low, high in theirs])
    assert share > 0.05 or prompts > 10 or covered < 0.8, "the bootstrap over prompts is too narrow near 0"


def test_a_hit_more_moves_both_ends_up() -> None:
    """The bootstrap over prompts says 0 to 0.08 of a single hit in ten times four."""
    none, one = [[0.0] * 4] * 10, [[1.0, 0.0, 0.0, 0.0]] + [[0.0] * 4] * 9
    assert wilson_of_groups(none) == wilson(0, 10)
    found = wilson_of_groups(one)
    assert found.mean == 0.025 and 0 < found.low < 0.01 and 0.1 < found.high < 0.15
    assert wilson_of_groups([[1.0, 1.0], [0.0, 0.0]]) == wilson(1, 2), "answers that agree count once"


def test_the_interval_of_a_share_covers_it_about_as_often_as_it_says() -> None:
    """Over 400 runs of ten samples, at a share where the bootstrap covers it four times of five."""
    drawn = np.random.default_rng(4).random((400, 10)) < 0.15
    ours = [interval(row.astype(float).tolist()) for row in drawn]
    assert np.mean([found is not None and found.low <= 0.15 <= found.high for found in ours]) > 0.92
    theirs = [bootstrap_ci95(row.astype(float).tolist()) or [0, 0] for row in drawn]
    assert np.mean([low <= 0.15 <= high for low, high in theirs]) < 0.85
