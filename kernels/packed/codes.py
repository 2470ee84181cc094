"""Quantise numbers to codes of a few bits, pack codes into bytes, and rebuild numbers.

Shapes    x (h_kv, n, d_h); by channel: codes (h_kv, n / g, d_h, g * b / 8), scales and zeros (h_kv, n / g, d_h);
          by token: codes (h_kv, n, d_h * b / 8), scales and zeros (h_kv, n, d_h / g), best with those of one group
          next to each other; all codes uint8, packed, the first code of a group in the lowest bits.
Checks    tests/kernels/test_packed.py.

Not here: attention over codes (`kernels/packed/attend.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BY_CHANNEL, BY_TOKEN, BY_TABLE, BY_UNIT_TABLE, BY_FLOAT = range(5)  # as packed.cpp counts them


class Quantised(NamedTuple):
    """Codes of tokens, and what makes numbers of them."""

    codes: Tensor  # uint8, packed
    scales: Tensor
    zeros: Tensor


def min_max(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8, scales and zeros of groups along the last dimension, in x's own arithmetic; halves go to even."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    steps = torch.where(scale == 0, 0, (x - low) / scale)
    return steps.clamp_(0, 2**bits - 1).round_().to(torch.uint8), scale.squeeze(-1), low.squeeze(-1)


def quantise_channels(x: Tensor, bits: int, group: int) -> Quantised:
    """Keys, in groups of consecutive tokens of one channel; `group` divides their number."""
    grouped = x.unflatten(1, (-1, group)).transpose(2, 3).contiguous()  # (h_kv, n / g, d_h, g)
    codes, scales, zeros = min_max(grouped, bits)
    return Quantised(pack(codes, bits), scales, zeros)


def quantise_tokens(x: Tensor, bits: int, group: int) -> Quantised:
    """Groups of consecutive channels of one token."""
    codes, scales, zeros = min_max(x.unflatten(-1, (-1, group)), bits)
    return Quantised(pack(codes.flatten(-2), bits), by_group(scales), by_group(zeros))


def by_group(x: Tensor) -> Tensor:
    """The numbers (h_kv, n, groups) with those of one group next to each other, as attention to values reads them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def rebuild_channels(packed: Quantised, bits: int, group: int) -> Tensor:
    """What attention sees of packed keys, (h_kv, n, d_h)."""
    codes = unpack(packed.codes, bits, group).to(packed.scales.dtype)
    numbers = codes * packed.scales.unsqueeze(-1) + packed.zeros.unsqueeze(-1)
    return numbers.transpose(2, 3).flatten(1, 2)


def rebuild_tokens(packed: Quantised, bits: int, group: int) -> Tensor:
    """What attention sees of tokens packed one by one, (h_kv, n, d_h)."""
    n_channels = packed.scales.shape[-1] * group
    codes = unpack(packed.codes, bits, n_channels).unflatten(-1, (-1, group)).to(packed.scales.dtype)
    return (codes * packed.scales.unsqueeze(-1) + packed.zeros.unsqueeze(-1)).flatten(-2)


def with_room(packed: Quantised, kind: int, room: int) -> Quantised:
    """A copy with `room` places for tokens, or for groups of them where they are packed by channel."""
    codes, *numbers = packed
    made = codes.new_empty(len(codes), room, *codes.shape[2:])
    made[:, : codes.shape[1]] = codes
    if kind == BY_CHANNEL:
        wide = [x.new_empty(len(x), room, x.shape[2]) for x in numbers]
    else:
        wide = [x.new_empty(len(x), x.shape[2], room).transpose(1, 2) for x in numbers]
    for target, x in zip(wide, numbers, strict=True):
        target[:, : x.shape[1]] = x
    return Quantised(made, *wide)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes (…, n) uint8 as a stream of bits, (…, ceil(n * bits / 8)) uint8; zeros fill the last byte."""
    if bits == 8:
        return codes.contiguous()
    if 8 % bits == 0:
        each = codes.unflatten(-1, (-1, 8 // bits))
        packed = each[..., 0].clone()
        for i in range(1, 8 // bits):
            packed |= each[..., i] << (bits * i)
        return packed
    stream = (codes.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
    stream = stream.flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 8)).unflatten(-1, (-1, 8))
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    return (stream << places).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The first `n` codes of each stream, (…, n) uint8."""
    if bits == 8:
        return packed[..., :n]
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        return ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)[..., :n]
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    stream = ((packed.unsqueeze(-1) >> places) & 1).flatten(-2)[..., : n * bits].unflatten(-1, (n, bits))
    return (stream << torch.arange(bits, dtype=torch.uint8, device=packed.device)).sum(-1, dtype=torch.uint8)
