"""FP8 inside vLLM's CPU build: what it writes into its pages, and what it reads from them, beside `method=fp8_vllm`.

vLLM's CUDA kernels round to the nearest code, as `fp8_vllm` does. Its CPU build rounds towards zero, so that tokens of
the two differ there; pages and attention over them are compared code by code instead.
"""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make setup-serving")

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvbench.kernels.packed.floats import E4M3, E5M2, FloatCode, Format, encode, quantise_floats, rebuild_floats, values

pytestmark = [pytest.mark.serving, pytest.mark.filterwarnings("ignore")]
N, PAGE, H, H_KV, D = 200, 128, 9, 3, 64
FORMATS = pytest.mark.parametrize(("name", "form"), [("fp8", E4M3), ("fp8_e5m2", E5M2)])


@pytest.fixture(scope="module")
def ops() -> Any:
    from vllm import _custom_ops  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's CPU build has FP8 pages on x86 with AVX-512 alone")
    current_platform.import_kernels()
    return _custom_ops


def towards_zero(x: Tensor, form: Format) -> Tensor:
    """The code below the nearest one, where that is larger than x."""
    size = x.abs().clamp(max=form.top)
    codes = encode(x, form)
    return torch.where(values(form, x.device)[codes.int()].abs() > size, codes - 1, codes)


def pages_with(ops: Any, name: str, k: Tensor, v: Tensor, scales: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """vLLM's pages of K and V (n, h_kv, d), the first page left empty."""
    pages = torch.zeros(-(-len(k) // PAGE) + 1, H_KV, 2 * PAGE, D, dtype=torch.uint8)
    of_keys, of_values = pages.chunk(2, dim=2)
    slots = torch.arange(len(k)) + PAGE
    ops.cpu_attn_reshape_and_cache(
        k, v, of_keys, of_values, slots, "vec", k_scale=scales[0], v_scale=scales[1], kv_cache_dtype=name
    )
    return of_keys, of_values


@FORMATS
def test_codes_of_its_pages_are_ours_rounded_towards_zero(ops: Any, name: str, form: Format) -> None:
    x = torch.randn(N, H_KV, D, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-6, 5, N)[:, None, None]  # from below the smallest code to above the largest
    _, of_values = pages_with(ops, name, x, x, (1.0, 1.0))
    found = of_values[1:].transpose(1, 2).reshape(-1, H_KV, D)[:N]
    is_zero = found & 127 == 0  # of which vLLM keeps no sign
    assert torch.equal(found & 127, towards_zero(x, form) & 127)
    assert torch.equal(found[~is_zero] >> 7, x.signbit()[~is_zero].to(torch.uint8))
    lower = encode(x, form).int() - towards_zero(x, form).int()
    assert lower.float().mean() > 0.2, "about every second number between two codes"


@FORMATS
@pytest.mark.parametrize("n_q", [1, N])
def test_attention_over_its_pages_is_attention_over_the_codes(ops: Any, name: str, form: Format, n_q: int) -> None:
    drawn = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, heads, D, generator=drawn) for n, heads in ((n_q, H), (N, H_KV), (N, H_KV)))
    scales = 0.5, 2.0
    of_keys, of_values = pages_with(ops, name, k, v, scales)
    lengths, starts = torch.tensor([N], dtype=torch.int32), torch.tensor([0, n_q], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=H, num_kv_heads=H_KV, head_dim=D, seq_lens=lengths, dtype=torch.float32,
        query_start_loc=starts, causal=True, sliding_window_size=-1, isa="vec", enable_kv_split=False,
        dynamic_causal=None, kv_cache_dtype=name,
    )  # fmt: skip
    out = torch.empty_like(q)
    ops.cpu_attention_with_kv_cache(
        query=q, key_cache=of_keys, value_cache=of_values, output=out, query_start_loc=starts, seq_lens=lengths,
        scale=D**-0.5, causal=True, alibi_slopes=None, sliding_window=-1, softcap=0.0, scheduler_metadata=plan,
        block_table=torch.arange(1, len(of_keys), dtype=torch.int32)[None], s_aux=None, dynamic_causal=None,
        k_scale=scales[0], v_scale=scales[1], kv_cache_dtype=name,
    )  # fmt: skip
    code = FloatCode(form, shared="layer", is_known=True)
    seen = list[Tensor]()
    for x, scale in ((k, scales[0]), (v, scales[1])):
        shared = torch.full((1, 1, 1), scale)
        packed = quantise_floats(x.transpose(0, 1), code, shared)
        packed = packed._replace(codes=towards_zero((x / scale).transpose(0, 1), form))
        seen.append(rebuild_floats(packed, code, shared).repeat_interleave(H // H_KV, 0))
    mask = torch.ones(n_q, N, dtype=torch.bool).tril(N - n_q)
    ours = scaled_dot_product_attention(q.transpose(0, 1), *seen, attn_mask=mask).transpose(0, 1)
    assert (out - ours).abs().max() < 1e-5 * ours.abs().max()
