"""Scores of tokens by their codes: inner products of a query with all centroids, looked up and added up.

`pq_logits` is the sums themselves. `pq_top` is a decode step's choice: a softmax of every query head over all
candidates, added up over the heads of a group, and the k tokens with the highest sum, lower indices first among equals.

Shapes    q (h, d_h), centroids (h_kv, m, c, d_m), codes (h_kv, m, >= n) uint8 or `PackedCodes` -> logits (h, n)
          float32, unscaled; idx (h_kv, k), or (h, k) where query heads choose for themselves, int64, in no order.
Checks    tests/kernels/test_pq_scores.py, benchmarks/bench_pq_scores.py.

Not here: codes (`pq_codes.py`), attention over what was chosen (`select_attend.py`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.build import library
from kernels.choices import MERGES
from kernels.jit import cdiv, jit, tl, triton
from kernels.pq_codes import PackedCodes
from kernels.topk import top_stable, top_stable_ref


def pq_tables(q: Tensor, centroids: Tensor) -> Tensor:
    """Inner products of all centroids with the query's part that belongs to them: (h, m, c) float32."""
    h_kv, m, c, d_m = centroids.shape
    parts = q.float().view(h_kv, -1, m, d_m).transpose(1, 2)  # (h_kv, m, g, d_m)
    return (parts @ centroids.float().mT).transpose(1, 2).reshape(len(q), m, c)


def pq_logits(q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int) -> Tensor:
    """Sums of table entries over parts, part by part from the first: (h, n) float32."""
    if takes_native(codes):
        return pq_logits_native(q, centroids, codes, n)
    if takes_triton(codes):
        return pq_logits_triton(q, centroids, codes, n)
    return pq_logits_ref(q, centroids, codes, n)


def pq_top(
    q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int, k: int, scale: float,
    merge: str = "softmax_sum",
) -> Tensor:  # fmt: skip
    """Indices of the chosen ones among the first n tokens: all, if k >= n."""
    if merge == "softmax_sum":
        if takes_native(codes):
            return pq_top_native(q, centroids, codes, n, k, scale)
        if takes_triton(codes):
            return pq_top_triton(q, centroids, codes, n, k, scale)
    return pq_top_ref(q, centroids, codes, n, k, scale, merge)


def pq_logits_ref(q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int) -> Tensor:
    tables = pq_tables(q, centroids)
    return sum_entries(tables, codes, n)


def sum_entries(tables: Tensor, codes: PackedCodes | Tensor, n: int) -> Tensor:
    """Tables (h, m, c) read at codes, in the tables' dtype: (h, n)."""
    rows = (codes.codes(0, n) if isinstance(codes, PackedCodes) else codes[..., :n]).long()
    rows = rows.repeat_interleave(len(tables) // len(rows), 0)
    logits = tables[:, 0].gather(-1, rows[:, 0])
    for j in range(1, rows.shape[1]):
        logits += tables[:, j].gather(-1, rows[:, j])
    return logits


def pq_top_ref(
    q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int, k: int, scale: float,
    merge: str = "softmax_sum",
) -> Tensor:  # fmt: skip
    """Weights in float64 from the float32 tables, so that rounding decides nothing; then a stable sort."""
    logits = sum_entries(pq_tables(q, centroids).double(), codes, n) * scale
    return top_stable_ref(merged(logits, len(centroids), merge), min(k, n))


def merged(logits: Tensor, h_kv: int, merge: str) -> Tensor:
    """Scores that tokens are chosen by, (h_kv or h, n)."""
    assert merge in MERGES, f"merge={merge!r}; one of {MERGES}"
    if merge == "per_query_head":
        return logits
    grouped = logits.unflatten(0, (h_kv, -1))  # (h_kv, g, n)
    if merge == "logit_sum":
        return grouped.sum(1)
    weights = grouped.softmax(-1)
    return weights.sum(1) if merge == "softmax_sum" else weights.amax(1)


def codes_of(codes: PackedCodes | Tensor) -> Tensor:
    """The memory that codes are in."""
    return codes.data if isinstance(codes, PackedCodes) else codes


def are_bytes(codes: PackedCodes | Tensor) -> bool:
    """Whether the fast paths can read them."""
    data = codes_of(codes)
    return data.dtype == torch.uint8 and data.stride(-1) == 1


# On a CPU.


def takes_native(codes: PackedCodes | Tensor) -> bool:
    """Whether the C++ can read such codes."""
    return codes_of(codes).device.type == "cpu" and are_bytes(codes) and native() is not None


@cache
def native() -> Any:
    """The C functions, or None."""
    lib = library("pq_scores")
    if lib is not None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        lib.pq_logits.argtypes = [size, size, size, size, pointer, pointer, size, size, size, size, pointer, size]
        lib.pq_top.argtypes = [
            size, size, size, size, pointer, pointer, size, size, size, size, size, ctypes.c_double, pointer, size
        ]  # fmt: skip
        lib.pq_logits.restype, lib.pq_top.restype = None, size
    return lib


def packed_codes(codes: PackedCodes | Tensor, n: int) -> tuple[int, int, int, int]:
    """Where codes lie, the strides of heads and parts, and how many bit planes they have: none if they are bytes."""
    is_packed = isinstance(codes, PackedCodes)
    held, planes = (codes.n, codes.b % 8) if is_packed else (codes.shape[-1], 0)
    assert n <= held, f"{n} of {held} tokens"
    data = codes_of(codes)
    assert are_bytes(codes), (data.dtype, data.stride())
    return data.data_ptr(), data.stride(0), data.stride(1), planes


def pq_logits_native(q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int) -> Tensor:
    """A head at a time, from tables that stay in its core's cache."""
    entries = pq_tables(q, centroids).contiguous()
    (h, m, c), h_kv = entries.shape, len(centroids)
    logits = torch.empty(h, n)
    native().pq_logits(
        h, h_kv, m, c, entries.data_ptr(), *packed_codes(codes, n), n, logits.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return logits


def pq_top_native(q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int, k: int, scale: float) -> Tensor:
    """No score is stored where there are fewer joint values than tokens. Ascending indices."""
    h_kv = len(centroids)
    if k >= n:
        return torch.arange(n).expand(h_kv, n)
    idx = torch.empty(h_kv, k, dtype=torch.int64)
    if k <= 0:
        return idx
    assert scale > 0, scale
    entries = pq_tables(q, centroids).contiguous()
    h, m, c = entries.shape
    told = native().pq_top(
        h, h_kv, m, c, entries.data_ptr(), *packed_codes(codes, n), n, k, scale, idx.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    # Where weights are too small for float64, or not numbers, the reference has to say.
    return idx if told else pq_top_ref(q, centroids, codes, n, k, scale)


# On a GPU. Weights are float32 there: scores that differ by less than its rounding may change places.

TOKENS = 256  # of one program


def takes_triton(codes: PackedCodes | Tensor) -> bool:
    return codes_of(codes).is_cuda and are_bytes(codes) and triton is not None


def pq_logits_triton(q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int) -> Tensor:
    """A program for some tokens of a query head."""
    entries = pq_tables(q, centroids).contiguous()
    h, m, c = entries.shape
    logits = torch.empty(h, n, dtype=torch.float32, device=q.device)
    _, head_stride, part_stride, planes = packed_codes(codes, n)
    if n:
        store_logits[(cdiv(n, TOKENS), h)](
            entries, codes_of(codes), logits, n, c, head_stride, part_stride, h // len(centroids), m, planes, TOKENS
        )
    return logits


def pq_top_triton(q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int, k: int, scale: float) -> Tensor:
    """Codes are read twice, for the softmax's sums and for the scores, and logits are never stored."""
    scores = pq_scores_triton(q, centroids, codes, n, scale)
    return top_stable(scores, min(k, n))


def pq_scores_triton(q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int, scale: float) -> Tensor:
    """Softmax over tokens per query head, summed over the heads of a group: (h_kv, n) float32."""
    entries = pq_tables(q, centroids).contiguous()
    (h, m, c), h_kv, n_blocks = entries.shape, len(centroids), cdiv(n, TOKENS)
    scores = torch.empty(h_kv, n, dtype=torch.float32, device=q.device)
    if n == 0:
        return scores
    lses = torch.empty(h, n_blocks, dtype=torch.float32, device=q.device)
    _, head_stride, part_stride, planes = packed_codes(codes, n)
    strides = (head_stride, part_stride, h // h_kv, m, planes, TOKENS)
    store_lses[(n_blocks, h)](entries, codes_of(codes), lses, scale, n, c, *strides)
    lse = lses.logsumexp(-1)
    merge_weights[(n_blocks, h_kv)](entries, codes_of(codes), lse, scores, scale, n, c, *strides)
    return scores


@jit
def read_code(row, token, mask, PLANES: tl.constexpr):
    """Codes of tokens of one head and part."""
    if PLANES == 0:
        return tl.load(row + token, mask, other=0).to(tl.int32)
    code = tl.zeros_like(token)
    first = row + token // 64 * (8 * PLANES) + token % 64 // 8
    for j in range(PLANES):
        byte = tl.load(first + 8 * j, mask, other=0).to(tl.int32)
        code += ((byte >> (token % 8)) & 1) << j
    return code


@jit
def add_entries(
    entries, codes, head, owner, token, mask, c, head_stride, part_stride, M: tl.constexpr, PLANES: tl.constexpr
):
    """Logits of tokens for a query head, whose KV head is `owner`."""
    total = tl.zeros_like(token).to(tl.float32)
    for j in range(M):
        row = codes + owner.to(tl.int64) * head_stride + j * part_stride
        code = read_code(row, token, mask, PLANES)
        total += tl.load(entries + (head * M + j) * c + code, mask, other=0.0)
    return total


@jit
def store_logits(
    entries, codes, logits, n, c, head_stride, part_stride, g,
    M: tl.constexpr, PLANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    token = block * TOKENS + tl.arange(0, TOKENS)
    mask = token < n
    x = add_entries(entries, codes, head, head // g, token, mask, c, head_stride, part_stride, M, PLANES)
    tl.store(logits + head.to(tl.int64) * n + token, x, mask)


@jit
def store_lses(
    entries, codes, lses, scale, n, c, head_stride, part_stride, g,
    M: tl.constexpr, PLANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of a block of tokens for a query head."""
    block, head = tl.program_id(0), tl.program_id(1)
    token = block * TOKENS + tl.arange(0, TOKENS)
    mask = token < n
    x = add_entries(entries, codes, head, head // g, token, mask, c, head_stride, part_stride, M, PLANES)
    x = tl.where(mask, x * scale, float("-inf"))
    highest = tl.max(x, 0)
    lse = highest + tl.log(tl.sum(tl.exp(x - highest), 0))
    tl.store(lses + head * tl.num_programs(0) + block, lse)


@jit
def merge_weights(
    entries, codes, lse, scores, scale, n, c, head_stride, part_stride, g,
    M: tl.constexpr, PLANES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Weights of a block of tokens, added up over the query heads of a KV head."""
    block, owner = tl.program_id(0), tl.program_id(1)
    token = block * TOKENS + tl.arange(0, TOKENS)
    mask = token < n
    total = tl.zeros((TOKENS,), tl.float32)
    for i in range(g):
        head = owner * g + i
        x = add_entries(entries, codes, head, owner, token, mask, c, head_stride, part_stride, M, PLANES)
        total += tl.exp(x * scale - tl.load(lse + head))
    tl.store(scores + owner.to(tl.int64) * n + token, total, mask)
