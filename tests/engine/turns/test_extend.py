"""Budgets that grow with a conversation: what a row holds once a feed is read."""

import pytest
import torch

from kvbench.engine.batch import Batch
from kvbench.engine.turns.state import fork_of
from kvbench.tests import conformance
from kvbench.tests.conformance import read, variant
from kvbench.tests.tiny import prompt
from kvbench.tests.vectors import built, request

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
        batch = Batch(model, trace, [row])
        for i, n in enumerate((20, 1, 15)):
            before = [held(row, layer) for layer in range(trace.shape.n_layers)]
            n_seen = batch.positions[0] + n
            grown = one.kind.variant_for(one.params, request("0.2", comm=one.comm), trace.shape, n_seen)
            answer = batch.answer(batch.read([prompt(n, i)], feed, [grown]), [4])[0]
            sizes.append(grown.budget.tokens)
            for layer, earlier in enumerate(before):
                now = {pair for pair in held(row, layer) if pair[1] < n_seen}
                new = {(head, at) for head in range(trace.shape.h_kv) for at in range(n_seen - n, n_seen)}
                assert now <= earlier | new, "what was dropped came back"
                assert len(now) <= sizes[-1] * trace.shape.h_kv or layer in row.skipped
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
        batch = Batch(model, trace, [row, other])
        batch.read([prompt(20, 3), prompt(20, 3)])
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


# What holds a conversation's budget by fetching more: its settings, and whether an answer's tokens come on top of it.
FETCHING: dict[str, tuple[list[str], int]] = {
    "oracle": ([], 0),
    "oracle ": (["method.generated=on_top"], 1),
    "sparq": ([], 1),
    "sparq ": (["method.generated=inside"], 0),
    "pqcache": ([], 0),  # `comm` pays for codes of more tokens, so that its window slides
    "pqcache ": ([], 1),  # with `LONG` to come, its window grows
    "double_sparsity": (["method.generated=compete"], 1),
    "loki": (["method.generated=compete"], 1),
    "quest": (["method.page_generated=true"], 0),
    "infllm": ([], 1),
}
LONG = 200
WHOLE_UNITS = ("quest", "infllm")  # fetch pages and blocks, up to the budget


@pytest.mark.parametrize("feed", ["compressed", "tokenwise"])
@pytest.mark.parametrize("name", FETCHING)
def test_what_fetches_lets_the_growth_go_to_what_it_fetches(name: str, feed: str) -> None:
    """At every step it attends to the budget of the conversation, and to the answer so far where that comes on top."""
    words, on_top = FETCHING[name]
    one, model = conformance.ours(name.strip(), *words), conformance.model()
    first = variant(one, "0.4")
    trace = read([first])
    with torch.inference_mode():
        row = built(first.row(trace, LONG if name == "pqcache " else N_NEW))
    layers = [layer for layer in trace.shape.attention_layers if layer not in row.skipped]
    budgets, fetched = [first.budget.tokens], set[int]()
    with model.hooked():
        batch = Batch(model, trace, [row])
        for i, n in enumerate((20, 1, 25)):
            n_seen = batch.positions[0] + n
            grown = one.kind.variant_for(one.params, request("0.4", comm=one.comm), trace.shape, n_seen)
            logits = batch.read([prompt(n, i)], feed, [grown])
            budgets.append(grown.budget.tokens)
            n_before = len(row.store.ledger.entries)
            batch.answer(logits, [4])
            entries = [each for each in row.store.ledger.entries[n_before:] if each.layer in layers]
            assert len(entries) == 3 * len(layers)
            attended = [entry.attended / trace.shape.h for entry in entries]
            allowed = [budgets[-1] + on_top * t for t in (1, 2, 3) for _ in layers]
            if name.strip() in WHOLE_UNITS:
                assert all(a <= b for a, b in zip(attended, allowed, strict=True)), (attended, allowed)
            else:
                assert attended == allowed
            fetched |= {int(x) for layer in layers for idx in row.store[layer].fetched() for x in idx.flatten()}
    assert budgets == sorted(budgets) and budgets[0] + 8 < budgets[-1]
    for layer in layers:
        at = row.store[layer]
        assert at.n_window < at.n_latest + at.n_seen - trace.s_prompt, "all that was read is still in the window"
    if name != "infllm":  # whose new block is not among the best here
        assert any(at >= trace.s_prompt for at in fetched), "no token of a feed was fetched"


@pytest.mark.parametrize("name", FETCHING)
def test_a_growing_row_says_the_same_however_its_feeds_are_read(name: str) -> None:
    words, _ = FETCHING[name]
    one, model = conformance.ours(name.strip(), *words), conformance.model()
    first = variant(one, "0.4")
    trace = read([first])
    said = []
    for feed in ("compressed", "tokenwise"):
        with torch.inference_mode():
            row = built(first.row(trace, LONG if name == "pqcache " else N_NEW))
        with model.hooked():
            batch = Batch(model, trace, [row])
            for i, n in enumerate((20, 3, 15)):
                n_seen = batch.positions[0] + n
                grown = one.kind.variant_for(one.params, request("0.4", comm=one.comm), trace.shape, n_seen)
                batch.read([prompt(n, i)], feed, [grown])
            said.append((batch.answer(batch.read([prompt(2, 9)], feed), [6])[0].ids, row.plan))
    assert said[0] == said[1]
