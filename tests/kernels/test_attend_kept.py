import pytest
import torch

from engine.sparse import attend_kept, met_by
from kernels.attend_kept import attend_kept_triton
from kernels.jit import triton

pytestmark = pytest.mark.skipif(triton is None, reason="no triton")
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
# h, h_kv, s, d_h, block: the last block is short, d_h and the block are no powers of two, one block, more than a list.
CASES = [(4, 2, 150, 16, 64), (3, 1, 75, 20, 24), (2, 2, 9, 16, 64), (2, 1, 1100, 16, 512)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_attends_to_what_torch_does(case: tuple[int, ...], dtype: torch.dtype) -> None:
    h, h_kv, s, d_h, block = case
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, s, d_h, generator=draw) for heads in (h, h_kv, h_kv))
    vertical, slash = (torch.rand(h, s, generator=draw) < 0.1 for _ in range(2))
    slash[:, 0] = True  # every query sees its own token
    expected, share = attend_kept(q, k, v, 0.25, vertical, slash, block)
    given = [x.to(dtype).to(GPU) for x in (q, k, v)]
    out, pairs = attend_kept_triton(
        given[0], given[1], given[2], 0.25, vertical.to(GPU), met_by(slash, block).to(GPU), block
    )
    assert out.dtype == dtype
    atol, rtol = (2e-6, 1e-5) if dtype == torch.float32 else (3e-2, 3e-2)
    torch.testing.assert_close(out.cpu().float(), expected, atol=atol, rtol=rtol)
    assert pairs.sum().item() == round(share.item() * h * s * (s + 1) / 2)


def test_programs_that_are_fewer_than_blocks_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, 90, 16, generator=draw).to(GPU) for heads in (4, 2, 2))
    vertical, slash = (torch.rand(4, 90, generator=draw) < 0.2 for _ in range(2))
    slash[:, 0] = True
    given = (q, k, v, 0.25, vertical.to(GPU), met_by(slash, 16).to(GPU), 16)
    out, pairs = attend_kept_triton(*given)
    monkeypatch.setattr("kernels.attend_kept.PROGRAMS", 5)
    again, pairs_again = attend_kept_triton(*given)
    assert torch.equal(out, again) and torch.equal(pairs, pairs_again)
