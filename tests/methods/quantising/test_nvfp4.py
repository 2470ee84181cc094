"""NVFP4 and its relatives against an independent implementation's codes and answers, bytes, and what is refused."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.budget import resolve
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.evals.cells import cell_without_task
from kvbench.evals.settings import from_words
from kvbench.kernels.packed.codes import pack
from kvbench.kernels.packed.floats import E2M1, encode, values
from kvbench.methods.full import Full
from kvbench.methods.quantising.fp8 import FP8
from kvbench.methods.quantising.mxfp4 import MXFP4
from kvbench.methods.quantising.nvfp4 import NVFP4
from kvbench.methods.rules import Quantizer, planned
from kvbench.tests import conformance
from kvbench.tests.conformance import answers, ours
from kvbench.tests.methods.quantising.test_fp8 import LARGE, SMALL, WHOLE, bits, in_bytes, off, run_steps
from kvbench.tests.methods.quantising.test_fp8 import PARAMS as FP8_PARAMS
from kvbench.tests.tiny import CONFIGS, tiny
from kvbench.tests.vectors import Check, differs, first, load, row_of, step, trace_of

VECTORS = Path(__file__).parents[2] / "golden" / "nvfp4"
PARAMS = NVFP4.Params("nvfp4", "prompt", 6, (), 0, "exact")
FP8_KEYS, MX4, MX8 = replace(PARAMS, keys="fp8"), *(MXFP4.Params(bits, (), 0, "exact") for bits in (4, 8))


def run_vectors(path: Path) -> list[Check]:
    meta, arrays = load(path)
    return [(path.stem, cast(arrays) if path.stem.startswith("cast") else answered(meta, arrays))]


def cast(arrays: dict[str, np.ndarray]) -> str | None:
    codes = encode(torch.from_numpy(arrays["x"]), E2M1)
    return first(
        differs("codes", codes, arrays["code"]),
        differs("decoded", bits(values(E2M1, codes.device)[codes.int()]), bits(arrays["decoded"])),
        differs("packed", pack(codes, 4), arrays["packed"]),
    )


def answered(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    query: Any = meta.get("query", "exact")
    if meta["keys"].startswith("mx"):
        return run_steps(MXFP4, MXFP4.Params(8 if meta["keys"] == "mxfp8" else 4, (), 0, query), meta, arrays)
    params = replace(PARAMS, keys=meta["keys"], global_scale=meta["global"], over=min(meta["over"]), query=query)
    return run_steps(NVFP4, params, meta, arrays)


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.npz")), ids=lambda path: path.stem)
def test_vectors(path: Path) -> None:
    for name, problem in run_vectors(path):
        assert problem is None, f"{name}: {problem}"


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "params", "share", "more"),
    [(NVFP4, PARAMS, "9/32", 8), (NVFP4, FP8_KEYS, "25/64", 4), (MXFP4, MX4, "17/64", 0), (MXFP4, MX8, "33/64", 0)],
)
def test_bytes_are_the_page_s_share_and_what_layers_share(kind: Any, params: Any, share: str, more: int) -> None:
    for shape, n in ((LARGE, 10_000), (SMALL, 2000)):
        plan = kind.plan_for(params, resolve(WHOLE, n, drops=False), shape)
        assert kind.code_bytes(plan, n, shape) == Fraction(share) * 4 * shape.h_kv * shape.d_h * n + more


@pytest.mark.parametrize(("memory", "bits"), [("1/2", (8, 4)), ("2/5", (8, 4)), ("3/10", (4, 4)), ("9/32", None)])
def test_memory_alone_takes_keys_in_fp8_where_they_fit(memory: str, bits: Any) -> None:
    if bits is None:  # what layers share is on top
        with pytest.raises(ConfigError, match=r"use memory=0\.2813 or more"):
            planned(NVFP4, PARAMS, in_bytes(memory), LARGE, 10_000)
        return
    plan = planned(NVFP4, PARAMS, in_bytes(memory), LARGE, 10_000)[1]
    assert (plan.key.format.bits, plan.value.format.bits) == bits
    assert NVFP4.label(PARAMS, in_bytes(memory)) == "NVFP4"
    assert NVFP4.chosen({"key_bits": bits[0], "value_bits": bits[1]}) == ("with FP8 keys" if bits[0] == 8 else "")


def test_a_quarter_is_refused_alone_and_works_composed() -> None:
    with pytest.raises(ConfigError) as caught:
        planned(NVFP4, PARAMS, in_bytes("1/4"), LARGE, 10_000)
    for words in ("0.2813", "method=mxfp4 from 17/64 on", "method=snapkv compose=nvfp4"):
        assert words in str(caught.value)
    snapkv, quantizer = ours("snapkv"), Quantizer(NVFP4, PARAMS)
    for memory, n in (("1/4", 8888), ("1/8", 4444)):
        budget, _, _ = planned(snapkv.kind, snapkv.params, in_bytes(memory), LARGE, 10_000, quantizer=quantizer)
        assert budget.tokens == n
    assert planned(MXFP4, MX4, in_bytes("17/64"), LARGE, 10_000)
    with pytest.raises(ConfigError, match="use memory=17/64 or more, or method=snapkv compose=mxfp4"):
        planned(MXFP4, MX4, in_bytes("1/4"), LARGE, 10_000)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_vllm", "nvfp4_4over6", "fp8_nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("residual", [0, 5])
def test_each_step_s_books_are_the_bytes_of_its_tensors(name: str, residual: int) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 3, 47, 64).bfloat16()
    one = ours(name)
    params = replace(one.params, residual=residual)
    row = row_of(one.kind, params, trace_of(k, v, 9, 40), WHOLE, n_new=7)
    shape = row.trace.shape
    for t in range(7):
        q, at = torch.randn(1, 9, 1, 64).bfloat16(), slice(40 + t, 41 + t)
        assert step(row, q, k[:, :, at], v[:, :, at], t + 1).isfinite().all()
        entry = row.store.ledger.entries[-1]
        assert entry.resident_kv_bytes == one.kind.code_bytes(row.plan, 41 + t, shape)
    if not residual:
        assert row.store.allocated_bytes() == row.store[0].quantized.counted_bytes()


# --- what is attended to -------------------------------------------------------------------------


def test_each_format_is_further_off_than_the_one_above_it() -> None:
    """On keys as models have them: a few channels are large for all tokens."""
    errors = []
    for seed in range(4):
        torch.manual_seed(seed)
        k, v = torch.randn(2, 1, 2, 400, 128)
        k *= 1 + 6 * (torch.rand(1, 2, 1, 128) > 0.95)
        kinds = [(FP8, FP8_PARAMS), (NVFP4, FP8_KEYS), (NVFP4, PARAMS), (MXFP4, MX4)]
        errors.append([off(kind, params, k, v, seed) for kind, params in kinds])
    means = np.mean(errors, 0)
    assert list(means) == sorted(means) and means[0] < means[-1] / 4


def test_the_layer_s_scale_is_the_prompt_s_and_a_multiplier() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 40, 64)
    row = row_of(NVFP4, PARAMS, trace_of(k, v, 8), WHOLE)
    for side, x in zip(row.store[0].quantized.sides, (k, v), strict=True):
        assert float(side.shared) == float(x.abs().max() / 2688)
    small = row_of(NVFP4, PARAMS, trace_of(k * 1e-3, v * 1e-3, 8), WHOLE)
    kept, bare = (off(NVFP4, replace(PARAMS, global_scale=g), k * 1e-3, v * 1e-3) for g in ("prompt", "one"))
    assert float(small.store[0].quantized.sides[0].shared) < 1e-5 and kept < bare, "without it scales are subnormal"


def test_a_residual_of_all_tokens_is_full_attention_bit_for_bit() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 65, 64)
    kinds = ((NVFP4, replace(PARAMS, residual=65)), (Full, Full.Params()))
    rows = [row_of(kind, params, trace_of(k, v, 8, 60), WHOLE, n_new=5) for kind, params in kinds]
    for t in range(5):
        q, at = torch.randn(1, 8, 1, 64), slice(60 + t, 61 + t)
        ours_, full = (step(row, q, k[:, :, at], v[:, :, at], t + 1) for row in rows)
        assert torch.equal(ours_, full)


# --- the suite that other methods pass on narrower heads -----------------------------------------


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A tiny model whose heads have blocks."""
    monkeypatch.setitem(CONFIGS, "wide", ("LlamaConfig", {"head_dim": 32}))
    made = tiny("wide")
    monkeypatch.setattr(conformance, "model", lambda: made)
    return made


@pytest.mark.parametrize("name", ["nvfp4", "fp8_nvfp4", "mxfp4"])
def test_the_suite_s_properties_hold_on_wide_heads(wide: Model, name: str) -> None:
    one = ours(name)
    conformance.whole_budget(one)
    conformance.labelled(one)
    variant = one.kind.variant_for(one.params, in_bytes("2/3"), wide.shape, 240)
    beside = one.kind.variant_for(one.params, WHOLE, wide.shape, 240)
    alone, (again, other) = answers([variant])[0], answers([variant, beside])
    assert alone.ids == again.ids and alone.row.store.ledger.entries == again.row.store.ledger.entries
    assert again.row.store.ledger.within_memory(variant.budget, wide.shape, with_index=True)
    assert len(other.ids) == len(again.ids)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["method.keys=mxfp4"], "method.keys=mxfp4"),
        (["method.over=5"], "method.over=5"),
        (["method.global_scale=mean"], "method.global_scale=mean"),
        (["method.skip_layers=[3]"], "method.skip_layers names layer 3"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cell = cell_without_task(from_words(["method=nvfp4", *words]))
        NVFP4.check(cell.params, cell.settings.budget, SMALL)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "params", "d_h", "block"), [(NVFP4, PARAMS, 40, 16), (MXFP4, MX4, 80, 32)])
def test_heads_without_whole_blocks_are_named(kind: Any, params: Any, d_h: int, block: int) -> None:
    with pytest.raises(ConfigError, match=f"blocks of {block} channels, and 's' has heads of {d_h}"):
        kind.check(params, WHOLE, replace(SMALL, d_h=d_h))


def test_latents_and_two_quantisers_are_refused() -> None:
    latent = replace(SMALL, h_kv=1, d_h=48, value_width=32, is_latent=True)
    with pytest.raises(ConfigError, match="one latent per token for all heads, and NVFP4 codes keys and values apart"):
        planned(NVFP4, PARAMS, WHOLE, latent, 100)
    with pytest.raises(ConfigError, match="nothing is packed twice"):
        cell_without_task(from_words(["method=kivi", "compose=nvfp4", "ratio=1"]))
