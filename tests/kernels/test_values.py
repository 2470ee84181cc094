import pytest
import torch

from kvbench.kernels.gather import gather_tokens
from kvbench.kernels.jit import triton
from kvbench.kernels.rows.values import fetch_values, fetch_values_triton

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("h_kv", "s", "d_h", "k"), [(2, 50, 12, 37), (1, 9, 64, 1), (3, 40, 16, 16)])
def test_triton_brings_what_a_gather_does(dtype: torch.dtype, h_kv: int, s: int, d_h: int, k: int) -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(1, h_kv, s, d_h, generator=draw).to(dtype)
    idx = torch.randint(s, (1, h_kv, k), generator=draw)
    with_scores = idx + (torch.randint(1 << 20, idx.shape, generator=draw) << 32)  # as a GPU's keys have them
    far = values.pin_memory() if GPU == "cuda" else values
    assert torch.equal(fetch_values_triton(far, with_scores.to(GPU)).cpu(), gather_tokens(values, idx))


def test_where_both_tiers_are_one_memory_rows_are_gathered() -> None:
    values, idx = torch.arange(24.0).view(1, 2, 6, 2), torch.tensor([[[5, 0], [1, 1]]])
    assert fetch_values(values, idx).tolist() == [[[[10, 11], [0, 1]], [[14, 15], [14, 15]]]]
