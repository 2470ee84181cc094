"""Inner products of every row's queries with what it searches, on a GPU: as logits, or as keys to choose by.

`token_logits` are those with all keys of a row, the prompt's and after them its generated ones, bent towards `cap` if
it is not 0; `weigh_logits` makes keys of their softmax, in which `sink` (h,) takes part if there is one. `channel_keys`
are those of a few channels of every key, `block_keys` of means of blocks.

Shapes    q (n, h, 1, d_h); logits (n, h, s) float32, lses (n, h, blocks) float32; keys (n, heads, s) int64, as
          `kernels/topk.py` says, the largest int64 for what is no candidate.
Checks    tests/kernels/test_logits.py.

Not here: a CPU's way, which is the methods' own torch.
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.capped import bend, with_sink
from kvbench.kernels.clock import Since, now, steps_since
from kvbench.kernels.jit import cdiv, distance, fit_rows, jit, lanes_of, power_of_2, tl, upload
from kvbench.kernels.topk import pack_key

AGGREGATES = ("query_head", "group_sum", "group_max", "group_logit_mean", "group_mean")
TOKENS, WIDE_HEAD = 64, 256  # of one program; numbers of a head that is read in one piece
ROW = 9  # numbers of a row that searches tokens, as the kernels read them


class Searched(NamedTuple):
    """The keys that one row searches, and its candidates among them."""

    k: Tensor  # (1, h_kv, s, d_h)
    late: Tensor  # (1, h_kv, …, d_h), tokens from s on
    n: int  # tokens
    start: int  # the first candidate
    stop: int  # after the last one
    grows: bool = False  # with every token there is a candidate more


class Table(NamedTuple):
    """What kernels are told of rows, for steps to come too: at each every row has one token more."""

    numbers: Tensor
    start: Tensor  # from which they count where keys lie
    s: int  # tokens of the row with most, at the last step that is told
    lanes: int = 1  # which divide all distances and strides


def table_of(rows: Sequence[Searched], device: torch.device, ahead: int = 0) -> Table:
    """The table of rows, with room for so many steps to come."""
    start = rows[0].k
    numbers = [
        number
        for row in rows
        for number in (
            distance(row.k, start), row.k.stride(1), distance(row.late, start), row.late.stride(1), row.k.shape[2],
            row.n, row.start, row.stop, int(row.grows),
        )
    ]  # fmt: skip
    lanes = lanes_of(start, (x for i in range(4) for x in numbers[i::ROW]))
    return Table(upload(numbers, device), start, max(row.n for row in rows) + ahead, lanes)


def token_logits(
    q: Tensor, told: Table, scale: float, cap: float = 0.0, sink: Tensor | None = None, since: Since | None = None
) -> tuple[Tensor, Tensor]:
    """Logits, and log-sum-exps of blocks of them; -inf for tokens that are still to come."""
    n, h, _, d_h = q.shape
    since = now(q.device) if since is None else since
    h_kv, s, q = told.start.shape[1], told.s, q.contiguous()
    width = power_of_2(d_h)
    # Of 64 tokens 128 numbers spill (sm_120), and 256 that are capped or 512 (sm_100).
    tokens, n_warps = fit_rows(width, TOKENS, 4096 if width <= 128 else 8192 if cap or width == 512 else 16384)
    n_blocks = cdiv(s, tokens)
    logits = torch.empty(n, h, s, dtype=torch.float32, device=q.device)
    lses = torch.empty(n, h, n_blocks, dtype=torch.float32, device=q.device)
    multiply_tokens[(n, n_blocks, h_kv)](
        q, told.start, told.numbers, logits, lses, *since, scale, cap, s, d_h, h // h_kv, ROW, tokens, width,
        told.lanes, cap > 0, num_warps=n_warps,
    )  # fmt: skip
    return logits, with_sink(lses, sink)


def weigh_logits(logits: Tensor, lses: Tensor, told: Table, agg: str, since: Since | None = None) -> Tensor:
    """Keys of the candidates by the softmax over all tokens, as a group's heads agree."""
    since = now(logits.device) if since is None else since
    return weigh_rows(logits, lses, told.numbers, ROW, told.start.shape[1], agg, since)


def weigh_rows(
    logits: Tensor, lses: Tensor, numbers: Tensor, n_numbers: int, h_kv: int, agg: str, since: Since
) -> Tensor:  # fmt: skip
    """The same for rows of `n_numbers` numbers each, of which the last are `start`, `stop` and `grows`."""
    n, h, s = logits.shape
    how, block = AGGREGATES.index(agg), 256
    keys = torch.empty(n, h if how == 0 else h_kv, s, dtype=torch.int64, device=logits.device)
    weigh_tokens[(n, cdiv(s, block), h_kv)](
        logits, lses, numbers, keys, *since, s, lses.shape[2], h // h_kv, n_numbers, how, block,
        power_of_2(lses.shape[2]),
    )  # fmt: skip
    return keys


def channel_keys(q: Tensor, basis: Tensor, keys: Tensor, agg: str, found: Tensor | None = None) -> Tensor:
    """Keys by queries turned to the channels of `basis` (h_kv, d_h, c), times partial keys (h_kv, s, c) float32.

    Into `found`, where it is given.
    """
    (n, h, _, d_h), (h_kv, s, c) = q.shape, keys.shape
    how, q, basis, keys = AGGREGATES.index(agg), q.contiguous(), basis.contiguous(), keys.contiguous()
    if found is None:
        found = torch.empty(n, h if how == 0 else h_kv, s, dtype=torch.int64, device=q.device)
    # A wide head's numbers are a power of two and a rest, since registers hold no more.
    width = power_of_2(d_h // 2 + 1) if d_h > WIDE_HEAD else power_of_2(d_h)
    rest = power_of_2(d_h - width) if d_h > width else 0
    multiply_channels[(n, cdiv(s, TOKENS), h_kv)](
        q, basis, keys, found, s, c, d_h, h // h_kv, how, TOKENS, power_of_2(c), width, rest, gcd(c, 4),
        num_warps=fit_rows(width, TOKENS)[1],
    )  # fmt: skip
    return found


class Blocks(NamedTuple):
    """Means of blocks of each row, as the kernel is told of them."""

    numbers: Tensor
    start: Tensor  # the first row's (blocks, heads, d_h), from which they count where means lie
    lanes: int  # which divide all distances


def blocks_of(means: Sequence[Tensor]) -> Blocks:
    distances = [distance(x, means[0]) for x in means]
    return Blocks(upload(distances, means[0].device), means[0], lanes_of(means[0], distances))


def block_keys(q: Tensor, told: Blocks, n_blocks: int, per_head: bool, keys: Tensor | None = None) -> Tensor:
    """Keys by queries times each row's means of blocks (≥ n_blocks, heads, d_h) float32: (n, h or 1, n_blocks).

    Into `keys`, where they are given.
    """
    n, h, _, d_h = q.shape
    heads, q = told.start.shape[1], q.contiguous()
    if keys is None:
        keys = torch.empty(n, h if per_head else 1, n_blocks, dtype=torch.int64, device=q.device)
    width = power_of_2(d_h)
    blocks, n_warps = fit_rows(width, 32, 16384 if per_head else 8192)  # a total in addition
    multiply_blocks[(n, cdiv(n_blocks, blocks), heads if per_head else 1)](
        q, told.start, told.numbers, keys, n_blocks, heads, h // heads, d_h, per_head, blocks, width, told.lanes,
        num_warps=n_warps,
    )  # fmt: skip
    return keys


@jit(unspecialized=("start", "s"))
def multiply_tokens(
    q, origin, table, logits, lses, clock, start, scale, cap, s, d_h, g,
    ROW: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = table + row * ROW
    k = tl.multiple_of(tl.load(at) + head * tl.load(at + 1), LANES)
    late = tl.multiple_of(tl.load(at + 2) + head * tl.load(at + 3), LANES)
    behind, n = tl.load(at + 4), tl.load(at + 5) + steps_since(clock, start)
    token, column = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    inside, real = column < d_h, token < n
    from_k = tl.where(token < behind, k + token.to(tl.int64) * d_h, late + (token - behind).to(tl.int64) * d_h)
    keys = tl.load(origin + from_k[:, None] + column[None], real[:, None] & inside[None], other=0.0).to(tl.float32)
    for i in range(g):
        query_head = (row * tl.num_programs(2) + head) * g + i
        query = tl.load(q + query_head * d_h + column, inside, other=0.0).to(tl.float32)
        x = tl.sum(keys * query[None], 1) * scale
        if CAPPED:
            x = bend(x, cap)
        x = tl.where(real, x, float("-inf"))
        tl.store(logits + query_head * s + token, x, token < s)
        highest = tl.max(x, 0)
        safe = tl.where(highest > -1e30, highest, 0.0)
        lse = safe + tl.log(tl.sum(tl.exp(x - safe), 0))
        tl.store(lses + query_head * tl.num_programs(1) + block, lse)


@jit(unspecialized=("start", "s", "n_blocks"))
def weigh_tokens(
    logits, lses, table, keys, clock, start, s, n_blocks, g,
    ROW: tl.constexpr, HOW: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = table + row * ROW
    token, every = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCKS)
    stop = tl.load(at + ROW - 2) + steps_since(clock, start) * tl.load(at + ROW - 1)
    is_candidate = (token >= tl.load(at + ROW - 3)) & (token < stop)
    merged = tl.zeros((TOKENS,), tl.float32)
    none = tl.full((TOKENS,), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for i in range(g):
        query_head = (row * tl.num_programs(2) + head) * g + i
        x = tl.load(logits + query_head * s + token, is_candidate, other=float("-inf"))
        if HOW == 3:
            merged += x / g
        else:
            mine = tl.load(lses + query_head * n_blocks + every, every < n_blocks, other=float("-inf"))
            highest = tl.max(mine, 0)
            weight = tl.exp(x - (highest + tl.log(tl.sum(tl.exp(mine - highest), 0))))
            if HOW == 0:
                key = tl.where(is_candidate, pack_key(weight, token), none)
                tl.store(keys + query_head * s + token, key, token < s)
            elif HOW == 2:
                merged = tl.maximum(merged, weight)
            else:
                merged += weight
    if HOW:
        key = tl.where(is_candidate, pack_key(merged, token), none)
        tl.store(keys + (row * tl.num_programs(2) + head) * s + token, key, token < s)


@jit(unspecialized=("s",))
def multiply_channels(
    q, basis, keys, found, s, c, d_h, g,
    HOW: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    row, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token, channel, column = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    inside, real, is_channel = column < d_h, token < s, channel // LANES < c // LANES  # LANES at once are, or are not
    those = basis + tl.multiple_of((head * d_h + column) * c, LANES)[:, None] + channel[None]
    turn = tl.load(those, inside[:, None] & is_channel[None], other=0.0)
    if REST > 0:
        behind = WIDTH + tl.arange(0, REST)
        in_rest = behind < d_h
        those = basis + tl.multiple_of((head * d_h + behind) * c, LANES)[:, None] + channel[None]
        more = tl.load(those, in_rest[:, None] & is_channel[None], other=0.0)
    those = keys + tl.multiple_of((head * s + token) * c, LANES)[:, None] + channel[None]
    partial = tl.load(those, real[:, None] & is_channel[None], other=0.0)
    merged = tl.full((TOKENS,), float("-inf") if HOW == 2 else 0.0, tl.float32)
    for i in range(g):
        query_head = (row * tl.num_programs(2) + head) * g + i
        query = tl.load(q + query_head * d_h + column, inside, other=0.0).to(tl.float32)
        turned = tl.sum(turn * query[:, None], 0)
        if REST > 0:
            query = tl.load(q + query_head * d_h + behind, in_rest, other=0.0).to(tl.float32)
            turned += tl.sum(more * query[:, None], 0)
        x = tl.sum(partial * turned[None], 1)
        if HOW == 0:
            tl.store(found + query_head * s + token, pack_key(x, token), real)
        elif HOW == 2:
            merged = tl.maximum(merged, x)
        else:
            merged += x / g
    if HOW:
        tl.store(found + (row * tl.num_programs(2) + head) * s + token, pack_key(merged, token), real)


@jit(unspecialized=("n_blocks",))
def multiply_blocks(
    q, means, table, keys, n_blocks, heads, g, d_h,
    PER_HEAD: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row, tile, first = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    mine = means + tl.multiple_of(tl.load(table + row), LANES)
    block, column = tile * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, WIDTH)
    inside, real = column < d_h, block < n_blocks
    total = tl.zeros((BLOCKS,), tl.float32)
    for j in range(1 if PER_HEAD else heads):
        head = first + j
        where = (block.to(tl.int64)[:, None] * heads + head) * d_h + column[None]
        mean = tl.load(mine + where, real[:, None] & inside[None], other=0.0)
        for i in range(g):
            query_head = (row * heads + head) * g + i
            query = tl.load(q + query_head * d_h + column, inside, other=0.0).to(tl.float32)
            score = tl.sum(mean * query[None], 1)
            if PER_HEAD:
                tl.store(keys + query_head.to(tl.int64) * n_blocks + block, pack_key(score, block), real)
            else:
                total += score
    if not PER_HEAD:
        tl.store(keys + row * n_blocks + block, pack_key(total, block), real)
