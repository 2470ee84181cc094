"""`compose=kivi` with a method that retrieves: what lies on the host is codes, token by token."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.caches.packed_host import PackedHost, host_of
from kvbench.engine.caches.range_code import RangeCode
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.errors import ConfigError
from kvbench.engine.turns.state import fork_of
from kvbench.evals.cells import cell_without_task
from kvbench.evals.settings import from_words
from kvbench.kernels.packed.codes import quantise_tokens, rebuild_tokens
from kvbench.methods.quantising.hf_quantized_cache import HFQuantizedCache
from kvbench.methods.quantising.kivi import KIVI
from kvbench.methods.rules import Quantizer, planned
from kvbench.tests.conformance import answers, model, ours
from kvbench.tests.vectors import built, request, step, trace_of

FOUR, EIGHT = (Quantizer(KIVI, KIVI.Params(bits, bits, 8, 16)) for bits in (4, 8))
D = model().shape.d_h
EXACT, PACKED = 4 * D, D + D  # bytes of a token of a KV head: at 16 bits, at 4 in groups of 8
NAMES = ("pqcache", "clusterkv")


def composed(name: str, quantizer: Quantizer | None, asked: BudgetRequest, **params: Any) -> Any:
    """The method on the tiny model's prompt, composed or not."""
    one = ours(name)
    own = replace(one.params, **({"full_layers": 0} if one.kind.traits.skips else {}), **params)
    return one.kind.variant_for(own, asked, model().shape, 240, quantizer=quantizer)


@pytest.mark.parametrize("d_h, bits, group, expected", [(128, 4, 32, 160), (128, 2, 32, 96), (64, 4, 64, 72)])
def test_a_token_counts_its_codes_and_scales(d_h: int, bits: int, group: int, expected: int) -> None:
    assert RangeCode(bits, bits, group).token_bytes(d_h, d_h) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_rebuild_to_what_the_quantiser_makes(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 40, 16, dtype=dtype)
    trace = trace_of(k, v, 4)
    code = RangeCode(bits, bits, 8)
    host = built_host(trace, code)
    idx = torch.randint(0, 40, (1, 4, 7))
    part = host.tokens(idx, None, late=False)
    for found, x in ((part.k, k), (part.v, v)):
        made = rebuild_tokens(quantise_tokens(x[0], bits, 8), bits, 8)
        expected = torch.stack([made[head // 2, idx[0, head]] for head in range(4)])
        assert torch.equal(found[0], expected)


def built_host(trace: Any, code: TokenCode) -> PackedHost:
    host = host_of(trace, 0, code, 4)
    assert isinstance(host, PackedHost)
    return host


def test_fetched_tokens_are_rebuilt_and_resident_ones_exact() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 97, 16)
    trace, one = trace_of(k, v, 4, 96), ours("pqcache")
    variant = one.kind.variant_for(one.params, request(tokens=40, comm="1/16"), trace.shape, 96, quantizer=FOUR)
    row = built(variant.row(trace, 4))
    q = torch.randn(1, 4, 1, 16)
    out = step(row, q, k[:, :, 96:], v[:, :, 96:])
    (idx,) = row.store[0].fetched()
    assert idx.shape[-1] == row.plan.k
    exact = row.store[0].positions()
    made = [rebuild_tokens(quantise_tokens(x[0, :, :96], 4, 8), 4, 8) for x in (k, v)]
    for head in range(4):
        kv, far, near = head // 2, idx[0, head // 2], exact[0, head // 2]
        keys, values = (torch.cat([m[kv, far], x[0, kv, near]]) for m, x in zip(made, (k, v), strict=True))
        expected = ((q[0, head] @ keys.mT) * 0.25).softmax(-1) @ values
        torch.testing.assert_close(out[0, head], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_moved_and_host_bytes_are_those_of_codes(name: str) -> None:
    """Eight bits change few selections, and none of the first step in the first layer."""
    asked = BudgetRequest(Fraction(1, 5), None, Fraction(1, 16))
    exact, packed = answers([composed(name, quantizer, asked) for quantizer in (None, FOUR)])
    entries = [said.row.store.ledger.entries for said in (exact, packed)]
    for one, other in zip(*entries, strict=True):
        assert one.resident_host_bytes * PACKED == other.resident_host_bytes * EXACT
        assert one.moved_meta_bytes == other.moved_meta_bytes, "what is searched is as exact as ever"
        assert other.moved_kv_bytes % PACKED == 0
    first, same = entries[0][0], entries[1][0]
    assert first.moved_kv_bytes * PACKED == same.moved_kv_bytes * EXACT > 0
    assert first.resident_meta_bytes == same.resident_meta_bytes


@pytest.mark.parametrize("name", NAMES)
def test_the_buffer_holds_what_codes_are_rebuilt_to(name: str) -> None:
    asked = BudgetRequest(Fraction(1, 5), None, Fraction(1, 16))
    (said,) = answers([composed(name, FOUR, asked)])
    (exact,) = answers([composed(name, None, asked)])
    ledgers = [each.row.store.ledger for each in (said, exact)]
    assert ledgers[0].buffers()[0] == ledgers[1].buffers()[0] > 0, "nothing of the first step was there before"
    for entry in ledgers[0].entries:
        n_hits = entry.cache_hits if entry.cache_lookups else 0
        n_distinct = entry.moved_kv_bytes // PACKED + n_hits
        assert entry.moved_kv_bytes + entry.made_kv_bytes == n_distinct * EXACT


def test_tokens_that_leave_the_window_are_released_as_codes() -> None:
    asked = BudgetRequest(Fraction(1, 5), None, Fraction(1, 16))
    exact, packed = answers(
        [composed("pqcache", quantizer, asked, budget_rule="official") for quantizer in (None, FOUR)]
    )
    entries = [said.row.store.ledger.entries for said in (exact, packed)]
    saved = {(a.step > 1, a.released_bytes - b.released_bytes) for a, b in zip(*entries, strict=True)}
    assert saved == {(False, 0), (True, model().shape.h_kv * (EXACT - PACKED))}, "a token of each step but the first"


def test_generated_tokens_that_left_are_fetched_as_codes() -> None:
    """Clusters of 6 generated tokens leave at a time, and are all fetched: 8 bits change next to nothing."""
    asked = BudgetRequest(Fraction(239, 240), None, Fraction(1, 16))
    params = {"decode_period": 6, "decode_clusters": 2, "n_sink": 2}
    exact, packed = answers([composed("clusterkv", quantizer, asked, **params) for quantizer in (None, EIGHT)])
    assert any((idx >= 240).any() for step in packed.steps for idx in step.fetched), "no generated token was fetched"
    assert packed.ids == exact.ids


@pytest.mark.parametrize("name", NAMES)
def test_a_tier_of_codes_holds_the_bytes_alone_and_beside_others(name: str) -> None:
    asked = BudgetRequest(None, None, Fraction(1, 16), memory=Fraction(3, 4))
    variant = composed(name, FOUR, asked)
    (alone,) = answers([variant])
    beside = answers([composed(name, None, asked), variant])[1]
    assert alone.ids == beside.ids
    assert alone.row.store.ledger.within_memory(variant.budget, model().shape, with_index=True)


def test_recent_clusters_stay_as_codes_and_leave_room_for_more() -> None:
    asked = BudgetRequest(None, None, Fraction(1, 16), memory=Fraction(3, 4))
    plans = [composed("clusterkv", quantizer, asked, agg="group_mean").plan for quantizer in (None, FOUR)]
    assert plans[1].k > plans[0].k


def test_a_block_cache_holds_more_blocks_of_codes() -> None:
    asked, one = BudgetRequest(Fraction(1, 10), None, Fraction(1, 16), memory=Fraction(1, 2)), ours("pqcache")
    cache = BlockCacheSpec(240, 8, 4, "lfu")
    sizes = [
        planned(one.kind, one.params, asked, model().shape, 240, cache, quantizer=quantizer)[2]
        for quantizer in (None, FOUR)
    ]
    assert sizes[0] is not None and sizes[1] is not None and 0 < sizes[0].tokens < sizes[1].tokens <= 240


def test_going_back_forgets_what_was_written() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 100, 16)
    trace, one = trace_of(k, v, 4, 96), ours("pqcache")
    params = replace(one.params, budget_rule="official")
    variant = one.kind.variant_for(params, request(tokens=40, comm="1/16"), trace.shape, 96, quantizer=FOUR)
    with torch.inference_mode():
        row = built(variant.row(trace, 4))
        mark, q = fork_of(row), torch.randn(1, 4, 4, 16)

        def read(order: list[int]) -> list[torch.Tensor]:
            return [
                step(row, q[:, :, i : i + 1], k[:, :, 96 + i : 97 + i], v[:, :, 96 + i : 97 + i], t)
                for t, i in enumerate(order, 1)
            ]

        once = read([0, 1, 2])
        row = fork_of(mark)
        read([3, 2])
        row = fork_of(mark)
        assert all(torch.equal(a, b) for a, b in zip(once, read([0, 1, 2]), strict=True))


def test_the_whole_prompt_is_full_attention_with_nothing_on_the_host() -> None:
    whole = composed("pqcache", FOUR, BudgetRequest(Fraction(1), None, Fraction(0)))
    assert whole.is_full


@pytest.mark.parametrize(
    ("compose", "label"), [("kivi", "host 4 bit"), ("kivi_2bit", "host 2 bit"), ("hf_quantized_cache", "host 4 bit")]
)
def test_the_label_names_the_tier_and_its_bits(compose: str, label: str) -> None:
    settings = from_words(["method=pqcache", f"compose={compose}"])
    quantizer = cell_without_task(settings).quantizer
    assert quantizer is not None and quantizer.title(drops=False) == label


def test_a_quantiser_that_packs_no_single_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="use compose=kivi") as caught:
        settings = from_words(["method=pqcache", "compose=turboquant"])
        cell_without_task(settings)
    assert "\n" not in str(caught.value)


# --- compose_order -----------------------------------------------------------------------------


def test_quantise_first_scores_and_keeps_what_codes_give_back() -> None:
    """KeyDiff looks at keys alone: it keeps what it would keep of rebuilt keys, and packs those once more."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 96, 16)
    one, asked = ours("keydiff_kvpress"), request(tokens=48)
    quantizer = Quantizer(HFQuantizedCache, HFQuantizedCache.Params("quanto", 2, group=16, residual=128, axis_key=0))
    made_k, made_v = (rebuild_tokens(quantise_tokens(x[0], 2, 16), 2, 16).unsqueeze(0) for x in (k, v))

    def kept(k: torch.Tensor, v: torch.Tensor, quantizer: Quantizer) -> tuple[list[Any], torch.Tensor]:
        trace = trace_of(k, v, 4)
        row = built(one.kind.variant_for(one.params, asked, trace.shape, 96, quantizer=quantizer).row(trace, 4))
        return row.store[0].positions().tolist(), row.store[0].resident()[0].gathered().k

    first, rebuilt, last = (
        kept(k, v, quantizer._replace(first=True)),
        kept(made_k, made_v, quantizer),
        kept(k, v, quantizer),
    )
    assert first[0] == rebuilt[0] != last[0]
    assert torch.equal(first[1], rebuilt[1])


def test_quantise_first_leaves_what_the_prefill_observed() -> None:
    asked = BudgetRequest(Fraction(1, 2), None, Fraction(0))
    snapkv = ours("snapkv")
    first, last = answers([
        snapkv.kind.variant_for(snapkv.params, asked, model().shape, 240, quantizer=FOUR._replace(first=first))
        for first in (True, False)
    ])  # fmt: skip
    for a, b in zip(first.steps[:3], last.steps[:3], strict=True):
        assert torch.equal(a.resident, b.resident)
    values = [said.row.store[0].resident()[0].gathered().v for said in (first, last)]
    assert not torch.equal(*values), "values went through codes twice"


def test_both_orders_share_a_prefill_and_nothing_that_follows_from_keys() -> None:
    asked = BudgetRequest(Fraction(1, 2), None, Fraction(0))
    one = ours("keydiff_kvpress")
    variants = [
        one.kind.variant_for(one.params, asked, model().shape, 240, quantizer=FOUR._replace(first=first))
        for first in (True, False)
    ]
    together = answers(variants)
    assert [said.ids for said in together] == [answers([variant])[0].ids for variant in variants]
