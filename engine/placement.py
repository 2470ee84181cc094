"""What a method says of a layer's tokens, as values: where the prompt's go (`Placement`), and what becomes of those
that are there after a step (`Change`).

A value holds positions or slots and numbers, no memory: an engine makes memory of it (`engine/layouts`,
`engine/paged`), and knows from `size` how much before it stores anything. Positions and slots are (1, h_kv, n) int64
where nothing else is said. A layout of memory that is new is a value here, a class that holds it (`engine/layouts`) and
a line in that folder's table.

Not here: which tokens (`methods`), what a step fetches (`engine/selection.py`). No torch: settings read this first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvbench.engine.selection import FREE, Cost

if TYPE_CHECKING:
    from torch import Tensor

Seen = Callable[[Any], "Tensor"]  # what was observed of a layer
# A quantized cache of K and V (1, h_kv, n, d_h), for so many more tokens. Where tokens are coded singly, `of_heads`
# makes one of a K and a V (1, 1, n, d_h) for each KV head.
Quantize = Callable[["Tensor", "Tensor", int, Seen], Any]


class Size(NamedTuple):
    """Tokens of each KV head on the device."""

    kept: int  # of the prompt, or made of it
    window: int  # the latest ones after them, as the prompt ends
    capacity: int  # that the window may hold


@dataclass(frozen=True, eq=False)
class Placement:
    """Where a layer's tokens of the prompt go."""

    def size(self, s: int, n_new: int) -> Size:
        """What a prompt of `s` tokens takes where `n_new` may follow."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Whole(Placement):
    """Every token that reached the layer stays, and generated ones: all, or `room` before some have to leave."""

    room: int | None = None
    queries: "Queries | None" = None

    def size(self, s: int, n_new: int) -> Size:
        return Size(s, 0, n_new if self.room is None else self.room)


@dataclass(frozen=True, eq=False)
class Kept(Placement):
    """Only the `chosen` tokens and the last `n_window` stay; the rest of the prompt is gone for good.

    `chosen` holds positions (1, h_kv or h, k), or says how many of the first. Where query heads choose, their KV head
    keeps the union and each of them sees its own; -1 stands for no token. The window after them slides at `capacity`
    tokens, and grows without one.
    """

    chosen: "Tensor | int"
    n_window: int = 0
    capacity: int | None = None
    queries: "Queries | None" = None

    def size(self, s: int, n_new: int) -> Size:
        n = self.chosen if isinstance(self.chosen, int) else self.chosen.shape[-1]
        return Size(n, self.n_window, self.n_window + n_new if self.capacity is None else self.capacity)


class Queries(NamedTuple):
    """The latest queries, which a layer goes on to hold: `n` of them, of which the prompt's are there."""

    n: int
    of_prompt: "Tensor"  # (1, h, up to n, d_h)


class Rolls(NamedTuple):
    """KV heads with a number of 0 or more drop their oldest tokens, and those below 0 grow.

    `n_recent` says how many of a head's first tokens are its latest ones, oldest first, and `room` how many it takes in
    before the first of them leaves: after that each new token costs the oldest its place, after the step that could
    still attend to it. Tokens after them stay, and the `n_late` next ones to come.
    """

    n_recent: Sequence[int]
    room: Sequence[int]
    n_late: int = 0


@dataclass(frozen=True, eq=False)
class Ragged(Placement):
    """In each KV head only its own `chosen` positions (n,) stay, as many as they are; generated tokens come on top.

    They lie in the order given: nothing is spent on heads that keep fewer.
    """

    chosen: Sequence["Tensor"]
    rolls: Rolls | None = None

    def size(self, s: int, n_new: int) -> Size:
        return Size(max(map(len, self.chosen)), 0, n_new)


@dataclass(frozen=True, eq=False)
class Delayed(Ragged):
    """A `Ragged` in front of the prompt's latest tokens; these, and those that come, leave heads one by one.

    `stays` (h_kv, n_window) bool says which KV heads keep each of the latest tokens once `delay` newer ones are there;
    of those that come `Judged` does.
    """

    stays: "Tensor" = field(kw_only=True)
    delay: int = field(kw_only=True)

    def size(self, s: int, n_new: int) -> Size:
        n_window = self.stays.shape[1]
        return Size(max(map(len, self.chosen)), n_window, n_window + n_new)


@dataclass(frozen=True, eq=False)
class Offloaded(Placement):
    """Sinks and the last `n_window` tokens stay on the device, everything else can be fetched from the host.

    What is fetched stays on the device for `n_steps` steps more, so that only tokens that are not there move.
    `index_bytes` of what finds tokens lie on the host in addition to them.
    """

    n_sink: int
    n_window: int
    capacity: int | None = None
    n_steps: int = 0
    index_bytes: int = 0

    def size(self, s: int, n_new: int) -> Size:
        return Size(self.n_sink, self.n_window, self.n_window + n_new if self.capacity is None else self.capacity)


@dataclass(frozen=True, eq=False)
class OffloadedValues(Placement):
    """The `chosen` tokens and the last `n_window` stay; of all others the host has the values alone.

    Their keys are the method's to keep in a form of its own, and to make again when they are fetched. Generated tokens
    stay on the device.
    """

    chosen: "Tensor"
    n_window: int

    def size(self, s: int, n_new: int) -> Size:
        return Size(self.chosen.shape[-1], self.n_window, self.n_window + n_new)


@dataclass(frozen=True, eq=False)
class Searched(Placement):
    """Only the `chosen` tokens stay (None: all), and a step attends to what it fetches of them.

    They are numbered as they stand in `chosen`, and generated tokens go on after them, the current one included:
    `select` returns such numbers. They lie on the device, where a fetch moves nothing, or on the host.
    """

    chosen: "Tensor | None"
    on_device: bool

    def size(self, s: int, n_new: int) -> Size:
        return Size(0, 0, 0)


@dataclass(frozen=True, eq=False)
class Made(Placement):
    """K and V that a method has made stand for the prompt's, with a bias each; generated tokens come on top.

    They have h_kv heads and the model's dtype; they count as the tokens at `positions`, -1 where a head has fewer.
    """

    k: "Tensor"  # (1, h_kv, n, d_h)
    v: "Tensor"
    positions: "Tensor"
    bias: "Tensor | None" = None  # (1, h_kv, n) float32, added to scaled logits

    def size(self, s: int, n_new: int) -> Size:
        return Size(self.k.shape[2], 0, n_new)


@dataclass(frozen=True, eq=False)
class Coded(Placement):
    """Only the `chosen` tokens, ascending, stay (None: all), in the form that `make` gives them.

    They are positions (1, h_kv, n), or those of each KV head (n,), as many as they are.
    """

    make: Quantize
    chosen: "Tensor | Sequence[Tensor] | None" = None

    def size(self, s: int, n_new: int) -> Size:
        if isinstance(self.chosen, Sequence):
            return Size(max(map(len, self.chosen)), 0, n_new)
        return Size(s if self.chosen is None else self.chosen.shape[-1], 0, n_new)


@dataclass(frozen=True, eq=False)
class Change:
    """What becomes of a layer's tokens after a step that still attended to them: nothing, but for what it cost."""

    cost: Cost = field(default=FREE, kw_only=True)


@dataclass(frozen=True, eq=False)
class Evict(Change):
    """Tokens in these slots, in any order, leave for good; the newest that stay take the slots that become free."""

    slots: "Tensor"


@dataclass(frozen=True, eq=False)
class Stay(Change):
    """Only the tokens in these slots stay, in this order, with `room` after them (None: as much as there was)."""

    slots: "Tensor"
    room: int | None = None


@dataclass(frozen=True, eq=False)
class Judged(Change):
    """Which KV heads drop the current token of a `Delayed` layer once it is old, (h_kv,) bool; the others keep it."""

    goes: "Tensor"


@dataclass(frozen=True, eq=False)
class Release(Change):
    """The window's oldest `n` tokens (None: all) go to the host; the next step can fetch them.

    `index_bytes` (None: as before) of what finds tokens lie on the host from now on.
    """

    n: int | None = None
    index_bytes: int | None = None
