"""K and V of one layer as they lie in vLLM's blocks: `Pages`.

vLLM's CPU kernel has blocks [blocks, h_kv, block, 2 d_h]. Of a block and head the first half holds K, dimension by
dimension, and the second half V, token by token (`isa=vec`, which float32 takes).

Not here: whose blocks they are (`serving/reader.py`), other layouts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.layouts.memory import Pair


@dataclass(eq=False)
class Pages:
    """Pages of keys and values of all requests."""

    k: Tensor  # (blocks, h_kv, d_h, block), views of vLLM's memory
    v: Tensor  # (blocks, h_kv, block, d_h)

    @classmethod
    def of(cls, cache: Tensor) -> "Pages":
        """Pages of a layer's tensor as vLLM has it."""
        blocks, h_kv, block, width = cache.shape
        k, v = cache.view(blocks, h_kv, 2 * block, width // 2).chunk(2, 2)
        strides = (*k.stride()[:2], block, 1)
        return cls(k.as_strided((blocks, h_kv, width // 2, block), strides, k.storage_offset()), v)

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.v.shape[2]

    def places(self, table: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Block, head and place in the block of slots (h_kv or 1, n) of a request with these blocks (m,)."""
        heads = torch.arange(self.v.shape[1]).unsqueeze(1)
        return table[slots // self.block], heads, slots % self.block

    def read(self, table: Tensor, slots: Tensor) -> Pair:
        """Copies of K and V (1, h_kv, n, d_h)."""
        block, head, place = self.places(table, slots)
        return self.k[block, head, :, place].unsqueeze(0), self.v[block, head, place].unsqueeze(0)

    def write(self, table: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """The other way round."""
        block, head, place = self.places(table, slots)
        self.k[block, head, :, place], self.v[block, head, place] = k[0], v[0]
