"""`compose=kivi`: what a dropping method keeps becomes codes."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals.cells import cell_without_task
from kvbench.evals.settings import from_words
from kvbench.kernels.packed.codes import quantise_channels, quantise_tokens, rebuild_channels, rebuild_tokens
from kvbench.methods.combinations import UNCODABLE, Case, why
from kvbench.methods.quantising.kivi import KIVI
from kvbench.methods.rules import Quantizer, planned
from kvbench.tests.conformance import answers, model, ours
from kvbench.tests.vectors import built, step, trace_of

SNAPKV = ours("snapkv")
LARGE, SMALL = ModelShape("l", 1, 32, 8, 128, 1 << 20, (0,)), ModelShape("s", 1, 9, 3, 64, 1 << 20, (0,))


def in_bytes(memory: str, ratio: str | None = None) -> BudgetRequest:
    exact = None if ratio is None else Fraction(ratio)
    return BudgetRequest(exact, None, Fraction(0), memory=Fraction(memory))


@pytest.mark.parametrize(
    ("shape", "s", "bits", "residual", "tokens"),
    [
        (LARGE, 10_000, 4, 128, (7832, 3849, 1824)),
        (LARGE, 10_000, 4, 32, (7949, 3949, 1958)),
        (LARGE, 10_000, 2, 32, (10_000, 6593, 3264)),
        (SMALL, 2000, 4, 32, (1549, 749, 358)),
        (SMALL, 2000, 2, 32, (2000, 1253, 582)),
    ],
)
def test_tokens_follow_from_memory_and_bits(
    shape: ModelShape, s: int, bits: Any, residual: int, tokens: tuple[int, int, int]
) -> None:
    quantizer = Quantizer(KIVI, KIVI.Params(bits, bits, 32, residual))
    for memory, n in zip(("1/4", "1/8", "1/16"), tokens, strict=True):
        budget, _, _ = planned(SNAPKV.kind, SNAPKV.params, in_bytes(memory), shape, s, quantizer=quantizer)
        assert budget.tokens == n, (memory, budget.tokens)


def test_memory_follows_from_ratio_and_bits() -> None:
    quantizer = Quantizer(KIVI, KIVI.Params(4, 4, 32, 128))
    half = BudgetRequest(Fraction(1, 2), None, Fraction(0))
    budget, _, _ = planned(SNAPKV.kind, SNAPKV.params, half, LARGE, 10_000, quantizer=quantizer)
    plan = KIVI.plan_for(quantizer.params, budget, LARGE)
    assert KIVI.code_bytes(plan, budget.tokens, LARGE) == 6_591_488


@pytest.mark.parametrize("name", ["snapkv", "h2o", "keydiff_kvpress", "lagkv"])
def test_a_composition_decodes_within_its_bytes(name: str) -> None:
    one = ours(name)
    quantizer = Quantizer(KIVI, KIVI.Params(4, 4, 8, 16))
    if why(UNCODABLE, Case(one.kind, one.params)):
        pytest.skip(why(UNCODABLE, Case(one.kind, one.params)))
    variant = one.kind.variant_for(one.params, in_bytes("2/5"), model().shape, 240, quantizer=quantizer)
    (said,) = answers([variant])
    ledger = said.row.store.ledger
    assert ledger.within_memory(variant.budget, model().shape, with_index=False)
    assert variant.budget.tokens > 96, "codes make room for more tokens"
    assert {entry.attended for entry in ledger.entries if entry.step == 3} == {6 * (variant.budget.tokens + 3)}


def test_the_whole_memory_is_exact() -> None:
    quantizer = Quantizer(KIVI, KIVI.Params(2, 2, 8, 16))
    variant = SNAPKV.kind.variant_for(SNAPKV.params, in_bytes("1"), model().shape, 240, quantizer=quantizer)
    assert variant.is_full
    alike = SNAPKV.kind.variant_for(SNAPKV.params, BudgetRequest(Fraction(1), None, Fraction(0)), model().shape, 240)
    said, full = answers([variant, alike])
    assert said.ids == full.ids


def test_selection_is_on_exact_keys_and_codes_are_of_kept_tokens_in_order() -> None:
    streaming = ours("streamingllm")
    params = type(streaming.params)(4, "on_top", "original")
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 96, 16)
    trace, request = trace_of(k, v, 4), BudgetRequest(None, 48, Fraction(0))
    quantizer = Quantizer(KIVI, KIVI.Params(4, 4, 16, 16))
    variant = streaming.kind.variant_for(params, request, trace.shape, 96, quantizer=quantizer)
    row = built(variant.row(trace, 4))
    kept = torch.cat([torch.arange(4), torch.arange(52, 96)])
    assert row.store[0].positions()[0, 0].tolist() == kept.tolist()
    keys = rebuild_channels(quantise_channels(k[0][:, kept], 4, 16), 4, 16)
    values = torch.cat([rebuild_tokens(quantise_tokens(v[0][:, kept[:32]], 4, 16), 4, 16), v[0][:, kept[32:]]], 1)
    q = torch.randn(1, 4, 1, 16)
    out = step(row, q, k[:, :, :1], v[:, :, :1])
    keys, values = (torch.cat([x, y[0, :, :1]], 1).repeat_interleave(2, 0) for x, y in ((keys, k), (values, v)))
    expected = ((q[0] @ keys.mT) * 16**-0.5).softmax(-1) @ values
    torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=kivi", "ratio=1", "compose=kivi"], "nothing is packed twice"),
        (["method=sparq", "compose=kivi"], "SPARQ drops no tokens"),
        (["method=pqcache", "compose=kivi", "compose_order=quantise_first"], "PQCache drops none"),
        (["method=snapkv", "compose_order=quantise_first"], "means nothing without compose"),
        (["method=snapkv", "compose=kivi", "compose_order=last"], "compose_order=last"),
        (["method=snapkv", "compose=snapkv"], "makes no codes"),
        (["method=snapkv_paper", "compose=kivi"], "each query head keeps tokens of its own"),
        (["method=tova", "compose=kivi"], "TOVA evicts while it decodes"),
        (["method=pyramidkv", "compose=kivi"], "other numbers of tokens"),
        (["method=streamingllm", "compose=kivi"], "use method.generated=on_top"),
        (["method=snapkv", "compose=kivvi"], "kivvi"),
    ],
)
def test_what_cannot_be_composed_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        settings = from_words(words)
        cell_without_task(settings)
    assert "\n" not in str(caught.value)


def test_a_preset_has_its_own_bits() -> None:
    settings = from_words(["method=snapkv", "compose=kivi_2bit", "memory=1/8"])
    quantizer = cell_without_task(settings).quantizer
    assert quantizer is not None and quantizer.title(drops=True) == "KIVI 2 bit"
    assert settings.resolved()["compose"]["params"]["key_bits"] == 2
