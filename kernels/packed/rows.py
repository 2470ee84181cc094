"""Attention over packed K and V on a GPU, for all rows of a batch: codes become numbers in registers.

The tokens of a row fall into three stretches: K and V packed, one of them packed, none. The first two are read here, in
a launch for each form of codes that occurs; the exact ones after them are tokens as any others, and the join with them
is `attend_rows_triton`'s.

Shapes    as in `kernels/packed/attend.py`.
Checks    tests/kernels/test_packed_rows.py, `python -m kvbench.kernels.aot`.

Keys that are packed by channel have one scale per channel and group: it is multiplied into the query, and the product
with the tensor cores is that with the codes. All others become numbers first; floats with a scale per token by
themselves, and the logits of keys get the scale.

Not here: packing (`kernels/packed/tokens.py`), forms that only their method can read (`Side.rebuilt`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.capped import bend
from kvbench.kernels.clock import Since, steps_since
from kvbench.kernels.fast import takes
from kvbench.kernels.jit import INTERPRETED, architecture, cdiv, distance, jit, power_of_2, tl
from kvbench.kernels.packed.attend import Packed, Side
from kvbench.kernels.packed.codes import BY_CHANNEL, BY_FLOAT, BY_TOKEN, BY_UNIT_TABLE
from kvbench.kernels.select_attend import RECORD, STAGES, Piece, Table, Tokens, elements, find_item

EXACT = -1  # in addition to the kinds of codes: not packed
WIDE = 256  # numbers of a head whose tiles four warps have no registers for
# Of heads that are wider: query heads of a program, numbers that it reads at once and those that it looks up, tokens.
WIDE_ROWS, PART, LOOKED_UP_PART, WIDE_TILE = 16, 128, 64, 16
# In float32, whose products tensor cores do not make: numbers at once, tokens, and those of keys that are looked up.
EXACT_PART, EXACT_TILE, EXACT_LOOKED_UP_TILE = 32, 64, 32
TILE = 64  # tokens that a program attends to at once; of keys by channel no more than a group
LEAST_GROUP = 16  # of keys by channel, so that a tile is one for the tensor cores
READABLE = {BY_CHANNEL: (2, 4, 8), BY_TOKEN: (2, 3, 4, 8), BY_UNIT_TABLE: (2, 3, 4), BY_FLOAT: (4, 8)}  # bits by kind
BLOCKS = (16, 32)  # numbers that share a byte of e4m3, of e8m0
READS_FLOATS = 89  # the first architecture that makes numbers of e4m3 by itself


class Form(NamedTuple):
    """What a launch is compiled for, of K or of V."""

    kind: int
    bits: int = 8
    group: int = 1
    dtype: torch.dtype | None = None  # of scales
    exponent: int = 0  # bits of it, of floats


class Stretch(NamedTuple):
    """Tokens `first` to `last` of a row, of which K and V lie in one form each."""

    row: int
    packed: Packed
    q: Tensor | None  # (1, h, 1, d_h), turned for these tokens
    first: int
    last: int
    moves: tuple[int, int] = (0, 0)  # how much further on both are at the next step


def takes_codes(q: Tensor, packed: Packed) -> bool:
    """Whether the kernel can read these."""
    sides = packed.sides_of_width(q.shape[3])
    if not takes("codes", q.device) or sides is None or sides[1].kind not in (BY_TOKEN, BY_FLOAT):
        return False
    return all(is_readable(side, q) for side in sides)


def is_readable(side: Side, q: Tensor) -> bool:
    d_h, group = q.shape[3], side.group
    even = group & (group - 1) == 0  # tiles have such lengths
    fits = even and group >= LEAST_GROUP if side.kind == BY_CHANNEL else group == d_h or (even and d_h % group == 0)
    if side.kind == BY_FLOAT:
        fits = fits and (group == d_h if side.scale_table is None else group in BLOCKS)
    return side.bits in READABLE.get(side.kind, ()) and fits and side.exact.dtype == q.dtype


class CodedRows:
    """The packed tokens of some rows."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.by_form: dict[tuple[Form, Form], list[Stretch]] = {}
        self.more = [0] * n_rows  # tokens that what is left of a row has more at the next step
        self.h_kv = 0

    def add(self, row: int, packed: Packed, q: Tensor | None) -> list[Tokens]:
        """Take a row's packed tokens in; what is left are those of which neither K nor V is packed."""
        k, v, n = packed[:3]
        self.h_kv = k.exact.shape[1]
        (both, of_both), (either, of_either) = sorted(zip((k.n, v.n), packed.grows, strict=True))
        self.more[row] = 1 - of_either
        for first, last, *moves in ((0, both, 0, of_both), (both, either, of_both, of_either)):
            if first < last:
                forms = form_of(k, last), form_of(v, last)
                self.by_form.setdefault(forms, []).append(Stretch(row, packed, q, first, last, (moves[0], moves[1])))
        if either == n:
            return []
        return [Tokens(k.exact[:, :, either - k.n : n - k.n], v.exact[:, :, either - v.n : n - v.n], q=q)]

    def pieces(self, q: Tensor) -> list[list[Piece]]:
        """Pieces of each row (`Others`): a kernel for each form of codes."""
        found: list[list[Piece]] = [[] for _ in range(self.n_rows)]
        self.even: list[bool] = []
        for kernel, some in enumerate(self.by_form.values(), 1):
            records = [record_of(q, each, some[0].packed) for each in some]
            for each, record in zip(some, records, strict=True):
                own_q = each.row
                if each.q is not None:
                    assert each.q.is_contiguous() and each.q.dtype == q.dtype, (each.q.stride(), each.q.dtype)
                    own_q = elements(each.q)
                more = each.moves[1] - each.moves[0]
                found[each.row].append((each.last - each.first, each.first, own_q, 0, 0, kernel, 1, more, record))
            self.even.append(all(is_even(q, each, record) for each, record in zip(some, records, strict=True)))
        return found

    def launch(
        self, q: Tensor, table: Table, sums: Tensor, lses: Tensor, scale: float, cap: float, since: Since
    ) -> None:  # fmt: skip
        h, d_h = q.shape[1], q.shape[3]
        g, whole = h // self.h_kv, power_of_2(d_h, 16)
        for kernel, ((k, v), some) in enumerate(self.by_form.items(), 1):
            (packed_k, packed_v), lanes = some[0].packed[:2], 16 if self.even[kernel - 1] else 1
            form = launch_form(k, v, g, d_h, q.element_size())
            bases = (q if side.table is None else side.table for side in (packed_k, packed_v))
            attend_codes[(cdiv(g, form.n_heads) * form.parts, table.n_items[kernel], self.h_kv)](
                q, packed_k.packed.codes, packed_v.packed.codes, packed_k.packed.scales, packed_v.packed.scales,
                *bases, table.numbers, sums, lses, *since, scale, cap, table.n_pieces, table.n_rows, elements(q),
                table.split, kernel, self.h_kv, d_h, row_bytes(k, d_h), row_bytes(v, d_h),
                g, form.n_heads, form.width, form.parts, form.tile, RECORD,
                k.kind, k.bits, wide_group(k, d_h, whole), k.exponent,
                v.kind, v.bits, wide_group(v, d_h, whole), v.exponent,
                not INTERPRETED and architecture(q.device) >= READS_FLOATS,
                lanes, max(1, lanes // q.element_size()), cap > 0, INTERPRETED,
                num_warps=form.n_warps, num_stages=form.n_stages,
            )  # fmt: skip


class LaunchForm(NamedTuple):
    """How `attend_codes` is launched for heads of some width."""

    n_heads: int  # query heads of a program
    width: int  # numbers of a key and of a value that it has at once
    parts: int  # of a head, as many programs
    tile: int  # tokens at once
    n_warps: int
    n_stages: int


@cache
def launch_form(k: Form, v: Form, g: int, d_h: int, size: int) -> LaunchForm:
    """The launch for exact numbers of so many bytes."""
    whole, tile, looks_up = power_of_2(d_h, 16), tile_of(k, v), k.kind == BY_UNIT_TABLE
    if size == 4:
        width, most = min(EXACT_PART, whole), EXACT_LOOKED_UP_TILE if looks_up else EXACT_TILE
        tile = min(most, k.group) if k.kind == BY_CHANNEL else most
        return LaunchForm(WIDE_ROWS, width, cdiv(d_h, width), tile, 8 if tile == most else 4, 2)
    if whole > WIDE or (looks_up and (whole == WIDE or whole != d_h)):
        width, n_warps = (min(LOOKED_UP_PART, whole), 8) if looks_up else (PART, 4)
        return LaunchForm(WIDE_ROWS, width, cdiv(d_h, width), min(WIDE_TILE, tile), n_warps, STAGES)
    return LaunchForm(power_of_2(g, 16), whole, 1, tile, 8 if whole >= WIDE else 4, STAGES)


def tile_of(k: Form, v: Form) -> int:
    """Tokens that fit the registers at once; looked-up keys, codes of 3 bits and exact values need more of them."""
    if k.kind == BY_CHANNEL:
        return min(TILE if v.kind != EXACT else TILE // 2, k.group)
    return 16 if 3 in (k.bits, v.bits) else 32 if k.kind == BY_UNIT_TABLE else TILE


def form_of(side: Side, last: int) -> Form:
    """The form of the tokens in front of `last`."""
    if side.n < last:
        return Form(EXACT)
    exponent = 0 if side.kind != BY_FLOAT else 2 if side.bits == 4 else side.exponent
    return Form(side.kind, side.bits, side.group, side.packed.scales.dtype, exponent)


def row_bytes(form: Form, d_h: int) -> int:
    """Bytes of a token's codes, or of a channel's in a group of tokens."""
    return -(-(form.group if form.kind == BY_CHANNEL else d_h) * form.bits // 8)


def wide_group(form: Form, d_h: int, width: int) -> int:
    """A group's channels, padded where it is the whole token; of keys by channel its tokens."""
    return width if form.kind != BY_CHANNEL and form.group == d_h else form.group


def record_of(q: Tensor, each: Stretch, base: Packed) -> tuple[int, ...]:
    """What `attend_codes` reads of a stretch and stays as it is while no more tokens are packed."""
    found, exact = list[int](), [0, 0, 0]
    for side, there in zip(each.packed[:2], base[:2], strict=True):
        if side.n < each.last:
            assert side.exact.stride()[2:] == (q.shape[3], 1), side.exact.stride()
            exact = [elements(side.exact), side.exact.stride(1), side.n]
        codes, scales, zeros = side.packed
        assert codes[0].is_contiguous() and scales.stride() == zeros.stride(), (codes.stride(), scales.stride())
        assert side.kind != BY_CHANNEL or scales[0].is_contiguous(), scales.stride()
        away = distance(scales, there.packed.scales), distance(zeros, there.packed.scales)
        found += [distance(codes, there.packed.codes), codes.stride(0), *away, *scales.stride()]
    tables = [
        0 if side.table is None or there.table is None else distance(side.table, there.table)
        for side, there in zip(each.packed[:2], base[:2], strict=True)
    ]
    found += [*exact, tables[0], each.moves[0], tables[1]]
    return (*found, *[0] * (RECORD - len(found)))


def is_even(q: Tensor, each: Stretch, record: tuple[int, ...]) -> bool:
    """Whether codes and exact tokens can be read 16 bytes at a time."""
    size, own_q = q.element_size(), q if each.q is None else each.q
    codes = (each.packed.k.packed.codes, each.packed.v.packed.codes)
    starts = (q.data_ptr(), own_q.data_ptr(), q.shape[3] * size, *(x.data_ptr() for x in codes))
    far = (record[1], record[8], record[14] * size, record[15] * size)
    return all(number % 16 == 0 for number in (*far, *starts))


@jit
def spread(x, BITS: tl.constexpr):
    """Codes (rows, n * 8 / BITS) of bytes (rows, n), the first in the lowest bits."""
    if BITS == 4:
        x = tl.interleave(x & 15, x >> 4)
    if BITS == 2:
        x = tl.interleave(tl.interleave(x & 3, (x >> 4) & 3), tl.interleave((x >> 2) & 3, x >> 6))
    return x


@jit
def codes_of(codes, token, real, left, d_h, row_bytes, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The codes from channel `left` on of some tokens packed one by one, (tokens, WIDTH)."""
    rows = codes + token.to(tl.int64)[:, None] * row_bytes
    if BITS == 3:  # a code may lie in two bytes
        channel = left + tl.arange(0, WIDTH)
        first, inside = channel * 3, channel < d_h
        byte = first // 8
        low = tl.load(rows + byte[None], real[:, None] & inside[None], other=0).to(tl.int32)
        behind = real[:, None] & (inside & (byte + 1 < row_bytes))[None]
        high = tl.load(rows + byte[None] + 1, behind, other=0).to(tl.int32)
        return ((low | (high << 8)) >> (first % 8)[None]) & 7
    else:
        byte = left * BITS // 8 + tl.arange(0, WIDTH * BITS // 8)
        x = tl.load(rows + byte[None], real[:, None] & (byte < row_bytes)[None], other=0)
        return spread(x, BITS)


@jit
def of_floats(x, EXPONENT: tl.constexpr, READS: tl.constexpr):
    """Floats of 8 or 4 bits, with so many of an exponent, as float32."""
    if EXPONENT == 4 and READS:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # As float16, whose bias is another.
        BITS: tl.constexpr = 4 if EXPONENT == 2 else 8
        code, sign = x.to(tl.int32), x.to(tl.int32) >> (BITS - 1)
        half = (sign << 15) | ((code & ((1 << (BITS - 1)) - 1)) << (11 - BITS + EXPONENT))
        number = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * (1 << (16 - (1 << (EXPONENT - 1))))
        if EXPONENT == 4:
            number = tl.where((code & 127) == 127, float("nan"), number)
        return number


@jit
def of_powers(x):
    """Bytes of e8m0 as float32."""
    bits = x.to(tl.int32) << 23
    return tl.where(x == 0, 1 << 22, tl.where(x == 255, -1, bits)).to(tl.float32, bitcast=True)


@jit
def scaled(
    x, scales, zeros, unit, token, real, left, d_h, token_step, group_step,
    TILE: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, EXPONENT: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """Codes of tokens with groups of channels as numbers; a group may be wider than they are."""
    GROUPS: tl.constexpr = WIDTH // GROUP if WIDTH > GROUP else 1
    group = left // GROUP + tl.arange(0, GROUPS)
    at = token.to(tl.int64)[:, None] * token_step + group[None] * group_step
    there = real[:, None] & (group * GROUP < d_h)[None]
    if EXPONENT == 0:
        scale = tl.load(scales + at, there, other=0.0).to(tl.float32)
        zero = tl.load(zeros + at, there, other=0.0).to(tl.float32)
        x = tl.reshape(x.to(tl.float32), (TILE, GROUPS, WIDTH // GROUPS)) * scale[:, :, None] + zero[:, :, None]
    else:
        scale = tl.load(scales + at, there, other=0)
        if scales.dtype.element_ty == tl.uint8:
            scale = of_floats(scale, 4, READS) if GROUP == 16 else of_powers(scale)
        x = tl.reshape(of_floats(x, EXPONENT, READS), (TILE, GROUPS, WIDTH // GROUPS)) * (scale * unit)[:, :, None]
    return tl.reshape(x, (TILE, WIDTH))


@jit(unspecialized=("start", "n_pieces", "n_rows", "here", "split", "kernel"))
def attend_codes(
    q, k_codes, v_codes, k_scales, v_scales, k_entries, v_entries, table, sums, lses, clock, start, scale, cap,
    n_pieces, n_rows, here, split, kernel, h_kv, d_h, k_bytes, v_bytes,
    G: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    RECORD: tl.constexpr,
    K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_EXPONENT: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_EXPONENT: tl.constexpr,
    READS: tl.constexpr,  # e4m3 by itself
    LANES: tl.constexpr, EXACT_LANES: tl.constexpr, CAPPED: tl.constexpr,
    WIDE: tl.constexpr,  # float32 products, for the interpreter takes bfloat16 for its bits
):  # fmt: skip
    """Softmax over the tokens of an item for query heads of a KV head, padded to ROWS for the tensor cores.

    Those of wide heads are several programs', side by side, and each gives one of PARTS of the values. Kinds are
    those of `kernels/packed/codes.py`: -1 exact, 0 by channel, 1 by token, 3 a token's entries of a table brought to
    length 1, 4 floats.
    """
    age = steps_since(clock, start)
    is_there, piece, item, n, _, begin = find_item(tl.program_id(1), table, n_pieces, split, kernel, age)
    head = tl.program_id(2).to(tl.int64)
    at = table + 8 * n_pieces + n_rows + 1 + piece * RECORD
    skipped, asked = tl.load(table + n_pieces + piece) + tl.load(at + 18) * age, tl.load(table + 2 * n_pieces + piece)
    own_q = tl.where(asked < 1 << 20, asked * h_kv * G * d_h, asked - here)
    turn, own = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * WIDTH
    row, value_column = turn * ROWS + tl.arange(0, ROWS), own + tl.arange(0, WIDTH)
    in_value, mine = value_column < d_h, row < tl.where(is_there, G, 0)
    of_query = q + tl.multiple_of(own_q, EXACT_LANES) + (head * G + row)[:, None] * d_h
    queries = tl.load(of_query + value_column[None], mine[:, None] & in_value[None], other=0.0)
    product = queries.dtype
    if WIDE:
        queries, product = queries.to(tl.float32), tl.float32
    keys_at = k_codes + tl.multiple_of(tl.load(at) + head * tl.load(at + 1), LANES)
    k_scale = k_scales + tl.load(at + 2) + head * tl.load(at + 4)
    k_zero = k_scales + tl.load(at + 3) + head * tl.load(at + 4)
    k_step, k_group_step = tl.load(at + 5), tl.load(at + 6)
    values_at = v_codes + tl.multiple_of(tl.load(at + 7) + head * tl.load(at + 8), LANES)
    v_scale = v_scales + tl.load(at + 9) + head * tl.load(at + 11)
    v_zero = v_scales + tl.load(at + 10) + head * tl.load(at + 11)
    v_step, v_group_step = tl.load(at + 12), tl.load(at + 13)
    exact_at = q + tl.multiple_of(tl.load(at + 14) + head * tl.load(at + 15) - here, EXACT_LANES)
    first_exact = tl.load(at + 16).to(tl.int32)
    k_entries += tl.load(at + 17)
    v_entries += tl.load(at + 19)
    # Entries of e2m1 are its numbers times one, which its third number is.
    k_unit, v_unit = 1.0, 1.0
    if K_EXPONENT == 2:
        k_unit = tl.load(k_entries + 2)
    if V_EXPONENT == 2:
        v_unit = tl.load(v_entries + 2)
    IS_LATE: tl.constexpr = K_KIND == 4 and k_scales.dtype.element_ty != tl.uint8
    first, last = (skipped + begin).to(tl.int32), (skipped + tl.minimum(begin + split, n)).to(tl.int32)
    last = tl.where(is_there, last, 0)  # another kernel's piece lies elsewhere
    highest = tl.full((ROWS,), -1e30, tl.float32)  # finite: nothing minus nothing would be no number
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for front in range(first // TILE * TILE, last, TILE):
        token = front + tl.arange(0, TILE)
        real = (token >= first) & (token < last)
        logits, base = tl.zeros((ROWS, TILE), tl.float32), tl.zeros((ROWS,), tl.float32)
        squares = tl.zeros((TILE,), tl.float32)
        for part in range(PARTS):
            left = part * WIDTH
            column = left + tl.arange(0, WIDTH)
            inside = column < d_h
            there = real[:, None] & inside[None]
            if PARTS == 1:
                asking = queries
            else:
                asking = tl.load(of_query + column[None], mine[:, None] & inside[None], other=0.0).to(product)
            if K_KIND == 0:
                group, byte, wide = front // K_GROUP, tl.arange(0, TILE * K_BITS // 8), asking.to(tl.float32)
                rows = keys_at + (group * d_h + column).to(tl.int64)[:, None] * (K_GROUP * K_BITS // 8)
                if K_GROUP > TILE:
                    rows += front % K_GROUP // TILE * (TILE * K_BITS // 8)
                x = tl.load(rows + byte[None], inside[:, None], other=0)
                channel = group * d_h + column
                of_group = wide * tl.load(k_scale + channel, inside, other=0.0).to(tl.float32)[None]
                base += tl.sum(wide * tl.load(k_zero + channel, inside, other=0.0).to(tl.float32)[None], 1)
                keys = spread(x, K_BITS).to(tl.float32).to(product)
                logits = tl.dot(of_group.to(product), keys, logits, input_precision="ieee")
            elif K_KIND == -1:
                where = exact_at + (token - first_exact)[:, None] * d_h + column[None]
                keys = tl.load(where, there, other=0.0).to(product)
                logits = tl.dot(asking, tl.trans(keys), logits, input_precision="ieee")
            else:
                x = codes_of(keys_at, token, real, left, d_h, k_bytes, K_BITS, WIDTH)
                if K_KIND == 3:
                    x = tl.where(there, tl.load(k_entries + x.to(tl.int32)), 0.0)
                    squares += tl.sum(x * x, 1)
                elif IS_LATE:
                    x = of_floats(x, K_EXPONENT, READS)
                else:
                    x = scaled(
                        x, k_scale, k_zero, k_unit, token, real, left, d_h, k_step, k_group_step, TILE, K_GROUP, WIDTH,
                        K_EXPONENT, READS,
                    )  # fmt: skip
                logits = tl.dot(asking, tl.trans(x.to(product)), logits, input_precision="ieee")
        if K_KIND == 0:
            logits += base[:, None]
        if K_KIND == 3:
            norm = tl.load(k_scale + token.to(tl.int64) * k_step, real, other=0.0).to(tl.float32)
            logits *= (norm / tl.sqrt(squares + 1e-16))[None]
        if IS_LATE:
            logits *= tl.load(k_scale + token.to(tl.int64) * k_step, real, other=0.0)[None]
        seen = mine[:, None] & real[None]
        logits *= scale
        if CAPPED:
            logits = bend(logits, cap)
        logits = tl.where(seen, logits, -1e30)
        higher = tl.maximum(highest, tl.max(logits, 1))
        weights = tl.where(seen, tl.exp(logits - higher[:, None]), 0.0)
        shrink = tl.exp(highest - higher)
        if V_KIND == -1:
            where = exact_at + (token - first_exact)[:, None] * d_h + value_column[None]
            values = tl.load(where, real[:, None] & in_value[None], other=0.0)
        else:
            x = codes_of(values_at, token, real, own, d_h, v_bytes, V_BITS, WIDTH)
            values = scaled(
                x, v_scale, v_zero, v_unit, token, real, own, d_h, v_step, v_group_step, TILE, V_GROUP, WIDTH,
                V_EXPONENT, READS,
            )  # fmt: skip
        acc = acc * shrink[:, None] + tl.dot(weights.to(product), values.to(product), input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
    some = tl.where(total > 0, total, 1.0)
    to = (item * h_kv + head) * G + row
    tl.store(lses + to, tl.where(total > 0, highest + tl.log(some), float("-inf")), mine & (own == 0))
    tl.store(sums + to[:, None] * d_h + value_column[None], acc / some[:, None], mine[:, None] & in_value[None])
