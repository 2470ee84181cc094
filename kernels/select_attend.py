"""Attention of one query per head over chosen tokens of a cache, where they lie: K and V are not copied.

`select_attend` is over one set of tokens; `attend_parts` over several at once, chosen ones and whole stretches, which
is a decode step of a method that retrieves: sinks, window and what was fetched.

Shapes    q (1, h, 1, d_h); k, v (1, h_kv, s, d_h); idx (1, h_kv or h, n_chosen) int64, -1: no token; late: more rows of
          K and V, (1, h_kv, n_late, d_h) each, which idx counts on from s. out (1, h, 1, d_h) in q's dtype,
          lse (1, h, 1) float32, the log-sum-exp of the scaled logits, -inf where there is no token.
Paths     C++ on a CPU: float32 sums whatever the dtype; rows of a KV head are read once for its query heads, unless
          those chose tokens of their own. Triton on a GPU. Both cut tokens into pieces and join them by log-sum-exp.
Checks    tests/kernels/test_select_attend.py, benchmarks/bench_select_attend.py.

Not here: choosing tokens, counting bytes.
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.build import DTYPES, library
from kernels.gather import gather_split
from kernels.jit import INTERPRETED, cdiv, jit, power_of_2, tl, triton

NEVER = 1 << 62  # more rows than any cache has


class Tokens(NamedTuple):
    """Tokens of a cache to attend to: those at `idx`, or all."""

    k: Tensor  # (1, h_kv, s, d_h)
    v: Tensor
    idx: Tensor | None = None  # (1, h_kv or h, n_chosen) int64, -1: no token
    late: tuple[Tensor, Tensor] | None = None  # tokens from s on

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Copies of K and V, (1, heads, n_chosen, d_h); some row or other where there is no token."""
        if self.idx is None:
            return self.k, self.v
        late_k, late_v = self.late or (None, None)
        return gather_split(self.k, late_k, self.idx), gather_split(self.v, late_v, self.idx)


def select_attend(
    q: Tensor, k: Tensor, v: Tensor, idx: Tensor, scale: float,
    late: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over the tokens at `idx`: out and lse."""
    parts = [Tokens(k, v, idx, late)]
    if native_takes(q, parts):
        return attend_parts_native(q, parts, scale)
    if q.is_cuda and triton is not None:
        return select_attend_triton(q, k, v, idx, scale, late)
    return attend_parts_ref(q, parts, scale)


def attend_parts_ref(q: Tensor, parts: Sequence[Tokens], scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over the union, from copies, in float32."""
    h = q.shape[1]
    logits, values = [], []
    for part in parts:
        k, v = (x.repeat_interleave(h // x.shape[1], 1).float() for x in part.gathered())
        x = (q.float() @ k.mT) * scale  # (1, h, 1, n)
        if part.idx is not None:
            hidden = (part.idx < 0).repeat_interleave(h // part.idx.shape[1], 1)
            x = x.masked_fill(hidden.unsqueeze(2), -torch.inf)
        logits.append(x)
        values.append(v)
    joined = torch.cat(logits, -1)
    lse = joined.logsumexp(-1)
    weights = (joined - lse.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)).exp()
    return (weights @ torch.cat(values, 2)).to(q.dtype), lse


# On a CPU.


def native_takes(q: Tensor, parts: Sequence[Tokens]) -> bool:
    """Whether `attend_parts_native` can work on these."""
    if q.device.type != "cpu" or q.dtype not in DTYPES or native() is None:
        return False
    tensors = [x for part in parts for x in (part.k, part.v, *(part.late or ()))]
    return len(q) == 1 and all(x.dtype == q.dtype and x.stride()[2:] == (q.shape[3], 1) for x in tensors)


@cache
def native() -> Any:
    """The C function, or None."""
    lib = library("select_attend")
    if lib is None:
        return None
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.attend_parts.argtypes = [size, size, size, pointer, ctypes.c_float, size, pointer, pointer, pointer, size]
    lib.attend_parts.restype = None
    return lib.attend_parts


def attend_parts_native(q: Tensor, parts: Sequence[Tokens], scale: float) -> tuple[Tensor, Tensor]:
    """All parts in one call of C++, which joins them too."""
    n, h, s_q, d_h = q.shape
    assert n == s_q == 1 and parts, (q.shape, len(parts))
    q = q.contiguous()
    packed = [number for part in parts for number in packed_part(part)]
    out = torch.empty_like(q)
    lse = torch.empty(1, h, 1)
    native()(
        DTYPES[q.dtype], h, d_h, q.data_ptr(), scale, len(parts), (ctypes.c_int64 * len(packed))(*packed),
        out.data_ptr(), lse.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out, lse


def packed_part(part: Tokens) -> tuple[int, ...]:
    """The numbers of `struct Part` in select_attend.cpp."""
    k, v, idx, late = part
    size, h_kv, s = k.element_size(), k.shape[1], k.shape[2]
    heads, n, where, late_numbers, rows = h_kv, s, 0, (0, 0, 0), NEVER
    if idx is not None:
        assert idx.dtype == torch.int64 and idx.is_contiguous(), (idx.dtype, idx.stride())
        _, heads, n = idx.shape
        where = idx.data_ptr()
    if late is not None:
        k_late, v_late = late
        assert k_late.stride() == v_late.stride(), (k_late.stride(), v_late.stride())
        late_numbers, rows = (k_late.data_ptr(), v_late.data_ptr(), k_late.stride(1) * size), s
    return (
        k.data_ptr(), v.data_ptr(), k.stride(1) * size, v.stride(1) * size, heads, n, where, *late_numbers, rows, h_kv
    )  # fmt: skip


# On a GPU.

SPLIT = 256  # tokens of a head that one program attends to
TILE = 64  # of them at once


def select_attend_triton(
    q: Tensor, k: Tensor, v: Tensor, idx: Tensor, scale: float,
    late: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A program for every head of idx and split of its tokens, and one per query head that joins them."""
    (_, h, _, d_h), (_, h_kv, s, _) = q.shape, k.shape
    _, heads, n = idx.shape
    k_late, v_late = late or (k, v)
    q, idx = q.contiguous(), idx.contiguous()
    for x in (k, v, k_late, v_late):
        assert x.stride()[2:] == (d_h, 1) and x.dtype == q.dtype, (x.stride(), x.dtype)
    assert k_late.stride() == v_late.stride(), (k_late.stride(), v_late.stride())
    g, splits, width = h // heads, cdiv(n, SPLIT), power_of_2(d_h, 16)
    sums = torch.empty(h, splits, d_h, dtype=torch.float32, device=q.device)
    lses = torch.empty(h, splits, dtype=torch.float32, device=q.device)
    out, lse = torch.empty_like(q), torch.empty(1, h, 1, dtype=torch.float32, device=q.device)
    attend_split[(heads, splits)](
        q, k, v, k_late, v_late, idx, sums, lses, scale, s, n, d_h, splits,
        k.stride(1), v.stride(1), k_late.stride(1), heads // h_kv,
        g, power_of_2(g, 16), width, TILE, SPLIT, INTERPRETED,
    )  # fmt: skip
    join_splits[(h,)](sums, lses, out, lse, d_h, splits, power_of_2(splits), width)
    return out, lse


@jit
def attend_split(
    q, k, v, k_late, v_late, idx, sums, lses, scale, s, n, d_h, splits,
    k_stride, v_stride, late_stride, heads_per_owner,
    G: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr,  # float32 products, since Triton's interpreter takes bfloat16 for its bits
):  # fmt: skip
    """Softmax over up to SPLIT tokens for the G query heads that chose them, padded to ROWS for the tensor cores."""
    head, split = tl.program_id(0), tl.program_id(1)
    owner = (head // heads_per_owner).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = column < d_h
    where = (head * G + row) * d_h
    queries = tl.load(q + where[:, None] + column[None], (row < G)[:, None] & inside[None], other=0.0)
    if WIDE:
        queries = queries.to(tl.float32)
    highest = tl.full((ROWS,), -1e30, tl.float32)  # finite: nothing minus nothing would be no number
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(split * SPLIT, split * SPLIT + SPLIT, TILE):
        place = start + tl.arange(0, TILE)
        token = tl.load(idx + head.to(tl.int64) * n + place, place < n, other=-1)
        is_late, real = token >= s, token >= 0
        early = tl.where(real & (token < s), token, 0) * d_h
        behind = tl.where(is_late, token - s, 0) * d_h
        k_rows = tl.where(is_late, k_late + owner * late_stride + behind, k + owner * k_stride + early)
        v_rows = tl.where(is_late, v_late + owner * late_stride + behind, v + owner * v_stride + early)
        mask = real[:, None] & inside[None]
        keys = tl.load(k_rows[:, None] + column[None], mask, other=0.0)
        if WIDE:
            keys = keys.to(tl.float32)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        logits = tl.where(real[None], logits, -1e30)
        higher = tl.maximum(highest, tl.max(logits, 1))
        weights = tl.where(real[None], tl.exp(logits - higher[:, None]), 0.0)
        shrink = tl.exp(highest - higher)
        values = tl.load(v_rows[:, None] + column[None], mask, other=0.0)
        if WIDE:
            values = values.to(tl.float32)
        part = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        acc = acc * shrink[:, None] + part
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
    some = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, highest + tl.log(some), float("-inf"))
    mine = (head * G + row) * splits + split
    tl.store(lses + mine, lse, row < G)
    tl.store(sums + mine[:, None] * d_h + column[None], acc / some[:, None], (row < G)[:, None] & inside[None])


@jit
def join_splits(sums, lses, out, lse, d_h, splits, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """The splits of one query head, weighted by their log-sum-exps."""
    head = tl.program_id(0)
    split, column = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    mine = tl.load(lses + head * splits + split, split < splits, other=float("-inf"))
    highest = tl.max(mine, 0)
    safe = tl.where(highest > -1e30, highest, 0.0)
    weights = tl.exp(mine - safe)
    total = tl.sum(weights, 0)
    some = tl.where(total > 0, total, 1.0)
    mask = (split < splits)[:, None] & (column < d_h)[None]
    rows = tl.load(sums + (head * splits + split)[:, None] * d_h + column[None], mask, other=0.0)
    joined = tl.sum(rows * weights[:, None], 0) / some
    tl.store(out + head * d_h + column, joined.to(out.dtype.element_ty), column < d_h)
    tl.store(lse + head, tl.where(total > 0, safe + tl.log(some), float("-inf")))
