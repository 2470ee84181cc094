"""Batched k-means: `p` problems of the same size at once, each with centroids of its own.

Lloyd's rounds: every point to its nearest centroid, every centroid to the mean of its points. `cosine` compares
directions only, and its mean is still that of the points as they are, as ClusterKV has it. With `unit` every mean is
scaled to length 1, as RetroInfer has it. All in float32.

Shapes    points (p, n, d), centroids (p, c, d), labels (p, n) int64, sizes (p, c) int64.
Paths     On a CPU C++, whose products stay in registers: a third of torch's time (3 x 7,984 x 64 in 100, one thread).
          Torch on any device, where products are made in chunks, on a CPU such as stay in its cache, and sums are taken
          by `index_add_`. On a GPU labels and means are Triton's: no similarity is stored, and points are added up in a
          fixed order, cluster by cluster; a round writes 28 bytes a point and the means.
Checks    tests/kernels/test_kmeans.py.

Not here: how many clusters, which initial ones beyond a random draw, what a cluster is used for.
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.build import library, remembered
from kvbench.kernels.fast import takes
from kvbench.kernels.jit import cdiv, jit, power_of_2, shared_memory, tl

EPS = 1e-8

# Bytes of one chunk's similarities. On a CPU rows of 256 to 2,048 measured alike within 5 % (3 problems of 7,984 x 64,
# 100 centroids, one and two threads: 5.3 and 3.2 ms); with 400 centroids all rows at once take twice as long.
CPU_CHUNK_BYTES = 1 << 20
CHUNK_BYTES = 256 << 20
CHUNK_ROWS = 512  # where that many rows of all problems are too much, fewer problems at a time
# A product adds up the last columns of a ragged width in another order than the others, so that equal centroids would
# differ in the last bit and the choice between them be arbitrary. Multiples of 8 up to 416 measured equal.
WIDTH = 8


class Clustering(NamedTuple):
    """Result of k-means; labels and sizes are of the final centroids."""

    centroids: Tensor  # (p, c, d) float32
    labels: Tensor  # (p, n) int64
    sizes: Tensor  # (p, c) int64; 0 where nothing is nearest
    rounds: Tensor  # (p,) int64, updates of the centroids


def draw_points(points: Tensor, c: int, generator: torch.Generator) -> Tensor:
    """`c` points of each problem at random, none twice: (p, c, d). The generator is the CPU's, whatever the device."""
    p, n, d = points.shape
    assert c <= n, f"{c} of {n} points"
    drawn = torch.rand(p, n, generator=generator).argsort(-1)[:, :c].to(points.device)
    return points.gather(1, drawn.unsqueeze(-1).expand(-1, -1, d))


def kmeans(points: Tensor, centroids: Tensor, n_rounds: int, metric: str = "cosine", unit: bool = False) -> Clustering:
    """At most `n_rounds` updates from these `centroids`, for each problem until none of its labels changes."""
    if points.device.type == "cpu" and points.shape[1] and native() is not None:
        return kmeans_native(points, centroids, n_rounds, metric, unit)
    return kmeans_torch(points, centroids, n_rounds, metric, unit)


def kmeans_torch(
    points: Tensor, centroids: Tensor, n_rounds: int, metric: str = "cosine", unit: bool = False
) -> Clustering:
    """All problems at once; those whose labels came to rest leave."""
    points, centroids = points.float().contiguous(), centroids.float().clone()
    labels = nearest(points, centroids, metric)
    rounds = torch.zeros(len(points), dtype=torch.int64)
    moving = torch.arange(len(points), device=points.device)  # problems that have not converged
    part, part_labels = points, labels
    for _ in range(n_rounds):
        means, sizes = cluster_means(part, part_labels, centroids[moving])
        means = unit_length(means, sizes) if unit else means
        updated = nearest(part, means, metric, part_labels)
        still = (updated != part_labels).any(-1).nonzero().squeeze(-1)
        centroids[moving], labels[moving] = means, updated
        rounds[moving.cpu()] += 1
        if len(still) == 0:
            break
        if len(still) < len(moving):
            moving, part, updated = moving[still], part[still], updated[still]
        part_labels = updated
    return Clustering(centroids, labels, count_labels(labels, centroids.shape[1]), rounds)


def kmeans_ref(
    points: Tensor, centroids: Tensor, n_rounds: int, metric: str = "cosine", unit: bool = False
) -> Clustering:
    """k-means (`kmeans`), a problem at a time and always all rounds: after the labels came to rest nothing changes."""
    centroids = centroids.float().clone()
    for i, mine in enumerate(points.float()):
        for _ in range(n_rounds):
            labels = nearest_ref(mine[None], centroids[i, None], metric)
            means, sizes = cluster_means_ref(mine[None], labels, centroids[i, None])
            centroids[i] = (unit_length(means, sizes) if unit else means)[0]
    labels = nearest_ref(points, centroids, metric)
    rounds = torch.full((len(points),), n_rounds)
    return Clustering(centroids, labels, count_labels(labels, centroids.shape[1]), rounds)


def nearest(points: Tensor, centroids: Tensor, metric: str, before: Tensor | None = None) -> Tensor:
    """The most similar centroid of every point, (p, n): by angle, distance or inner product.

    Of equal ones the first, or a point's label in `before` where it is among them. With labels of which most still
    hold it takes three quarters of the time: finding a maximum is quick, finding where it is is not.
    """
    weights, bias = as_product(centroids.float(), metric)
    if takes("kmeans", points.device):
        return nearest_triton(points, weights, metric == "l2")
    if before is None or points.device.type != "cpu":
        labels = torch.empty(points.shape[:2], dtype=torch.int64, device=points.device)
        for here, similarity in similarities(points, weights, bias):
            # max with its index takes 0.6 to 0.9 of argmax's time on a CPU.
            labels[here] = similarity.max(-1).indices
        return labels
    labels = before.clone()
    for here, similarity in similarities(points, weights, bias):
        mine = before[here].unsqueeze(-1)
        gains = similarity.amax(-1, keepdim=True) - similarity.gather(-1, mine)
        moved = gains.flatten().nonzero().squeeze(-1)
        best = similarity.flatten(0, 1).index_select(0, moved).max(-1).indices
        labels[here] = mine.flatten().index_copy(0, moved, best).view(gains.shape[:2])
    return labels


def similarities(points: Tensor, weights: Tensor, bias: Tensor | None) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Where in (p, n) a chunk of points lies, and their similarities to all centroids."""
    (p, n, _), c = points.shape, weights.shape[1]
    spare = -c % WIDTH  # copies of the first centroid: the first of equals is chosen
    weights = torch.cat([weights, weights[:, :1].expand(-1, spare, -1)], 1)
    weights = weights.mT.contiguous()  # (p, d, c + spare)
    if bias is not None:
        bias = torch.cat([bias, bias[:, :1].expand(-1, spare)], 1).unsqueeze(1)
    chunk_bytes = CPU_CHUNK_BYTES if points.device.type == "cpu" else CHUNK_BYTES
    room = max(1, chunk_bytes // (4 * (c + spare)))  # rows of one problem
    n_problems = max(1, min(p, room // CHUNK_ROWS))
    n_rows = max(1, room // n_problems)
    for first in range(0, p, n_problems):
        some = slice(first, first + n_problems)
        for start in range(0, n, n_rows):
            rows = slice(start, start + n_rows)
            chunk = points[some, rows].float()
            if bias is None:
                yield (some, rows), torch.bmm(chunk, weights[some])
            else:
                yield (some, rows), torch.baddbmm(bias[some], chunk, weights[some])


def as_product(centroids: Tensor, metric: str) -> tuple[Tensor, Tensor | None]:
    """Weights (p, c, d) and bias (p, c) for which point @ weights + bias ranks centroids as the metric does.

    A point's own norm never matters: cosine divides all of its similarities by it, and squared distances share it.
    """
    if metric == "cosine":
        return centroids / centroids.norm(dim=-1, keepdim=True).clamp(min=EPS), None
    if metric == "l2":
        return centroids, -0.5 * centroids.square().sum(-1)
    assert metric == "dot", metric
    return centroids, None


def nearest_ref(points: Tensor, centroids: Tensor, metric: str) -> Tensor:
    """Nearest centroids by the definition of each metric, all at once."""
    points, centroids = points.float(), centroids.float()
    if metric == "l2":
        return torch.cdist(points, centroids, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)
    if metric == "cosine":
        points = points / points.norm(dim=-1, keepdim=True).clamp(min=EPS)
        centroids = centroids / centroids.norm(dim=-1, keepdim=True).clamp(min=EPS)
    return (points @ centroids.mT).argmax(-1)


def cluster_means(points: Tensor, labels: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The mean point of every cluster (p, c, d), and the sizes (p, c); an empty cluster keeps its centroid."""
    if takes("kmeans", points.device):
        return cluster_means_triton(points, labels, centroids)
    if points.device.type != "cpu":
        return cluster_means_ref(points, labels, centroids)
    # A fifteenth of the time of a product with one-hot labels, a quarter of sorting them first.
    sums = torch.zeros(centroids.numel() // centroids.shape[-1], points.shape[-1])
    sums.index_add_(0, flat_labels(labels, centroids.shape[1]), points.float().flatten(0, 1))
    return divide(sums.view(centroids.shape), count_labels(labels, centroids.shape[1]), centroids)


def cluster_means_ref(points: Tensor, labels: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Sums as a product with rows of ones and zeros, in a fixed order on every device."""
    c = centroids.shape[1]
    n_rows = max(1, CHUNK_BYTES // (12 * c * len(points)))  # int64 rows, and their float32 copy
    sums = torch.zeros_like(centroids, dtype=torch.float32)
    for some, theirs in zip(points.split(n_rows, 1), labels.split(n_rows, 1), strict=True):
        sums += torch.nn.functional.one_hot(theirs, c).float().mT @ some.float()
    return divide(sums, count_labels(labels, c), centroids)


def divide(sums: Tensor, sizes: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Means from sums; `centroids` where there is nothing to take the mean of."""
    members = sizes.unsqueeze(-1)
    return torch.where(members > 0, sums / members.clamp(min=1), centroids.float()), sizes


def unit_length(means: Tensor, sizes: Tensor) -> Tensor:
    """Means scaled to length 1; those of empty clusters as they are."""
    scaled = means / means.norm(dim=-1, keepdim=True).clamp(min=EPS)
    return torch.where(sizes.unsqueeze(-1) > 0, scaled, means)


def count_labels(labels: Tensor, c: int) -> Tensor:
    """Points per cluster, (p, c) int64."""
    p = len(labels)
    return torch.bincount(flat_labels(labels, c), minlength=p * c).view(p, c)


def flat_labels(labels: Tensor, c: int) -> Tensor:
    """Labels (p, n) as clusters of all problems one after the other, (p * n,)."""
    return (labels + torch.arange(0, len(labels) * c, c, device=labels.device).unsqueeze(1)).flatten()


# On a CPU.


@remembered
def native() -> Any:
    """The C function, or None."""
    lib = library("kmeans")
    if lib is None:
        return None
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.kmeans.argtypes = [size, size, size, size, size, pointer, pointer, size, size, pointer, pointer, size]
    lib.kmeans.restype = None
    return lib.kmeans


def kmeans_native(
    points: Tensor, centroids: Tensor, n_rounds: int, metric: str = "cosine", unit: bool = False
) -> Clustering:
    """A thread per problem."""
    points, centroids = points.float().contiguous(), centroids.float().contiguous().clone()
    (p, n, d), c = points.shape, centroids.shape[1]
    labels = torch.full((p, n), -1, dtype=torch.int64)
    rounds = torch.zeros(p, dtype=torch.int64)
    native()(
        p, n, d, c, ("cosine", "dot", "l2").index(metric), points.data_ptr(), centroids.data_ptr(), n_rounds,
        unit, labels.data_ptr(), rounds.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return Clustering(centroids, labels, count_labels(labels, c), rounds)


# On a GPU.

POINTS = 64  # that meet centroids at once, where shared memory holds them
WIDE = 64  # channels at once: of 128 registers spill
# Channels up to which a product is the sum of three in tf32, on tensor cores; with more, registers spill (sm_80). Of 32
# to 128 channels it is off by at most 1.1e-6 of the lengths' product, even where a tensor core cuts sums off; a sum in
# float32 by 9e-7. The same rows give the same numbers either way.
SPLIT = 128
ADDED = 32  # points of a cluster that are added up at once
HELD = 8192  # numbers of theirs in registers: of twice as many some spill


def nearest_triton(points: Tensor, weights: Tensor, is_l2: bool) -> Tensor:
    """A program for some points and all centroids: labels (p, n) int64."""
    (p, n, d), c = points.shape, weights.shape[1]
    labels = torch.empty(p, n, dtype=torch.int64, device=points.device)
    if n:
        some, columns, width, parts = meeting(d, c, shared_memory(points.device))
        precision = "tf32x3" if d <= SPLIT else "ieee"
        assign_points[(cdiv(n, some), p)](
            points.contiguous(), weights.contiguous(), labels, n, d, c, is_l2, some, columns, width, parts, precision,
            num_warps=8 if parts > 1 else 4, num_stages=2,
        )  # fmt: skip
    return labels


def meeting(d: int, c: int, shared: int) -> tuple[int, int, int, int]:
    """Points, centroids and channels of a tile, and tiles of a head: all of them lie in shared memory at once."""
    width = min(WIDE // 2 if WIDE < d <= SPLIT else WIDE, power_of_2(d, 16))
    parts, points = cdiv(d, width), POINTS
    columns = min(16 if parts > 8 else 32, power_of_2(c, 16))
    while points > 16 and 4 * parts * width * (points + columns) > shared:
        points //= 2
    return points, columns, width, parts


def cluster_means_triton(points: Tensor, labels: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """A program for each cluster, whose points a stable sort of labels put one after the other."""
    (p, n, d), c = points.shape, centroids.shape[1]
    ordered = labels.int().sort(dim=-1, stable=True)
    ids = torch.arange(c, dtype=torch.int32, device=points.device).expand(p, -1).contiguous()
    ends = torch.searchsorted(ordered.values, ids, right=True)
    means, width = torch.empty(p, c, d, dtype=torch.float32, device=points.device), power_of_2(d, 16)
    average_points[(c, p)](
        points.contiguous(), ordered.indices, ends, centroids.float().contiguous(), means, n, d, c,
        min(ADDED, max(1, HELD // width)), width,
    )  # fmt: skip
    return means, ends.diff(dim=-1, prepend=ends.new_zeros(p, 1))


@jit
def assign_points(
    points, weights, labels, n, d, c, L2: tl.constexpr,
    POINTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """WIDTH channels at a time, PARTS times: registers hold no wide head."""
    block, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, channel = block * POINTS + tl.arange(0, POINTS), tl.arange(0, WIDTH)
    of_point = points + (problem * n + row[:, None]) * d + channel[None]
    if PARTS == 1:
        x = tl.load(of_point, (row < n)[:, None] & (channel < d)[None], other=0.0).to(tl.float32)
    best = tl.full((POINTS,), float("-inf"), tl.float32)
    which = tl.zeros((POINTS,), tl.int32)
    for first in range(0, c, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        products = tl.zeros((POINTS, COLUMNS), tl.float32)
        norms = tl.zeros((COLUMNS,), tl.float32)
        for part in tl.static_range(PARTS):
            inside = part * WIDTH + channel < d
            at = weights + (problem * c + column[:, None]) * d + part * WIDTH + channel[None]
            y = tl.load(at, (column < c)[:, None] & inside[None], other=0.0)
            if PARTS > 1:
                x = tl.load(of_point + part * WIDTH, (row < n)[:, None] & inside[None], other=0.0).to(tl.float32)
            products = tl.dot(x, tl.trans(y), products, input_precision=PRECISION)
            norms += tl.sum(y * y, 1)
        if L2:  # here and not in torch, whose sums over equal rows may differ in the last bit
            products -= 0.5 * norms[None]
        products = tl.where((column < c)[None], products, float("-inf"))
        here = tl.max(products, 1)
        # Of equal ones the first; a later chunk has to be better.
        place = tl.min(tl.where(products == here[:, None], column[None], c), 1)
        which = tl.where(here > best, place, which)
        best = tl.maximum(best, here)
    tl.store(labels + problem * n + row, which.to(tl.int64), row < n)


@jit
def average_points(
    points, order, ends, centroids, means, n, d, c, POINTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    cluster, problem = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside, at = channel < d, problem * c + cluster
    first, last = tl.load(ends + at - 1, cluster > 0, other=0).to(tl.int32), tl.load(ends + at).to(tl.int32)
    total = tl.zeros((POINTS, WIDTH), tl.float32)
    for start in range(first, last, POINTS):
        place = start + tl.arange(0, POINTS)
        row = tl.load(order + problem * n + place, place < last, other=0)
        mask = (place < last)[:, None] & inside[None]
        total += tl.load(points + (problem * n + row[:, None]) * d + channel[None], mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(last - first, 1).to(tl.float32)
    own = tl.load(centroids + at * d + channel, inside, other=0.0)
    tl.store(means + at * d + channel, tl.where(last > first, mean, own), inside)
