"""Causal attention of a whole prompt over what a sparse prefill keeps, and what each token gets of it.

What is kept is said per query head and block of queries (`Kept`): which blocks of keys, or which columns and diagonals.

Shapes    q (1, h, s, d_h); k (1, h_kv, s, d_h); v (1, h_kv, s, d_v) -> out (1, h, s, d_v), log-sum-exps (1, h, s)
          float32, pairs of query and key that were computed (h,) int64; sums (h, s) float64.
Paths     C++ on a CPU; Triton on a GPU, in launches that nothing waits for; torch, the reference, for the rest.
Checks    tests/kernels/test_attend_kept.py.

In every path a work item is a head and a block of queries: it lists the keys (blocks of them, or single ones) that are
kept, then attends to the list tile by tile.

Not here: what is kept (`engine/sparse/`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.build import dtypes, library, remembered
from kvbench.kernels.fast import takes
from kvbench.kernels.jit import INTERPRETED, architecture, cdiv, jit, power_of_2, tl
from kvbench.kernels.scratch import finer, finest

# Of gathered K and V with their logits and masks.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Kept:
    """Which pairs of query and key are computed; of those only the causal ones.

    Either `blocks` of `block_k` keys for each block of queries, or single columns and diagonals.
    """

    s: int
    block: int  # queries that share what is kept
    dense_from: int  # queries from here on see their whole past
    blocks: Tensor | None = None  # (h, blocks of queries, blocks of keys) bool
    block_k: int = 1
    n_init: int = 0  # of the kept blocks only the first keys …
    n_local: int | None = None  # … and the nearest count, where this is given
    vertical: Tensor | None = None  # (h, s) bool: columns that all queries see
    met: Tensor | None = None  # (h, s + block - 1) bool: `met_by`

    @property
    def reach(self) -> int:
        """Keys that a query sees at most, itself included, the first ones apart."""
        return self.s if self.n_local is None else self.n_local

    def items(self) -> Iterator[tuple[int, int, bool]]:
        """Blocks of queries: the first, the one after the last, whether they see their whole past."""
        for low, high, is_dense in ((0, self.dense_from, False), (self.dense_from, self.s, True)):
            for first in range(low, high, self.block):
                yield first, min(first + self.block, high), is_dense

    def n_blocks(self) -> tuple[int, int]:
        """Numbers of blocks of queries that see what is kept, and of those that see all."""
        return cdiv(self.dense_from, self.block), cdiv(self.s - self.dense_from, self.block)

    def columns(self, first: int, stop: int) -> Tensor:
        """Which keys of a block of queries are listed: (h, stop) bool."""
        if self.blocks is not None:
            return self.blocks[:, first // self.block].repeat_interleave(self.block_k, -1)[:, :stop]
        assert self.vertical is not None and self.met is not None
        block = self.block
        return self.vertical[:, :stop] | self.met[:, block - (stop - first) : first + block].flip(-1)

    def seen(self) -> Tensor:
        """Every pair, (h, s, s) bool: for tests and for prompts so short that it can be drawn."""
        rows = [self.seen_by(first, stop, is_dense) for first, stop, is_dense in self.items()]
        return torch.cat([torch.nn.functional.pad(row, (0, self.s - row.shape[-1])) for row in rows], 1)

    def seen_by(self, first: int, stop: int, is_dense: bool) -> Tensor:
        """Pairs of a block of queries: (h, stop - first, stop) bool."""
        some = self.blocks if self.blocks is not None else self.vertical
        assert some is not None
        query = torch.arange(first, stop, device=some.device).unsqueeze(-1)
        key = torch.arange(stop, device=some.device)
        causal = key <= query
        if is_dense:
            return causal.expand(len(some), -1, -1)
        near = (key < self.n_init) | (query - key < self.reach)
        return self.columns(first, stop).unsqueeze(1) & causal & near


def met_by(slash: Tensor, block: int) -> Tensor:
    """Whether a block of queries meets a column: (h, s + block - 1) bool, the first query less the column at block - 1.

    That is, `met[:, first - column + block - 1]`: any of the distances from first - column on is kept, `block` of them.
    """
    n_until = torch.nn.functional.pad(slash.int(), (block, block - 1)).cumsum(-1)
    return n_until[:, block:] > n_until[:, :-block]


def attend_kept(
    q: Tensor, k: Tensor, v: Tensor, scale: float, kept: Kept, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over what is kept; `cap` > 0 bounds the logits by cap * tanh(logit / cap)."""
    if takes_native(q, k):
        return attend_kept_native(q, k, v, scale, kept, cap)
    if takes_triton(q):
        return attend_kept_triton(q, k, v, scale, kept, cap)
    return attend_kept_torch(q, k, v, scale, kept, cap)


def kept_sums(
    q: Tensor, k: Tensor, scale: float, kept: Kept, lse: Tensor, window: int | None = None, cap: float = 0.0
) -> Tensor:
    """What every key gets from queries that see it, of weights that `lse` makes; `window`: from the next ones only."""
    if takes_native(q, k):
        return kept_sums_native(q, k, scale, kept, lse, window, cap)
    if takes_triton(q):
        return kept_sums_triton(q, k, scale, kept, lse, window, cap)
    return kept_sums_torch(q, k, scale, kept, lse, window, cap)


# In torch.


def attend_kept_torch(
    q: Tensor, k: Tensor, v: Tensor, scale: float, kept: Kept, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    (_, h, s, _), d_v = q.shape, v.shape[3]
    out = torch.empty(1, h, s, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(1, h, s, device=q.device)
    pairs = torch.zeros(h, dtype=torch.int64, device=q.device)
    for heads, first, stop, where, seen, logits in listed_logits(q, k, scale, kept, cap):
        total = logits.logsumexp(-1, keepdim=True)
        weights = (logits - total.clamp(min=torch.finfo(torch.float32).min)).exp()
        out[0, heads, first:stop] = (weights @ v[0][where].float()).to(q.dtype)
        lse[0, heads, first:stop] = total.squeeze(-1)
        pairs[heads] += seen.sum((1, 2))
    return out, lse, pairs


def kept_sums_torch(
    q: Tensor, k: Tensor, scale: float, kept: Kept, lse: Tensor, window: int | None = None, cap: float = 0.0
) -> Tensor:
    sums = torch.zeros(q.shape[1], kept.s + 1, dtype=finest(q.device), device=q.device)  # the last: of no key
    for heads, first, stop, (_, columns), seen, logits in listed_logits(q, k, scale, kept, cap):
        weights = (logits - lse[0, heads, first:stop, None]).exp()
        if window is not None:
            query = torch.arange(first, stop, device=q.device).unsqueeze(-1)
            weights = weights * (query - columns.unsqueeze(1) < window)
        beyond = columns.where(seen.any(1), kept.s)
        sums[heads] = sums[heads].scatter_add(1, beyond, finer(weights.sum(1)))
    return sums[:, : kept.s]


def listed_logits(q: Tensor, k: Tensor, scale: float, kept: Kept, cap: float) -> Iterator[tuple[Any, ...]]:
    """Logits of some heads and a block of queries, with both, where their keys are and which each sees."""
    (_, h, s, d_h), h_kv = q.shape, k.shape[1]
    kv_head = torch.arange(h, device=q.device).unsqueeze(-1) // (h // h_kv)  # (h, 1)
    for first, stop, is_dense in kept.items():
        keep = torch.ones(h, stop, dtype=torch.bool, device=q.device) if is_dense else kept.columns(first, stop)
        columns = listed(keep, beyond=s)  # (h, width)
        query, width = torch.arange(first, stop, device=q.device).unsqueeze(-1), columns.shape[1]
        n_heads = max(1, CHUNK_BYTES // max(1, width * (2 * d_h + 3 * (stop - first)) * 4))
        for head in range(0, h, n_heads):
            heads = slice(head, min(head + n_heads, h))
            key = columns[heads].unsqueeze(1)  # (heads, 1, width)
            seen = key <= query
            if not is_dense:
                seen = seen & ((key < kept.n_init) | (query - key < kept.reach))
            where = kv_head[heads], columns[heads].clamp(max=s - 1)
            logits = (q[0, heads, first:stop].float() * scale) @ k[0][where].float().mT
            if cap:
                logits = cap * (logits / cap).tanh()
            yield heads, first, stop, where, seen, logits.masked_fill(~seen, -torch.inf)


def listed(keep: Tensor, beyond: int) -> Tensor:
    """The columns that are kept, ascending, (h, most of a head); rows with fewer end in `beyond`."""
    rank = keep.cumsum(-1)  # from 1
    head, column = keep.nonzero(as_tuple=True)
    columns = column.new_full((len(keep), int(rank[:, -1].max())), beyond)
    columns[head, rank[head, column] - 1] = column
    return columns


# In C++.


def takes_native(q: Tensor, k: Tensor) -> bool:
    """Whether there are functions for such tensors."""
    return q.device.type == "cpu" and q.dtype == k.dtype and q.dtype in dtypes() and native() is not None


@remembered
def native() -> Any:
    """The functions, with their arguments declared; None without a compiler."""
    lib = library("attend_kept")
    if lib is not None:
        pointer, number, integer = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64
        lib.attend_kept.argtypes = [
            integer, pointer, number, number, *[pointer] * 8, integer, pointer, integer
        ]  # fmt: skip
        lib.attend_kept.restype = None
    return lib


def attend_kept_native(
    q: Tensor, k: Tensor, v: Tensor, scale: float, kept: Kept, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    (_, h, s, _), d_v = q.shape, v.shape[3]
    out, lse = torch.empty(1, h, s, d_v, dtype=q.dtype), torch.empty(1, h, s)
    pairs = torch.empty(h, sum(kept.n_blocks()), dtype=torch.int64)
    call_native(q, k, v, scale, kept, cap, out, lse, pairs, s, None)
    return out, lse, pairs.sum(1)


def kept_sums_native(
    q: Tensor, k: Tensor, scale: float, kept: Kept, lse: Tensor, window: int | None = None, cap: float = 0.0
) -> Tensor:
    sums = torch.zeros(q.shape[1], kept.s, dtype=torch.float64)
    reach = kept.s if window is None else window
    call_native(q, k, k, scale, kept, cap, None, lse.float().contiguous(), None, reach, sums)
    return sums


def call_native(
    q: Tensor, k: Tensor, v: Tensor, scale: float, kept: Kept, cap: float, out: Tensor | None, lse: Tensor,
    pairs: Tensor | None, window: int, sums: Tensor | None,
) -> None:  # fmt: skip
    (_, h, s, d_h), h_kv, d_v = q.shape, k.shape[1], v.shape[3]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    (mask, met), strides = masks_of(kept)
    sizes = (h, h_kv, s, d_h, d_v, kept.block, kept.block_k, kept.dense_from, kept.n_init, kept.reach, *strides)
    given = (ctypes.c_int64 * len(sizes))(*sizes)
    out_at, pairs_at, sums_at = (None if x is None else x.data_ptr() for x in (out, pairs, sums))
    native().attend_kept(
        dtypes()[q.dtype], given, scale, cap, mask.data_ptr(), met.data_ptr() if kept.blocks is None else None,
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out_at, lse.data_ptr(), pairs_at, window, sums_at,
        torch.get_num_threads(),
    )  # fmt: skip


# In Triton.

PROGRAMS = 528  # four for each of the 132 processors of an H100; a room of 4 bytes a listed key or block for each
LISTED, TILE = 1024, 64  # keys or blocks looked at, and keys attended to, at a time
TILE_OF_WIDE = 32  # of heads of 128 channels and more, whose 64 keys sm_100 has no registers for
HELD = 16384  # numbers of the sums of all queries of a program; of wide heads sm_100 has room for half as many
KEYS, QUERIES = 64, 32  # of a program that adds up what keys get, in shared memory; of wide heads half as many


def takes_triton(q: Tensor) -> bool:
    """Whether the kernels can work on such tensors."""
    return takes("attend_kept", q.device) and q.dtype in dtypes() and holds(q.shape[3], q.element_size())


def holds(d_h: int, size: int) -> bool:
    """Whether shared memory holds queries, keys and values of so many numbers of so many bytes."""
    return size * power_of_2(d_h) <= 2048


def attend_kept_triton(
    q: Tensor, k: Tensor, v: Tensor, scale: float, kept: Kept, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Programs are as many as fill the device, and each takes items in turns, the last ones first: the longest."""
    (_, h, s, d_h), h_kv, d_v = q.shape, k.shape[1], v.shape[3]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    n_sparse, n_dense = kept.n_blocks()
    n_items = n_sparse + n_dense
    out = torch.empty(1, h, s, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(1, h, s, dtype=torch.float32, device=q.device)
    pairs = torch.empty(h, n_items, dtype=torch.int64, device=q.device)
    programs, block = min(PROGRAMS, h * n_items), power_of_2(kept.block, 16)
    rows, width, tile, n_warps = form_of(block, d_h, d_v, q.element_size(), architecture(q.device))
    assert s * d_v < 1 << 31, f"places of {s} tokens do not fit 32 bits"
    masks, strides = masks_of(kept)
    room = torch.empty(programs, cdiv(s, kept.block_k), dtype=torch.int32, device=q.device)
    attend_listed[(programs,)](
        q, k, v, *masks, room, out, lse, pairs, scale, cap, s, d_h, d_v, h, h // h_kv,
        n_sparse, n_items, kept.block, kept.dense_from, *strides, kept.block_k, kept.n_init, kept.reach, programs,
        kept.blocks is None, block // rows, rows, width, LISTED, tile, INTERPRETED, num_warps=n_warps, num_stages=2,
    )  # fmt: skip
    return out, lse, pairs.sum(1)


def form_of(block: int, d_h: int, d_v: int, size: int, arch: int) -> tuple[int, int, int, int]:
    """Queries, channels and keys at a time that registers have room for, and warps."""
    width, is_odd = power_of_2(max(d_h, d_v), 16), d_h % 16 > 0 or d_v % 16 > 0  # whose masks take registers
    if size == 4:
        return min(block, 32 if width <= 256 else 16), width, 32 if width <= 128 else 16, 4 if width <= 128 else 8
    held = HELD // 2 if (width > 128 and arch >= 100) or (width > 256 and is_odd) else HELD
    rows = min(block, max(16, held // width))
    tile = TILE if max(width, rows) < 128 and not is_odd else TILE_OF_WIDE
    if width * rows > 128 * 128 or width > 512 or (width > 256 and is_odd):
        tile //= 2
    return rows, width, tile, 8 if max(rows, width // 2) >= 128 else 4


def kept_sums_triton(
    q: Tensor, k: Tensor, scale: float, kept: Kept, lse: Tensor, window: int | None = None, cap: float = 0.0
) -> Tensor:
    """A program for some keys and a head, which goes through the blocks of queries after them."""
    (_, h, s, d_h), h_kv = q.shape, k.shape[1]
    q, k, lse = q.contiguous(), k.contiguous(), lse.contiguous()
    sums = torch.empty(h, s, dtype=torch.float64, device=q.device)
    masks, strides = masks_of(kept)
    n_sparse, n_dense = kept.n_blocks()
    width = power_of_2(d_h, 16)
    keys, queries = (KEYS, QUERIES) if width <= 256 else (KEYS // 2, QUERIES // 2)
    sum_kept[(cdiv(s, keys), h)](
        q, k, lse, *masks, sums, scale, cap, s, d_h, h // h_kv, n_sparse, n_sparse + n_dense, kept.block,
        kept.dense_from, *strides, kept.block_k, kept.n_init, kept.reach, s if window is None else window,
        kept.blocks is None, queries, keys, width, INTERPRETED, num_warps=4, num_stages=2,
    )  # fmt: skip
    return sums


def masks_of(kept: Kept) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Two masks as bytes, whichever form it has, and how many entries a head has in each."""
    if kept.blocks is not None:
        blocks = kept.blocks.contiguous().view(torch.uint8)
        return (blocks, blocks), (blocks.shape[1] * blocks.shape[2], blocks.shape[2])
    assert kept.vertical is not None and kept.met is not None
    vertical, met = (x.contiguous().view(torch.uint8) for x in (kept.vertical, kept.met))
    return (vertical, met), (vertical.shape[1], met.shape[1])


@jit
def attend_listed(
    q, k, v, mask, met, room, out, lse, pairs, scale, cap, s, d_h, d_v, h, g,
    n_sparse, n_items, block, dense_from, of_head, of_row, unit, n_init, n_local, programs,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, LISTED: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,  # float32 products, since Triton's interpreter takes bfloat16 for its bits
):  # fmt: skip
    program = tl.program_id(0)
    n_units = (s + unit - 1) // unit
    listed = room + program.to(tl.int64) * n_units
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    for work in range(program, h * n_items, programs):
        item, head = n_items - 1 - work // h, (work % h).to(tl.int64)
        is_dense = item >= n_sparse
        first = tl.where(is_dense, dense_from + (item - n_sparse) * block, item * block)
        stop = tl.minimum(first + block, tl.where(is_dense, s, dense_from))
        n = 0
        for start in range(0, (stop + unit - 1) // unit, LISTED):
            key = start + tl.arange(0, LISTED)
            there = key * unit < stop
            if COLUMNS:
                is_kept = tl.load(mask + head * of_head + key, there, other=0)
                is_kept |= tl.load(met + head * of_row + first - key + block - 1, there & (is_dense == 0), other=0)
            else:
                is_kept = tl.load(mask + head * of_head + item * of_row + key, there & (is_dense == 0), other=0)
            keep = (there & ((is_kept != 0) | is_dense)).to(tl.int32)
            tl.store(listed + n + tl.cumsum(keep, 0) - 1, key, keep != 0)
            n += tl.sum(keep, 0)
        tl.debug_barrier()  # the list is read by other threads than wrote it
        n *= unit
        owner = head // g * s
        own_v = v + owner * d_v
        n_pairs = tl.zeros((TILE,), tl.int32)
        for part in range(PARTS):
            low = first + part * ROWS
            query = low + row
            real = query < stop
            mask_q = real[:, None] & (column < d_h)[None]
            queries = tl.load(q + (head * s + query[:, None]) * d_h + column[None], mask_q, other=0.0)
            if WIDE:
                queries = queries.to(tl.float32)
            highest = tl.full((ROWS,), -1e30, tl.float32)  # finite: nothing minus nothing would be no number
            total = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, WIDTH), tl.float32)
            for start in range(0, n, TILE):
                place = start + tl.arange(0, TILE)
                token = tl.load(listed + place // unit, place < n, other=s) * unit + place % unit
                there = token < stop
                token = tl.where(there, token, 0)
                keys = tl.load(
                    k + (owner + token[:, None]) * d_h + column[None], there[:, None] & (column < d_h)[None], other=0.0
                )
                if WIDE:
                    keys = keys.to(tl.float32)
                # The last query that sees a key, and the one after it.
                until = tl.where((token < n_init) | is_dense, stop, tl.minimum(stop, token + n_local))
                seen = there[None] & (token[None] <= query[:, None]) & (query[:, None] < until[None])
                seeing = tl.minimum(until, low + ROWS) - tl.maximum(token, low)
                n_pairs += tl.where(there, tl.maximum(seeing, 0), 0)
                logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
                if cap > 0:
                    logits = cap * (2 / (1 + tl.exp(-2 * logits / cap)) - 1)
                logits = tl.where(seen, logits, -1e30)
                higher = tl.maximum(highest, tl.max(logits, 1))
                weights = tl.where(seen, tl.exp(logits - higher[:, None]), 0.0)
                shrink = tl.exp(highest - higher)
                values = tl.load(
                    own_v + (token[:, None] * d_v + column[None]), there[:, None] & (column < d_v)[None], other=0.0
                )
                if WIDE:
                    values = values.to(tl.float32)
                acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
                total = total * shrink + tl.sum(weights, 1)
                highest = higher
            safe = tl.where(total > 0, total, 1.0)
            tl.store(
                out + (head * s + query[:, None]) * d_v + column[None],
                (acc / safe[:, None]).to(out.dtype.element_ty),
                real[:, None] & (column < d_v)[None],
            )
            tl.store(lse + head * s + query, tl.where(total > 0, highest + tl.log(safe), -float("inf")), real)
        tl.store(pairs + head * n_items + item, tl.sum(n_pairs, 0))
        tl.debug_barrier()  # the next item lists into the same room


@jit
def sum_kept(
    q, k, lse, mask, met, sums, scale, cap, s, d_h, g,
    n_sparse, n_items, block, dense_from, of_head, of_row, unit, n_init, n_local, window,
    COLUMNS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    low, head = tl.program_id(0) * KEYS, tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    key = low + tl.arange(0, KEYS)
    there = (key < s)[:, None] & (column < d_h)[None]
    keys = tl.load(k + (head // g * s + key[:, None]) * d_h + column[None], there, other=0.0)
    if WIDE:
        keys = keys.to(tl.float32)
    total = tl.zeros((KEYS,), tl.float64)
    for item in range(tl.minimum(low // block, n_sparse), n_items):
        is_dense = item >= n_sparse
        first = tl.where(is_dense, dense_from + (item - n_sparse) * block, item * block)
        stop = tl.minimum(first + block, tl.where(is_dense, s, dense_from))
        asked = (key < stop) & (is_dense == 0)
        if COLUMNS:
            is_kept = tl.load(mask + head * of_head + key, asked, other=0)
            is_kept |= tl.load(met + head * of_row + first - key + block - 1, asked, other=0)
        else:
            is_kept = tl.load(mask + head * of_head + item * of_row + key // unit, asked, other=0)
        kept = (key < stop) & ((is_kept != 0) | is_dense)
        until = tl.where((key < n_init) | is_dense, stop, tl.minimum(stop, key + n_local))
        until = tl.where(kept, tl.minimum(until, key + window), 0)
        for start in range(tl.maximum(first, low), tl.max(until, 0), QUERIES):
            query = start + tl.arange(0, QUERIES)
            real = query < stop
            queries = tl.load(
                q + (head * s + query[:, None]) * d_h + column[None], real[:, None] & (column < d_h)[None], other=0.0
            )
            if WIDE:
                queries = queries.to(tl.float32)
            logits = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale
            if cap > 0:
                logits = cap * (2 / (1 + tl.exp(-2 * logits / cap)) - 1)
            logits -= tl.load(lse + head * s + query, real, other=float("inf"))[None]
            seen = (query[None] >= key[:, None]) & (query[None] < until[:, None])
            total += tl.sum(tl.exp(tl.where(seen, logits, -float("inf"))), 1).to(tl.float64)
    tl.store(sums + head * s + key, total, key < s)
