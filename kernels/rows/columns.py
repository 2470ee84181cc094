"""SparQ's search on a GPU: a few components of every key, the keys to choose by, and what the chosen ones leave out.

`find_components` takes the r largest components of a group's |q|, and the weights that they are multiplied with; it
also adds the current token's V to the mean. `component_keys` multiplies them with the columns of all tokens, wherever
these lie. `cover` says which share of the softmax the attended tokens have, `blend` gives the rest to the mean.

Shapes    q (n, h, 1, d_h), components (n, h_kv, r) int32, weights (n, h, r), logits (n, h, s), covered (n, h) float32;
          keys (n, h_kv, s) int64 as `kernels/topk.py` says.
Checks    tests/kernels/test_logits.py.

Not here: a CPU's way (`methods/retrieving/sparq.py`).
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
from kvbench.kernels.rows.logits import Table
from kvbench.kernels.topk import pack_key

TOKENS = 256  # of one program
HELD = 8192  # logits of a group that four warps hold
ROW = 13  # numbers of a row, as the kernels read them
COMPARED = 32  # numbers that all others are compared with at once: of more registers spill (sm_100)


class Columns(NamedTuple):
    """What one row searches: its prompt by columns or by rows, then its generated tokens by rows."""

    prompt: Tensor  # (h_kv, d_h, s_prompt), whatever its strides
    late: Tensor  # (1, h_kv, …, d_h), tokens from s_prompt on
    mean: Tensor | None  # (1, h_kv, 1, d_h) float32 of V, which takes in the current token
    n: int  # tokens, the current one included
    start: int  # the first candidate
    stop: int  # after the last one
    k: int  # candidates to choose
    grows: bool = False  # with every token there is a candidate more


def table_of(rows: Sequence[Columns], device: torch.device, ahead: int = 0) -> Table:
    """The table of rows, with room for so many steps to come."""
    start = rows[0].late
    numbers = [
        number
        for row in rows
        for number in (
            distance(row.prompt, start), *row.prompt.stride(), distance(row.late, start), row.late.stride(1),
            row.prompt.shape[2], row.n, row.start, row.stop, 0 if row.mean is None else row.mean.data_ptr(),
            row.k, int(row.grows),
        )
    ]  # fmt: skip
    return Table(upload(numbers, device), start, max(row.n for row in rows) + ahead)


def find_components(
    q: Tensor, v_new: Tensor, told: Table, r: int, scale: float, since: Since | None = None
) -> tuple[Tensor, Tensor]:
    """Components and weights; v_new (n, h_kv, 1, d_h)."""
    since = now(q.device) if since is None else since
    (n, h, _, d_h), h_kv = q.shape, v_new.shape[1]
    assert q.is_contiguous() and v_new.is_contiguous(), "not contiguous"
    tiny, table = torch.finfo(torch.float32).tiny, told.numbers
    components = torch.empty(n, h_kv, r, dtype=torch.int32, device=q.device)
    weights = torch.empty(n, h, r, dtype=torch.float32, device=q.device)
    rank_components[(n, h_kv)](
        q, v_new, table, components, weights, *since, scale, tiny, d_h, h // h_kv, r, ROW, power_of_2(d_h),
        min(COMPARED, power_of_2(d_h), max(1, 2 * HELD // power_of_2(d_h))), num_warps=8 if d_h > 128 else 4,
    )  # fmt: skip
    return components, weights


def component_keys(
    q: Tensor, components: Tensor, weights: Tensor, told: Table, cap: float = 0.0, since: Since | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of the candidates, approximate logits of all tokens, and log-sum-exps of blocks of them."""
    since = now(q.device) if since is None else since
    (n, h_kv, r), h, s = components.shape, weights.shape[1], told.s
    group = power_of_2(h // h_kv)
    tokens = min(TOKENS, max(1, HELD // group))
    n_blocks = cdiv(s, tokens)
    keys = torch.empty(n, h_kv, s, dtype=torch.int64, device=q.device)
    logits = torch.empty(n, h, s, dtype=torch.float32, device=q.device)
    lses = torch.empty(n, h, n_blocks, dtype=torch.float32, device=q.device)
    multiply_components[(n, n_blocks, h_kv)](
        told.start, components, weights, told.numbers, keys, logits, lses, *since, cap, s, q.shape[3], h // h_kv, r,
        ROW, tokens, group, cap > 0,
    )  # fmt: skip
    return keys, logits, lses


def cover(
    chosen: Tensor, logits: Tensor, lses: Tensor, told: Table, sink: Tensor | None = None, since: Since | None = None
) -> Tensor:
    """Share of the softmax on first tokens, window and the row's own number of chosen (n, h_kv, k): (n, h) float32.

    A learned `sink` (h,) is covered too.
    """
    since = now(logits.device) if since is None else since
    lses = with_sink(lses, sink)
    (n, h_kv, k), (_, h, s) = chosen.shape, logits.shape
    covered = torch.empty(n, h, dtype=torch.float32, device=logits.device)
    add_covered[(n, h)](
        chosen, logits, lses, told.numbers, covered, covered if sink is None else sink, *since, s,
        lses.shape[2], h // h_kv, k, ROW, TOKENS,
        power_of_2(lses.shape[2]), sink is not None,
    )  # fmt: skip
    return covered


def blend(out: Tensor, covered: Tensor, told: Table, h_kv: int) -> None:
    """The mean of V takes what is not covered, in place; out (n, h, 1, d_h), -1 in covered: leave the row as it is."""
    n, h, _, d_h = out.shape
    blend_mean[(n, h)](out, covered, told.numbers, d_h, h // h_kv, ROW, power_of_2(d_h))


@jit(unspecialized=("start",))
def rank_components(
    q, v_new, table, components, weights, clock, start, scale, tiny, d_h, g, r,
    ROW: tl.constexpr, WIDTH: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    row, head, h_kv = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at, column = table + row * ROW, tl.arange(0, WIDTH)
    inside = column < d_h
    first = (row * h_kv + head) * g
    total, rank = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.int32)
    for i in range(g):
        total += tl.abs(tl.load(q + (first + i) * d_h + column, inside, other=0.0).to(tl.float32))
    for front in range(0, WIDTH, COMPARED):
        other, totals = front + tl.arange(0, COMPARED), tl.zeros((COMPARED,), tl.float32)
        for i in range(g):
            totals += tl.abs(tl.load(q + (first + i) * d_h + other, other < d_h, other=0.0).to(tl.float32))
        ahead = (totals[None] > total[:, None]) | ((totals[None] == total[:, None]) & (other[None] < column[:, None]))
        rank += tl.sum((ahead & (other < d_h)[None]).to(tl.int32), 1)
    is_chosen = inside & (rank < r)
    tl.store(components + (row * h_kv + head) * r + rank, column, is_chosen)
    for i in range(g):
        query = tl.load(q + (first + i) * d_h + column, inside, other=0.0).to(tl.float32)
        size = tl.abs(query)
        share = tl.sum(tl.where(is_chosen, size, 0.0), 0) / tl.maximum(tl.sum(size, 0), tiny)
        tl.store(weights + (first + i) * r + rank, query * (scale / tl.sqrt(tl.maximum(share, tiny))), is_chosen)
    mean_at = tl.load(at + 10)
    if mean_at != 0:
        to = mean_at.to(tl.pointer_type(tl.float32)) + head * d_h + column
        mean = tl.load(to, inside, other=0.0)
        value = tl.load(v_new + (row * h_kv + head) * d_h + column, inside, other=0.0).to(tl.float32)
        n = tl.load(at + 7) + steps_since(clock, start)
        tl.store(to, mean + (value - mean) / n.to(tl.float32), inside)


@jit(unspecialized=("start", "s"))
def multiply_components(
    origin, components, weights, table, keys, logits, lses, clock, start, cap, s, d_h, g, r,
    ROW: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, block, head, h_kv = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    at, token, age = table + row * ROW, block * TOKENS + tl.arange(0, TOKENS), steps_since(clock, start)
    prompt, late = tl.load(at) + head * tl.load(at + 1), tl.load(at + 4) + head * tl.load(at + 5)
    by_component, by_token, behind = tl.load(at + 2), tl.load(at + 3), tl.load(at + 6)
    real, is_late = token < tl.load(at + 7) + age, token >= behind
    one, first = tl.arange(0, GROUP), (row * h_kv + head) * g
    x = tl.zeros((GROUP, TOKENS), tl.float32)
    for j in range(r):
        component = tl.load(components + (row * h_kv + head) * r + j)
        early = prompt + component * by_component + token.to(tl.int64) * by_token
        where = tl.where(is_late, late + (token - behind).to(tl.int64) * d_h + component, early)
        value = tl.load(origin + where, real, other=0.0).to(tl.float32)  # from far away, so once for the group
        x += tl.load(weights + (first + one) * r + j, one < g, other=0.0)[:, None] * value[None]
    if CAPPED:
        x = tl.where((one < g)[:, None], bend(x, cap), 0.0)
    score = tl.sum(x, 0)
    x = tl.where(real[None], x, float("-inf"))
    of_group = (one < g)[:, None]
    tl.store(logits + (first + one).to(tl.int64)[:, None] * s + token[None], x, of_group & (token < s)[None])
    highest = tl.max(x, 1)
    safe = tl.where(highest > -1e30, highest, 0.0)
    lse = safe + tl.log(tl.sum(tl.exp(x - safe[:, None]), 1))
    tl.store(lses + (first + one) * tl.num_programs(1) + block, lse, one < g)
    is_candidate = (token >= tl.load(at + 8)) & (token < tl.load(at + 9) + age * tl.load(at + 12))
    none = tl.full((TOKENS,), 0x7FFFFFFFFFFFFFFF, tl.int64)
    key = tl.where(is_candidate, pack_key(score, token), none)
    tl.store(keys + (row * h_kv + head).to(tl.int64) * s + token, key, token < s)


@jit(unspecialized=("start", "s", "n_blocks", "k"))
def add_covered(
    chosen, logits, lses, table, covered, sink, clock, start, s, n_blocks, g, k,
    ROW: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, WITH_SINK: tl.constexpr,
):  # fmt: skip
    row, query_head, h = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at, every, age = table + row * ROW, tl.arange(0, BLOCKS), steps_since(clock, start)
    n, begin, stop = tl.load(at + 7) + age, tl.load(at + 8), tl.load(at + 9) + age * tl.load(at + 12)
    count = tl.load(at + 11)
    mine = tl.load(lses + (row * h + query_head) * n_blocks + every, every < n_blocks, other=float("-inf"))
    highest = tl.max(mine, 0)
    lse = highest + tl.log(tl.sum(tl.exp(mine - highest), 0))
    x = logits + (row * h + query_head).to(tl.int64) * s
    some = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, begin, TOKENS):
        token = first + tl.arange(0, TOKENS)
        some += tl.exp(tl.load(x + token, token < begin, other=float("-inf")) - lse)
    for first in range(stop, n, TOKENS):
        token = first + tl.arange(0, TOKENS)
        some += tl.exp(tl.load(x + token, token < n, other=float("-inf")) - lse)
    for first in range(0, count, TOKENS):
        place = first + tl.arange(0, TOKENS)
        where = chosen + (row * (h // g) + query_head // g).to(tl.int64) * k + place
        token = tl.load(where, place < count, other=0).to(tl.int32)
        some += tl.exp(tl.load(x + token, place < count, other=float("-inf")) - lse)
    # With everything selected nothing is missing, which sums in half precision would not quite say.
    whole = tl.sum(some, 0)
    if WITH_SINK:
        whole += tl.exp(tl.load(sink + query_head) - lse)
    share = tl.where(count >= stop - begin, -1.0, tl.minimum(whole, 1.0))
    tl.store(covered + row * h + query_head, share)


@jit
def blend_mean(out, covered, table, d_h, g, ROW: tl.constexpr, WIDTH: tl.constexpr):
    row, query_head, h = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at, column = table + row * ROW, tl.arange(0, WIDTH)
    mean_at, share = tl.load(at + 10), tl.load(covered + row * h + query_head)
    inside = column < d_h
    if mean_at != 0:
        if share >= 0:
            to = out + (row * h + query_head) * d_h + column
            value = tl.load(to, inside, other=0.0)
            at_mean = mean_at.to(tl.pointer_type(tl.float32)) + query_head // g * d_h + column
            mean = tl.load(at_mean, inside, other=0.0)
            tl.store(to, (mean + share * (value.to(tl.float32) - mean)).to(value.dtype), inside)
