"""What a step reads of an index to find tokens: counted for every method, whether `comm` prices it or not."""

import pytest

from kvbench.engine.budget import find_bytes
from kvbench.tests.conformance import S, Said, model, ours, variant, watched

RATIO = "0.2"
PRICED = ("quest", "sparq", "loki", "double_sparsity")  # what they read is what `comm` limits


def entries_of(name: str) -> tuple[Said, list]:
    said = watched(ours(name), RATIO)
    return said, [e for e in said.row.store.ledger.entries if said.row.store[e.layer].can_fetch]


@pytest.mark.parametrize("name", PRICED)
def test_an_index_that_comm_prices_is_counted_once(name: str) -> None:
    _, entries = entries_of(name)
    assert all(entry.moved_meta_bytes > 0 == entry.read_meta_bytes for entry in entries)


def test_infllm_reads_the_representatives_of_every_query_head() -> None:
    said, entries = entries_of("infllm")
    shape, row = model().shape, said.row
    for entry in entries:
        n_blocks = row.plan.n_blocks(entry.tokens - 1)
        assert entry.read_meta_bytes == entry.resident_meta_bytes == shape.h * n_blocks * shape.d_h * 2 > 0
        assert entry.moved_meta_bytes == 0


def test_infinigen_reads_partial_keys_and_the_projection() -> None:
    said, entries = entries_of("infinigen")
    shape, c = model().shape, said.row.plan.n_channels
    index = shape.h_kv * S * c + shape.h * c * shape.d_model + shape.h_kv * shape.d_h**2
    assert {entry.read_meta_bytes for entry in entries} == {2 * index}


def test_clusterkv_reads_centroids_and_the_lists_of_what_it_takes() -> None:
    said, entries = entries_of("clusterkv")
    shape, plan = model().shape, said.row.plan
    heads = said.steps[-1].fetched[0].shape[1]
    ranked = shape.h_kv * plan.n_clusters * (2 * shape.d_h + 8)
    assert {entry.read_meta_bytes for entry in entries} == {ranked + 4 * heads * plan.k}


def test_pqcache_reads_its_centroids_beside_the_codes() -> None:
    said, entries = entries_of("pqcache")
    shape, plan = model().shape, said.row.plan
    assert {entry.read_meta_bytes for entry in entries} == {2 * shape.h_kv * 2**plan.b * shape.d_h}
    assert all(entry.moved_meta_bytes > 0 for entry in entries)


def test_what_comm_does_not_price_breaks_no_budget_and_stands_in_the_summary() -> None:
    said, entries = entries_of("infllm")
    row, shape = said.row, model().shape
    summary = row.store.ledger.summary(row.budget, shape, row.skipped)
    n_layers, n_steps = len({e.layer for e in entries}), len({e.step for e in entries})
    assert summary["within_budget"] is True
    assert summary["bytes_comm_per_step"] == find_bytes(shape, row.budget) * n_layers
    assert summary["bytes_index_read_per_step"] == sum(e.read_meta_bytes for e in entries) / n_steps
    assert float(summary["bytes_index_read_per_step"] or 0) > find_bytes(shape, row.budget) * n_layers
    assert variant(ours("infllm"), RATIO).plan == row.plan, "comm sets the index as ever"
