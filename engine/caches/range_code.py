"""`RangeCode`: a token's K and V in groups of consecutive channels, each with a scale and a zero point of 16 bits.

Groups along the tokens would have to move as a whole, or with the scales of every token's group.

Not here: the host that holds such rows (`engine/caches/packed_host.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.caches.packed_host import joined
from kvbench.engine.caches.token_code import Codec, TokenCode
from kvbench.engine.placement import Seen
from kvbench.kernels.packed.codes import Quantised, quantise_tokens, rebuild_tokens

SCALE_BYTES = 2  # of a scale, and of a zero point


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

    def codec(self, k: Tensor, v: Tensor, seen: Seen) -> Codec:
        return RangeCodec(self, k.dtype, (k.shape[-1], v.shape[-1]))


class RangeCodec:
    """Codes of K and V, then their scales and zero points in the cache's dtype."""

    def __init__(self, code: RangeCode, dtype: torch.dtype, widths: tuple[int, int]) -> None:
        self.code, self.dtype, self.widths = code, dtype, widths

    def rows(self, k: Tensor, v: Tensor) -> Tensor:
        code = self.code
        keys, values = quantise_tokens(k, code.key_bits, code.group), quantise_tokens(v, code.value_bits, code.group)
        return joined(keys.codes, values.codes, keys.scales, keys.zeros, values.scales, values.zeros)

    def rebuilt(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        code, (d_h, d_v) = self.code, self.widths
        keys, values = d_h * code.key_bits // 8, d_v * code.value_bits // 8
        of_key, of_value = (width // code.group * self.dtype.itemsize for width in self.widths)
        codes_k, codes_v, *numbers = rows.split([keys, values, of_key, of_key, of_value, of_value], -1)
        scale_k, zero_k, scale_v, zero_v = (x.contiguous().view(self.dtype) for x in numbers)
        k = rebuild_tokens(Quantised(codes_k, scale_k, zero_k), code.key_bits, code.group)
        return k, rebuild_tokens(Quantised(codes_v, scale_v, zero_v), code.value_bits, code.group)
