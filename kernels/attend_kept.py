"""Causal attention of a whole prompt over a few columns and diagonals of each head, as a sparse prefill keeps them.

Shapes    q (1, h, s, d_h); k and v (1, h_kv, s, d_h); vertical (h, s) bool; met (h, s + block - 1) bool, whether the
          block from query `first` on meets column c at first - c + block - 1 -> out as q, pairs (h, blocks) int64.
Paths     Triton on a GPU, in one launch that nothing waits for; on a CPU `engine/sparse.py` does it in torch.
Checks    tests/kernels/test_attend_kept.py.

A program lists the columns of a block and head into a room of its own, then attends to them tile by tile. Programs are
as many as fill the device, and each takes blocks in turns, the last ones first, which are the longest.

Not here: which columns and diagonals are kept.
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jit import INTERPRETED, cdiv, jit, power_of_2, tl, triton

PROGRAMS = 528  # four for each of the 132 processors of an H100; a room of 4 bytes a token for each
LISTED, TILE = 1024, 64  # columns looked at, and columns attended to, at a time
TILE_OF_WIDE = 32  # of heads of 128 channels and more, whose 64 columns sm_100 has no registers for


def takes_triton(q: Tensor) -> bool:
    """Whether the kernel can work on such tensors; of float32 the registers hold too little."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and triton is not None


def attend_kept_triton(
    q: Tensor, k: Tensor, v: Tensor, scale: float, vertical: Tensor, met: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """The output, and how many pairs of query and key each block and head computed."""
    (_, h, s, d_h), h_kv = q.shape, k.shape[1]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    blocks = cdiv(s, block)
    out, pairs = torch.empty_like(q), torch.empty(h, blocks, dtype=torch.int64, device=q.device)
    programs, width = min(PROGRAMS, h * blocks), power_of_2(d_h, 16)
    room = torch.empty(programs, s, dtype=torch.int32, device=q.device)
    attend_listed[(programs,)](
        q, k, v, vertical.view(torch.uint8), met.contiguous().view(torch.uint8), room, out, pairs,
        scale, s, d_h, h, h // h_kv, blocks, block, programs,
        power_of_2(block, 16), width, LISTED, TILE_OF_WIDE if width >= 128 else TILE, INTERPRETED,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out, pairs


@jit
def attend_listed(
    q, k, v, vertical, met, room, out, pairs, scale, s, d_h, h, g, blocks, block, programs,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr,  # float32 products, since Triton's interpreter takes bfloat16 for its bits
):  # fmt: skip
    program = tl.program_id(0)
    listed = room + program.to(tl.int64) * s
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = column < d_h
    for work in range(program, h * blocks, programs):
        number, head = blocks - 1 - work // h, (work % h).to(tl.int64)
        first = number * block
        stop = tl.minimum(first + block, s)
        n, n_pairs = 0, 0
        for start in range(0, stop, LISTED):
            token = start + tl.arange(0, LISTED)
            there = token < stop
            is_vertical = tl.load(vertical + head * s + token, there, other=0)
            is_met = tl.load(met + head * (s + block - 1) + first - token + block - 1, there, other=0)
            keep = (there & ((is_vertical | is_met) != 0)).to(tl.int32)
            tl.store(listed + n + tl.cumsum(keep, 0) - 1, token, keep != 0)
            n += tl.sum(keep, 0)
            n_pairs += tl.sum(keep * (stop - tl.maximum(token, first)), 0)
        tl.store(pairs + head * blocks + number, n_pairs)
        tl.debug_barrier()  # the list is read by other threads than wrote it
        query = first + row
        real = query < stop
        queries = tl.load(q + (head * s + query[:, None]) * d_h + column[None], real[:, None] & inside[None], other=0.0)
        if WIDE:
            queries = queries.to(tl.float32)
        highest = tl.full((ROWS,), -1e30, tl.float32)  # finite: nothing minus nothing would be no number
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        owner = head // g * s
        for start in range(0, n, TILE):
            place = start + tl.arange(0, TILE)
            token = tl.load(listed + place, place < n, other=0)
            mask = (place < n)[:, None] & inside[None]
            where = (owner + token[:, None]) * d_h + column[None]
            keys = tl.load(k + where, mask, other=0.0)
            if WIDE:
                keys = keys.to(tl.float32)
            seen = (place < n)[None] & (token[None] <= query[:, None])
            logits = tl.where(seen, tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale, -1e30)
            higher = tl.maximum(highest, tl.max(logits, 1))
            weights = tl.where(seen, tl.exp(logits - higher[:, None]), 0.0)
            shrink = tl.exp(highest - higher)
            values = tl.load(v + where, mask, other=0.0)
            if WIDE:
                values = values.to(tl.float32)
            acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            total = total * shrink + tl.sum(weights, 1)
            highest = higher
        joined = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + (head * s + query[:, None]) * d_h + column[None],
            joined.to(out.dtype.element_ty),
            real[:, None] & inside[None],
        )
        tl.debug_barrier()  # the next block lists into the same room
