import pytest
import torch
from torch import Tensor

from kvbench.kernels.jit import triton
from kvbench.kernels.rows.append import Place, append_rows_ref, append_rows_triton

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d_v", [12, 7, 20, -8])  # below 0: within the key
def test_triton_writes_what_copies_write_and_nothing_else(dtype: torch.dtype, d_v: int) -> None:
    draw = torch.Generator().manual_seed(0)
    k = torch.randn(3, 2, 1, 12, generator=draw).to(dtype).to(GPU)
    v = k[..., :-d_v] if d_v < 0 else torch.randn(3, 2, 1, d_v, generator=draw).to(dtype).to(GPU)

    def buffers(n: int) -> tuple[Tensor, Tensor]:
        keys = torch.zeros(1, 2, n, 12, dtype=dtype, device=GPU)
        return keys, keys[..., :-d_v] if d_v < 0 else keys.new_zeros(1, 2, n, d_v)

    def places() -> list[list[Place]]:
        """Of the first row two, of the second none, of the third one between others of its buffer."""
        sizes = [(5, 4), (7, 0), (9, 3)]
        first, late, third = ((*buffers(n), at) for n, at in sizes)
        return [[first, late], [], [third]]

    ours, theirs = places(), places()
    append_rows_triton(k, v, ours)
    append_rows_ref(k, v, theirs)
    for row, other_row in zip(ours, theirs, strict=True):
        for mine, other in zip(row, other_row, strict=True):
            assert torch.equal(mine[0], other[0]) and torch.equal(mine[1], other[1])
    assert torch.equal(ours[0][0][0][:, :, 4:5], k[:1])
