"""`Layer`: one compressed layer of one variant on one sample, as methods and the step see it; and its counting.

A layer's tokens have *slots*. The first ones hold the *kept* tokens (sinks, or what a dropping method chose), the
*window* after them the latest tokens, as a ring where it slides. Order is irrelevant to attention, so nothing is ever
shifted: where tokens are evicted, the newest ones take their slots. Which token has which slot is arithmetic, and
stands here; what lies where is a layout's, in memory that one writer has (`engine/layouts/memory.py`). Another engine
brings memory of its own (`engine/paged`).

Not here: which tokens (`methods`), what a placement says (`engine/placement.py`), bytes (`engine/books/meter.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.ledger import Entry
from kvbench.engine.books.meter import Meter
from kvbench.engine.caches.host import Host
from kvbench.engine.caches.queries import QueryRing
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.layouts.home import Home
from kvbench.engine.placement import Change
from kvbench.kernels.rows.append import Place


class Layer(ABC):
    """What is counted of a layer, and what each layout says of its memory."""

    host: Host | None = None  # from which a step fetches
    packs: bool = False  # True: tokens become codes one layer at a time, on the device or on the host
    takes_feeds: bool = True  # False: no several tokens at once
    mask: Tensor | None = None  # (1, h, slots) bool, False on what a query head does not see
    n_hidden: int = 0  # pairs of query head and kept slot that a mask hides
    n_spare: int = 0  # pairs of KV head and kept slot that hold no token
    is_over: bool = False  # True: its row has ended, and goes on in a graph alone

    def __init__(
        self, home: Home, n_kept: int, n_window: int = 0, capacity: int = 0, positions: Tensor | None = None
    ) -> None:
        """`positions` (1, h_kv, n) are those of the kept tokens, by default the first ones.

        The window holds the latest `n_window` tokens, and `capacity` says how many it may hold.
        """
        assert n_window <= max(capacity, 0), (n_kept, n_window, capacity)
        self.index, self.device, self.checked_for = home.layer, home.device, home.checked_for
        self.meter: Meter = home.meter
        self.s_prompt = home.s_prompt
        self.n_seen = home.s_prompt  # tokens so far, the current one included
        self.n_kept, self.kept_positions = n_kept, positions
        self.n_window, self.capacity = n_window, capacity
        self.n_latest = n_window  # of it as the prompt ended
        self.start = home.s_prompt - n_window  # position that lies in the window's first slot
        self.newest: tuple[Tensor, Tensor]  # K and V of the current token
        self.evictions: Tensor | None = None  # positions (1, h_kv, k) that this step dropped
        self.token_bytes = 0  # on the device for each token in addition to K and V: a method's scores, its positions
        self.queries: QueryRing | None = None  # the latest, for methods that ask them once more

    # A step, in this order.

    @abstractmethod
    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        """Take in the current token, (1, h_kv, 1, d_h); where the window is full, its oldest token leaves."""

    @abstractmethod
    def places(self, k_new: Tensor, v_new: Tensor) -> list[Place]:
        """The buffers of K and V that the token goes to, and the slot in each: `append` without the writing."""

    def growing(self) -> Growing | None:
        """What becomes of `places` and of `resident` while only tokens come; None: a step may change more."""
        return None

    @abstractmethod
    def resident(self) -> list[Part]:
        """Kept tokens and window as parts to attend to."""

    def change(self, change: Change) -> "Layer":
        """What is left of the layer after a step, in this layout or another."""
        raise AssertionError(f"layer {self.index} has nothing that could leave: {type(change).__name__}")

    def close(self, step: int) -> Entry:
        """End the step: what it attended to, kept and moved."""
        if self.queries is not None:
            self.meter.hold(self.queries.n_bytes(self.meter.shape))
        n_resident = self.n_kept + self.n_window + self.n_evicted
        if self.token_bytes:
            self.meter.hold(self.token_bytes * n_resident)
        return self.meter.close(step, self.index, self.n_seen, n_resident, 0, self.n_hidden, self.n_spare)

    def correction(self) -> Callable[[Entry], Entry] | None:
        """Correction of the step's entry once it is read, for counts that would need a wait; None: it stays."""
        return None

    # What methods read.

    @property
    def can_fetch(self) -> bool:
        return self.host is not None

    @property
    def slides(self) -> bool:
        """Whether the next token takes the place of another one in the window."""
        return self.n_window >= self.capacity

    @property
    def n_generated(self) -> int:
        """Tokens after the prompt, the current one included."""
        return self.n_seen - self.s_prompt

    def positions(self) -> Tensor:
        """Positions of kept tokens and window, slot by slot as `resident` has them: (1, h_kv, n); -1: there is none."""
        return torch.cat([self.positions_kept(), self.positions_window()], -1)

    def keys(self) -> Tensor:
        """Keys of kept tokens and window, slot by slot as `positions` has them: (1, h_kv, n, d_h)."""
        return torch.cat([part.k for part in self.resident()], 2)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """K and V of kept tokens and window, slot by slot."""
        parts = self.resident()
        if len(parts) == 1:
            return parts[0].k, parts[0].v
        return torch.cat([part.k for part in parts], 2), torch.cat([part.v for part in parts], 2)

    def kept_counts(self) -> list[int]:
        """How many of the prompt's tokens each KV head kept. For reports."""
        return [self.n_kept + max(0, self.s_prompt - self.start)] * self.meter.shape.h_kv

    # Arithmetic.

    def stand(self, positions: Tensor, s_prompt: int) -> None:
        """Take on true positions (1, h_kv, n), where the pass held some tokens of the prompt, numbered from 0 on."""
        by, kept = s_prompt - self.s_prompt, self.positions_kept()
        if by:
            self.kept_positions = positions.gather(-1, kept.clamp(min=0)).where(kept >= 0, kept)
            self.s_prompt, self.n_seen, self.start = self.s_prompt + by, self.n_seen + by, self.start + by

    def repeat(self, k_new: Tensor, v_new: Tensor) -> None:
        """Count the current token in at a step that is like the one before it."""
        self.advance(k_new, v_new)

    def advance(self, k_new: Tensor, v_new: Tensor) -> int:
        """Count the current token in: its place in the window, -1 where that has none."""
        place = (self.n_seen - self.start) % self.capacity if self.capacity else -1
        self.newest, self.evictions = (k_new, v_new), None
        self.n_seen += 1
        if self.n_window < self.capacity:
            self.n_window += 1
        else:
            self.slide()
        return place

    def leave(self) -> None:  # noqa: B027
        """Let tokens go that were released after the step before."""

    def slide(self) -> None:  # noqa: B027  # most layouts have nothing to add to either
        """The window's oldest token leaves it, or the current one where there is no window."""

    def positions_kept(self) -> Tensor:
        """(1, h_kv, n_kept)."""
        if self.kept_positions is not None:
            return self.kept_positions
        return torch.arange(self.n_kept, device=self.device).expand(1, self.meter.shape.h_kv, -1)

    def positions_window(self) -> Tensor:
        """(1, h_kv, n_window); a ring's slot holds the latest token that was written to it."""
        newest, slots = self.n_seen - 1, torch.arange(self.n_window, device=self.device)
        age = (newest - self.start - slots) % max(1, self.capacity)
        return (newest - age).expand(1, self.meter.shape.h_kv, -1)

    @property
    def n_evicted(self) -> int:
        """Tokens of a KV head that the step attended to and that are gone."""
        return 0 if self.evictions is None else self.evictions.shape[-1]

    def fetched(self) -> list[Tensor]:
        """Positions that this step fetched, (1, heads, k) each, -1 where there is no token. For checks and reports."""
        return []

    def attended(self) -> Tensor:
        """Which of the tokens seen so far the last step attended to, (h, n) bool. For checks."""
        shape, n = self.meter.shape, self.n_seen
        seen = torch.zeros(shape.h, n + 1, dtype=torch.bool, device=self.device)  # the last column is for no token

        def see(positions: Tensor, mask: Tensor | None = None) -> None:
            """Positions (1, heads, k) that all query heads of each head attend to, or those of the mask (h, k)."""
            tokens = positions[0].repeat_interleave(shape.h // positions.shape[1], 0)
            tokens = tokens.where(tokens >= 0, n)
            seen.scatter_(1, tokens, torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask)

        held = self.positions()
        see(held[..., : self.n_kept], None if self.mask is None else self.mask[0, :, : self.n_kept])
        for positions in (held[..., self.n_kept :], *([] if self.evictions is None else [self.evictions])):
            see(positions)
        for positions in self.fetched():
            see(positions)
        return seen[:, :n]

    # Memory.

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes that the device tier really occupies, the trace's tensors included where they are held.

        Copies that live for a step are no tier.
        """
