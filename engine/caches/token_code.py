"""`TokenCode`: how a token is packed by itself, so that a step can fetch it without its neighbours.

`RangeCode` has K and V in groups of consecutive channels, each with a scale and a zero point of 16 bits. Groups along
the tokens would have to move as a whole, or with the scales of every token's group.

Not here: the host that holds such rows (`engine/caches/packed_host.py`). No torch: settings read this first.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.engine.placement import Seen

SCALE_BYTES = 2  # of a scale, and of a zero point


class Codec(Protocol):
    """Rows of bytes of a layer's tokens, and what is rebuilt of them."""

    def rows(self, k: "Tensor", v: "Tensor") -> "Tensor":
        """Rows (h_kv, n, bytes) uint8 of K and V (h_kv, n, d_h)."""
        ...

    def rebuilt(self, rows: "Tensor") -> "tuple[Tensor, Tensor]":
        """K and V (h_kv, n, d_h) of rows, in the cache's dtype."""
        ...


class TokenCode(ABC):
    """A code of single tokens. Equal ones make the same rows of a prompt."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Words that follow the name of a method whose host has such tokens."""

    @abstractmethod
    def token_bytes(self, d_h: int, d_v: int) -> int:
        """K and V of a token of one KV head, as they are counted."""

    def shared_bytes(self, h_kv: int) -> int:
        """Bytes of a layer that all its tokens share, and that stay on the device."""
        return 0

    @abstractmethod
    def codec(self, k: "Tensor", v: "Tensor", seen: "Seen") -> Codec:
        """What packs a layer whose prompt has K and V (h_kv, n, d_h); `seen` is what was observed of it."""


@dataclass(frozen=True)
class RangeCode(TokenCode):
    """Bits and groups of K and V."""

    key_bits: int
    value_bits: int
    group: int

    @property
    def title(self) -> str:
        same = self.key_bits == self.value_bits
        return f"host {self.key_bits} bit" if same else f"host K{self.key_bits} V{self.value_bits} bit"

    def token_bytes(self, d_h: int, d_v: int) -> int:
        """Codes, and scales and zero points at 16 bits: (d_h * b_k + d_v * b_v) / 8 + 4 * (d_h + d_v) / g."""
        sides = (d_h, self.key_bits), (d_v, self.value_bits)
        return sum(width * bits // 8 + 2 * (width // self.group) * SCALE_BYTES for width, bits in sides)

    def codec(self, k: "Tensor", v: "Tensor", seen: "Seen") -> Codec:
        from kvbench.engine.caches.packed_host import RangeCodec

        return RangeCodec(self, k.dtype, (k.shape[-1], v.shape[-1]))
