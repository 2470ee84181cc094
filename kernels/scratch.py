"""Memory of a device for launches that follow each other on one stream.

Not here: which launches.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


def empty(name: str, device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    """Memory for one call, whatever its name."""
    return torch.empty(size, dtype=dtype, device=device)


class Scratch:
    """What is taken under a name holds until somebody takes it again: layers of a step share it in turn."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, name: str, device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
        n_bytes = prod(size) * dtype.itemsize
        held = self.held.get((name, device))
        if held is None or held.nbytes < n_bytes:
            held = self.held[name, device] = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        return held[:n_bytes].view(dtype).view(size)
