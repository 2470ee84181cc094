"""A cache of blocks on an accelerator: the memory of its blocks, and its tables, which the accelerator keeps itself.

What is cached, counted and taken in is what `engine/caches/blocks.py` says.

Not here: looking up and copying (`kernels/rows/blocks.py`).
"""

import torch
from torch import Tensor

from kvbench.engine.caches.blocks import BlockCache
from kvbench.kernels.gather import bytes_of_both, move_both
from kvbench.kernels.rows.blocks import BLOCK, SLOT, Cached
from kvbench.kernels.rows.union import Ask


class HeldBlocks:
    """The blocks of one layer."""

    def __init__(self, cache: BlockCache, like: tuple[Tensor, Tensor], n_tokens: int, n_ahead: int) -> None:
        """K and V `like` (1, h_kv, …) have heads, widths, type and device; `n_tokens` may be seen in the end."""
        spec, numbers = cache.spec, {"dtype": torch.int32, "device": like[0].device}
        n = cache.capacity * spec.block_len
        self.spec, self.n_ahead = spec, n_ahead
        self.k, self.v = move_both(lambda x: x.new_empty(1, x.shape[1], n, x.shape[3]), *like)
        self.blocks = torch.zeros(len(BLOCK), (n_tokens - n_ahead) // spec.block_len + 1, **numbers)
        self.blocks[BLOCK.index("where")] = -1
        self.slots = torch.zeros(len(SLOT), cache.capacity, **numbers)
        self.state = torch.zeros(2, **numbers)

    def cached(self, ask: Ask, n_host: int) -> Cached:
        """The cache for a selection; of the host's tokens after those ahead the first `n_host` are complete."""
        spec = self.spec
        return Cached(
            ask, self.blocks, self.slots, self.state, self.k, self.v, spec.block_len, spec.k_cache,
            spec.policy == "lru", self.n_ahead, n_host // spec.block_len,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        return bytes_of_both(self.k, self.v)
