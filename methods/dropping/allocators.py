"""How many tokens each layer keeps, for methods that keep the best: free functions from a budget to whole numbers.

Counts are tokens per head beside the protected ones, one number for each layer that is compressed. `uniform` needs no
scores, nor does PyramidKV's (`methods/rules/pyramidkv.py`); `by_need` divides the budget once the scores of all layers
are there.

Not here: what a token is worth (`methods/dropping/scorers.py`). Heads of a layer keep equally many; an allocator that
gives each head a count of its own will return a list of counts per layer.
"""

from collections.abc import Sequence
from math import floor

import torch
from torch import Tensor


def uniform(count: int, n_layers: int) -> list[int]:
    """The same for every layer."""
    return [count] * n_layers


def normalised(weights: Tensor) -> Tensor:
    """Each layer's numbers (layers, n) as shares of their sum, float64: a layer is worth 1. All zeros are uniform."""
    weights = weights.double()
    sums = weights.sum(-1, keepdim=True)
    return torch.where(sums > 0, weights / sums, 1 / weights.shape[-1])


def by_need(weights: Tensor, total: int) -> list[int]:
    """Tokens per layer that keep most: how many of the `total` largest shares of all are each layer's.

    Ties go to the lower layer. A threshold is found in place of sorting: 0.1 s against 0.5 for 32 layers of 128K.
    """
    table = normalised(weights)
    assert 0 <= total <= table.numel(), (total, table.shape)
    if total == 0:
        return [0] * len(table)
    least = table.flatten().kthvalue(table.numel() - total + 1).values
    counts, tied = (table > least).sum(-1), (table == least).sum(-1)
    room = total - counts.sum()
    before = tied.cumsum(0) - tied  # in lower layers
    return (counts + torch.minimum((room - before).clamp(min=0), tied)).tolist()


def by_need_until(weights: Tensor, share: float) -> list[int]:
    """The fewest tokens that hold this mean share of the layers' sums; everything for 1, whatever sums round to."""
    table = normalised(weights)
    if share >= 1:
        return [table.shape[1]] * len(table)
    kept = table.flatten().sort(descending=True).values.cumsum(0) / len(table)
    total = 1 + int((kept < share).sum())  # the first that crosses: the sums ascend
    return by_need(weights, min(total, table.numel()))


def by_shares(shares: Sequence[float], total: int, caps: Sequence[int]) -> list[int]:
    """`total` in proportion to `shares`: whole numbers with that sum, none above its cap.

    What a cap cuts off is divided again among the others; those with no share get something only when all others are at
    their caps.
    """
    assert 0 <= total <= sum(caps), f"{total} tokens, room for {sum(caps)}"
    sizes = [0] * len(shares)
    while left := total - sum(sizes):
        free = [i for i, size in enumerate(sizes) if size < caps[i]]
        wanted = [shares[i] for i in free]
        for i, more in zip(free, largest_remainder(wanted, left), strict=True):
            sizes[i] = min(caps[i], sizes[i] + more)
    return sizes


def largest_remainder(shares: Sequence[float], total: int) -> list[int]:
    """Round `total * share` so that the sum is `total`; equal fractions favour the first."""
    whole = sum(shares)
    exact = [total * s / whole if whole > 0 else total / len(shares) for s in shares]
    sizes = [floor(x) for x in exact]
    # Fractions as decimals, since 0.8 of two products differs in the last bits.
    order = sorted(range(len(shares)), key=lambda i: -round(exact[i] - sizes[i], 9))
    for i in order[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes
