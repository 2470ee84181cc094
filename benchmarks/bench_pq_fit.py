"""K-means of a product quantiser against scikit-learn, faiss, torch and Numba, each where it is installed.

All start from the same points, run the same number of rounds, and must end with the same objective.

Not here: codes for new keys, and what is done with codes (`bench_pq_scores.py`).
"""

import argparse
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from typing import Any

# Each library has threads of its own, which would go on spinning while the next one is measured.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")  # OpenBLAS must not be called from OpenMP

import numpy as np
import torch
from torch import Tensor

from kvbench.benchmarks.paired import measure, record
from kvbench.kernels.pq_fit import pq_fit, pq_fit_torch

P, N, D, C, ROUNDS = 16, 8192, 64, 64, 10
TOLERANCE = 0.005  # of the objective
ROWS = 1024  # that Numba multiplies at a time

Fit = Callable[[], float]  # runs all problems and returns the objective


def make(seed: int) -> tuple[Tensor, Tensor]:
    """Points in overlapping clusters, and the rows that all start from."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(P, 4 * C, D, generator=draw)
    owner = torch.randint(0, 4 * C, (P, N, 1), generator=draw).expand(-1, -1, D)
    points = centres.gather(1, owner) + torch.randn(P, N, D, generator=draw)
    return points, torch.randperm(N, generator=draw)[:C]


def in_scikit_learn(points: Tensor, init_idx: Tensor) -> Fit:
    KMeans: Any = import_module("sklearn.cluster").KMeans

    def run() -> float:
        total = 0.0
        for x in points.numpy():
            total += KMeans(C, init=x[init_idx], n_init=1, max_iter=ROUNDS, tol=0).fit(x).inertia_
        return total

    return run


def in_faiss(points: Tensor, init_idx: Tensor) -> Fit:
    faiss: Any = import_module("faiss")
    faiss.omp_set_num_threads(torch.get_num_threads())

    def run() -> float:
        total = 0.0
        for x in points.numpy():
            means = faiss.Kmeans(D, C, niter=ROUNDS, max_points_per_centroid=N)
            means.train(x, init_centroids=x[init_idx])
            total += float(means.index.search(x, 1)[0].sum())
        return total

    return run


def in_numba(points: Tensor, init_idx: Tensor) -> Fit:
    """A problem per thread; products by BLAS, in chunks that stay in cache, and loops for the rest."""
    numba: Any = import_module("numba")

    @numba.njit(parallel=True, fastmath=True)
    def fit(points, start, n_rounds, rows):  # pragma: no cover, compiled
        p, n, d = points.shape
        c = start.shape[1]
        inertia = np.zeros(p)
        for i in numba.prange(p):
            x, centroids = points[i], start[i].copy()
            labels = np.zeros(n, np.int32)
            for turn in range(n_rounds + 1):
                bias = np.zeros(c, np.float32)
                for j in range(c):
                    for k in range(d):
                        bias[j] += 0.5 * centroids[j, k] * centroids[j, k]
                sums, sizes = np.zeros((c, d), np.float32), np.zeros(c, np.int32)
                turned = np.ascontiguousarray(centroids.T)
                for first in range(0, n, rows):
                    products = np.dot(x[first : first + rows], turned)
                    for r in range(len(products)):
                        best, label = products[r, 0] - bias[0], 0
                        for j in range(1, c):
                            if products[r, j] - bias[j] > best:
                                best, label = products[r, j] - bias[j], j
                        labels[first + r] = label
                        sizes[label] += 1
                        for k in range(d):
                            sums[label, k] += x[first + r, k]
                if turn < n_rounds:
                    for j in range(c):
                        if sizes[j] > 0:
                            centroids[j] = sums[j] / np.float32(sizes[j])
            for r in range(n):
                for k in range(d):
                    inertia[i] += (x[r, k] - centroids[labels[r], k]) ** 2
        return inertia

    numba.set_num_threads(torch.get_num_threads())
    x, start = points.numpy(), points[:, init_idx].contiguous().numpy()
    limits: Any = import_module("threadpoolctl").threadpool_limits

    def run() -> float:
        with limits(1, user_api="blas"):  # each of Numba's threads calls it
            return float(fit(x, start, ROUNDS, ROWS).sum())

    return run


def in_torch(points: Tensor, init_idx: Tensor) -> Fit:
    return lambda: float(pq_fit_torch(points, init_idx, ROUNDS, tol=0).inertia.sum())


BASELINES = {
    "scikit-learn": (("sklearn",), in_scikit_learn),
    "faiss": (("faiss",), in_faiss),
    "torch": (("torch",), in_torch),
    "numba": (("numba", "threadpoolctl"), in_numba),
}


def timed(run: Fit) -> Callable[[], float]:
    def seconds() -> float:
        start = perf_counter()
        run()
        return perf_counter() - start

    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    points, init_idx = make(0)

    def run() -> float:
        return float(pq_fit(points, init_idx, ROUNDS, tol=0).inertia.sum())

    objective = run()
    shape = f"{P} problems of {N} x {D}, {C} centroids, {ROUNDS} rounds"
    for name, (modules, prepare) in BASELINES.items():
        if any(find_spec(module) is None for module in modules):
            print(f"{name} is not installed and not measured: pip install scikit-learn faiss-cpu numba")
            continue
        baseline = prepare(points, init_idx)
        assert abs(baseline() / objective - 1) <= TOLERANCE, f"{name} ends elsewhere"
        record(
            f"pq_fit against {name}",
            shape,
            "float32",
            measure(timed(baseline), timed(run), options.pairs),
        )


if __name__ == "__main__":
    main()
