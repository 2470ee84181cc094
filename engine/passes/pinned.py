"""Pinned memory for K and V that a pass over a prompt sends home, taken before the pass begins.

torch pins each tensor apart, and as much as the next power of two. So blocks of such sizes are asked for, none of which
is larger than it has to be, and several tensors lie in one.

Not here: sending (`engine/passes/streams.py`).
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from kvbench.kernels.jit import cdiv, power_of_2

ALIGNED = 256  # bytes


class PinnedBuffers:
    """Room for tensors of known sizes; who sends one takes a piece, which lives as long as any tensor in it."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        """How many tensors there will be, by their bytes."""
        self.free: dict[int, list[Tensor]] = {}
        for size, n in sizes.items():
            piece = cdiv(size, ALIGNED) * ALIGNED
            blocks = [torch.empty(x, dtype=torch.uint8, pin_memory=True) for x in block_sizes(piece, n)]
            pieces = [block[at : at + size] for block in blocks for at in range(0, block.nbytes - piece + 1, piece)]
            self.free[size] = pieces[:n]

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A piece for a tensor; memory of its own where there is none of its size."""
        pieces = self.free.get(prod(shape) * dtype.itemsize)
        if not pieces:
            return torch.empty(*shape, dtype=dtype, pin_memory=True)
        return pieces.pop().view(dtype).view(*shape)


def block_sizes(piece: int, n: int) -> list[int]:
    """Powers of two, as little in all as holds n pieces, each of them within one block."""
    if n == 0:
        return []
    above = power_of_2(piece * n)
    if (below := above // 2) < piece:
        return [above]
    several = [below, *block_sizes(piece, n - below // piece)]
    return min([above], several, key=sum)
