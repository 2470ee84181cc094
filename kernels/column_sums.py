"""Attention that every key receives from queries, its sum or its largest weight: never the whole matrix.

Shapes    q (1, h, r, d_h), the last r of s tokens; k (1, h_kv, s, d_h); lse (1, h, r), of logits bent towards `cap`
          where it is not 0 -> sums (h_kv, g, s) float64, maxima (h_kv, s) float32.
Paths     Torch in blocks of rows. Where the pass left its log-sum-exps, C++ on a CPU and Triton on a GPU, which store
          no logit; a cap is left to torch on a CPU. Products are float32 whatever the dtype, and float64 where blocks
          of queries are added up: in bfloat16 by a CPU's matrix unit, or two numbers at a time where it can.
Checks    tests/kernels/test_column_sums.py, tests/engine/test_observe.py, benchmarks/bench_observe.py.

Not here: which tokens that keeps.
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.build import dtypes, library, remembered
from kvbench.kernels.capped import bend, capped
from kvbench.kernels.fast import takes
from kvbench.kernels.jit import INTERPRETED, cdiv, jit, power_of_2, tl
from kvbench.kernels.scratch import at_once, finest


def column_sums(
    q: Tensor, k: Tensor, scale: float, row_weights: Tensor | None = None, lse: Tensor | None = None, cap: float = 0.0
) -> Tensor:
    """Sums over causal softmax rows; `row_weights` (r,) weighs the queries, `lse` has their log-sum-exps."""
    assert lse is not None or not cap, "a cap wants log-sum-exps"
    if row_weights is None:
        row_weights = torch.ones(q.shape[2], device=q.device)
    if lse is not None and takes_native(q, k) and not cap:
        return column_sums_native(q, k, scale, row_weights, lse)
    if lse is not None and takes_triton(q, k):
        return column_sums_triton(q, k, scale, row_weights, lse, cap=cap)
    return column_sums_torch(q, k, scale, row_weights, lse, cap)


def column_sums_ref(
    q: Tensor, k: Tensor, scale: float, row_weights: Tensor | None = None, cap: float = 0.0, sink: Tensor | None = None
) -> Tensor:
    """From the whole matrix, float64; `sink` (h,) competes with the tokens."""
    (_, h, r, _), (_, h_kv, s, _) = q.shape, k.shape
    logits = q[0].double() @ k[0].double().repeat_interleave(h // h_kv, 0).mT * scale
    future = torch.ones(r, s, dtype=torch.bool, device=q.device).triu(s - r + 1)
    logits = capped(logits, cap).masked_fill(future, -torch.inf)
    if sink is not None:
        logits = torch.cat([logits, sink.double().view(-1, 1, 1).expand(-1, r, 1)], -1)
    weights = logits.softmax(-1)[..., :s]
    if row_weights is not None:
        weights = weights * row_weights.double().unsqueeze(-1)
    return weights.sum(1).view(h_kv, -1, s)


# In torch.

# Bytes of one block's logits; where their softmax is to be made it takes as much again, the keys of one KV head in
# float32 at most 64 MB at 131,072 tokens of 128 dimensions, and the sums 8 bytes per query head and token: about 130 MB
# there for 32 query and 8 KV heads. 8 MB measured best of 2, 8 and 16 (4,096 tokens, 9 heads of 64).
COLUMN_BLOCK_BYTES = 8 << 20


def rows_per_block(g: int, s: int, device: torch.device) -> int:
    """How many queries of a group's `g` heads can meet `s` keys at a time."""
    return max(1, min(s, at_once(COLUMN_BLOCK_BYTES, device) // (4 * g * s)))


def column_sums_torch(
    q: Tensor, k: Tensor, scale: float, row_weights: Tensor, lse: Tensor | None = None, cap: float = 0.0
) -> Tensor:
    """In blocks of rows. With `lse` the weights are one exponential: seven tenths of the time of a softmax."""
    (_, h, r, d_h), (_, h_kv, s, _) = q.shape, k.shape
    g = h // h_kv
    n_rows = min(r, rows_per_block(g, s, q.device))
    hidden = torch.ones(n_rows, n_rows, dtype=torch.bool, device=q.device).triu(1)
    sums = torch.zeros(h_kv, g, s, dtype=finest(q.device), device=q.device)
    # A column beside the queries and ones beside the keys take the log-sum-exp off within the product.
    columns = d_h if lse is None or cap else d_h + 1
    keys, block = (
        q.new_ones(s, columns, dtype=torch.float32),
        q.new_empty(g, n_rows, columns, dtype=torch.float32),
    )
    for kv_head in range(h_kv):
        keys[:, :d_h] = k[0, kv_head]
        heads = slice(kv_head * g, (kv_head + 1) * g)
        for start in range(0, r, n_rows):
            rows = min(n_rows, r - start)
            first = s - r + start  # the key that the block's first query is
            stop = first + rows
            some = block[:, :rows]
            some[..., :d_h] = q[0, heads, start : start + rows]
            some[..., :d_h] *= scale  # in float32, whatever q is
            if columns > d_h and lse is not None:
                torch.neg(lse[0, heads, start : start + rows], out=some[..., d_h])
            logits = (some.flatten(0, 1) @ keys[:stop].mT).view(g, rows, stop)
            if cap and lse is not None:
                logits = capped(logits, cap).sub_(lse[0, heads, start : start + rows].unsqueeze(-1))
            logits[..., first:].masked_fill_(hidden[:rows, :rows], -torch.inf)
            weights = logits.softmax(-1) if lse is None else logits.exp_()
            # A product with a row of weights adds rows up in nine tenths of the time of sum().
            voices = row_weights[start : start + rows].unsqueeze(0)
            sums[kv_head, :, :stop] += (voices @ weights).squeeze(1)
    return sums


# The largest instead of the sum.

LOGIT_BYTES = 1 << 20  # of a block of logits, while they are in a CPU's cache


def column_maxima(q: Tensor, k: Tensor, scale: float, lse: Tensor, cap: float = 0.0) -> Tensor:
    """Logarithm of the most that each key of k (1, h_kv, n, d_h) gets from any query of its group, which all see it.

    q (1, h, r, d_h) with the log-sum-exp (1, h, r) that makes weights of its logits; (h_kv, n) float32.
    """
    if takes_native(q, k) and not cap:
        return column_maxima_native(q, k, scale, lse)
    return column_maxima_torch(q, k, scale, lse, cap)


def column_maxima_torch(q: Tensor, k: Tensor, scale: float, lse: Tensor, cap: float = 0.0) -> Tensor:
    """Block by block: no weight is made but the largest."""
    h_kv, n = k.shape[1], k.shape[2]
    queries = (q[0].float() * scale).unflatten(0, (h_kv, -1)).flatten(1, 2)  # (h_kv, g * r, d_h)
    off = lse[0].float().unflatten(0, (h_kv, -1)).flatten(1, 2).unsqueeze(-1)  # (h_kv, g * r, 1)
    largest = torch.full((h_kv, n), -torch.inf, device=q.device)
    n_block = max(1, at_once(LOGIT_BYTES, q.device) // (4 * max(1, n)))
    for kv_head in range(h_kv):
        transposed = k[0, kv_head].float().mT  # (d_h, n)
        for block, its_off in zip(queries[kv_head].split(n_block), off[kv_head].split(n_block), strict=True):
            logits = capped(block @ transposed, cap).sub_(its_off)
            torch.maximum(largest[kv_head], logits.amax(0), out=largest[kv_head])
    return largest


def column_maxima_native(q: Tensor, k: Tensor, scale: float, lse: Tensor) -> Tensor:
    """Largest weights, with a tile's products in registers."""
    (_, h, r, d_h), (_, h_kv, n, _) = q.shape, k.shape
    q, k, lse = (x.contiguous() for x in (q, k, lse.float()))
    largest = torch.empty(h_kv, h // h_kv, n, dtype=torch.float64)
    native().column_sums(
        dtypes()[q.dtype], h, h_kv, n, r, d_h, q.data_ptr(), r * d_h, k.data_ptr(), n * d_h,
        lse.data_ptr(), None, scale, n + r, largest.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return largest.amax(1).float()


# On a CPU.


def takes_native(q: Tensor, k: Tensor) -> bool:
    """Whether the C++ can work on such tensors."""
    fits = q.device.type == "cpu" and q.dtype == k.dtype and q.dtype in dtypes()
    return fits and native() is not None


@remembered
def native() -> Any:
    """The C functions, or None."""
    lib = library("column_sums")
    if lib is not None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        lib.column_sums.argtypes = [
            size, size, size, size, size, size, pointer, size, pointer, size, pointer, pointer, ctypes.c_float, size,
            pointer, size,
        ]  # fmt: skip
        lib.column_sums.restype = None
    return lib


def column_sums_native(
    q: Tensor, k: Tensor, scale: float, row_weights: Tensor, lse: Tensor, window: int | None = None
) -> Tensor:
    """Products, exponentials and sums of a tile of keys stay in registers.

    `window` counts the queries that a key meets, its own included.
    """
    (_, h, r, d_h), (_, h_kv, s, _) = q.shape, k.shape
    q, k, lse, row_weights = (x.contiguous() for x in (q, k, lse.float(), row_weights.float()))
    sums = torch.empty(h_kv, h // h_kv, s, dtype=torch.float64)
    native().column_sums(
        dtypes()[q.dtype], h, h_kv, s, r, d_h, q.data_ptr(), r * d_h, k.data_ptr(), s * d_h,
        lse.data_ptr(), row_weights.data_ptr(), scale, s if window is None else min(window, s), sums.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return sums


# On a GPU.

# Keys of a program, queries that it meets at a time, and numbers of both, by the bytes of a number: of heads that are
# no wider, and of others part by part. Float32 takes three products of the tensor cores, and so more registers and
# shared memory.
WHOLE, PARTED = {2: (128, 64, 256), 4: (64, 16, 128)}, {2: (64, 32, 128), 4: (64, 16, 32)}


def takes_triton(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel can work on such tensors."""
    return takes("column_sums", q.device) and q.dtype == k.dtype and q.dtype in dtypes()


def column_sums_triton(
    q: Tensor, k: Tensor, scale: float, row_weights: Tensor | None, lse: Tensor, window: int | None = None,
    cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """A program for some keys and one query head; `window` counts the queries that a key meets, its own included."""
    (_, h, r, d_h), (_, h_kv, s, _) = q.shape, k.shape
    q, k, lse = q.contiguous(), k.contiguous(), lse.contiguous()
    sums = torch.empty(h_kv, h // h_kv, s, dtype=torch.float64, device=q.device)
    weighed = row_weights is not None
    weights = row_weights.float().contiguous() if row_weights is not None else lse
    keys, queries, width = WHOLE[q.element_size()]
    if d_h > width:
        keys, queries, width = PARTED[q.element_size()]
        width //= 1 if d_h % 16 == 0 else 2  # masks take registers, too
    width = min(width, power_of_2(d_h, least=16))
    sum_columns[(cdiv(s, keys), h)](
        q, k, lse, weights, sums, s, r, d_h, scale, cap, s if window is None else window, h // h_kv,
        weighed, cap > 0, keys, queries, width, cdiv(d_h, width), INTERPRETED, num_warps=8, num_stages=2,
    )  # fmt: skip
    return sums


@jit
def sum_columns(
    q, k, lse, weights, sums, s, r, d_h, scale, cap, window, g,
    WEIGHED: tl.constexpr, CAPPED: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    WIDE: tl.constexpr,  # float32 products, since Triton's interpreter takes bfloat16 for its bits
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    key = block * KEYS + tl.arange(0, KEYS)
    of_key = k + (head // g * s + key[:, None]) * d_h + column[None]
    if PARTS == 1:
        keys = tl.load(of_key, (key < s)[:, None] & (column < d_h)[None], other=0.0)
        if WIDE:
            keys = keys.to(tl.float32)
    # Query i of q is token s - r + i; the first that meets a key is the key's own, the last is a window behind it.
    first = tl.maximum(block * KEYS - (s - r), 0) // QUERIES * QUERIES
    stop = tl.minimum(r, block * KEYS + KEYS - 1 + window - (s - r))
    total = tl.zeros((KEYS,), tl.float64)
    for start in range(first, stop, QUERIES):
        row = start + tl.arange(0, QUERIES)
        inside = row < r
        of_query = q + (head * r + row[:, None]) * d_h + column[None]
        normaliser = tl.load(lse + head * r + row, inside, other=float("inf"))
        logits = tl.zeros((KEYS, QUERIES), tl.float32)
        for part in range(PARTS):
            there = part * WIDTH + column < d_h
            if PARTS > 1:
                keys = tl.load(of_key + part * WIDTH, (key < s)[:, None] & there[None], other=0.0)
                if WIDE:
                    keys = keys.to(tl.float32)
            queries = tl.load(of_query + part * WIDTH, inside[:, None] & there[None], other=0.0)
            if WIDE:
                queries = queries.to(tl.float32)
            logits = tl.dot(keys, tl.trans(queries), logits, input_precision="tf32x3")
        logits *= scale
        if CAPPED:
            logits = bend(logits, cap)
        logits -= normaliser[None]
        behind = (row + s - r)[None] - key[:, None]
        seen = (behind >= 0) & (behind < window) & inside[None]
        share = tl.exp(tl.where(seen, logits, -float("inf")))  # what is not seen may overflow
        if WEIGHED:
            share *= tl.load(weights + row, inside, other=0.0)[None]
        total += tl.sum(share, 1).to(tl.float64)
    tl.store(sums + head * s + key, total, key < s)
