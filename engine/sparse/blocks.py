"""Rules that keep whole blocks, each from a level on: `BlockRule`.

A rule gives every block of queries and keys a level: the smallest value of the rule's free parameter at which it is
computed, -inf where it always is. What the rule itself keeps are the blocks up to its parameter; a `density` is met by
sorting the levels of all heads and taking the largest that fits. Equal levels are taken together or not at all.

Not here: the levels (each rule's file).
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.base import SparsePrefill
from kvbench.kernels.attend_kept import Kept


@dataclass(frozen=True, kw_only=True)
class BlockRule(SparsePrefill):
    """A sparse prefill of whole blocks."""

    @property
    @abstractmethod
    def sides(self) -> tuple[int, int]:
        """Queries and keys of a block."""

    @abstractmethod
    def levels(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        """(h, blocks of queries, blocks of keys), never NaN."""

    @abstractmethod
    def level(self, layer: int, s: int, like: Tensor) -> Tensor | float:
        """The rule's own parameter, as it compares with `levels`."""

    def choose(self, q: Tensor, k: Tensor, softmax: Softmax, layer: int) -> Kept:
        s, (block, block_k) = k.shape[2], self.sides
        levels = self.levels(q, k, softmax).masked_fill(own(s, block, block_k, q.device), -torch.inf)
        dense_from = s - self.n_dense(s)
        pairs = pairs_of_blocks(s, block, block_k, dense_from, q.device)
        if self.density is None:
            bound = self.level(layer, s, levels)
        else:
            dense = (s * (s + 1) - dense_from * (dense_from + 1)) // 2
            bound = within(levels, pairs, (self.n_pairs(s) - dense) * len(levels))
        blocks = (levels <= bound) & meets(s, block, block_k, q.device)
        return Kept(s, block, dense_from, blocks, block_k)


def within(levels: Tensor, pairs: Tensor, n: int) -> Tensor:
    """The largest level, a scalar, up to which all blocks together have no more than `n` pairs; -inf where none has."""
    order = levels.flatten().sort()
    so_far = pairs.expand_as(levels).flatten()[order.indices].cumsum(0)
    behind = torch.searchsorted(order.values, order.values, right=True)  # of equal levels all count
    fits = (so_far[behind - 1] <= n).sum()
    last = order.values.take(fits.clamp(min=1) - 1)
    return torch.where(fits > 0, last, -torch.inf)


def spans(s: int, block: int, block_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The token after each block of queries (n_q, 1), and the one after each block of keys (n_k,)."""
    queries = torch.arange(1, -(-s // block) + 1, device=device).mul_(block).clamp_(max=s)
    keys = torch.arange(1, -(-s // block_k) + 1, device=device).mul_(block_k).clamp_(max=s)
    return queries.unsqueeze(-1), keys


def meets(s: int, block: int, block_k: int, device: torch.device) -> Tensor:
    """Which blocks have a causal pair: (n_q, n_k) bool."""
    queries, keys = spans(s, block, block_k, device)
    return (keys - 1) // block_k * block_k < queries


def own(s: int, block: int, block_k: int, device: torch.device) -> Tensor:
    """Which blocks have a query's own key: (n_q, n_k) bool."""
    queries, keys = spans(s, block, block_k, device)
    return meets(s, block, block_k, device) & (keys > (queries - 1) // block * block)


def pairs_of_blocks(s: int, block: int, block_k: int, until: int, device: torch.device) -> Tensor:
    """Causal pairs of the first `until` queries in each block: (n_q, n_k) int64."""
    queries, keys = spans(s, block, block_k, device)
    queries, keys = (
        torch.nn.functional.pad(x, (0, 0, 1, 0) if x.ndim == 2 else (1, 0)).clamp(max=until) for x in (queries, keys)
    )
    fewer = torch.minimum(queries, keys)
    n = fewer * (fewer + 1) // 2 + (queries - fewer) * keys  # of queries and keys before the two
    return n.diff(dim=0).diff(dim=1)


def means(x: Tensor, block: int, divide_by_block: bool = False) -> Tensor:
    """Means (heads, blocks, d_h) float32 of tokens (1, heads, s, d_h); the last of its length, or of `block`."""
    s = x.shape[2]
    n = -(-s // block)
    sums = torch.nn.functional.pad(x[0].float(), (0, 0, 0, n * block - s)).unflatten(1, (n, block)).sum(2)
    sizes = torch.full((n, 1), block, device=x.device)
    if not divide_by_block:
        sizes[-1] = s - (n - 1) * block
    return sums / sizes


def products(of_q: Tensor, of_k: Tensor) -> Tensor:
    """(h, blocks of queries, blocks of keys): each query head with the keys of its group's head."""
    return of_q @ of_k.repeat_interleave(len(of_q) // len(of_k), 0).mT


def places(order: Tensor) -> Tensor:
    """Where each entry stands in an order of the last dimension, from 0."""
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
