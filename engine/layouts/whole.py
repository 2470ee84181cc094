"""A prompt that stays as a view of the trace, with slots for the window alone; and one of which each KV head keeps as
many tokens as it likes.

Where KV heads keep different counts, what they keep of the prompt lies head after head, without spare rows in between;
`spans` says where. Heads that roll hold their first and latest tokens alone, while the others of the layer grow.

Not here: slots for all that is kept (`engine/layouts/slots.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.ledger import Entry
from kvbench.engine.caches.rolling import Rolling
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.layouts.home import Home
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.layouts.memory import Memory
from kvbench.engine.layouts.slots import Slots
from kvbench.engine.placement import Change, Delayed, Judged, Ragged, Stay, Whole
from kvbench.kernels.gather import bytes_of_both, gather_tokens, move_both
from kvbench.kernels.select_attend import Spans

OFFSET_BYTES = 4  # of a KV head's first row, and of the end, where heads keep different counts; of its latest ones


class View(Slots):
    """The prompt as it lies in the trace, and slots for generated tokens. Once tokens leave it, it is `Slots`."""

    def __init__(self, home: Home, view: Part, memory: Memory, capacity: int, positions: Tensor | None) -> None:
        super().__init__(home, memory, view.n_tokens(), 0, capacity, positions)
        self.home, self.view = home, view

    @classmethod
    def of(cls, home: Home, placement: Whole) -> Layer:
        view = Part(*home.view())
        reached = home.trace.positions.get(home.layer)
        positions = None if reached is None else reached.expand(1, home.trace.shape.h_kv, -1)
        capacity = placement.size(home.s_prompt, home.n_new).capacity
        return cls(home, view, home.memory([home.latest(0)], capacity), capacity, positions)

    @property
    def n_front(self) -> int:
        return 0

    def resident(self) -> list[Part]:
        return [self.view, self.memory.part(0, self.n_window)]

    def growing(self) -> Growing | None:
        grown = super().growing()
        return grown and grown._replace(more=(0, *grown.more))

    def kept_and_window(self) -> tuple[Part, Part]:
        kept, window = self.resident()
        return kept, window

    def change(self, change: Change) -> Layer:
        if not isinstance(change, Stay):
            raise AssertionError(f"layer {self.index} holds its prompt as a view: say which slots stay")
        room = self.capacity - self.n_window if change.room is None else change.room
        positions = self.leave_all_but(change.slots)
        tokens = move_both(lambda x: gather_tokens(x, change.slots), *self.tokens())
        left = Slots(self.home, self.home.memory([tokens], room), 0, 0, 0)
        left.n_seen, left.newest, left.evictions, left.queries, left.token_bytes = (
            self.n_seen, self.newest, self.evictions, self.queries, self.token_bytes,
        )  # fmt: skip
        left.kept_from_now_on(positions)
        return left

    def allocated_bytes(self) -> int:
        return super().allocated_bytes() + bytes_of_both(self.view.k, self.view.v)


class RaggedView(View):
    """A view in which each KV head has tokens of its own number."""

    def __init__(self, home: Home, view: Part, memory: Memory, capacity: int, positions: Tensor) -> None:
        super().__init__(home, view, memory, capacity, positions)
        assert view.spans is not None
        self.spans = view.spans
        self.rolling: Rolling | None = None
        self.n_spare = int((self.n_kept - self.spans.counts).sum())
        self.n_hidden = self.meter.shape.g * self.n_spare

    @classmethod
    def ragged(cls, home: Home, placement: Ragged) -> Layer:
        chosen, heads, s = placement.chosen, home.trace.shape.h_kv, home.s_prompt
        assert len(chosen) == heads, (len(chosen), heads)
        rows = torch.cat([positions + head * s for head, positions in enumerate(chosen)])
        k, v = move_both(lambda x: x.flatten(0, 2)[rows][None, None], *home.prompt())
        counts = [len(positions) for positions in chosen]
        starts = [0, *accumulate(counts)][:-1]
        spans = Spans(torch.tensor(starts, device=k.device), torch.tensor(counts, device=k.device), max(counts))
        positions = torch.nn.utils.rnn.pad_sequence([*chosen], batch_first=True, padding_value=-1).unsqueeze(0)
        capacity = placement.size(s, home.n_new).capacity
        layer = cls(home, Part(k, v, spans=spans), home.memory([home.latest(0)], capacity), capacity, positions)
        if placement.rolls is not None:
            n_recent, room, n_late = placement.rolls
            recent, rooms = (torch.tensor([*x], device=k.device) for x in (n_recent, room))
            rolling = tuple(more for n, more in zip(n_recent, room, strict=True) if n >= 0)
            layer.rolling, layer.takes_feeds = Rolling(recent, rooms, rolling, n_late), False
        return layer

    def slide_heads(self) -> None:
        """Heads that roll lose their oldest token."""
        if self.rolling is not None:
            n_losing = self.rolling.n_losing(self.n_window)
            self.n_spare += n_losing
            self.n_hidden += n_losing * self.meter.shape.g

    def advance(self, k_new: Tensor, v_new: Tensor) -> int:
        place = super().advance(k_new, v_new)
        self.slide_heads()
        return place

    def resident(self) -> list[Part]:
        view, window = super().resident()
        if self.rolling is None:
            return [view, window]
        kept, late, window.spans = self.rolling.spans(self.spans, self.n_window)
        first = [] if late is None else [Part(window.k, window.v, spans=late)]
        return [replace(view, spans=kept), *first, window]

    def growing(self) -> Growing | None:
        grown, rolling = super().growing(), self.rolling
        if grown is None or rolling is None:
            return grown
        of_view, of_window = grown.more
        late = (int(self.n_window < rolling.n_late),) if rolling.n_late else ()
        n_steps = min(grown.n_steps, rolling.n_ahead(self.n_window))
        return Growing((of_view, *late, of_window), grown.places, n_steps)

    def positions(self) -> Tensor:
        kept, window = self.positions_kept(), self.positions_window()
        return torch.cat([kept, window] if self.rolling is None else self.rolling.left(kept, window), -1)

    def kept_counts(self) -> list[int]:
        return self.spans.counts.tolist()

    def change(self, change: Change) -> Layer:
        raise AssertionError(f"layer {self.index} has heads with different counts: {type(change).__name__}")

    def close(self, step: int) -> Entry:
        shape = self.meter.shape
        n_offsets = shape.h_kv + 1 + (0 if self.rolling is None else shape.h_kv)
        self.meter.hold(OFFSET_BYTES * n_offsets)
        return super().close(step)


class DelayedView(RaggedView):
    """A `RaggedView` in which later tokens too leave heads one by one, once `delay` newer ones are there.

    Memory for them was taken when the prompt ended, for as many as may come: who leaves is hidden, and counted out.
    """

    takes_feeds = False
    stays: Tensor  # (1, h_kv, capacity) bool: the KV heads that keep a token of the window once it is old
    n_first: int  # tokens of the window when the prompt ended
    n_judged: int  # of the window
    delay: int

    @classmethod
    def delayed(cls, home: Home, placement: Delayed) -> Layer:
        layer = cls.ragged(home, placement)
        assert isinstance(layer, DelayedView)
        _, n, capacity = placement.size(home.s_prompt, home.n_new)
        layer.memory = home.memory([home.latest(n)], capacity - n)
        layer.n_window = layer.n_first = layer.n_judged = n
        layer.start, layer.delay = home.s_prompt - n, placement.delay
        layer.stays = torch.nn.functional.pad(placement.stays, (0, capacity - n)).unsqueeze(0)
        return layer

    @property
    def n_left(self) -> int:
        """How many of the window's tokens are old enough to have left some heads, at the step of the newest."""
        return max(0, self.n_window - self.delay - 1)

    def growing(self) -> Growing | None:
        return None  # tokens become old

    def resident(self) -> list[Part]:
        n = self.n_left
        judged = self.memory.part(0, n)
        judged.mask = self.stays[..., :n]
        return [self.view, *([judged] if n else []), self.memory.part(n, self.n_window)]

    def positions(self) -> Tensor:
        window, n = self.positions_window(), self.n_left
        gone = torch.nn.functional.pad(~self.stays[..., :n], (0, self.n_window - n))
        return torch.cat([self.positions_kept(), window.masked_fill(gone, -1)], -1)

    def kept_counts(self) -> list[int]:
        return [count + self.n_first for count in super().kept_counts()]

    def change(self, change: Change) -> Layer:
        if not isinstance(change, Judged):
            return super().change(change)
        at = self.n_window - 1 - change.age
        assert at == self.n_judged and change.age <= self.delay, (
            f"layer {self.index}: token {at} of the window is judged, and {self.n_judged} of them are: each is judged "
            "once, before it is old, so that none leaves that was kept"
        )
        torch.logical_not(change.goes, out=self.stays[0, :, at])
        self.n_judged += 1
        return self

    def keys(self) -> Tensor:
        """Keys of all tokens that came, those that left included; heads keep as many of the prompt's."""
        n_kept, window = self.view.k.shape[2] // self.stays.shape[1], self.memory.part(0, self.n_window)
        return torch.cat([self.view.k.view(*window.k.shape[:2], n_kept, -1), window.k], 2)

    def judged(self) -> Tensor:
        """Which KV heads keep each token that is judged, those of the prompt included: (h_kv, n) bool."""
        return torch.cat([self.positions_kept()[0] >= 0, self.stays[0, :, : self.n_judged]], 1)

    def close(self, step: int) -> Entry:
        self.meter.hold(-(-self.meter.shape.h_kv * self.n_window // 8))
        return super().close(step)

    def correction(self) -> Callable[[Entry], Entry] | None:
        n, stays, shape, token_bytes = self.n_left, self.stays, self.meter.shape, self.meter.token_bytes

        def without(entry: Entry) -> Entry:
            gone = n * shape.h_kv - int(stays[..., :n].sum())
            return entry._replace(
                attended=entry.attended - gone * shape.g,
                resident_kv_bytes=entry.resident_kv_bytes - gone * token_bytes,
            )

        return without if n else None
