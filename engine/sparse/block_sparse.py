"""Block-sparse prefill (as in sparse-frontier, Nawrot et al., 2025, arXiv 2504.17768, after MInference's).

A row of blocks of queries sees the blocks of keys whose mean key has the largest product with its mean query. The first
block, its own and the one before it are always among them.

Symbols   paper chunk_size, top_chunks = `block`, `top_chunks`.
Cost      (s / block)² products, 1 / block² of all pairs'.
Differs   nothing in what is kept: the last block's mean divides by `block` even where it is shorter, as theirs does.
Fails     where a single token counts: its block's mean hides it.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.engine.declared import Count
from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.blocks import BlockRule, means, meets, places, products
from kvbench.kernels.scratch import finer

ALWAYS = 3  # blocks: the first, the one before a row's own, its own


@dataclass(frozen=True, kw_only=True)
class BlockSparse(BlockRule):
    """The keys of conf/prefill/block_sparse.yaml."""

    block: Count
    top_chunks: Annotated[int, Ge(ALWAYS)]  # blocks of keys that a row sees

    title: ClassVar[str] = "Block-sparse"

    @property
    def sides(self) -> tuple[int, int]:
        return self.block, self.block

    def keeps_all(self, s: int) -> bool:
        return s <= (ALWAYS if self.density is not None else self.top_chunks) * self.block

    def estimate(self, s: int) -> float:
        return 1 / self.block**2

    def level(self, layer: int, s: int, like: Tensor) -> Tensor | float:
        return self.top_chunks

    def levels(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        s, n = k.shape[2], -(-k.shape[2] // self.block)
        scores = products(*(means(x, self.block, divide_by_block=True) for x in (q, k)))
        scores.masked_fill_(~meets(s, self.block, self.block, q.device), -torch.inf)
        behind = torch.arange(n, device=q.device).unsqueeze(-1) - torch.arange(n, device=q.device)
        always = (behind == 0) | (behind == 1)
        always[:, 0] = True
        scores.masked_fill_(always, torch.inf)
        rank = places(scores.sort(dim=-1, descending=True, stable=True).indices) + 1
        return finer(rank).masked_fill_(always, -torch.inf)
