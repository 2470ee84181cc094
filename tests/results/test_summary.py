import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.results import RunResult, SampleRow, combined_ci95, interval, summarise
from kvbench.results.read import read_run
from kvbench.results.summary import disagreement
from kvbench.tests.results.made_rows import FACTS, ok_row, oom_row


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
    assert (result.ratio, result.ratio_exact, result.comm, result.comm_exact) == (0.2, "1/5", 1 / 64, "1/64")
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


def turns(*statuses: str) -> list[SampleRow]:
    """The lines of one sample."""
    fields = {"sample": "one"}
    rows = [ok_row(i) if status == "ok" else oom_row(i) for i, status in enumerate(statuses)]
    return [replace(row, fields=row.fields | fields | {"turn": i}) for i, row in enumerate(rows, 1)]


def test_turns_of_a_sample_are_one_sample() -> None:
    result = summarise([*turns("ok", "ok", "ok"), ok_row(8)], FACTS)
    assert (result.n_samples, result.n_oom) == (2, 0)
    partly = summarise(turns("ok", "oom", "oom"), FACTS)
    assert (partly.n_samples, partly.n_oom, partly.status) == (1, 1, "oom")


def test_a_result_that_counted_lines_is_read_as_one_that_counts_samples() -> None:
    """The folder is of three questions on one context, as the first version wrote it."""
    folder = Path(__file__).parent / "counted_lines"
    written = RunResult.from_json((folder / "result.json").read_text())
    assert (written.schema_version, written.n_samples) == (1, 3)
    result, rows = read_run(folder)
    assert len(rows) == 3 and (result.schema_version, result.n_samples) == (3, 1)
    assert disagreement(written, rows) is None and disagreement(result, rows) is None
    assert disagreement(replace(written, n_samples=1), rows) and disagreement(replace(result, n_samples=3), rows)


def test_a_run_without_any_score_says_null() -> None:
    result = summarise([oom_row(0), oom_row(1)], FACTS)
    assert (result.score, result.score_ci95, result.within_budget, result.tpot_s) == (None,) * 4
    assert "NaN" not in result.to_json()


def test_the_interval_of_a_run_is_that_of_its_scores() -> None:
    hits = summarise([ok_row(i, score=float(i < 3)) for i in range(4)], FACTS)
    found = interval([1, 1, 1, 0])
    assert found is not None and hits.score_ci95 == [found.low, found.high]
    parts = [0.25, 0.5, 0.75, 0.5]
    found = interval(parts)
    assert found is not None
    assert summarise([ok_row(i, score=x) for i, x in enumerate(parts)], FACTS).score_ci95 == [found.low, found.high]


def test_one_sample_has_a_score_and_no_interval() -> None:
    result = summarise([ok_row(0, score=1.0), oom_row(1)], FACTS)
    assert (result.score, result.score_ci95) == (1.0, None)


def test_only_shares_have_hits_and_misses() -> None:
    """Twice as slow as full attention at both samples is no hit of anything."""
    rows = [ok_row(i, score=1.0) for i in range(2)]
    assert combined_ci95(rows, "tpot_ratio") is None
    found = combined_ci95(rows)
    assert found is not None and found[0] < 0.2


def test_samples_whose_turns_were_all_missed_are_as_many_misses() -> None:
    """Where they agree, no resampling says how far the mean may lie; four turns of one sample count once."""

    def rows(of_samples: list[list[float]]) -> list[SampleRow]:
        return [
            ok_row(i, id=f"{i}/{turn}", score=score, fields={"sample": str(i), "turn": turn})
            for i, scores in enumerate(of_samples)
            for turn, score in enumerate(scores, 1)
        ]

    missed = interval([0, 0, 0])
    assert missed is not None and missed.high > 0.5
    assert combined_ci95(rows([[0.0] * 4] * 3)) == [missed.low, missed.high]
    mixed = [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    of_means = interval([0.5, 1.0, 0.0])
    assert of_means is not None and combined_ci95(rows(mixed)) == [of_means.low, of_means.high]
    uneven = interval([0.25, 1.0, 0.0], weights=[2, 1, 4])
    assert uneven is not None and uneven.mean == pytest.approx(1.5 / 7)
    assert combined_ci95(rows([[0.0, 0.5], [1.0], [0.0] * 4])) == [uneven.low, uneven.high]


def test_a_hit_more_moves_both_ends_up() -> None:
    """The bootstrap over prompts said 0 to 0.08 of a single hit in ten times four."""

    def ends(of_prompts: list[list[float]]) -> list[float]:
        drawn = [
            ok_row(i, id=f"{i}#{draw}", score=score, fields={"sample": str(i), "draw": draw})
            for i, scores in enumerate(of_prompts)
            for draw, score in enumerate(scores)
        ]
        return combined_ci95(drawn) or []

    none, one = ends([[0.0] * 4] * 10), ends([[1.0, 0.0, 0.0, 0.0]] + [[0.0] * 4] * 9)
    assert none[0] == 0 and none[1] > 0.2 and 0 < one[0] < 0.01 and one[1] > none[1]
