"""Rows that lie far away, such as values on the host, copied to where the device reads them.

Shapes    values (1, h_kv, s, d_h), on the device or pinned on the host; idx (1, h_kv, k) int64, of which the lower half
          counts; result (1, h_kv, k, d_h) next to idx.
Checks    tests/kernels/test_values.py.

Not here: tokens that several heads ask for, or that stay for later steps (`kernels/rows/union.py`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.fast import STEP, takes
from kvbench.kernels.gather import gather_tokens
from kvbench.kernels.jit import cdiv, distance, jit, power_of_2, tl

TOKENS = 16  # that one program copies


def fetch_values(values: Tensor, idx: Tensor) -> Tensor:
    """Rows of `values` at `idx`."""
    if takes(STEP, idx.device):
        return fetch_values_triton(values, idx)
    return gather_tokens(values, idx.to(values.device)).to(idx.device)


def fetch_values_triton(values: Tensor, idx: Tensor, out: Tensor | None = None) -> Tensor:
    """A program for some tokens of a KV head; into `out`, where it is given."""
    (_, h_kv, _, d_h), k = values.shape, idx.shape[-1]
    assert values.stride()[2:] == (d_h, 1) and idx.stride(-1) == 1 and idx.dtype == torch.int64, values.stride()
    if out is None:
        out = torch.empty(1, h_kv, k, d_h, dtype=values.dtype, device=idx.device)
    copy_rows[(cdiv(k, TOKENS), h_kv)](
        out, distance(values, out), idx, values.stride(1), idx.stride(1), k, d_h, TOKENS, power_of_2(d_h)
    )
    return out


@jit
def copy_rows(out, values, idx, head_stride, idx_stride, k, d_h, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    place, column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    real = place < k
    token = tl.load(idx + head * idx_stride + place, real, other=0).to(tl.int32).to(tl.int64)
    there = real[:, None] & (column < d_h)[None]
    source = values + head * head_stride + token * d_h
    row = tl.load(out + source[:, None] + column[None], there, other=0.0)
    tl.store(out + (head * k + place)[:, None] * d_h + column[None], row, there)
