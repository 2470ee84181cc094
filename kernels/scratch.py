"""What work takes on its way: memory of blocks that are worked on one after the other, and for launches of one stream;
the numbers in which sums are made.

Not here: which work.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

WITHOUT_FLOAT64 = ("mps",)  # devices
GPU_FACTOR = 32  # by which blocks are larger on a GPU, where a launch costs more than the memory


def at_once(n: int, device: torch.device) -> int:
    """Bytes or tokens of a block, from those that are best on a CPU."""
    return n * GPU_FACTOR if device.type == "cuda" else n


def finest(device: torch.device) -> torch.dtype:
    """The most exact numbers of a device: float64, or float32 where it has none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def finer(x: Tensor) -> Tensor:
    """A copy in the most exact numbers of its device."""
    return x.to(finest(x.device), copy=True)


def empty(name: str, device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    """Memory for one call, whatever its name."""
    return torch.empty(size, dtype=dtype, device=device)


class Scratch:
    """Memory under names: what is taken holds until the name is taken again, so layers of a step share it in turn."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, name: str, device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
        n_bytes = prod(size) * dtype.itemsize
        held = self.held.get((name, device))
        if held is None or held.nbytes < n_bytes:
            held = self.held[name, device] = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        return held[:n_bytes].view(dtype).view(size)
