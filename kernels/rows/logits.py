"""Inner products of every row's queries with what it searches, on a GPU: as logits, or as keys to choose by.

`token_logits` are those with all keys of a row, the prompt's and behind them its generated ones, bent towards `cap` if
it is not 0; `weigh_logits` makes keys of their softmax, in which `sink` (h,) takes part if there is one. `channel_keys`
are those of a few channels of every key, `block_keys` of means of blocks.

Shapes    q (n, h, 1, d_h); logits (n, h, s) float32, lses (n, h, blocks) float32; keys (n, heads, s) int64, as
          `topk.py` says, the largest int64 for what is no candidate.
Checks    tests/kernels/test_logits.py.

Not here: a CPU's way, which is the methods' own torch.
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.capped import bend, with_sink
from kernels.jit import cdiv, distance, fit_rows, jit, power_of_2, tl, upload
from kernels.topk import pack_key

AGGREGATES = ("query_head", "group_sum", "group_max", "group_logit_mean", "group_mean")
TOKENS, WIDE_HEAD = 64, 256  # of one program; numbers of a head that is read in one piece


class Searched(NamedTuple):
    """The keys that one row searches, and its candidates among them."""

    k: Tensor  # (1, h_kv, s, d_h)
    late: Tensor  # (1, h_kv, …, d_h), tokens from s on
    n: int  # tokens
    start: int  # the first candidate
    stop: int  # behind the last one


def token_logits(
    q: Tensor, rows: Sequence[Searched], scale: float, cap: float = 0.0, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, log-sum-exps of blocks of them, and the integers that `weigh_logits` wants."""
    n, h, _, d_h = q.shape
    h_kv, s, q = rows[0].k.shape[1], max(row.n for row in rows), q.contiguous()
    numbers = [
        number
        for row in rows
        for number in (
            distance(row.k, q), row.k.stride(1), distance(row.late, q), row.late.stride(1), row.k.shape[2],
            row.n, row.start, row.stop,
        )
    ]  # fmt: skip
    width = power_of_2(d_h)
    tokens, n_warps = fit_rows(width, TOKENS)
    table, n_blocks = upload(numbers, q.device), cdiv(s, tokens)
    logits = torch.empty(n, h, s, dtype=torch.float32, device=q.device)
    lses = torch.empty(n, h, n_blocks, dtype=torch.float32, device=q.device)
    multiply_tokens[(n, n_blocks, h_kv)](
        q, table, logits, lses, scale, cap, s, d_h, h // h_kv, tokens, width, cap > 0, num_warps=n_warps
    )
    return logits, with_sink(lses, sink), table


def weigh_logits(logits: Tensor, lses: Tensor, table: Tensor, h_kv: int, agg: str) -> Tensor:
    """Keys of the candidates by the softmax over all tokens, as a group's heads agree."""
    n, h, s = logits.shape
    how, block = AGGREGATES.index(agg), 256
    keys = torch.empty(n, h if how == 0 else h_kv, s, dtype=torch.int64, device=logits.device)
    weigh_tokens[(n, cdiv(s, block), h_kv)](
        logits, lses, table, keys, s, lses.shape[2], h // h_kv, how, block, power_of_2(lses.shape[2])
    )
    return keys


def channel_keys(q: Tensor, basis: Tensor, keys: Tensor, agg: str) -> Tensor:
    """Keys by queries turned to the channels of `basis` (h_kv, d_h, c), times partial keys (h_kv, s, c) float32."""
    (n, h, _, d_h), (h_kv, s, c) = q.shape, keys.shape
    how, q, basis, keys = AGGREGATES.index(agg), q.contiguous(), basis.contiguous(), keys.contiguous()
    found = torch.empty(n, h if how == 0 else h_kv, s, dtype=torch.int64, device=q.device)
    # A wide head's numbers are a power of two and a rest, since registers hold no more.
    width = power_of_2(d_h // 2 + 1) if d_h > WIDE_HEAD else power_of_2(d_h)
    rest = power_of_2(d_h - width) if d_h > width else 0
    multiply_channels[(n, cdiv(s, TOKENS), h_kv)](
        q, basis, keys, found, s, c, d_h, h // h_kv, how, TOKENS, power_of_2(c), width, rest,
        num_warps=fit_rows(width, TOKENS)[1],
    )  # fmt: skip
    return found


def block_keys(q: Tensor, means: Sequence[Tensor], n_blocks: int, per_head: bool) -> Tensor:
    """Keys by queries times each row's means of blocks (≥ n_blocks, heads, d_h) float32: (n, h or 1, n_blocks)."""
    n, h, _, d_h = q.shape
    heads, q = means[0].shape[1], q.contiguous()
    table = upload([distance(x, means[0]) for x in means], q.device)
    keys = torch.empty(n, h if per_head else 1, n_blocks, dtype=torch.int64, device=q.device)
    width = power_of_2(d_h)
    blocks, n_warps = fit_rows(width, 32, 16384 if per_head else 8192)  # a total beside them
    multiply_blocks[(n, cdiv(n_blocks, blocks), heads if per_head else 1)](
        q, means[0], table, keys, n_blocks, heads, h // heads, d_h, per_head, blocks, width, num_warps=n_warps
    )
    return keys


@jit
def multiply_tokens(
    q, table, logits, lses, scale, cap, s, d_h, g,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = table + row * 8
    k = tl.load(at) + head * tl.load(at + 1)
    late = tl.load(at + 2) + head * tl.load(at + 3)
    behind, n = tl.load(at + 4), tl.load(at + 5)
    token, column = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    inside, real = column < d_h, token < n
    from_k = tl.where(token < behind, k + token.to(tl.int64) * d_h, late + (token - behind).to(tl.int64) * d_h)
    keys = tl.load(q + from_k[:, None] + column[None], real[:, None] & inside[None], other=0.0).to(tl.float32)
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


@jit
def weigh_tokens(
    logits, lses, table, keys, s, n_blocks, g, HOW: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr
):
    row, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = table + row * 8
    token, every = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCKS)
    is_candidate = (token >= tl.load(at + 6)) & (token < tl.load(at + 7))
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


@jit
def multiply_channels(
    q, basis, keys, found, s, c, d_h, g,
    HOW: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token, channel, column = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, CHANNELS), tl.arange(0, WIDTH)
    inside, real = column < d_h, token < s
    turn = tl.load(
        basis + (head * d_h + column[:, None]) * c + channel[None], inside[:, None] & (channel < c)[None], other=0.0
    )
    if REST > 0:
        behind = WIDTH + tl.arange(0, REST)
        in_rest = behind < d_h
        more = tl.load(
            basis + (head * d_h + behind[:, None]) * c + channel[None],
            in_rest[:, None] & (channel < c)[None], other=0.0,
        )  # fmt: skip
    partial = tl.load(
        keys + (head * s + token[:, None]) * c + channel[None], real[:, None] & (channel < c)[None], other=0.0
    )
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


@jit
def multiply_blocks(
    q, means, table, keys, n_blocks, heads, g, d_h, PER_HEAD: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr
):
    row, tile, first = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    mine = means + tl.load(table + row)
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
