"""Scores of tokens by their codes: inner products of a query with all centroids, looked up and added up.

`pq_top` is a decode step's choice by the products that `pq_tables` makes: a softmax of every query head over all
candidates, added up over the heads of a group, and the k tokens with the highest sum, lower indices first among equals.
Logits bend towards `cap`, if it is not 0, and compete with `sink` (h,), if there is one.
`pq_keys` are what a GPU chooses by for all rows of a class at once; it codes their newest tokens on the way. It reads
codes where they lie, pinned memory of the host included: a program reads those of its tokens once, as whole words.

Shapes    q (..., h, d_h), centroids (h_kv, m, c, d_m), tables (..., h, m, c) float32, codes (h_kv, m, >= n) uint8 or
          `PackedCodes`; idx (h_kv, k), or (h, k) where query heads choose for themselves, int64, in no order.
Paths     C++ on a CPU, for the sum of softmaxes without cap and sink; Triton's keys on a GPU; torch for the rest.
Checks    tests/kernels/test_pq_scores.py, benchmarks/bench_pq_scores.py.

Not here: codes (`pq_codes.py`), attention over what was chosen (`select_attend.py`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.build import library, remembered
from kvbench.kernels.capped import bend, capped, with_sink
from kvbench.kernels.choices import MERGES
from kvbench.kernels.clock import Since, now, steps_since
from kvbench.kernels.jit import cdiv, distance, jit, power_of_2, tl, upload
from kvbench.kernels.pq_codes import PackedCodes
from kvbench.kernels.rows.logits import weigh_rows
from kvbench.kernels.scratch import finer
from kvbench.kernels.topk import pack_keys_ref, top_stable_ref


def pq_tables(q: Tensor, centroids: Tensor) -> Tensor:
    """Inner products of all centroids with the query's part that belongs to them."""
    h_kv, m, c, d_m = centroids.shape
    parts = q.float().view(*q.shape[:-2], h_kv, -1, m, d_m).transpose(-3, -2)  # (..., h_kv, m, g, d_m)
    return (parts @ centroids.float().mT).transpose(-3, -2).reshape(*q.shape[:-1], m, c)


def pq_top(
    tables: Tensor, codes: PackedCodes | Tensor, n: int, k: int, scale: float,
    merge: str = "softmax_sum", cap: float = 0.0, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Indices of the chosen ones among the first n tokens: all, if k >= n. Codes of another memory are read there."""
    if (there := codes_of(codes).device) != tables.device:
        sink = None if sink is None else sink.to(there)
        return pq_top(tables.to(there), codes, n, k, scale, merge, cap, sink).to(tables.device)
    if merge == "softmax_sum" and takes_native(codes) and not cap and sink is None:
        return pq_top_native(tables, codes, n, k, scale)
    return pq_top_ref(tables, codes, n, k, scale, merge, cap, sink)


def pq_logits_ref(q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int) -> Tensor:
    """Unscaled sums of table entries over parts, part by part from the first: (h, n) float32."""
    return sum_entries(pq_tables(q, centroids), codes, n)


def sum_entries(tables: Tensor, codes: PackedCodes | Tensor, n: int) -> Tensor:
    """Tables (h, m, c) read at codes, in the tables' dtype: (h, n)."""
    rows = (codes.codes(0, n) if isinstance(codes, PackedCodes) else codes[..., :n]).long()
    rows = rows.repeat_interleave(len(tables) // len(rows), 0)
    logits = tables[:, 0].gather(-1, rows[:, 0])
    for j in range(1, rows.shape[1]):
        logits += tables[:, j].gather(-1, rows[:, j])
    return logits


def pq_top_ref(
    tables: Tensor, codes: PackedCodes | Tensor, n: int, k: int, scale: float,
    merge: str = "softmax_sum", cap: float = 0.0, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Weights in float64 from the float32 tables, so that rounding decides nothing; then a stable sort."""
    logits = capped(sum_entries(finer(tables), codes, n) * scale, cap)
    return top_stable_ref(merged(logits, len(codes_of(codes)), merge, sink), min(k, n))


def merged(logits: Tensor, h_kv: int, merge: str, sink: Tensor | None = None) -> Tensor:
    """Scores that tokens are chosen by, (h_kv or h, n)."""
    assert merge in MERGES, f"merge={merge!r}; one of {MERGES}"
    if merge == "per_query_head":
        return logits
    grouped = logits.unflatten(0, (h_kv, -1))  # (h_kv, g, n)
    if merge == "logit_sum":
        return grouped.sum(1)
    weights = grouped.softmax(-1)
    if sink is not None:
        weights *= (grouped.logsumexp(-1) - sink.to(grouped).view(h_kv, -1)).sigmoid().unsqueeze(-1)
    return weights.sum(1) if merge == "softmax_sum" else weights.amax(1)


def codes_of(codes: PackedCodes | Tensor) -> Tensor:
    """The memory that codes are in."""
    return codes.data if isinstance(codes, PackedCodes) else codes


def are_bytes(codes: PackedCodes | Tensor) -> bool:
    """Whether the fast paths can read them."""
    data = codes_of(codes)
    return data.dtype == torch.uint8 and data.stride(-1) == 1


# On a CPU.


def takes_native(codes: PackedCodes | Tensor) -> bool:
    """Whether the C++ can read such codes."""
    return codes_of(codes).device.type == "cpu" and are_bytes(codes) and native() is not None


@remembered
def native() -> Any:
    """The C functions, or None."""
    lib = library("pq_scores")
    if lib is not None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        lib.pq_top.argtypes = [
            size, size, size, size, pointer, pointer, size, size, size, size, size, ctypes.c_double, pointer, size
        ]  # fmt: skip
        lib.pq_top.restype = size
    return lib


def packed_codes(codes: PackedCodes | Tensor, n: int) -> tuple[int, int, int, int]:
    """Where codes lie, the strides of heads and parts, and how many bit planes they have: none if they are bytes."""
    is_packed = isinstance(codes, PackedCodes)
    held, planes = (codes.n, codes.b % 8) if is_packed else (codes.shape[-1], 0)
    assert n <= held, f"{n} of {held} tokens"
    data = codes_of(codes)
    assert are_bytes(codes), (data.dtype, data.stride())
    return data.data_ptr(), data.stride(0), data.stride(1), planes


def pq_top_native(tables: Tensor, codes: PackedCodes | Tensor, n: int, k: int, scale: float) -> Tensor:
    """Ascending indices of the `k` best; no score is stored where there are fewer joint values than tokens."""
    h_kv, entries = len(codes_of(codes)), tables.contiguous()
    if k >= n:
        return torch.arange(n).expand(h_kv, n)
    idx = torch.empty(h_kv, k, dtype=torch.int64)
    if k <= 0:
        return idx
    assert scale > 0, scale
    h, m, c = entries.shape
    told = native().pq_top(
        h, h_kv, m, c, entries.data_ptr(), *packed_codes(codes, n), n, k, scale, idx.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    # Where weights are too small for float64, or not numbers, the reference has to say.
    return idx if told else pq_top_ref(tables, codes, n, k, scale)


# On a GPU. Weights are float32 there: scores that differ by less than its rounding may change places.

TABLE = 8192  # numbers of centroids that a program works on at once, with a warp for so many:
OF_WARP = 512  # of more registers spill (`kernels/aot.py`)
WORDS = 128  # of 64 bits of codes that a program reads, one for each of its threads
ROW = 8  # numbers of a row, as the kernels read them


class Coded(NamedTuple):
    """The quantised candidates of one row."""

    centroids: Tensor  # (h_kv, m, c, d_m) float32
    codes: PackedCodes
    start: int  # position of the first candidate, which has the first code
    stop: int  # after the last one
    newest: int = -1  # as which of the codes' tokens the newest one is stored; -1: it is not
    grows: bool = False  # one candidate more at every step


class Table(NamedTuple):
    """What kernels are told of rows whose quantisers have one shape, for steps to come too.

    At each every row gets one token, and a code for it where it stores them.
    """

    numbers: Tensor
    start: Tensor  # the first row's centroids, from which they count where centroids lie
    b: int
    n: int  # candidates of the row with most, at the last step that is told
    s: int  # position after the last candidate of all


def table_of(rows: Sequence[Coded], device: torch.device, ahead: int = 0) -> Table:
    """The table of rows, with room for so many steps to come."""
    start, b = rows[0].centroids, rows[0].codes.b
    numbers = list[int]()
    for row in rows:
        data, (head, part, _) = row.codes.data, row.codes.data.stride()
        assert row.centroids.shape == start.shape and row.codes.b == b, "of another shape"
        assert row.stop - row.start <= row.codes.n + (row.newest >= 0), "candidates without a code"
        numbers += [data.data_ptr(), head // 8, part // 8, distance(row.centroids, start), row.newest]
        numbers += [row.start, row.stop, int(row.grows)]
    ends = [(row.stop + ahead * row.grows, row.start) for row in rows]
    n, s = max(stop - first for stop, first in ends), max(stop for stop, _ in ends)
    return Table(upload(numbers, device), start, b, n, s)


def pq_keys_ref(
    q: Tensor, keys: Tensor, rows: Sequence[Coded], scale: float, cap: float = 0.0, sink: Tensor | None = None
) -> list[Tensor]:
    """Row by row: keys (1, h_kv, n) each. The newest keys (n_rows, h_kv, 1, d_h) are not coded."""
    found = []
    for i, row in enumerate(rows):
        logits = capped(pq_logits_ref(q[i, :, 0], row.centroids, row.codes, row.stop - row.start) * scale, cap)
        scores = merged(logits, len(row.centroids), "softmax_sum", sink)
        positions = torch.arange(row.start, row.stop, device=q.device)
        found.append(pack_keys_ref(scores, positions).unsqueeze(0))
    return found


def pq_keys_triton(
    q: Tensor, keys: Tensor, told: Table, scale: float, cap: float = 0.0, sink: Tensor | None = None,
    since: Since | None = None,
) -> Tensor:  # fmt: skip
    """Three launches for all rows: (n, h_kv, s) int64. The newest keys (n, h_kv, 1, d_h) are coded as rows say."""
    (h_kv, m, c, d_m), (n, h), since = told.start.shape, q.shape[:2], now(q.device) if since is None else since
    g, planes, width = h // h_kv, told.b % 8, power_of_2(d_m)
    entries = torch.empty(n, h, m, c, dtype=torch.float32, device=q.device)
    some = min(power_of_2(c), max(1, TABLE // width))
    tables_of_rows[(n, h_kv, m)](
        q.contiguous(), keys.contiguous(), told.start, told.numbers, entries, *since, c, d_m, g,
        ROW, planes, some, width, num_warps=max(4, some * width // OF_WARP),
    )  # fmt: skip
    parts, wide = power_of_2(m), power_of_2(max(1, planes))
    units, span = max(1, WORDS // (parts * wide)), 64 if planes else 8  # tokens of a word, or of as many as planes
    n_blocks = cdiv(told.n, units * span)
    logits = torch.empty(n, h, told.s, dtype=torch.float32, device=q.device)
    lses = torch.empty(n, h, n_blocks, dtype=torch.float32, device=q.device)
    add_entries[(n, n_blocks, h_kv)](
        entries, told.numbers, logits, lses, *since, scale, cap, told.s, m, c, g,
        ROW, planes, wide, parts, units, span, cap > 0,
    )  # fmt: skip
    return weigh_rows(logits, with_sink(lses, sink), told.numbers, ROW, h_kv, "group_sum", since)


@jit(unspecialized=("start",))
def tables_of_rows(
    q, keys, centroids, table, entries, clock, start, c, d_m, g,
    ROW: tl.constexpr, PLANES: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Inner products of a part's centroids with a group's queries, and the code of that part of the newest key."""
    row, head, part, m = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    at, h_kv = table + row * ROW, tl.num_programs(1)
    column, newest = tl.arange(0, WIDTH), tl.load(at + 4)
    inside = column < d_m
    least, nearest = head * 0.0 + float("inf"), head * 0
    for low in range(0, c, C):
        centroid = low + tl.arange(0, C)
        real = centroid < c
        where = ((head * m + part) * c + centroid)[:, None] * d_m + column[None]
        x = tl.load(centroids + tl.load(at + 3) + where, real[:, None] & inside[None], other=0.0)
        for i in range(g):
            query_head = (row * h_kv + head) * g + i
            query = tl.load(q + (query_head * m + part) * d_m + column, inside, other=0.0).to(tl.float32)
            tl.store(entries + (query_head * m + part) * c + centroid, tl.sum(x * query[None], 1), real)
        if newest >= 0:
            key = tl.load(keys + ((row * h_kv + head) * m + part) * d_m + column, inside, other=0.0).to(tl.float32)
            apart = tl.where(inside[None], x - key[None], 0.0)
            far = tl.where(real, tl.sum(apart * apart, 1), float("inf"))
            here = tl.min(far, 0)
            nearest = tl.where(here < least, tl.min(tl.where(far == here, centroid, low + C), 0), nearest)
            least = tl.minimum(least, here)
    if newest >= 0:
        words = head * tl.load(at + 1) + part * tl.load(at + 2)
        codes, token = tl.load(at).to(tl.pointer_type(tl.uint8)) + 8 * words, newest + steps_since(clock, start)
        if PLANES == 0:
            tl.store(codes + token, nearest.to(tl.uint8))
        else:
            first = codes + token // 64 * (8 * PLANES) + token % 64 // 8
            for j in range(PLANES):
                byte = tl.load(first + 8 * j).to(tl.int32)
                tl.store(first + 8 * j, (byte | (((nearest >> j) & 1) << (token % 8).to(tl.int32))).to(tl.uint8))


@jit(unspecialized=("start", "s"))
def add_entries(
    entries, table, logits, lses, clock, start, scale, cap, s, m, c, g,
    ROW: tl.constexpr, PLANES: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, UNITS: tl.constexpr,
    SPAN: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Logits of some of a row's tokens for the query heads of a KV head, and their log-sum-exps."""
    row, block, owner, h_kv = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    at, part, each = table + row * ROW, tl.arange(0, PARTS), tl.arange(0, SPAN)
    unit, first = block * UNITS + tl.arange(0, UNITS), tl.load(at + 5)
    n = tl.load(at + 6) + steps_since(clock, start) * tl.load(at + 7) - first
    words = tl.load(at).to(tl.pointer_type(tl.int64)) + owner * tl.load(at + 1) + part * tl.load(at + 2)
    token, is_part, there = unit[:, None] * SPAN + each[None], part < m, unit * SPAN < n
    # All words of the program by one load, since nothing keeps what comes from the host.
    if PLANES == 0:
        word = tl.load(words[:, None] + unit[None], is_part[:, None] & there[None], other=0)
        code = ((word[:, :, None] >> (8 * each)[None, None].to(tl.int64)) & 255).to(tl.int32)
    else:
        plane = tl.arange(0, WIDE)
        at_unit = words[:, None, None] + (unit * PLANES)[None, :, None]
        real = is_part[:, None, None] & there[None, :, None] & (plane < PLANES)[None, None]
        word = tl.load(at_unit + plane[None, None], real, other=0)
        bits = (word[:, :, :, None] >> each[None, None, None].to(tl.int64)) & 1
        code = tl.sum(bits.to(tl.int32) << plane[None, None, :, None], 2)
    both = is_part[:, None, None] & (token < n)[None]
    for i in range(g):
        query_head = (row * h_kv + owner) * g + i
        where = ((query_head * m + part) * c)[:, None, None] + code
        x = tl.sum(tl.load(entries + where, both, other=0.0), 0) * scale
        if CAPPED:
            x = bend(x, cap)
        tl.store(logits + query_head * s + first + token, x, token < n)
        x = tl.where(token < n, x, float("-inf"))
        highest = tl.max(tl.max(x, 1), 0)
        safe = tl.where(highest > -1e30, highest, 0.0)
        total = tl.sum(tl.sum(tl.exp(x - safe), 1), 0)  # 0 where a row has no token here
        lse = tl.where(total > 0, safe + tl.log(tl.maximum(total, 1e-30)), float("-inf"))
        tl.store(lses + query_head * tl.num_programs(1) + block, lse)
