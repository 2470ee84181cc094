"""Scores of tokens by their codes: inner products of a query with all centroids, looked up and added up.

`pq_top` is a decode step's choice: a softmax of every query head over all candidates, added up over the heads of a
group, and the k tokens with the highest sum, lower indices first among equals.
Logits bend towards `cap`, if it is not 0, and compete with `sink` (h,), if there is one.
`pq_keys` are what a GPU chooses by for all rows of a class at once; it codes their newest tokens on the way.

Shapes    q (h, d_h), centroids (h_kv, m, c, d_m), codes (h_kv, m, >= n) uint8 or `PackedCodes`; idx (h_kv, k), or
          (h, k) where query heads choose for themselves, int64, in no order.
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
from kvbench.kernels.jit import cdiv, constants, distance, jit, power_of_2, tl
from kvbench.kernels.pq_codes import PackedCodes
from kvbench.kernels.scratch import Scratch, empty, finer
from kvbench.kernels.topk import pack_key, pack_keys_ref, top_stable_ref


def pq_tables(q: Tensor, centroids: Tensor) -> Tensor:
    """Inner products of all centroids with the query's part that belongs to them: (h, m, c) float32."""
    h_kv, m, c, d_m = centroids.shape
    parts = q.float().view(h_kv, -1, m, d_m).transpose(1, 2)  # (h_kv, m, g, d_m)
    return (parts @ centroids.float().mT).transpose(1, 2).reshape(len(q), m, c)


def pq_top(
    q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int, k: int, scale: float,
    merge: str = "softmax_sum", cap: float = 0.0, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Indices of the chosen ones among the first n tokens: all, if k >= n. Codes of another memory are read there."""
    if (there := codes_of(codes).device) != q.device:
        sink = None if sink is None else sink.to(there)
        return pq_top(q.to(there), centroids.to(there), codes, n, k, scale, merge, cap, sink).to(q.device)
    if merge == "softmax_sum" and takes_native(codes) and not cap and sink is None:
        return pq_top_native(q, centroids, codes, n, k, scale)
    return pq_top_ref(q, centroids, codes, n, k, scale, merge, cap, sink)


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
    q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int, k: int, scale: float,
    merge: str = "softmax_sum", cap: float = 0.0, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Weights in float64 from the float32 tables, so that rounding decides nothing; then a stable sort."""
    logits = capped(sum_entries(finer(pq_tables(q, centroids)), codes, n) * scale, cap)
    return top_stable_ref(merged(logits, len(centroids), merge, sink), min(k, n))


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


def pq_top_native(q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int, k: int, scale: float) -> Tensor:
    """Ascending indices of the `k` best; no score is stored where there are fewer joint values than tokens."""
    h_kv = len(centroids)
    if k >= n:
        return torch.arange(n).expand(h_kv, n)
    idx = torch.empty(h_kv, k, dtype=torch.int64)
    if k <= 0:
        return idx
    assert scale > 0, scale
    entries = pq_tables(q, centroids).contiguous()
    h, m, c = entries.shape
    told = native().pq_top(
        h, h_kv, m, c, entries.data_ptr(), *packed_codes(codes, n), n, k, scale, idx.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    # Where weights are too small for float64, or not numbers, the reference has to say.
    return idx if told else pq_top_ref(q, centroids, codes, n, k, scale)


# On a GPU. Weights are float32 there: scores that differ by less than its rounding may change places.

TABLE = 8192  # numbers of centroids that a program works on at once, with a warp for so many:
OF_WARP = 512  # of more registers spill (`kernels/aot.py`)
TOKENS = 256  # of one program
NEVER = 1 << 62  # more steps than any answer has


class Coded(NamedTuple):
    """The quantised candidates of one row."""

    centroids: Tensor  # (h_kv, m, c, d_m) float32
    codes: PackedCodes  # where the scores are made
    n: int  # candidates
    first: int  # position of the first one
    home: PackedCodes | None = None  # where the newest token's code is stored, None: it is not
    at: int = 0  # as which of its tokens
    grows: bool = True  # one candidate more at every step


def pq_keys_ref(
    q: Tensor, keys: Tensor, rows: Sequence[Coded], scale: float, cap: float = 0.0, sink: Tensor | None = None
) -> list[Tensor]:
    """Row by row: keys (1, h_kv, n) each. The newest keys (n_rows, h_kv, 1, d_h) are not coded."""
    found = []
    for i, row in enumerate(rows):
        logits = capped(pq_logits_ref(q[i, :, 0], row.centroids, row.codes, row.n) * scale, cap)
        scores = merged(logits, len(row.centroids), "softmax_sum", sink)
        positions = torch.arange(row.first, row.first + row.n, device=q.device)
        found.append(pack_keys_ref(scores, positions).unsqueeze(0))
    return found


def pq_keys_triton(
    q: Tensor, keys: Tensor, rows: Sequence[Coded], scale: float, cap: float = 0.0, sink: Tensor | None = None
) -> Tensor:
    """Three launches for all rows whose quantisers have one shape: (n, h_kv, most candidates) int64."""
    search = KeySearch(q, rows, scale, cap, sink)
    return search.find(q, keys)


def pq_tables_triton(q: Tensor, keys: Tensor, rows: Sequence[Coded]) -> None:
    """Nothing but the codes of the newest keys (n, h_kv, 1, d_h), stored where a row has a `home` for them."""
    KeySearch(q, rows, 1.0).look_up(q.contiguous(), keys.contiguous(), now(q.device))


def steps_left(rows: Sequence[Coded]) -> int:
    """For how many steps more there is room for codes."""
    homes = [row.home.capacity - row.at - 1 for row in rows if row.home is not None]
    codes = [row.codes.n - row.n for row in rows if row.grows and row.home is None]
    return min([*homes, *codes], default=NEVER)


class KeySearch:
    """What the kernels are told of rows whose quantisers have one shape.

    It holds for `n_steps` more, while every row gets one token at each, and codes for it if it has a `home`. Where it
    says so, the candidates of a row become one more as well. Codes may lie elsewhere at every step, and `scratch` is
    memory that no later launch reads.
    """

    def __init__(
        self, q: Tensor, rows: Sequence[Coded], scale: float, cap: float = 0.0, sink: Tensor | None = None,
        n_steps: int = 0, scratch: Scratch | None = None,
    ) -> None:  # fmt: skip
        (h_kv, m, c, d_m), (n, h) = rows[0].centroids.shape, q.shape[:2]
        self.start, self.newest, self.sink = rows[0].centroids, rows[0].n, sink
        self.s = max(row.n for row in rows) + n_steps * any(row.grows for row in rows)  # of the last step
        self.n_blocks, device = cdiv(self.s, TOKENS), q.device
        self.n_lses = self.n_blocks + (sink is not None)
        self.width = power_of_2(self.n_lses)
        room = empty if scratch is None else scratch.take
        self.entries = room("entries", device, torch.float32, n, h, m, c)
        self.lses = room("lses", device, torch.float32, n, h, self.n_blocks)
        self.found = room("keys", device, torch.int64, n, h_kv, self.s)
        planes, g = rows[0].codes.b % 8, h // h_kv
        self.numbers = [self.told(row) for row in rows]
        width = power_of_2(d_m)
        some = min(power_of_2(c), max(1, TABLE // width))
        self.look_ups = (n, h_kv, m), (c, d_m, g, planes, some, width), max(4, some * width // OF_WARP)
        self.sizes = scale, cap, c, g, m, planes, TOKENS, cap > 0
        self.grids = (n, self.n_blocks, h), (n, self.n_blocks, h_kv)
        self.where = tuple(row.codes.data.data_ptr() for row in rows)

    def told(self, row: Coded) -> tuple[int, ...]:
        """The numbers of a row, but for where its codes lie. They count from the first row's candidates on."""
        assert row.centroids.shape == self.start.shape and row.n <= row.codes.n, "of another shape"
        home = (0, 0, 0) if row.home is None else (row.home.data.data_ptr(), *row.home.data.stride()[:2])
        at, grows = 0 if row.home is None else row.at - self.newest, int(row.grows)
        strides = row.codes.data.stride()[:2]
        return (distance(row.centroids, self.start), *strides, row.n - self.newest * grows, grows, row.first, *home, at)

    def table(self, where: tuple[int, ...]) -> Tensor:
        """All rows' numbers, where their codes lie at these addresses."""
        numbers = [number for at, told in zip(where, self.numbers, strict=True) for number in (at, *told)]
        return constants(tuple(numbers), self.entries.device)

    def look_up(self, q: Tensor, keys: Tensor, since: Since, table: Tensor | None = None) -> Tensor:
        """The tables of inner products, and codes of the newest keys."""
        table, (grid, sizes, n_warps) = self.table(self.where) if table is None else table, self.look_ups
        tables_of_rows[grid](
            q, keys, self.start, table, self.entries, *since, self.newest, *sizes, num_warps=n_warps
        )  # fmt: skip
        return table

    def find(
        self, q: Tensor, keys: Tensor, since: Since | None = None, table: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Keys of all rows' tokens, as many for each head as the row with most has at the last step.

        `table` is that of where codes lie, by default where they lay."""
        q, keys, since = q.contiguous(), keys.contiguous(), now(q.device) if since is None else since
        table, lses = self.look_up(q, keys, since, table), self.lses
        lses_of_rows[self.grids[0]](self.entries, table, lses, *since, self.newest, *self.sizes)
        if self.sink is not None:
            lses = with_sink(lses, self.sink)
        keys_of_rows[self.grids[1]](
            self.entries, table, lses, self.found, *since, self.newest, self.s, self.n_lses, *self.sizes, self.width,
        )  # fmt: skip
        return self.found


@jit(unspecialized=("start", "newest"))
def tables_of_rows(
    q, keys, centroids, table, entries, clock, start, newest, c, d_m, g,
    PLANES: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Inner products of a part's centroids with a group's queries, and the code of that part of the newest key."""
    row, head, part, m = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    at, h_kv = table + row * 11, tl.num_programs(1)
    column, home = tl.arange(0, WIDTH), tl.load(at + 7)
    inside = column < d_m
    least, nearest = head * 0.0 + float("inf"), head * 0
    for low in range(0, c, C):
        centroid = low + tl.arange(0, C)
        real = centroid < c
        where = ((head * m + part) * c + centroid)[:, None] * d_m + column[None]
        x = tl.load(centroids + tl.load(at + 1) + where, real[:, None] & inside[None], other=0.0)
        for i in range(g):
            query_head = (row * h_kv + head) * g + i
            query = tl.load(q + (query_head * m + part) * d_m + column, inside, other=0.0).to(tl.float32)
            tl.store(entries + (query_head * m + part) * c + centroid, tl.sum(x * query[None], 1), real)
        if home != 0:
            key = tl.load(keys + ((row * h_kv + head) * m + part) * d_m + column, inside, other=0.0).to(tl.float32)
            apart = tl.where(inside[None], x - key[None], 0.0)
            far = tl.where(real, tl.sum(apart * apart, 1), float("inf"))
            here = tl.min(far, 0)
            nearest = tl.where(here < least, tl.min(tl.where(far == here, centroid, low + C), 0), nearest)
            least = tl.minimum(least, here)
    if home != 0:
        codes = home.to(tl.pointer_type(tl.uint8)) + head * tl.load(at + 8) + part * tl.load(at + 9)
        token = (newest + steps_since(clock, start) + tl.load(at + 10)).to(tl.int32)
        if PLANES == 0:
            tl.store(codes + token, nearest.to(tl.uint8))
        else:
            first = codes + token // 64 * (8 * PLANES) + token % 64 // 8
            for j in range(PLANES):
                byte = tl.load(first + 8 * j).to(tl.int32)
                tl.store(first + 8 * j, (byte | (((nearest >> j) & 1) << (token % 8))).to(tl.uint8))


@jit(unspecialized=("start", "newest"))
def lses_of_rows(
    entries, table, lses, clock, start, newest, scale, cap, c, g,
    M: tl.constexpr, PLANES: tl.constexpr, TOKENS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of a block of a row's tokens for a query head."""
    row, block, head, h = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    at = table + row * 11
    codes, token = tl.load(at).to(tl.pointer_type(tl.uint8)), block * TOKENS + tl.arange(0, TOKENS)
    mask = token < (newest + steps_since(clock, start)) * tl.load(at + 5) + tl.load(at + 4)
    x = add_entries(
        entries + row * h * M * c, codes, head, head // g, token, mask, c, tl.load(at + 2), tl.load(at + 3), M, PLANES
    )
    x *= scale
    if CAPPED:
        x = bend(x, cap)
    x = tl.where(mask, x, float("-inf"))
    highest = tl.max(x, 0)
    safe = tl.where(highest > -1e30, highest, 0.0)
    lse = safe + tl.log(tl.sum(tl.exp(x - safe), 0))
    tl.store(lses + (row * h + head) * tl.num_programs(1) + block, lse)


@jit(unspecialized=("start", "newest", "s", "n_blocks"))
def keys_of_rows(
    entries, table, lses, found, clock, start, newest, s, n_blocks, scale, cap, c, g,
    M: tl.constexpr, PLANES: tl.constexpr, TOKENS: tl.constexpr, CAPPED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Keys of a block of a row's tokens, by their weights for the query heads of a KV head."""
    row, block, owner, h_kv = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    at = table + row * 11
    codes, token = tl.load(at).to(tl.pointer_type(tl.uint8)), block * TOKENS + tl.arange(0, TOKENS)
    n, every = (newest + steps_since(clock, start)) * tl.load(at + 5) + tl.load(at + 4), tl.arange(0, BLOCKS)
    mask = token < n
    head_stride, part_stride = tl.load(at + 2), tl.load(at + 3)
    total = tl.zeros((TOKENS,), tl.float32)
    for i in range(g):
        head = owner * g + i
        mine = tl.load(lses + (row * h_kv * g + head) * n_blocks + every, every < n_blocks, other=float("-inf"))
        highest = tl.max(mine, 0)
        lse = highest + tl.log(tl.sum(tl.exp(mine - highest), 0))
        x = add_entries(
            entries + row * h_kv * g * M * c, codes, head, owner, token, mask, c,
            head_stride, part_stride, M, PLANES,
        )  # fmt: skip
        x *= scale
        if CAPPED:
            x = bend(x, cap)
        total += tl.exp(x - lse)
    key = tl.where(mask, pack_key(total, tl.load(at + 6) + token), tl.full((TOKENS,), 0x7FFFFFFFFFFFFFFF, tl.int64))
    tl.store(found + (row * h_kv + owner).to(tl.int64) * s + token, key, token < s)


@jit
def read_code(row, token, mask, PLANES: tl.constexpr):
    """Codes of tokens of one head and part."""
    if PLANES == 0:
        return tl.load(row + token, mask, other=0).to(tl.int32)
    code = tl.zeros_like(token)
    first = row + token // 64 * (8 * PLANES) + token % 64 // 8
    for j in range(PLANES):
        byte = tl.load(first + 8 * j, mask, other=0).to(tl.int32)
        code += ((byte >> (token % 8)) & 1) << j
    return code


@jit
def add_entries(
    entries, codes, head, owner, token, mask, c, head_stride, part_stride, M: tl.constexpr, PLANES: tl.constexpr
):
    """Logits of tokens for a query head, whose KV head is `owner`."""
    total = tl.zeros_like(token).to(tl.float32)
    for j in range(M):
        row = codes + owner.to(tl.int64) * head_stride + j * part_stride
        code = read_code(row, token, mask, PLANES)
        total += tl.load(entries + (head * M + j) * c + code, mask, other=0.0)
    return total
