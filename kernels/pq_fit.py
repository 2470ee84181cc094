"""Lloyd's k-means of a product quantiser: `p` problems of one size at once, stopped and mended as scikit-learn does.

A round assigns every point to its nearest centroid (of equal ones the lower id), then moves centroids to the means of
their points. A problem ends when its labels repeat, or when its centroids moved, squared and summed up, by no more
than `tol` times the points' mean variance. Unless labels repeated, points are assigned once more, to the final ones.

An empty cluster takes over one point, of those farthest from their centroids ("farthest"), or keeps its centroid
("keep"). A cluster that gave its only point away keeps its centroid too.

Shapes    points (p, n, d_m), init_idx (c,) or (p, c) rows of points, start (p, c, d_m) -> `Fit`.
Paths     C++ on a CPU: a tile of points meets all centroids in registers, and distances are never stored. Else torch,
          by `kmeans.py`, on a GPU with its kernels. All subtract the points' mean first, which float32 needs.
Checks    tests/kernels/test_pq_fit.py, benchmarks/bench_pq_fit.py.

Not here: which points are clustered, and which rows they start from. K-means by other metrics: `kmeans.py`.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.build import library, remembered
from kvbench.kernels.choices import EMPTY
from kvbench.kernels.kmeans import cluster_means, nearest
from kvbench.kernels.scratch import finest


class Fit(NamedTuple):
    """A quantiser's centroids, and the points' codes by them."""

    centroids: Tensor  # (p, c, d_m) float32
    codes: Tensor  # (p, n) uint8; int16 where c > 256
    n_iter: Tensor  # (p,) int64, rounds that moved centroids
    inertia: Tensor  # (p,) float64, squared distances to the own centroid, summed up


def code_dtype(c: int) -> torch.dtype:
    """Type that holds the number of one of `c` centroids."""
    return torch.uint8 if c <= 256 else torch.int16


def pq_fit(
    points: Tensor, init_idx: Tensor, n_rounds: int, *, tol: float = 1e-4, empty: str = "farthest",
    start: Tensor | None = None, n_threads: int | None = None,
) -> Fit:  # fmt: skip
    """At most `n_rounds` rounds from the points at `init_idx`, or from `start`; on a CPU on so many threads."""
    assert empty in EMPTY, f"empty={empty!r}; one of {EMPTY}"
    if points.device.type == "cpu" and native() is not None:
        return pq_fit_native(points, init_idx, n_rounds, tol=tol, empty=empty, start=start, n_threads=n_threads)
    return pq_fit_torch(points, init_idx, n_rounds, tol=tol, empty=empty, start=start)


def first_centroids(points: Tensor, init_idx: Tensor, start: Tensor | None) -> Tensor:
    """`start`, or each problem's points at `init_idx`: (p, c, d_m)."""
    if start is not None:
        return start
    p, _, d_m = points.shape
    rows = init_idx.to(points.device).long().expand(p, -1).unsqueeze(-1)
    return points.gather(1, rows.expand(-1, -1, d_m))


def pq_fit_ref(
    points: Tensor, init_idx: Tensor, n_rounds: int, *, tol: float = 1e-4, empty: str = "farthest",
    start: Tensor | None = None,
) -> Fit:  # fmt: skip
    """Problem by problem, point by point in float64: what the others are measured by."""
    found = []
    first = first_centroids(points, init_idx, start).double()
    for x, centroids in zip(points.double(), first, strict=True):
        before, stays = None, tol * x.var(0, correction=0).mean()
        n_iter, repeated = 0, False
        while n_iter < n_rounds and not repeated:
            codes = distances(x, centroids).argmin(-1)
            moved = moved_centroids(x, centroids, codes, empty)
            shift = (moved - centroids).square().sum()
            centroids, n_iter = moved, n_iter + 1
            repeated = before is not None and torch.equal(codes, before)
            before = codes
            if shift <= stays:
                break
        far = distances(x, centroids)
        codes = before if repeated and before is not None else far.argmin(-1)
        inertia = far.gather(-1, codes.unsqueeze(-1)).sum()
        found.append((centroids.float(), codes.to(code_dtype(len(centroids))), n_iter, inertia))
    centroids, codes, n_iter, inertia = zip(*found, strict=True)
    return Fit(torch.stack(centroids), torch.stack(codes), torch.tensor(n_iter), torch.stack(inertia))


def distances(x: Tensor, centroids: Tensor) -> Tensor:
    """Squared, (n, c)."""
    return (x.unsqueeze(1) - centroids).square().sum(-1)


def moved_centroids(x: Tensor, centroids: Tensor, codes: Tensor, empty: str) -> Tensor:
    """A problem's next centroids, (c, d_m)."""
    sums = torch.zeros_like(centroids).index_add_(0, codes, x)
    sizes = torch.bincount(codes, minlength=len(centroids))
    far = (x - centroids[codes]).square().sum(-1)
    if empty == "farthest" and far.max() > 0:
        lonely = (sizes == 0).nonzero().squeeze(-1)
        for cluster, i in zip(lonely, far.sort(descending=True, stable=True).indices, strict=False):
            sums[codes[i]] -= x[i]
            sizes[codes[i]] -= 1
            sums[cluster], sizes[cluster] = x[i], 1
    means = sums / sizes.clamp(min=1).unsqueeze(-1)
    return torch.where(sizes.unsqueeze(-1) > 0, means, centroids)


# In torch.

Assign = Callable[[Tensor, Tensor], Tensor]  # points, centroids -> labels (p, n) int64
Means = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # and labels -> means, sizes (p, c)


def pq_fit_torch(
    points: Tensor, init_idx: Tensor, n_rounds: int, *, tol: float = 1e-4, empty: str = "farthest",
    start: Tensor | None = None, assign: Assign | None = None, means: Means = cluster_means,
) -> Fit:  # fmt: skip
    """All problems at once in float32; one that has ended stays as it is."""
    assign = assign or assign_torch
    points = points.float()
    mean = points.mean(1, keepdim=True)
    centred = (points - mean).contiguous()
    stays = tol * centred.square().mean((1, 2))
    centroids = first_centroids(points, init_idx, start).float() - mean
    (p, _, _), c = points.shape, centroids.shape[1]
    n_iter = torch.zeros(p, dtype=torch.int64, device=points.device)
    ended = torch.zeros(p, dtype=torch.bool, device=points.device)
    before, repeated = None, torch.zeros_like(ended)
    for _ in range(n_rounds):
        labels = assign(centred, centroids)
        moved, sizes = means(centred, labels, centroids)
        if empty == "farthest":
            repair(centred, centroids, labels, sizes, moved)
        moved = torch.where(ended.view(-1, 1, 1), centroids, moved)
        n_iter += ~ended
        if before is not None:
            labels = torch.where(ended.unsqueeze(-1), before, labels)
            repeated |= ~ended & (labels == before).all(-1)
        ended = ended | repeated | ((moved - centroids).square().sum((1, 2)) <= stays)
        centroids, before = moved, labels
        if ended.all():
            break
    labels = assign(centred, centroids)
    if before is not None:
        labels = torch.where(repeated.unsqueeze(-1), before, labels)
    own = centroids.gather(1, labels.unsqueeze(-1).expand_as(centred))
    inertia = (centred - own).square().sum((1, 2), dtype=finest(own.device))
    return Fit(centroids + mean, labels.to(code_dtype(c)), n_iter, inertia)


def assign_torch(points: Tensor, centroids: Tensor) -> Tensor:
    return nearest(points, centroids, "l2")


def repair(points: Tensor, centroids: Tensor, labels: Tensor, sizes: Tensor, moved: Tensor) -> None:
    """Give empty clusters their points, in `moved`."""
    for i in (sizes == 0).any(-1).nonzero().squeeze(-1).tolist():
        moved[i] = moved_centroids(points[i], centroids[i], labels[i], "farthest")


# On a CPU.


@remembered
def native() -> Any:
    """The C function, or None."""
    lib = library("pq_fit")
    if lib is None:
        return None
    size, real, pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    lib.pq_fit.argtypes = [
        size, size, size, size, pointer, pointer, size, real, size, pointer, pointer, pointer, pointer, size
    ]  # fmt: skip
    lib.pq_fit.restype = None
    return lib.pq_fit


def pq_fit_native(
    points: Tensor, init_idx: Tensor, n_rounds: int, *, tol: float = 1e-4, empty: str = "farthest",
    start: Tensor | None = None, n_threads: int | None = None,
) -> Fit:  # fmt: skip
    """A thread per problem, or chunks of all problems where those would not fill the threads: with equal results."""
    points = points.float().contiguous()
    start = first_centroids(points, init_idx, start).float().contiguous()
    (p, n, d_m), c = points.shape, start.shape[1]
    assert n > 0 and start.shape == (p, c, d_m), (points.shape, start.shape)
    centroids, codes = torch.empty_like(start), torch.empty(p, n, dtype=code_dtype(c))
    n_iter = torch.empty(p, dtype=torch.int64)
    inertia = torch.empty(p, dtype=torch.float64)
    native()(
        p, n, d_m, c, points.data_ptr(), start.data_ptr(), n_rounds, tol, empty == "farthest",
        centroids.data_ptr(), codes.data_ptr(), n_iter.data_ptr(), inertia.data_ptr(),
        n_threads or torch.get_num_threads(),
    )  # fmt: skip
    return Fit(centroids, codes, n_iter, inertia)
