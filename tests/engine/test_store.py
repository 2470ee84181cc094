import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Kept, Offloaded, Searched, Whole
from kvbench.engine.store import Store
from kvbench.kernels.gather import gather_tokens
from kvbench.tests.vectors import trace_of

H, H_KV, D = 4, 2, 8


def token(i: int) -> Tensor:
    """K or V that says its position and head."""
    return (torch.arange(H_KV).view(1, H_KV, 1, 1) * 1000.0 + i).expand(1, H_KV, 1, D).contiguous()


def counting_trace(s: int) -> Trace:
    tokens = torch.cat([token(i) for i in range(s)], 2)
    return trace_of(tokens, -tokens, H)


def positions(part: Part, head: int = 0) -> list[int]:
    """Which positions a part holds for a KV head, checked against its values."""
    part = part.gathered()
    assert torch.equal(part.k, -part.v)
    return (part.k[0, head, :, 0] - 1000 * head).int().tolist()


def feed(store: Store, n: int, start: int) -> None:
    for i in range(start, start + n):
        store[0].append(token(i), -token(i))
        store.close(0)


def test_keeping_all_copies_nothing() -> None:
    trace = counting_trace(10)
    store = Store(trace, 3)
    store.place(0, Whole())
    store[0].append(token(10), -token(10))
    prompt, rest = store[0].resident()
    assert prompt.k.data_ptr() == trace.keys(0).data_ptr()
    assert positions(prompt) + positions(rest) == list(range(11))


def test_kept_tokens_may_differ_between_heads() -> None:
    store = Store(counting_trace(20), 4)
    store.place(0, Kept(torch.tensor([[[1, 5, 9], [2, 6, 19]]])))
    feed(store, 2, 20)
    (part,) = store[0].resident()
    assert positions(part, 0) == [1, 5, 9, 20, 21]
    assert positions(part, 1) == [2, 6, 19, 20, 21]
    assert store.attended(0)[3].nonzero().flatten().tolist() == [2, 6, 19, 20, 21]
    assert not store[0].can_fetch


def test_a_window_slides_over_the_oldest_tokens() -> None:
    store = Store(counting_trace(20), 9)
    store.place(0, Kept(2, n_window=3, capacity=4))
    for t, expected in enumerate(
        [[17, 18, 19, 20], [18, 19, 20, 21], [19, 20, 21, 22], [20, 21, 22, 23], [21, 22, 23, 24]]
    ):
        store[0].append(token(20 + t), -token(20 + t))
        (part,) = store[0].resident()
        assert positions(part)[:2] == [0, 1]
        assert sorted(positions(part)[2:]) == expected
        store.close(0)


@given(st.data())
@settings(max_examples=60)
def test_any_host_token_can_be_fetched_after_any_number_of_steps(data: st.DataObject) -> None:
    s = data.draw(st.integers(6, 40))
    n_sink = data.draw(st.integers(0, 3))
    n_past = data.draw(st.integers(0, s - n_sink))
    slides = data.draw(st.booleans())
    n_new = data.draw(st.integers(1, 12))
    store = Store(counting_trace(s), n_new)
    store.place(0, Offloaded(n_sink, n_past, n_past + 1 if slides else None))
    feed(store, n_new, s)
    on_host = range(n_sink, store[0].n_seen - store[0].n_window)
    if not on_host:
        return
    heads = data.draw(st.sampled_from([H_KV, H]))
    k = data.draw(st.integers(1, len(on_host)))
    idx = torch.stack([torch.tensor(data.draw(st.permutations(on_host)))[:k] for _ in range(heads)]).unsqueeze(0)
    part = store[0].fetch(idx).gathered()
    owner = torch.arange(heads) // (heads // H_KV)
    assert torch.equal(part.k[0, :, :, 0], idx[0] + 1000.0 * owner.unsqueeze(1))
    assert torch.equal(part.k, -part.v)
    resident = store[0].resident()[0].k.shape[2]
    assert resident + len(on_host) == s + n_new  # every token is in exactly one tier


def test_what_is_fetched_stays_where_it_is_without_an_accelerator() -> None:
    trace = counting_trace(20)
    store = Store(trace, 2)
    store.place(0, Offloaded(2, 4))
    store[0].append(token(20), -token(20))
    part = store[0].fetch(torch.tensor([[[3, 4], [5, 2]]]))
    assert part.k.data_ptr() == trace.keys(0).data_ptr()
    assert part.v.data_ptr() == trace.values(0).data_ptr()
    assert part.n_tokens() == 2
    assert [positions(part, head) for head in range(H_KV)] == [[3, 4], [5, 2]]


def test_padding_is_masked_and_not_counted() -> None:
    store = Store(counting_trace(20), 2)
    store.place(0, Offloaded(2, 4))
    store[0].append(token(20), -token(20))
    part = store[0].fetch(torch.tensor([[[3, 4, -1], [5, -1, -1]]]), padded=True)
    assert part.mask is not None
    assert part.mask.tolist() == [[[True, True, False], [True, False, False]]]
    store.close(0)
    entry = store.ledger.entries[0]
    assert entry.moved_kv_bytes == 3 * 2 * D * 2
    assert entry.attended == 3 * (H // H_KV) + (2 + 4 + 1) * H


def test_tokens_asked_for_by_several_query_heads_move_once() -> None:
    store = Store(counting_trace(20), 2)
    store.place(0, Offloaded(2, 4))
    store[0].append(token(20), -token(20))
    store[0].fetch(torch.tensor([[[3, 4], [4, 5], [7, 8], [7, 8]]]))
    store.close(0)
    entry = store.ledger.entries[0]
    assert entry.moved_kv_heads_bytes == 8 * 2 * D * 2
    assert entry.moved_kv_bytes == (3 + 2) * 2 * D * 2
    assert entry.attended == 8 + 7 * H


def test_bytes_in_are_bytes_resident_plus_bytes_on_the_host() -> None:
    store = Store(counting_trace(20), 6)
    store.place(0, Offloaded(2, 4, capacity=5))
    for t in range(6):
        store[0].append(token(20 + t), -token(20 + t))
        store.close(0)
    per_token = H_KV * D * 2 * 2
    for t, entry in enumerate(store.ledger.entries, start=1):
        assert entry.resident_kv_bytes + entry.resident_host_bytes == (20 + t) * per_token
    assert [entry.released_bytes for entry in store.ledger.entries] == [0] + [per_token] * 5


def test_dropped_tokens_are_nowhere() -> None:
    store = Store(counting_trace(20), 2)
    store.place(0, Kept(torch.tensor([[[1], [2]]])))
    feed(store, 2, 20)
    assert [entry.resident_host_bytes for entry in store.ledger.entries] == [0, 0]
    assert store.ledger.entries[-1].resident_kv_bytes == 3 * H_KV * D * 2 * 2
    assert store.allocated_bytes() == 2 * H_KV * 3 * D * 4  # K and V of one kept and two new tokens, float32


def test_cached_blocks_are_hits_and_move_nothing() -> None:
    store = Store(counting_trace(40), 4, BlockCacheSpec(8, 4, 2, "lru"))
    store.place(0, Offloaded(2, 6))
    idx = torch.tensor([[[2, 3, 10], [2, 4, 11]]])  # middle indices 0, 1, 8 and 0, 2, 9: blocks 0 and 2
    for t in range(2):
        store[0].append(token(40 + t), -token(40 + t))
        store[0].fetch(idx)
        store.close(0)
    cold, warm = store.ledger.entries
    per_head = 2 * D * 2
    assert (cold.cache_hits, cold.cache_lookups, cold.moved_kv_bytes) == (0, 6, 6 * per_head)
    assert cold.filled_bytes == 2 * 4 * H_KV * per_head
    assert (warm.cache_hits, warm.cache_lookups, warm.moved_kv_bytes) == (6, 6, 0)
    assert warm.resident_kv_bytes == (2 + 6 + 2 + 8) * H_KV * per_head


def test_a_cache_takes_its_room_before_it_is_full() -> None:
    store = Store(counting_trace(40), 4, BlockCacheSpec(12, 4, 1, "lru"))
    store.place(0, Offloaded(2, 6))
    store[0].append(token(40), -token(40))
    store[0].fetch(torch.tensor([[[2, 3], [2, 4]]]))
    store.close(0)
    entry = store.ledger.entries[0]
    assert entry.filled_bytes == 4 * H_KV * 2 * D * 2
    assert entry.resident_kv_bytes == (2 + 6 + 1 + 12) * H_KV * 2 * D * 2


def test_what_query_heads_find_in_the_cache_moves_for_none_of_them() -> None:
    store = Store(counting_trace(40), 4, BlockCacheSpec(8, 4, 2, "lru"))
    store.place(0, Offloaded(2, 6))
    heads = [[[2, 3], [3, 10], [2, 20], [10, 11]], [[2, 3], [3, 14], [20, 21], [2, 10]]]
    # Blocks 0 and 2 are taken in: positions 2 to 5 and 10 to 13.
    for t, asked in enumerate(heads):
        store[0].append(token(40 + t), -token(40 + t))
        store[0].fetch(torch.tensor([asked]))
        store.close(0)
    cold, warm = store.ledger.entries
    assert (cold.moved_kv_heads_bytes, cold.moved_kv_bytes) == (8 * 2 * D * 2, 7 * 2 * D * 2)
    assert (warm.cache_hits, warm.cache_lookups) == (4, 7)
    assert (warm.moved_kv_heads_bytes, warm.moved_kv_bytes) == (3 * 2 * D * 2, 3 * 2 * D * 2)


def test_a_store_never_writes_to_the_trace() -> None:
    trace = counting_trace(20)
    before = trace.keys(0).clone(), trace.values(0).clone()
    for arrange in (
        lambda store: store.place(0, Whole()),
        lambda store: store.place(0, Kept(2, 4, 5)),
        lambda store: store.place(0, Offloaded(2, 4, 5)),
        lambda store: store.place(0, Kept(torch.tensor([[[1], [2]]]))),
    ):
        store = Store(trace, 8)
        arrange(store)
        feed(store, 8, 20)
    assert torch.equal(trace.keys(0), before[0])
    assert torch.equal(trace.values(0), before[1])


def test_placing_a_layer_twice_is_our_mistake() -> None:
    store = Store(counting_trace(20), 2)
    store.place(0, Whole())
    with pytest.raises(AssertionError, match="placed twice"):
        store.place(0, Offloaded(1, 1))


@pytest.mark.parametrize("heads", [H_KV, H])
def test_gathered_rows_are_those_of_their_head(heads: int) -> None:
    tokens = torch.randn(1, H_KV, 15, D)
    idx = torch.randint(0, 15, (1, heads, 6))
    expected = tokens.repeat_interleave(heads // H_KV, 1).gather(2, idx.unsqueeze(-1).expand(-1, -1, -1, D))
    assert torch.equal(gather_tokens(tokens, idx), expected)


@pytest.mark.parametrize("on_device", [True, False])
def test_a_tier_may_hold_some_tokens_alone(on_device: bool) -> None:
    store = Store(counting_trace(20), 3)
    store.place(0, Searched(torch.tensor([[[1, 5, 9, 19], [2, 6, 7, 18]]]), on_device))
    feed(store, 2, 20)
    part = store[0].fetch(torch.tensor([[[3, 0, 5], [4, 1, 2]]]))
    assert [positions(part.gathered(), head) for head in range(H_KV)] == [[19, 1, 21], [20, 6, 7]]
    assert store[0].fetched()[0].tolist() == [[[19, 1, 21], [20, 6, 7]]]
    assert store.attended(0)[H - 1].nonzero().flatten().tolist() == [6, 7, 20]
    store.close(0)
    entry, n_bytes = store.ledger.entries[-1], H_KV * D * 2 * 2
    assert entry.attended == 3 * H
    assert (entry.resident_kv_bytes, entry.resident_host_bytes) == ((6 * n_bytes, 0) if on_device else (0, 6 * n_bytes))
    assert entry.moved_kv_bytes == (0 if on_device else 3 * n_bytes)
    assert store.allocated_bytes() == on_device * H_KV * D * 4 * 2 * 7
