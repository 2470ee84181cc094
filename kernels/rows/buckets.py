"""Buckets on a GPU: which tokens share one with a query in at least two tables, for all rows, and nobody waits.

`meet` hashes every query and counts, token by token, the tables in which their buckets meet; `weigh` gives a weight to
those that met twice. Tables, norms and keys lie in pinned memory of the host and are read where they are: of a table
the query's bucket, of keys those that were found. How many were found is not known to the host, so a selection has a
place for every token of the tables, in their order, and -1 where one was not found.

Shapes    q (n, h, 1, d_h); of each row idx (1, h, tokens) int64 and their log-weights alike, float32.
Checks    tests/kernels/test_collisions.py, against the CPU's search.

Not here: tables, and a CPU's search (`kernels/rows/collisions.py`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.jit import cdiv, distance, fit_rows, jit, lanes_of, power_of_2, tl, upload
from kvbench.kernels.rows.collisions import Tables

TILE, WEIGHED = 128, 32  # entries of a bucket, and tokens, that a program takes at once
ROW = 14  # numbers of a row, as the kernels read them


class Hidden(NamedTuple):
    """What one row is searched with."""

    tables: Tables  # pinned
    planes: Tensor  # (h_kv or 1, d_h, tables * bits) float32 on the device
    keys: Tensor  # (1, h_kv, s, d_h), pinned
    means: Tensor  # (h_kv, d_h) float32 on the device
    norms: Tensor  # (h_kv, n) float32, pinned
    first: int  # position of token 0
    n_found: Tensor  # (h,) int32 on the device, to which the finds of each head are added


def find_rows(q: Tensor, rows: Sequence[Hidden], least: float) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Each row's positions and log-weights, -log(chance + least); entries of buckets that heads read, (n, h) int32."""
    n, h, _, d_h = q.shape
    h_kv = rows[0].means.shape[0]
    q = q.contiguous()
    sizes = [row.tables.tokens.shape[2] for row in rows]
    longest, most_tables = max(sizes), max(row.tables.tokens.shape[1] for row in rows)
    found = [
        (torch.empty(1, h, size, dtype=torch.int64, device=q.device), torch.empty(1, h, size, device=q.device))
        for size in sizes
    ]
    numbers: list[int] = []
    for row, (idx, weights) in zip(rows, found, strict=True):
        tokens, starts = row.tables.tokens, row.tables.starts
        tensors = tokens, starts, row.planes, row.means, row.norms, row.n_found, idx, weights
        assert all(x.is_contiguous() for x in tensors), [x.stride() for x in tensors]
        assert row.keys.stride()[2:] == (d_h, 1), row.keys.stride()
        each = row.planes[0].numel() if len(row.planes) > 1 else 0
        numbers += [
            *(x.data_ptr() for x in tensors), distance(row.keys[0, 0, row.first :], q), row.keys.stride(1), each,
            tokens.shape[2], tokens.shape[1], row.tables.bits + (row.first << 8),
        ]  # fmt: skip
    table = upload(numbers, q.device)
    met = torch.zeros(n, h, longest + 1, dtype=torch.int32, device=q.device)  # and after the tokens the entries read
    most_bits = power_of_2(max(row.tables.bits for row in rows))
    width, g = power_of_2(d_h), h // h_kv
    meet[(n, h, most_tables)](q, table, met, longest + 1, d_h, g, ROW, width, most_bits, TILE)
    tokens, n_warps = fit_rows(width, WEIGHED)
    lanes = lanes_of(q, (d_h, *numbers[8::ROW], *numbers[9::ROW]))
    weigh[(n, cdiv(longest, tokens), h)](
        q, table, met, longest + 1, least, d_h, g, ROW, width, tokens, lanes, num_warps=n_warps
    )
    return found, met[..., -1]


@jit
def meet(q, table, met, s, d_h, g, ROW: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr):
    row, head, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at, h = table + row * ROW, tl.num_programs(1)
    n, n_tables, bits = tl.load(at + 11), tl.load(at + 12), tl.load(at + 13) & 255
    if which < n_tables:
        owner, column, one = (head // g).to(tl.int64), tl.arange(0, WIDTH), tl.arange(0, BITS)
        x = tl.load(q + (row * h + head) * d_h + column, column < d_h, other=0.0).to(tl.float32)
        planes = tl.load(at + 2).to(tl.pointer_type(tl.float32)) + owner * tl.load(at + 10)
        place = column[:, None] * (n_tables * bits) + (which * bits + one)[None]
        plane = tl.load(planes + place, (column < d_h)[:, None] & (one < bits)[None], other=0.0)
        is_set = (tl.sum(x[:, None] * plane, 0) > 0) & (one < bits)
        code = tl.sum(tl.where(is_set, 1 << one, 0), 0)
        of_table = owner * n_tables + which
        start = tl.load(at + 1).to(tl.pointer_type(tl.int32)) + of_table * ((1 << bits) + 1) + code
        begin, end = tl.load(start), tl.load(start + 1)
        tokens = tl.load(at).to(tl.pointer_type(tl.int32)) + of_table * n
        mine = met + (row * h + head).to(tl.int64) * s
        for first in range(begin, end, TILE):
            entry = first + tl.arange(0, TILE)
            token = tl.load(tokens + entry, entry < end, other=0)
            tl.atomic_add(mine + token, 1, mask=entry < end)
        tl.atomic_add(mine + s - 1, end - begin)


@jit
def weigh(
    q, table, met, s, least, d_h, g,
    ROW: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at, h = table + row * ROW, tl.num_programs(2)
    n, n_tables, last = tl.load(at + 11), tl.load(at + 12), tl.load(at + 13)
    bits, position = last & 255, last >> 8
    owner, column = (head // g).to(tl.int64), tl.arange(0, WIDTH)
    token = block * TILE + tl.arange(0, TILE)
    real, inside = token < n, column < d_h
    is_found = tl.load(met + (row * h + head).to(tl.int64) * s + token, real, other=0) >= 2
    x = tl.load(q + (row * h + head) * d_h + column, inside, other=0.0).to(tl.float32)
    keys = q + tl.multiple_of(tl.load(at + 8) + owner * tl.load(at + 9), LANES)
    where = token.to(tl.int64)[:, None] * d_h + column[None]
    key = tl.load(keys + where, is_found[:, None] & inside[None], other=0.0).to(tl.float32)
    mean = tl.load(tl.load(at + 3).to(tl.pointer_type(tl.float32)) + owner * d_h + column, inside, other=0.0)
    norms = tl.load(at + 4).to(tl.pointer_type(tl.float32)) + owner * n
    norm = tl.load(norms + token, is_found, other=0.0)
    lengths = norm * tl.sqrt(tl.sum(x * x, 0))
    inner = tl.sum(key * x[None], 1) - tl.sum(mean * x, 0)
    cosine = tl.where(lengths > 0, inner / tl.where(lengths > 0, lengths, 1.0), 0.0)
    weight = -tl.log(chance(cosine, bits, n_tables) + least)
    to = head.to(tl.int64) * n + token
    tl.store(tl.load(at + 6).to(tl.pointer_type(tl.int64)) + to, tl.where(is_found, position + token, -1), real)
    tl.store(tl.load(at + 7).to(tl.pointer_type(tl.float32)) + to, tl.where(is_found, weight.to(tl.float32), 0.0), real)
    tl.atomic_add(tl.load(at + 5).to(tl.pointer_type(tl.int32)) + head, tl.sum(is_found.to(tl.int32), 0))


@jit
def chance(cosine, bits, n_tables):
    """Chance that a key at this cosine shares a bucket in at least two tables, in float64: it may be far below 1."""
    x = tl.minimum(tl.maximum(cosine.to(tl.float64), -1.0), 1.0)
    size = tl.abs(x)
    # The arc cosine by formula 4.4.46 of Abramowitz and Stegun, to 2e-8.
    series = 0.0066700901 - 0.0012624911 * size
    series = 0.0308918810 + size * (-0.0170881256 + size * series)
    series = 0.0889789874 + size * (-0.0501743046 + size * series)
    series = 1.5707963050 + size * (-0.2145988016 + size * series)
    angle = tl.sqrt(1.0 - size) * series
    share = tl.where(x < 0, angle, 3.141592653589793 - angle) / 3.141592653589793
    one = tl.exp(bits.to(tl.float64) * tl.log(tl.maximum(share, 1e-30)))
    others = n_tables.to(tl.float64) - 1.0
    none = tl.where(one < 1.0, tl.exp(others * tl.log(tl.maximum(1.0 - one, 1e-30))), 0.0)
    return 1.0 - none * (1.0 + others * one)
