"""Hash tables of keys: which tokens share a bucket with a query in at least two tables, and what such a find weighs.

A token's code in a table is a whole number below 2^bits. A table is the tokens' numbers sorted by code, and where each
code's bucket begins. A find weighs one over its chance to be found, so that a sum over what was found has the
expectation of the sum over all.

Shapes    codes (h_kv, tables, n) int16; a query head's own (h, tables) int16; positions (1, h, most), -1 after a
          head's last, their log-weights the same in float32.
Paths     C++ on a CPU, else torch. Tables lie in the host's memory wherever the model is.
Checks    tests/kernels/test_collisions.py.

Not here: hyperplanes and codes (`methods/retrieving/magicpig.py`).
"""

from __future__ import annotations

import ctypes
from math import pi
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.build import dtypes, library, remembered


class Tables(NamedTuple):
    """Tables of each KV head's tokens."""

    bits: int
    tokens: Tensor  # (h_kv, tables, n) int32, by code and then by number
    starts: Tensor  # (h_kv, tables, 2^bits + 1) int32


class Hashed(NamedTuple):
    """What weighs the tokens of tables: their keys, whose mean was taken away before they were hashed."""

    tables: Tables
    means: Tensor  # (h_kv, d_h) float32
    norms: Tensor  # (h_kv, n) float32, of centred keys
    first: int  # position of token 0


def chance(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """Chance that a key at this cosine to the query shares a bucket with it in at least two tables."""
    return chance_of_two(one_table(cosine, bits), tables)


def one_table(cosine: Tensor, bits: int) -> Tensor:
    """Chance that a key at this cosine shares a bucket with the query in one table."""
    return (1 - cosine.clamp(-1, 1).arccos() / pi) ** bits


def chance_of_two(one: Tensor, tables: int) -> Tensor:
    """Chance that an event of chance `one` happens at least twice in so many tables."""
    return 1 - (1 - one) ** (tables - 1) * (1 + (tables - 1) * one)


def pack_codes(products: Tensor, bits: int, codes: Tensor) -> None:
    """Codes of vectors by their inner products with planes (n, tables * bits), a table's next to each other.

    Written to `codes` (tables, n) int16: bit i of a code is whether the product with its table's plane i is above 0.
    """
    (tables, n), takes = codes.shape, products.device.type == "cpu" and native() is not None
    if takes and products.is_contiguous() and codes.stride(1) == 1:
        native().pack_codes(n, tables, bits, products.data_ptr(), codes.data_ptr(), codes.stride(0))
    else:
        pack_codes_ref(products, bits, codes)


def pack_codes_ref(products: Tensor, bits: int, codes: Tensor) -> None:
    """Write codes of vectors as sums of powers of 2."""
    powers = 2 ** torch.arange(bits, device=products.device)
    codes.copy_(((products > 0).unflatten(-1, (-1, bits)) * powers).sum(-1).mT)


def build_tables(codes: Tensor, bits: int) -> Tables:
    """The tables of codes (h_kv, tables, n) on the host."""
    heads, tables, n = codes.shape
    if native() is None:
        return build_tables_ref(codes, bits)
    codes = codes.contiguous()
    made = Tables(
        bits,
        torch.empty(heads, tables, n, dtype=torch.int32),
        torch.empty(heads, tables, (1 << bits) + 1, dtype=torch.int32),
    )
    native().build_tables(
        heads, n, tables, 1 << bits, codes.data_ptr(), made.tokens.data_ptr(), made.starts.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return made


def build_tables_ref(codes: Tensor, bits: int) -> Tables:
    """Build tables by a stable sort, and bisection for where buckets begin."""
    by_table = codes.contiguous().int()
    found = by_table.sort(dim=-1, stable=True)
    borders = torch.arange((1 << bits) + 1, dtype=torch.int32).expand(*by_table.shape[:2], -1).contiguous()
    starts = torch.searchsorted(found.values.contiguous(), borders)
    return Tables(bits, found.indices.int(), starts.int())


def find_twice(codes: Tensor, q: Tensor, keys: Tensor, hashed: Hashed, least: float) -> tuple[Tensor, Tensor, Tensor]:
    """Positions found, their log-weights, -log(chance + least), and how many entries of buckets each head read, (h,).

    codes (h, tables) int16 and q (h, d_h) float32 are the queries', keys (1, h_kv, s, d_h) those of all positions.
    """
    if native() is None or keys.dtype not in dtypes():
        return find_twice_ref(codes, q, keys, hashed, least)
    (h, n_tables), (h_kv, _, n) = codes.shape, hashed.tables.tokens.shape
    d_h, tables, threads = q.shape[1], hashed.tables, torch.get_num_threads()
    assert keys.stride()[2:] == (d_h, 1) and keys.device.type == "cpu", keys.stride()
    codes, q = codes.contiguous(), q.contiguous()
    found = torch.empty(h, n, dtype=torch.int32)
    counts, entries = torch.empty(h, dtype=torch.int64), torch.empty(h, dtype=torch.int64)
    native().find_twice(
        h, h_kv, n, n_tables, 1 << tables.bits, codes.data_ptr(), tables.tokens.data_ptr(), tables.starts.data_ptr(),
        found.data_ptr(), counts.data_ptr(), entries.data_ptr(), threads,
    )  # fmt: skip
    most = int(counts.max())
    idx, weights = torch.empty(1, h, most, dtype=torch.int64), torch.empty(1, h, most)
    middle = keys[:, :, hashed.first :]
    native().weigh_found(
        dtypes()[keys.dtype], h, h_kv, d_h, n, tables.bits, n_tables, least, hashed.first, q.data_ptr(),
        middle.data_ptr(), keys.stride(1), hashed.means.data_ptr(), hashed.norms.data_ptr(), found.data_ptr(),
        counts.data_ptr(), most, idx.data_ptr(), weights.data_ptr(), threads,
    )  # fmt: skip
    return idx, weights, entries


def find_twice_ref(
    codes: Tensor, q: Tensor, keys: Tensor, hashed: Hashed, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Head by head and table by table, in float64."""
    (h, n_tables), (bits, tokens, starts) = codes.shape, hashed.tables
    entries = torch.zeros(h, dtype=torch.int64)
    h_kv, _, n = tokens.shape
    positions, weights = [], []
    for head in range(h):
        owner, met = head * h_kv // h, torch.zeros(n, dtype=torch.int64)
        for table, code in enumerate(codes[head].tolist()):
            begin, end = starts[owner, table, code : code + 2].tolist()
            met[tokens[owner, table, begin:end].long()] += 1
            entries[head] += end - begin
        found = (met >= 2).nonzero()[:, 0]
        query = q[head].double()
        inner = (keys[0, owner, hashed.first + found].double() - hashed.means[owner].double()) @ query
        lengths = hashed.norms[owner, found].double() * query.norm()
        cosine = torch.where(lengths > 0, inner / lengths.where(lengths > 0, 1), 0)
        positions.append(found + hashed.first)
        weights.append(-(chance(cosine, bits, n_tables) + least).log().float())
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(positions, True, -1).unsqueeze(0), pad(weights, True, 0.0).unsqueeze(0), entries


@remembered
def native() -> Any:
    """The C functions, or None."""
    lib = library("collisions")
    if lib is not None:
        size, pointer, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
        lib.build_tables.argtypes = [size, size, size, size, pointer, pointer, pointer, size]
        lib.find_twice.argtypes = [size, size, size, size, size, *[pointer] * 6, size]
        lib.weigh_found.argtypes = [
            size, size, size, size, size, size, size, number, size, pointer, pointer, size, *[pointer] * 4, size,
            pointer, pointer, size,
        ]  # fmt: skip
        lib.pack_codes.argtypes, lib.pack_codes.restype = [size, size, size, pointer, pointer, size], None
        lib.build_tables.restype = lib.find_twice.restype = lib.weigh_found.restype = None
    return lib
