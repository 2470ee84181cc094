"""Blocks of K and V that layers of all rows take from one pool and give back: `Pool`, and a layer's slots in them:
`Pages`.

A block holds `BLOCK` tokens of a group of KV heads. Groups have tables of their own, so that heads which keep fewer
tokens give more blocks back. Blocks are taken as slots are written to, not as they are promised.

Not here: whose slots they are (`engine/paged/store.py`).
"""

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.errors import RunError
from kvbench.engine.shapes import ModelShape

BLOCK = 16  # tokens


class Pool:
    """Blocks, and a list of those that are free."""

    def __init__(self, n_blocks: int, shape: ModelShape, dtype: torch.dtype, heads: int = 1) -> None:
        """`heads` KV heads share a block."""
        assert shape.h_kv % heads == 0, (shape.h_kv, heads)
        self.k = torch.empty(n_blocks, heads, BLOCK, shape.d_h, dtype=dtype)
        self.v = self.k[..., : shape.d_v] if shape.is_latent else torch.empty(*self.k.shape[:3], shape.d_v, dtype=dtype)
        self.heads, self.h_kv, self.free = heads, shape.h_kv, list(range(n_blocks))[::-1]

    @property
    def n_used(self) -> int:
        return len(self.k) - len(self.free)

    def take(self) -> int:
        if not self.free:
            raise RunError(f"all {len(self.k)} blocks of the pool are taken; give it more, or ask fewer rows at once")
        return self.free.pop()

    def give(self, blocks: list[int]) -> None:
        self.free += blocks


class Pages:
    """Slots of one layer of one row: `engine/layouts/memory.py` in blocks of a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.n_slots = pool, 0
        self.tables: list[list[int]] = [[] for _ in range(pool.h_kv // pool.heads)]  # by group of KV heads

    @property
    def n_blocks(self) -> int:
        return sum(map(len, self.tables))

    @property
    def nbytes(self) -> int:
        return self.n_blocks * (self.pool.k[0].nbytes + self.pool.v[0].nbytes)

    def cover(self, n: int) -> None:
        """Let each table have blocks for the first `n` slots, and for no more."""
        most = -(-n // BLOCK)
        for table in self.tables:
            self.pool.give(table[most:])
            del table[most:]
            table += [self.pool.take() for _ in range(most - len(table))]

    def places(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Block, head of the block and token of the block of slots (h_kv or 1, n): (h_kv, n) each."""
        heads = torch.arange(self.pool.h_kv).unsqueeze(1)
        blocks = torch.tensor(self.tables, dtype=torch.long)[heads // self.pool.heads, slots // BLOCK]
        return blocks, (heads % self.pool.heads).expand_as(blocks), (slots % BLOCK).expand_as(blocks)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of K and V (1, h_kv, n, d) in slots (h_kv or 1, n)."""
        at = self.places(slots)
        return self.pool.k[at].unsqueeze(0), self.pool.v[at].unsqueeze(0)

    def put(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """The other way round."""
        at = self.places(slots)
        self.pool.k[at], self.pool.v[at] = k[0], v[0]

    # As `Memory` has it.

    def write(self, at: int, k: Tensor, v: Tensor) -> None:
        self.scatter(torch.arange(at, at + k.shape[2]), k, v)

    def scatter(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if len(slots):
            self.cover(max(int(slots.max()) + 1, len(self.tables[0]) * BLOCK))
            self.put(slots.unsqueeze(0), k, v)

    def part(self, start: int, stop: int) -> Part:
        return Part(*self.read(torch.arange(start, stop).unsqueeze(0)))

    def move(self, start: int, order: Tensor | None, places: Tensor) -> None:
        slots = torch.arange(start, start + places.shape[-1]).expand(places.shape) if order is None else start + order
        self.put(places[0], *self.read(slots[0]))

    def hold(self, k: Tensor, v: Tensor, n_free: int) -> None:
        n = k.shape[2]
        self.cover(n)
        self.n_slots = n + n_free
        self.write(0, k, v)
