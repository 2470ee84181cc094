"""Codes of a product quantiser: found for new keys, and stored in as many bits as they are counted at.

A code of b < 8 bits lies in bit planes: groups of 64 tokens take b words of 64 bits, word j with bit j of each code.
64 codes are read by b masked additions, and a token is appended by setting b bits. Codes of 8 bits are bytes.

Shapes    keys (h_kv, n, d_h), centroids (h_kv, m, c, d_m) -> codes (h_kv, m, n) uint8, int16 where c > 256.
Checks    tests/kernels/test_pq_codes.py.

Not here: centroids (`pq_fit.py`), scores by codes (`pq_scores.py`).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.build import dtypes, library, remembered
from kvbench.kernels.pq_fit import Assign, assign_torch, code_dtype

GROUP = 64  # tokens whose planes lie together
REF_VALUES = 1 << 26  # of the reference, at once


def pq_codes(keys: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of every part of every key, of equal ones the lower id."""
    rows_lie_together = keys.stride(-1) == 1 and keys.dtype in dtypes()
    if rows_lie_together and keys.device.type == "cpu" and native() is not None:
        return pq_codes_native(keys, centroids)
    return pq_codes_torch(keys, centroids)


def pq_codes_ref(keys: Tensor, centroids: Tensor) -> Tensor:
    """Codes from all distances, in float64, some tokens at a time: those of 32,768 would be 17 GB of differences."""
    h_kv, m, c, d_m = centroids.shape
    wide, found = centroids.double().unsqueeze(2), []
    for some in keys.split(max(1, REF_VALUES // (h_kv * m * c * d_m)), 1):
        parts = some.double().view(h_kv, -1, m, d_m).transpose(1, 2)
        found.append((parts.unsqueeze(3) - wide).square().sum(-1).argmin(-1).to(code_dtype(c)))
    return torch.cat(found, -1)


def pq_codes_torch(keys: Tensor, centroids: Tensor, assign: Assign = assign_torch) -> Tensor:
    """Codes by products around the mean of the centroids."""
    h_kv, m, c, d_m = centroids.shape
    flat = centroids.float().flatten(0, 1)  # (h_kv * m, c, d_m)
    mean = flat.mean(1, keepdim=True)
    parts = keys.float().unflatten(-1, (m, d_m)).transpose(1, 2).flatten(0, 1)
    return assign(parts - mean, flat - mean).view(h_kv, m, -1).to(code_dtype(c))


# On a CPU.


@remembered
def native() -> Any:
    """The C functions, or None."""
    lib = library("pq_codes")
    if lib is not None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        lib.pq_codes.argtypes = [size, size, size, size, size, size, pointer, size, size, pointer, pointer, size]
        lib.pq_append.argtypes = [size, size, size, size, pointer, pointer, size]
        lib.pq_codes.restype = lib.pq_append.restype = None
    return lib


def pq_codes_native(keys: Tensor, centroids: Tensor) -> Tensor:
    """Keys are read where they lie, in their own dtype."""
    (h_kv, m, c, d_m), n = centroids.shape, keys.shape[1]
    assert keys.shape == (h_kv, n, m * d_m), (keys.shape, centroids.shape)
    centroids = centroids.float().contiguous()
    codes = torch.empty(h_kv, m, n, dtype=code_dtype(c))
    native().pq_codes(
        dtypes()[keys.dtype], h_kv, m, n, c, d_m, keys.data_ptr(), keys.stride(0), keys.stride(1),
        centroids.data_ptr(), codes.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return codes


def append_native(codes: Tensor, data: Tensor, b: int, n: int) -> None:
    """Set the bits of the tokens after the first n."""
    codes = codes.to(torch.uint8).contiguous()
    h_kv, m, n_new = codes.shape
    assert data.shape[:2] == (h_kv, m), (codes.shape, data.shape)
    native().pq_append(h_kv * m, b, n, n_new, codes.data_ptr(), data.data_ptr(), data.shape[-1])


# Stored.


def counted_bytes(h_kv: int, m: int, b: int, n: int) -> int:
    """Bytes of the codes of n tokens at b bits each."""
    return -(-h_kv * m * n * b // 8)


def pack(codes: Tensor, b: int) -> Tensor:
    """Codes (..., n) in bit planes: (..., groups * 8 * b) uint8, zeros after the end."""
    n = codes.shape[-1]
    padded = torch.nn.functional.pad(codes, (0, -n % GROUP)).to(torch.uint8)
    if b == 8:
        return padded
    bits = padded.unflatten(-1, (-1, 1, 8, 8)) >> plane_shifts(b, codes.device).view(b, 1, 1)
    return ((bits & 1) << bit_shifts(codes.device)).sum(-1, dtype=torch.uint8).flatten(-3)


def unpack(packed: Tensor, b: int, n: int) -> Tensor:
    """The first n codes of what `pack` made: (..., n) uint8."""
    if b == 8:
        return packed[..., :n]
    words = packed[..., : -(-n // GROUP) * 8 * b].unflatten(-1, (-1, b, 8, 1))
    bits = (words >> bit_shifts(packed.device)) & 1
    planes = bits << plane_shifts(b, packed.device).view(b, 1, 1)
    return planes.sum(-3, dtype=torch.uint8).flatten(-3)[..., :n]


def plane_shifts(b: int, device: torch.device) -> Tensor:
    return torch.arange(b, dtype=torch.uint8, device=device)


def bit_shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


class PackedCodes:
    """Codes of one layer, b <= 8 bits each, with room for `capacity` tokens."""

    def __init__(self, h_kv: int, m: int, b: int, capacity: int, device: torch.device | str = "cpu") -> None:
        assert 1 <= b <= 8, b
        self.b, self.n, self.capacity = b, 0, capacity
        self.data = torch.zeros(h_kv, m, -(-capacity // GROUP) * 8 * b, dtype=torch.uint8, device=device)

    def extend(self, codes: Tensor) -> None:
        """Append the codes of the next tokens, (h_kv, m, n_new)."""
        n = self.n + codes.shape[-1]
        assert n <= self.capacity, f"{n} tokens, room for {self.capacity}"
        if self.data.device.type == "cpu" and native() is not None:
            append_native(codes, self.data, self.b, self.n)
        else:
            self.extend_torch(codes)
        self.n = n

    def extend_torch(self, codes: Tensor) -> None:
        """The last group that is not full is packed anew."""
        whole = self.n // GROUP * GROUP  # tokens of groups that are full
        tail = torch.cat([self.codes(whole, self.n), codes.to(self.data)], -1)
        packed = pack(tail, self.b)
        first = whole // 8 * self.b
        self.data[..., first : first + packed.shape[-1]] = packed

    def codes(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Codes of tokens [start, stop), (h_kv, m, stop - start) uint8."""
        stop = self.n if stop is None else stop
        assert 0 <= start <= stop <= self.n, (start, stop, self.n)
        whole = start // GROUP * GROUP
        part = self.data[..., whole // 8 * self.b :]
        return unpack(part, self.b, stop - whole)[..., start - whole :]

    @property
    def counted_bytes(self) -> int:
        """Bytes of the codes that are held, at b bits each."""
        h_kv, m, _ = self.data.shape
        return counted_bytes(h_kv, m, self.b, self.n)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole room."""
        return self.data.nbytes
