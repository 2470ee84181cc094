import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.engine.caches.host import Host
from kvbench.engine.layouts.slots import Slots, moves
from kvbench.engine.placement import Evict, Kept, Made, Offloaded, Stay, Whole
from kvbench.engine.store import Store
from kvbench.tests.engine.test_store import H_KV, D, H, counting_trace, feed, positions, token


def per_head(layer: Slots) -> list[list[int]]:
    """Which positions the slots of each KV head hold, by the numbers in them; `positions` must say the same."""
    (part,) = layer.resident()
    held = [positions(part, head) for head in range(H_KV)]
    assert layer.positions()[0].tolist() == held
    return held


@given(st.data())
@settings(max_examples=80)
def test_any_slots_of_a_head_can_be_evicted_at_once_in_any_order(data: st.DataObject) -> None:
    n_kept, n_new = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 6))
    store = Store(counting_trace(10), n_new + 2)
    store.place(0, Kept(torch.arange(n_kept).expand(1, H_KV, -1)))
    feed(store, n_new - 1, 10)
    layer, last = store[0], 9 + n_new
    layer.append(token(last), -token(last))
    before, n = per_head(layer), n_kept + n_new
    k = data.draw(st.integers(1, n))
    draws = [data.draw(st.permutations(range(n)))[:k] for _ in range(H_KV)]
    store.change(0, Evict(torch.tensor([draws])))
    after = per_head(layer)
    for head, slots in enumerate(draws):
        gone = [before[head][slot] for slot in slots]
        assert sorted(after[head] + gone) == sorted(before[head])
        for slot in set(range(n - k)) - set(slots):
            assert after[head][slot] == before[head][slot], "a token moved that need not"
    assert store.attended(0)[:, [*range(n_kept), *range(10, last + 1)]].all()
    store.close(0)
    assert store.ledger.entries[-1].attended == H * n, "the step attended to those that left"
    layer.append(token(last + 1), -token(last + 1))
    assert per_head(layer) == [[*held, last + 1] for held in after]


def test_the_newest_token_takes_the_slot_of_the_one_that_leaves() -> None:
    store = Store(counting_trace(10), 4)
    store.place(0, Kept(torch.tensor([[[1, 5, 9], [2, 6, 8]]])))
    store[0].append(token(10), -token(10))
    store.change(0, Evict(torch.tensor([[[0], [2]]])))
    assert per_head(store[0]) == [[10, 5, 9], [2, 6, 10]]
    assert store.attended(0)[0].nonzero().flatten().tolist() == [1, 5, 9, 10]


def test_tokens_at_the_end_that_stay_fill_the_slots_in_front_of_them() -> None:
    holes, order = moves(torch.tensor([[[5, 0, 2], [3, 4, 5]]]), 6)
    assert order is not None
    assert holes.tolist() == [[[0, 2, 5], [3, 4, 5]]]
    assert (order + 3).tolist() == [[[3, 4, 5], [3, 4, 5]]]


def test_dropping_all_but_some_slots_ends_a_view_of_the_prompt() -> None:
    store = Store(counting_trace(6), 4)
    store.place(0, Whole())
    feed(store, 1, 6)
    store[0].append(token(7), -token(7))
    allocated = store.allocated_bytes()
    store.change(0, Stay(torch.tensor([0, 4, 6, 7]).expand(1, H_KV, -1)))
    assert per_head(store[0]) == [[0, 4, 6, 7]] * H_KV
    assert store.attended(0).all(), "the step attended to all of them"
    assert store.allocated_bytes() == allocated - 4 * 2 * H_KV * D * 4  # float32
    store.close(0)
    store[0].append(token(8), -token(8))
    assert per_head(store[0]) == [[0, 4, 6, 7, 8]] * H_KV


def test_kept_tokens_need_not_be_rows_of_the_trace() -> None:
    k, v = torch.randn(1, H_KV, 3, D), torch.randn(1, H_KV, 3, D)
    store = Store(counting_trace(20), 2)
    store.place(0, Made(k, v, torch.tensor([[[0, 7, 9]] * H_KV])))
    store[0].append(token(20), -token(20))
    (part,) = store[0].resident()
    assert torch.equal(part.k, torch.cat([k, token(20)], 2))
    assert torch.equal(part.v, torch.cat([v, -token(20)], 2))
    assert store[0].attended()[0].nonzero().flatten().tolist() == [0, 7, 9, 20]


def test_slots_that_no_query_head_sees_are_off_the_books() -> None:
    """Query heads of the first KV head see two kept tokens and one, those of the second one and the same one."""
    mask = torch.tensor([[[True, True], [True, False], [True, False], [True, False]]])
    store = Store(counting_trace(10), 2)
    store.place(0, Kept(torch.tensor([[[3, 5], [3, 3], [4, 4], [4, 4]]])))
    assert store[0].mask is not None and torch.equal(store[0].mask[..., :2], mask)
    feed(store, 1, 10)
    (entry,) = store.ledger.entries
    assert entry.resident_meta_bytes == 1, "which of two tokens each of four query heads sees, a bit each"
    assert entry.attended == 2 + 1 + 1 + 1 + H
    assert entry.resident_kv_bytes == (2 + 1 + H_KV) * 2 * D * 2
    assert int(store.attended(0).sum()) == entry.attended


@pytest.mark.parametrize("change", [Evict, Stay])
def test_a_layer_with_a_host_drops_nothing(change: type[Evict] | type[Stay]) -> None:
    store = Store(counting_trace(10), 2)
    store.place(0, Offloaded(2, 2))
    store[0].append(token(10), -token(10))
    with pytest.raises(AssertionError, match="drops no tokens"):
        store.change(0, change(torch.tensor([[[0]] * H_KV])))


def test_the_host_gives_rows_of_the_prompt_and_of_what_came_behind_it() -> None:
    prompt = torch.cat([token(i) for i in range(5)], 2)
    host = Host(prompt, -prompt, 3)
    for t in range(2):
        host.late[0][:, :, t : t + 1], host.late[1][:, :, t : t + 1] = token(5 + t), -token(5 + t)
    assert positions(host.tokens(torch.tensor([[[6, 2, 5]] * H_KV]), None, late=True)) == [6, 2, 5]
    assert host.tokens(torch.tensor([[[1, 2]] * H_KV]), None, late=False).late is None
