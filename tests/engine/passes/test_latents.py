"""Latents asked by absorbed queries, against keys and values made of them for every head."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.attend import Part, attend, partial
from kvbench.engine.batch import Batch
from kvbench.engine.budget import BudgetRequest, token_bytes
from kvbench.engine.causal import causal
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.passes.latents import Latent
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.tests import conformance
from kvbench.tests.architectures import config_of, loaded, model_of, prompt
from kvbench.tests.vectors import Check, load


class Heads:
    """Stands for an attention module: W_uk (h, d_nope, d_c) and W_uv (h, d_v, d_c)."""

    def __init__(self, w_uk: Tensor, w_uv: Tensor) -> None:
        self.w_uk, self.w_uv = w_uk, w_uv

    def expand_kv(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        k = c @ self.w_uk.mT
        return torch.cat([k, r.expand(-1, k.shape[1], -1, -1)], -1), c @ self.w_uv.mT


def drawn(h: int, d_nope: int, d_r: int, d_v: int, d_c: int, s: int, dtype: torch.dtype) -> tuple[Heads, Tensor]:
    draw = torch.Generator().manual_seed(h + s)
    w_uk, w_uv, rows = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)
        for shape in ((h, d_nope, d_c), (h, d_v, d_c), (1, 1, s, d_c + d_r))
    )
    return Heads(w_uk, w_uv), rows


@pytest.mark.parametrize(
    ("h", "d_nope", "d_r", "d_v", "d_c"), [(4, 16, 8, 12, 16), (3, 5, 2, 7, 9), (16, 32, 16, 32, 64)]
)
@pytest.mark.parametrize("s", [1, 2, 63, 64, 65, 200])
def test_absorbed_equals_naive_in_float64(h: int, d_nope: int, d_r: int, d_v: int, d_c: int, s: int) -> None:
    module, rows = drawn(h, d_nope, d_r, d_v, d_c, s, torch.float64)
    latent = Latent(module, d_c, d_r, rows)
    q = torch.randn(1, h, s, d_nope + d_r, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    softmax = Softmax(0.2)
    k, v = module.expand_kv(rows[..., :d_c], rows[..., d_c:])
    right, right_lse = causal(q, k, v, softmax)
    found, lse = causal(latent.absorbed(q), rows, rows[..., :d_c], softmax)
    torch.testing.assert_close(latent.head_values(found), right, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(lse.double(), right_lse.double(), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(latent.heads(rows), (k, v), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_reads_rows_once_for_all_heads(dtype: torch.dtype) -> None:
    """Kernels over rows, in two parts, against a plain softmax over each head's own keys and values."""
    h, d_c, d_r, s = 20, 32, 8, 150
    module, rows = drawn(h, 16, d_r, 12, d_c, s, dtype)
    module.w_uk, module.w_uv = module.w_uk * 0.2, module.w_uv * 0.2
    latent = Latent(module, d_c, d_r, rows)
    q = torch.randn(1, h, 1, 16 + d_r, generator=torch.Generator().manual_seed(0)).to(dtype)
    parts = [Part(some, some[..., :d_c]) for some in (rows[:, :, :70], rows[:, :, 70:])]
    found = latent.head_values(attend(latent.absorbed(q), parts, Softmax(0.2)))
    k, v = (x.double() for x in module.expand_kv(rows[..., :d_c], rows[..., d_c:]))
    right = ((q.double() @ k.mT) * 0.2).softmax(-1) @ v
    assert (found.double() - right).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)


def test_another_map_is_refused() -> None:
    module, rows = drawn(4, 16, 8, 12, 16, 3, torch.float32)
    module.expand_kv = lambda c, r: (torch.cat([r.expand(-1, 4, -1, -1), c @ module.w_uk.mT], -1), c @ module.w_uv.mT)
    with pytest.raises(ConfigError, match="no map of a latent"):
        Latent(module, 16, 8, rows)


def run_vectors(path: Path) -> list[Check]:
    """The model's own attention over sets of tokens, from rows and absorbed queries."""
    meta, arrays = load(path)
    checks: list[Check] = []
    # Outputs were made of keys and values that float32 had rounded.
    for dtype, apart in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        c, r, w_uk, w_uv, q = (torch.from_numpy(arrays[name]).to(dtype) for name in ("c", "r", "w_uk", "w_uv", "q"))
        rows = torch.cat([c, r], -1)
        latent = Latent(Heads(w_uk, w_uv), meta["d_c"], meta["d_r"], rows)
        asking = latent.absorbed(q)
        says = differs(asking[0, :, 0], arrays["q_absorbed_f64"], 1e-12 if dtype == torch.float64 else 1e-5)
        checks.append((f"absorbed query {dtype}", says))
        for i, keep in enumerate(arrays["keep"]):
            held = rows[:, :, torch.from_numpy(keep[0])]
            part, softmax = Part(held, held[..., : latent.d_c]), Softmax(meta["scale"])
            out, lse = partial(asking, part, softmax)
            found = latent.head_values(out.reshape(1, -1, 1, latent.d_c))[0, :, 0]
            checks.append((f"set {i} {dtype}", differs(found, arrays["out_f64"][i], apart)))
            checks.append((f"set {i} {dtype} log-sum-exp", differs(lse.flatten(), arrays["lse_f64"][i], 1e-5)))
            joined = attend(asking, [part], softmax) if dtype == torch.float32 else out.reshape(1, -1, 1, latent.d_c)
            checks.append(
                (f"set {i} {dtype} joined", differs(latent.head_values(joined)[0, :, 0], arrays["out"][i], 1e-5))
            )
    return checks


def differs(found: Tensor, right: np.ndarray, apart: float) -> str | None:
    far = (found.double() - torch.from_numpy(right).double()).abs().max().item()
    return None if far <= apart else f"differs by {far:.2g}, {apart:g} allowed"


# --- a model ---


@pytest.fixture(scope="module")
def latent_model() -> Model:
    config = config_of("deepseek_v3")
    return loaded(config, model_of(config, 1), "latents")


def rows_of(model: Model, names: list[str], s: int = 60, ratio: str = "1/3") -> tuple[Trace, list[Any]]:
    ones = [conformance.ours(name) for name in names]
    asked = BudgetRequest(Fraction(ratio), None, Fraction(1, 2), False)
    made = [one.kind.variant_for(one.params, asked, model.shape, s) for one in ones]
    with model.hooked():
        trace = prefill(model, prompt(s), [what for one in made for what in one.observations])
    with torch.inference_mode():
        rows = [one.row(trace, 16) for one in made]
        for row in rows:
            for layer in trace.shape.attention_layers:
                row.build(layer)
            row.complete()
    return trace, rows


def test_a_token_counts_its_row_once(latent_model: Model) -> None:
    """12 numbers of a latent and 8 of a rotary key, at 16 bits: resident, moved and in the trace's memory."""
    trace, (full, streaming, quest) = rows_of(latent_model, ["full", "streamingllm", "quest"])
    with latent_model.hooked():
        decode(latent_model, trace, [full, streaming, quest], max_new_tokens=3)
    of_token = 2 * (12 + 8)
    assert token_bytes(trace.shape) == of_token
    for layer in trace.shape.attention_layers:
        assert trace.values(layer).data_ptr() == trace.keys(layer).data_ptr()
    assert {x.resident_kv_bytes // x.tokens for x in full.store.ledger.entries} == {of_token}
    assert {x.resident_kv_bytes for x in streaming.store.ledger.entries} == {(20 + 1) * of_token}
    moved = [x.moved_kv_bytes for x in quest.store.ledger.entries if x.layer not in quest.skipped]
    assert moved and all(n and n % of_token == 0 for n in moved)


def test_values_within_keys_take_no_memory(latent_model: Model) -> None:
    """The prompt's 60 tokens, of 20 numbers in float32, with room for 16 more."""
    trace, (full, streaming, rocket) = rows_of(latent_model, ["full", "streamingllm", "rocketkv"])
    n_layers, of_token = len(trace.shape.attention_layers), 4 * (12 + 8)
    assert trace.held_bytes() == trace.peak_bytes == n_layers * 60 * of_token
    assert full.store.allocated_bytes() == n_layers * (60 + 16) * of_token
    assert streaming.store.allocated_bytes() == n_layers * 21 * of_token  # with the current token
    layer = rocket.store[trace.shape.attention_layers[-1]]
    n_near = layer.host.k.shape[2] + layer.host.late[0].shape[2]
    assert layer.host.is_near and layer.allocated_bytes() == layer.memory.nbytes + n_near * of_token


def test_no_step_expands_what_is_cached(latent_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, rows = rows_of(latent_model, ["full", "snapkv"])
    expanded = []
    for attention in latent_model.attentions:
        before = attention.expand_kv
        noted = lambda c, r, before=before: (expanded.append(c.shape[2]), before(c, r))[1]  # noqa: E731
        monkeypatch.setattr(attention, "expand_kv", noted)
    with latent_model.hooked():
        decode(latent_model, trace, rows, max_new_tokens=4)
    assert expanded and set(expanded) == {1}


def test_dropping_and_retrieving_methods_choose_one_set_for_all_heads(latent_model: Model) -> None:
    trace, (kept,) = rows_of(latent_model, ["snapkv"])
    layer = trace.shape.attention_layers[0]
    assert trace.shape.h_kv == 1 and kept.store[layer].positions().shape == (1, 1, 20)


@pytest.mark.parametrize(
    "name", ["duo_attention", "shadowkv", "attention_matching", "turboquant", "hf_quantized_cache"]
)
def test_what_makes_no_sense_of_latents_says_so(latent_model: Model, name: str) -> None:
    with pytest.raises(ConfigError, match="keeps one latent per token for all heads, and "):
        rows_of(latent_model, [name], ratio="1" if name in ("turboquant", "hf_quantized_cache") else "1/3")


@pytest.mark.parametrize("n_feed", [2, 9])
def test_a_feed_is_read_as_transformers_reads_it(latent_model: Model, n_feed: int) -> None:
    ids = prompt(60 + n_feed)
    with torch.inference_mode():
        want = latent_model.hf(input_ids=torch.tensor([ids])).logits[0, -1]
    _, (full,) = rows_of(latent_model, ["full"])
    with latent_model.hooked():
        found = Batch(latent_model, full.trace, [full]).read([ids[60:]])
    torch.testing.assert_close(found[0], want, atol=1e-4, rtol=1e-4)
