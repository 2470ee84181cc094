"""A layer's product quantiser as PQCache keeps it: centroids and packed codes, which an accelerator reads on the host.

Shapes    keys (h_kv, n, d_h), centroids (h_kv, m, c, d_m). Codes are those of tokens after the sinks, in order.

Not here: k-means and the layout of codes (`kernels/pq_fit.py`, `kernels/pq_codes.py`), when any of it is done
(`methods/retrieving/pqcache.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

import torch
from torch import Tensor

from kvbench.engine.budget import ELEMENT_BYTES
from kvbench.engine.passes.beside import Beside
from kvbench.engine.passes.trace import Trace
from kvbench.engine.sampling.draws import seeded
from kvbench.kernels.pq_codes import PackedCodes
from kvbench.kernels.pq_fit import pq_fit


@dataclass(frozen=True)
class Quantiser:
    """Centroids of one layer, and codes of its tokens from the first one after the sinks."""

    centroids: Tensor  # (h_kv, m, c, d_m) float32, on the host
    resident: Tensor  # the same on the model's device
    codes: PackedCodes
    n_fit: int  # tokens that were clustered
    rounds: float = 0.0  # of k-means, mean over problems
    seconds: float = 0.0  # that clustering took

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of the centroids, as they are counted."""
        return self.resident.numel() * ELEMENT_BYTES


def quantise(
    keys: Tensor, m: int, b: int, first: Tensor, n_rounds: int, tol: float, empty: str,
    start: Tensor | None, device: torch.device,
) -> Quantiser:  # fmt: skip
    """Cluster keys (h_kv, n, d_h) from the keys at `first` as centroids, or from centroids `start`, where the keys lie.

    Codes go to the host, and centroids to `device` as well.
    """
    began = perf_counter()
    h_kv, n, d_h = keys.shape
    points = keys.float().view(h_kv, n, m, d_h // m).transpose(1, 2)  # (h_kv, m, n, d_m)
    if n <= 1 << b:
        centroids, rounds = points.contiguous(), 0.0
        ids = torch.arange(n, dtype=torch.uint8, device=keys.device).expand(h_kv, m, n)
    else:
        flat = None if start is None else start.to(keys.device).flatten(0, 1)
        points = points.reshape(h_kv * m, n, -1)
        fit = pq_fit(points, first, n_rounds, tol=tol, empty=empty, start=flat)
        centroids, ids = fit.centroids.view(h_kv, m, -1, d_h // m), fit.codes.view(h_kv, m, n)
        rounds = float(fit.n_iter.float().mean())
    codes = PackedCodes(h_kv, m, b, n, keys.device)
    codes.extend(ids)
    codes.data = codes.data.cpu()
    if device.type == "cuda":
        codes.data = codes.data.pin_memory()
    return Quantiser(centroids.cpu(), centroids.to(device), codes, n, rounds, perf_counter() - began)


def with_room(quantiser: Quantiser, capacity: int) -> Quantiser:
    """A copy whose codes have room for so many tokens."""
    old = quantiser.codes
    h_kv, m, _ = old.data.shape
    codes = PackedCodes(h_kv, m, old.b, capacity)
    codes.extend(old.codes())
    if old.data.is_pinned():
        codes.data = codes.data.pin_memory()
    return replace(quantiser, codes=codes)


def first_centroids(seed: int, n: int, c: int) -> Tensor:
    """Which of `n` keys are the first centroids: the same for all layers, heads and parts."""
    return torch.randperm(n, generator=seeded(seed, n, c))[:c]


def n_threads(trace: Trace) -> int:
    """Threads that cluster: one while a prefill runs on the same processor, else all that are idle but two."""
    return 1 if trace.device.type == "cpu" else max(1, min(16, (os.cpu_count() or 1) - 2))


def threads_on(device: torch.device, trace: Trace) -> Beside:
    """Threads that cluster there: on a GPU one layer after the other, which fills it."""
    return Beside("quantiser", n_threads(trace) if device.type == "cpu" else 1)
