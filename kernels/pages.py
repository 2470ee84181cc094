"""Bounds of pages of keys, and what a query's inner product with any key of a page can be at most.

Shapes    keys (1, h_kv, s, d_h), kmin and kmax (1, h_kv, n_pages, d_h), q (1, h, 1, d_h), scores (1, h, n_pages).
Paths     C++ on a CPU; Triton on a GPU, where scores become keys to choose by (`kernels/topk.py`). Bounds are read in
          their own dtype, products and sums are float32.
Checks    tests/kernels/test_pages.py, benchmarks/bench_pages.py.

Not here: which pages are taken.
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.build import dtypes, library, remembered
from kvbench.kernels.fast import takes
from kvbench.kernels.jit import cdiv, fit_rows, jit, power_of_2, tl
from kvbench.kernels.topk import pack_key, pack_keys_ref


def page_bounds(keys: Tensor, page_len: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of every channel over each page; the last page may be short. In the keys' dtype."""
    rows_lie_together = keys.shape[0] == 1 and keys.stride()[2:] == (keys.shape[3], 1)
    if rows_lie_together and takes_native(keys):
        return page_bounds_native(keys, page_len)
    if rows_lie_together and takes("pages", keys.device):
        return page_bounds_triton(keys, page_len)
    return page_bounds_ref(keys, page_len)


def page_scores(q: Tensor, kmin: Tensor, kmax: Tensor) -> Tensor:
    """The largest inner product that a key within each page's bounds could have with each query head, float32."""
    alike = kmin.stride() == kmax.stride() and kmin.stride()[2:] == (kmin.shape[3], 1)
    if alike and len(q) == 1 and q.dtype == kmin.dtype == kmax.dtype and takes_native(q):
        return page_scores_native(q, kmin, kmax)
    return page_scores_torch(q, kmin, kmax)


def page_keys_ref(q: Tensor, kmin: Tensor, kmax: Tensor, agg: str) -> Tensor:
    """Keys of pages by `agg`, for queries (n, h, 1, d_h) of rows that share bounds: (n, h or h_kv, n_pages) int64."""
    scores = page_scores_torch(q, kmin, kmax)
    if agg != "query_head":
        grouped = scores.unflatten(1, (kmin.shape[1], -1))
        scores = grouped.mean(2) if agg == "group_mean" else grouped.amax(2)
    return pack_keys_ref(scores, torch.arange(scores.shape[-1], device=q.device))


def expand_keys_ref(keys: Tensor, start: int, length: int, stop: int) -> Tensor:
    """Positions of the pages' tokens, (n, heads, k * length): -1 from `stop` on; page 0 begins at `start`."""
    pages = keys.int().long().unsqueeze(-1)
    tokens = pages * length + torch.arange(start, start + length, device=keys.device)
    return tokens.masked_fill((tokens >= stop) | (pages < 0), -1).flatten(2)


def page_bounds_ref(keys: Tensor, page_len: int) -> tuple[Tensor, Tensor]:
    """Whole pages at once, then the short one."""
    n, h_kv, s, d_h = keys.shape
    whole = s // page_len * page_len
    bounds = []
    for reduce in (torch.amin, torch.amax):
        found = keys.new_empty(n, h_kv, 0, d_h)
        if whole:
            found = reduce(keys[:, :, :whole].unflatten(2, (-1, page_len)), 3)
        if whole < s:
            found = torch.cat([found, reduce(keys[:, :, whole:], 2, keepdim=True)], 2)
        bounds.append(found)
    return bounds[0], bounds[1]


def page_scores_ref(q: Tensor, kmin: Tensor, kmax: Tensor) -> Tensor:
    """Scores by their definition: channel by channel the larger of the two products, summed up."""
    group = q.shape[1] // kmin.shape[1]
    low, high = (x.float().repeat_interleave(group, 1) for x in (kmin, kmax))
    q = q.float()
    return torch.maximum(q * low, q * high).sum(-1)


def page_scores_torch(q: Tensor, kmin: Tensor, kmax: Tensor) -> Tensor:
    """Scores from two products: of a channel's two the larger is that with kmax where q > 0, else that with kmin."""
    n, h, _, d_h = q.shape
    h_kv = kmin.shape[1]
    grouped = q.reshape(n, h_kv, h // h_kv, d_h).float()
    scores = grouped.clamp(min=0) @ kmax.float().mT + grouped.clamp(max=0) @ kmin.float().mT
    return scores.flatten(1, 2)  # (n, h, n_pages)


# On a CPU.


def takes_native(x: Tensor) -> bool:
    """Whether the C++ can work on such a tensor."""
    return x.device.type == "cpu" and x.dtype in dtypes() and native() is not None


@remembered
def native() -> Any:
    """The C functions, or None."""
    lib = library("pages")
    if lib is not None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        lib.page_bounds.argtypes = [size, size, size, size, size, pointer, size, pointer, pointer, size]
        lib.page_scores.argtypes = [
            size, size, size, size, size, pointer, pointer, pointer, size, pointer, pointer, size
        ]  # fmt: skip
        lib.page_bounds.restype = lib.page_scores.restype = None
    return lib


def page_bounds_native(keys: Tensor, page_len: int) -> tuple[Tensor, Tensor]:
    """One pass over the keys for both bounds."""
    _, h_kv, s, d_h = keys.shape
    kmin = keys.new_empty(1, h_kv, cdiv(s, page_len), d_h)
    kmax = torch.empty_like(kmin)
    native().page_bounds(
        dtypes()[keys.dtype], h_kv, s, d_h, page_len, keys.data_ptr(), keys.stride(1),
        kmin.data_ptr(), kmax.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return kmin, kmax


def page_scores_native(q: Tensor, kmin: Tensor, kmax: Tensor) -> Tensor:
    """Bounds of a KV head are read once for its query heads."""
    (_, h, _, d_h), (_, h_kv, n_pages, _) = q.shape, kmin.shape
    q, room, scores = q.contiguous(), torch.empty(2 * h * (d_h + 16)), torch.empty(1, h, n_pages)
    native().page_scores(
        dtypes()[q.dtype], h, h_kv, n_pages, d_h, q.data_ptr(), kmin.data_ptr(), kmax.data_ptr(), kmin.stride(1),
        room.data_ptr(), scores.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return scores


# On a GPU.

PAGES, HELD = 32, 8192  # whose scores are one program's; numbers of either bound that four warps hold
WIDE, WHOLE = 256, 16384  # channels of a page that one program bounds, and numbers


def page_bounds_triton(keys: Tensor, page_len: int) -> tuple[Tensor, Tensor]:
    """A program for every page."""
    _, h_kv, s, d_h = keys.shape
    n_pages = cdiv(s, page_len)
    kmin = keys.new_empty(1, h_kv, n_pages, d_h)
    kmax = torch.empty_like(kmin)
    if kmin.numel():
        rows = power_of_2(page_len)
        width = min(WIDE, power_of_2(d_h), max(16, WHOLE // rows))
        bound_page[(n_pages, h_kv, cdiv(d_h, width))](
            keys, kmin, kmax, s, d_h, page_len, n_pages, keys.stride(1), rows, width
        )
    return kmin, kmax


AGGREGATES = ("query_head", "group_mean", "group_max")


def page_keys_triton(q: Tensor, kmin: Tensor, kmax: Tensor, agg: str, keys: Tensor | None = None) -> Tensor:
    """A program for some pages of a KV head and a row; into `keys`, where they are given."""
    (n, h, _, d_h), (_, h_kv, n_pages, _) = q.shape, kmin.shape
    assert kmin.stride() == kmax.stride(), (kmin.stride(), kmax.stride())
    how, g = AGGREGATES.index(agg), h // h_kv
    if keys is None:
        keys = torch.empty(n, h if how == 0 else h_kv, n_pages, dtype=torch.int64, device=q.device)
    if keys.numel():
        width = power_of_2(d_h)
        some, n_warps = fit_rows(width, PAGES, HELD)
        key_pages[(n, cdiv(n_pages, some), h_kv)](
            q.contiguous(), kmin, kmax, keys, d_h, n_pages, kmin.stride(1), g, how, some, width, num_warps=n_warps
        )
    return keys


def expand_keys_triton(keys: Tensor, start: int, length: int, stop: int, tokens: Tensor | None = None) -> Tensor:
    """A program for a row's and head's tokens, some at a time; into `tokens`, where they are given."""
    (n, heads, k), block = keys.shape, 1024
    assert keys.stride(-1) == 1, keys.stride()
    if tokens is None:
        tokens = torch.empty(n, heads, k * length, dtype=torch.int64, device=keys.device)
    if tokens.numel():
        expand_pages[(cdiv(k * length, block), heads, n)](
            keys, tokens, k * length, start, length, stop, keys.stride(0), keys.stride(1), block
        )
    return tokens


@jit(unspecialized=("n_pages",))
def key_pages(
    q, kmin, kmax, keys, d_h, n_pages, stride, g, HOW: tl.constexpr, PAGES: tl.constexpr, WIDTH: tl.constexpr
):
    row, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page, column = block * PAGES + tl.arange(0, PAGES), tl.arange(0, WIDTH)
    inside, real = column < d_h, page < n_pages
    where = head.to(tl.int64) * stride + page[:, None] * d_h + column[None]
    low = tl.load(kmin + where, real[:, None] & inside[None], other=0.0).to(tl.float32)
    high = tl.load(kmax + where, real[:, None] & inside[None], other=0.0).to(tl.float32)
    h_kv = tl.num_programs(2)
    merged = tl.full((PAGES,), float("-inf") if HOW == 2 else 0.0, tl.float32)
    for i in range(g):
        query_head = (row * h_kv + head) * g + i
        query = tl.load(q + query_head * d_h + column, inside, other=0.0).to(tl.float32)
        score = tl.sum(tl.maximum(query, 0.0)[None] * high + tl.minimum(query, 0.0)[None] * low, 1)
        if HOW == 0:
            tl.store(keys + query_head.to(tl.int64) * n_pages + page, pack_key(score, page), real)
        elif HOW == 1:
            merged += score / g
        else:
            merged = tl.maximum(merged, score)
    if HOW:
        tl.store(keys + (row * h_kv + head).to(tl.int64) * n_pages + page, pack_key(merged, page), real)


@jit(unspecialized=("n", "start", "stop", "row_stride", "head_stride"))
def expand_pages(keys, tokens, n, start, length, stop, row_stride, head_stride, TOKENS: tl.constexpr):
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = block * TOKENS + tl.arange(0, TOKENS)
    page = tl.load(keys + row * row_stride + head * head_stride + at // length, at < n, other=0).to(tl.int32)
    token = start + page * length + at % length
    token = tl.where((page >= 0) & (token < stop), token, -1)
    to = (row * tl.num_programs(1) + head).to(tl.int64) * n
    tl.store(tokens + to + at, token.to(tl.int64), at < n)


@jit
def bound_page(keys, kmin, kmax, s, d_h, page_len, n_pages, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    page, head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    # Rows after the page's end are its last row again.
    last = tl.minimum(page * page_len + page_len, s) - 1
    at = tl.minimum(page * page_len + row, last)
    inside = column < d_h
    where = head.to(tl.int64) * stride + at[:, None] * d_h + column[None]
    x = tl.load(keys + where, inside[None], other=0.0)
    to = (head.to(tl.int64) * n_pages + page) * d_h + column
    tl.store(kmin + to, tl.min(x.to(tl.float32), 0).to(x.dtype), inside)
    tl.store(kmax + to, tl.max(x.to(tl.float32), 0).to(x.dtype), inside)
