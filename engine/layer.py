"""One compressed layer of one variant on one sample: where its tokens lie, and the verbs that move them.

On the device a layer has *slots*. The first ones hold the *kept* tokens (sinks, or what a dropping method chose), the
*window* behind them the latest tokens, as a ring where it slides. Order is irrelevant to attention, so nothing is ever
shifted: where tokens are evicted, the newest ones take their slots. A layer that keeps the prompt whole has it as a
view of the trace and slots for the window alone. All other tokens are gone, or on the *host*, from where chosen tokens
are fetched. Without an accelerator both tiers are the same RAM, and the accounting is the same.

Where KV heads keep different counts, what they keep of the prompt lies head behind head, without spare rows in between;
`spans` says where. Heads that `roll` hold their first and latest tokens alone, while the others of the layer grow.

What is kept need not be tokens of the trace: a method may put K and V of its own making there, each with a `bias` that
is added to its logits. The host may have values alone; then the keys of what is fetched are the method's to make.

Tokens with a bias are not evicted later: its numbers would have to move with them.

Codes in place of numbers have a layer of their own (`engine/caches/coded.py`).

Not here: which tokens (`methods`), where they lie at the beginning (`engine/store.py`), counting
(`engine/books/meter.py`).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.attend import Part
from engine.books.audit import check_selection
from engine.books.ledger import Entry
from engine.books.meter import Meter
from engine.budget import ELEMENT_BYTES
from engine.caches.copies import Shelf
from engine.caches.held import HeldBlocks
from engine.caches.host import Host
from engine.caches.queries import QueryRing
from engine.caches.rolling import Rolling
from kernels.gather import flat_rows, gather_tokens

OFFSET_BYTES = 4  # of a KV head's first row, and of the end, where heads keep different counts; of its latest ones


class Layer:
    """The slots of a layer, and its host tier if it has one."""

    is_coded = False  # True: tokens are taken in as codes, each layer by itself
    checked_for = ""  # whose selections are looked at before memory is read there; empty: nobody's

    def __init__(
        self,
        index: int,
        s_prompt: int,
        kept: Part,
        window: Part,
        capacity: int,
        meter: Meter,
        positions: Tensor | None = None,
        host: Host | None = None,
        is_view: bool = False,
    ) -> None:
        """`kept` has a mask where query heads of a group see tokens of their own; `is_view`: it is not copied.

        `positions` (1, h_kv, n) are those of the kept tokens, by default the first ones. `window` holds the latest
        tokens, and `capacity` says how many it may hold.
        """
        self.index = index
        self.s_prompt = s_prompt
        self.n_seen = s_prompt  # tokens so far, the current one included
        self.meter = meter
        self.host = host
        if host is not None:
            meter.lie_far(host.far_bytes(meter.token_bytes), not host.is_near, host.is_packed)
        self.can_fetch = host is not None
        self.n_gone = s_prompt - host.n_prompt if host is not None else 0  # tokens that a tier with some alone lacks
        self.view = kept if is_view else None
        self.n_kept = kept.n_tokens()
        self.n_front = 0 if is_view else self.n_kept  # slots in front of the window
        self.kept_positions = positions  # None: the first `n_kept`
        self.n_window = window.n_tokens()  # tokens in the window, the current one included
        self.capacity = capacity  # slots of the window
        self.start = s_prompt - self.n_window  # position that lies in the window's first slot
        sizes = self.n_kept, self.n_window, capacity
        assert is_view or self.n_kept <= self.start, sizes
        assert self.n_window <= max(capacity, 0), sizes
        parts = [window] if is_view else [kept, window]
        self.k = slots_of([part.k for part in parts], capacity - self.n_window)
        self.v = slots_of([part.v for part in parts], capacity - self.n_window)
        self.bias = kept.bias  # (1, h_kv, n_kept) float32, what is added to the logits of kept tokens
        self.mask = None  # (1, h, slots) bool, False on what a query head does not see
        self.n_hidden = 0  # pairs of query head and kept slot that the mask hides
        self.n_spare = 0  # pairs of KV head and kept slot that no query head sees: they hold no token
        if kept.mask is not None:
            hidden = ~kept.mask  # (1, h, n_kept)
            self.mask = torch.nn.functional.pad(kept.mask, (0, capacity), value=True)
            self.n_hidden = int(hidden.sum())
            self.n_spare = int(hidden.unflatten(1, (meter.shape.h_kv, -1)).all(2).sum())
        if kept.spans is not None:
            assert is_view and positions is not None, "spans are a view, with positions"
            self.n_spare = int((self.n_kept - kept.spans.counts).sum())
            self.n_hidden = meter.shape.g * self.n_spare
        if self.bias is not None:
            meter.hold_beside(ELEMENT_BYTES * (meter.shape.h_kv * self.n_kept - self.n_spare))
        self.rolling: Rolling | None = None
        self.queries: QueryRing | None = None  # the latest, for methods that ask them once more
        self.is_far = host is not None and host.device != self.k.device  # the host is another memory
        self.shelf: Shelf | None = None  # where copies of fetched tokens lie, if it is
        self.held: HeldBlocks | None = None  # blocks that stay, if it is and there is a cache of them
        self.fetches: list[Tensor] = []  # of this step, as the host numbers its tokens: (1, heads, k)
        self.evictions: Tensor | None = None  # positions (1, h_kv, k) that this step dropped
        self.n_releases = 0  # oldest tokens of the window that leave before the next token comes

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        """Take in the current token, (1, h_kv, 1, d_h); where the window is full, its oldest token leaves."""
        slot, t = self.advance(k_new, v_new), self.n_seen - self.s_prompt
        if self.host is not None:
            self.host.write(t - 1, k_new, v_new)
        if slot >= 0:
            self.k[:, :, slot : slot + 1] = k_new
            self.v[:, :, slot : slot + 1] = v_new

    def places(self, k_new: Tensor, v_new: Tensor) -> list[tuple[Tensor, Tensor, int]]:
        """As `append`, but for the writing: the buffers of K and V that the token goes to, and the slot in each."""
        slot = self.advance(k_new, v_new)
        found = [] if slot < 0 else [(self.k, self.v, slot)]
        if self.host is None or not self.host.has_keys:
            return found
        return [*found, (*self.host.late, self.n_seen - self.s_prompt - 1)]

    def advance(self, k_new: Tensor, v_new: Tensor) -> int:
        """Count the current token in: the slot that it takes, -1 where the window has none."""
        self.leave()
        slot = self.n_front + (self.n_seen - self.start) % self.capacity if self.capacity else -1
        self.newest = k_new, v_new
        self.n_seen += 1
        self.fetches.clear()
        self.evictions = None
        if self.n_window < self.capacity:
            self.n_window += 1
        elif self.host is not None:
            self.meter.count_released(1)
        if self.rolling is not None:
            n_losing = self.rolling.n_losing(self.n_window)
            self.n_spare += n_losing
            self.n_hidden += n_losing * self.meter.shape.g
        return slot

    def resident(self) -> list[Part]:
        """Kept tokens and window as parts to attend to."""
        stop = self.n_front + self.n_window
        mask = None if self.mask is None else self.mask[..., :stop]
        if self.bias is not None:  # generated tokens have none, and stand apart
            k, v, n = self.k, self.v, self.n_kept
            kept = Part(k[:, :, :n], v[:, :, :n], None if mask is None else mask[..., :n], bias=self.bias)
            return [kept, Part(k[:, :, n:stop], v[:, :, n:stop])]
        slots = Part(self.k[:, :, :stop], self.v[:, :, :stop], mask)
        if self.rolling is not None:
            assert self.view is not None and self.view.spans is not None, f"layer {self.index} has no spans"
            kept, late, slots.spans = self.rolling.spans(self.view.spans, self.n_window)
            first = [] if late is None else [Part(slots.k, slots.v, spans=late)]
            return [replace(self.view, spans=kept), *first, slots]
        return [slots] if self.view is None else [self.view, slots]

    def kept_and_window(self) -> tuple[Part, Part]:
        """As `resident`, apart: for methods that turn the query for one of the two."""
        assert self.view is None and self.mask is None and self.bias is None, f"layer {self.index} is not two parts"
        stop = self.n_kept + self.n_window
        kept, window = slice(0, self.n_kept), slice(self.n_kept, stop)
        return (
            Part(self.k[:, :, kept], self.v[:, :, kept]),
            Part(self.k[:, :, window], self.v[:, :, window]),
        )

    def positions(self) -> Tensor:
        """Positions of kept tokens and window, slot by slot as `resident` has them: (1, h_kv, n); -1: there is none."""
        heads, device = self.meter.shape.h_kv, self.k.device
        kept = self.kept_positions
        if kept is None:
            kept = torch.arange(self.n_kept, device=device).expand(1, heads, -1)
        # A ring's slot holds the latest token that was written to it.
        newest = self.n_seen - 1
        slots = torch.arange(self.n_window, device=device)
        age = (newest - self.start - slots) % max(1, self.capacity)
        window = (newest - age).expand(1, heads, -1)
        if self.rolling is not None:
            kept, window = self.rolling.left(kept, window)
        return torch.cat([kept, window], -1)

    def kept_counts(self) -> list[int]:
        """How many of the prompt's tokens each KV head kept. For reports."""
        if self.view is not None and self.view.spans is not None:
            return self.view.spans.counts.tolist()
        n_kept, heads = self.n_kept + max(0, self.s_prompt - self.start), self.meter.shape.h_kv
        if self.mask is None:
            return [n_kept] * heads
        spare = (~self.mask[..., : self.n_kept]).unflatten(1, (heads, -1)).all(2).sum(-1)
        return [n_kept - n for n in spare[0].tolist()]

    # Dropping, for methods that evict while they decode.

    def roll(self, n_recent: Sequence[int], room: Sequence[int], n_late: int = 0) -> None:
        """From now on KV heads with a number of 0 or more drop their oldest tokens, and those below 0 grow.

        `n_recent` says how many of a head's first rows hold its latest tokens, oldest first, and `room` how many
        tokens it takes in before the first of them leaves: after that each new token costs the oldest its place, after
        the step that could still attend to it. Rows behind them stay, and the `n_late` next tokens to come.
        """
        assert self.n_seen == self.s_prompt and self.view is not None and self.view.spans is not None, self.index
        recent, rooms = (torch.tensor([*x], device=self.k.device) for x in (n_recent, room))
        rolling = tuple(more for n, more in zip(n_recent, room, strict=True) if n >= 0)
        self.rolling = Rolling(recent, rooms, rolling, n_late)

    def evict(self, slots: Tensor) -> None:
        """After attention, drop for good the tokens in these slots, (1, h_kv, n) in any order, for each head its own.

        The newest tokens that stay take the slots that become free; all other slots are as they were. What stays is
        kept from then on, and the window begins anew behind it. The step's books still have the dropped tokens,
        because the step attended to them.
        """
        self._assert_drops()
        assert self.view is None, f"layer {self.index} holds its prompt as a view"
        assert self.n_window == self.n_seen - self.start > 0, f"layer {self.index} has a window that slid"
        positions = self.positions()  # (1, h_kv, n)
        n, k = positions.shape[-1], slots.shape[-1]
        holes, order = moves(slots, n)
        places = flat_rows(holes, self.k.shape[1], self.k.shape[2])
        for buffer in (self.k, self.v):
            last = buffer[:, :, n - k : n]
            last = last.clone() if order is None else gather_tokens(last, order)
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, places, last.view(-1, last.shape[-1]))
        last = positions[..., n - k :]
        last = last if order is None else last.gather(-1, order)
        self.evictions = positions.gather(-1, slots)
        self._keep(positions.scatter(-1, holes, last)[..., : n - k])

    def has_evicted(self, positions: Tensor, evicted: Tensor) -> None:
        """As `evict` of one token per head, where a kernel has moved the newest token already.

        `evicted` (1, h_kv, 1) are positions that left, `positions` (1, h_kv, n - 1) those that stayed, slot by slot.
        """
        self._assert_drops()
        assert self.view is None, f"layer {self.index} holds its prompt as a view"
        self.evictions = evicted
        self._keep(positions)

    def drop_but(self, slots: Tensor) -> None:
        """After attention, drop for good all but the tokens in these ascending slots (k,), for all KV heads alike.

        As with `evict`, the step's books still have those that leave.
        """
        self._assert_drops()
        positions, parts = self.positions(), self.resident()
        leaves = torch.ones(positions.shape[-1], dtype=torch.bool, device=slots.device)
        leaves[slots] = False
        n_free = self.capacity - self.n_window
        self.k = slots_of([torch.cat([part.k for part in parts], 2)[:, :, slots]], n_free)
        self.v = slots_of([torch.cat([part.v for part in parts], 2)[:, :, slots]], n_free)
        self.view = None
        self.evictions = positions[..., leaves]
        self._keep(positions[..., slots])

    def retain(self, slots: Tensor, room: int) -> None:
        """After attention, drop for good all but the tokens in these slots, (1, h_kv, k), for each head its own.

        They lie in this order from then on, with `room` behind them. The step's books have those that leave.
        """
        self._assert_drops()
        positions, parts = self.positions(), self.resident()
        n, k = positions.shape[-1], slots.shape[-1]
        chosen = [gather_tokens(torch.cat(x, 2), slots) for x in ([p.k for p in parts], [p.v for p in parts])]
        if self.view is None and self.k.shape[2] == k + room:
            self.k[:, :, :k], self.v[:, :, :k] = chosen
        else:
            self.k, self.v = (slots_of([x], room) for x in chosen)
        self.view = None
        leaves = torch.ones_like(positions, dtype=torch.int8).scatter_(-1, slots, 0)
        self.evictions = positions.gather(-1, leaves.topk(n - k).indices)  # a mask's own indices would have to wait
        self._keep(positions.gather(-1, slots))

    def rest(self, slots: Tensor, room: int) -> int:
        """Between steps, hold these slots' tokens alone as `retain` does: the bytes that were written."""
        self.evictions = None
        self.retain(slots, room)
        self.evictions = None
        return slots.shape[-1] * self.meter.shape.h_kv * self.meter.token_bytes

    def count_in(self, n_held: int) -> None:
        """Count the current token in, where the caller keeps the tokens until `hold`: `n_held` of them by now."""
        self.n_seen, self.n_window, self.evictions = self.n_seen + 1, n_held - self.n_kept, None

    def hold(self, k: Tensor, v: Tensor, positions: Tensor, held: Tensor) -> None:
        """From now on hold these tokens alone, `held` (1, h_kv, k) of k and v (1, h_kv, n, d_h) at their positions."""
        self._assert_drops()
        assert self.view is None, f"layer {self.index} holds its prompt as a view"
        for buffer, tokens in ((self.k, k), (self.v, v)):
            buffer[:, :, : held.shape[-1]] = gather_tokens(tokens, held)
        self._keep(positions.gather(-1, held))

    def keys(self) -> Tensor:
        """Keys of kept tokens and window, slot by slot as `positions` has them: (1, h_kv, n, d_h)."""
        return torch.cat([part.k for part in self.resident()], 2)

    def _assert_drops(self) -> None:
        assert self.host is None, f"layer {self.index} has a host and drops no tokens"
        assert self.view is None or self.view.spans is None, f"layer {self.index} has heads with different counts"
        assert self.mask is None, f"layer {self.index} has tokens that some heads do not see"
        assert self.bias is None, f"layer {self.index} has tokens with a bias"
        assert self.evictions is None, f"layer {self.index} has dropped tokens in this step"

    def _keep(self, positions: Tensor) -> None:
        """The first slots hold these tokens (1, h_kv, n), and all other slots are free for a new window."""
        self.kept_positions = positions
        self.n_kept = self.n_front = positions.shape[-1]
        self.capacity = self.k.shape[2] - self.n_kept
        self.start, self.n_window = self.n_seen, 0

    # The host tier, for methods that retrieve.

    def fetch(self, idx: Tensor, padded: bool = False) -> Part:
        """The tokens at `idx` (1, h_kv or h, k) of the host, where that is the same memory: they stay where they are.

        Where `padded`, -1 stands for no token.
        """
        part = self.reach(idx if idx.is_cuda else idx.contiguous(), padded)
        n_tokens = idx.numel()
        if padded:
            part.mask = idx >= 0
            n_tokens = int(part.mask.sum())
        self.meter.count_fetch(idx, n_tokens, self.n_seen, self.n_ahead, self.n_host)
        return part

    def reach(self, idx: Tensor, padded: bool = False) -> Part:
        """The tokens at `idx` of the host, wherever that is, noted but not counted."""
        if self.checked_for:
            check_selection(self, idx, padded)
        assert self.host is not None, f"layer {self.index} has nothing on the host"
        shape, n_generated = self.meter.shape, self.n_seen - self.s_prompt
        assert idx.shape[1] in (shape.h, shape.h_kv), f"idx has {idx.shape[1]} heads"
        self.fetches.append(idx)
        if self.meter.accesses is not None:
            self.meter.note(n_generated, self.index, self.n_seen, self.n_ahead, self.n_host, idx)
        return self.host.tokens(idx, None, late=n_generated > self.n_window)

    @property
    def n_ahead(self) -> int:
        """Tokens in front of the first that may be fetched; none where what is kept lies among the others."""
        return self.n_kept if self.kept_positions is None else 0

    @property
    def n_host(self) -> int:
        """Tokens from there on to the window."""
        return self.n_seen - self.n_gone - self.n_ahead - self.n_window

    def fetched(self) -> list[Tensor]:
        """Positions that this step fetched, (1, heads, k) each, -1 where there is no token. For checks and reports."""
        return [] if self.host is None else [self.host.positions_of(idx, self.s_prompt) for idx in self.fetches]

    @property
    def packs(self) -> bool:
        """Whether its tokens become codes one layer at a time: on the device, or on the host."""
        return self.is_coded or (self.host is not None and self.host.is_packed)

    @property
    def n_recent(self) -> int:
        """Selections whose tokens stay on the device."""
        return 0 if self.meter.recent is None else self.meter.recent.n_steps

    def brings(self, idx: Tensor, padded: bool) -> bool:
        """Whether fetched tokens are copied before attention reads them: not where each is read just once."""
        return padded or idx.shape[1] != self.meter.shape.h_kv or self.meter.has_cache

    def held_blocks(self) -> HeldBlocks | None:
        """The cache of blocks, where the layer has one: its memory is taken at the first fetch."""
        if self.meter.blocks is not None and self.held is None:
            assert self.shelf is not None, f"layer {self.index} has no other memory"
            self.held = HeldBlocks(self.meter.blocks, (self.k, self.v), self.shelf.n_tokens, self.n_ahead)
        return self.held

    def release(self, n: int | None = None) -> None:
        """After attention, send the window's oldest `n` tokens (None: all) to the host; the next step can ask."""
        assert self.host is not None, f"layer {self.index} has no host"
        assert not self.n_releases, f"layer {self.index} has released tokens in this step"
        self.n_releases = self.n_window if n is None else n
        assert self.n_releases <= self.n_window, f"layer {self.index} has {self.n_window} tokens to release"
        self.meter.count_released(self.n_releases)

    def leave(self) -> None:
        """Let released tokens go, if there are any; what stays moves to the window's first slots."""
        if not self.n_releases:
            return
        n_stay = self.n_window - self.n_releases
        if n_stay:
            assert self.n_window == self.n_seen - self.start, "a window that slid is released as a whole"
            first = self.n_kept + self.n_releases
            for buffer in (self.k, self.v):
                tokens = buffer[:, :, first : first + n_stay].clone()
                buffer[:, :, self.n_kept : self.n_kept + n_stay] = tokens
        self.start, self.n_window, self.n_releases = self.n_seen - n_stay, n_stay, 0

    def generated(self) -> tuple[Tensor, Tensor]:
        """K and V of the generated tokens in order, the current one included, of a layer with a host tier."""
        assert self.host is not None and self.host.has_keys, f"layer {self.index} has no host tier for them"
        t = self.n_seen - self.s_prompt
        # From another memory all at once: to cut there would read what the accelerator may not have written yet.
        k, v = (x.to(self.k.device, non_blocking=True) for x in self.host.late)
        return k[:, :, :t], v[:, :, :t]

    # The books.

    def close(self, step: int) -> Entry:
        """End the step: what it attended to, kept and moved."""
        if self.view is not None and self.view.spans is not None:
            self.meter.count("resident_meta_bytes", OFFSET_BYTES * (self.meter.shape.h_kv + 1))
        if self.rolling is not None:
            self.meter.count("resident_meta_bytes", OFFSET_BYTES * self.meter.shape.h_kv)
        if self.mask is not None:
            self.meter.count("resident_meta_bytes", -(-self.meter.shape.h * self.n_kept // 8))
        if self.queries is not None:
            self.meter.count("resident_meta_bytes", self.queries.n_bytes(self.meter.shape))
        n_evicted = 0 if self.evictions is None else self.evictions.shape[-1]
        n_resident, n_hidden = self.n_kept + self.n_window + n_evicted, self.n_hidden
        n_host = 0 if self.host is None else self.n_seen - self.n_gone - n_resident
        if self.host is not None and self.host.is_near:  # on the device, and attended to where it was fetched
            n_resident, n_hidden, n_host = n_resident + n_host, n_hidden + self.meter.shape.h * n_host, 0
        return self.meter.close(step, self.index, self.n_seen, n_resident, n_host, n_hidden, self.n_spare)

    def attended(self) -> Tensor:
        """Which of the tokens seen so far the last step attended to, (h, n) bool. For checks."""
        shape, n_kept, n = self.meter.shape, self.n_kept, self.n_seen
        seen = torch.zeros(shape.h, n + 1, dtype=torch.bool, device=self.k.device)  # the last column is for no token
        held = self.positions()[0]
        kept = held[:, :n_kept].repeat_interleave(shape.g, 0)  # (h, n_kept)
        kept = kept.where(kept >= 0, n)
        mask = None if self.mask is None else self.mask[0, :, :n_kept]
        seen.scatter_(1, kept, torch.ones_like(kept, dtype=torch.bool) if mask is None else mask)
        if self.rolling is None:
            seen[:, n - self.n_window : n] = True
        else:
            window = held[:, n_kept:].repeat_interleave(shape.g, 0)
            seen.scatter_(1, window.where(window >= 0, n), True)
        if self.evictions is not None:
            seen.scatter_(1, self.evictions[0].repeat_interleave(shape.g, 0), True)
        for idx in self.fetched():
            tokens = idx[0].repeat_interleave(shape.h // idx.shape[1], 0)
            seen.scatter_(1, tokens.where(tokens >= 0, n), True)
        return seen[:, :n]

    def allocated_bytes(self) -> int:
        """Bytes that the device tier really occupies, the trace's tensors included where they are held.

        Copies that live for a step are no tier.
        """
        view = 0 if self.view is None else self.view.k.nbytes + self.view.v.nbytes
        copies = self.shelf.copies.nbytes if self.n_recent and self.shelf is not None and self.shelf.copies else 0
        near = self.host if self.host is not None and self.host.is_near else None
        beside = 0 if near is None else sum(x.nbytes for x in (near.k, near.v, *near.late))
        bias = 0 if self.bias is None else self.bias.nbytes
        held = 0 if self.held is None else self.held.nbytes
        return self.k.nbytes + self.v.nbytes + view + copies + held + beside + bias


def slots_of(tokens: Sequence[Tensor], n_free: int) -> Tensor:
    """The tokens (1, h_kv, n, d_h) copied behind each other, with room for `n_free` more."""
    sizes = [each.shape[2] for each in tokens]
    _, heads, _, d_h = tokens[0].shape
    slots = tokens[0].new_empty(1, heads, sum(sizes) + n_free, d_h)
    for target, each in zip(slots.split([*sizes, n_free], 2), tokens, strict=False):
        target.copy_(each)
    return slots


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
