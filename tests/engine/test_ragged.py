"""A store whose KV heads keep different counts: true tokens in the books, the right ones in attention."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.engine.attend import attend
from kvbench.engine.books.strip import attended_bins
from kvbench.engine.placement import Ragged, Rolls
from kvbench.engine.softmax import Softmax
from kvbench.engine.store import Store
from kvbench.tests.engine.test_store import H_KV, D, H, counting_trace, token


def held(store: Store) -> list[list[int]]:
    """Positions that each KV head's resident parts hold, by the numbers in them."""
    found: list[list[int]] = [[] for _ in range(H_KV)]
    for part in store[0].resident():
        part = part.gathered()
        assert torch.equal(part.k, -part.v)
        for head in range(H_KV):
            real = slice(None) if part.mask is None else part.mask[0, head]
            found[head] += (part.k[0, head, real, 0] - 1000 * head).int().tolist()
    return found


def step(store: Store, position: int, t: int) -> None:
    store[0].append(token(position), -token(position))
    expected = held(store)
    assert [[p for p in row if p >= 0] for row in store[0].positions()[0].tolist()] == expected
    seen = store.attended(0)
    for head in range(H):
        assert seen[head].nonzero().flatten().tolist() == sorted(expected[head * H_KV // H])
    store.close(0)
    entry, n = store.ledger.entries[-1], sum(map(len, expected))
    assert entry.attended == n * H // H_KV
    assert entry.resident_kv_bytes == n * store[0].meter.token_bytes


@given(st.data())
@settings(max_examples=60)
def test_heads_keep_what_was_chosen_and_the_books_count_true_tokens(data: st.DataObject) -> None:
    s, n_new = data.draw(st.integers(2, 30)), data.draw(st.integers(1, 5))
    chosen = [data.draw(st.sets(st.integers(0, s - 1), min_size=int(head == 0))) for head in range(H_KV)]
    store = Store(counting_trace(s), n_new)
    store.place(0, Ragged([torch.tensor(sorted(each), dtype=torch.int64) for each in chosen]))
    for t in range(1, n_new + 1):
        step(store, s + t - 1, t)
        assert held(store) == [[*sorted(each), *range(s, s + t)] for each in chosen]
    true = sum(map(len, chosen)) + H_KV * n_new
    assert store.allocated_bytes() == true * 2 * D * 4, "spare rows are allocated"


@given(st.data())
@settings(max_examples=60)
def test_heads_that_roll_hold_their_latest_tokens(data: st.DataObject) -> None:
    s, n_new = data.draw(st.integers(6, 24)), data.draw(st.integers(1, 12))
    n_sink, n_recent = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 4))
    rolls = [data.draw(st.booleans()) for _ in range(H_KV)]
    store = Store(counting_trace(s), n_new)
    recent_first = torch.tensor([*range(s - n_recent, s), *range(n_sink)])
    latest = Rolls([n_recent if each else -1 for each in rolls], [0] * H_KV)
    store.place(0, Ragged([recent_first if each else torch.arange(s) for each in rolls], latest))
    for t in range(1, n_new + 1):
        last = s + t - 1
        step(store, last, t)
        for head, each in enumerate(rolls):
            window = [*range(n_sink), *range(last - n_recent, last + 1)]
            assert sorted(held(store)[head]) == (window if each else [*range(last + 1)])
        offsets = 4 * (H_KV + 1)
        assert store.ledger.entries[-1].resident_meta_bytes == offsets + 4 * H_KV, "and how many of a head are recent"


@given(st.data())
@settings(max_examples=60)
def test_heads_that_are_not_full_yet_grow_before_they_roll(data: st.DataObject) -> None:
    s, n_new = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 20))
    n_sink, n_recent = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 8))
    rolls = [data.draw(st.booleans()) for _ in range(H_KV)]
    store = Store(counting_trace(s), n_new)
    n_first = min(n_sink, s)
    n_latest = min(n_recent, s - n_first)
    rows = torch.tensor([*range(s - n_latest, s), *range(n_first)])
    room = max(0, n_sink + n_recent - s)
    latest = Rolls([n_latest if each else -1 for each in rolls], [room] * H_KV, max(0, n_sink - s))
    store.place(0, Ragged([rows if each else torch.arange(s) for each in rolls], latest))
    for t in range(1, n_new + 1):
        last = s + t - 1
        step(store, last, t)
        for head, each in enumerate(rolls):
            window = {*range(min(n_sink, last)), *range(max(0, last - n_recent), last + 1)}
            assert sorted(held(store)[head]) == (sorted(window) if each else [*range(last + 1)])


def test_the_strip_counts_what_each_head_attends_to() -> None:
    store = Store(counting_trace(10), 2)
    store.place(0, Ragged([torch.arange(10), torch.tensor([0, 9])]))
    step(store, 10, 1)
    assert attended_bins(store.layers.values(), 10) == [1.0, *[0.5] * 8, 1.0]


def test_attention_reads_no_spare_row() -> None:
    """A head that keeps nothing attends to generated tokens alone."""
    store = Store(counting_trace(8), 2)
    store.place(0, Ragged([torch.arange(8), torch.tensor([], dtype=torch.int64)]))
    store[0].append(token(8), -token(8))
    out = attend(torch.ones(1, H, 1, D), store[0].resident(), Softmax(0.1))
    assert torch.equal(out[0, H // 2 :], -token(8)[0, 1:].expand(H // 2, 1, D))
