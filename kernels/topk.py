"""The k best of many scores, the lower index first among equals: a set that does not depend on the machine.

`torch.topk` promises no order among equal scores, and a stable sort takes ten times as long.

Shapes    scores (..., s) float32 -> indices (..., k) int64, in no order.
Paths     On a CPU topk, and where equal scores straddle the border the choice among them is made again: 1.1 times topk
          without such ties, 1.5 with them (8 rows x 32,768 scores, k = 512, one thread: 1.5 and 2.0 ms; the packed form
          2.6, a stable sort 16). On an accelerator, where asking for ties would wait for it, the packed form; a float64
          has no bits to spare and is sorted.
Keys      A GPU's kernels store `pack_key` of a score and a position in place of the score: int64, no two equal, the
          best the smallest, the position in the lower half. `top_keys` are then one launch, and who reads positions
          takes the lower half. The largest int64 stands for no token: its lower half is -1.
Checks    tests/kernels/test_topk.py.

Not here: which scores. Those without ties take `torch.topk`.
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import jit, tl

SPARE_BITS = 29  # by which a float64's mantissa is longer than a float32's
LARGEST = 2.0**128 - 2.0**104  # of float32


def top_stable(scores: Tensor, k: int) -> Tensor:
    """Indices of the `k` highest, in no order; there must be no NaN."""
    if k >= scores.shape[-1]:
        return torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    if scores.device.type == "cpu":
        return top_border(scores, k)
    return top_packed(scores, k) if scores.dtype == torch.float32 else top_stable_ref(scores, k)


def top_border(scores: Tensor, k: int) -> Tensor:
    """By topk; where more scores equal the lowest chosen one than are chosen, the first of them are taken instead."""
    chosen = scores.topk(k, sorted=False)
    if k == 0:
        return chosen.indices
    lowest = chosen.values.amin(-1, keepdim=True)
    equal, n_wanted = scores == lowest, (chosen.values == lowest).sum(-1, keepdim=True)
    if torch.equal(equal.sum(-1, keepdim=True), n_wanted):
        return chosen.indices
    taken = (scores > lowest) | (equal & (equal.cumsum(-1) <= n_wanted))
    return taken.nonzero()[:, -1].view(*scores.shape[:-1], k)


def top_packed(scores: Tensor, k: int) -> Tensor:
    """By topk of float64, whose spare bits hold the index, so that no two scores are equal. Infinity is `LARGEST`."""
    s = scores.shape[-1]
    assert scores.dtype == torch.float32 and s < 1 << SPARE_BITS, (scores.dtype, s)
    index = torch.arange(s, device=scores.device)
    # More of a mantissa is further from zero: up where the score is positive, down where it is negative.
    low = torch.where(scores < 0, index, s - 1 - index)
    # The mantissa of infinity must stay empty; + 0.0 takes the sign off -0.0.
    wide = (scores + 0.0).clamp(-LARGEST, LARGEST).double()
    return (wide.view(torch.int64) | low).view(torch.float64).topk(k, sorted=False).indices


def top_stable_ref(scores: Tensor, k: int) -> Tensor:
    """The same by a stable sort, best first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


# Keys.


def top_keys(keys: Tensor, k: int) -> Tensor:
    """The `k` smallest of keys (..., n), best first: their lower halves are positions (..., k)."""
    return keys.topk(min(k, keys.shape[-1]), largest=False).values


def pack_keys_ref(scores: Tensor, positions: Tensor) -> Tensor:
    """Keys of float32 scores."""
    bits = (scores + 0.0).view(torch.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((~rising).long() << 32) | positions


@jit
def pack_key(score, position):
    """A float32 as an integer that rises where the score falls, the position below it."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((rising ^ -1).to(tl.int64) << 32) | position.to(tl.int64)
