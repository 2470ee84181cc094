"""K and V of one layer as they lie in vLLM's blocks: `Pages`.

vLLM's tensor of a layer is [blocks, h_kv, block, 2 d_h] everywhere, and a layout says what its last two dimensions are.
`vec` is the CPU kernel's (`isa=vec`, which float32 takes): of a block and head the first half holds K, dimension by
dimension, and the second half V, token by token. `beside` is FlashAttention's, FlashInfer's and Triton's: a token's K
and V lie beside each other. Whether heads, tokens or layers come first in memory (vLLM's HND, NHD, BLHNC and others) is
in the tensor's strides, which views keep.

Not here: whose blocks they are (`serving/reader.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from kvbench.engine.layouts.memory import Pair

Layout = Callable[[Tensor], Pair]


def vec(cache: Tensor) -> Pair:
    blocks, h_kv, block, width = cache.shape
    k, v = cache.view(blocks, h_kv, 2 * block, width // 2).chunk(2, 2)
    return k.as_strided(v.shape, (*k.stride()[:2], 1, block), k.storage_offset()), v


def beside(cache: Tensor) -> Pair:
    k, v = cache.chunk(2, -1)
    return k, v


@dataclass(eq=False)
class Pages:
    """Pages of keys and values of all requests."""

    k: Tensor  # (blocks, h_kv, block, d_h), views of vLLM's memory
    v: Tensor

    @classmethod
    def of(cls, cache: Tensor, layout: Layout = vec) -> "Pages":
        """Pages of a layer's tensor as vLLM has it."""
        return cls(*layout(cache))

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.v.shape[2]

    @property
    def device(self) -> torch.device:
        return self.v.device

    def places(self, table: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Block, head and place in the block of slots (h_kv or 1, n) of a request with these blocks (m,)."""
        heads = torch.arange(self.v.shape[1], device=self.device).unsqueeze(1)
        return table[slots // self.block], heads, slots % self.block

    def read(self, table: Tensor, slots: Tensor) -> Pair:
        """Copies of K and V (1, h_kv, n, d_h)."""
        at = self.places(table, slots)
        return self.k[at].unsqueeze(0), self.v[at].unsqueeze(0)

    def write(self, table: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """The other way round."""
        at = self.places(table, slots)
        self.k[at], self.v[at] = k[0], v[0]


def apart(cache: Tensor) -> tuple[Tensor, int, int]:
    """Blocks of one head (n, 1, block, 2 d_h) where vLLM has blocks of all heads, without a copy.

    Head h of block b is block b * x + h * y of these, of which x and y are returned. Where heads do not lie one after
    the other in memory, such blocks overlap, and most numbers are nobody's.
    """
    blocks, h_kv, block, width = cache.shape
    by_block, by_head, by_token, one = cache.stride()
    unit = gcd(by_block, by_head)
    x, y = by_block // unit, by_head // unit
    n = (blocks - 1) * x + (h_kv - 1) * y + 1
    return cache.as_strided((n, 1, block, width), (unit, unit, by_token, one), cache.storage_offset()), x, y
