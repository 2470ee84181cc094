"""Numbers as small floats: the nearest value of a format, times a scale of their block and one that all tokens share.

A format is data: bits, the largest value, and the table of its values. FP8 has blocks as wide as a head, or no scale of
their own; NVFP4 has blocks of 16 whose scale is an e4m3 byte; MX has blocks of 32 whose scale is a power of two.

Shapes    x (h_kv, n, d_h); codes (h_kv, n, d_h * b / 8) uint8, packed as all codes are (`kernels/packed/codes.py`);
          scales of blocks (h_kv, n, d_h / g), float32 or bytes; shared (1 or h_kv, 1, 1) float32.
Checks    tests/kernels/test_floats.py.

Not here: attention over codes (`kernels/packed/attend.py`), which tokens are packed when (`methods/quantising`).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.build import library, remembered
from kvbench.kernels.packed.codes import BY_TOKEN, Quantised, by_group, pack, unpack, with_room
from kvbench.kernels.scratch import finer

LEAST_SCALE = 1e-6  # of a token and head, as vLLM has it: 1 / s of a subnormal s would be infinite
SCALE_BYTES = {"none": 0, "float": 4, "e4m3": 1, "e8m0": 1}  # of a block, as pack_floats.cpp counts them


class Format(NamedTuple):
    """A sign, an exponent and few bits behind it."""

    name: str
    bits: int
    top: float  # the largest value
    largest_exponent: int  # floor(log2(top))
    exponent_bits: int
    kind: str = ""  # torch's name, where torch has it

    @property
    def top_code(self) -> int:
        """The code of the largest value."""
        return int((values(self, torch.device("cpu")) == self.top).nonzero())

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.kind)


E4M3 = Format("e4m3", 8, 448.0, 8, 4, "float8_e4m3fn")
E5M2 = Format("e5m2", 8, 57_344.0, 15, 5, "float8_e5m2")
E2M1 = Format("e2m1", 4, 6.0, 2, 2)
CASTING = ("cpu", "cuda")  # devices whose casts round to the nearest, ties to even
HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1
NO_EXPONENT = 255  # of e8m0: NaN


class FloatCode(NamedTuple):
    """How the numbers of K or of V are coded: value(code) * scale of the block * shared scale."""

    format: Format
    group: int = 0  # channels of a block; 0: all of a head
    scale: Literal["none", "float", "e4m3", "e8m0"] = "none"  # of a block
    shared: Literal["one", "layer", "head"] = "one"  # scale that all tokens share; "one": there is none
    reach: float = 0.0  # what the largest number becomes by it, where it is measured
    is_known: bool = False  # it comes with the model, and is a constant
    tries: tuple[int, ...] = (6,)  # what a block's largest number may become, of e4m3: the one with the least error

    @property
    def is_measured(self) -> bool:
        """Whether the shared scale follows from the sample."""
        return self.shared != "one" and not self.is_known

    def width(self, d_h: int) -> int:
        """Channels of a block."""
        return self.group or d_h

    def token_bytes(self, d_h: int) -> int:
        """Bytes of a token of one KV head."""
        return d_h * self.format.bits // 8 + d_h // self.width(d_h) * SCALE_BYTES[self.scale]

    def shared_bytes(self, h_kv: int) -> int:
        """Bytes of the shared scale of a layer; a constant counts none."""
        return 4 * (h_kv if self.shared == "head" else 1) if self.is_measured else 0


# --- formats --------------------------------------------------------------------------------------


@cache
def values(format: Format, device: torch.device) -> Tensor:
    """What each code reads as, (2**bits,) float32."""
    if format.kind:
        return torch.arange(256, dtype=torch.uint8).view(format.dtype).float().to(device)
    sizes = torch.tensor(HALVES)
    return torch.cat([sizes, -sizes]).to(device)


@cache
def powers(device: torch.device) -> Tensor:
    """What each byte of e8m0 reads as, (256,) float32."""
    found = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).float()
    found[NO_EXPONENT] = torch.nan
    return found.to(device)


@cache
def bounds(format: Format, device: torch.device) -> Tensor:
    """The largest size that each code but the last takes, float32: a midpoint, where the code is even, or just below.

    So a tie goes to the even code.
    """
    sizes = values(format, torch.device("cpu"))[: 2 ** (format.bits - 1)]
    sizes = sizes[sizes <= format.top].double()
    middle = ((sizes[:-1] + sizes[1:]) / 2).float()
    middle[1::2] = torch.nextafter(middle[1::2], torch.zeros(()))
    return middle.to(device)


def encode(x: Tensor, format: Format) -> Tensor:
    """Codes uint8 of float32 numbers: the nearest value, ties to the even code; too large ones become the largest.

    The clamp comes first: torch's casts make other things of what is too large, by format and version.
    """
    if format.kind and x.device.type in CASTING:
        return x.clamp(-format.top, format.top).to(format.dtype).view(torch.uint8)
    size = torch.bucketize(x.abs(), bounds(format, x.device), out_int32=True).to(torch.uint8)
    return size | (x.signbit().to(torch.uint8) << (format.bits - 1))


# --- blocks ---------------------------------------------------------------------------------------


def measured(x: Tensor, code: FloatCode) -> Tensor:
    """The shared scale that lets the largest of x (h_kv, n, d_h) become `reach`; 1 where all are 0."""
    heads, n, _ = x.shape
    shape = (heads if code.shared == "head" else 1, 1, 1)
    if code.shared == "one" or not n:
        return torch.ones(shape, device=x.device)
    largest = x.abs().amax((1, 2) if code.shared == "head" else (0, 1, 2)).float().view(shape)
    scale = largest / code.reach
    return torch.where(scale == 0, 1.0, scale)


def quantise_floats(x: Tensor, code: FloatCode, shared: Tensor) -> Quantised:
    """Codes of float32 x, and scales of its blocks, or the shared one."""
    if code.scale == "none":
        scales = shared.expand(len(x), 1, 1)  # for any number of tokens
        return Quantised(encode(x if code.shared == "one" else x / shared, code.format), scales, scales)
    blocks = x.unflatten(-1, (-1, code.width(x.shape[2])))  # (h_kv, n, d_h / g, g)
    largest = blocks.abs().amax(-1)
    if code.scale == "float":
        scales = (largest / code.format.top).clamp(min=LEAST_SCALE)
        codes = encode(blocks * (1 / scales).unsqueeze(-1), code.format)
    elif code.scale == "e8m0":
        codes, scales = with_powers(blocks, largest, code.format)
    else:
        codes, scales = with_floats(blocks, largest, code, shared)
    scales = by_group(scales) if x.shape[1] > 1 else scales
    return Quantised(pack(codes.flatten(-2), code.format.bits), scales, scales)


def with_powers(blocks: Tensor, largest: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Codes, and the bytes of powers of two by which the largest of a block has the format's largest exponent."""
    exponent = torch.frexp(largest).exponent - 1 - format.largest_exponent
    byte = torch.where(largest == 0, 0, exponent.clamp(-127, 127) + 127)
    codes = encode(blocks * powers(blocks.device)[254 - byte].unsqueeze(-1), format)
    return codes.masked_fill_((largest == 0).unsqueeze(-1), 0), byte.to(torch.uint8)


def with_floats(blocks: Tensor, largest: Tensor, code: FloatCode, shared: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and scales as bytes of e4m3; where several are tried, those that lose least, the first among equals."""
    table, found = values(code.format, blocks.device), list[tuple[Tensor, Tensor, Tensor]]()
    for becomes in code.tries:
        scales = encode(largest / becomes / shared, E4M3)
        step = (values(E4M3, blocks.device)[scales.int()] * shared).unsqueeze(-1)
        # Of a step of 0 only the sign is left, as of what infinity divides.
        codes = encode(blocks / torch.where(step == 0, torch.inf, step), code.format)
        if len(code.tries) == 1:
            return codes, scales
        lost = finer(table[codes.int()] * step - blocks).square().sum(-1)
        found.append((codes, scales, lost))
    (codes, scales, least), *others = found
    for more, scale, lost in others:
        is_less = lost < least
        least = torch.where(is_less, lost, least)
        codes, scales = torch.where(is_less.unsqueeze(-1), more, codes), torch.where(is_less, scale, scales)
    return codes, scales


def tables(code: FloatCode, shared: Tensor) -> tuple[Tensor, Tensor | None]:
    """What codes read as, float32, and bytes of scales; with those of e4m3 the shared scale is within the codes'."""
    found = values(code.format, shared.device)
    if code.scale == "e8m0":
        return found, powers(shared.device)
    return (found * shared.flatten(), values(E4M3, shared.device)) if code.scale == "e4m3" else (found, None)


def rebuild_floats(packed: Quantised, code: FloatCode, shared: Tensor) -> Tensor:
    """What attention sees of coded tokens, (h_kv, n, d_h) float32."""
    codes, scales, _ = packed
    (table, of_bytes), bits = tables(code, shared), code.format.bits
    numbers = table[unpack(codes, bits, codes.shape[-1] * 8 // bits).int()]
    if code.scale == "none":
        return numbers if code.shared == "one" else numbers * shared
    real = scales if of_bytes is None else of_bytes[scales.int()]
    return (numbers.unflatten(-1, (scales.shape[-1], -1)) * real.unsqueeze(-1)).flatten(-2)


def floats_with_room(packed: Quantised, code: FloatCode, room: int) -> Quantised:
    """A copy with `room` places for tokens; a scale that all share needs none."""
    if code.scale != "none":
        made = with_room(packed, BY_TOKEN, room)
        return made._replace(zeros=made.scales)
    codes, scales, _ = packed
    wide, many = codes.new_empty(len(codes), room, codes.shape[2]), scales.expand(-1, room, -1)
    wide[:, : codes.shape[1]] = codes
    return Quantised(wide, many, many)


# --- a token at a time ----------------------------------------------------------------------------


@remembered
def native() -> Any:
    """The C function, or None."""
    lib = library("pack_floats")
    if lib is None:
        return None
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.pack_floats.argtypes = [
        size, size, pointer, size, size, size, ctypes.c_float, size, size, size, pointer, size, pointer, size, pointer,
        size, size,
    ]  # fmt: skip
    lib.pack_floats.restype = None
    return lib.pack_floats


def pack_token(x: Tensor, code: FloatCode, shared: Tensor, to: Quantised, at: int) -> None:
    """Codes of a token x (h_kv, 1, d) float32, and the scales of its blocks, to their place among `to`."""
    width, (heads, _, d) = code.width(x.shape[2]), x.shape
    if x.device.type != "cpu" or len(code.tries) > 1 or native() is None:
        codes, scales, _ = quantise_floats(x, code, shared)
        to.codes[:, at : at + 1] = codes
        if code.scale != "none":
            to.scales[:, at : at + 1] = scales
        return
    assert x.stride(2) == 1 and to.codes.stride(2) == 1, (x.stride(), to.codes.stride())
    form, scales = code.format, to.scales
    place = scales.data_ptr() + (at * scales.stride(1) * scales.element_size() if code.scale != "none" else 0)
    native()(
        heads, d, x.data_ptr(), x.stride(0), form.bits, form.exponent_bits, form.top, form.largest_exponent, width,
        [*SCALE_BYTES].index(code.scale), shared.data_ptr(), shared.stride(0) if len(shared) > 1 else 0,
        to.codes.data_ptr() + at * to.codes.stride(1), to.codes.stride(0), place, scales.stride(0), scales.stride(2),
    )  # fmt: skip
