"""Attention of one query per head over packed K and V, and the exact tokens after them.

Shapes    q (1, h, 1, d_h); codes, scales and zeros as in `kernels/packed/codes.py`; exact (1, h_kv, rows, d_h), whose
          first row is the first token that is not packed. K and V may be packed to different lengths.
          Scaled logits bend towards `cap`, if it is not 0. out (1, h, 1, d_h) in q's dtype, lse (1, h, 1) float32.
Paths     C++ on a CPU, which makes numbers of codes in registers, as Triton does on a GPU (`kernels/packed/rows.py`);
          else numbers are rebuilt for the length of the call.
Checks    tests/kernels/test_packed.py, benchmarks/bench_packed.py.

Not here: what is packed when (`engine/caches/quantized.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.build import dtypes, library, remembered
from kvbench.kernels.capped import capped
from kvbench.kernels.packed.codes import (
    BY_CHANNEL,
    BY_FLOAT,
    BY_TABLE,
    BY_TOKEN,
    Quantised,
    rebuild_channels,
    rebuild_tokens,
)

CHUNK = 256  # tokens, as soften.h has it: groups of tokens lie within one
MOST_D = 512  # dimensions that the C++ has room for
BYTE = 3  # of scales that are looked up, as packed.cpp counts it after the types of numbers
FEWEST_BYTES = 4  # of a group, so that a load holds codes of one group alone


class Side(NamedTuple):
    """K or V of a layer: packed tokens, and exact ones after them."""

    kind: int
    bits: int
    group: int
    n: int  # packed tokens
    packed: Quantised  # with room for more
    exact: Tensor  # (1, h_kv, rows, d_h)
    table: Tensor | None = None  # (16,) float32, of kinds that look numbers up; of floats (2**bits,)
    rebuild: Callable[[], Tensor] | None = None  # (h_kv, n, d_h), where it is not by groups of codes
    scale_table: Tensor | None = None  # (256,) float32, where a float's scale is a byte that is looked up
    exponent: int = 4  # bits of it in a float of 8: e4m3 or e5m2; floats of 4 bits are e2m1

    def rebuilt(self, n: int) -> Tensor:
        """What attention sees of the first `n` tokens, (1, h_kv, n, d_h)."""
        exact = self.exact[:, :, : n - self.n]
        if self.n == 0:
            return exact
        if self.rebuild is not None:
            numbers = self.rebuild()
        elif self.kind == BY_CHANNEL:
            filled = Quantised(*(x[:, : self.n // self.group] for x in self.packed))
            numbers = rebuild_channels(filled, self.bits, self.group)
        else:
            filled = Quantised(*(x[:, : self.n] for x in self.packed))
            numbers = rebuild_tokens(filled, self.bits, self.group)
        return torch.cat([numbers.unsqueeze(0).to(exact.dtype), exact], 2)

    def is_native(self, d_h: int) -> bool:
        """Whether the C++ knows this kind of code."""
        of_group = self.group * self.bits // 8
        if self.kind == BY_FLOAT:
            return self.bits in (4, 8) and self.group % 16 == 0 and d_h % self.group == 0 and d_h <= MOST_D
        fits = self.bits in (2, 4, 8) and (self.kind < BY_TABLE or self.bits < 8) and d_h <= MOST_D
        whole = CHUNK % self.group == 0 if self.kind == BY_CHANNEL else d_h % self.group == 0
        # A load may repeat a group's bytes until every lane has a code, and never more often than a byte has codes.
        even = self.group & (self.group - 1) == 0 and of_group % FEWEST_BYTES == 0
        return fits and whole and even and of_group >= 2 * self.bits

    def numbers(self) -> tuple[int, ...]:
        """The numbers of `struct Side` in packed.cpp."""
        codes, scales, zeros = self.packed
        assert codes[0].is_contiguous() and scales.stride() == zeros.stride(), (codes.stride(), scales.stride())
        assert self.kind != BY_CHANNEL or scales[0].is_contiguous(), scales.stride()
        assert self.exact.stride()[2:] == (self.exact.shape[3], 1), self.exact.stride()
        table, scale_table = (0 if x is None else x.data_ptr() for x in (self.table, self.scale_table))
        scale_type = dtypes()[scales.dtype] if self.scale_table is None else BYTE
        return (
            self.kind, self.bits, self.group, self.n, codes.data_ptr(), scales.data_ptr(), zeros.data_ptr(),
            codes.stride(0), scales.stride(0) * scales.element_size(), *scales.stride()[1:], scale_type,
            self.exact.data_ptr(), self.exact.stride(1) * self.exact.element_size(), table,
            scale_table, self.exponent,
        )  # fmt: skip


class Packed(NamedTuple):
    """K and V of the same `n` tokens of each KV head."""

    k: Side
    v: Side
    n: int
    joint: bool = False  # a value is the first numbers of its key, whose codes `v` has too
    grows: tuple[int, int] = (0, 0)  # how many of K and of V are packed at every step to come, while `n` grows by one

    def rebuilt(self, d_v: int) -> tuple[Tensor, Tensor]:
        """What attention sees of all tokens, (1, h_kv, n, d_h and d_v)."""
        k = self.k.rebuilt(self.n)
        return k, k[..., :d_v] if self.joint else self.v.rebuilt(self.n)

    def sides_of_width(self, d_h: int) -> tuple[Side, Side] | None:
        """K and V, where both are codes of so many dimensions."""
        if self.joint or self.k.exact.shape[3] != d_h or self.v.exact.shape[3] != d_h:
            return None
        return self.k, self.v


def attend_packed(q: Tensor, packed: Packed, scale: float, cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Attention over all tokens: out and lse."""
    if takes_packed(q, packed):
        return attend_packed_native(q, packed, scale, cap)
    return attend_packed_ref(q, packed, scale, cap)


def attend_packed_ref(q: Tensor, packed: Packed, scale: float, cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Attention from rebuilt numbers, in float32."""
    h = q.shape[1]
    k, v = (x.repeat_interleave(h // x.shape[1], 1).float() for x in packed.rebuilt(packed.v.exact.shape[3]))
    logits = capped((q.float() @ k.mT) * scale, cap)
    lse = logits.logsumexp(-1)
    return ((logits - lse.unsqueeze(-1)).exp() @ v).to(q.dtype), lse


def takes_packed(q: Tensor, packed: Packed) -> bool:
    """Whether `attend_packed_native` can work on this."""
    if q.device.type != "cpu" or q.dtype not in dtypes() or len(q) != 1 or native() is None:
        return False
    d_h = q.shape[-1]
    if (sides := packed.sides_of_width(d_h)) is None or sides[1].kind not in (BY_TOKEN, BY_FLOAT):
        return False
    return all(side.is_native(d_h) and side.exact.dtype == q.dtype for side in sides)


@remembered
def native() -> Any:
    """The C function, or None."""
    lib = library("packed")
    if lib is None:
        return None
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.attend_packed.argtypes = [*[size] * 5, pointer, ctypes.c_float, ctypes.c_float, pointer, pointer, pointer, size]
    lib.attend_packed.restype = None
    return lib.attend_packed


def attend_packed_native(q: Tensor, packed: Packed, scale: float, cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Attention in C++ (`native/packed.cpp`)."""
    _, h, _, d_h = q.shape
    q = q.contiguous()
    numbers = [*packed.k.numbers(), *packed.v.numbers()]
    out, lse = torch.empty_like(q), torch.empty(1, h, 1)
    native()(
        dtypes()[q.dtype], h, packed.k.exact.shape[1], d_h, packed.n, q.data_ptr(), scale, cap,
        (ctypes.c_int64 * len(numbers))(*numbers), out.data_ptr(), lse.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out, lse
