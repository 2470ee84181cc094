"""A decode step's choice by codes, against exact scores, faiss's IndexPQ, the torch path and Numba.

The selection must be the reference's. faiss ranks tokens for every query head and merges nothing.

Not here: how good the selection is, attention over it (`bench_select_attend.py`).
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
from kvbench.kernels.pq_codes import PackedCodes, pq_codes
from kvbench.kernels.pq_scores import pq_tables, pq_top, pq_top_ref

H, H_KV, D_H, S, K = 32, 8, 128, 32768, 1638
SCALE = D_H**-0.5
SETTINGS = [(2, 6), (4, 8)]  # m, b
CALLS = 5  # of a baseline that are timed together
MORE = 10  # times as many of ours, so that both are interrupted alike

Run = Callable[[], object]


def timed(run: Run, calls: int = CALLS) -> Callable[[], float]:
    """Mean seconds of some calls."""

    def seconds() -> float:
        start = perf_counter()
        for _ in range(calls):
            run()
        return (perf_counter() - start) / calls

    return seconds


def in_torch_exactly(q: Tensor, keys: Tensor) -> Run:
    grouped = q.view(H_KV, H // H_KV, D_H)
    return lambda: (grouped @ keys.mT * SCALE).softmax(-1).sum(1).topk(K).indices


def in_faiss(q: Tensor, keys: Tensor, centroids: Tensor, b: int) -> Run:
    """An index per KV head with our centroids."""
    faiss: Any = import_module("faiss")
    faiss.omp_set_num_threads(torch.get_num_threads())
    queries, indices = q.view(H_KV, H // H_KV, D_H).numpy(), []
    for mine, own in zip(keys.numpy(), centroids.numpy(), strict=True):
        index = faiss.IndexPQ(D_H, len(own), b, faiss.METRIC_INNER_PRODUCT)
        faiss.copy_array_to_vector(own.ravel(), index.pq.centroids)
        index.is_trained = True
        index.add(mine)
        indices.append(index)
    return lambda: [x.search(rows, K) for x, rows in zip(indices, queries, strict=True)]


def in_numba(q: Tensor, centroids: Tensor, codes: Tensor) -> Callable[[], Tensor]:
    """The C++'s arithmetic in a thread per KV head: products of exponentials, the border by numpy's partition."""
    numba: Any = import_module("numba")

    @numba.njit(parallel=True, fastmath=True)
    def top(entries, codes, k, scale):  # pragma: no cover, compiled
        h_kv, m, n = codes.shape
        g, c = entries.shape[0] // h_kv, entries.shape[2]
        out = np.empty((h_kv, k), np.int64)
        for head in numba.prange(h_kv):
            tables = np.empty((m, c, g))
            for i in range(g):
                for j in range(m):
                    row = entries[head * g + i, j]
                    most = row.max()
                    for z in range(c):
                        tables[j, z, i] = np.exp((np.float64(row[z]) - most) * scale)
            totals, weights = np.zeros(g), np.empty((n, g))
            for t in range(n):
                for i in range(g):
                    x = tables[0, codes[head, 0, t], i]
                    for j in range(1, m):
                        x *= tables[j, codes[head, j, t], i]
                    weights[t, i] = x
                    totals[i] += x
            scores = np.zeros(n)
            for t in range(n):
                for i in range(g):
                    scores[t] += weights[t, i] / totals[i]
            border = np.partition(scores, n - k)[n - k]
            equal, taken = k - (scores > border).sum(), 0
            for t in range(n):
                if scores[t] > border or (scores[t] == border and equal > 0):
                    equal -= scores[t] == border
                    out[head, taken] = t
                    taken += 1
        return out

    numba.set_num_threads(torch.get_num_threads())
    rows = codes.numpy()
    return lambda: torch.from_numpy(top(pq_tables(q, centroids).numpy(), rows, K, SCALE))


def bench(m: int, b: int, pairs: int) -> None:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(H, D_H, generator=draw)
    keys = torch.randn(H_KV, S, D_H, generator=draw)
    rows = torch.randperm(S, generator=draw)[: 1 << b]
    centroids = keys[:, rows].unflatten(-1, (m, D_H // m)).transpose(1, 2).contiguous()
    found = pq_codes(keys, centroids)
    codes = PackedCodes(H_KV, m, b, S)
    codes.extend(found)

    def run() -> Tensor:
        return pq_top(pq_tables(q, centroids), codes, S, K, SCALE)

    def in_torch() -> Tensor:
        return pq_top_ref(pq_tables(q, centroids), codes, S, K, SCALE)

    right = in_torch().sort(-1).values
    assert torch.equal(run().sort(-1).values, right), "the selection is wrong"
    shape = f"{K} of {S} tokens, {H}/{H_KV} heads of {D_H}, m={m} b={b}"

    def compare(name: str, baseline: Run) -> None:
        record(
            f"pq_top against {name}",
            shape,
            "float32",
            measure(timed(baseline), timed(run, CALLS * MORE), pairs),
        )

    compare("exact scores", in_torch_exactly(q, keys))
    compare("torch", in_torch)
    for name in ("faiss", "numba"):
        if find_spec(name) is None:
            print(f"{name} is not installed and not measured: pip install faiss-cpu numba")
        elif name == "faiss":
            compare("faiss IndexPQ", in_faiss(q, keys, centroids, b))
        else:
            other = in_numba(q, centroids, found)
            assert torch.equal(other(), right), "Numba selects others"
            compare("numba", other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    for m, b in SETTINGS:
        bench(m, b, options.pairs)


if __name__ == "__main__":
    main()
