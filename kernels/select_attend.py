"""Attention of one query per head over chosen tokens of a cache, where they lie: K and V are not copied.

`attend_parts` is over several sets of tokens at once, chosen ones and whole stretches, which is a decode step of a
method that retrieves: sinks, window and what was fetched; `attend_rows` does so for all rows of a batch, wherever their
tokens lie.

Shapes    q (1, h, 1, d_h); k (1, h_kv, s, d_h); v (1, h_kv, s, d_v), whose rows may be the first numbers of those of k;
          idx (1, h_kv or h, n_chosen) int64, -1: no token (a GPU reads the lower half of each); late: more rows of K
          and V, n_late, which idx counts on from s;
          spans: rows of each KV head, as many as it has; k and v hold heads one after the other, (1, 1, rows, d_h), or
          each by itself, (1, h_kv, rows, d_h).
          scaled logits bend towards `cap`, if it is not 0 (`kernels/capped.py`);
          bias (1, heads, tokens) float32 for the heads that have tokens of their own, added to their logits then;
          out (1, h, 1, d_v) in q's dtype, lse (1, h, 1) float32, the log-sum-exp of the scaled logits, -inf where
          there is no token.
Paths     C++ on a CPU: float32 sums whatever the dtype; rows of a KV head are read once for its query heads, unless
          those chose tokens of their own. Triton on a GPU. Both cut tokens into pieces and join them by log-sum-exp.
Checks    tests/kernels/test_select_attend.py, benchmarks/bench_select_attend.py.

Long because both paths read what `Tokens` says, each as a list of numbers of its own.

Not here: choosing tokens, counting bytes, many queries with chosen tokens of their own (`kernels/rows/each.py`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.kernels.build import dtypes, library, remembered
from kvbench.kernels.capped import bend, capped
from kvbench.kernels.clock import Since, now, steps_since
from kvbench.kernels.gather import gather_split, is_within, move_both
from kvbench.kernels.jit import INTERPRETED, cdiv, jit, power_of_2, shared_memory, tl, upload
from kvbench.kernels.scratch import Scratch, empty

NEVER = 1 << 62  # more rows than any cache has


class Near(NamedTuple):
    """Copies of tokens on the device, of those that lie far away."""

    k: Tensor  # (1, h_kv, slots, d_h)
    v: Tensor
    slots: Tensor  # (h_kv or 1, tokens) int32, where a token's copy is, -1: there is none


class Spans(NamedTuple):
    """Which rows of K and V are each KV head's, where heads have different numbers of tokens."""

    starts: Tensor  # (h_kv,) int64
    counts: Tensor  # (h_kv,) int64
    longest: int  # no head has more
    step: int = 0  # how much further on both are at the next step, where several steps' follow each other


@dataclass(slots=True, eq=False)
class Tokens:
    """Tokens of a cache to attend to: those at `idx`, those in `spans`, or all. Nothing of it is changed once made."""

    k: Tensor  # (1, h_kv, s, d_h)
    v: Tensor
    idx: Tensor | None = None  # (1, h_kv or h, n_chosen) int64, -1: no token
    late: tuple[Tensor, Tensor] | None = None  # tokens from s on
    mask: Tensor | None = None  # (1, h_kv or h, tokens) bool, False on what is hidden
    q: Tensor | None = None  # (1, h, 1, d_h), a query for these tokens alone
    near: Near | None = None  # where some of the tokens at idx lie nearer
    spans: Spans | None = None  # without idx, late and mask
    bias: Tensor | None = None  # (1, heads, tokens) float32, finite, added to scaled logits: a token's log-weight
    # As C++ reads them, once it has been asked, and the object that was: the memory of a copy lies elsewhere.
    numbers: tuple[int, tuple[int, ...]] | None = field(default=None, init=False)

    def packed(self) -> tuple[int, ...]:
        """The numbers of `struct Part` in select_attend.cpp."""
        if not self.is_packed():
            self.numbers = id(self), packed_part(self)
        assert self.numbers is not None
        return self.numbers[1]

    def is_packed(self) -> bool:
        return self.numbers is not None and self.numbers[0] == id(self)

    def n_tokens(self) -> int:
        """Tokens of a head, hidden ones included."""
        if self.spans is not None:
            return self.spans.longest
        return self.k.shape[2] if self.idx is None else self.idx.shape[2]

    def n_heads(self) -> int:
        """Heads that have tokens of their own."""
        if self.spans is not None:
            return len(self.spans.counts)
        return self.k.shape[1] if self.idx is None else self.idx.shape[1]

    def is_real(self) -> Tensor | None:
        """Which of a head's tokens there are, (1, heads, tokens); None: all."""
        if self.spans is None:
            return self.mask if self.idx is None else self.idx >= 0
        return (torch.arange(self.spans.longest, device=self.k.device) < self.spans.counts[:, None]).unsqueeze(0)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Copies of K and V, (1, heads, n_chosen, d_h); some row or other where there is no token."""
        if self.spans is not None:
            return move_both(self._unrolled, self.k, self.v)
        if self.idx is None:
            return self.k, self.v
        late_k, late_v = self.late or (None, None)
        k = gather_split(self.k, late_k, self.idx)
        return k, k[..., : self.v.shape[3]] if is_within(self.k, self.v) else gather_split(self.v, late_v, self.idx)

    def _unrolled(self, x: Tensor) -> Tensor:
        """The spans of K or V next to each other, (1, h_kv, longest, d_h)."""
        assert self.spans is not None
        starts, _, longest, _ = self.spans
        rows = starts[:, None] + torch.arange(longest, device=x.device)
        owner = torch.arange(len(starts), device=x.device)[:, None] if x.shape[1] > 1 else 0
        return x[0][owner, rows.clamp(max=x.shape[2] - 1)].unsqueeze(0)


def attend_parts_ref(q: Tensor, parts: Sequence[Tokens], scale: float, cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Softmax over the union, from copies, in float32."""
    h = q.shape[1]
    logits, values = [], []
    for part in parts:
        k, v = (x.repeat_interleave(h // x.shape[1], 1).float() for x in part.gathered())
        x = capped(((q if part.q is None else part.q).float() @ k.mT) * scale, cap)  # (1, h, 1, n)
        if part.bias is not None:
            x = x + part.bias.repeat_interleave(h // part.bias.shape[1], 1).unsqueeze(2)
        real = part.is_real()
        if real is not None:
            x = x.masked_fill(~real.repeat_interleave(h // real.shape[1], 1).unsqueeze(2), -torch.inf)
        logits.append(x)
        values.append(v)
    joined = torch.cat(logits, -1)
    lse = joined.logsumexp(-1)
    weights = (joined - lse.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)).exp()
    return (weights @ torch.cat(values, 2)).to(q.dtype), lse


# On a CPU.


def native_takes(q: Tensor, parts: Sequence[Tokens]) -> bool:
    """Whether `attend_rows_native` can work on these, of whichever row."""
    if q.device.type != "cpu" or q.dtype not in dtypes() or native() is None:
        return False
    for part in parts:
        if part.is_packed():
            continue
        of_keys, of_values = (q.shape[3], 1), part.v.stride()[2:]
        if of_values[1] != 1:
            return False
        for x in (part.k,) if part.late is None else (part.k, part.late[0]):
            if x.dtype != q.dtype or x.stride()[2:] != of_keys:
                return False
        for x in (part.v,) if part.late is None else (part.v, part.late[1]):
            if x.dtype != q.dtype or x.stride()[2:] != of_values:
                return False
    return True


def stretches(part: Tokens) -> list[tuple[Tensor, Tensor]]:
    """K and V of a part, and of the tokens after them."""
    return [(part.k, part.v)] if part.late is None else [(part.k, part.v), part.late]


@remembered
def native() -> Any:
    """The C functions, or None."""
    lib = library("select_attend")
    if lib is None:
        return None
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.attend_rows.argtypes = [
        size, size, size, size, size, pointer, *[ctypes.c_float] * 2, pointer, pointer, pointer, pointer, pointer, size
    ]  # fmt: skip
    lib.attend_each.argtypes = [
        size, size, size, size, size, pointer, *[ctypes.c_float] * 2, pointer, pointer, pointer, size
    ]  # fmt: skip
    lib.attend_rows.restype = lib.attend_each.restype = None
    return lib


def attend_parts_native(q: Tensor, parts: Sequence[Tokens], scale: float, cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """All parts in one call of C++, which joins them too."""
    assert len(q) == 1 and parts, (q.shape, len(parts))
    return attend_rows_native(q, [parts], scale, cap)


def attend_rows_native(
    q: Tensor, rows: Sequence[Sequence[Tokens]], scale: float, cap: float = 0.0, weights: Sequence[Tensor | None] = ()
) -> tuple[Tensor, Tensor]:
    """All rows of q (n, h, 1, d_h), each over its own parts: out, lse (n, h, 1), undefined for one without any.

    Where a row has `weights`, (h, tokens of all its parts) float32, its tokens' weights are stored there.
    """
    n, h, s_q, d_h = q.shape
    assert n == len(rows) and s_q == 1, (q.shape, len(rows))
    d_v = value_width(rows)
    q, packed = q.contiguous(), array("q")
    for part in chain.from_iterable(rows):
        packed.extend(part.packed())
    ends = array("q", accumulate(map(len, rows)))
    weighed = array("q", [0 if x is None else x.data_ptr() for x in weights] or [0] * n)
    out = torch.empty_like(q) if d_v == d_h else q.new_empty(n, h, 1, d_v)  # which takes longer
    lse = torch.empty(n, h, 1)
    native().attend_rows(
        dtypes()[q.dtype], n, h, d_h, d_v, q.data_ptr(), scale, cap, ends.buffer_info()[0],
        packed.buffer_info()[0], out.data_ptr(), lse.data_ptr(), weighed.buffer_info()[0], torch.get_num_threads(),
    )  # fmt: skip
    return out, lse


def value_width(rows: Sequence[Sequence[Tokens]]) -> int:
    """Dimensions of a value, of which all parts have as many."""
    for parts in rows:
        if parts:
            return parts[0].v.shape[3]
    raise AssertionError("no tokens")


def packed_part(part: Tokens) -> tuple[int, ...]:
    """The numbers of a part that kernels take (`Tokens.packed`), made anew."""
    k, v, idx, late = part.k, part.v, part.idx, part.late
    size, h_kv, s = k.element_size(), k.shape[1], k.shape[2]
    heads, n, where, late_numbers, rows, spans, bias = h_kv, s, 0, (0, 0, 0, 0), NEVER, (0, 0), (0, 0)
    if part.spans is not None:
        starts, counts, n, _ = part.spans
        assert starts.is_contiguous() and counts.is_contiguous(), (starts.stride(), counts.stride())
        heads, spans = len(counts), (starts.data_ptr(), counts.data_ptr())
    if idx is not None:
        assert idx.dtype == torch.int64 and idx.is_contiguous(), (idx.dtype, idx.stride())
        _, heads, n = idx.shape
        where = idx.data_ptr()
    if late is not None:
        strides = (x.stride(1) * size for x in late)
        late_numbers, rows = (*(x.data_ptr() for x in late), *strides), s
    if part.bias is not None:
        check_bias(part.bias, heads, n)
        bias = part.bias.data_ptr(), part.bias.stride(1)
    return (
        k.data_ptr(), v.data_ptr(), k.stride(1) * size, v.stride(1) * size, heads, n, where, *late_numbers, rows, h_kv,
        *spans, *bias, v.stride(2),
    )  # fmt: skip


def check_bias(bias: Tensor, heads: int, n: int) -> None:
    assert bias.shape == (1, heads, n) and bias.dtype == torch.float32, (bias.shape, bias.dtype, heads, n)
    assert bias.stride(2) == 1 or n <= 1, bias.stride()


# On a GPU.

TILE = 64  # tokens that a program attends to at once
SPLIT = 256  # tokens of a head that one program attends to at least
PROGRAMS = 1024  # that a launch should have, where there are tokens enough
STAGES = 3  # tiles that are on their way at once, where shared memory holds as many
WIDE_HEAD = 256
# Of heads wider than this, as a latent of 512 and 64 numbers: query heads of a program, tokens at once. Twice as many
# of either do not fit the registers (`kernels/aot.py`). Warps are those of heads of this width, too.
WIDE_ROWS, WIDE_TILE, WIDE_WARPS = 16, 32, 8
# Float32 has no product on tensor cores that is as exact, and each thread holds whole rows of both factors: numbers of
# a key and of a value at once, in heads of 128 or more and in others. Twice as many spill (sm_90, Triton 3.6).
EXACT_HEAD, EXACT_PARTS, EXACT_PARTS_OF_NARROW = 128, (32, 64), (32, 32)
COLUMNS = 8  # numbers of a piece in front of its record, as `find_item` reads them
ROWS_AT_MOST = 1 << 20  # of a batch: a query's number is a row's below, an address from there on
RECORD = 28  # numbers of a record, as `attend_items` reads them

Piece = tuple[int, int, int, int, int, int, int, int, tuple[int, ...]]
"""What kernels read of some tokens of one row: how many there are; where chosen ones are, the row of their query or its
address, where logits go and the stride of these; the kernel, how often it goes over the tokens, how many more there are
at the next step, and its record."""


class Others(Protocol):
    """Tokens of some rows in a form of their own, which another kernel attends to, item by item as this one does."""

    h_kv: int

    def pieces(self, q: Tensor) -> list[list[Piece]]:
        """Pieces of each row; their kernels are numbered from 1 on."""
        ...

    def launch(
        self, q: Tensor, table: Table, sums: Tensor, lses: Tensor, scale: float, cap: float, since: Since
    ) -> None:  # fmt: skip
        """Write the sums and log-sum-exps of their items."""
        ...


class Table(NamedTuple):
    """A launch's pieces and its items, which are the pieces' tokens in splits, piece by piece and row by row."""

    numbers: Tensor  # columns of the pieces one after the other, where rows end, records
    n_pieces: int
    split: int  # tokens of an item
    n_items: list[int]  # by kernel
    n_rows: int
    h_kv: int
    d_v: int
    is_even: bool  # queries, K and V can be read 16 bytes at a time
    room: Room | None = None  # for launches that are told the same again


class Room(NamedTuple):
    """Where launches write what is read right after them."""

    sums: Tensor  # (items, h, d_v) float32
    lses: Tensor  # (items, h)
    lse: Tensor  # (n, h, 1)
    form: LaunchForm


def room_for(q: Tensor, table: Table, scratch: Scratch | None = None) -> Room:
    take, h, n_items, f32 = empty if scratch is None else scratch.take, q.shape[1], sum(table.n_items), torch.float32
    return Room(
        take("sums", q.device, f32, n_items, h, table.d_v),
        take("lses of items", q.device, f32, n_items, h),
        take("lse", q.device, f32, table.n_rows, h, 1),
        form_of(
            h // table.h_kv,
            q.shape[3],
            table.d_v,
            q.element_size(),
            table.is_even,
            table.n_pieces,
            shared_memory(q.device),
        ),
    )


def attend_rows_triton(
    q: Tensor, rows: Sequence[Sequence[Tokens]], scale: float, logits: Sequence[Tensor | None] = (),
    others: Others | None = None, cap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All rows of q (n, h, 1, d_h), each over its own parts, in one launch and one that joins: out and lse (n, h, 1).

    A part lies anywhere that the GPU can read, pinned host memory included. q may have more rows after these, for
    which nothing is written. Where a row has `logits`, (h, tokens of all its parts) float32, its scaled logits are
    stored there; `others` come on top of a row's parts.
    """
    q = q.contiguous()
    h_kv = kv_heads(rows) if others is None else others.h_kv
    own = [pieces_of(parts, i, q, h_kv, logits[i] if logits else None) for i, parts in enumerate(rows)]
    if others is not None:
        own = [[*mine, *theirs] for mine, theirs in zip(own, others.pieces(q), strict=True)]
    d_v = value_width(rows) if any(rows) else q.shape[3]
    return attend_table(q, table_of(own, q, h_kv, d_v), scale, cap, others)


def kv_heads(rows: Sequence[Sequence[Tokens]]) -> int:
    return min(part.k.shape[1] if part.spans is None else part.n_heads() for row in rows for part in row)


def growing_table(
    q: Tensor, rows: Sequence[Sequence[Tokens]], more: Sequence[Sequence[int]], scratch: Scratch, ahead: int,
    logits: Sequence[Tensor | None] = (), others: Others | None = None,
) -> tuple[Table, int]:  # fmt: skip
    """A table of parts that have so many tokens more at every step, and for how many steps it holds.

    There is room for `ahead` steps, and the `logits` of a row's parts follow each other, each with as much.
    """
    h_kv, own = kv_heads(rows) if others is None else others.h_kv, list[list[Piece]]()
    for i, (parts, ns) in enumerate(zip(rows, more, strict=True)):
        own.append([])
        given = logits[i] if logits else None
        at = 0 if given is None else given.data_ptr()
        for (n, idx, own_q, _, *stride_to_reps, _, record), grows in zip(
            pieces_of(parts, i, q, h_kv, given), ns, strict=True
        ):  # fmt: skip
            own[-1].append((n, idx, own_q, at, *stride_to_reps, grows, record))  # type: ignore[arg-type]
            at += 4 * (n + ahead * grows) if at else 0
    if others is not None:
        own = [[*mine, *theirs] for mine, theirs in zip(own, others.pieces(q), strict=True)]
    table = table_of(own, q, h_kv, value_width(rows) if any(rows) else q.shape[3], ahead)
    # Until a piece that shrinks has no token any more.
    limits = [n // -grows for pieces in own for n, *_, grows, _ in pieces if grows < 0]
    return table._replace(room=room_for(q, table, scratch)), min(ahead, *limits) if limits else ahead


def attend_table(
    q: Tensor, table: Table, scale: float, cap: float = 0.0, others: Others | None = None, since: Since | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of rows (`attend_rows_triton`) over what is on the device already; q is contiguous.

    Pieces may have grown since the table was made.
    """
    since = now(q.device) if since is None else since
    (_, h, _, d_h), n, h_kv, d_v = q.shape, table.n_rows, table.h_kv, table.d_v
    sums, lses, lse, form = table.room or room_for(q, table)
    out, numbers = torch.empty_like(q) if d_v == d_h else q.new_empty(len(q), h, 1, d_v), table.numbers
    if table.n_items[0]:
        attend_items[(form.n_turns, table.n_items[0], h_kv)](
            q, numbers, sums, lses, *since, scale, cap, table.n_pieces, n, elements(q), table.split, h_kv, d_h, d_v,
            *form.constants, cap > 0, INTERPRETED, num_warps=form.n_warps, num_stages=form.n_stages,
        )  # fmt: skip
    if others is not None:
        others.launch(q, table, sums, lses, scale, cap, since)
    join_items[(n, h)](
        sums, lses, out, lse, numbers, *since, table.n_pieces, table.split, h, d_v, form.values, form.most
    )
    return out, lse


class LaunchForm(NamedTuple):
    """How `attend_items` and `join_items` are launched for tensors of some shapes."""

    n_turns: int  # programs that share a KV head's query heads, and numbers of its values
    constants: tuple[int, ...]  # from G to LANES
    n_warps: int
    n_stages: int  # tiles of K and V that are on their way at once
    values: int  # numbers of a value, padded
    most: int  # pieces, padded


@cache
def form_of(g: int, d_h: int, d_v: int, size: int, is_even: bool, n_pieces: int, shared: int) -> LaunchForm:
    """The launch for elements of so many bytes, on a GPU whose programs can have so much shared memory."""
    lanes = 16 // size if is_even and d_v * size % 16 == 0 else 1
    width, values, most = power_of_2(d_h, 16), power_of_2(d_v, 16), power_of_2(n_pieces)
    is_odd = d_h % 16 > 0 or d_v % 16 > 0  # whose masks take registers
    if size == 4:
        parts = EXACT_PARTS_OF_NARROW if is_odd or max(width, values) < EXACT_HEAD else EXACT_PARTS
        at_once, of_value = min(parts[0], width), min(parts[1], values)
        n_turns = cdiv(d_v, of_value)
        constants = g, WIDE_ROWS, at_once, 0, cdiv(d_h, at_once), of_value, n_turns, TILE, RECORD, lanes
        return LaunchForm(cdiv(g, WIDE_ROWS) * n_turns, constants, WIDE_WARPS, 2, values, most)
    # A wide head's numbers are a power of two and a rest, and its query heads take turns: registers hold no more.
    is_wide = d_h > WIDE_HEAD
    width = power_of_2(d_h // 2 + 1) if is_wide else width
    rest = power_of_2(d_h - width, 16) if d_h > width else 0
    n_heads = WIDE_ROWS if is_wide else power_of_2(g, 16)
    tile = min(WIDE_TILE, WIDE_TILE * 512 // values) if is_wide else TILE // 2 if is_odd else TILE
    tile = max(16, tile // 2) if is_wide and d_v < values else tile  # whose masks take registers, too
    # A tile of K and V for each stage but one, queries, and logits on their way to be weights.
    of_stage, beside = tile * (width + rest + values) * size, n_heads * ((width + rest) * size + 4 * tile) + 1024
    n_stages = max(2, min(STAGES, 1 + (shared - beside) // of_stage))
    constants = g, n_heads, width, rest, 1, values, 1, tile, RECORD, lanes
    is_uneven = g & (g - 1) > 0 and width <= 64 and shared < 1 << 17  # where sm_120 lacks one register of four warps
    n_warps = WIDE_WARPS if max(width, values) >= WIDE_HEAD or is_uneven else 4
    return LaunchForm(cdiv(g, n_heads), constants, n_warps, n_stages, values, most)


def table_of(rows: Sequence[Sequence[Piece]], q: Tensor, h_kv: int, d_v: int, ahead: int = 0) -> Table:
    """The pieces of all rows, and how they are split, with as many items as so many steps later may want.

    Addresses are absolute, in elements of the cache where they are those of K, V and queries, otherwise in bytes.
    """
    pieces = [*chain(*rows)]
    split = max(SPLIT, TILE * cdiv(sum(piece[0] for piece in pieces) * h_kv, TILE * PROGRAMS))
    n_items = [0] * (1 + max((piece[5] for piece in pieces), default=0))
    for n, _, _, _, _, kernel, reps, grows, _ in pieces:
        n_items[kernel] += cdiv(max(n, n + grows * ahead), split) * reps
    *columns, records = zip(*pieces, strict=True) if pieces else ((),) * (COLUMNS + 1)
    numbers = upload([*chain(*columns), 0, *accumulate(map(len, rows)), *chain(*records)], q.device)
    wide = 16 // q.element_size()
    are_even = all(is_even(record, wide) for record in {piece[-1] for piece in pieces if piece[5] == 0})
    reads_wide = q.shape[3] % wide == 0 and q.data_ptr() % 16 == 0
    is_even_q = not any(piece[2] % wide for piece in pieces if piece[2] >= ROWS_AT_MOST)
    return Table(numbers, len(pieces), split, n_items, len(rows), h_kv, d_v, are_even and reads_wide and is_even_q)


def elements(x: Tensor) -> int:
    """The address of a tensor, in its elements."""
    return x.data_ptr() // x.element_size()


def is_even(record: tuple[int, ...], wide: int) -> bool:
    """Whether all tokens of a record begin at a multiple of `wide` elements."""
    return all(number % wide == 0 for number in (*record[:7], *record[8:12], *record[16:20], record[27]))


def pieces_of(parts: Sequence[Tokens], row: int, q: Tensor, h_kv: int, logits: Tensor | None) -> list[Piece]:
    """The pieces of a row; of query heads that chose their own tokens, each goes over its group's."""
    found, dtype = list[Piece](), q.dtype
    logits_at, logits_stride = (0, 0) if logits is None else (logits.data_ptr(), logits.stride(0))
    for part in parts:
        n, idx, own_q, reps = part.n_tokens(), 0, row, 1
        if part.idx is not None:
            assert part.idx.dtype == torch.int64 and part.idx.stride(2) == 1, (part.idx.dtype, part.idx.stride())
            idx = part.idx.data_ptr()
        if part.n_heads() != h_kv:
            reps = q.shape[1] // h_kv
        if part.q is not None:
            assert part.q.is_contiguous() and part.q.dtype == dtype, (part.q.stride(), part.q.dtype)
            own_q = elements(part.q)
        found.append((n, idx, own_q, logits_at, logits_stride, 0, reps, 0, record_of(part, q, h_kv)))
        logits_at += 4 * n if logits_at else 0
    return found


def record_of(part: Tokens, q: Tensor, h_kv: int) -> tuple[int, ...]:
    """What `attend_items` reads of a part and stays as it is from step to step."""
    k, v, idx, size = part.k, part.v, part.idx, q.element_size()
    k_strides, v_strides, kv_heads = k.stride(), v.stride(), k.shape[1] // h_kv
    check_stretch(k, v, q, v_strides[2], k_strides[2])
    # KV heads may be repeated, one per query head: then each of a group is read for its own.
    k_step, v_step = (k_strides[1], v_strides[1]) if kv_heads > 1 else (0, 0)
    front = (
        k.data_ptr() // size, v.data_ptr() // size, k_strides[1] * kv_heads, v_strides[1] * kv_heads, k_step, v_step,
        v_strides[2],
    )  # fmt: skip
    if idx is part.mask is part.near is part.spans is part.bias is None:
        return (*front, *PLAIN, k_strides[2])
    idx_step = 0 if idx is None else idx.stride(1)
    late = 0, 0, 0, 0, NEVER
    if part.late is not None:
        k_late, v_late = part.late
        check_stretch(k_late, v_late, q, v_strides[2], k_strides[2])
        late = elements(k_late), elements(v_late), k_late.stride(1), v_late.stride(1), k.shape[2]
    mask, near, spans = (0, 0, 0), (0, 0, 0, 0), (0, 0, 0)
    if part.mask is not None and idx is None:
        stride, heads = part.mask.stride(1), part.mask.shape[1]
        mask = part.mask.data_ptr(), stride * (heads // h_kv), stride if heads == q.shape[1] else 0
    slots = 0, 0
    if part.near is not None:
        k_near, v_near, where = part.near
        check_stretch(k_near, v_near, q, v_strides[2], k_strides[2])
        assert where.dtype == torch.int32, where.dtype
        near = elements(k_near), elements(v_near), k_near.stride(1), v_near.stride(1)
        slots = where.data_ptr(), where.stride(0) * (len(where) > 1)
    if part.spans is not None:
        starts, counts, _, step = part.spans
        assert starts.is_contiguous() and counts.is_contiguous(), (starts.stride(), counts.stride())
        spans = starts.data_ptr(), counts.data_ptr(), step
    bias_at = bias_step = 0
    if part.bias is not None:
        check_bias(part.bias, part.n_heads(), part.n_tokens())
        bias_at, bias_step = part.bias.data_ptr(), part.bias.stride(1)
    return (*front, idx_step, *late, *mask, *near, *slots, *spans, bias_at, bias_step, k_strides[2])


def check_stretch(k: Tensor, v: Tensor, q: Tensor, v_row: int, k_row: int) -> None:
    """What the kernel relies on: tokens are as far apart as in the part that these belong to, and so are copies."""
    k_strides, v_strides = k.stride(), v.stride()
    assert k_strides[2:] == (k_row, 1) and v_strides[2:] == (v_row, 1), (k_strides, v_strides)
    assert k.dtype == v.dtype == q.dtype, (k.dtype, v.dtype)


PLAIN = (0, 0, 0, 0, 0, NEVER, *[0] * 14)  # of tokens next to each other, and nothing else


@jit
def find_item(number, table, n_pieces, split, kernel, age):
    """A kernel's item: whether it is there yet; which piece it is of; the item counted over all kernels; its piece's
    tokens, how often the kernel has gone over them before, and where it begins. The table is of `age` steps before."""
    # Piece by piece: what a sum over a vector gives is not known to be the same for all threads, and spills registers.
    own_ends, start, before, found = number * 0, number * 0, number * 0, number * 0
    for piece in range(n_pieces):
        n = tl.load(table + piece) + tl.load(table + 7 * n_pieces + piece) * age
        items = (tl.cdiv(n, split) * tl.load(table + 6 * n_pieces + piece)).to(tl.int32)
        own_ends += tl.where(tl.load(table + 5 * n_pieces + piece) == kernel, items, 0)
        is_past = own_ends <= number
        found += is_past.to(tl.int32)
        before += tl.where(is_past, items, 0)
        start = tl.where(is_past, own_ends, start)
    is_there = found < n_pieces
    found = tl.where(is_there, found, 0)
    n, local = tl.load(table + found) + tl.load(table + 7 * n_pieces + found) * age, number - start
    n_splits = tl.maximum(tl.cdiv(n, split).to(tl.int32), 1)
    return is_there, found, before + local, tl.where(is_there, n, 0), local // n_splits, local % n_splits * split


@jit(unspecialized=("start", "n_pieces", "n_rows", "here", "split"))
def attend_items(
    q, table, sums, lses, clock, start, scale, cap, n_pieces, n_rows, here, split, h_kv, d_h, d_v,
    G: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr,
    VALUES: tl.constexpr, TURNS: tl.constexpr, TILE: tl.constexpr, RECORD: tl.constexpr,
    LANES: tl.constexpr, CAPPED: tl.constexpr,
    WIDE: tl.constexpr,  # float32 products, for the interpreter takes bfloat16 for its bits
):  # fmt: skip
    """Softmax over the tokens of an item for query heads of a KV head, padded to ROWS for the tensor cores.

    Those of wide heads are several programs', side by side, so that a token is read from memory once. A key has WIDTH
    numbers and, of wide ones, up to REST more, or PARTS of WIDTH numbers; then TURNS programs give VALUES numbers each.
    """
    age = steps_since(clock, start)
    is_there, piece, item, n, j, begin = find_item(tl.program_id(1), table, n_pieces, split, 0, age)
    head = tl.program_id(2).to(tl.int64)
    at = table + 8 * n_pieces + n_rows + 1 + piece * RECORD
    idx, asked = tl.load(table + n_pieces + piece), tl.load(table + 2 * n_pieces + piece)
    logits_at, logits_stride = tl.load(table + 3 * n_pieces + piece), tl.load(table + 4 * n_pieces + piece)
    reps = tl.load(table + 6 * n_pieces + piece)
    own_q = tl.multiple_of(tl.where(asked < 1 << 20, asked * h_kv * G * d_h, asked - here), LANES)
    k = tl.multiple_of(tl.load(at) + j * tl.load(at + 4) + head * tl.load(at + 2) - here, LANES)
    v = tl.multiple_of(tl.load(at + 1) + j * tl.load(at + 5) + head * tl.load(at + 3) - here, LANES)
    v_row, k_row = tl.multiple_of(tl.load(at + 6), LANES), tl.multiple_of(tl.load(at + 27), LANES)
    k_late = tl.multiple_of(tl.load(at + 8) + head * tl.load(at + 10) - here, LANES)
    v_late = tl.multiple_of(tl.load(at + 9) + head * tl.load(at + 11) - here, LANES)
    behind, mask_at = tl.load(at + 12), tl.load(at + 13)
    of_group = tl.where(is_there, G, 0)  # no query head where a later step has an item
    first_head, last_head = tl.where(reps > 1, j, 0), tl.where(reps > 1, tl.minimum(j + 1, of_group), of_group)
    k_near = tl.multiple_of(tl.load(at + 16) + head * tl.load(at + 18) - here, LANES)
    v_near = tl.multiple_of(tl.load(at + 17) + head * tl.load(at + 19) - here, LANES)
    slots_at = tl.load(at + 20)
    starts_at, counts_at = tl.load(at + 22), tl.load(at + 23)
    bias_at = tl.load(at + 25)
    biases = bias_at.to(tl.pointer_type(tl.float32)) + (head * reps + j) * tl.load(at + 26)
    first, last = begin.to(tl.int32), tl.minimum(begin + split, n).to(tl.int32)
    start_row = tl.zeros((), tl.int64)
    if counts_at != 0:
        of_step = tl.load(at + 24) * age + head
        last = tl.minimum(last, tl.load(counts_at.to(tl.pointer_type(tl.int64)) + of_step).to(tl.int32))
        start_row += tl.load(starts_at.to(tl.pointer_type(tl.int64)) + of_step)
    row, column = tl.program_id(0) // TURNS * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside, mine = column < d_h, (row >= first_head) & (row < last_head)
    own = tl.program_id(0) % TURNS * VALUES
    value_column = own + tl.arange(0, VALUES)
    in_value = value_column < d_v
    of_query = own_q + (head * G + row)[:, None] * d_h
    queries = tl.load(q + of_query + column[None], mine[:, None] & inside[None], other=0.0)
    if WIDE:
        queries = queries.to(tl.float32)
    if REST > 0:
        rest = WIDTH + tl.arange(0, REST)
        in_rest = rest < d_h
        more = tl.load(q + of_query + rest[None], mine[:, None] & in_rest[None], other=0.0)
        if WIDE:
            more = more.to(tl.float32)
    highest = tl.full((ROWS,), -1e30, tl.float32)  # finite: nothing minus nothing would be no number
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUES), tl.float32)
    chosen = idx.to(tl.pointer_type(tl.int64)) + (head * reps + j) * tl.load(at + 7)
    seen_at = mask_at.to(tl.pointer_type(tl.int8)) + head * tl.load(at + 14)
    mask_stride = tl.load(at + 15)
    slots = slots_at.to(tl.pointer_type(tl.int32)) + head * tl.load(at + 21)
    for front in range(first, last, TILE):
        place = front + tl.arange(0, TILE)
        token = start_row + place
        if idx != 0:
            token = tl.load(chosen + place, place < last, other=-1).to(tl.int32).to(tl.int64)
        real, is_late = (place < last) & (token >= 0), token >= behind
        early, late = tl.where(real & (token < behind), token, 0), tl.where(is_late, token - behind, 0)
        key_at = tl.where(is_late, k_late + late * k_row, k + early * k_row)
        value_at = tl.where(is_late, v_late + late * v_row, v + early * v_row)
        if slots_at != 0:
            slot = tl.load(slots + token, real, other=-1)
            beside = tl.where(slot >= 0, slot, 0).to(tl.int64)
            key_at, value_at = (
                tl.where(slot >= 0, k_near + beside * k_row, key_at),
                tl.where(slot >= 0, v_near + beside * v_row, value_at),
            )
        key_at = key_at // LANES * LANES  # what it is: after a branch Triton 3.6 does not know it any more
        seen = mine[:, None] & real[None]
        if mask_at != 0:
            seen = seen & (tl.load(seen_at + row[:, None] * mask_stride + place[None], seen, other=0) != 0)
        if PARTS == 1:
            keys = tl.load(q + key_at[:, None] + column[None], real[:, None] & inside[None], other=0.0)
            if WIDE:
                keys = keys.to(tl.float32)
            logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        else:
            logits = tl.zeros((ROWS, TILE), tl.float32)
            for part in range(PARTS):
                each = part * WIDTH + column
                asking = tl.load(q + of_query + each[None], mine[:, None] & (each < d_h)[None], other=0.0)
                keys = tl.load(q + key_at[:, None] + each[None], real[:, None] & (each < d_h)[None], other=0.0)
                logits = tl.dot(asking, tl.trans(keys), logits, input_precision="ieee")
        if REST > 0:
            keys = tl.load(q + key_at[:, None] + rest[None], real[:, None] & in_rest[None], other=0.0)
            if WIDE:
                keys = keys.to(tl.float32)
            logits = tl.dot(more, tl.trans(keys), logits, input_precision="ieee")
        logits *= scale
        if CAPPED:
            logits = bend(logits, cap)
        if bias_at != 0:
            logits += tl.load(biases + place, place < last, other=0.0)[None]
        logits = tl.where(seen, logits, -1e30)
        if logits_at != 0:
            kept = logits_at.to(tl.pointer_type(tl.float32)) + (head * G + row)[:, None] * logits_stride
            tl.store(kept + place[None], logits, mine[:, None] & (place < last)[None] & (own == 0))
        higher = tl.maximum(highest, tl.max(logits, 1))
        weights = tl.where(seen, tl.exp(logits - higher[:, None]), 0.0)
        shrink = tl.exp(highest - higher)
        values = tl.load(q + value_at[:, None] + value_column[None], real[:, None] & in_value[None], other=0.0)
        if WIDE:
            values = values.to(tl.float32)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
    some = tl.where(total > 0, total, 1.0)
    to = (item * h_kv + head) * G + row
    tl.store(lses + to, tl.where(total > 0, highest + tl.log(some), float("-inf")), (row < of_group) & (own == 0))
    tl.store(sums + to[:, None] * d_v + value_column[None], acc / some[:, None], mine[:, None] & in_value[None])


@jit(unspecialized=("start", "n_pieces", "split"))
def join_items(
    sums, lses, out, lse, table, clock, start, n_pieces, split, h, d_v, WIDTH: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """The items of one row for one query head, weighted by their log-sum-exps."""
    age = steps_since(clock, start)
    row, head = tl.program_id(0), tl.program_id(1)
    piece = tl.arange(0, PIECES)
    real = piece < n_pieces
    n = tl.load(table + piece, real, other=0) + tl.load(table + 7 * n_pieces + piece, real, other=0) * age
    splits = (n + split - 1) // split
    items = (splits * tl.load(table + 6 * n_pieces + piece, real, other=0)).to(tl.int32)
    ends = table + 8 * n_pieces + row
    first = tl.sum(tl.where(piece < tl.load(ends), items, 0), 0)
    last = tl.sum(tl.where(piece < tl.load(ends + 1), items, 0), 0)
    column = tl.arange(0, WIDTH)
    highest = tl.full((1,), -1e30, tl.float32)
    total, acc = tl.zeros((1,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for front in range(first, last, 16):
        item = (front + tl.arange(0, 16)).to(tl.int64)
        mine = tl.load(lses + item * h + head, item < last, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(mine, 0))
        weights, shrink = tl.exp(mine - higher), tl.exp(highest - higher)
        # What an item has of other query heads was never written.
        there = ((item < last) & (weights > 0))[:, None] & (column < d_v)[None]
        part = tl.load(sums + (item * h + head)[:, None] * d_v + column[None], there, other=0.0)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = higher
    some = tl.where(total > 0, total, 1.0)
    to = row * h + head
    tl.store(out + to * d_v + column, (acc / some).to(out.dtype.element_ty), column < d_v)
    tl.store(lse + to + tl.arange(0, 1), tl.where(total > 0, highest + tl.log(some), float("-inf")))
