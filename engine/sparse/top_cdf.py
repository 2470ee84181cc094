"""Top-cdf, as SpargeAttention selects (Zhang et al., 2025, arXiv 2502.18137): block means, where they may speak.

Blocks whose tokens are alike are judged by their means: a row of blocks keeps the largest weights up to a share `cdf`.
Blocks whose tokens differ are always computed: such keys in all rows, and such queries with all keys.

Symbols   paper b_q, b_k, theta, tau = `block_q`, `block_k`, `sim_threshold`, `cdf`.
Cost      products of block means, 1 / (block_q * block_k) of all pairs'.
Differs   selection only: their 8-bit products and the kernel that skips while it computes are speed. A row's own blocks
          are always kept here; theirs can leave a query without a key.
Fails     as all rules of means do, and computes nearly everything where no block's tokens are alike.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvbench.engine.declared import Count, Is, Share
from kvbench.engine.errors import ConfigError
from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.blocks import BlockRule, means, places, products
from kvbench.kernels.scratch import finer, finest


@dataclass(frozen=True, kw_only=True)
class TopCdf(BlockRule):
    """The keys of conf/prefill/top_cdf.yaml."""

    block_q: Count
    block_k: Count
    # Mean cosine of a block's tokens above which its mean speaks for it.
    sim_threshold: Annotated[Fraction, Ge(-1), Le(1), Is("a cosine from -1 to 1")]
    cdf: Share | None  # share of a row's weights; null: `topk`; a `density` fixes either instead
    topk: Share | None  # share of all blocks of keys that a row keeps
    smooth_k: bool  # keys less their mean over the prompt
    attention_sink: bool  # the first block is always kept

    title: ClassVar[str] = "Top-cdf (SpargeAttention-like)"
    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.cdf is None) == (self.topk is None):
            raise ConfigError(
                "prefill.cdf and prefill.topk are two ways to say what a row keeps; give one of them and null for the "
                "other"
            )

    @property
    def sides(self) -> tuple[int, int]:
        return self.block_q, self.block_k

    def keeps_all(self, s: int) -> bool:
        return s <= self.block_q or (self.density is None and 1 in (self.cdf, self.topk))

    def estimate(self, s: int) -> float:
        return 1 / (self.block_q * self.block_k)

    def level(self, layer: int, s: int, like: Tensor) -> Tensor | float:
        if self.cdf is not None:
            return float(self.cdf)
        assert self.topk is not None
        return int(self.topk * -(-s // self.block_k))

    def levels(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        g, k = q.shape[1] // k.shape[1], k.float()
        if self.smooth_k:
            k = k - k.mean(2, keepdim=True)
        alike_q, alike_k = alike(q, self.block_q), alike(k, self.block_k).repeat_interleave(g, 0)
        alike_q, alike_k = alike_q > float(self.sim_threshold), alike_k > float(self.sim_threshold)
        n_q, n_k = alike_q.shape[1], alike_k.shape[1]
        rows, keys = torch.arange(1, n_q + 1, device=q.device).unsqueeze(-1), torch.arange(n_k, device=q.device)
        causal = keys * self.block_k < rows * self.block_q
        logits = softmax.bent(products(means(q, self.block_q), means(k, self.block_k)))
        speaks = causal & alike_k.unsqueeze(1)
        logits.masked_fill_(~speaks, torch.finfo(torch.float32).min)
        order = finer(logits.softmax(-1).masked_fill_(~speaks, 0)).sort(dim=-1, descending=True, stable=True)
        if self.cdf is not None:
            by_rank = order.values.cumsum(-1)
        else:
            by_rank = torch.arange(1.0, n_k + 1, dtype=finest(q.device), device=q.device).repeat(
                *order.values.shape[:2], 1
            )
        by_rank[..., 0] = -torch.inf  # one at least
        levels = by_rank.gather(-1, places(order.indices))
        always = ~alike_k.unsqueeze(1) | ~alike_q.unsqueeze(-1)
        if self.attention_sink:
            always = always | (keys == 0)
        return levels.masked_fill(always, -torch.inf).masked_fill(~causal, torch.inf)


def alike(x: Tensor, block: int) -> Tensor:
    """Mean cosine of all pairs of tokens in a block, a token with itself included: (heads, blocks) float32."""
    return means(torch.nn.functional.normalize(x.float(), dim=-1), block).square().sum(-1)
