"""A cache of blocks that lies on the device: which of a step's tokens it has, and which blocks it takes in.

`look_up_rows` follows `union_rows`: of the distinct tokens of every KV head it finds those whose block is cached, says
where, and refills the cache as `engine/caches/blocks.py` does; `fill_rows` follows `fetch_rows`, which still reads what
the cache held before, and copies the blocks that came.

Shapes    blocks (6, n) int32, for each block what `BLOCK` names; slots (2, capacity) int32, what `SLOT` names; state
          (2,) int32: blocks that are cached, touches so far; found (rows, 3) int32: tokens that are there, the same as
          often as heads ask for them, blocks that came.
Checks    tests/kernels/test_blocks.py.

Not here: bytes (`engine/books/meter.py`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.gather import apart
from kvbench.kernels.jit import cdiv, distance, jit, lanes_of, power_of_2, tl, upload
from kvbench.kernels.rows.union import Ask, Far

TILE = 1024  # tokens, blocks or slots that are looked at at once
BLOCK = ("where", "frequency", "touched", "since", "gone", "wanted")  # slot or -1; the others count from 0
SLOT = ("owner", "came")  # block, and the selection that brought it
TOKENS = 16  # that one program copies


class Cached(NamedTuple):
    """One row's cache in one layer, and what it is asked for."""

    ask: Ask
    blocks: Tensor
    slots: Tensor
    state: Tensor
    k: Tensor  # (1, h_kv, capacity * block_len, d_h)
    v: Tensor
    block_len: int
    most: int  # blocks that a step may take in or touch
    lru: bool  # the longest unused block leaves, not the least frequent one
    n_ahead: int  # tokens before the first block
    n_complete: int  # blocks that may be taken in


def look_up_rows_triton(rows: Sequence[Cached], counts: Tensor, at: Sequence[int]) -> Tensor:
    """A program for each row. `counts` are those of `union_rows`, for these rows `at` which.

    `ask.sources` says where a token is: slot i is -2 - i.
    """
    device, h_kv = counts.device, counts.shape[1]
    found = torch.empty(len(rows), 3, dtype=torch.int32, device=device)
    numbers = [number for row, i in zip(rows, at, strict=True) for number in (*numbers_of(row, h_kv), i)]
    look_up[(len(rows),)](
        upload(numbers, device), counts, found, counts.shape[2], h_kv, len(numbers) // len(rows), TILE, num_warps=8
    )
    return found


def numbers_of(row: Cached, h_kv: int) -> tuple[int, ...]:
    ask, n_blocks, capacity = row.ask, row.blocks.shape[1], row.slots.shape[1]
    assert {x.dtype for x in (row.blocks, row.slots, row.state)} == {torch.int32}, "not int32"
    assert row.blocks.shape[0] == len(BLOCK) and row.slots.shape[0] == len(SLOT), "tables"
    return (
        ask.idx.data_ptr(), ask.idx.stride(1), ask.idx.shape[1] // h_kv, ask.idx.shape[2], ask.tokens.data_ptr(),
        ask.sources.data_ptr(), ask.tokens.shape[1], ask.epoch, row.blocks.data_ptr(), n_blocks, row.slots.data_ptr(),
        capacity, row.state.data_ptr(), row.block_len, row.most, int(row.lru), row.n_ahead, row.n_complete,
    )  # fmt: skip


def fill_rows_triton(rows: Sequence[Cached], far: Sequence[Far]) -> None:
    """A program for some tokens of a slot and KV head; most have nothing to do."""
    start, (_, h_kv, _, d_h) = far[0].k_near, far[0].k_near.shape
    d_v, numbers = apart(far[0].k_near, far[0].v_near), []
    for row, at in zip(rows, far, strict=True):
        k_late, v_late = at.late or (at.k, at.v)
        numbers += [
            row.slots.data_ptr(), row.slots.shape[1], row.ask.epoch, row.block_len, row.n_ahead,
            *(distance(x, start) for x in (row.k, row.v)), row.k.stride(1),
            *(distance(x, start) for x in (at.k, at.v)), at.k.stride(1), at.v.stride(1),
            *(distance(x, start) for x in (k_late, v_late)), k_late.stride(1), at.k.shape[2],
        ]  # fmt: skip
    fields = len(numbers) // len(rows)
    most = max(row.slots.shape[1] * cdiv(row.block_len, TOKENS) for row in rows)
    lanes = lanes_of(start, (d_h, d_v, *(x for i in range(5, 15) for x in numbers[i::fields])))
    fill[(most, h_kv, len(rows))](
        start, upload(numbers, start.device), d_h, d_v, fields, TOKENS, power_of_2(d_h), power_of_2(d_v), lanes,
        num_warps=8 if max(d_h, d_v) > 512 else 4,  # of latents 4 would spill on sm_80
    )  # fmt: skip


@jit
def look_up(rows, counts, found, n_counts, h_kv, FIELDS: tl.constexpr, TILE: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, TILE)
    at = rows + row * FIELDS
    idx, stride = tl.load(at).to(tl.pointer_type(tl.int64)), tl.load(at + 1)
    per_head, k = tl.load(at + 2).to(tl.int32), tl.load(at + 3).to(tl.int32)
    tokens, sources = tl.load(at + 4).to(tl.pointer_type(tl.int32)), tl.load(at + 5).to(tl.pointer_type(tl.int32))
    room, epoch = tl.load(at + 6), tl.load(at + 7).to(tl.int32)
    where, n_blocks = tl.load(at + 8).to(tl.pointer_type(tl.int32)), tl.load(at + 9).to(tl.int32)
    owner, capacity = tl.load(at + 10).to(tl.pointer_type(tl.int32)), tl.load(at + 11).to(tl.int32)
    state, block_len = tl.load(at + 12).to(tl.pointer_type(tl.int32)), tl.load(at + 13).to(tl.int32)
    most, lru = tl.load(at + 14).to(tl.int32), tl.load(at + 15)
    n_ahead, n_complete = tl.load(at + 16).to(tl.int32), tl.load(at + 17).to(tl.int32)
    frequency, touched = where + n_blocks, where + 2 * n_blocks
    since, gone, wanted, came = where + 3 * n_blocks, where + 4 * n_blocks, where + 5 * n_blocks, owner + capacity
    n_there, n_asked, n_came = tl.program_id(0) * 0, tl.program_id(0) * 0, tl.program_id(0) * 0

    # What is there, and how many tokens of each block are wanted.
    for head in range(h_kv):
        n = tl.load(counts + (tl.load(at + 18) * h_kv + head) * n_counts + 1)
        for first in range(0, n, TILE):
            real = first + lane < n
            token = tl.load(tokens + head * room + first + lane, real, other=0) - n_ahead
            block = tl.where(real, token // block_len, 0)
            slot = tl.load(where + block, real, other=-1)
            there = real & (slot >= 0)
            tl.store(sources + head * room + first + lane, -2 - slot * block_len - token % block_len, there)
            tl.atomic_add(wanted + block, tl.full((TILE,), 1, tl.int32), mask=real)
            n_there += tl.sum(there.to(tl.int32), 0)
    for first in range(0, h_kv * per_head * k, TILE):
        place = first + lane
        inside = place < h_kv * per_head * k
        token = tl.load(idx + place // k * stride + place % k, inside, other=-1).to(tl.int32)
        real = token >= 0
        slot = tl.load(where + tl.where(real, (token - n_ahead) // block_len, 0), real, other=-1)
        n_asked += tl.sum((slot >= 0).to(tl.int32), 0)
    tl.debug_barrier()

    # The most wanted blocks, lower ones first among equals.
    n_cached, clock = tl.load(state), tl.load(state + 1)
    for _ in range(most):
        best, chosen = tl.program_id(0) * 0, tl.program_id(0) * 0
        for first in range(0, n_blocks, TILE):
            count = tl.load(wanted + first + lane, first + lane < n_blocks, other=0, cache_modifier=".cg")
            here = tl.max(count, 0)
            lowest = tl.min(tl.where(count == here, first + lane, n_blocks), 0)
            chosen = tl.where(here > best, lowest, chosen)
            best = tl.maximum(best, here)
        if best > 0:
            tl.store(wanted + chosen, 0)
            if chosen < n_complete:
                slot = tl.load(where + chosen)
                tl.debug_barrier()  # one thread stores there below, and all warps decide by what was there
                if slot < 0:
                    slot = n_cached
                    if n_cached == capacity:  # the rarest or oldest makes room, the longest unused among equals
                        least = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
                        for first in range(0, capacity, TILE):
                            inside = first + lane < capacity
                            block = tl.load(owner + first + lane, inside, other=0)
                            rare = tl.load(frequency + block, inside, other=0).to(tl.int64)
                            used = tl.load(touched + block, inside, other=0).to(tl.int64)
                            key = tl.where(inside, tl.where(lru > 0, used, (rare << 32) + used), 0x7FFFFFFFFFFFFFFF)
                            lowest_key = tl.min(key, 0)
                            place = tl.min(tl.where(key == lowest_key, first + lane, capacity), 0)
                            slot = tl.where(lowest_key < least, place, slot)
                            least = tl.minimum(least, lowest_key)
                        leaving = tl.load(owner + slot)
                        tl.store(where + leaving, -1)
                        tl.store(frequency + leaving, 0)
                        tl.store(gone + leaving, epoch)
                    else:
                        n_cached += 1
                    # A block that left in this very step was there before: it is copied, and did not come.
                    was_there = (tl.load(gone + chosen) == epoch) & (tl.load(since + chosen) < epoch)
                    tl.store(since + chosen, tl.where(was_there, tl.load(since + chosen), epoch))
                    tl.store(owner + slot, chosen)
                    tl.store(came + slot, epoch)
                    tl.store(where + chosen, slot)
                clock += 1
                tl.store(frequency + chosen, tl.load(frequency + chosen) + 1)
                tl.store(touched + chosen, clock)
        tl.debug_barrier()
    for first in range(0, n_blocks, TILE):
        tl.store(wanted + first + lane, tl.zeros((TILE,), tl.int32), first + lane < n_blocks)
    for first in range(0, n_cached, TILE):
        inside = first + lane < n_cached
        block = tl.load(owner + first + lane, inside, other=0)
        n_came += tl.sum((inside & (tl.load(since + block, inside, other=0) == epoch)).to(tl.int32), 0)
    tl.store(state, n_cached)
    tl.store(state + 1, clock)
    tl.store(found + row * 3, n_there)
    tl.store(found + row * 3 + 1, n_asked)
    tl.store(found + row * 3 + 2, n_came)


@jit
def fill(
    start, rows, d_h, d_v, FIELDS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    head, at = tl.program_id(1).to(tl.int64), rows + tl.program_id(2) * FIELDS
    owner, capacity = tl.load(at).to(tl.pointer_type(tl.int32)), tl.load(at + 1).to(tl.int32)
    epoch, block_len, n_ahead = tl.load(at + 2).to(tl.int32), tl.load(at + 3).to(tl.int32), tl.load(at + 4)
    per_block = tl.cdiv(block_len, TOKENS)
    slot, part = tl.program_id(0) // per_block, tl.program_id(0) % per_block
    came = tl.load(owner + capacity + slot, slot < capacity, other=-1)
    if came == epoch:
        place, column = part * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
        token = n_ahead + tl.load(owner + slot).to(tl.int64) * block_len + place
        stride, late_stride, s = tl.load(at + 7), tl.load(at + 14), tl.load(at + 15)
        is_late = token >= s
        early, behind = tl.where(is_late, 0, token), tl.where(is_late, token - s, 0)
        k = tl.multiple_of(tl.load(at + 8) + head * tl.load(at + 10), LANES)
        v = tl.multiple_of(tl.load(at + 9) + head * tl.load(at + 11), LANES)
        k_late = tl.multiple_of(tl.load(at + 12) + head * late_stride, LANES)
        v_late = tl.multiple_of(tl.load(at + 13) + head * (late_stride // d_h * d_v), LANES)
        k_held = tl.multiple_of(tl.load(at + 5) + head * stride, LANES)
        v_held = tl.multiple_of(tl.load(at + 6) + head * (stride // d_h * d_v), LANES)
        from_k = tl.where(is_late, k_late + behind * d_h, k + early * d_h)
        from_v = tl.where(is_late, v_late + behind * d_v, v + early * d_v)
        real, of_value = (place < block_len)[:, None] & (column < d_h)[None], tl.arange(0, VALUES)
        in_value = (place < block_len)[:, None] & (of_value < d_v)[None]
        to = slot.to(tl.int64) * block_len + place
        key = tl.load(start + from_k[:, None] + column[None], real, other=0.0)
        value = tl.load(start + from_v[:, None] + of_value[None], in_value, other=0.0)
        tl.store(start + k_held + to[:, None] * d_h + column[None], key, real)
        tl.store(start + v_held + to[:, None] * d_v + of_value[None], value, in_value)
