import random

import numpy as np
import pytest

from evals.results import (
    bootstrap_ci95,
    summarise,
)
from tests.evals.results.made_rows import (
    FACTS,
    ok_row,
    oom_row,
)


def test_a_summary_is_the_mean_of_its_samples() -> None:
    rows = [ok_row(0), ok_row(1), ok_row(2, tpot_s=None)]
    result = summarise(rows, FACTS)
    assert result.score == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert result.tokens_attended_mean == pytest.approx(1.1)
    assert result.tokens_budget_mean == pytest.approx(1.1)
    assert result.prefill_s == pytest.approx(0.1)
    assert result.tpot_s == pytest.approx(0.1)
    assert result.cache_hit_rate is None
    assert (result.n_samples, result.n_oom, result.status) == (3, 0, "ok")
    assert (result.ratio, result.ratio_exact, result.comm, result.comm_exact) == (
        0.2,
        "1/5",
        1 / 64,
        "1/64",
    )
    assert result.notes == ["own-worded prompts"]


def test_a_summary_does_not_depend_on_the_order_of_samples() -> None:
    rows = [ok_row(i, score=(i * 0.37) % 1) for i in range(30)]
    shuffled = random.Random(1).sample(rows, len(rows))
    assert summarise(rows, FACTS) == summarise(shuffled, FACTS)


def test_one_sample_over_its_budget_marks_the_run() -> None:
    over = ok_row(1, ledger={**ok_row(1).ledger, "within_budget": False})
    assert summarise([ok_row(0)], FACTS).within_budget is True
    assert summarise([ok_row(0), over], FACTS).within_budget is False


def test_samples_out_of_memory_are_counted_and_not_averaged() -> None:
    result = summarise([ok_row(0), oom_row(1)], FACTS)
    assert (result.status, result.n_samples, result.n_oom, result.score) == ("oom", 1, 1, 1.0)


def test_a_run_without_any_score_says_null() -> None:
    result = summarise([oom_row(0), oom_row(1)], FACTS)
    assert (result.score, result.score_ci95, result.within_budget, result.tpot_s) == (None,) * 4
    assert "NaN" not in result.to_json()


def test_an_interval_is_deterministic_and_holds_the_mean() -> None:
    scores = [float(x) for x in np.random.default_rng(3).random(200)]
    interval = bootstrap_ci95(scores)
    assert interval is not None and interval == bootstrap_ci95(scores[::-1])
    low, high = interval
    expected = 1.96 * np.std(scores) / np.sqrt(len(scores))  # of a normal approximation
    assert np.mean(scores) - low == pytest.approx(expected, rel=0.1)
    assert high - np.mean(scores) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("scores", [[0.3], [0.1] * 7, [1.0] * 300, [0.0, 0.0]])
def test_equal_scores_have_an_interval_of_no_width(scores: list[float]) -> None:
    assert bootstrap_ci95(scores) == [scores[0], scores[0]]
