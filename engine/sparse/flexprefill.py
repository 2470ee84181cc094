"""FlexPrefill (Lai et al., 2025, arXiv 2502.20766): each head takes as many columns and diagonals as its weights need.

The prompt's last queries show a head's columns and distances. So many of each are kept, in whole blocks, as it takes to
hold a share gamma of the weights. Where the head's block means tell the same weights, the head is query-aware: it keeps
the least of columns and distances, and of all pairs of block means the largest up to the same share.

Symbols   paper block_size, gamma, tau, min_budget = `block`, `gamma`, `tau`, `min_budget`.
Cost      `block` queries on all keys, 2 * block / s of all pairs; means of blocks in addition.
Differs   the paper selects columns and diagonals of tokens; as in the authors' code their number counts, in blocks of
          `cover_unit` tokens, and whole blocks are taken. Theirs has 128 there whatever the block; null is the block.
          As in their code, diagonals of a prompt that is no multiple of `block` are pooled from its first token on.
Fails     where the prompt's last tokens are a template that asks for nothing: they choose for all.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.engine.declared import Count, Share, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.blocks import BlockRule, means, meets, places, products
from kvbench.engine.sparse.vertical_slash import votes
from kvbench.kernels.scratch import finer


@dataclass(frozen=True, kw_only=True)
class FlexPrefill(BlockRule):
    """The keys of conf/prefill/flexprefill.yaml."""

    block: Count
    gamma: Share  # share of the weights; a `density` fixes it instead
    tau: Share  # heads whose means are no further from their weights are query-aware; 0: none
    min_budget: Window  # tokens of columns and of distances that a head keeps at least; with a `density`, one block
    max_budget: Window | None  # and at most
    cover_unit: Count | None  # columns or distances that count as a block; null: `block`

    title: ClassVar[str] = "FlexPrefill"
    version: ClassVar[int] = 2
    asks_last: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_budget is not None and self.max_budget < self.min_budget:
            raise ConfigError(
                f"prefill.max_budget={self.max_budget} is below prefill.min_budget={self.min_budget}; give no less"
            )

    @property
    def sides(self) -> tuple[int, int]:
        return self.block, self.block

    @property
    def least(self) -> int:
        """Blocks of columns and of distances that a head keeps at least."""
        return 1 if self.density is not None else -(-self.min_budget // self.block)

    def keeps_all(self, s: int) -> bool:
        return s <= max(2, self.least) * self.block

    def estimate(self, s: int) -> float:
        return min(1.0, 2 * self.block / s)

    def level(self, layer: int, s: int, like: Tensor) -> Tensor | float:
        return float(self.gamma)

    def levels(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        s, b = k.shape[2], self.block
        n = -(-s // b)
        vertical, slash = (x / b for x in votes(q[:, :, -b:], k, softmax))  # (h, s), the latter by distance
        slash = slash.flip(-1)
        of_columns, of_distances = (
            torch.nn.functional.pad(x, (0, n * b - s)).unflatten(-1, (n, b)).sum(-1) for x in (vertical, slash)
        )
        aware = self.query_aware(q, k, softmax, of_columns)
        columns = self.taken(vertical, of_columns, aware)
        distances = self.taken(slash.flip(-1), of_distances.flip(-1), aware)
        behind = torch.arange(n, device=q.device).unsqueeze(-1) - torch.arange(n, device=q.device)
        levels = torch.minimum(columns.unsqueeze(1), distances[:, behind.clamp(min=0)])
        return torch.where(aware[:, None, None], torch.minimum(levels, self.of_means(q, k, softmax)), levels)

    def query_aware(self, q: Tensor, k: Tensor, softmax: Softmax, of_columns: Tensor) -> Tensor:
        """Which heads' block means tell what their last queries see: (h,) bool. None of a prompt that is kept whole."""
        if self.keeps_all(k.shape[2]):
            return torch.zeros(q.shape[1], dtype=torch.bool, device=q.device)
        last = q[0, :, -self.block :].float().mean(1, keepdim=True)  # (h, 1, d_h)
        guess = finer(softmax.bent(products(last, means(k, self.block)).squeeze(1)).softmax(-1))
        found = finer(of_columns)
        middle = (guess + found) / 2
        # Entropies, so that a block that neither side looks at adds 0, where a quotient would be 0 / 0.
        of_each = torch.xlogy(guess, guess) + torch.xlogy(found, found)
        divergence = of_each.sub(torch.xlogy(middle, middle), alpha=2).sum(-1) / 2
        return divergence.clamp(min=0).sqrt() < float(self.tau)

    def taken(self, weights: Tensor, of_blocks: Tensor, aware: Tensor) -> Tensor:
        """From which gamma on a head keeps each block: (h, n) float64; the first block always."""
        n, unit = of_blocks.shape[1], self.cover_unit or self.block
        so_far = finer(weights).sort(-1, descending=True).values.cumsum(-1)
        # A head keeps c // unit + 1 blocks, c one more than the entries whose sum is no more than gamma.
        entry = torch.arange(n, device=weights.device) * unit - 2
        by_rank = so_far[:, entry.clamp(0, so_far.shape[1] - 1)]
        by_rank = by_rank.masked_fill(entry >= so_far.shape[1], torch.inf).masked_fill(entry < 0, -torch.inf)
        by_rank[:, 1:].masked_fill_(aware.unsqueeze(-1), torch.inf)
        by_rank[:, : self.least] = -torch.inf
        if self.max_budget is not None:
            by_rank[:, -(-self.max_budget // self.block) :] = torch.inf
        scores = of_blocks.clone()
        scores[:, 0] = torch.inf
        rank = places(scores.sort(dim=-1, descending=True, stable=True).indices)
        return by_rank.gather(-1, rank)

    def of_means(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        """From which gamma on a query-aware head keeps each pair of blocks: all rows of it in one order."""
        n = -(-k.shape[2] // self.block)
        logits = softmax.bent(products(means(q, self.block), means(k, self.block)))
        logits.masked_fill_(~meets(k.shape[2], self.block, self.block, q.device), -torch.inf)
        weights = finer(logits.softmax(-1)).flatten(1)
        order = weights.sort(dim=-1, descending=True, stable=True)
        return (order.values.cumsum(-1) / n).gather(-1, places(order.indices)).unflatten(-1, (n, n))
