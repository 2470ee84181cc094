"""Attention of many queries, each over chosen tokens of its own: the tokens of a feed, which one call reads.

Shapes    q (1, h, n, d_h); idx (n, heads, k), -1: no token; bias alike, float32; out (1, h, n, d_v), lse (1, h, n).
Paths     C++ on a CPU; elsewhere one query after the other, as the reference has it.
Checks    tests/kernels/test_select_attend.py.

Not here: one query (`kernels/select_attend.py`), which tokens it chose.
"""

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.kernels.build import dtypes
from kvbench.kernels.select_attend import Tokens, attend_parts_ref, native, native_takes, packed_part


def attend_each(q: Tensor, part: Tokens, scale: float, cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Queries (1, h, n, d_h), each over its own places idx (n, heads, k), with a bias alike: out, and lse (1, h, n)."""
    _, h, n, d_h = q.shape
    assert part.idx is not None and len(part.idx) == n and q.device.type == "cpu", (part.idx, q.shape)
    queries = q.transpose(1, 2).contiguous()  # (1, n, h, d_h)
    if not native_takes(q, [part]):
        each = [attend_parts_ref(queries[:, i].unsqueeze(2), [of_query(part, i)], scale, cap) for i in range(n)]
        return torch.cat([out for out, _ in each], 2), torch.cat([lse for _, lse in each], 2)
    d_v = part.v.shape[3]
    out, lse = queries.new_empty(1, n, h, d_v), torch.empty(1, n, h)
    numbers = [*packed_part(replace(part, bias=None))]
    if part.bias is not None:
        assert part.bias.shape == part.idx.shape and part.bias.is_contiguous(), part.bias.shape
        assert part.bias.dtype == torch.float32, part.bias.dtype
        numbers[-3:-1] = part.bias.data_ptr(), part.bias.shape[2]
    native().attend_each(
        dtypes()[q.dtype], n, h, d_h, d_v, queries.data_ptr(), scale, cap,
        (ctypes.c_int64 * len(numbers))(*numbers), out.data_ptr(), lse.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out.transpose(1, 2), lse.transpose(1, 2)


def of_query(part: Tokens, i: int) -> Tokens:
    """The places of one query of many."""
    assert part.idx is not None
    bias = None if part.bias is None else part.bias[i : i + 1]
    return replace(part, idx=part.idx[i : i + 1], bias=bias)
