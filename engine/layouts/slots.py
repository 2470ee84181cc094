"""Slots in memory of a layer's own: what is kept, and after it the window, a ring where it slides.

What is kept need not be tokens of the trace: a method may put K and V of its own making there, each with a `bias` that
is added to its logits; and query heads of a group may see tokens of their own.

Not here: tokens that can be fetched (`engine/layouts/fetching.py`), a prompt that stays whole
(`engine/layouts/whole.py`).
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.ledger import Entry
from kvbench.engine.budget import ELEMENT_BYTES
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.layouts.home import Home
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.layouts.memory import Buffers, Memory
from kvbench.engine.placement import Change, Evict, Kept, Made, Placement, Stay
from kvbench.kernels.gather import gather_tokens, move_both
from kvbench.kernels.rows.append import Place
from kvbench.kernels.select_attend import NEVER


class Slots(Layer):
    """Kept tokens and window in one memory."""

    def __init__(
        self, home: Home, memory: Memory, n_kept: int, n_window: int, capacity: int, positions: Tensor | None = None
    ) -> None:
        super().__init__(home, n_kept, n_window, capacity, positions)
        self.memory = memory

    @classmethod
    def of(cls, home: Home, placement: Kept) -> Layer:
        if isinstance(placement.chosen, int):
            return cls.holding(home, placement, home.prompt(slice(placement.chosen)))
        if placement.chosen.shape[1] != home.trace.shape.h_kv:
            return Marked.of(home, placement)
        return cls.holding(home, placement, home.prompt(placement.chosen), placement.chosen)

    @classmethod
    def holding(
        cls, home: Home, placement: Placement, kept: tuple[Tensor, Tensor], positions: Tensor | None = None
    ) -> Self:
        """The kept tokens, the prompt's last ones after them, and room for those to come."""
        _, n_window, capacity = placement.size(home.s_prompt, home.n_new)
        n_kept = kept[0].shape[2]
        assert n_kept + n_window <= home.s_prompt, (n_kept, n_window, home.s_prompt)
        memory = home.memory([kept, home.latest(n_window)], max(0, capacity - n_window))
        return cls(home, memory, n_kept, n_window, capacity, positions)

    @property
    def k(self) -> Tensor:
        return self.memory.k  # type: ignore[attr-defined]  # of an accelerator, which has `Buffers`

    @property
    def v(self) -> Tensor:
        return self.memory.v  # type: ignore[attr-defined]

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        place = self.advance(k_new, v_new)
        if place >= 0:
            self.memory.write(self.n_front + place, k_new, v_new)

    def places(self, k_new: Tensor, v_new: Tensor) -> list[Place]:
        place = self.advance(k_new, v_new)
        return [] if place < 0 else [(self.k, self.v, self.n_front + place)]

    def growing(self) -> Growing | None:
        if not isinstance(self.memory, Buffers):
            return None
        if not self.capacity:
            return Growing((0,), (), NEVER)
        n_free, slot = self.capacity - self.n_window, (self.n_seen - 1 - self.start) % self.capacity
        place = (self.k, self.v, self.n_front + slot, (self.n_front, self.capacity))
        return Growing((int(n_free > 0),), (place,), n_free or NEVER)

    def write_window(self, places: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Put tokens (1, h_kv, n, d_h) that were counted in to their places in the window."""
        self.memory.scatter(torch.tensor(places, device=self.device) + self.n_front, k, v)

    @property
    def n_front(self) -> int:
        """Slots in front of the window."""
        return self.n_kept

    def resident(self) -> list[Part]:
        return [self.memory.part(0, self.n_front + self.n_window)]

    def kept_and_window(self) -> tuple[Part, Part]:
        """Kept tokens and window as two parts: for methods that turn the query for one of the two."""
        return self.memory.part(0, self.n_kept), self.memory.part(self.n_kept, self.n_kept + self.n_window)

    # Dropping.

    def change(self, change: Change) -> Layer:
        if isinstance(change, Evict):
            self.evict(change.slots)
        elif isinstance(change, Stay):
            room = self.capacity - self.n_window if change.room is None else change.room
            positions = self.leave_all_but(change.slots)
            self.memory.hold(*move_both(lambda x: gather_tokens(x, change.slots), *self.tokens()), room)
            self.kept_from_now_on(positions)
        else:
            return super().change(change)
        return self

    def evict(self, slots: Tensor) -> None:
        """Drop the tokens in these slots: what stays is kept from then on, and the window begins anew after it."""
        self.assert_drops()
        assert self.n_window == self.n_seen - self.start > 0, f"layer {self.index} has a window that slid"
        positions = self.positions()  # (1, h_kv, n)
        n, k = positions.shape[-1], slots.shape[-1]
        holes, order = moves(slots, n)
        self.memory.move(n - k, order, holes)
        last = positions[..., n - k :]
        last = last if order is None else last.gather(-1, order)
        self.evictions = positions.gather(-1, slots)
        self.kept_from_now_on(positions.scatter(-1, holes, last)[..., : n - k])

    def has_evicted(self, positions: Tensor, evicted: Tensor) -> None:
        """Evict one token per head (`evict`), where a kernel has moved the newest token already.

        `evicted` (1, h_kv, 1) are positions that left, `positions` (1, h_kv, n - 1) those that stayed, slot by slot.
        """
        self.assert_drops()
        self.evictions = evicted
        self.kept_from_now_on(positions)

    def leave_all_but(self, slots: Tensor) -> Tensor:
        """Note that all but these slots' tokens leave: the positions of those that stay."""
        self.assert_drops()
        positions = self.positions()
        n, k = positions.shape[-1], slots.shape[-1]
        leaves = torch.ones_like(positions, dtype=torch.int8).scatter_(-1, slots, 0)
        self.evictions = positions.gather(-1, leaves.topk(n - k).indices)  # a mask's own indices would have to wait
        return positions.gather(-1, slots)

    def count_in(self, n_held: int) -> None:
        """Count the current token in, where the caller keeps the tokens until `hold`: `n_held` of them by now."""
        self.n_seen, self.n_window, self.evictions = self.n_seen + 1, n_held - self.n_kept, None

    def hold(self, k: Tensor, v: Tensor, positions: Tensor, held: Tensor) -> None:
        """From now on hold these tokens alone, `held` (1, h_kv, k) of k and v (1, h_kv, n, d_h) at their positions."""
        self.assert_drops()
        tokens = move_both(lambda x: gather_tokens(x, held), k, v)
        self.memory.hold(*tokens, self.memory.n_slots - held.shape[-1])
        self.kept_from_now_on(positions.gather(-1, held))

    def assert_drops(self) -> None:
        assert self.evictions is None, f"layer {self.index} has dropped tokens in this step"

    def kept_from_now_on(self, positions: Tensor) -> None:
        """The first slots hold these tokens (1, h_kv, n), and all other slots are free for a new window."""
        self.kept_positions, self.n_kept = positions, positions.shape[-1]
        self.capacity = self.memory.n_slots - self.n_kept
        self.start, self.n_window = self.n_seen, 0

    def allocated_bytes(self) -> int:
        return self.memory.nbytes


class Marked(Slots):
    """Slots whose kept tokens are hidden from some heads, or carry a bias. None of them leaves."""

    def __init__(
        self, home: Home, memory: Memory, n_kept: int, n_window: int, capacity: int, positions: Tensor | None = None
    ) -> None:
        super().__init__(home, memory, n_kept, n_window, capacity, positions)
        self.bias: Tensor | None = None  # (1, h_kv, n_kept) float32, what is added to the logits of kept tokens

    @classmethod
    def of(cls, home: Home, placement: Kept) -> Layer:
        """Query heads chose tokens of their own: their KV head keeps the union."""
        assert isinstance(placement.chosen, Tensor)
        kept, mask = union_of(placement.chosen, home.trace.shape.h_kv, home.s_prompt)
        layer = cls.holding(home, placement, home.prompt(kept), kept)
        layer.hide(mask)
        return layer

    @classmethod
    def made(cls, home: Home, placement: Made) -> Layer:
        layer = cls.holding(home, placement, (placement.k, placement.v), placement.positions)
        there = placement.positions >= 0
        if not bool(there.all()):
            layer.hide(there.repeat_interleave(home.trace.shape.g, 1))
        if placement.bias is not None:
            layer.bias = placement.bias
            layer.meter.hold_beside(ELEMENT_BYTES * (home.trace.shape.h_kv * layer.n_kept - layer.n_spare))
        return layer

    def growing(self) -> Growing | None:
        grown = super().growing()  # the mask has room for all
        return grown if grown is None or self.bias is None else grown._replace(more=(0, *grown.more))

    def hide(self, mask: Tensor) -> None:
        """Hide kept tokens from a query head where `mask` (1, h, n_kept) is False."""
        hidden = ~mask
        self.mask = torch.nn.functional.pad(mask, (0, self.capacity), value=True)
        self.n_hidden = int(hidden.sum())
        self.n_spare = int(hidden.unflatten(1, (self.meter.shape.h_kv, -1)).all(2).sum())

    def resident(self) -> list[Part]:
        (held,) = super().resident()
        held.mask = None if self.mask is None else self.mask[..., : held.n_tokens()]
        if self.bias is None:
            return [held]
        kept, window = self.kept_and_window()  # generated tokens have no bias, and stand apart
        kept.mask, kept.bias = None if held.mask is None else held.mask[..., : self.n_kept], self.bias
        return [kept, window]

    def kept_counts(self) -> list[int]:
        counts = super().kept_counts()
        if self.mask is None:
            return counts
        spare = (~self.mask[..., : self.n_kept]).unflatten(1, (len(counts), -1)).all(2).sum(-1)
        return [count - n for count, n in zip(counts, spare[0].tolist(), strict=True)]

    def close(self, step: int) -> Entry:
        if self.mask is not None:
            self.meter.hold(-(-self.meter.shape.h * self.n_kept // 8))
        return super().close(step)

    def assert_drops(self) -> None:
        raise AssertionError(f"layer {self.index} has tokens that some heads do not see, or with a bias")

    def allocated_bytes(self) -> int:
        return super().allocated_bytes() + (0 if self.bias is None else self.bias.nbytes)


def moves(slots: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
    """Where the last k of n tokens go when those in `slots` (1, h_kv, k) leave, and which of them: twice (1, h_kv, k).

    Those that stay go to the slots that become free in front of them. Where a head has fewer of them than k, the others
    are tokens that leave, and go to where they are. An order of None stands for that of the last tokens.
    """
    k = slots.shape[-1]
    if k == 1:
        return slots, None
    leaves = torch.zeros(*slots.shape[:-1], n, dtype=torch.uint8, device=slots.device)
    order = leaves.scatter_(-1, slots, 1)[..., n - k :].sort(dim=-1, stable=True).indices
    return slots.sort(dim=-1).values, order


def union_of(chosen: Tensor, h_kv: int, s: int) -> tuple[Tensor, Tensor]:
    """Tokens that a KV head has to keep of those that its query heads chose (1, h, k), and who sees which of them.

    Ascending positions (1, h_kv, n), filled up with tokens that nobody chose, and (1, h, n) bool.
    """
    h = chosen.shape[1]
    asked = torch.zeros(h, s + 1, dtype=torch.bool, device=chosen.device)  # the last column is for no token
    asked = asked.scatter_(1, chosen[0].where(chosen[0] >= 0, s), True)[:, :s]
    wanted = asked.unflatten(0, (h_kv, -1)).any(1)  # (h_kv, s)
    n = int(wanted.sum(-1).max())
    kept = wanted.int().sort(dim=-1, descending=True, stable=True).indices[:, :n]  # (h_kv, n)
    mask = asked.gather(1, kept.repeat_interleave(h // h_kv, 0))
    return kept.unsqueeze(0), mask.unsqueeze(0)
