"""`TokenCode`: a token that is packed by itself, so that a step can fetch it without its neighbours.

K and V in groups of consecutive channels, each with a scale and a zero point of 16 bits. Groups along the tokens would
have to move as a whole, or with the scales of every token's group.

Not here: packing and rebuilding (`engine/caches/packed_host.py`).
"""

from dataclasses import dataclass
from typing import NamedTuple

SCALE_BYTES = 2  # of a scale, and of a zero point


class SideBytes(NamedTuple):
    """Bytes of K or of V of a token of one KV head."""

    codes: int
    numbers: int  # scales, and zero points as many again


@dataclass(frozen=True)
class TokenCode:
    """Bits and groups of K and V."""

    key_bits: int
    value_bits: int
    group: int

    @property
    def title(self) -> str:
        same = self.key_bits == self.value_bits
        return f"host {self.key_bits} bit" if same else f"host K{self.key_bits} V{self.value_bits} bit"

    def sides(self, d_h: int, d_v: int) -> tuple[SideBytes, SideBytes]:
        """Bytes of a token's K and of its V, counted at 16 bits a scale."""
        key, value = (
            SideBytes(width * bits // 8, width // self.group * SCALE_BYTES)
            for width, bits in ((d_h, self.key_bits), (d_v, self.value_bits))
        )
        return key, value

    def token_bytes(self, d_h: int, d_v: int) -> int:
        """K and V of a token of one KV head: (d_h * b_k + d_v * b_v) / 8 + 4 * (d_h + d_v) / g."""
        return sum(side.codes + 2 * side.numbers for side in self.sides(d_h, d_v))
