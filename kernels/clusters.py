"""Clusters in the order of their scores, the first tokens of clusters in an order, clusters in place of tokens.

Clusters lie one after the other: cluster c of a KV head owns `tokens[ends[c] - sizes[c] : ends[c]]`.

Shapes    order (n, heads, r), heads h_kv or h, some or all of c clusters; sizes, ends (h_kv, c);
          tokens (h_kv, n_tokens); result (n, heads, k).
Paths     C++ on a CPU, Triton on a GPU for the tokens; torch sorts there.
Checks    tests/kernels/test_clusters.py, benchmarks/bench_clusters.py.

Not here: making clusters (`kernels/kmeans.py`), scoring them.
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.build import library, remembered
from kvbench.kernels.capped import bend, capped, with_sink
from kvbench.kernels.jit import cdiv, jit, power_of_2, tl
from kvbench.kernels.topk import pack_key, pack_keys_ref


def cluster_order(scores: Tensor) -> Tensor:
    """Clusters by falling score, of equal ones the first: int64 in the shape of scores (..., c)."""
    if scores.device.type == "cpu" and scores.dtype == torch.float32 and native() is not None:
        return cluster_order_native(scores)
    return cluster_order_torch(scores)


def cluster_tokens(order: Tensor, sizes: Tensor, ends: Tensor, tokens: Tensor, k: int) -> Tensor:
    """The first `k` tokens of each head's clusters in its `order`, -1 after the last token that there is."""
    if order.device.type == "cpu" and native() is not None:
        return cluster_tokens_native(order, sizes, ends, tokens, k)
    return cluster_tokens_torch(order, sizes, ends, tokens, k)


def cluster_order_torch(scores: Tensor) -> Tensor:
    """A stable sort."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def cluster_tokens_torch(order: Tensor, sizes: Tensor, ends: Tensor, tokens: Tensor, k: int) -> Tensor:
    """All slots at once: each finds its cluster by bisection in the running sum of sizes."""
    n, heads, r = order.shape
    owner = torch.arange(len(sizes), device=order.device).repeat_interleave(heads // len(sizes))
    ranked = sizes[owner].expand(n, -1, -1).gather(-1, order)  # sizes in the heads' order
    stops = ranked.cumsum(-1)
    slots = torch.arange(k, device=order.device).expand(n, heads, k).contiguous()
    rank = torch.searchsorted(stops, slots, right=True)  # skips empty clusters
    found = rank < r
    rank = rank.clamp(max=r - 1)
    cluster = order.gather(-1, rank)
    # A slot's distance to the end of its cluster's slots is that of its token to the end of the cluster's tokens.
    at = ends[owner].expand(n, -1, -1).gather(-1, cluster) + slots - stops.gather(-1, rank)
    chosen = tokens[owner].expand(n, -1, -1).gather(-1, at.clamp(0, tokens.shape[-1] - 1))
    return chosen.masked_fill(~found, -1)


def cluster_tokens_ref(order: Tensor, sizes: Tensor, ends: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Head by head and cluster by cluster."""
    n, heads, _ = order.shape
    chosen = torch.full((n, heads, k), -1)
    for i in range(n):
        for head in range(heads):
            owner = head // (heads // len(sizes))
            parts = [tokens[owner, ends[owner, c] - sizes[owner, c] : ends[owner, c]] for c in order[i, head]]
            mine = torch.cat(parts)[:k]
            chosen[i, head, : len(mine)] = mine
    return chosen


# On a CPU.


@remembered
def native() -> Any:
    """The C functions, or None."""
    lib = library("clusters")
    if lib is not None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        lib.cluster_order.argtypes = [size, size, pointer, pointer, size]
        lib.cluster_tokens.argtypes = [*[size] * 7, *[pointer] * 5, size]
        lib.cluster_order.restype = lib.cluster_tokens.restype = None
    return lib


def cluster_order_native(scores: Tensor) -> Tensor:
    """A radix sort per head."""
    scores = scores.contiguous()
    c = scores.shape[-1]
    order = torch.empty(scores.shape, dtype=torch.int64)
    native().cluster_order(scores.numel() // max(1, c), c, scores.data_ptr(), order.data_ptr(), torch.get_num_threads())
    return order


def cluster_tokens_native(order: Tensor, sizes: Tensor, ends: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Cluster by cluster, each a copy of what lies together."""
    n, heads, r = order.shape
    order, sizes, ends, tokens = (x.contiguous() for x in (order, sizes, ends, tokens))
    assert {x.dtype for x in (order, sizes, ends, tokens)} == {torch.int64}, "not int64"
    chosen = torch.empty(n, heads, k, dtype=torch.int64)
    native().cluster_tokens(
        n * heads, heads, len(sizes), r, sizes.shape[-1], tokens.shape[-1], k, order.data_ptr(), sizes.data_ptr(),
        ends.data_ptr(), tokens.data_ptr(), chosen.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return chosen


def cluster_keys_ref(q: Tensor, centroids: Tensor, agg: str) -> Tensor:
    """Keys of clusters by inner product with queries (n, h, 1, d_h): (n, h, c), or (n, h_kv, c) for `group_mean`."""
    h_kv, c, _ = centroids.shape
    grouped = q.float().unflatten(1, (h_kv, -1)).squeeze(3)  # (n, h_kv, g, d_h)
    if agg == "group_mean":
        grouped = grouped.mean(2, keepdim=True)  # the mean of scores is the score of the mean
    scores = grouped @ centroids.float().mT
    return pack_keys_ref(scores.flatten(1, 2), torch.arange(c, device=q.device))


def mass_scores(
    q: Tensor, centroids: Tensor, sizes: Tensor, scale: float, cap: float = 0.0, sink: Tensor | None = None
) -> Tensor:
    """Softmax over all centroids, summed over each group: q (n, h, 1, d_h) -> (n, h_kv, c) float32.

    Clusters without tokens take part in the softmax, and get -1; so do sinks (h,). Logits are bent towards a cap.
    """
    (h_kv, c, d_h), n = centroids.shape, q.shape[0]
    grouped = q.view(n, h_kv, -1, d_h).transpose(0, 1)  # (h_kv, n, g, d_h)
    logits = grouped.flatten(1, 2).float() @ centroids.float().mT  # (h_kv, n * g, c)
    logits = capped(logits * scale, cap).view(h_kv, n, -1, c)
    weights = logits.softmax(-1)
    if sink is not None:
        weights *= (logits.logsumexp(-1) - sink.view(h_kv, 1, -1)).sigmoid().unsqueeze(-1)
    scores = weights.sum(2).transpose(0, 1)
    return scores.masked_fill(sizes == 0, -1.0)


def stand_in_ref(order: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Clusters of order (n, h_kv, r), -1 where they have no token, and the logarithms of their sizes, float32."""
    ids = order.int().long()
    ranked = sizes.expand(len(order), -1, -1).gather(-1, ids)
    return ids.masked_fill(ranked == 0, -1), ranked.clamp(min=1).log().float()


# On a GPU.

SLOTS = 32  # that one program fills
RANKED = 64  # clusters that it looks at together; 128 spill registers on an A100, where the prompt has 131,072 tokens
CHUNK = 128  # clusters that are weighed together


def cluster_tokens_triton(
    order: Tensor, sizes: Tensor, ends: Tensor, tokens: Tensor, k: int, first: int = 0, chosen: Tensor | None = None
) -> Tensor:  # fmt: skip
    """A program for some slots of a head; each of them sums the sizes up anew. `first` is added to every token.

    Into `chosen`, where it is given.
    """
    n, heads, r = order.shape
    order, sizes, ends, tokens = (in_rows(order), *(x.contiguous() for x in (sizes, ends, tokens)))
    if chosen is None:
        chosen = torch.empty(n, heads, k, dtype=torch.int64, device=order.device)
    if chosen.numel():
        fill_slots[(cdiv(k, SLOTS), n * heads)](
            order, sizes, ends, tokens, chosen, heads, heads // len(sizes), order.stride(1), r, sizes.shape[-1],
            tokens.shape[-1], k, first, min(RANKED, power_of_2(r)), SLOTS,
        )  # fmt: skip
    return chosen


def in_rows(order: Tensor) -> Tensor:
    """The order (n, heads, r), copied where its rows do not follow each other at even distances."""
    n, heads, _ = order.shape
    is_even = order.stride(2) == 1 and (n == 1 or order.stride(0) == heads * order.stride(1))
    return order if is_even else order.contiguous()


CLUSTERS = 16  # whose keys are one program's


def cluster_keys_triton(q: Tensor, centroids: Tensor, agg: str, keys: Tensor | None = None) -> Tensor:
    """A program for some clusters of a KV head and a row; into `keys`, where they are given."""
    (n, h, _, d_h), (h_kv, c, _) = q.shape, centroids.shape
    centroids, means = centroids.contiguous(), agg == "group_mean"
    if keys is None:
        keys = torch.empty(n, h_kv if means else h, c, dtype=torch.int64, device=q.device)
    key_clusters[(n, cdiv(c, CLUSTERS), h_kv)](
        q.contiguous(), centroids, keys, d_h, c, h // h_kv, means, CLUSTERS, power_of_2(d_h)
    )
    return keys


@jit
def key_clusters(q, centroids, keys, d_h, c, g, MEANS: tl.constexpr, CLUSTERS: tl.constexpr, WIDTH: tl.constexpr):
    row, block, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cluster, column = block * CLUSTERS + tl.arange(0, CLUSTERS), tl.arange(0, WIDTH)
    inside, real = column < d_h, cluster < c
    where = (head.to(tl.int64) * c + cluster)[:, None] * d_h + column[None]
    means = tl.load(centroids + where, real[:, None] & inside[None], other=0.0).to(tl.float32)
    h_kv = tl.num_programs(2)
    total = tl.zeros((CLUSTERS,), tl.float32)
    for i in range(g):
        query_head = (row * h_kv + head) * g + i
        query = tl.load(q + query_head * d_h + column, inside, other=0.0).to(tl.float32)
        score = tl.sum(means * query[None], 1)
        if MEANS:
            total += score / g
        else:
            tl.store(keys + query_head.to(tl.int64) * c + cluster, pack_key(score, cluster), real)
    if MEANS:
        tl.store(keys + (row * h_kv + head).to(tl.int64) * c + cluster, pack_key(total, cluster), real)


@jit(unspecialized=("stride", "r", "c", "n_tokens", "k", "first"))
def fill_slots(
    order, sizes, ends, tokens, chosen, heads, heads_per_owner, stride, r, c, n_tokens, k, first,
    CHUNK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1)
    owner = row % heads // heads_per_owner
    slot = block * SLOTS + tl.arange(0, SLOTS)
    # The slot's cluster is the first that ends after it: as many as end at it or before are in front.
    rank = tl.zeros((SLOTS,), tl.int32)
    stop = tl.full((SLOTS,), 1 << 30, tl.int32)
    n_before = tl.zeros((1,), tl.int32)
    for begin in range(0, r, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        ranked = tl.load(order + row * stride + at, at < r, other=0).to(tl.int32)  # the lower half, where they are keys
        size = tl.load(sizes + owner * c + ranked, at < r, other=0).to(tl.int32)
        stops = n_before + tl.cumsum(size, 0)
        in_front = (stops[None] <= slot[:, None]) & (at < r)[None]
        rank += tl.sum(in_front.to(tl.int32), 1)
        stop = tl.minimum(stop, tl.min(tl.where(in_front | (at >= r)[None], 1 << 30, stops[None]), 1))
        n_before += tl.sum(size, 0)
    found = (rank < r) & (slot < k)
    cluster = tl.load(order + row * stride + rank, found, other=0).to(tl.int32)
    end = tl.load(ends + owner * c + cluster, found, other=0)
    token = tl.load(tokens + owner * n_tokens + end + slot - stop, found, other=-1)
    tl.store(chosen + row * k + slot, tl.where(found, token + first, -1), slot < k)


def mass_keys_triton(
    q: Tensor, centroids: Tensor, sizes: Tensor, scale: float, cap: float = 0.0, sink: Tensor | None = None
) -> Tensor:
    """Keys of `mass_scores`, (n, h_kv, c) int64 as `topk.py` says."""
    (n, h, _, d_h), (h_kv, c, _) = q.shape, centroids.shape
    n_blocks, g = cdiv(c, CLUSTERS), h // h_kv
    logits = torch.empty(n, h, c, dtype=torch.float32, device=q.device)
    lses = torch.empty(n, h, n_blocks, dtype=torch.float32, device=q.device)
    keys = torch.empty(n, h_kv, c, dtype=torch.int64, device=q.device)
    logit_clusters[(n, n_blocks, h_kv)](
        q.contiguous(), centroids.contiguous(), logits, lses, scale, cap, d_h, c, g, n_blocks, CLUSTERS,
        power_of_2(d_h), cap > 0,
    )  # fmt: skip
    lses = with_sink(lses, sink)
    n_blocks = lses.shape[2]
    weigh_clusters[(n, cdiv(c, CHUNK), h_kv)](
        logits, lses, sizes.contiguous(), keys, c, g, n_blocks, CHUNK, power_of_2(n_blocks)
    )
    return keys


@jit
def logit_clusters(
    q, centroids, logits, lses, scale, cap, d_h, c, g, n_blocks,
    CLUSTERS: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, block, head, h_kv = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    cluster, column = block * CLUSTERS + tl.arange(0, CLUSTERS), tl.arange(0, WIDTH)
    inside, real = column < d_h, cluster < c
    where = (head.to(tl.int64) * c + cluster)[:, None] * d_h + column[None]
    means = tl.load(centroids + where, real[:, None] & inside[None], other=0.0).to(tl.float32)
    for i in range(g):
        query_head = (row * h_kv + head) * g + i
        query = tl.load(q + query_head * d_h + column, inside, other=0.0).to(tl.float32)
        x = tl.sum(means * query[None], 1) * scale
        if CAPPED:
            x = bend(x, cap)
        x = tl.where(real, x, float("-inf"))
        tl.store(logits + query_head.to(tl.int64) * c + cluster, x, real)
        highest = tl.max(x, 0)
        tl.store(lses + query_head * n_blocks + block, highest + tl.log(tl.sum(tl.exp(x - highest), 0)))


@jit
def weigh_clusters(logits, lses, sizes, keys, c, g, n_blocks, CHUNK: tl.constexpr, BLOCKS: tl.constexpr):
    row, block, head, h_kv = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    cluster, part = block * CHUNK + tl.arange(0, CHUNK), tl.arange(0, BLOCKS)
    real = cluster < c
    total = tl.zeros((CHUNK,), tl.float32)
    for i in range(g):
        query_head = (row * h_kv + head) * g + i
        parts = tl.load(lses + query_head * n_blocks + part, part < n_blocks, other=float("-inf"))
        highest = tl.max(parts, 0)
        lse = highest + tl.log(tl.sum(tl.exp(parts - highest), 0))
        x = tl.load(logits + query_head.to(tl.int64) * c + cluster, real, other=float("-inf"))
        total += tl.exp(x - lse)
    size = tl.load(sizes + head * c + cluster, real, other=0)
    tl.store(
        keys + (row * h_kv + head).to(tl.int64) * c + cluster, pack_key(tl.where(size > 0, total, -1.0), cluster), real
    )


def stand_in_triton(order: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """`stand_in_ref` in one launch."""
    n, h_kv, r = order.shape
    order, c = in_rows(order), sizes.shape[1]
    ids = torch.empty(n, h_kv, r, dtype=torch.int64, device=order.device)
    logs = torch.empty(n, h_kv, r, dtype=torch.float32, device=order.device)
    if ids.numel():
        name_clusters[(cdiv(r, CHUNK), n * h_kv)](
            order, sizes.contiguous(), ids, logs, h_kv, order.stride(1), r, c, CHUNK
        )
    return ids, logs


@jit
def name_clusters(order, sizes, ids, logs, h_kv, stride, r, c, CHUNK: tl.constexpr):
    block, row = tl.program_id(0), tl.program_id(1)
    at = block * CHUNK + tl.arange(0, CHUNK)
    cluster = tl.load(order + row * stride + at, at < r, other=0).to(tl.int32)
    size = tl.load(sizes + (row % h_kv) * c + cluster, at < r, other=0)
    tl.store(ids + row * r + at, tl.where(size > 0, cluster, -1).to(tl.int64), at < r)
    tl.store(logs + row * r + at, tl.log(tl.maximum(size, 1).to(tl.float32)), at < r)
