"""A prompt read in chunks with eviction between them, against masks over all of its tokens and against decoding."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import EVERYTHING, BudgetRequest
from kvbench.engine.causal import causal
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.observe import ColumnSums
from kvbench.engine.passes import evicting
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.evals.cells import ask
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.combinations import UNREADABLE, Case, why
from kvbench.tests.conformance import ours
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.tiny_run import cell, run, save_tiny, sweep

S, N, CHUNK, N_NEW = 90, 24, 16, 6
BUDGET = BudgetRequest(None, N, Fraction(0), False)
READABLE = {
    "h2o": {"n_sink": 2}, "streamingllm": {"n_sink": 2}, "tova": {}, "knorm": {"full_layers": 1}, "keydiff": {},
    "qfilters": {}, "dms": {"window": 5}, "dms_kvzap": {"window": 5},
}  # fmt: skip


def variant_of(name: str, model: Model, s: int = S, **changes: Any) -> Variant:
    one = ours(name)
    params = replace(one.params, **READABLE[name], **changes, **(one.kind.traits.in_chunks or {}))
    assert why(UNREADABLE, Case(one.kind, params)) == ""
    request = EVERYTHING if one.kind.traits_of(params).adapts else BUDGET
    if hasattr(params, "threshold"):  # half of all tokens
        params = replace(params, threshold=middle(model, params))
    return one.kind.variant_for(params, request, model.shape, s)


def middle(model: Model, params: Any) -> float:
    """The median of what the scorer says of the prompt's tokens."""
    variant = ours("dms").kind.variant_for(params, EVERYTHING, model.shape, S)
    with model.hooked():
        trace = prefill(model, prompt(S), variant.observations)
    row: Any = variant.row(trace, 0)
    return torch.cat([row.inner.shared_scores(i).flatten() for i in model.shape.attention_layers]).median().item()


def read(model: Model, variant: Variant, ids: list[int], chunk: int) -> tuple[Trace, SelectiveAttention]:
    rows: list[SelectiveAttention] = []

    def build(trace: Trace, layer: int) -> None:
        if not rows:
            rows.append(variant.row(trace, N_NEW))
        trace.hold(layer)
        rows[0].build(layer)

    with model.hooked():
        trace = prefill(model, ids, variant.observations, build, chunk=chunk, evicts=variant)
    rows[0].complete()
    return trace, rows[0]


class Masked:
    """Attention of the whole prompt at once, where each query sees what it saw in its chunk."""

    def __init__(self, model: Model, seen: dict[int, Tensor]) -> None:
        self.shape, self.seen = model.shape, seen
        self.tokens: dict[int, tuple[Tensor, Tensor]] = {}
        self.weights: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Any, window: Any) -> Tensor:
        if layer not in self.seen:
            return causal(q, k, v, softmax, window)[0]
        g = q.shape[1] // k.shape[1]
        self.tokens[layer] = k, v
        logits = softmax.logits(q, k.repeat_interleave(g, 1)).double()
        logits = logits.masked_fill(~self.seen[layer].repeat_interleave(g, 0), -torch.inf)
        self.weights[layer] = logits.softmax(-1)
        return (self.weights[layer] @ v.repeat_interleave(g, 1).double()).to(q.dtype)


@contextmanager
def noting(seen: dict[int, Tensor], delay: int | None, chunk: int) -> Iterator[None]:
    """Write down which tokens each query of each layer and KV head sees: (h_kv, S, S) bool."""
    take_in, goes = evicting.Evicting.take_in, evicting.Evicting.goes

    def noted(self: Any, layer: int, k: Tensor, v: Tensor, softmax: Any) -> int:
        held = take_in(self, layer, k, v, softmax)
        mask = seen.setdefault(layer, torch.zeros(k.shape[1], S, S, dtype=torch.bool))
        for head, positions in enumerate(self.trace.slots[layer][0].tolist()):
            for i in range(self.start, self.start + k.shape[2]):
                mask[head, i, [p for p in positions if 0 <= p <= i]] = True
        return held

    def hiding(self: Any, layer: int) -> Tensor:
        found = goes(self, layer)
        for head, positions in enumerate(self.trace.slots[layer][0].tolist()):
            for slot, p in enumerate(positions):
                if p >= 0 and bool(found[head, slot]):
                    seen[layer][head, max(self.start, p + delay + 1) : self.start + chunk, p] = False
        return found

    evicting.Evicting.take_in, evicting.Evicting.goes = noted, hiding  # type: ignore[method-assign]
    try:
        yield
    finally:
        evicting.Evicting.take_in, evicting.Evicting.goes = take_in, goes  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("name", READABLE)
def test_a_chunk_sees_what_is_held_and_its_own_past(name: str, kind: str) -> None:
    model, ids = tiny(kind), prompt(S)
    variant, seen = variant_of(name, model), dict[int, Tensor]()
    with noting(seen, READABLE[name].get("window"), CHUNK):
        trace, row = read(model, variant, ids, CHUNK)
    at_once = Masked(model, seen)
    with model.hooked():
        logits = model.forward(torch.tensor([ids]), 0, model.new_cache(), at_once)[0]  # type: ignore[arg-type]
    torch.testing.assert_close(trace.logits, logits, rtol=1e-4, atol=1e-4)
    shrunk = 0
    for layer in model.shape.attention_layers:
        at = row.store[layer]
        positions = at.positions()
        for head in range(model.shape.h_kv):
            own = positions[0, head][positions[0, head] >= 0]
            shrunk += len(own) < S
            assert len(set(own.tolist())) == len(own), "a token is held twice"
            for found, whole in zip(held_of(at, head), at_once.tokens[layer], strict=True):
                torch.testing.assert_close(found, whole[0, head][own], rtol=1e-4, atol=1e-4)
    assert shrunk
    if name == "h2o":
        for layer in model.shape.attention_layers:
            sums = at_once.weights[layer][0].sum(1).unflatten(0, (model.shape.h_kv, -1)).sum(1)
            own = sums.gather(-1, row.store[layer].positions()[0]).float()
            torch.testing.assert_close(row.sums[layer][0], own, rtol=1e-4, atol=1e-4)  # type: ignore[attr-defined]
    counted = {layer: mask.double().sum((1, 2)).mean().item() / (S * (S + 1) / 2) for layer, mask in seen.items()}
    assert trace.layer_shares() == pytest.approx([counted[i] for i in model.shape.attention_layers], abs=0.01)


def held_of(at: Any, head: int) -> tuple[Tensor, Tensor]:
    """K and V of a head's tokens, slot by slot."""
    if not hasattr(at, "spans"):
        k, v = at.tokens()
        return k[0, head], v[0, head]
    (view, *others), start = at.resident(), int(at.spans.starts[head])
    rows = slice(start, start + int(at.spans.counts[head]))
    parts = [(view.k[0, 0, rows], view.v[0, 0, rows]), *((part.k[0, head], part.v[0, head]) for part in others)]
    return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("h2o", {}),
        ("tova", {}),
        ("keydiff", {"evict": "always"}),
        ("knorm", {"every": 1}),
        ("qfilters", {"evict": "always"}),
    ],
)
def test_with_chunks_of_one_token_it_is_what_the_method_does_while_it_decodes(name: str, changes: Any) -> None:
    model, ids = tiny(), prompt(S)
    trace, row = read(model, variant_of(name, model, **changes), ids, 1)
    # The first tokens fill the budget, and the others are fed as if they were an answer.
    first = variant_of(name, model, **changes)
    rows = list[SelectiveAttention]()

    def build(there: Trace, layer: int) -> None:
        if not rows:
            rows.append(first.row(there, S))
        rows[0].build(layer)

    with model.hooked():
        start = prefill(model, ids[: N + 1], first.observations, build)
        rows[0].complete()
        last: list[Tensor] = []
        decode(model, start, rows, max_new_tokens=0, feed=ids[N + 1 :], watch=Last(last))
    torch.testing.assert_close(trace.logits, last[-1], rtol=1e-4, atol=1e-4)
    for layer in model.shape.attention_layers:
        found, wanted = (each.store[layer].positions().sort(dim=-1).values for each in (row, rows[0]))
        assert torch.equal(found, wanted), f"layer {layer}"


class Last:
    """Keeps the logits of every step."""

    def __init__(self, found: list[Tensor]) -> None:
        self.found = found

    def attended(self, layer: int, order: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Nothing is asked of a layer."""

    def predicted(self, order: Any, logits: Tensor) -> None:
        self.found.append(logits[0].clone())


@pytest.mark.parametrize("name", ["dms", "dms_kvzap"])
def test_what_is_judged_token_by_token_does_not_depend_on_the_chunks(name: str) -> None:
    model, ids = tiny(), prompt(S)
    variant = variant_of(name, model)
    (one, row), *others = (read(model, variant, ids, chunk) for chunk in (7, 16, 31, S))
    for trace, other in others:
        torch.testing.assert_close(trace.logits, one.logits, rtol=1e-4, atol=1e-4)
        for layer in model.shape.attention_layers:
            assert row.store[layer].kept_counts() == other.store[layer].kept_counts()
    assert len({n for layer in model.shape.attention_layers for n in row.store[layer].kept_counts()}) > 1


@pytest.mark.parametrize("name", ["h2o", "streamingllm", "tova", "keydiff"])
def test_no_more_than_the_budget_and_a_chunk_is_held_at_once(name: str) -> None:
    model = tiny()
    n_layers = len(model.shape.attention_layers)
    trace, row = read(model, variant_of(name, model), prompt(S), CHUNK)
    held = row.store[0].positions().shape[-1]
    assert trace.peak_tokens == n_layers * held + CHUNK
    with model.hooked():
        assert prefill(model, prompt(S)).peak_tokens == n_layers * S


@pytest.mark.parametrize("name", READABLE)
def test_the_answer_goes_on_from_the_prompts_true_end(name: str) -> None:
    """Decoded tokens stand at positions behind all that was read, and the books count tokens of the whole text."""
    model, ids = tiny(), prompt(S)
    trace, row = read(model, variant_of(name, model), ids, CHUNK)
    assert trace.s_prompt == trace.n_read == S
    with model.hooked():
        decode(model, trace, [row], max_new_tokens=N_NEW)
    for layer in model.shape.attention_layers:
        at = row.store[layer]
        assert at.n_seen == S + N_NEW - 1 and at.s_prompt == S
        assert int(at.positions().max()) <= S + N_NEW - 2
    assert {entry.tokens for entry in row.store.ledger.entries if entry.layer == 0} == set(range(S + 1, S + N_NEW))
    for layer in model.shape.attention_layers:
        assert row.store.attended(layer).shape[1] == S + N_NEW - 1


def test_a_chunk_as_long_as_the_prompt_is_an_exact_pass() -> None:
    model, ids = tiny(), prompt(S)
    variant = variant_of("h2o", model)
    trace, row = read(model, variant, ids, S)
    rows: list[SelectiveAttention] = []

    def build(there: Trace, layer: int) -> None:
        if not rows:
            rows.append(variant.row(there, N_NEW))
        rows[0].build(layer)

    with model.hooked():
        exact = prefill(model, ids, [ColumnSums()], build)
    torch.testing.assert_close(trace.logits, exact.logits, rtol=1e-5, atol=1e-5)
    for layer in model.shape.attention_layers:
        assert torch.equal(row.store[layer].positions(), rows[0].store[layer].positions())


# Runs.

WORDS = ["task=needle", "task.source=embedded", "task.lengths=[400]", "task.depths=[50]", "task.max_new_tokens=4"]


def words_for(folder: Path, *others: str) -> list[str]:
    return [f"model.id={folder}", "model=any", "model.name=tiny", *WORDS, *others]


def test_a_run_is_marked_and_counts_its_peak(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    plain = words_for(folder, "ratio=0.25", "comm=0")
    evicted = ["prefill.evict=true", "prefill.chunk=64"]
    (h2o, (row,)), (exact, (other,)) = (
        run([*plain, "method=h2o", *more], tmp_path / str(i)) for i, more in enumerate((evicted, []))
    )
    assert h2o.method_label == "H2O, in chunks of 64" and exact.method_label == "H2O"
    assert (h2o.prefill, h2o.prefill_params) == ("evict", {"chunk": 64}) and exact.prefill == "exact"
    assert any("prompt was read in chunks of 64" in note for note in h2o.notes)
    assert row.fields["prefill_share"] < 1 and "prefill_share" not in other.fields
    token = 2 * 2 * 8 * 2  # K and V of two KV heads of 8 numbers, at 16 bits
    n_layers, s = len(h2o.compressed_layers), other.prompt_tokens
    assert other.ledger["bytes_prefill_peak"] == n_layers * s * token
    assert row.ledger["bytes_prefill_peak"] == (n_layers * int(row.ledger["tokens_budget"] or 0) + 64) * token
    assert h2o.bytes_prefill_peak == row.ledger["bytes_prefill_peak"]
    assert row.ledger["bytes_resident_device"] == other.ledger["bytes_resident_device"]


def test_full_attention_reads_exactly_beside_it_and_serves_as_its_reference(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    words = words_for(folder, "ratio=0.25", "prefill.evict=true")
    done = sweep(words, [[f"method={name}"] for name in ("full", "streamingllm", "tova")], tmp_path / "out")
    full, streaming, tova = (result for result, _ in done)
    assert full.prefill == "exact" and streaming.prefill == tova.prefill == "evict"
    assert streaming.prefill_params == {"chunk": 512}
    alone, _ = run([*words, "method=tova"], tmp_path / "alone")
    assert alone.score == tova.score and alone.config_hash == tova.config_hash


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["method=snapkv"], "method=snapkv cannot: SnapKV chooses by the whole prompt"),
        (["method=quest"], "method=quest cannot: Quest drops no tokens"),
        (["method=pyramidinfer"], "has a prefill of its own"),
        (["method=h2o_decode"], "compresses while it answers"),
        (["method=h2o", "method.reduce=query_head", "method.generated=on_top"], "each query head keeps tokens"),
        (["method=h2o", "method.generated=on_top", "allocator=pyramid"], "allocator=pyramid gives layers or heads"),
        (["method=knorm", "compose=kivi"], "compose=kivi makes codes of what an exact pass leaves"),
        (["method=knorm", "positions=contiguous"], "positions and dropped change keys and values"),
        (["method=dms", "method.scorer=snapkv", "method.decode=false"], "SnapKV judges a token by others"),
        (["method=streamingllm", "method.position=cache"], "use method.position=original"),
        (["method=h2o", "prefill.evict=maybe"], "prefill.evict"),
        (["method=h2o", "prefill.chunk=0"], "prefill.chunk=0 is out of range"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(words: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        ask([cell(["ratio=0.25", "prefill.evict=true", *WORDS, *words], tmp_path)])


def test_blocks_that_are_read_want_a_prompt_in_chunks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("give prefill.evict=true")):
        ask([cell(["ratio=0.25", "method=keydiff", "method.blocks=read", *WORDS], tmp_path)])
