"""Tokens that lie on the device as codes.

A *quantized cache* holds what the layer has of its tokens, in whatever form, and hands it to attention as one part. It takes in
the current token before attention and may pack what has aged after it. Which token is where in it is its own matter,
but that it is one in the order of positions.

Not here: its layer (`engine/layouts/quantized.py`), how a method packs (`methods/quantising`), what packed bytes look like
(`kernels/packed`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.layouts.growing import Growing
from kvbench.kernels.clock import Since
from kvbench.kernels.rows.append import Place


class QuantizedCache(ABC):
    """K and V of one layer of one sample."""

    n: int  # tokens, all that came

    @abstractmethod
    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        """Take in the current token, (1, h_kv, 1, d_h) each."""

    @classmethod
    def append_rows(
        cls, caches: Sequence["QuantizedCache"], k_new: Sequence[Tensor], v_new: Sequence[Tensor]
    ) -> list[list[Place]]:
        """`append` of rows on an accelerator; places that tokens still have to be written to, all in one launch."""
        for quantized, k, v in zip(caches, k_new, v_new, strict=True):
            quantized.append(k, v)
        return [[] for _ in caches]

    @abstractmethod
    def part(self) -> Part:
        """All tokens, to attend to."""

    def parts(self) -> list[Part]:
        """All tokens as a list of parts, where attention to them takes several."""
        return [self.part()]

    def rebuilt(self) -> tuple[Tensor, Tensor]:
        """K and V of all tokens as attention sees them, (1, h_kv, n, d_h or d_v)."""
        part = self.part().gathered()
        return part.k, part.v

    @abstractmethod
    def pack_due(self) -> None:
        """Pack after attention what is to be packed now."""

    # Steps that are alike, on an accelerator.

    def growing(self) -> Growing | None:
        """Where tokens go at steps to come, as a layer says it, for as long as `pack_due` does nothing; None: unknown."""
        return None

    def repeat(self) -> None:
        """Count the current token in, which kernels have taken in as they were planned."""
        raise AssertionError(f"{type(self).__name__} says nothing of steps to come")

    @classmethod
    def packing(
        cls, caches: Sequence["QuantizedCache"], newest: Sequence[tuple[Tensor, Tensor]], rows: Sequence[int]
    ) -> "Packing | None":
        """Packing of tokens before attention at steps to come; None: nothing is packed.

        `newest` are current tokens (1, h_kv, 1, d_h), which come from these rows of all.
        """
        return None

    @abstractmethod
    def counted_bytes(self) -> int:
        """Bytes of what is there, by the rules of docs/byte-budget.md."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Every tensor that is held between steps."""


class Packing(Protocol):
    """Tokens that are packed at steps that are alike."""

    def take(self, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        """Pack with the current tokens of all rows (n, h_kv, 1, d_h), at a step after the one that was planned."""
        ...


class Packings(NamedTuple):
    """Several of them."""

    each: Sequence[Packing]

    def take(self, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        for packing in self.each:
            packing.take(k_new, v_new, since)


class LatestTokens:
    """Exact tokens in their order, of which the oldest leave: the latest rows of a buffer that is seldom shifted."""

    def __init__(self, tokens: Tensor, most: int, spare: int = 64) -> None:
        """A copy of tokens (1, h_kv, n, d_h), at most `most` and one more; `spare` rows put shifting off."""
        _, heads, n, d_h = tokens.shape
        self.buffer = tokens.new_empty(1, heads, most + 1 + spare, d_h)
        self.buffer[:, :, :n] = tokens
        self.start, self.n = 0, n

    def view(self) -> Tensor:
        return self.buffer[:, :, self.start : self.start + self.n]

    def append(self, token: Tensor) -> None:
        self.place().copy_(token)

    def place(self) -> Tensor:
        """Where the next token goes, (1, h_kv, 1, d_h); it counts from now on."""
        end = self.start + self.n
        if end == self.buffer.shape[2]:
            self.buffer[:, :, : self.n] = self.view().clone()
            self.start, end = 0, self.n
        self.n += 1
        return self.buffer[:, :, end : end + 1]

    @property
    def n_left(self) -> int:
        """Tokens that may come until they are shifted."""
        return self.buffer.shape[2] - self.start - self.n

    def newest(self) -> Tensor:
        """The buffer from its newest token on."""
        return self.buffer[:, :, self.start + self.n - 1 :]

    def leave(self, n: int) -> Tensor:
        """The oldest `n` tokens, which are gone from now on, and lie there until the next one comes."""
        oldest = self.buffer[:, :, self.start : self.start + n]
        self.start, self.n = (self.start + n if n < self.n else 0), self.n - n
        return oldest
