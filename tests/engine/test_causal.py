"""Attention of a prompt over itself: equal to the whole matrix, whatever the window, and never as large."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.engine.causal import BLOCK, causal
from kvbench.engine.softmax import Softmax


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """From all logits, in float64."""
    s, g = q.shape[2], q.shape[1] // k.shape[1]
    logits = q.double() @ k.double().repeat_interleave(g, 1).mT * scale
    distance = torch.arange(s).unsqueeze(1) - torch.arange(s)
    logits = logits.masked_fill((distance < 0) | (distance >= (window or s)), -torch.inf)
    return logits.softmax(-1) @ v.double().repeat_interleave(g, 1), logits.logsumexp(-1)


@pytest.mark.parametrize("window", [None, 1, 7, 100, 272, 399, 400, 1000])
def test_every_query_sees_its_window_and_nothing_ahead(window: int | None) -> None:
    q, k, v = draw(1, 6, 400, 16), draw(1, 2, 400, 16, seed=1), draw(1, 2, 400, 16, seed=2)
    out, lse = causal(q, k, v, Softmax(0.25), window)
    expected, normaliser = whole(q, k, v, 0.25, window)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), normaliser, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("s", [BLOCK + 40, 2 * BLOCK + 40, 2 * BLOCK + 41, 3 * BLOCK + 39])
def test_a_prompt_may_end_anywhere_in_a_block(s: int) -> None:
    q, k, v = draw(1, 2, s, 8), draw(1, 1, s, 8, seed=1), draw(1, 1, s, 8, seed=2)
    out, lse = causal(q, k, v, Softmax(0.25), 40)
    expected, normaliser = whole(q, k, v, 0.25, 40)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), normaliser, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("h", "h_kv", "s"), [(4, 4, 1), (6, 2, 77), (9, 3, 700)])
def test_log_sum_exps_come_with_the_bits_that_torch_gives(h: int, h_kv: int, s: int, dtype: torch.dtype) -> None:
    # Laid out as models hand them over: (1, s, heads, d_h), transposed.
    q, k, v = (draw(1, s, n, 16, seed=n + 1, dtype=dtype).transpose(1, 2) for n in (h, h_kv, h_kv))
    out, lse = causal(q, k, v, Softmax(0.25))
    assert torch.equal(out, scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True))
    _, normaliser = whole(q, k, v, 0.25, None)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), normaliser, atol=2e-4, rtol=0)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that anything made or stored."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, Tensor):
                self.n = max(self.n, each.untyped_storage().nbytes() // each.element_size())
        return result


def test_a_window_needs_no_mask_of_the_whole_prompt() -> None:
    q, k, v = draw(1, 2, 3000, 8), draw(1, 1, 3000, 8, seed=1), draw(1, 1, 3000, 8, seed=2)
    with Largest() as largest:
        causal(q, k, v, Softmax(0.25), 64)
    assert largest.n <= 2 * q.numel()
