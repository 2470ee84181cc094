"""What a step's tokens received in attention, added up for all rows at once, and the token of each head that leaves.

A row holds its tokens in slots, and the newest in the last one. Where it evicts, the token of the lowest sum among the
positions from `low` to `stop` (exclusive) goes, of equal ones the higher position, and the newest takes its slot.

Shapes    logits and weights (h, n) float32 per row; before (1, owners, n - 1), sums (1, owners, n) float32, where each
          owner has h / owners query heads; positions (1, h_kv, n), evicted (1, h_kv, 1) int64.
Checks    tests/kernels/test_weights.py.

Not here: who learns from weights (`methods`), what a layer notes of a token that left (`engine/layouts`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.jit import cdiv, distance, jit, power_of_2, tl, upload

REDUCTIONS = ("sum", "mean", "max")  # of an owner's query heads, as `add_received` counts them
BLOCK = 512  # slots of one program
FIELDS = 16  # numbers of a row


class Held(NamedTuple):
    """Where a row's tokens lie."""

    k: Tensor  # (1, h_kv, slots, d_h)
    v: Tensor
    kept: Tensor | None  # positions (1, h_kv, n_kept) of the first slots; None: the slots' own numbers
    n_kept: int
    start: int  # position in the slot behind them


class Row(NamedTuple):
    """What one row's tokens received in this step."""

    weights: Tensor  # (1, h, n)
    before: Tensor | None = None  # (1, owners, n - 1), what they had received before; None: only this step counts
    held: Held | None = None  # of rows that evict
    low: int = 0
    stop: int = 1 << 31


class Outcome(NamedTuple):
    """Of one row."""

    sums: Tensor  # (1, owners, n); where it evicted, the last column is nobody's
    positions: Tensor | None = None  # (1, h_kv, n - 1) of the tokens that stayed, slot by slot
    evicted: Tensor | None = None  # (1, h_kv, 1) position that left


def soften_rows(logits: Sequence[Tensor | None], lse: Tensor) -> list[Tensor | None]:
    """Weights (1, h, n) in place of scaled logits (h, n), given the rows' log-sum-exps (rows, h, 1)."""
    some = [(i, x) for i, x in enumerate(logits) if x is not None]
    if some:
        base, h = some[0][1], lse.shape[1]
        table = upload([number for i, x in some for number in (distance(x, base), x.shape[1], i)], base.device)
        longest = max(x.shape[1] for _, x in some)
        soften[(len(some), cdiv(longest, BLOCK), h)](base, lse, table, BLOCK)
    return [None if x is None else x.unsqueeze(0) for x in logits]


@jit
def soften(logits, lse, table, BLOCK: tl.constexpr):
    at, head, h = table + tl.program_id(0) * 3, tl.program_id(2).to(tl.int64), tl.num_programs(2)
    n, slot = tl.load(at + 1), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    where = logits + tl.load(at) + head * n + slot
    joined = tl.load(lse + tl.load(at + 2) * h + head)
    tl.store(where, tl.exp(tl.load(where, slot < n, other=float("-inf")) - joined), slot < n)


def receive_rows(rows: Sequence[Row], owners: int, reduce: str) -> list[Outcome]:
    """Add up what each token received, and let one token of each head go where a row says where it holds them."""
    base = rows[0].weights
    device, h = base.device, base.shape[1]
    evicting = [row.held for row in rows if row.held is not None]
    k, v = (evicting[0].k, evicting[0].v) if evicting else (base, base)
    h_kv, d_h = k.shape[1], k.shape[3] if evicting else 0
    lengths = [row.weights.shape[2] for row in rows]
    flat = torch.empty(owners * sum(lengths), dtype=torch.float32, device=device)
    sums = [x.view(1, owners, -1) for x in flat.split([owners * n for n in lengths])]
    positions = torch.empty(h_kv * sum(n - 1 for n in lengths), dtype=torch.int64, device=device)
    left = [x.view(1, h_kv, -1) for x in positions.split([h_kv * (n - 1) for n in lengths])]
    evicted = torch.empty(len(rows), h_kv, 1, dtype=torch.int64, device=device)
    n_blocks = cdiv(max(lengths), BLOCK)
    lowest = torch.empty(len(rows), owners, n_blocks, 2, dtype=torch.int64, device=device)
    numbers = [fields(row, base, k, v, *to) for row, *to in zip(rows, sums, left, strict=True)]
    table = upload([x for row in numbers for x in row], device)
    add_received[(len(rows), n_blocks, owners)](
        base, lowest, table, h // owners, REDUCTIONS.index(reduce), FIELDS, BLOCK
    )
    if evicting:
        evict_lowest[(len(rows), h_kv)](
            base, k, v, lowest, positions, evicted, table, owners, n_blocks, d_h, FIELDS, BLOCK,
            power_of_2(n_blocks), power_of_2(d_h),
        )  # fmt: skip
    return [
        Outcome(mine, left[i], evicted[i : i + 1]) if row.held is not None else Outcome(mine)
        for i, (row, mine) in enumerate(zip(rows, sums, strict=True))
    ]


def fields(row: Row, base: Tensor, k: Tensor, v: Tensor, sums: Tensor, left: Tensor) -> list[int]:
    """The numbers of a row, as the kernels read them."""
    n, before = row.weights.shape[2], row.before
    assert row.weights.is_contiguous(), row.weights.stride()
    numbers = [n, distance(row.weights, base), distance(sums, base), 0, 0]
    if before is not None:
        assert before.shape[2] == n - 1 and before.stride(2) == 1, (before.shape, before.stride())
        numbers[3:] = distance(before, base), before.stride(1)
    if row.held is None:
        return [*numbers, *[0] * (FIELDS - len(numbers))]
    held, kept = row.held, row.held.kept
    assert held.k.stride() == held.v.stride() and held.k.stride(2) == k.shape[3], (held.k.stride(), held.v.stride())
    assert kept is None or kept.stride(2) == 1, kept.stride()
    return [
        *numbers, *((0, 0) if kept is None else (kept.data_ptr(), kept.stride(1))), held.n_kept, held.start, row.low,
        row.stop, 1, distance(held.k, k), distance(held.v, v), held.k.stride(1), int(left.storage_offset()),
    ]  # fmt: skip


@jit
def positions_of(at, head, slot, real):
    """Positions of a row's slots."""
    kept, n_kept = tl.load(at + 5), tl.load(at + 7)
    those = kept.to(tl.pointer_type(tl.int64)) + head * tl.load(at + 6)
    named = tl.load(those + slot, real & (slot < n_kept) & (kept != 0), other=0)
    return tl.where(slot < n_kept, tl.where(kept == 0, slot, named), tl.load(at + 8) + slot - n_kept)


@jit
def add_received(weights, lowest, table, g, reduction, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of a block of slots, and the lowest of them that may go, in the upper half of a number below 0."""
    row, block, owner = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, slot = table + row * FIELDS, block * BLOCK + tl.arange(0, BLOCK)
    n = tl.load(at)
    real = slot < n
    mine = weights + tl.load(at + 1)
    total, highest = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in range(g):
        x = tl.load(mine + (owner * g + i) * n + slot, real, other=0.0)
        total += x
        highest = tl.maximum(highest, x)
    received = tl.where(reduction == 2, highest, tl.where(reduction == 1, total / g, total))
    stride = tl.load(at + 4)
    if stride != 0:
        received += tl.load(weights + tl.load(at + 3) + owner * stride + slot, slot < n - 1, other=0.0)
    tl.store(weights + tl.load(at + 2) + owner * n + slot, received, real)
    if tl.load(at + 11) != 0:
        position = positions_of(at, owner, slot, real)
        may_go = real & (position >= tl.load(at + 9)) & (position < tl.load(at + 10))
        bits = received.to(tl.int32, bitcast=True).to(tl.int64)  # sums are not negative: their bits rise with them
        key = tl.where(may_go, (bits << 32) | (0x7FFFFFFF - position), 0x7FFFFFFFFFFFFFFF)
        least = tl.min(key, 0)
        found = lowest + ((row * tl.num_programs(2) + owner) * tl.num_programs(1) + block) * 2
        tl.store(found, least)
        tl.store(found + 1, tl.max(tl.where(key == least, slot, -1), 0).to(tl.int64))


@jit
def evict_lowest(
    weights, k, v, lowest, positions, evicted, table, owners, n_blocks, d_h,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The newest token of a KV head takes the slot of the one that leaves."""
    row, head, h_kv = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at, every = table + row * FIELDS, tl.arange(0, BLOCKS)
    if tl.load(at + 11) != 0:
        n, owner = tl.load(at), head * owners // h_kv
        last = n - 1
        found = lowest + ((row * owners + owner) * n_blocks + every) * 2
        there = every < n_blocks
        key = tl.load(found, there, other=0x7FFFFFFFFFFFFFFF)
        of_least = there & (key == tl.min(key, 0))
        hole = tl.max(tl.where(of_least, tl.load(found + 1, there, other=-1), -1), 0)
        one = tl.arange(0, 1)
        tl.store(evicted + row * h_kv + head + one, positions_of(at, head, hole + one, one < 1))
        newest = tl.max(positions_of(at, head, last + one, one < 1), 0)
        for start in range(0, last, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            those = positions_of(at, head, slot, slot < last)
            to = positions + tl.load(at + 15) + head * last + slot
            tl.store(to, tl.where(slot == hole, newest, those), slot < last)
        column = tl.arange(0, WIDTH)
        stride, inside = tl.load(at + 14), column < d_h
        keys, values = k + tl.load(at + 12) + head * stride, v + tl.load(at + 13) + head * stride
        tl.store(keys + hole * d_h + column, tl.load(keys + last * d_h + column, inside), inside)
        tl.store(values + hole * d_h + column, tl.load(values + last * d_h + column, inside), inside)
        sums = weights + tl.load(at + 2) + owner * n
        tl.store(sums + hole, tl.load(sums + last))
