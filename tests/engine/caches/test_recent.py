import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.caches.recent import RecentTokens
from kvbench.engine.placement import Offloaded, Release
from kvbench.engine.store import Store
from kvbench.tests.engine.test_store import H_KV, D, H, counting_trace, feed, positions, token


@given(st.data())
def test_hits_are_tokens_that_one_of_the_last_selections_had(data: st.DataObject) -> None:
    n_steps, g, k = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), 3
    recent = RecentTokens(n_steps, 8)
    history: list[list[set[int]]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        head = st.lists(st.integers(0, 7), min_size=0, max_size=k, unique=True)
        heads = data.draw(st.lists(head, min_size=2 * g, max_size=2 * g))
        idx = torch.tensor([[[*tokens, *[-1] * (k - len(tokens))] for tokens in heads]])
        asked = [set().union(*heads[i * g : (i + 1) * g]) for i in range(2)]
        held = [set().union(*(past[i] for past in history[-n_steps:])) for i in range(2)]
        hits = sum(len(a & b) for a, b in zip(asked, held, strict=True))
        of_heads = sum(len(set(head) & held[i // g]) for i, head in enumerate(heads))
        assert recent.access(idx, 2, padded=True) == (sum(map(len, asked)), hits, of_heads)
        history.append(asked)
        kept = history[-n_steps:]
        assert recent.n_marked == sum(len(set().union(*(past[i] for past in kept))) for i in range(2))


def test_the_store_moves_only_what_is_not_held() -> None:
    store = Store(counting_trace(20), 8)
    store.place(0, Offloaded(2, 0, n_steps=1))
    per_token = D * 4
    expected = [([5, 6, 7], 0), ([6, 7, 8], 2), ([9, 10, 11], 0), ([9, 10, 11], 3), ([5, 6, 7], 0)]
    for t, (tokens, hits) in enumerate(expected):
        store[0].append(token(20 + t), -token(20 + t))
        part = store[0].fetch(torch.tensor([[tokens] * H_KV]))
        assert positions(part) == tokens, "what is held must be what the host has"
        store.close(0)
        entry = store.ledger.entries[-1]
        assert (entry.cache_hits, entry.cache_lookups) == (H_KV * hits, H_KV * 3)
        assert entry.moved_kv_bytes == entry.moved_kv_heads_bytes == H_KV * (3 - hits) * per_token
        assert entry.resident_kv_bytes == H_KV * (2 + t + 1 + 3) * per_token
        assert entry.resident_host_bytes == H_KV * 18 * per_token
        assert entry.attended == H * (2 + t + 1 + 3)


def test_a_layer_has_one_cache_only() -> None:
    store = Store(counting_trace(20), 8, BlockCacheSpec(8, 4, 1, "lfu"))
    with pytest.raises(AssertionError, match="a block cache"):
        store.place(0, Offloaded(2, 0, n_steps=1))


def test_a_released_window_is_on_the_host_from_the_next_token_on() -> None:
    store = Store(counting_trace(10), 8)
    store.place(0, Offloaded(2, 0, capacity=3))
    feed(store, 2, 10)
    store[0].append(token(12), -token(12))
    store.change(0, Release())
    assert store.attended(0)[0].nonzero().flatten().tolist() == [0, 1, 10, 11, 12]
    assert store[0].n_window == 3
    store.close(0)
    entry = store.ledger.entries[-1]
    assert entry.attended == H * 5
    assert entry.released_bytes == 3 * H_KV * D * 4
    for t in range(13, 16):
        store[0].append(token(t), -token(t))
        (part,) = store[0].resident()
        assert positions(part) == [0, 1, *range(13, t + 1)]
        assert store[0].positions()[0, 0].tolist() == [0, 1, *range(13, t + 1)]
        assert positions(store[0].fetch(torch.tensor([[[9, 12, 10]] * H_KV]))) == [9, 12, 10]
        store.close(0)
        entry = store.ledger.entries[-1]
        assert entry.released_bytes == 0
        assert entry.resident_host_bytes == 11 * H_KV * D * 4
