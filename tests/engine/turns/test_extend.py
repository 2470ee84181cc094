"""Budgets that grow with a conversation: what a row holds once a feed is read."""

import pytest
import torch

from engine.turns.state import fork_of
from engine.turns.talk import Talk
from tests import conformance
from tests.conformance import read, variant
from tests.tiny import prompt
from tests.vectors import built, request

N_NEW = 60


def held(row: object, layer: int) -> set[tuple[int, int]]:
    """Pairs of KV head and position that lie on the device."""
    positions = row.store[layer].positions()[0]  # type: ignore[attr-defined]
    return {(head, int(n)) for head, own in enumerate(positions) for n in own}


@pytest.mark.parametrize("feed", ["compressed", "tokenwise"])
@pytest.mark.parametrize("name", ["snapkv", "h2o", "tova", "streamingllm", "keydiff", "knorm"])
def test_a_feed_is_held_within_the_budget_of_the_conversation(name: str, feed: str) -> None:
    one, model = conformance.ours(name), conformance.model()
    first = variant(one, "0.2")
    trace = read([first])
    with torch.inference_mode():
        row = built(first.row(trace, N_NEW))
    sizes = []
    with model.hooked():
        talk = Talk(model, trace, [row])
        for i, n in enumerate((20, 1, 15)):
            before = [held(row, layer) for layer in range(trace.shape.n_layers)]
            n_seen = talk.positions[0] + n
            grown = one.kind.variant_for(one.params, request("0.2", comm=one.comm), trace.shape, n_seen)
            answer = talk.answer(talk.read([prompt(n, i)], feed, [grown]), [4])[0]
            sizes.append(grown.budget.tokens)
            for layer, earlier in enumerate(before):
                now = {pair for pair in held(row, layer) if pair[1] < n_seen}
                new = {(head, at) for head in range(trace.shape.h_kv) for at in range(n_seen - n, n_seen)}
                assert now <= earlier | new, "what was dropped came back"
                assert len(now) <= sizes[-1] * trace.shape.h_kv or layer in row.skipped_layers()
                assert row.store[layer].n_seen == n_seen + 3
            assert len(answer.ids) == 4
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert row.store.ledger.rebuilt_bytes > 0


def test_snapkv_keeps_what_the_feed_looks_at_most() -> None:
    """The feed's last queries vote, and turned round they choose other tokens."""
    one, model = conformance.ours("snapkv"), conformance.model()
    first = variant(one, "0.3")
    trace = read([first])
    grown = one.kind.variant_for(one.params, request("0.3", comm=one.comm), trace.shape, trace.s_prompt)
    with torch.inference_mode(), model.hooked():
        row = built(first.row(trace, N_NEW))
        other = fork_of(row)
        talk = Talk(model, trace, [row, other])
        talk.read([prompt(20, 3), prompt(20, 3)])
        q = torch.randn(1, trace.shape.h, 20, trace.shape.d_h, generator=torch.Generator().manual_seed(1))
        keys, positions = row.store[0].keys(), row.store[0].positions()
        for each, queries in ((row, q), (other, -q)):
            change = each.extend(0, queries, grown)
            assert change is not None
            each.store.change_between(0, change)
    assert held(row, 0) != held(other, 0)
    w, g = min(grown.plan.window, 20), trace.shape.g
    logits = q[0, :, -w:].unflatten(0, (-1, g)) @ keys[0].mT.unsqueeze(1) * trace.softmax[0].scale
    n = keys.shape[2]
    coming = torch.arange(n) > torch.arange(n - w, n).unsqueeze(1)
    votes = logits.masked_fill(coming, -torch.inf).softmax(-1)[..., : n - w].sum(2).mean(1)
    pooled = torch.nn.functional.max_pool1d(votes, one.params.kernel, 1, one.params.kernel // 2)
    best = pooled.sort(dim=-1, descending=True, stable=True).indices[:, : grown.plan.cap - w]
    expected = {(head, int(positions[0, head, i])) for head, own in enumerate(best) for i in own}
    last = {(head, int(x)) for head in range(trace.shape.h_kv) for x in positions[0, head, n - w :]}
    assert held(row, 0) == expected | last


@pytest.mark.parametrize("feed", ["compressed", "tokenwise"])
def test_what_fetches_lets_the_growth_go_to_what_it_fetches(feed: str) -> None:
    """At every step it attends to the budget of the conversation, a turn's later tokens included."""
    one, model = conformance.ours("oracle"), conformance.model()
    first = variant(one, "0.2")
    trace = read([first])
    with torch.inference_mode():
        row = built(first.row(trace, N_NEW))
    budgets = [first.budget.tokens]
    with model.hooked():
        talk = Talk(model, trace, [row])
        for i, n in enumerate((20, 1, 25)):
            grown = one.kind.variant_for(one.params, request("0.2", comm=one.comm), trace.shape, talk.positions[0] + n)
            logits = talk.read([prompt(n, i)], feed, [grown])
            budgets.append(grown.budget.tokens)
            n_before = len(row.store.ledger.entries)
            talk.answer(logits, [4])
            entries = row.store.ledger.entries[n_before:]
            assert len(entries) == 3 * trace.shape.n_layers
            assert {entry.attended for entry in entries} == {trace.shape.h * budgets[-1]}
    assert budgets == sorted(budgets) and budgets[0] + 8 < budgets[-1]
