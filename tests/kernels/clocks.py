"""A clock that shows what a test wants it to show."""

import torch

from kvbench.kernels.clock import Since


def aged(n: int, device: torch.device | str) -> Since:
    """So many steps behind the one that kernels were told."""
    return Since(torch.full((1,), 100 + n, dtype=torch.int64, device=device), 100)
