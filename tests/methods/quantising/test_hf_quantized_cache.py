"""transformers' quantised cache: its schedule, its bytes, and what is refused. There are no vectors of it."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.declared import check
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.packed.codes import quantise_tokens, rebuild_tokens, unpack
from kvbench.methods.quantising.hf_quantized_cache import HFQuantizedCache, RequantizedCache
from kvbench.methods.rules import planned
from kvbench.tests.vectors import row_of, step, trace_of

WHOLE = BudgetRequest(Fraction(1), None, Fraction(0))
LARGE = ModelShape("l", 1, 32, 8, 128, 1 << 20, (0,))


def params(bits: Any = 4, group: int = 16, residual: int = 6) -> HFQuantizedCache.Params:
    return HFQuantizedCache.Params("quanto", bits, group, residual, 0)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("residual", [1, 3, 100])
def test_each_step_attends_to_what_transformers_would(bits: int, residual: int) -> None:
    torch.manual_seed(1)
    k, v = torch.randn(2, 1, 2, 40, 32)
    row = row_of(HFQuantizedCache, params(bits, 32, residual), trace_of(k[:, :, :30], v[:, :, :30], 4), WHOLE)

    def packed(x: torch.Tensor) -> torch.Tensor:
        return rebuild_tokens(quantise_tokens(x[0], bits, 32), bits, 32).unsqueeze(0)

    prefix, late = [packed(x[:, :, :30]) for x in (k, v)], [x[:, :, :0] for x in (k, v)]
    for t in range(10):
        q, new = torch.randn(1, 4, 1, 32), [x[:, :, 30 + t : 31 + t] for x in (k, v)]
        out = step(row, q, new[0], new[1], t + 1)
        seen = [torch.cat(parts, 2) for parts in zip(prefix, late, new, strict=True)]
        keys, values = (x.repeat_interleave(2, 1) for x in seen)
        expected = ((q @ keys.mT) * 32**-0.5).softmax(-1) @ values
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        if late[0].shape[2] + 1 >= residual:
            prefix, late = [packed(x) for x in seen], [x[:, :, :0] for x in (k, v)]
        else:
            late = [torch.cat(parts, 2) for parts in zip(late, new, strict=True)]


def test_packing_again_changes_codes_by_rounding_only() -> None:
    x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0))
    once = quantise_tokens(x, 4, 64)
    again = quantise_tokens(rebuild_tokens(once, 4, 64), 4, 64)
    assert (unpack(once.codes, 4, 64).int() - unpack(again.codes, 4, 64).int()).abs().max() <= 1
    torch.testing.assert_close(again.scales, once.scales, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("h_kv", [2, 3])
def test_bytes_are_the_formula(h_kv: int) -> None:
    shape, plan = ModelShape("x", 1, 3 * h_kv, h_kv, 32, 1 << 20, (0,)), HFQuantizedCache.Plan(4, 16, 7)

    def formula(n: int, r: int) -> Fraction:
        return 2 * h_kv * 32 * (n * (Fraction(4, 8) + Fraction(4, 16)) + 2 * r)

    assert [HFQuantizedCache.code_bytes(plan, n, shape) for n in range(1, 3001)] == [
        formula(n, 0) for n in range(1, 3001)
    ]
    k = torch.randn(1, h_kv, 50, 32)
    quantized = RequantizedCache(plan, k, k, 30)
    for t in range(1, 31):
        quantized.append(k[:, :, :1], k[:, :, :1])
        quantized.pack_due()
        assert quantized.counted_bytes() == formula(50 + t - t % 7, t % 7)


def test_the_page_s_example() -> None:
    assert HFQuantizedCache.code_bytes(HFQuantizedCache.Plan(4, 64, 128), 10_000, LARGE) == 11_520_000


def test_memory_chooses_bits_and_names_the_least() -> None:
    def chosen(memory: str) -> HFQuantizedCache.Plan:
        request = BudgetRequest(None, None, Fraction(0), memory=Fraction(memory))
        return planned(HFQuantizedCache, params(4, 64, 128), request, LARGE, 10_000)[1]

    assert (chosen("1/3").bits, chosen("1/5").bits) == (4, 2)
    with pytest.raises(ConfigError, match=r"use memory=0\.1563 or more"):
        chosen("1/8")
    assert chosen("0.1563").bits == 2


def test_what_would_mix_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.axis_key=-1 .* let groups mix heads"):
        check(HFQuantizedCache.Params("quanto", 4, 64, 128, -1), "method")
    with pytest.raises(ConfigError, match=r"method\.group=64 does not divide the 80 dimensions"):
        HFQuantizedCache.check(params(4, 64, 128), WHOLE, ModelShape("x", 1, 4, 2, 80, 1 << 20, (0,)))
