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
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.clock import Since, now, steps_since
from kvbench.kernels.gather import apart
from kvbench.kernels.jit import jit, power_of_2, tl, upload

Place = tuple[Tensor, Tensor, int]  # K, V, slot
Ring = tuple[int, int]  # the slot of its first token, and how many tokens it has
NO_RING = (0, 1 << 40)  # slots without an end
FIELDS = 10  # numbers of a place, as `write_tokens` reads them


def append_rows_ref(k_new: Tensor, v_new: Tensor, places: Sequence[Sequence[Place]]) -> None:
    """Copy by copy."""
    for i, of_row in enumerate(places):
        for k, v, slot in of_row:
            k[:, :, slot : slot + 1] = k_new[i : i + 1]
            v[:, :, slot : slot + 1] = v_new[i : i + 1]


def append_rows_triton(k_new: Tensor, v_new: Tensor, places: Sequence[Sequence[Place]]) -> None:
    """A program for each place and KV head."""
    if (written := Places.of(places, k_new.device)) is not None:
        written.take(k_new, v_new)


class Places(NamedTuple):
    """Where the current token of every row goes, kept on the device: at later steps to slots further on."""

    numbers: Tensor
    grid: tuple[int, int]  # of the launch: places, KV heads
    d_h: int
    d_v: int  # 0: values lie within their keys
    widths: tuple[int, int]  # of both, padded

    @classmethod
    def of(
        cls, places: Sequence[Sequence[Place]], device: torch.device, rings: Sequence[Sequence[Ring]] | None = None
    ) -> Places | None:  # fmt: skip
        """`rings` are the slots that take turns at later steps; None where no row keeps its token."""
        numbers, widths = list[int](), None
        for i, of_row in enumerate(places):
            for j, (k, v, slot) in enumerate(of_row):
                first, size = NO_RING if rings is None else rings[i][j]
                starts = (x.data_ptr() // x.element_size() for x in (k, v))
                numbers += (i, *starts, k.stride(1), v.stride(1), k.stride(2), v.stride(2), slot - first, first, size)
                widths = (k, v) if widths is None else widths
        if widths is None:
            return None
        _, h_kv, _, d_h = widths[0].shape
        d_v = apart(*widths)
        grid = len(numbers) // FIELDS, h_kv
        return cls(upload(numbers, device), grid, d_h, d_v, (power_of_2(d_h), power_of_2(d_v)))

    def take(self, k_new: Tensor, v_new: Tensor, since: Since | None = None) -> None:
        """Write the current token, at a step after the one that the slots are for."""
        since = now(k_new.device) if since is None else since
        (k_row, k_head, *_), (v_row, v_head, *_) = k_new.stride(), v_new.stride()
        write_tokens[self.grid](
            k_new, v_new, self.numbers, *since, k_new.data_ptr() // k_new.element_size(), self.d_h, self.d_v, k_row,
            k_head, v_row, v_head, FIELDS, *self.widths,
        )  # fmt: skip


@jit(unspecialized=("start", "here"))
def write_tokens(
    k_new, v_new, places, clock, start, here, d_h, d_v, k_row, k_head, v_row, v_head,
    FIELDS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    at, head = places + tl.program_id(0) * FIELDS, tl.program_id(1).to(tl.int64)
    row, column, of_value = tl.load(at), tl.arange(0, WIDTH), tl.arange(0, VALUES)
    slot = tl.load(at + 8) + (tl.load(at + 7) + steps_since(clock, start)) % tl.load(at + 9)
    to_k = tl.load(at + 1) - here + head * tl.load(at + 3) + slot * tl.load(at + 5)
    to_v = tl.load(at + 2) - here + head * tl.load(at + 4) + slot * tl.load(at + 6)
    inside, in_value = column < d_h, of_value < d_v
    key = tl.load(k_new + row * k_row + head * k_head + column, inside, other=0.0)
    value = tl.load(v_new + row * v_row + head * v_head + of_value, in_value, other=0.0)
    tl.store(k_new + to_k + column, key, inside)
    tl.store(k_new + to_v + of_value, value, in_value)
