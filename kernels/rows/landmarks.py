"""Chunks found by their mean keys, and keys made of low-rank factors, for all rows at once: ShadowKV's step on a GPU.

Three launches and a top-k: what each query head gives to each landmark, the most of them of any head of a group, and
then of the best chunks their tokens' positions and keys, rotated to where they stand. `KeyMaking` is told of rows once:
what each step finds comes to lie in the same memory.

Shapes    q (n, h, 1, d_h); means (h_kv, c, d_h) and basis (h_kv, r, d_h), factors (s, r) in q's dtype; outliers
          (h_kv, n_outliers) int64 ascending; a row's positions (1, h_kv, k) int64, keys (1, h_kv, k, d_h).
Checks    tests/kernels/test_landmarks.py.

Not here: a CPU's way, landmarks and factors themselves (`methods/retrieving/shadowkv.py`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.capped import bend, with_sink
from kvbench.kernels.jit import INTERPRETED, cdiv, distance, fit_rows, jit, lanes_of, power_of_2, tl, upload
from kvbench.kernels.rows.rotation import Rotation
from kvbench.kernels.scratch import Scratch
from kvbench.kernels.topk import KeyChoice, pack_key

MEANS, TOKENS, RANK = 32, 16, 32  # of one program: landmarks; tokens, and how much of the rank at a time
CHANNELS = {2: 128, 4: 32}  # of a key at a time, by the bytes of a number: registers hold no more of their products
FIELDS = 11  # numbers of a row


class Chunks(NamedTuple):
    """What one row searches, and what it makes keys of."""

    means: Tensor
    outliers: Tensor  # chunks that are none of the landmarks
    factors: Tensor
    basis: Tensor
    chunk: int  # tokens
    n_selected: int  # chunks


class KeyMaking:
    """Positions and keys of the tokens of each row's best chunks, at one step and those to come.

    Landmarks' logits bend towards a cap.
    """

    def __init__(
        self, rows: Sequence[Chunks], h: int, rotation: Rotation | None, scale: float,
        cap: float = 0.0, sink: Tensor | None = None, scratch: Scratch | None = None,
    ) -> None:  # fmt: skip
        start = self.start = rows[0].means
        (h_kv, _, d_h), device = start.shape, start.device
        self.h, self.rotation, self.scale, self.cap, self.sink = h, rotation, scale, cap, sink
        lengths = [row.chunk * row.n_selected for row in rows]
        self.longest = max(lengths)
        self.places = torch.empty(h_kv * sum(lengths), dtype=torch.int64, device=device)
        self.made = torch.empty(h_kv * sum(lengths), d_h, dtype=start.dtype, device=device)
        sizes = [h_kv * k for k in lengths]
        self.idx = [x.view(1, h_kv, -1) for x in self.places.split(sizes)]
        self.keys = [x.view(1, h_kv, -1, d_h) for x in self.made.split(sizes)]
        numbers = [x for row, idx in zip(rows, self.idx, strict=True) for x in fields(row, start, idx)]
        self.lanes = lanes_of(start, (x for i in (0, 4, 5, 6) for x in numbers[i::FIELDS]))
        self.table = upload(numbers, device)
        self.c, self.n_outliers = (
            max(x.shape[1] for x in some) for some in zip(*(row[:2] for row in rows), strict=True)
        )
        self.choice = KeyChoice(len(rows), h_kv, [row.n_selected for row in rows], device, scratch)

    def take(self, q: Tensor) -> None:
        """Find and make them for queries (n, h, 1, d_h) of `h` heads."""
        (h_kv, _, d_h), n, c, lanes, cap = self.start.shape, len(q), self.c, self.lanes, self.cap
        q, g, width = q.contiguous(), self.h // h_kv, power_of_2(d_h, 16)
        assert q.dtype == self.start.dtype, (q.dtype, self.start.dtype)
        means, n_warps = fit_rows(width, MEANS)
        grid = n, cdiv(c, means), h_kv
        logits = torch.empty(n, self.h, c, dtype=torch.float32, device=q.device)
        lses = torch.empty(n, self.h, grid[1], dtype=torch.float32, device=q.device)
        scores = torch.empty(n, h_kv, c, dtype=torch.int64, device=q.device)
        score_landmarks[grid](
            q, self.start, self.table, logits, lses, self.scale, cap, d_h, c, g, FIELDS, means, width, lanes, cap > 0,
            num_warps=n_warps,
        )  # fmt: skip
        lses = with_sink(lses, self.sink)
        n_blocks = lses.shape[2]
        weigh_landmarks[grid](self.table, logits, lses, scores, c, g, n_blocks, FIELDS, means, power_of_2(n_blocks))
        channels = CHANNELS[q.element_size()] // (1 if d_h % 16 == 0 else 2)  # masks take registers, too
        order = self.choice.take(scores)
        partners, own, other = (order, q, q) if self.rotation is None else self.rotation[:3]
        make_keys[n, cdiv(self.longest, TOKENS), h_kv](
            self.start, self.table, order, self.places, self.made, partners, own, other, d_h, order.shape[2], FIELDS,
            self.rotation is not None, TOKENS, RANK, min(channels, width), power_of_2(self.n_outliers), lanes,
            INTERPRETED, num_warps=4,
        )  # fmt: skip


def fields(row: Chunks, start: Tensor, idx: Tensor) -> list[int]:
    """The numbers of a row, as the kernels read them; they count from `start` on."""
    means, outliers, factors, basis, chunk, n_selected = row
    assert means.is_contiguous() and outliers.is_contiguous() and factors.is_contiguous(), means.stride()
    assert basis.is_contiguous() and basis.shape[1] == factors.shape[1], (basis.shape, factors.shape)
    return [
        distance(means, start), means.shape[1], outliers.data_ptr(), outliers.shape[1], distance(factors, start),
        distance(basis, start), factors.shape[1], chunk, n_selected, int(idx.storage_offset()), idx.shape[2],
    ]  # fmt: skip


@jit
def score_landmarks(
    q, origin, table, logits, lses, scale, cap, d_h, c, g,
    FIELDS: tl.constexpr, MEANS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, block, head, h_kv = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    at, mean, column = table + row * FIELDS, block * MEANS + tl.arange(0, MEANS), tl.arange(0, WIDTH)
    n, inside = tl.load(at + 1), column < d_h
    real = mean < n
    where = origin + tl.multiple_of(tl.load(at), LANES) + (head * n + mean)[:, None] * d_h + column[None]
    those = tl.load(where, real[:, None] & inside[None], other=0.0).to(tl.float32)
    for i in range(g):
        query_head = (row * h_kv + head) * g + i
        query = tl.load(q + query_head * d_h + column, inside, other=0.0).to(tl.float32)
        x = tl.sum(those * query[None], 1) * scale
        if CAPPED:
            x = bend(x, cap)
        x = tl.where(real, x, float("-inf"))
        tl.store(logits + query_head.to(tl.int64) * c + mean, x, mean < c)
        highest = tl.maximum(tl.max(x, 0), -1e30)  # finite: a row may have no landmark here
        total = tl.sum(tl.exp(x - highest), 0)
        lse = tl.where(total > 0, highest + tl.log(tl.maximum(total, 1e-30)), float("-inf"))
        tl.store(lses + query_head * tl.num_programs(1) + block, lse)


@jit
def weigh_landmarks(
    table, logits, lses, scores, c, g, n_blocks, FIELDS: tl.constexpr, MEANS: tl.constexpr, BLOCKS: tl.constexpr
):
    row, block, head, h_kv = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    mean, every = block * MEANS + tl.arange(0, MEANS), tl.arange(0, BLOCKS)
    real = mean < tl.load(table + row * FIELDS + 1)
    most = tl.full((MEANS,), float("-inf"), tl.float32)
    for i in range(g):
        query_head = ((row * h_kv + head) * g + i).to(tl.int64)
        parts = tl.load(lses + query_head * n_blocks + every, every < n_blocks, other=float("-inf"))
        highest = tl.max(parts, 0)
        joined = highest + tl.log(tl.sum(tl.exp(parts - highest), 0))
        most = tl.maximum(most, tl.load(logits + query_head * c + mean, real, other=float("-inf")) - joined)
    none = tl.full((MEANS,), 0x7FFFFFFFFFFFFFFF, tl.int64)
    key = tl.where(real, pack_key(most, mean), none)
    tl.store(scores + (row * h_kv + head).to(tl.int64) * c + mean, key, mean < c)


@jit
def make_keys(
    origin, table, order, places, keys, partners, own, other, d_h, n_ordered, FIELDS: tl.constexpr, TURNS: tl.constexpr,
    TOKENS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, OUTLIERS: tl.constexpr, LANES: tl.constexpr,
    WIDE: tl.constexpr,  # float32 products, for the interpreter takes bfloat16 for its bits
):  # fmt: skip
    row, head, h_kv = tl.program_id(0), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    at, place = table + row * FIELDS, tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    rank, chunk, k = tl.multiple_of(tl.load(at + 6), LANES), tl.load(at + 7), tl.load(at + 10)
    real = place < k
    ranked = tl.load(order + (row * h_kv + head) * n_ordered + place // chunk, real, other=0).to(tl.int32)
    n_outliers, each = tl.load(at + 3), tl.arange(0, OUTLIERS)
    outliers = tl.load(at + 2).to(tl.pointer_type(tl.int64)) + head * n_outliers
    in_front = tl.load(outliers + each, each < n_outliers, other=1 << 40) - each  # landmarks in front of each
    number = ranked + tl.sum((in_front[None] <= ranked[:, None]).to(tl.int32), 1)
    token = number.to(tl.int64) * chunk + place % chunk
    to = tl.load(at + 9) + head * k + place
    tl.store(places + to, token, real)
    part = tl.arange(0, RANK)
    factors = origin + tl.multiple_of(tl.load(at + 4), LANES)
    basis = origin + tl.multiple_of(tl.load(at + 5), LANES) + head * rank * d_h
    for left in range(0, d_h, WIDTH):
        column = left + tl.arange(0, WIDTH)
        inside = column < d_h
        made = tl.zeros((TOKENS, WIDTH), tl.float32)
        across = tl.zeros((TOKENS, WIDTH), tl.float32)
        partner = column
        if TURNS:
            partner = tl.load(partners + column, inside, other=0).to(tl.int32)
        for first in range(0, rank, RANK):
            j = first + part
            x = tl.load(factors + token[:, None] * rank + j[None], real[:, None] & (j < rank)[None], other=0.0)
            there = (j < rank)[:, None] & inside[None]
            y = tl.load(basis + j[:, None] * d_h + column[None], there, other=0.0)
            if WIDE:
                x, y = x.to(tl.float32), y.to(tl.float32)
            made += tl.dot(x, y, input_precision="ieee")
            if TURNS:
                z = tl.load(basis + j[:, None] * d_h + partner[None], there, other=0.0)
                if WIDE:
                    z = z.to(tl.float32)
                across += tl.dot(x, z, input_precision="ieee")
        both = real[:, None] & inside[None]
        if TURNS:
            where = token[:, None] * d_h + column[None]
            made = made * tl.load(own + where, both, other=0.0) + across * tl.load(other + where, both, other=0.0)
        tl.store(keys + to[:, None] * d_h + column[None], made.to(keys.dtype.element_ty), both)
