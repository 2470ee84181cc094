"""Packing single tokens of many rows on a GPU, in one launch: by their ranges, as a norm and entries of a codebook, or
as floats.

Shapes    as in `kernels/packed/codes.py` and `floats.py`, whose torch makes the same codes.
Checks    tests/kernels/test_packed_rows.py.

Not here: packing a whole prompt, which is done once (`kernels/packed/codes.py`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvbench.kernels.clock import Since, now, steps_since
from kvbench.kernels.jit import distance, jit, power_of_2, tl, upload
from kvbench.kernels.packed.codes import Quantised
from kvbench.kernels.packed.floats import LEAST_SCALE, SCALE_BYTES, FloatCode

FIELDS = 11  # numbers of a token
COLUMNS = 32  # of a rotation, for one pass
SCALINGS = (*SCALE_BYTES,)  # as the kernel counts them


class Ageing(NamedTuple):
    """A token, and where it is packed."""

    x: Tensor  # (1, h_kv, 1, d_h)
    to: Quantised
    at: int  # place in it
    shared: Tensor | None = None  # float32, one number: what scales of e4m3 are multiplied by


class Book(NamedTuple):
    """Rotation and midpoints by which keys become codes; values become codes by their range."""

    rotation: Tensor  # (d_h, d_h) float32
    midpoints: Tensor  # float32, ascending
    key_bits: int
    value_bits: int
    least: float  # scale, and what is added to a norm


def fields(token: Ageing, x: Tensor, to: Quantised) -> list[int]:
    """The numbers of a token, as the kernels read them: distances from those of the first one."""
    codes, scales, zeros = token.to
    assert codes[0].is_contiguous() and scales.stride() == zeros.stride(), (codes.stride(), scales.stride())
    assert token.x.stride(3) == 1, token.x.stride()
    beside = token.at * scales.stride(1)
    return [
        distance(token.x, x), token.x.stride(1), distance(codes, to.codes) + token.at * codes.stride(1),
        codes.stride(0), distance(scales, to.scales) + beside, distance(zeros, to.scales) + beside, *scales.stride(),
        token.x.stride(2), codes.stride(1),
    ]  # fmt: skip


def packs(d_h: int, group: int) -> bool:
    """Whether `RangePacking` knows such groups: codes of one follow those of the one before without a gap."""
    return group == d_h or (group >= 8 and group & (group - 1) == 0 and d_h % group == 0)


class RangePacking:
    """Packing like `quantise_tokens`, in the tokens' own arithmetic, of later tokens to later places at later steps."""

    def __init__(self, tokens: Sequence[Ageing], bits: int, group: int) -> None:
        self.x, self.to, _ = tokens[0]
        self.grid, self.d_h = (len(tokens), self.x.shape[1]), self.x.shape[3]
        self.table = upload(
            [number for token in tokens for number in fields(token, self.x, self.to)], self.x.device
        )  # fmt: skip
        self.form = group, FIELDS, bits, power_of_2(group, 8), power_of_2(self.d_h // group)

    def take(self, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        """Pack what the tokens to pack are at the step after the one that was told."""
        self.pack(since.later(1))

    def pack(self, since: Since | None = None) -> None:
        """Tokens and places that are as many further on as steps have passed."""
        since = now(self.x.device) if since is None else since
        pack_ranges[self.grid](self.x, self.to.codes, self.to.scales, self.table, *since, self.d_h, *self.form)


class UnitPacking:
    """Norms and codes of rotated keys, and values by their range, of as many rows; at later steps of their newest."""

    def __init__(self, keys: Sequence[Ageing], values: Sequence[Ageing], book: Book, row: int = 0) -> None:
        """`row` is that of the first token among all rows."""
        self.k, self.v, self.book, self.row = keys[0].to, values[0].to, book, row
        x = keys[0].x, values[0].x
        self.d_h, self.grid = x[0].shape[3], (len(keys), x[0].shape[1], 2)
        numbers = [n for token in keys for n in fields(token, x[0], self.k)]
        numbers += [n for token in values for n in fields(token, x[1], self.v)]
        self.table = upload(numbers, x[0].device)

    def take(self, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        """Pack with the current tokens of all rows."""
        self.pack(k_new[self.row :], v_new[self.row :], since)

    def pack(self, k: Tensor, v: Tensor, since: Since | None = None) -> None:
        """Pack tensors that begin at the first token, to places that are as many further on as steps have passed."""
        book, since = self.book, now(k.device) if since is None else since
        code_units[self.grid](
            k, v, self.k.codes, self.v.codes, self.k.scales, self.v.scales, book.rotation, book.midpoints, self.table,
            *since, book.least, len(book.midpoints), self.d_h, *book.rotation.stride(), FIELDS, book.key_bits,
            book.value_bits, COLUMNS, power_of_2(self.d_h, 8),
        )  # fmt: skip


def packs_floats(code: FloatCode, d_h: int) -> bool:
    """Whether `FloatPacking` knows such codes."""
    return packs(d_h, code.width(d_h)) and d_h % 8 == 0 and (code.scale != "e4m3" or code.tries == (6,))


class FloatPacking:
    """Packing like `quantise_floats`, of keys and values of as many rows; at later steps of their newest."""

    def __init__(
        self, keys: Sequence[Ageing], values: Sequence[Ageing], k_code: FloatCode, v_code: FloatCode, row: int = 0
    ) -> None:
        """`row` is that of the first token among all rows."""
        self.first, self.row = (keys[0], values[0]), row
        self.grid = (len(keys), keys[0].x.shape[1], 2)
        numbers, forms = list[int](), list[tuple[int, ...]]()
        for tokens, code in ((keys, k_code), (values, v_code)):
            first, d = tokens[0], tokens[0].x.shape[3]
            for token in tokens:
                of_token = fields(token, first.x, first.to)
                if token.shared is not None and first.shared is not None:
                    of_token[5] = distance(token.shared, first.shared)  # in place of zeros
                numbers += of_token
            group, format = code.width(d), code.format
            wide = power_of_2(group, 8), power_of_2(d // group)
            forms.append((d, group, format.bits, format.exponent_bits, SCALINGS.index(code.scale), *wide))
        self.form = (*forms[0], *forms[1])
        self.table = upload(numbers, keys[0].x.device)

    def take(self, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        """Pack with the current tokens of all rows."""
        self.pack(k_new[self.row :], v_new[self.row :], since)

    def pack(self, k: Tensor, v: Tensor, since: Since | None = None) -> None:
        """Pack tensors that begin at the first token, to places that are as many further on as steps have passed."""
        (_, to_k, _, of_k), (_, to_v, _, of_v) = self.first
        shared = (self.table if each is None else each for each in (of_k, of_v))
        since = now(k.device) if since is None else since
        code_floats[self.grid](
            k, v, to_k.codes, to_v.codes, to_k.scales, to_v.scales, *shared, self.table, *since, LEAST_SCALE, FIELDS,
            *self.form,
        )  # fmt: skip


@jit
def store_codes(to, codes, first, n_bytes, BITS: tl.constexpr, N: tl.constexpr):
    """Codes (N, 8), of which eight fill as many bytes as they have bits, to the bytes from `first` on."""
    place = tl.arange(0, 8)
    words = tl.sum(codes.to(tl.int64) << (place * BITS)[None].to(tl.int64), 1)  # (N,)
    byte = (words[:, None] >> (place * 8)[None].to(tl.int64)) & 255
    where = first + tl.arange(0, N)[:, None] * BITS + place[None]
    tl.store(to + where, byte.to(tl.uint8), (place < BITS)[None] & (where < n_bytes))


@jit
def rounded(x, cast: tl.constexpr):
    """A float32 as the type has it; of bfloat16 by its bits, since Triton's interpreter cuts them off."""
    if cast == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    else:
        return x.to(cast).to(tl.float32)


@jit(unspecialized=("start",))
def pack_ranges(
    x, codes, scales, table, clock, start, d_h, group,
    FIELDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    at, head = table + tl.program_id(0) * FIELDS, tl.program_id(1).to(tl.int64)
    age = steps_since(clock, start)
    own = x + tl.load(at) + head * tl.load(at + 1) + tl.load(at + 9) * age
    cast: tl.constexpr = x.dtype.element_ty
    which, place = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    where = which[:, None] * group + place[None]
    inside = (place < group)[None] & (where < d_h)
    number = tl.load(own + where, inside, other=0.0).to(tl.float32)
    low = tl.min(tl.where(inside, number, float("inf")), 1)
    high = tl.max(tl.where(inside, number, float("-inf")), 1)
    real = which * group < d_h
    low, high = tl.where(real, low, 0.0), tl.where(real, high, 0.0)
    width = rounded(high - low, cast)
    scale = rounded(tl.math.div_rn(width, tl.full((GROUPS,), (1 << BITS) - 1, tl.float32)), cast)
    above = rounded(number - low[:, None], cast)
    unit = tl.where(scale == 0, 1.0, scale)
    steps = rounded(tl.math.div_rn(above, tl.broadcast_to(unit[:, None], (GROUPS, GROUP))), cast)
    steps = tl.where((scale == 0)[:, None], 0.0, tl.minimum(tl.maximum(steps, 0.0), (1 << BITS) - 1.0))
    # What is added to 1.5 * 2^23 is rounded to an integer, halves to even.
    code = tl.where(inside, (steps + 12582912.0) - 12582912.0, 0.0).to(tl.int32)
    beside = head * tl.load(at + 6) + which * tl.load(at + 8) + tl.load(at + 7) * age
    tl.store(scales + tl.load(at + 4) + beside, scale.to(cast), real)
    tl.store(scales + tl.load(at + 5) + beside, low.to(cast), real)
    to = codes + tl.load(at + 2) + head * tl.load(at + 3) + tl.load(at + 10) * age
    eights = tl.reshape(code, (GROUPS * GROUP // 8, 8))
    store_codes(to, eights, 0, d_h * BITS // 8, BITS, GROUPS * GROUP // 8)


@jit(unspecialized=("start",))
def code_units(
    k, v, k_codes, v_codes, k_scales, v_scales, rotation, midpoints, table, clock, start, least, n_midpoints, d_h,
    row_step, column_step,
    FIELDS: tl.constexpr, K_BITS: tl.constexpr, V_BITS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, age = tl.arange(0, WIDTH), steps_since(clock, start)
    inside = column < d_h
    if tl.program_id(2) == 0:
        at = table + row * FIELDS
        key = tl.load(k + tl.load(at) + head * tl.load(at + 1) + column, inside, other=0.0).to(tl.float32)
        norm = tl.sqrt(tl.sum(key * key, 0))
        unit = key / (norm + least)
        beside = head * tl.load(at + 6) + tl.load(at + 7) * age
        tl.store(k_scales + tl.load(at + 4) + beside, norm.to(tl.float16))
        to = k_codes + tl.load(at + 2) + head * tl.load(at + 3) + tl.load(at + 10) * age
        for first in range(0, d_h, COLUMNS):
            turned = first + tl.arange(0, COLUMNS)
            those = (turned < d_h)[:, None] & inside[None]
            rows = tl.load(rotation + turned[:, None] * row_step + column[None] * column_step, those, other=0.0)
            number = tl.sum(rows * unit[None], 1)
            code = tl.zeros((COLUMNS,), tl.int32)
            for i in range(n_midpoints):
                code += (number >= tl.load(midpoints + i)).to(tl.int32)
            code = tl.where(turned < d_h, code, 0)
            eights = tl.reshape(code, (COLUMNS // 8, 8))
            store_codes(to, eights, first // 8 * K_BITS, (d_h * K_BITS + 7) // 8, K_BITS, COLUMNS // 8)
    else:
        at = table + (tl.num_programs(0) + row) * FIELDS
        value = tl.load(v + tl.load(at) + head * tl.load(at + 1) + column, inside, other=0.0).to(tl.float32)
        low = tl.min(tl.where(inside, value, float("inf")), 0)
        high = tl.max(tl.where(inside, value, float("-inf")), 0)
        scale = tl.maximum((high - low) / ((1 << V_BITS) - 1), least)
        code = tl.minimum((value - low) / scale + 0.5, (1 << V_BITS) - 1.0)
        code = tl.where(inside, tl.maximum(code, 0.0), 0.0).to(tl.int32)
        to = v_codes + tl.load(at + 2) + head * tl.load(at + 3) + tl.load(at + 10) * age
        store_codes(to, tl.reshape(code, (WIDTH // 8, 8)), 0, (d_h * V_BITS + 7) // 8, V_BITS, WIDTH // 8)
        beside = head * tl.load(at + 6) + tl.load(at + 7) * age
        tl.store(v_scales + tl.load(at + 4) + beside, scale.to(tl.float16))
        tl.store(v_scales + tl.load(at + 5) + beside, low.to(tl.float16))


@jit
def nearest_floats(x, EXPONENT: tl.constexpr, BITS: tl.constexpr, TOP: tl.constexpr):
    """Codes int32 of float32 numbers: the nearest value, ties to the even code; too large ones become the largest."""
    FRACTION: tl.constexpr = BITS - 1 - EXPONENT
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    DROPPED: tl.constexpr = 23 - FRACTION
    size = tl.minimum(tl.abs(x), TOP)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << FRACTION)
    # What is added to 1.5 * 2^23 is rounded to an integer, halves to even.
    small = (size * (1 << (BIAS + FRACTION - 1)) + 12582912.0) - 12582912.0
    code = tl.where(size * (1 << (BIAS + FRACTION - 1)) < (1 << FRACTION), small.to(tl.int32), normal)
    code = tl.where(x != x, (1 << (BITS - 1)) - 1, code)
    return code | tl.where(x.to(tl.int32, bitcast=True) < 0, 1 << (BITS - 1), 0)


@jit
def code_side(
    x, codes, scales, shared, at, head, age, least, d, group,
    BITS: tl.constexpr, EXPONENT: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A head's key or value as floats. Scalings: 0 as it is there, 1 of a token, 2 of e4m3, 3 of e8m0."""
    LARGEST: tl.constexpr = 2 if EXPONENT == 2 else 8 if EXPONENT == 4 else 15  # exponent
    TOP: tl.constexpr = 6.0 if EXPONENT == 2 else 448.0 if EXPONENT == 4 else 57344.0
    which, place = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    where, real = which[:, None] * group + place[None], which * group < d
    inside = (place < group)[None] & (where < d)
    number = tl.load(x + tl.load(at) + head * tl.load(at + 1) + where, inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(number), 1)
    to_scale = scales + tl.load(at + 4) + head * tl.load(at + 6) + which * tl.load(at + 8) + tl.load(at + 7) * age
    ones = tl.full((GROUPS,), 1.0, tl.float32)
    if SCALING == 0:
        step = tl.load(to_scale, real, other=1.0)
        number = tl.math.div_rn(number, tl.broadcast_to(step[:, None], (GROUPS, GROUP)))
    elif SCALING == 1:
        step = tl.maximum(tl.math.div_rn(largest, ones * TOP), least)
        tl.store(to_scale, step, real)
        number *= tl.math.div_rn(ones, step)[:, None]
    elif SCALING == 2:
        unit = tl.load(shared + tl.load(at + 5))
        byte = nearest_floats(tl.math.div_rn(tl.math.div_rn(largest, ones * 6.0), ones * unit), 4, 8, 448.0)
        tl.store(to_scale, byte.to(tl.uint8), real)
        # Moved to its place in a float32, but for the smallest.
        bits = (byte + (120 << 3)) << 20
        step = tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, bits.to(tl.float32, bitcast=True)) * unit
        apart = tl.broadcast_to(tl.where(step == 0, float("inf"), step)[:, None], (GROUPS, GROUP))
        number = tl.math.div_rn(number, apart)
    else:
        power = (largest.to(tl.int32, bitcast=True) >> 23) - LARGEST
        power = tl.minimum(tl.maximum(power, 0), 254)
        tl.store(to_scale, power.to(tl.uint8), real)
        number *= ((254 - power) << 23).to(tl.float32, bitcast=True)[:, None]
        number = tl.where((largest == 0)[:, None], 0.0, number)
    code = nearest_floats(number, EXPONENT, BITS, TOP)
    to = codes + tl.load(at + 2) + head * tl.load(at + 3) + tl.load(at + 10) * age
    store_codes(to, tl.reshape(code, (GROUPS * GROUP // 8, 8)), 0, d * BITS // 8, BITS, GROUPS * GROUP // 8)


@jit(unspecialized=("start",))
def code_floats(
    k, v, k_codes, v_codes, k_scales, v_scales, k_shared, v_shared, table, clock, start, least, FIELDS: tl.constexpr,
    K_D: tl.constexpr, K_GROUP: tl.constexpr, K_BITS: tl.constexpr, K_EXPONENT: tl.constexpr,
    K_SCALING: tl.constexpr, K_WIDE: tl.constexpr, K_GROUPS: tl.constexpr,
    V_D: tl.constexpr, V_GROUP: tl.constexpr, V_BITS: tl.constexpr, V_EXPONENT: tl.constexpr,
    V_SCALING: tl.constexpr, V_WIDE: tl.constexpr, V_GROUPS: tl.constexpr,
):  # fmt: skip
    head, age = tl.program_id(1).to(tl.int64), steps_since(clock, start)
    at = table + (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * FIELDS
    if tl.program_id(2) == 0:
        code_side(
            k, k_codes, k_scales, k_shared, at, head, age, least, K_D, K_GROUP,
            K_BITS, K_EXPONENT, K_SCALING, K_WIDE, K_GROUPS,
        )  # fmt: skip
    else:
        code_side(
            v, v_codes, v_scales, v_shared, at, head, age, least, V_D, V_GROUP,
            V_BITS, V_EXPONENT, V_SCALING, V_WIDE, V_GROUPS,
        )  # fmt: skip
