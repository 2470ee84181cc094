"""The current token of every row, written to where its row keeps it: all places in one launch.

Shapes    k_new, v_new (n, h_kv, 1, d_h or d_v); a place is a pair of buffers (1, h_kv, slots, d_h or d_v), on the
          device or pinned on the host, and the slot. Values that lie within their keys are written with these.
Checks    tests/kernels/test_append.py.

Not here: which slot (`engine/layouts`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.gather import apart
from kernels.jit import distance, jit, power_of_2, tl, upload

Place = tuple[Tensor, Tensor, int]  # K, V, slot
FIELDS = 5  # numbers of a place, as `write_tokens` reads them


def append_rows_ref(k_new: Tensor, v_new: Tensor, places: Sequence[Sequence[Place]]) -> None:
    """Copy by copy."""
    for i, of_row in enumerate(places):
        for k, v, slot in of_row:
            k[:, :, slot : slot + 1] = k_new[i : i + 1]
            v[:, :, slot : slot + 1] = v_new[i : i + 1]


def append_rows_triton(k_new: Tensor, v_new: Tensor, places: Sequence[Sequence[Place]]) -> None:
    """A program for each place and KV head."""
    numbers = [
        number
        for i, of_row in enumerate(places)
        for k, v, slot in of_row
        for number in (
            i, distance(k, k_new) + slot * k.shape[3], distance(v, k_new) + slot * v.stride(2), k.stride(1), v.stride(1)
        )
    ]  # fmt: skip
    if not numbers:
        return
    _, h_kv, _, d_h = k_new.shape
    d_v = apart(*next(place[:2] for of_row in places for place in of_row))
    write_tokens[(len(numbers) // FIELDS, h_kv)](
        k_new, v_new, upload(numbers, k_new.device), d_h, d_v, k_new.stride(0), k_new.stride(1), v_new.stride(0),
        v_new.stride(1), FIELDS, power_of_2(d_h), power_of_2(d_v),
    )  # fmt: skip


@jit
def write_tokens(
    k_new, v_new, places, d_h, d_v, k_row, k_head, v_row, v_head,
    FIELDS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    at, head = places + tl.program_id(0) * FIELDS, tl.program_id(1).to(tl.int64)
    row, column, of_value = tl.load(at), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    inside, in_value = column < d_h, of_value < d_v
    key = tl.load(k_new + row * k_row + head * k_head + column, inside, other=0.0)
    value = tl.load(v_new + row * v_row + head * v_head + of_value, in_value, other=0.0)
    tl.store(k_new + tl.load(at + 1) + head * tl.load(at + 3) + column, key, inside)
    tl.store(k_new + tl.load(at + 2) + head * tl.load(at + 4) + of_value, value, in_value)
