"""Where in the prompt a variant's last step attended: the shares of equal parts of it, as a strip to look at.

A share of 1 says that every query head of every layer attended to every token of the part. Counting touches each
chosen position once, without a picture of heads by tokens, so that every sample can have it.

Not here: `Layer.attended`, the exact picture of one layer, for checks.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvbench.engine.layouts.layer import Layer

N_BINS = 100
DIGITS = 3  # of a share


def attended_bins(layers: Iterable[Layer], n_bins: int = N_BINS) -> list[float]:
    """Shares of (query head, token) that the last step attended to, by parts of the prompt, mean over the layers."""
    shares = [layer_shares(layer, min(n_bins, layer.s_prompt)) for layer in layers]
    return [round(share, DIGITS) for share in torch.stack(shares).mean(0).tolist()] if shares else []


def layer_shares(layer: Layer, n_bins: int) -> Tensor:
    """Shares of one layer (`attended_bins`), (n_bins,) float64 on the CPU."""
    shape, s = layer.meter.shape, layer.s_prompt
    # A token t lies in part t * n_bins // s, which begins at the next whole number from s * part / n_bins on.
    edges = -(-s * torch.arange(n_bins + 1) // n_bins)
    counts = torch.zeros(n_bins, dtype=torch.float64)

    def add_range(start: int, stop: int) -> None:
        """Tokens that all heads attended to."""
        reached = edges.clamp(start, max(start, stop))
        counts.add_(shape.h * (reached[1:] - reached[:-1]))

    def add(positions: Tensor, weights: Tensor) -> None:
        """Positions (…, k) that as many query heads attended to as `weights`, of the same shape, says."""
        inside = (positions >= 0) & (positions < s)  # -1 stands for no token, and generated ones are not drawn
        parts = (positions * n_bins // s).clamp(0, n_bins - 1)
        found = torch.bincount(parts.flatten(), (weights * inside).flatten().double(), minlength=n_bins)
        counts.add_(found.cpu())

    def heads_each(positions: Tensor) -> Tensor:
        """How many query heads share each head of `positions` (1, heads, k)."""
        return torch.full_like(positions, shape.h // positions.shape[1])

    kept = layer.kept_positions
    if kept is None and layer.mask is None:
        add_range(0, min(layer.n_kept, s))
    else:
        kept = layer.positions()[..., : layer.n_kept]  # (1, h_kv, n_kept)
        seen = heads_each(kept)
        if layer.mask is not None:
            seen = layer.mask[..., : layer.n_kept].unflatten(1, (shape.h_kv, -1)).sum(2)
        add(kept, seen)
    add_range(layer.n_seen - layer.n_window, s)
    for positions in [*layer.fetched(), *([] if layer.evictions is None else [layer.evictions])]:
        add(positions, heads_each(positions))
    sizes = shape.h * (edges[1:] - edges[:-1])
    return (counts / sizes).clamp(max=1)  # a token may be both kept and fetched
