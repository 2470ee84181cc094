"""The memory of a layer's slots: `Memory`, what a layout asks of one, and `Buffers`, a tensor for K and one for V.

Not here: which token has which slot (`engine/layouts`), pages (`engine/paged`).
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.kernels.gather import flat_rows, gather_tokens

Pair = tuple[Tensor, Tensor]  # K and V of some tokens, (1, h_kv, n, width of a key or of a value)


class Memory(Protocol):
    """Slots of K and V, which it alone writes."""

    @property
    def n_slots(self) -> int:
        """How many slots there are."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that they occupy."""
        ...

    def write(self, at: int, k: Tensor, v: Tensor) -> None:
        """Put tokens (1, h_kv, n, …) into the slots from `at` on."""
        ...

    def scatter(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put tokens (1, h_kv, n, …) into the slots (n,), which may lie apart."""
        ...

    def part(self, start: int, stop: int) -> Part:
        """The tokens in these slots, to attend to."""
        ...

    def move(self, start: int, order: Tensor | None, places: Tensor) -> None:
        """Copy the last tokens, from slot `start` on, to places (1, h_kv, k), each head's in its `order` if given."""
        ...

    def hold(self, k: Tensor, v: Tensor, n_free: int) -> None:
        """From now on hold these tokens alone, copies, with room for so many more."""
        ...


class Buffers:
    """A tensor for K and one for V. Where a value is the first numbers of its key, one tensor holds both."""

    def __init__(self, tokens: Sequence[Pair], n_free: int, joint: bool = False) -> None:
        """Copies of the tokens one after the other, with room for `n_free` more."""
        self.joint, self.d_v = joint, tokens[0][1].shape[3]
        self.k = slots_of([k for k, _ in tokens], n_free)
        self.v = self.k[..., : self.d_v] if joint else slots_of([v for _, v in tokens], n_free)

    @property
    def n_slots(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.own)

    @property
    def own(self) -> list[Tensor]:
        """The tensors that are written to."""
        return [self.k] if self.joint else [self.k, self.v]

    def write(self, at: int, k: Tensor, v: Tensor) -> None:
        stop = at + k.shape[2]
        self.k[:, :, at:stop] = k
        if not self.joint:
            self.v[:, :, at:stop] = v

    def scatter(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for buffer, new in zip(self.own, (k, v), strict=False):
            buffer.index_copy_(2, slots, new)

    def part(self, start: int, stop: int) -> Part:
        return Part(self.k[:, :, start:stop], self.v[:, :, start:stop])

    def move(self, start: int, order: Tensor | None, places: Tensor) -> None:
        rows, stop = flat_rows(places, self.k.shape[1], self.n_slots), start + places.shape[-1]
        for buffer in self.own:  # one move of keys moves the values within them
            last = buffer[:, :, start:stop]
            last = last.clone() if order is None else gather_tokens(last, order)
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, rows, last.view(-1, last.shape[-1]))

    def hold(self, k: Tensor, v: Tensor, n_free: int) -> None:
        if self.n_slots == k.shape[2] + n_free:
            self.write(0, k, v)
        else:
            self.__init__([(k, v)], n_free, self.joint)


def slots_of(tokens: Sequence[Tensor], n_free: int) -> Tensor:
    """The tokens (1, h_kv, n, d) copied one after the other, with room for `n_free` more."""
    sizes = [each.shape[2] for each in tokens]
    _, heads, _, width = tokens[0].shape
    slots = tokens[0].new_empty(1, heads, sum(sizes) + n_free, width)
    for target, each in zip(slots.split([*sizes, n_free], 2), tokens, strict=False):
        target.copy_(each)
    return slots
