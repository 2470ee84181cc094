"""`TokenCode`: how a token is packed by itself, so that a step can fetch it without its neighbours.

Not here: one of ranges (`engine/caches/range_code.py`), one of floats (`methods/quantising/floats.py`), the host that
holds such rows (`engine/caches/packed_host.py`). No torch: settings read this first.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.engine.placement import Seen


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
