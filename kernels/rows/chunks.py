"""RocketKV's search on a GPU: the current token joins its chunk, a few channels bound the chunks, tokens get keys.

Shapes    q (n, h, 1, d_h); bounds (h_kv, 2 * d_h, chunks), maxima above minima; keys (n, h_kv, s) int64 as
          `kernels/topk.py` says, for all tokens of a row, the largest int64 after its last.
Checks    tests/kernels/test_chunks.py.

Not here: a CPU's way (`methods/retrieving/rocketkv.py`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.capped import bend, with_sink
from kvbench.kernels.clock import Since, now, steps_since
from kvbench.kernels.jit import cdiv, distance, jit, power_of_2, tl, upload
from kvbench.kernels.topk import pack_key

CHUNKS, TOKENS = 128, 256  # of one program
COMPARED = 16  # channels that all others are compared with at once
ROW = 5  # numbers of a row, as the kernels read them


class Chunked(NamedTuple):
    """What one row searches."""

    bounds: Tensor  # (h_kv, 2 * d_h, room for chunks) in the keys' dtype
    n: int  # tokens, the current one included
    chunk: int
    r: int  # channels


class Table(NamedTuple):
    """What kernels are told of rows, for steps to come too: at each every row has one token more."""

    numbers: Tensor
    start: Tensor  # from which they count where bounds lie
    s: int  # tokens of the row with most, and
    c: int  # chunks, at the last step that is told
    r: int  # channels of the row with most


def table_of(rows: Sequence[Chunked], device: torch.device, ahead: int = 0) -> Table:
    """The table of rows, with room for so many steps to come."""
    start, numbers = rows[0].bounds, list[int]()
    for bounds, n, chunk, r in rows:
        both, room = bounds.shape[1:]
        assert bounds.stride() == (both * room, room, 1), bounds.stride()
        numbers += [distance(bounds, start), room, n, chunk, r]
    s, c = max(row.n for row in rows) + ahead, max(cdiv(row.n + ahead, row.chunk) for row in rows)
    return Table(upload(numbers, device), start, s, c, max(row.r for row in rows))


def chunk_keys(
    q: Tensor, k_new: Tensor, told: Table, scale: float, cap: float = 0.0, sink: Tensor | None = None,
    since: Since | None = None,
) -> Tensor:  # fmt: skip
    """Keys by the group's mean softmax over chunks; k_new (n, h_kv, 1, d_h) is taken into the bounds first.

    Bounds bend towards a cap, and sinks (h,) take part in the softmax.
    """
    since = now(q.device) if since is None else since
    (n, h, _, d_h), h_kv = q.shape, k_new.shape[1]
    q, k_new, g = q.contiguous(), k_new.contiguous(), h // h_kv
    table, start, s, c, r = told
    some = min(CHUNKS, 4096 // power_of_2(g))  # of a program: registers hold no more for groups as large as a latent's
    n_blocks = cdiv(c, some)
    lines = torch.empty(n, h_kv, r, dtype=torch.int32, device=q.device)
    weights = torch.empty(n, h, r, dtype=torch.float32, device=q.device)
    logits = torch.empty(n, h, c, dtype=torch.float32, device=q.device)
    lses = torch.empty(n, h, n_blocks, dtype=torch.float32, device=q.device)
    keys = torch.empty(n, h_kv, s, dtype=torch.int64, device=q.device)
    tiny = torch.finfo(torch.float32).tiny
    rank_channels[(n, h_kv)](
        q, k_new, start, table, lines, weights, *since, scale, tiny, d_h, g, r, ROW, power_of_2(d_h), COMPARED,
        num_warps=16 if d_h > 256 else 4,
    )  # fmt: skip
    score_chunks[(n, n_blocks, h_kv)](
        start, table, lines, weights, logits, lses, *since, cap, c, d_h, g, r, ROW, some, power_of_2(g), cap > 0
    )
    lses = with_sink(lses, sink)
    n_blocks = lses.shape[2]
    weigh_chunks[(n, cdiv(s, TOKENS), h_kv)](
        logits, lses, table, keys, *since, s, c, n_blocks, g, ROW, TOKENS, power_of_2(n_blocks)
    )
    return keys


@jit(unspecialized=("start",))
def rank_channels(
    q, k_new, bounds, table, lines, weights, clock, start, scale, tiny, d_h, g, most,
    ROW: tl.constexpr, WIDTH: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    row, head, h_kv = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at, column = table + row * ROW, tl.arange(0, WIDTH)
    inside, room = column < d_h, tl.load(at + 1)
    place, chunk, r = tl.load(at + 2) + steps_since(clock, start) - 1, tl.load(at + 3), tl.load(at + 4)
    # The current token joins its chunk.
    to = bounds + tl.load(at) + (head * 2 * d_h + column) * room + place // chunk
    key = tl.load(k_new + (row * h_kv + head) * d_h + column, inside, other=0.0).to(tl.float32)
    high = tl.load(to, inside, other=0.0).to(tl.float32)
    low = tl.load(to + d_h * room, inside, other=0.0).to(tl.float32)
    is_first = place % chunk == 0
    tl.store(to, tl.where(is_first, key, tl.maximum(key, high)).to(q.dtype.element_ty), inside)
    tl.store(to + d_h * room, tl.where(is_first, key, tl.minimum(key, low)).to(q.dtype.element_ty), inside)
    first = (row * h_kv + head) * g
    plain = tl.zeros((WIDTH,), tl.float32)
    total, rank = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.int32)
    for i in range(g):
        query = tl.load(q + (first + i) * d_h + column, inside, other=0.0).to(tl.float32)
        plain += query
        total += tl.abs(query)
    for low_other in range(0, d_h, COMPARED):
        other, totals = low_other + tl.arange(0, COMPARED), tl.zeros((COMPARED,), tl.float32)
        for i in range(g):
            totals += tl.abs(tl.load(q + (first + i) * d_h + other, other < d_h, other=0.0).to(tl.float32))
        ahead = (totals[None] > total[:, None]) | ((totals[None] == total[:, None]) & (other[None] < column[:, None]))
        rank += tl.sum((ahead & (other < d_h)[None]).to(tl.int32), 1)
    is_chosen = inside & (rank < r)
    line = tl.where(plain > 0, column, column + d_h)
    tl.store(lines + (row * h_kv + head) * most + rank, line, is_chosen)
    for i in range(g):
        query = tl.load(q + (first + i) * d_h + column, inside, other=0.0).to(tl.float32)
        size = tl.abs(query)
        share = tl.sum(tl.where(is_chosen, size, 0.0), 0) / tl.maximum(tl.sum(size, 0), tiny)
        tl.store(weights + (first + i) * most + rank, query * (scale / tl.sqrt(tl.maximum(share, tiny))), is_chosen)


@jit(unspecialized=("start", "c"))
def score_chunks(
    origin, table, lines, weights, logits, lses, clock, start, cap, c, d_h, g, most,
    ROW: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, block, head, h_kv = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    at, place = table + row * ROW, block * CHUNKS + tl.arange(0, CHUNKS)
    room, n, chunk, r = tl.load(at + 1), tl.load(at + 2) + steps_since(clock, start), tl.load(at + 3), tl.load(at + 4)
    bounds = origin + tl.load(at) + head * 2 * d_h * room
    size = tl.minimum(chunk, n - place * chunk)
    real = size > 0
    one, first = tl.arange(0, GROUP), (row * h_kv + head) * g
    x = tl.zeros((GROUP, CHUNKS), tl.float32)
    for j in range(r):
        line = tl.load(lines + (row * h_kv + head) * most + j)
        bound = tl.load(bounds + line * room + place, real, other=0.0).to(tl.float32)
        x += tl.load(weights + (first + one) * most + j, one < g, other=0.0)[:, None] * bound[None]
    if CAPPED:
        x = bend(x, cap)
    x = tl.where(real[None], x, float("-inf"))
    mine = (one < g)[:, None] & (place < c)[None]
    tl.store(logits + (first + one).to(tl.int64)[:, None] * c + place[None], x, mine)
    x += tl.log(tl.where(real, size, 1).to(tl.float32))[None]
    highest = tl.max(x, 1)
    safe = tl.where(highest > -1e30, highest, 0.0)
    total = tl.sum(tl.exp(x - safe[:, None]), 1)
    lse = tl.where(
        total > 0, safe + tl.log(tl.where(total > 0, total, 1.0)), float("-inf")
    )  # -inf: another row's block
    tl.store(lses + (first + one) * tl.num_programs(1) + block, lse, one < g)


@jit(unspecialized=("start", "s", "c", "n_blocks"))
def weigh_chunks(
    logits, lses, table, keys, clock, start, s, c, n_blocks, g,
    ROW: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, block, head, h_kv = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    at, token, every = table + row * ROW, block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCKS)
    n, chunk = tl.load(at + 2) + steps_since(clock, start), tl.load(at + 3)
    real = token < n
    merged = tl.zeros((TOKENS,), tl.float32)
    for i in range(g):
        query_head = ((row * h_kv + head) * g + i).to(tl.int64)
        x = tl.load(logits + query_head * c + token // chunk, real, other=float("-inf"))
        mine = tl.load(lses + query_head * n_blocks + every, every < n_blocks, other=float("-inf"))
        highest = tl.max(mine, 0)
        merged += tl.exp(x - (highest + tl.log(tl.sum(tl.exp(mine - highest), 0))))
    none = tl.full((TOKENS,), 0x7FFFFFFFFFFFFFFF, tl.int64)
    key = tl.where(real, pack_key(merged / g, token), none)
    tl.store(keys + (row * h_kv + head).to(tl.int64) * s + token, key, token < s)
