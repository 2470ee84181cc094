"""`compose=fp8`, `compose=nvfp4`: behind methods that drop, evenly or not, and on the host of those that fetch."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.caches.packed_host import PackedHost, host_of
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.quantized import RaggedQuantizedLayer
from kvbench.engine.model import Model
from kvbench.evals.cells import cell_without_task
from kvbench.evals.settings import from_words
from kvbench.methods.quantising.fp8 import FP8
from kvbench.methods.quantising.mxfp4 import MXFP4
from kvbench.methods.quantising.nvfp4 import NVFP4
from kvbench.methods.rules import Quantizer
from kvbench.tests import conformance
from kvbench.tests.conformance import answers, ours, subject
from kvbench.tests.tiny import CONFIGS, tiny
from kvbench.tests.vectors import trace_of

PARAMS = FP8.Params("e4m3", "one", "prompt", "top", (), 0, "exact")
QUANTIZERS = {
    **{scale: Quantizer(FP8, replace(PARAMS, scale=scale)) for scale in ("one", "tensor", "head", "token_head")},
    "nvfp4": Quantizer(NVFP4, NVFP4.Params("nvfp4", "prompt", 6, (), 0, "exact")),
    "fp8_nvfp4": Quantizer(NVFP4, NVFP4.Params("fp8", "prompt", 6, (), 0, "exact")),
    "mxfp4": Quantizer(MXFP4, MXFP4.Params(4, (), 0, "exact")),
}
EVEN = ("snapkv", "lagkv", "keydiff_kvpress", "cur", "expected_attention", "random", "chunkkv", "compactor")
UNEVEN = (
    ["method=adakv"],
    ["method=pyramidkv"],
    ["method=ada_pyramid"],
    ["method=snapkv", "allocator=global"],
    ["method=xkv"],
    ["method=duo_attention", "method.heads=drawn", "method.n_sink=8", "method.n_recent=16", "method.evict=prompt"],
)
FETCHING = ("pqcache", "clusterkv", "quest", "double_sparsity", "loki")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A tiny model whose heads have blocks."""
    monkeypatch.setitem(CONFIGS, "wide", ("LlamaConfig", {"head_dim": 32, "num_hidden_layers": 2}))
    made = tiny("wide")
    monkeypatch.setattr(conformance, "model", lambda: made)
    return made


def pair(words: list[str], quantizer: Quantizer, shape: Any) -> tuple[Any, Any]:
    """A composition at a quarter of the bytes, and the method alone with as many tokens."""
    one = subject(words)
    request = BudgetRequest(None, None, Fraction(0), memory=Fraction(1, 4))
    more = {} if one.allocator is None else {"allocator": one.allocator}
    composed = one.kind.variant_for(one.params, request, shape, 240, quantizer=quantizer, **more)
    alike = BudgetRequest(None, composed.budget.tokens, Fraction(0))
    return composed, one.kind.variant_for(one.params, alike, shape, 240, **more)


def check(words: list[str], name: str, given: Model) -> list[Any]:
    quantizer, shape = QUANTIZERS[name], given.shape
    composed, alone = pair(words, quantizer, shape)
    coded, exact = answers([composed, alone])
    ledgers = [said.row.store.ledger for said in (coded, exact)]
    assert ledgers[0].within_memory(composed.budget, shape, with_index=False)
    code: Any = quantizer.token_code()
    first = [[entry for entry in ledger.entries if entry.step == 1] for ledger in ledgers]
    for ours_, theirs in zip(*first, strict=True):
        assert ours_.attended == theirs.attended > 0, "the same tokens are kept"
        n = theirs.resident_kv_bytes // (2 * 2 * shape.d_h)  # over all heads
        assert ours_.resident_kv_bytes == n * code.token_bytes(shape.d_h, shape.d_h) + code.shared_bytes(shape.h_kv)
    for a, b in zip(coded.steps[:2], exact.steps[:2], strict=True):
        kept = [sorted(x for x in each if x >= 0) for each in (*a.resident.tolist(), *b.resident.tolist())]
        assert kept[:2] == kept[2:]
    return [*coded.row.store.layers.values()]


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("code", ["one", "nvfp4"])
def test_what_a_method_keeps_becomes_floats_and_its_bytes_hold(name: str, code: str, wide: Model) -> None:
    check([f"method={name}"], code, wide)


@pytest.mark.parametrize("words", UNEVEN, ids=lambda words: words[-1].partition("=")[2])
@pytest.mark.parametrize("code", ["one", "head", "nvfp4"])
def test_layers_and_heads_may_keep_other_numbers(words: list[str], code: str, wide: Model) -> None:
    layers = check(words, code, wide)
    if words[0] == "method=adakv":
        assert all(isinstance(layer, RaggedQuantizedLayer) for layer in layers)
        assert len({*layers[0].kept_counts()}) == 2
        held = layers[0].quantized
        room = 2 * QUANTIZERS[code].token_code().token_bytes(32, 32)  # type: ignore[union-attr]  # of the last token
        assert sum(x.nbytes for x in held.tensors()) == held.counted_bytes() + room


@pytest.mark.parametrize("code", ["tensor", "token_head", "fp8_nvfp4", "mxfp4"])
def test_every_code_works_behind_heads_with_other_numbers(code: str, wide: Model) -> None:
    check(["method=adakv"], code, wide)


def test_scales_are_of_kept_tokens_and_heads_with_other_numbers_see_what_even_ones_would(wide: Model) -> None:
    """The same tokens in both layouts have the same codes."""
    k, v = torch.randn(2, 1, 2, 30, 32, generator=torch.Generator().manual_seed(0))
    for name in QUANTIZERS:
        rules, params, _ = QUANTIZERS[name]
        plan: Any = rules.plan_for(params, None, None)  # type: ignore[arg-type]
        make: Any = rules.quantize(params, plan)  # type: ignore[attr-defined]
        even = make(k, v, 0, None).rebuilt()
        heads = [(x, y) for x, y in zip(k.split(1, 1), v.split(1, 1), strict=True)]
        flat = make.of_heads(heads, 0, None).part()
        for a, b in zip(even, (flat.k, flat.v), strict=True):
            assert torch.equal(a.flatten(0, 2), b.flatten(0, 2)), name


@pytest.mark.parametrize("name", FETCHING)
@pytest.mark.parametrize("code", ["one", "head", "nvfp4"])
def test_the_host_has_floats_and_a_fetch_moves_as_many_bytes(name: str, code: str, wide: Model) -> None:
    one, shape, quantizer = ours(name), wide.shape, QUANTIZERS[code]
    fitted = {"full_layers": 0} if one.kind.traits.skips else {}
    own = replace(one.params, **fitted, **({"cache_steps": 0} if name == "clusterkv" else {}))
    comm = {"double_sparsity": "1/8", "loki": "1/8"}.get(name, "1/16")
    asked = BudgetRequest(Fraction(1, 5), None, Fraction(comm))
    exact, coded = answers([one.kind.variant_for(own, asked, shape, 240, quantizer=q) for q in (None, quantizer)])
    packed: Any = quantizer.token_code()
    of_token, whole = packed.token_bytes(shape.d_h, shape.d_h), 4 * shape.d_h
    assert isinstance(coded.row.store[0].host, PackedHost)
    for a, b in zip(exact.row.store.ledger.entries, coded.row.store.ledger.entries, strict=True):
        assert a.resident_host_bytes * of_token == b.resident_host_bytes * whole
        assert b.resident_kv_bytes == a.resident_kv_bytes + packed.shared_bytes(shape.h_kv), "which stays on the device"
        assert b.moved_kv_bytes % of_token == 0
    first, same = exact.row.store.ledger.entries[0], coded.row.store.ledger.entries[0]
    assert first.moved_kv_bytes * of_token == same.moved_kv_bytes * whole > 0
    with_bytes = BudgetRequest(None, None, Fraction(comm), memory=Fraction(3, 4))
    in_bytes = one.kind.variant_for(own, with_bytes, shape, 240, quantizer=quantizer)
    (said,) = answers([in_bytes])
    assert said.row.store.ledger.within_memory(in_bytes.budget, shape, with_index=True)


@pytest.mark.parametrize("code", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_host_rebuild_to_what_the_device_would_hold(code: str, dtype: torch.dtype) -> None:
    rules, params, _ = QUANTIZERS[code]
    packed: Any = rules.token_code(params)
    k, v = torch.randn(2, 1, 2, 24, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    host = host_of(trace_of(k[:, :, :20], v[:, :, :20], 4), 0, packed, 4)
    assert isinstance(host, PackedHost) and host.rows.shape[-1] == packed.token_bytes(32, 32)
    host.write(0, k[:, :, 20:], v[:, :, 20:])
    make: Any = rules.quantize(params, rules.plan_for(params, None, None))  # type: ignore[attr-defined, arg-type]
    cache = make(k[:, :, :20], v[:, :, :20], 4, None)
    for i in range(20, 24):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    ((found_k, found_v),) = host.held(24)
    for found, expected in zip((found_k, found_v), cache.rebuilt(), strict=True):
        assert found.dtype == dtype and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("compose", "label"),
    [("fp8", "host fp8"), ("nvfp4", "host nvfp4"), ("fp8_nvfp4", "host fp8 K nvfp4 V"), ("mxfp4", "host mxfp4")],
)
def test_labels_name_the_tier(compose: str, label: str) -> None:
    fetching = cell_without_task(from_words(["method=pqcache", f"compose={compose}"])).quantizer
    assert fetching is not None and fetching.title(drops=False) == label
    dropping = cell_without_task(from_words(["method=snapkv", f"compose={compose}"])).quantizer
    assert dropping is not None and not dropping.title(drops=True).startswith("host")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method=kivi", "ratio=1", "compose=fp8"], "nothing is packed twice"),
        (["method=fp8", "ratio=1", "compose=nvfp4"], "nothing is packed twice"),
        (["method=tova", "compose=fp8"], "TOVA evicts while it decodes"),
        (["method=snapkv_paper", "compose=fp8"], "each query head keeps tokens of its own"),
        (["method=duo_attention", "compose=nvfp4"], "heads roll while it decodes"),
        (["method=pyramidkv", "compose=kivi"], "other numbers of tokens"),
        (["method=sparq", "compose=fp8"], "SPARQ drops no tokens"),
    ],
)
def test_what_cannot_be_composed_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        cell_without_task(from_words(words))
    assert "\n" not in str(caught.value)


def test_layers_left_whole_are_no_part_of_a_composition(wide: Model) -> None:
    one = ours("snapkv")
    quantizer = Quantizer(FP8, replace(PARAMS, skip_layers=(0,)))
    with pytest.raises(ConfigError, match="FP8 leaves layer 0 whole"):
        one.kind.variant_for(
            one.params, BudgetRequest(Fraction(1, 2), None, Fraction(0)), wide.shape, 240, quantizer=quantizer
        )
