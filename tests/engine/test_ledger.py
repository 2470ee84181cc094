from fractions import Fraction

from kvbench.engine.books.ledger import SUMMARY, Entry, Ledger
from kvbench.engine.budget import Budget, find_bytes
from kvbench.engine.shapes import ModelShape

SHAPE = ModelShape("any", 2, 4, 2, 8, 1000, (0, 1))
BUDGET = Budget(100, 20, 20, Fraction(1, 10), Fraction(1, 5))


def entry(step: int, layer: int, attended: int, **fields: int) -> Entry:
    zeros = dict.fromkeys(Entry._fields, 0)
    return Entry(**zeros | {"step": step, "layer": layer, "tokens": 100 + step, "attended": 4 * attended} | fields)


def ledger(*entries: Entry) -> Ledger:
    ours = Ledger()
    ours.written += entries
    return ours


def test_tokens_may_grow_by_one_per_step() -> None:
    ours = ledger(*(entry(step, layer, 20 + step) for step in (1, 2, 3) for layer in (0, 1)))
    assert ours.within(BUDGET, SHAPE)
    assert not ledger(entry(1, 0, 22), entry(1, 1, 21)).within(BUDGET, SHAPE)


def test_layers_may_differ_as_long_as_their_mean_fits() -> None:
    assert ledger(entry(1, 0, 30), entry(1, 1, 12)).within(BUDGET, SHAPE)


def test_exempt_layers_are_left_out_of_the_check_but_not_of_the_means() -> None:
    ours = ledger(entry(1, 0, 101), entry(1, 1, 21))
    assert ours.within(BUDGET, SHAPE, exempt=[0])
    assert not ours.within(BUDGET, SHAPE)
    assert ours.summary(BUDGET, SHAPE, exempt=[0])["tokens_attended_mean"] == 61


def test_random_selections_hold_the_budget_in_the_mean_of_the_steps() -> None:
    limit = find_bytes(SHAPE, BUDGET)
    ours = ledger(entry(1, 0, 31, moved_meta_bytes=2 * limit), entry(2, 0, 12))
    assert ours.within(BUDGET, SHAPE, in_mean=True)
    assert not ours.within(BUDGET, SHAPE)
    assert ours.summary(BUDGET, SHAPE, in_mean=True)["within_budget"] is True
    # The margin is a twentieth: 43 tokens are allowed, and 45.15 with it.
    assert ledger(entry(1, 0, 33), entry(2, 0, 12)).within(BUDGET, SHAPE, in_mean=True)
    assert not ledger(entry(1, 0, 34), entry(2, 0, 12)).within(BUDGET, SHAPE, in_mean=True)
    more = entry(2, 0, 12, moved_meta_bytes=limit // 8)
    assert not ledger(entry(1, 0, 31, moved_meta_bytes=2 * limit), more).within(BUDGET, SHAPE, in_mean=True)


def test_finding_bytes_beyond_comm_break_the_budget() -> None:
    limit = find_bytes(SHAPE, BUDGET)
    assert ledger(entry(1, 0, 21, moved_meta_bytes=limit), entry(1, 1, 21, moved_meta_bytes=limit)).within(
        BUDGET, SHAPE
    )
    assert not ledger(entry(1, 0, 21, moved_meta_bytes=limit + 1), entry(1, 1, 21, moved_meta_bytes=limit)).within(
        BUDGET, SHAPE
    )


def test_a_summary_is_per_step_and_over_all_layers() -> None:
    ours = ledger(
        entry(1, 0, 21, moved_kv_bytes=10, resident_kv_bytes=5, resident_meta_bytes=1, cache_lookups=4, cache_hits=1),
        entry(1, 1, 21, moved_kv_bytes=30, resident_kv_bytes=5),
        entry(2, 0, 22, moved_kv_bytes=20, resident_kv_bytes=6),
        entry(2, 1, 22, moved_kv_bytes=20, resident_kv_bytes=6),
    )
    summary = ours.summary(BUDGET, SHAPE)
    assert set(summary) == set(SUMMARY)
    assert summary["bytes_moved_kv_per_step"] == 40
    assert summary["bytes_resident_device"] == 12  # the larger step
    assert summary["cache_hit_rate"] == 0.25
    assert summary["effective_ratio"] == (21 + 21 + 22 + 22) / (101 + 101 + 102 + 102)
    assert summary["within_budget"] is True


def test_an_answer_without_a_step_has_a_summary_too() -> None:
    summary = Ledger().summary(BUDGET, SHAPE)
    assert set(summary) == set(SUMMARY)
    assert summary["tokens_attended_mean"] is None
    assert summary["within_budget"] is True


def test_counts_that_are_owed_are_filled_in_once_when_somebody_reads() -> None:
    class PendingCounts:
        n_calls = 0

        def fill(self, entries: list[Entry]) -> None:
            self.n_calls += 1
            entries[0] = entries[0]._replace(cache_hits=7)

    ours, pending_counts = ledger(entry(1, 0, 5), entry(2, 0, 5)), PendingCounts()
    ours.pending_counts = pending_counts
    assert ours.totals("cache_hits") == [7, 0]
    assert ours.columns()["cache_hits"] == [7, 0]
    assert pending_counts.n_calls == 1
