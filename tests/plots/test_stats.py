import tracemalloc
from dataclasses import replace
from time import process_time

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kvbench.plots.stats import (
    BEST,
    LEVEL,
    N_DRAWS,
    TIED,
    UNDECIDED,
    WORSE,
    corrected,
    front,
    holm,
    interval,
    is_bound,
    macro_interval,
    p_words,
    paired,
    paired_over_datasets,
    rank_ranges,
    scaled,
    sign_flip_p,
    standings,
)
from kvbench.results.intervals import FEW, few_samples

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=30)


def test_one_sample_has_no_interval() -> None:
    assert interval([0.25]) is None and interval([1.0]) is None
    assert macro_interval([[1.0]]) is None and scaled(None, 100) is None
    one = paired([1.0], [0.0])
    assert (one.mean, one.difference, one.n, one.lead) == (1.0, None, 1, 0.0)


def test_hits_alone_are_no_certainty() -> None:
    """It said 100.00 ± 0.00 of four hits, and 0.00 ± 0.00 of four misses."""
    all_hit, none = interval([1.0] * 4), interval([0.0] * 4)
    assert all_hit and none
    assert (all_hit.mean, all_hit.high) == (1.0, 1.0) and all_hit.low == pytest.approx(0.3976, abs=1e-4)
    assert (none.mean, none.low) == (0.0, 0.0) and none.high == pytest.approx(1 - all_hit.low)
    percent = scaled(all_hit, 100)
    assert percent and (percent.mean, percent.high) == (100.0, 100.0)


def test_an_average_over_single_samples_is_uncertain() -> None:
    """Seven datasets of one sample: the tables said 40.00 ± 0.00, the terminal 0.114 to 0.734."""
    found = macro_interval([[0.0], [1.0], [0.0], [0.8], [0.0], [1.0], [0.0]])
    assert found and found.mean == pytest.approx(0.4)
    assert found.low < 0.15 and found.high > 0.7
    same = macro_interval([[1.0]] * 7)
    assert same and same == interval([1.0] * 7) and same.low < 0.7


def test_an_average_is_as_uncertain_as_its_datasets_are_few() -> None:
    """Resampling samples alone, three datasets that disagree seemed as sure as one."""
    rng = np.random.default_rng(3)
    datasets = [rng.normal(level, 0.01, size=50) for level in (0.2, 0.5, 0.8)]
    found = macro_interval([each.tolist() for each in datasets])
    assert found and found.low < 0.3 and found.high > 0.7
    again = macro_interval([each.tolist()[::-1] for each in datasets[::-1]])
    assert again == found, "neither the order of datasets nor of samples matters"


def test_an_average_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(200):
        found = macro_interval([rng.binomial(1, rng.beta(2, 3), size=6).tolist() for _ in range(8)])
        assert found
        covered += found.low <= 0.4 <= found.high
    assert covered / 200 >= 0.95


@pytest.mark.parametrize("n", [3, 8, 20])
def test_differences_cover_the_true_one_as_often_as_they_say(n: int) -> None:
    """One prompt of ten is lost: where none was seen, Student's t had no width and the bootstrap neither."""
    rng, covered = np.random.default_rng(n), 0
    for _ in range(400):
        full = rng.choice([1.0, 0.6], n)
        found = paired(np.where(rng.random(n) < 0.1, 0.0, full), full).difference
        assert found
        covered += found.low <= -0.08 <= found.high
    assert covered / 400 >= 0.95


def test_a_difference_over_datasets_is_of_these_datasets() -> None:
    """Two long datasets tell as much of themselves as one of their length does."""
    rng = np.random.default_rng(5)
    losses = [np.where(rng.random(100) < 0.3, -1.0, 0.0) for _ in range(2)]
    found, alone = (paired_over_datasets(each, [np.zeros(len(x)) for x in each]) for each in (losses, losses[:1]))
    assert found.difference and alone.difference
    assert found.difference.high < 0 and found.p < 0.001
    assert found.difference.high - found.difference.low < alone.difference.high - alone.difference.low


@pytest.mark.parametrize("n", [3, 8, 16])
def test_few_differences_have_the_exact_p_value_of_scipy(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.4, 1, size=n)
    theirs = scipy.stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=1 << 20)
    assert sign_flip_p(differences) == pytest.approx(theirs.pvalue, rel=1e-9)


@pytest.mark.parametrize(("wins", "losses"), [(3, 0), (9, 2), (40, 40), (41, 30), (60, 0), (700, 600), (5000, 5300)])
@pytest.mark.parametrize("size", [1.0, 1 / 3, 0.1])
def test_hits_and_misses_have_the_binomial_tests_p_value_whatever_their_number(
    wins: int, losses: int, size: float
) -> None:
    """Of 60 wins a test of drawn signs said what its draws allow, and of 41 against 30 what its seed drew."""
    differences = np.array([size] * wins + [-size] * losses + [0.0] * 7)
    theirs = scipy.stats.binomtest(wins, wins + losses).pvalue
    assert [sign_flip_p(differences, seed) for seed in range(3)] == pytest.approx([theirs] * 3, rel=1e-9)
    assert not is_bound(sign_flip_p(differences))


@pytest.mark.parametrize("n", [21, 26, 32])
def test_up_to_32_differences_hang_on_no_seed(n: int) -> None:
    """The distribution of such a sum is known: its steps are counted, ties among them."""
    rng = np.random.default_rng(n)
    steps = rng.integers(-3, 6, n)
    counts = np.ones(1)  # of sums of all signs, from the lowest in steps of 1
    for step in np.abs(steps):
        counts = np.convolve(counts, np.bincount([0, 2 * step], minlength=1).astype(float) if step else [2.0])
    sums = np.arange(len(counts)) - np.abs(steps).sum()
    theirs = counts[np.abs(sums) >= abs(steps.sum())].sum() / 2.0**n
    differences = np.array(0.1 * steps, dtype=np.float64)
    assert [sign_flip_p(differences, seed) for seed in range(3)] == pytest.approx([theirs] * 3, rel=1e-9)
    assert sign_flip_p(-differences[::-1]) == sign_flip_p(differences), "neither order nor direction counts"


def test_sums_that_are_equal_but_for_rounding_count_as_equal() -> None:
    """0.1 + 0.2 is more than 0.3 in floats: of three differences whose sums are 0.6 and 0, half are as far from 0."""
    values = np.array([0.1, 0.2, -0.3])
    assert sign_flip_p(values) == 1.0
    assert sign_flip_p(np.concatenate([values] * 20)) == 1.0, "drawn signs, too"
    thirds = np.array([1 / 3] * 3 + [1.0])
    assert sign_flip_p(thirds) == 2 / 16 and sign_flip_p(np.array([1 / 3, 1 / 3, 1 / 3, -1.0])) == 1.0
    assert sign_flip_p(np.array([1 / 3, 1 / 3, -1 / 3, 1.0])) == 8 / 16


def test_many_differences_have_nearly_the_p_value_of_a_t_test() -> None:
    differences = np.random.default_rng(7).normal(0.15, 1, size=200)
    _, theirs = scipy.stats.ttest_1samp(differences, 0)
    assert sign_flip_p(differences) == pytest.approx(theirs, abs=0.002)


def test_a_million_signs_tell_small_p_values_and_seeds_hardly_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = np.random.default_rng(8).normal(0.85, 1, size=32)
    exact = sign_flip_p(differences)
    monkeypatch.setattr("kvbench.plots.stats.EXACT_UP_TO", 0)
    drawn = [sign_flip_p(differences, seed) for seed in range(4)]
    assert 0.0005 < exact < 0.005 and len({*drawn}) > 1
    assert drawn == pytest.approx([exact] * 4, abs=5 * (exact / N_DRAWS) ** 0.5)


def test_what_no_drawn_sign_reaches_is_a_bound_and_said_to_be_one() -> None:
    rng = np.random.default_rng(4)
    clear, unclear = 1 + 0.1 * rng.random(100), rng.normal(0, 1, 100)
    assert sign_flip_p(clear) == 1 / (N_DRAWS + 1) and is_bound(sign_flip_p(clear))
    assert not is_bound(sign_flip_p(unclear)) and not is_bound(1e-6) and not is_bound(1 / 1024)
    assert p_words(sign_flip_p(clear), is_bound=True) == "< 1e-06" and p_words(0.00632) == "0.0063"
    assert p_words(1e-17) == "< 1e-06"
    assert p_words(99 / (N_DRAWS + 1), is_bound=True) == "< 9.9e-05"
    assert p_words(7.412e-4, is_bound=True) == "< 0.00075", "a bound is rounded up"


def test_corrected_p_values_that_hang_on_a_bound_are_bounds() -> None:
    """Holm's value of a comparison is at least that of all with a smaller p, so that theirs can decide it."""
    rng = np.random.default_rng(4)
    clear = paired(1 + 0.1 * rng.random(100), np.zeros(100), bounds=(0, 2))
    near = replace(clear, p=1.6 / (N_DRAWS + 1))
    far = replace(clear, p=0.02)
    found = corrected({"clear": clear, "near": near, "far": far})
    assert {name: one.is_bound for name, one in found.items()} == {"clear": True, "near": False, "far": False}
    assert {name: (one.sign, one.family) for name, one in found.items()} == dict.fromkeys(found, (1, 3))
    hidden = corrected({"clear": clear, "near": replace(near, p=1.1 / (N_DRAWS + 1)), "far": far})
    assert hidden["near"].p == hidden["clear"].p and hidden["near"].is_bound
    assert corrected({"only": replace(clear, p=0.00001)})["only"].sign == 1


def test_a_test_of_drawn_signs_takes_less_than_a_second_and_little_memory() -> None:
    """Tables compare hundreds of pairs."""
    differences = np.random.default_rng(1).normal(0.1, 1, size=200)
    tracemalloc.start()
    started = process_time()
    sign_flip_p(differences, seed=11)
    took = process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 2 and peak < 64e6


def test_equal_variants_have_no_difference() -> None:
    found = paired([0.1, 0.7, 0.3], [0.1, 0.7, 0.3])
    assert (found.mean, found.p, found.ties, found.n) == (0.0, 1.0, 3, 3)
    assert found.difference and found.difference.low < 0 < found.difference.high, "others could differ"


def test_rounding_is_no_difference() -> None:
    found = paired([0.1 + 0.2, 0.5], [0.3, 0.25])
    assert (found.wins, found.ties, found.losses) == (1, 1, 0)
    assert found.p == 1.0, "one sample is as likely to differ upwards as downwards"


def test_pairs_see_what_two_separate_intervals_do_not() -> None:
    """Samples of very different difficulty, and a small gain on all of them."""
    reference = np.linspace(0, 0.8, 50)
    better = reference + np.random.default_rng(9).normal(0.12, 0.01, size=50)
    found = paired(better, reference)
    assert found.difference and found.difference.low > 0
    assert found.p < 0.001
    apart, other = interval(better), interval(reference)
    assert apart and other and apart.low < other.high


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


# --- what counts as a difference ----------------------------------------------------------------


def test_no_interval_excludes_0_where_the_test_finds_nothing() -> None:
    """A cell was red as its bootstrap excluded 0, while its tooltip said p = 0.125 and Holm 1.000."""
    found = paired([0.1, 0.2, 0.15, 0.3], [0.4, 0.3, 0.5, 0.6])
    assert found.p == 0.125 and found.difference
    assert found.difference.low < 0 <= found.difference.high
    hits = paired([1.0] * 4, [0.0] * 4)
    assert hits.p == 0.125 and hits.difference and hits.difference.low <= 0 < hits.difference.high
    many = corrected(dict.fromkeys(range(8), found))[0]
    assert (many.p, many.sign) == (1.0, 0)


def test_every_column_is_a_family_of_its_own() -> None:
    """The first look corrected for its three tasks together and asked for 9 samples where the report asked for 8."""
    found = paired([0.9] * 7, [0.1] * 7)
    names = [(task, method) for task in ("needle", "longbench", "shared") for method in "abcd"]
    apart = corrected(dict.fromkeys(names, found), lambda name: name[0])
    assert [*apart] == names and {one.family for one in apart.values()} == {4}
    assert apart["needle", "a"] == corrected(dict.fromkeys("abcd", found))["a"]
    assert {(one.sign, one.few) for one in apart.values()} == {(0, "7 samples are too few to compare")}


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=12))
def test_intervals_of_hits_hold_the_mean_and_have_a_width(pairs: list[tuple[bool, bool]]) -> None:
    found = paired([float(a) for a, _ in pairs], [float(b) for _, b in pairs])
    assert found.difference
    assert -1 <= found.difference.low <= found.mean <= found.difference.high <= 1
    assert found.difference.low < found.difference.high
    if found.p >= LEVEL:
        assert found.difference.low <= 0 <= found.difference.high


def test_colours_follow_the_corrected_test() -> None:
    clear = paired(np.linspace(0.5, 0.9, FEW), np.linspace(0.1, 0.5, FEW))
    unclear = paired([0.3] * 6 + [0.2] * 14, [0.2] * 20)
    assert unclear.p < LEVEL
    found = corrected({"clear": clear, "unclear": unclear, "other": unclear, "more": unclear})
    assert found["clear"].sign == 1 and found["unclear"].sign == 0, "alone it would be one, beside others it is none"
    assert corrected({"unclear": unclear})["unclear"].sign == 1
    assert corrected({"worse": paired([0.1] * FEW, [0.2] * FEW)})["worse"].sign == -1
    assert corrected({"few": paired([0.1] * (FEW - 1), [0.2] * (FEW - 1))})["few"].sign == 0
    assert corrected({}) == {}


def test_averages_are_compared_with_each_dataset_counting_as_much() -> None:
    long, short = np.zeros(90), np.ones(10)
    found = paired_over_datasets([long + 0.1, short], [long, short - 0.3])
    assert found.mean == pytest.approx((0.1 + 0.3) / 2)
    assert (found.wins, found.n) == (100, 100) and found.p < 0.001
    assert paired_over_datasets([long + 0.1], [long]) == paired(long + 0.1, long)


def column(**levels: float) -> dict[str, dict[int, float]]:
    rng = np.random.default_rng(6)
    noise = rng.uniform(0, 0.02, size=(len(levels), 30))
    return {name: dict(enumerate(level + more)) for (name, level), more in zip(levels.items(), noise, strict=True)}


def test_the_best_is_best_only_where_the_test_says_so() -> None:
    found = standings(column(good=0.8, bad=0.3, worse=0.2))
    assert found.of == {"good": BEST, "bad": WORSE, "worse": WORSE}
    assert [found.marked(name) for name in found.of] == ["bold", "", ""]
    lower = standings(column(good=0.8, bad=0.3), better="lower")
    assert lower.of == {"good": WORSE, "bad": BEST}


def test_ties_are_shown_as_ties() -> None:
    scores = column(good=0.8, bad=0.3)
    scores["near"] = {i: value + (-1) ** i * 0.001 * (i > 0) for i, value in scores["good"].items()}
    found = standings(scores)
    assert {found.of["good"], found.of["near"]} == {BEST, TIED} and found.of["bad"] == WORSE
    assert [found.marked(name) for name in ("good", "near", "bad")] == ["tie", "tie", ""]
    same = standings(scores | {"near": scores["good"]})
    assert same.of["near"] == same.of["good"] == BEST and same.marked("near") == "tie"


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        ({"a": {1: 0.0, 2: 0.0}, "b": {1: 0.0, 2: 0.0}}, "all scores are 0"),
        ({"a": {1: 1.0, 2: 0.0}, "b": {1: 0.0, 2: 1.0}}, "all means are equal"),
        ({"a": {1: 1.0}, "b": {1: 0.0}}, "one sample is too few to compare"),
        (
            {"a": dict.fromkeys(range(5), 1.0), "b": dict.fromkeys(range(5), 0.0)},
            "5 samples are too few to compare",
        ),
        ({"a": {1: 1.0}, "b": {2: 0.0}}, "no sample was answered"),
        ({"a": {1: 1.0}, "b": {}}, "nothing to compare"),
    ],
)
def test_where_nothing_can_be_told_nothing_is_best(scores: dict[str, dict[int, float]], why: str) -> None:
    found = standings(scores)
    assert set(found.of.values()) == {UNDECIDED} and why in found.why
    assert {found.marked(name) for name in scores} == {""}


def test_an_averages_best_counts_datasets_not_samples() -> None:
    """`many` wins 40 samples of one dataset and loses two others of 10."""
    keys = [("long", i) for i in range(40)] + [(name, i) for name in ("x", "y") for i in range(10)]
    many = {key: 0.9 if key[0] == "long" else 0.1 for key in keys}
    few = dict.fromkeys(keys, 0.5)
    found = standings({"many": many, "few": few})
    assert found.of["few"] == BEST and found.of["many"] in (TIED, WORSE)


def test_equals_have_a_best_one_in_one_case_of_twenty() -> None:
    """Correcting for all pairs is more than this takes: one comparison a name is enough."""
    rng, crowned = np.random.default_rng(11), 0
    for _ in range(200):
        scores = {name: dict(enumerate(rng.normal(0.5, 0.1, FEW))) for name in "abcde"}
        crowned += any(standings(scores).marked(name) == "bold" for name in scores)
    assert crowned / 200 <= 0.05


def test_a_column_says_how_many_samples_it_takes_as_every_other_tool() -> None:
    levels = {"a": 0.9, "b": 0.1, "c": 0.2}
    few, enough = ({name: dict.fromkeys(range(n), each) for name, each in levels.items()} for n in (FEW - 1, FEW))
    assert standings(few).why == few_samples(FEW - 1) and standings(enough).of["a"] == BEST


# --- the front ----------------------------------------------------------------------------------


def points(*rising: tuple[float, float], n: int = 30) -> dict[int, tuple[float, dict[int, float]]]:
    """Points of a cost and a level each, whose samples vary by as much as levels do."""
    rng = np.random.default_rng(8)
    hard = rng.uniform(-0.1, 0.1, n)
    return {
        i: (cost, dict(enumerate((level + hard + rng.normal(0, 0.01, n)).tolist())))
        for i, (cost, level) in enumerate(rising)
    }


def test_the_front_is_what_is_shown_to_be_better_than_all_that_costs_no_more() -> None:
    rising = points((1, 0.2), (2, 0.4), (3, 0.3), (4, 0.4001), (5, 0.6))
    assert front(rising) == [0, 1, 4]
    assert front(rising, "lower") == []
    falling = {name: (cost, {i: -score for i, score in scores.items()}) for name, (cost, scores) in rising.items()}
    assert front(falling, "lower") == [0, 1, 4]


def test_identical_runs_have_no_winner() -> None:
    """The report crowned three of them: the cheapest, and each that rounding put a hair above."""
    ((_, scores),) = points((1, 0.5)).values()
    assert front({cost: (cost, scores) for cost in range(5)}) == []
    assert front(dict.fromkeys(range(5), (1.0, scores))) == [], "nor at one cost"
    hair = {cost: (cost, {i: score + 1e-14 * cost for i, score in scores.items()}) for cost in range(5)}
    assert front(hair) == []


def test_one_sample_has_no_winner() -> None:
    """SnapKV stood above full attention at n = 1."""
    assert front({"snapkv": (1.0, {0: 0.0}), "full": (2.0, {0: 1.0})}) == []
    assert front(points((1, 0.1), (2, 0.9), n=FEW - 1)) == [] and front(points((1, 0.1), (2, 0.9), n=FEW)) == [0, 1]
    assert front(points((1, 0.1), (2, 0.9), n=FEW), family=50_000) == [], "of many that were looked at it takes more"


def test_equals_have_a_front_in_one_case_of_twenty() -> None:
    """Of runs that differ by chance alone."""
    rng, drawn = np.random.default_rng(12), 0
    for _ in range(300):
        drawn += bool(front({i: (i, dict(enumerate(rng.normal(0.5, 0.1, FEW)))) for i in range(4)}))
    assert drawn / 300 <= 0.05


def test_points_of_other_samples_beat_nobody() -> None:
    better = (2.0, {("other", i): 0.9 for i in range(30)})
    assert front({"low": (1.0, {("own", i): 0.1 for i in range(30)}), "high": better}) == []
    assert front({"low": (1.0, {}), "high": better}) == []


def test_names_that_cannot_be_told_apart_share_their_ranks() -> None:
    def of(hits: int) -> dict[int, float]:
        return {i: float(i < hits) for i in range(40)}

    column = {"good": of(40), "fair": of(39), "bad": of(5), "none": {}}
    assert rank_ranges(column) == {"good": (1, 2), "fair": (1, 2), "bad": (3, 3)}
    assert rank_ranges(column, "lower") == {"good": (2, 3), "fair": (2, 3), "bad": (1, 1)}
    assert rank_ranges({"alone": of(3)}) == {"alone": (1, 1)}
