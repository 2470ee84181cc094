import ast
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench.engine.books.audit import bytes_beside
from kvbench.engine.books.ledger import Entry
from kvbench.engine.books.meter import COUNTS, Access, Meter
from kvbench.engine.caches.blocks import BlockCache, BlockCacheSpec
from kvbench.engine.caches.recent import distinct_tokens
from kvbench.engine.selection import Cost
from kvbench.engine.shapes import ModelShape
from kvbench.tests.conformance import accepted, ours, watched

SHAPE = ModelShape("small", 1, 4, 2, 8, 100, (0,))
PER_TOKEN = 2 * 8 * 2  # K and V of one token of one KV head, at 16 bits
COUNTERS = {
    *("counts", "device_counts", "beside_bytes", "host_meta_bytes", "far_bytes", "moves"),  # of a meter
    *("written", "pending_counts", "rebuilt_bytes"),  # of a ledger
}


def test_every_count_is_a_column_of_the_ledger() -> None:
    assert set(COUNTS) <= set(Entry._fields)


def test_a_meter_counts_from_one_close_to_the_next() -> None:
    meter = Meter(SHAPE)
    meter.spend(Cost(moved_bytes=5))
    meter.spend(Cost(moved_bytes=7))
    meter.count_released(3)
    first = meter.close(1, 0, n_seen=20, n_resident=6, n_host=14)
    second = meter.close(2, 0, n_seen=21, n_resident=7, n_host=14)
    assert (first.step, first.layer, first.tokens) == (1, 0, 20)
    assert (first.moved_meta_bytes, first.released_bytes) == (12, 3 * 2 * PER_TOKEN)
    assert (first.resident_kv_bytes, first.resident_host_bytes) == (12 * PER_TOKEN, 28 * PER_TOKEN)
    assert (first.attended, second.attended) == (6 * 4, 7 * 4)
    assert (second.moved_meta_bytes, second.released_bytes) == (0, 0)


def test_hidden_and_spare_tokens_are_taken_off() -> None:
    entry = Meter(SHAPE).close(1, 0, n_seen=20, n_resident=6, n_host=0, n_hidden=5, n_spare=2)
    assert entry.attended == 6 * 4 - 5
    assert entry.resident_kv_bytes == (6 * 2 - 2) * PER_TOKEN


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_token_moves_once_per_kv_head_and_is_looked_up_only_in_a_cache(has_cache: bool) -> None:
    meter = Meter(SHAPE, BlockCache(BlockCacheSpec(8, 4, 2, "lru")) if has_cache else None)
    idx = torch.tensor([[[2, 3], [3, -1], [7, 8], [7, 8]]])
    for step, hits in enumerate([0, 4], start=1):
        meter.count_fetch(idx, n_tokens=7, n_seen=20, n_kept=2, n_host=16)
        entry = meter.close(step, 0, n_seen=20, n_resident=4, n_host=16)
        hits *= has_cache
        assert entry.attended == 7 + 4 * 4
        assert (entry.cache_hits, entry.cache_lookups) == (hits, 4 * has_cache)
        assert entry.moved_kv_bytes == (4 - hits) * PER_TOKEN
        assert entry.moved_kv_heads_bytes == (0 if hits else 7) * PER_TOKEN


def test_fetches_are_noted_where_somebody_asked_for_them() -> None:
    accesses: list[Access] = []
    Meter(SHAPE, accesses=accesses).note(3, 1, 20, 2, 16, torch.tensor([[[5, -1], [6, 7]]]))
    (access,) = accesses
    assert (access.step, access.layer, access.n, access.n_kept, access.n_host) == (3, 1, 20, 2, 16)
    assert [head.tolist() for head in access.idx] == [[5, -1], [6, 7]]


def test_distinct_tokens_are_those_of_each_kv_head_in_order() -> None:
    idx = torch.tensor([[[4, 2], [2, -1], [0, 9], [9, -1]]])
    assert distinct_tokens(idx, 2, 10).tolist() == [2, 4, 0, 9]


def written_outside(source: str) -> list[str]:
    """The counters of a meter or a ledger that a file assigns to."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            each = target.elts if isinstance(target, ast.Tuple) else [target]
            bare = [one.value if isinstance(one, ast.Subscript) else one for one in each]
            found += [one.attr for one in bare if isinstance(one, ast.Attribute) and one.attr in COUNTERS]
    return found


def test_nobody_but_the_books_writes_into_a_counter() -> None:
    root = Path(__file__).resolve().parents[2]
    files = [path for part in ("engine", "methods", "tasks", "evals") for path in (root / part).rglob("*.py")]
    outside = {path: written_outside(path.read_text()) for path in files if path.parent.name != "books"}
    assert {path.name: names for path, names in outside.items() if names} == {}
    assert written_outside('at.meter.counts["attended"], x.meter.device_counts = 1, None') == [
        "counts",
        "device_counts",
    ]
    assert written_outside("ledger.rebuilt_bytes += 3") == ["rebuilt_bytes"]


def test_keys_in_another_order_are_the_hosts_where_there_is_one_and_else_tensors_of_its_own() -> None:
    """What a dropping method kept of the whole prompt would be hidden, whatever its order."""
    for name, is_own in (("quest", False), ("snapkv", True)):
        one = ours(name)
        row: Any = copy(watched(one, accepted(one, ("0.2", "0.5"))[0]).row)  # which others look at
        before, keys = bytes_beside(row), row.trace.keys(0)
        row.turned = keys[0].mT.contiguous()
        assert bytes_beside(row) - before == (2 * keys.numel() if is_own else 0), name
        row.turned = row.turned + 1
        assert bytes_beside(row) - before == 2 * keys.numel(), name
