"""What a step's tokens received in attention, added up for all rows at once, and the token of each head that leaves.

A row holds its tokens in slots, and the newest in the last one. Where it evicts, the token of the lowest sum among the
positions from `low` to `stop` (exclusive) goes, of equal ones the higher position, and the newest takes its slot.

Shapes    logits and weights (h, n) float32 per row; before (1, owners, n - 1), sums (1, owners, n) float32, where each
          owner has h / owners query heads; positions (1, h_kv, n), evicted (1, h_kv, 1) int64.
Checks    tests/kernels/test_weights.py.

Not here: who evicts by weights (`methods`), what a layer notes of a token that left (`engine/layouts`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.clock import Since, now, steps_since
from kvbench.kernels.fast import takes
from kvbench.kernels.jit import cdiv, distance, jit, power_of_2, tl, upload

REDUCTIONS = ("sum", "mean", "max")  # of an owner's query heads, as `add_received` counts them
BLOCK = 512  # slots of one program
FIELDS = 24  # numbers of a row
EVERY = -1 << 40  # a slot in front of all, however many steps later


class Held(NamedTuple):
    """Where a row's tokens lie."""

    k: Tensor  # (1, h_kv, slots, d_h)
    v: Tensor
    kept: Tensor | None  # positions (1, h_kv, n_kept) of the first slots; None: the slots' own numbers
    n_kept: int
    start: int  # position in the slot after them
    left: Tensor | None = None  # where positions of those that stay are written, which may be over `kept`


class Row(NamedTuple):
    """What one row's tokens received in this step."""

    weights: Tensor  # (1, h, n)
    owners: int  # heads that have sums of their own
    reduce: str  # of an owner's query heads, one of REDUCTIONS
    before: Tensor | None = None  # (1, owners, n - 1), what they had received before; None: only this step counts
    held: Held | None = None  # of rows that evict
    low: int = 0
    stop: int = 1 << 31
    sums: Tensor | None = None  # where they are written, (1, owners, n or more), which may be over `before`
    first: int = EVERY  # slots in front of it receive nothing


class Outcome(NamedTuple):
    """Sums of one row, and what left it where it evicted."""

    sums: Tensor  # (1, owners, n); where it evicted, the last column is nobody's
    positions: Tensor | None = None  # (1, h_kv, n - 1) of the tokens that stayed, slot by slot
    evicted: Tensor | None = None  # (1, h_kv, 1) position that left


class Softening:
    """Logits that become weights where they lie, as the kernel is told once: rows may grow from step to step."""

    def __init__(self, logits: Sequence[Tensor | None], more: Sequence[int] = (), n_steps: int = 0) -> None:
        """Scaled logits (h, n) of each row; at each of the steps to come a row has `more` tokens."""
        some = [(i, x) for i, x in enumerate(logits) if x is not None]
        self.base, longest = some[0][1], 0
        numbers = list[int]()
        for i, x in some:
            grows = more[i] if more else 0
            numbers += distance(x, self.base), x.shape[1], i, x.stride(0), grows
            longest = max(longest, x.shape[1] + grows * n_steps)
        self.table = upload(numbers, self.base.device)
        self.grid = len(some), cdiv(longest, BLOCK)

    def take(self, lse: Tensor, since: Since | None = None) -> None:
        """Given the log-sum-exps of all rows (rows, h, 1)."""
        since = now(lse.device) if since is None else since
        soften[(*self.grid, lse.shape[1])](self.base, lse, self.table, *since, BLOCK)


def soften_rows(logits: Sequence[Tensor | None], lse: Tensor) -> list[Tensor | None]:
    """Weights (1, h, n) in place of scaled logits (h, n), given the rows' log-sum-exps (rows, h, 1)."""
    if takes("soften", lse.device):
        if any(x is not None for x in logits):
            Softening(logits).take(lse)
    else:
        for x, joined in zip(logits, lse[: len(logits)], strict=True):
            if x is not None:
                x.sub_(joined).exp_()
    return [None if x is None else x.unsqueeze(0) for x in logits]


@jit(unspecialized=("start",))
def soften(logits, lse, table, clock, start, BLOCK: tl.constexpr):
    at, head, h = table + tl.program_id(0) * 5, tl.program_id(2).to(tl.int64), tl.num_programs(2)
    n = tl.load(at + 1) + tl.load(at + 4) * steps_since(clock, start)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    where = logits + tl.load(at) + head * tl.load(at + 3) + slot
    joined = tl.load(lse + tl.load(at + 2) * h + head)
    tl.store(where, tl.exp(tl.load(where, slot < n, other=float("-inf")) - joined), slot < n)


class Receiving:
    """What tokens receive, as the kernels are told once: steps later a row may have more tokens, or evicts again.

    At each of the steps to come the positions that may go, that of the newest token and the first slot that receives
    are those after the last.
    """

    def __init__(self, rows: Sequence[Row], more: Sequence[int] = (), n_steps: int = 0) -> None:
        """Rows that do not say where their outcomes go get memory for as many tokens as they have."""
        assert all(row.sums is not None or not each for row, each in zip(rows, more, strict=False)), "no room to grow"
        self.base = rows[0].weights
        device, lengths = self.base.device, [row.weights.shape[2] for row in rows]
        evicting = [row.held for row in rows if row.held is not None]
        self.k, self.v = (evicting[0].k, evicting[0].v) if evicting else (self.base, self.base)
        self.h_kv, self.d_h = self.k.shape[1], self.k.shape[3] if evicting else 0
        self.owners, self.evicts = max(row.owners for row in rows), bool(evicting)
        sums, left = places_of(rows, self.h_kv)
        self.evicted = torch.empty(len(rows), self.h_kv, 1, dtype=torch.int64, device=device)
        grows = more or [0] * len(rows)
        self.n_blocks = cdiv(max(n + each * n_steps for n, each in zip(lengths, grows, strict=True)), BLOCK)
        self.lowest = torch.empty(len(rows), self.owners, self.n_blocks, 2, dtype=torch.int64, device=device)
        numbers = [
            x
            for row, mine, to, each in zip(rows, sums, left, grows, strict=True)
            for x in fields(row, self.base, self.k, self.v, mine, to, each)
        ]
        self.table = upload(numbers, device)
        self.outcomes = [
            Outcome(mine, to, self.evicted[i : i + 1]) if row.held is not None else Outcome(mine)
            for i, (row, mine, to) in enumerate(zip(rows, sums, left, strict=True))
        ]

    def take(self, since: Since | None = None) -> list[Outcome]:
        """Add up, and let tokens go."""
        n_rows, since = len(self.outcomes), now(self.base.device) if since is None else since
        add_received[(n_rows, self.n_blocks, self.owners)](self.base, self.lowest, self.table, *since, FIELDS, BLOCK)
        if self.evicts:
            evict_lowest[(n_rows, self.h_kv)](
                self.base, self.k, self.v, self.lowest, self.evicted, self.table, *since, self.owners, self.n_blocks,
                self.d_h, FIELDS, BLOCK, power_of_2(self.n_blocks), power_of_2(self.d_h),
            )  # fmt: skip
        return self.outcomes


def receive_rows(rows: Sequence[Row]) -> list[Outcome]:
    """Add up what each token received, and let one token of each head go where a row says where it holds them."""
    return Receiving(rows).take()


def places_of(rows: Sequence[Row], h_kv: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Where sums and positions of each row go: memory that it says, or new."""
    device, lengths = rows[0].weights.device, [row.weights.shape[2] for row in rows]
    own = [0 if row.sums is not None else row.owners * n for row, n in zip(rows, lengths, strict=True)]
    flat = torch.empty(sum(own), dtype=torch.float32, device=device).split(own)
    sums = [x.view(1, row.owners, -1) if row.sums is None else row.sums for row, x in zip(rows, flat, strict=True)]
    own = [
        0 if row.held is None or row.held.left is not None else h_kv * (n - 1)
        for row, n in zip(rows, lengths, strict=True)
    ]
    flat = torch.empty(sum(own), dtype=torch.int64, device=device).split(own)
    left = [
        None if row.held is None else x.view(1, h_kv, -1) if row.held.left is None else row.held.left
        for row, x in zip(rows, flat, strict=True)
    ]
    return sums, left


def fields(
    row: Row, base: Tensor, k: Tensor, v: Tensor, sums: Tensor, left: Tensor | None, more: int
) -> list[int]:  # fmt: skip
    """The numbers of a row, as the kernels read them."""
    (_, h, n), before = row.weights.shape, row.before
    assert row.weights.stride(2) == 1 and sums.stride(2) == 1, (row.weights.stride(), sums.stride())
    numbers = [
        row.owners, h // row.owners, REDUCTIONS.index(row.reduce),
        row.first, n, distance(row.weights, base), row.weights.stride(1), distance(sums, base), sums.stride(1), more,
        0, 0,
    ]  # fmt: skip
    if before is not None:
        assert before.shape[2] == n - 1 and before.stride(2) == 1, (before.shape, before.stride())
        numbers[-2:] = distance(before, base), before.stride(1)
    if row.held is None or left is None:
        return [*numbers, *[0] * (FIELDS - len(numbers))]
    held, kept = row.held, row.held.kept
    assert held.k.stride() == held.v.stride() and held.k.stride(2) == k.shape[3], (held.k.stride(), held.v.stride())
    assert left.stride(2) == 1 and (kept is None or kept.stride(2) == 1), (left.stride(), kept)
    return [
        *numbers, 1, *((0, 0) if kept is None else (kept.data_ptr(), kept.stride(1))), left.data_ptr(), left.stride(1),
        held.n_kept, held.start, row.low, row.stop, distance(held.k, k), distance(held.v, v), held.k.stride(1),
    ]  # fmt: skip


@jit
def positions_of(at, head, slot, real, age):
    """Positions of a row's slots."""
    kept, n_kept = tl.load(at + 13), tl.load(at + 17)
    those = kept.to(tl.pointer_type(tl.int64)) + head * tl.load(at + 14)
    named = tl.load(those + slot, real & (slot < n_kept) & (kept != 0), other=0)
    return tl.where(slot < n_kept, tl.where(kept == 0, slot, named), tl.load(at + 18) + age + slot - n_kept)


@jit(unspecialized=("start",))
def add_received(weights, lowest, table, clock, start, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of a block of slots, and the lowest of them that may go, in the upper half of a number below 0."""
    row, block, owner = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    age = steps_since(clock, start)
    at, slot = table + row * FIELDS, block * BLOCK + tl.arange(0, BLOCK)
    g, reduction = tl.load(at + 1), tl.load(at + 2)
    n = tl.where(owner < tl.load(at), tl.load(at + 4) + tl.load(at + 9) * age, 0)
    real = slot < n
    receives = real & (slot >= tl.load(at + 3) + age)
    mine, of_head = weights + tl.load(at + 5), tl.load(at + 6)
    total, highest = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in range(g):
        x = tl.load(mine + (owner * g + i) * of_head + slot, receives, other=0.0)
        total += x
        highest = tl.maximum(highest, x)
    received = tl.where(reduction == 2, highest, tl.where(reduction == 1, total / g, total))
    stride = tl.load(at + 11)
    if stride != 0:
        received += tl.load(weights + tl.load(at + 10) + owner * stride + slot, slot < n - 1, other=0.0)
    tl.store(weights + tl.load(at + 7) + owner * tl.load(at + 8) + slot, received, real)
    if tl.load(at + 12) != 0:
        position = positions_of(at, owner, slot, real, age)
        may_go = real & (position >= tl.load(at + 19)) & (position < tl.load(at + 20) + age)
        bits = received.to(tl.int32, bitcast=True).to(tl.int64)  # sums are not negative: their bits rise with them
        key = tl.where(may_go, (bits << 32) | (0x7FFFFFFF - position), 0x7FFFFFFFFFFFFFFF)
        least = tl.min(key, 0)
        found = lowest + ((row * tl.num_programs(2) + owner) * tl.num_programs(1) + block) * 2
        tl.store(found, least)
        tl.store(found + 1, tl.max(tl.where(key == least, slot, -1), 0).to(tl.int64))


@jit(unspecialized=("start",))
def evict_lowest(
    weights, k, v, lowest, evicted, table, clock, start, most_owners, n_blocks, d_h,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The newest token of a KV head takes the slot of the one that leaves."""
    row, head, h_kv = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at, every, age = table + row * FIELDS, tl.arange(0, BLOCKS), steps_since(clock, start)
    if tl.load(at + 12) != 0:
        n, owners = tl.load(at + 4), tl.load(at)
        owner = head * owners // h_kv
        last = n - 1
        found = lowest + ((row * most_owners + owner) * n_blocks + every) * 2
        there = every < n_blocks
        key = tl.load(found, there, other=0x7FFFFFFFFFFFFFFF)
        of_least = there & (key == tl.min(key, 0))
        hole = tl.max(tl.where(of_least, tl.load(found + 1, there, other=-1), -1), 0)
        one = tl.arange(0, 1)
        tl.store(evicted + row * h_kv + head + one, positions_of(at, head, hole + one, one < 1, age))
        newest = tl.max(positions_of(at, head, last + one, one < 1, age), 0)
        left = tl.load(at + 15)
        to = left.to(tl.pointer_type(tl.int64)) + head * tl.load(at + 16)
        tl.debug_barrier()  # positions may be written over those that were read
        if left == tl.load(at + 13):
            tl.store(to + hole + one, newest + one * 0, hole + one < last)
        else:
            for front in range(0, last, BLOCK):
                slot = front + tl.arange(0, BLOCK)
                those = positions_of(at, head, slot, slot < last, age)
                tl.store(to + slot, tl.where(slot == hole, newest, those), slot < last)
        column = tl.arange(0, WIDTH)
        stride, inside = tl.load(at + 23), column < d_h
        keys, values = k + tl.load(at + 21) + head * stride, v + tl.load(at + 22) + head * stride
        tl.store(keys + hole * d_h + column, tl.load(keys + last * d_h + column, inside), inside)
        tl.store(values + hole * d_h + column, tl.load(values + last * d_h + column, inside), inside)
        sums = weights + tl.load(at + 7) + owner * tl.load(at + 8)
        tl.store(sums + hole, tl.load(sums + last))
