"""Slots on the device, and a host tier from which a step fetches the tokens that it names.

Without an accelerator both tiers are the same RAM, and the accounting is the same. What leaves the window can be
fetched from then on.

Not here: the host's tokens (`engine/caches/host.py`), which of them lie on the device in addition to the slots
(`engine/caches/recent.py`, `engine/caches/held.py`), a step of all rows (`engine/rows.py`).
"""

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.audit import check_selection
from kvbench.engine.books.ledger import Entry
from kvbench.engine.caches.blocks import BlockCache
from kvbench.engine.caches.held import HeldBlocks
from kvbench.engine.caches.host import Host
from kvbench.engine.caches.recent import RecentTokens
from kvbench.engine.caches.staging import StagingBuffer
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.layouts.home import Home
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.layouts.memory import Memory
from kvbench.engine.layouts.slots import Slots
from kvbench.engine.placement import Change, Offloaded, OffloadedValues, Release, Searched
from kvbench.kernels.rows.append import NO_RING, Place


class Fetching(Slots):
    """Slots and a host."""

    host: Host

    def __init__(
        self, home: Home, memory: Memory, n_kept: int, n_window: int, capacity: int, positions: Tensor | None = None
    ) -> None:
        super().__init__(home, memory, n_kept, n_window, capacity, positions)
        self.staging = home.staging  # where copies of fetched tokens lie, if the host is another memory
        self.held: HeldBlocks | None = None  # blocks that stay, if it is and there is a cache of them
        self.fetches: list[Tensor] = []  # of this step, as the host numbers its tokens: (1, heads, k)
        self.n_releases = 0  # oldest tokens of the window that leave before the next token comes

    @classmethod
    def of(cls, home: Home, placement: Offloaded) -> Layer:
        host = home.host()  # first: another engine's slots take the place of the prompt
        layer = cls.holding(home, placement, home.prompt(slice(placement.n_sink)))
        layer.meter.hold_on_host(placement.index_bytes)
        if placement.n_steps:
            most = home.s_prompt + home.n_new
            assert layer.meter.cache is None, f"layer {layer.index} has a block cache beside the latest tokens"
            layer.meter.cache, layer.staging = (
                RecentTokens(placement.n_steps, most),
                StagingBuffer(most, placement.n_steps),
            )
        return layer.from_host(host)

    @classmethod
    def of_values(cls, home: Home, placement: OffloadedValues) -> Layer:
        layer = cls.holding(home, placement, home.prompt(placement.chosen), placement.chosen)
        n_values = home.trace.shape.h_kv * placement.chosen.shape[-1]  # that are in both tiers
        layer.meter.hold_on_host(n_values * layer.meter.value_bytes)
        return layer.from_host(home.values_host())

    @classmethod
    def of_some(cls, home: Home, placement: Searched) -> Layer:
        host = home.some_host(placement.chosen, placement.on_device)
        return cls.holding(home, placement, home.prompt(slice(0))).from_host(host)

    def from_host(self, host: Host) -> Self:
        self.host = host
        self.meter.lie_far(
            host.far_bytes(self.meter.token_bytes, self.meter.value_bytes), not host.is_near, host.is_packed
        )
        if near := host.near_bytes():
            self.meter.hold_beside(near)
        self.n_gone = self.s_prompt - host.n_prompt  # tokens that a tier with some alone lacks
        self.is_far = host.device != self.device  # the host is another memory
        self.packs = host.is_packed
        return self

    # A step.

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        super().append(k_new, v_new)
        self.host.write(self.n_seen - self.s_prompt - 1, k_new, v_new)

    def places(self, k_new: Tensor, v_new: Tensor) -> list[Place]:
        found = super().places(k_new, v_new)
        return [*found, (*self.host.late, self.n_seen - self.s_prompt - 1)] if self.host.has_keys else found

    def growing(self) -> Growing | None:
        grown = None if self.packs else super().growing()
        if grown is None or not self.host.has_keys:
            return grown
        (k, v), slot = self.host.late, self.n_seen - self.s_prompt - 1
        left = k.shape[2] - slot - 1
        return Growing(grown.more, (*grown.places, (k, v, slot, NO_RING)), min(grown.n_steps, left))

    def advance(self, k_new: Tensor, v_new: Tensor) -> int:
        self.leave()
        self.fetches.clear()
        return super().advance(k_new, v_new)

    def slide(self) -> None:
        self.meter.count_released(1)

    def fetch(self, idx: Tensor, padded: bool = False) -> Part:
        """The tokens at `idx` (1, h_kv or h, k) of the host: where that is the same memory, they stay where they are.

        Where `padded`, -1 stands for no token. From another memory they are gathered there, and sent.
        """
        part = self.reach(idx if idx.is_cuda else idx.contiguous(), padded)
        n_tokens = idx.numel()
        if padded:
            part.mask = idx >= 0
            n_tokens = int(part.mask.sum())
        self.meter.count_fetch(idx, n_tokens, self.n_seen, self.n_ahead, self.n_host)
        return part.sent_to(self.device) if self.is_far else part

    def can_refetch(self, fetched: Sequence[Part]) -> bool:
        """Whether `refetch` says all of such a fetch."""
        is_plain = len(fetched) == 1 and fetched[0].mask is None
        has_cache = isinstance(self.meter.cache, BlockCache)
        is_uncounted = self.is_far or self.host.is_near  # where positions need not be read for the books
        return is_plain and is_uncounted and not self.packs and self.meter.accesses is None and not has_cache

    def refetch(self, idx: Tensor, counts: Tensor | None = None) -> None:
        """Note and count what a step like the one before it fetches, from where it lay.

        `counts`: of what was brought to the device (`kernels/rows/union.py`).
        """
        self.fetches.append(idx)
        if counts is None:
            self.meter.count_fetch(idx, idx.numel(), self.n_seen, self.n_ahead, self.n_host)
        else:
            self.meter.count_on_device(counts, idx.shape[1])

    def reach(self, idx: Tensor, padded: bool = False) -> Part:
        """The tokens at `idx` of the host, wherever that is, noted but not counted."""
        if self.checked_for:
            end = self.n_seen - self.n_gone if self.host.has_keys else self.host.n_prompt
            check_selection(self, idx, end, padded)
        shape, n_generated = self.meter.shape, self.n_seen - self.s_prompt
        assert idx.shape[1] in (shape.h, shape.h_kv), f"idx has {idx.shape[1]} heads"
        self.fetches.append(idx)
        if self.meter.accesses is not None:
            self.meter.note(n_generated, self.index, self.n_seen, self.n_ahead, self.n_host, idx)
        return self.host.tokens(idx, None, late=n_generated > self.n_window)

    def change(self, change: Change) -> Layer:
        if not isinstance(change, Release):
            raise AssertionError(f"layer {self.index} has a host and drops no tokens: {type(change).__name__}")
        assert not self.n_releases, f"layer {self.index} has released tokens in this step"
        self.n_releases = self.n_window if change.n is None else change.n
        assert self.n_releases <= self.n_window, f"layer {self.index} has {self.n_window} tokens to release"
        self.meter.count_released(self.n_releases)
        if change.index_bytes is not None:
            self.meter.hold_on_host(change.index_bytes)
        return self

    def leave(self) -> None:
        """Let released tokens go, if there are any; what stays moves to the window's first slots."""
        if not self.n_releases:
            return
        n_stay, first = self.n_window - self.n_releases, self.n_kept + self.n_releases
        if n_stay:
            assert self.n_window == self.n_seen - self.start, "a window that slid is released as a whole"
            stays = self.memory.part(first, first + n_stay)
            self.memory.write(self.n_kept, stays.k.clone(), stays.v.clone())
        self.start, self.n_window, self.n_releases = self.n_seen - n_stay, n_stay, 0

    def close(self, step: int) -> Entry:
        if self.queries is not None:
            self.meter.hold(self.queries.n_bytes(self.meter.shape))
        n_resident, n_hidden = self.n_kept + self.n_window, 0
        n_host = self.n_seen - self.n_gone - n_resident
        if self.host.is_near:  # on the device, and attended to where it was fetched
            n_resident, n_hidden, n_host = n_resident + n_host, self.meter.shape.h * n_host, 0
        return self.meter.close(step, self.index, self.n_seen, n_resident, n_host, n_hidden)

    # What methods and the step of all rows read.

    @property
    def n_ahead(self) -> int:
        """Tokens in front of the first that may be fetched; none where what is kept lies among the others."""
        return self.n_kept if self.kept_positions is None else 0

    @property
    def n_host(self) -> int:
        """Tokens from there on to the window."""
        return self.n_seen - self.n_gone - self.n_ahead - self.n_window

    def fetched(self) -> list[Tensor]:
        return [self.host.positions_of(idx, self.s_prompt) for idx in self.fetches]

    def generated(self) -> tuple[Tensor, Tensor]:
        """K and V of the generated tokens in order, the current one included."""
        assert self.host.has_keys, f"layer {self.index} has no host tier for them"
        t = self.n_seen - self.s_prompt
        # From another memory all at once: to cut there would read what the accelerator may not have written yet.
        k, v = (x.to(self.device, non_blocking=True) for x in self.host.late)
        return k[:, :, :t], v[:, :, :t]

    @property
    def n_recent(self) -> int:
        """Selections whose tokens stay on the device."""
        return 0 if self.meter.cache is None else self.meter.cache.n_steps

    def copies_first(self, idx: Tensor, padded: bool) -> bool:
        """Whether fetched tokens are copied before attention reads them: not where each is read just once."""
        return padded or idx.shape[1] != self.meter.shape.h_kv or self.meter.cache is not None

    def held_blocks(self) -> HeldBlocks | None:
        """The cache of blocks, where the layer has one: its memory is taken at the first fetch."""
        cache = self.meter.cache
        if isinstance(cache, BlockCache) and self.held is None:
            self.held = HeldBlocks(cache, (self.k, self.v), self.staging.n_tokens, self.n_ahead)
        return self.held

    def allocated_bytes(self) -> int:
        copies = self.staging.copies.nbytes if self.n_recent and self.staging.copies else 0
        near = self.host.held_bytes() if self.host.is_near else 0
        return super().allocated_bytes() + copies + near + (0 if self.held is None else self.held.nbytes)
