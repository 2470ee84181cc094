import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from plots.stats import benjamini_hochberg, holm, interval, paired, sign_flip_p

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=30)


def test_the_interval_is_that_of_scipy() -> None:
    scores = np.random.default_rng(1).beta(2, 5, size=60)
    ours = interval(scores)
    theirs = scipy.stats.bootstrap(
        (scores,), np.mean, n_resamples=40_000, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval
    assert ours.mean == pytest.approx(scores.mean())
    assert ours.low == pytest.approx(theirs.low, abs=2e-3)
    assert ours.high == pytest.approx(theirs.high, abs=2e-3)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(300):
        found = interval(rng.normal(0.3, 1, size=40))
        covered += found.low <= 0.3 <= found.high
    assert 0.90 <= covered / 300 <= 0.98


def test_a_single_score_is_its_own_interval() -> None:
    assert interval([0.25]) == interval(np.array([0.25]))
    assert (interval([0.25]).low, interval([0.25]).high) == (0.25, 0.25)


@pytest.mark.parametrize("n", [3, 8, 14])
def test_few_differences_have_the_exact_p_value_of_scipy(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.4, 1, size=n)
    theirs = scipy.stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=1 << 20)
    assert sign_flip_p(differences) == pytest.approx(theirs.pvalue, rel=1e-9)


def test_many_differences_have_nearly_the_p_value_of_a_t_test() -> None:
    differences = np.random.default_rng(7).normal(0.15, 1, size=200)
    _, theirs = scipy.stats.ttest_1samp(differences, 0)
    assert sign_flip_p(differences, n=20_000) == pytest.approx(theirs, abs=0.01)


def test_random_signs_agree_with_all_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = np.random.default_rng(8).normal(0.3, 1, size=14)
    exact = sign_flip_p(differences)
    monkeypatch.setattr("plots.stats.EXACT_UP_TO", 0)
    assert sign_flip_p(differences, n=50_000) == pytest.approx(exact, abs=0.01)
    assert sign_flip_p(np.full(100, 1.0)) > 0


def test_equal_variants_have_no_difference() -> None:
    found = paired([0.1, 0.7, 0.3], [0.1, 0.7, 0.3])
    assert (found.difference.mean, found.p, found.ties, found.n) == (0.0, 1.0, 3, 3)


def test_rounding_is_no_difference() -> None:
    found = paired([0.1 + 0.2, 0.5], [0.3, 0.25])
    assert (found.wins, found.ties, found.losses) == (1, 1, 0)
    assert found.p == 1.0, "one sample is as likely to differ upwards as downwards"


def test_pairs_see_what_two_separate_intervals_do_not() -> None:
    """Samples of very different difficulty, and a small gain on all of them."""
    reference = np.linspace(0, 1, 50)
    better = reference + np.random.default_rng(9).normal(0.02, 0.01, size=50)
    found = paired(better, reference)
    assert found.difference.low > 0
    assert found.p < 0.001
    assert interval(better).low < interval(reference).high


@given(P_VALUES)
def test_false_discoveries_are_adjusted_as_by_scipy(p: list[float]) -> None:
    theirs = scipy.stats.false_discovery_control(p, method="bh")
    assert benjamini_hochberg(p) == pytest.approx(theirs)


@given(P_VALUES)
def test_holm_is_a_step_down_bonferroni(p: list[float]) -> None:
    """The definition, written out: never below an earlier one, never above 1."""
    expected, worst = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        worst = max(worst, min(1.0, (len(p) - rank) * p[i]))
        expected[i] = worst
    assert holm(p) == pytest.approx(expected)


def test_holm_on_a_known_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@pytest.mark.parametrize("bad", [[], [0.1, float("nan")], [[0.1], [0.2]]])
def test_what_has_no_mean_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="numbers"):
        interval(bad)


def test_different_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="not the same samples"):
        paired([0.1, 0.2], [0.1])
