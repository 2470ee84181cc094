"""How many tokens each layer and head keeps, for methods that keep the best: free functions to whole numbers.

Counts are tokens per head besides the protected ones: for each layer that is compressed one number, or a list of one
for each head. `uniform` needs no scores, nor does PyramidKV's (`methods/dropping/pyramidkv.py`); `by_need` and
`globally_best` divide the budget once the scores of all layers are there; `head_mix` and `head_protect` divide one
layer's among its heads. Among equal scores the lower layer, head and position come first.

Symbols   `c` a layer's tokens per head, of which `count[a]` would be head a's if the layer's best were kept whatever
          their head; `alpha` the share that all heads get alike.

Not here: what a token is worth (`methods/scorers.py`), which methods may be divided how
(`methods/allocator.py`).
"""

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import torch
from torch import Tensor

from kvbench.kernels.scratch import finer
from kvbench.methods.allocator import Allocator

Counts = int | list[int]  # of one layer: of every head, or of each


def uniform(count: int, n_layers: int) -> list[int]:
    """One count for all layers."""
    return [count] * n_layers


def best_of(table: Tensor, total: int) -> list[int]:
    """How many of the `total` highest numbers of a table (rows, n) are in each row; ties go to the lower row.

    A threshold is found in place of sorting: 0.1 s against 0.5 for 32 layers of 128K.
    """
    assert 0 <= total <= table.numel(), (total, table.shape)
    if total == 0:
        return [0] * len(table)
    least = table.flatten().kthvalue(table.numel() - total + 1).values
    counts, tied = (table > least).sum(-1), (table == least).sum(-1)
    room = total - counts.sum()
    before = tied.cumsum(0) - tied  # in lower rows
    return (counts + torch.minimum((room - before).clamp(min=0), tied)).tolist()


def head_mix(scores: Tensor, c: int, alpha: Fraction) -> list[int]:
    """Ada-KV's division of a layer (heads, n): alpha * c + (1 - alpha) * count[a], exact, with the sum heads * c.

    What rounding down leaves goes to the largest fractions, lower heads first.
    """
    c = min(c, scores.shape[1])
    p, q = alpha.numerator, alpha.denominator
    shares = [p * c + (q - p) * count for count in best_of(scores, len(scores) * c)]  # times q
    sizes = [share // q for share in shares]
    order = sorted(range(len(shares)), key=lambda head: -(shares[head] % q))
    for head in order[: len(scores) * c - sum(sizes)]:
        sizes[head] += 1
    return sizes


def head_mix_published(scores: Tensor, c: int, alpha: float) -> list[int]:
    """The authors' integers: each head rounded for itself, half to even in float32; the sum may be off by a few."""
    c = min(c, scores.shape[1])
    counts = torch.tensor(best_of(scores, len(scores) * c), dtype=torch.float32)
    return torch.round(counts * (1 - alpha) + int(c * alpha)).int().tolist()


def head_protect(scores: Tensor, c: int, safe: int) -> list[int]:
    """kvpress' division of a layer (heads, n): the `safe` best of each head are in, then the layer's best others."""
    c = min(c, scores.shape[1])
    if safe <= 0:
        return best_of(scores, len(scores) * c)
    others = scores.sort(dim=-1, descending=True).values[:, safe:]
    return [safe + count for count in best_of(others, len(scores) * (c - safe))]


def n_safe(c: int, n_protected: int, alpha: Fraction) -> int:
    """How many unprotected tokens of a head are safe in kvpress' rule: its share counts protected ones, and first."""
    return max(0, min(c, floor(alpha * (c + n_protected)) - n_protected))


def globally_best(scores: Sequence[Tensor], c: int) -> list[list[int]]:
    """One order over all layers (heads, n) each: as many of the highest as `c` per head and layer make."""
    heads = scores[0].shape[0]
    counts = best_of(torch.cat([*scores]), len(scores) * heads * min(c, scores[0].shape[1]))
    return [counts[first : first + heads] for first in range(0, len(counts), heads)]


def pyramid_within(s: int, c: int, n_protected: int, beta: int, n_layers: int) -> list[int]:
    """The steepest of PyramidKV's schedules that keeps at most `c` per layer in the mean, protected tokens apart."""
    for mean in range(c, 0, -1):
        counts = pyramid(s, mean + n_protected, n_protected, beta, n_layers)
        if sum(counts) <= c * n_layers:
            return counts
    return uniform(c, n_layers)


def divide_heads(allocator: Allocator, scores: Tensor, c: int, n_protected: int) -> Counts:
    """What each head of a layer keeps, from its scores (heads, n)."""
    if allocator.of_heads == "head_mix":
        return head_mix(scores, c, allocator.alpha)
    if allocator.of_heads == "head_protect":
        return head_protect(scores, c, n_safe(min(c, scores.shape[1]), n_protected, allocator.alpha))
    return c


def normalised(weights: Tensor) -> Tensor:
    """Each layer's numbers (layers, n) as shares of their sum, float64: a layer is worth 1. All zeros are uniform."""
    weights = finer(weights)
    sums = weights.sum(-1, keepdim=True)
    return torch.where(sums > 0, weights / sums, 1 / weights.shape[-1])


def by_need(weights: Tensor, total: int) -> list[int]:
    """Tokens per layer that keep most: how many of the `total` largest shares of all are each layer's."""
    return best_of(normalised(weights), total)


def whole_layers(shares: Sequence[float], few: int, mean: int, most: int) -> list[int]:
    """Layers with the lowest shares keep all of `most` tokens, as many as fit; the others keep `few` and what is left.

    SimLayerKV's division: a share is what of its attention, or scores, a layer would have with `few` tokens. The sum is
    `mean` for each layer.
    """
    n_layers = len(shares)
    n_whole = n_layers * (mean - few) // (most - few) if most > few else n_layers
    whole = {*sorted(range(n_layers), key=lambda layer: shares[layer])[:n_whole]}
    lazy = [layer for layer in range(n_layers) if layer not in whole]
    counts = [most] * n_layers
    each, n_more = divmod(n_layers * mean - n_whole * most - len(lazy) * few, max(1, len(lazy)))
    for rank, layer in enumerate(lazy):
        counts[layer] = few + each + (rank < n_more)
    return counts


def best_share(scores: Tensor, n: int) -> float:
    """Which share of the sum of a layer's numbers (n_tokens,) its `n` best have; of numbers below 0 from the lowest."""
    scores = scores - scores.min().clamp(max=0)
    return float(scores.topk(n).values.sum() / scores.sum().clamp(min=torch.finfo(scores.dtype).tiny))


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


def pyramid(s: int, cap: int, w: int, beta: int, n_layers: int) -> list[int]:
    """Most in the first layer, fewest in the last: PyramidKV's integers for a prompt of `s`, floors included.

    `cap` is the nominal mean, with the `w` protected tokens that every layer keeps.
    """
    if s < cap:
        return [max(0, s - w)] * n_layers
    mean = cap - w
    if s < 2 * mean or n_layers == 1:
        return [mean] * n_layers
    last = mean // beta
    first = 2 * mean - last
    if first >= s - w:  # too short for this slope: the first layer keeps all, the last the balance
        first = s - w
        last = 2 * mean - first
    step = (first - last) // (n_layers - 1)
    return [first - rank * step for rank in range(n_layers)]
