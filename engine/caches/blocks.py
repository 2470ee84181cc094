"""The device cache of blocks: which runs of consecutive host tokens are on the device, and what that saves.

One cache per layer, shared by its KV heads. It counts in *middle indices*, positions less the sinks. A look-up hits
where the token's block is cached; after the step the most wanted blocks are taken in, the least frequent (LFU) or the
longest unused (LRU) ones make room. Frequencies do not age and are forgotten at eviction.

Not here: counting bytes (`engine/books/meter.py`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvbench.engine.caches.device import DeviceCache, HostTokens, LookUp
from kvbench.engine.declared import Count, Tokens
from kvbench.engine.errors import ConfigError

if TYPE_CHECKING:  # settings read the specification before torch is imported
    from torch import Tensor


@dataclass(frozen=True)
class BlockCacheSpec:
    """How large the cache is and how it is refilled; `tokens=0` is no cache."""

    tokens: Tokens  # capacity
    block_len: Count
    k_cache: Count  # blocks taken in per step at most
    policy: Literal["lfu", "lru"]

    def __post_init__(self) -> None:
        if 0 < self.tokens < self.block_len:
            raise ConfigError(
                f"cache.tokens={self.tokens} holds no block of cache.block_len={self.block_len}; "
                f"use 0 for no cache or at least {self.block_len}"
            )


class BlockCache(DeviceCache):
    """The blocks of one layer that lie on the device."""

    def __init__(self, spec: BlockCacheSpec) -> None:
        self.spec = spec
        self.capacity = spec.tokens // spec.block_len  # in blocks
        # Cached block -> touches; ordered by the last touch, oldest first.
        self.frequency: dict[int, int] = {}

    def look_up(self, idx: "Tensor", h_kv: int, host: HostTokens, padded: bool) -> LookUp:
        tokens = idx[idx >= 0]
        if idx.shape[1] == h_kv:
            distinct, hits_of_heads = tokens, None
        else:
            from kvbench.engine.caches.recent import distinct_tokens

            distinct = distinct_tokens(idx, h_kv, host.n_seen)
            hits_of_heads = self.count_hits(self.count_blocks(tokens - host.n_kept))
        hits, filled = self.access(distinct - host.n_kept, host.n_complete // self.spec.block_len)
        of_heads = hits if hits_of_heads is None else hits_of_heads
        return LookUp(len(distinct), hits, of_heads, filled * self.spec.block_len)

    def read_counts(self, n_distinct: int, n_there: int, by_age: Sequence[int], blocks: Sequence[int]) -> LookUp:
        hits, hits_of_heads, filled = blocks
        return LookUp(n_distinct, hits, hits_of_heads, filled * self.spec.block_len)

    def n_held(self, h_kv: int) -> int:
        return self.capacity * self.spec.block_len * h_kv

    def access(self, middle: "Tensor", n_complete: int) -> tuple[int, int]:
        """Look up the middle indices of one step, (heads, k), then refill: hits, and blocks copied in.

        Only the first `n_complete` blocks may be taken in: a block that is still growing would be served stale.
        """
        wanted = self.count_blocks(middle)
        hits = self.count_hits(wanted)
        before = set(self.frequency)
        for block in self.refill_order(wanted):
            if block < n_complete:
                self.touch(block)
        return hits, len(self.frequency.keys() - before)

    def count_blocks(self, middle: "Tensor") -> Counter[int]:
        """How many of these middle indices lie in which block."""
        return Counter((middle.flatten() // self.spec.block_len).tolist())

    def count_hits(self, wanted: Counter[int]) -> int:
        """How many of the tokens lie in cached blocks."""
        return sum(count for block, count in wanted.items() if block in self.frequency)

    def refill_order(self, wanted: Counter[int]) -> list[int]:
        """The most wanted blocks first, lower ids first among equals."""
        return sorted(wanted, key=lambda block: (-wanted[block], block))[: self.spec.k_cache]

    def touch(self, block: int) -> None:
        """Use `block`, taking it in where it is not cached."""
        if block not in self.frequency and len(self.frequency) >= self.capacity:
            oldest = next(iter(self.frequency))
            rarest = min(self.frequency, key=lambda b: self.frequency[b])  # the oldest among equals
            del self.frequency[rarest if self.spec.policy == "lfu" else oldest]
        self.frequency[block] = self.frequency.pop(block, 0) + 1  # moves it to the end: most recent
