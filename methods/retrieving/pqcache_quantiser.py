"""A layer's product quantiser as PQCache keeps it: centroids, packed codes, and how codes get to an accelerator.

Shapes    keys (h_kv, n, d_h), centroids (h_kv, m, c, d_m). Codes are those of tokens behind the sinks, in order.

Not here: k-means and the layout of codes (`kernels/pq_fit.py`, `pq_codes.py`), when any of it is done
(`methods/retrieving/pqcache.py`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

import torch
from torch import Tensor

from engine.budget import ELEMENT_BYTES
from engine.passes.beside import Beside
from engine.passes.streams import stream_for
from engine.passes.trace import Trace
from engine.sampling.draws import seeded
from kernels.pq_codes import PackedCodes
from kernels.pq_fit import pq_fit


@dataclass(frozen=True)
class Quantiser:
    """Centroids of one layer, and codes of its tokens from the first one behind the sinks."""

    centroids: Tensor  # (h_kv, m, c, d_m) float32, on the host
    resident: Tensor  # the same on the model's device
    codes: PackedCodes
    n_fit: int  # tokens that were clustered
    rounds: float = 0.0  # of k-means, mean over problems
    seconds: float = 0.0  # that clustering took

    @cached_property
    def index_bytes(self) -> int:
        """Of the centroids, as they are counted."""
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
    """Of `n` keys those that are the first centroids: the same for all layers, heads and parts."""
    return torch.randperm(n, generator=seeded(seed, n, c))[:c]


class Lane:
    """Codes on their way from the host to their layer's GPU, on a stream of their own; one for all rows of a sample."""

    def __init__(self) -> None:
        self.coming: dict[int, dict[PackedCodes, PackedCodes]] = {}  # by layer: copies by their source
        self.latest: int | None = None  # layer whose codes were taken last
        self.free: list[Tensor] = []  # memory of copies that were read

    def request(self, layer: int, codes: Sequence[PackedCodes], device: torch.device) -> None:
        """Begin to copy those of which no copy was begun."""
        if layer not in self.coming:
            for at in [at for at in self.coming if at != self.latest]:
                self.free += [copy.data for copy in self.coming.pop(at).values()]
            self.coming[layer] = {}
        coming, missing = self.coming[layer], list[PackedCodes]()
        for each in codes:
            copy = coming.get(each)
            if copy is None or copy.n != each.n:
                missing.append(each)
        if not missing:
            return
        old = [coming.pop(each).data for each in missing if each in coming]
        coming.update(self.begin(layer, missing, device))
        self.free += old

    def begin(
        self, layer: int, codes: Sequence[PackedCodes], device: torch.device
    ) -> dict[PackedCodes, PackedCodes]:  # fmt: skip
        """Copy behind what the current stream does: codes of generated tokens come from there, and it has read what
        the memory held before."""
        stream, here = stream_for("codes", device), torch.cuda.current_stream(device)
        stream.wait_stream(here)
        made: dict[PackedCodes, PackedCodes] = {}
        with torch.cuda.stream(stream):
            for each in codes:
                if each not in made:
                    made[each] = each.copied(self.room(each.data, device, here))
        return made

    def wait(self, device: torch.device) -> None:
        """Let the current stream go on behind the copies."""
        torch.cuda.current_stream(device).wait_stream(stream_for("codes", device))

    def take(self, layer: int, codes: Sequence[PackedCodes], device: torch.device) -> list[PackedCodes]:
        """The copies, on which the current stream waits; made anew where the codes are others by now."""
        self.latest = layer
        coming = self.coming.get(layer, {})
        for each in codes:
            copy = coming.get(each)
            if copy is None or copy.n != each.n:
                self.request(layer, codes, device)
                coming = self.coming[layer]
        self.wait(device)
        return [coming[each] for each in codes]

    def room(self, like: Tensor, device: torch.device, reader: torch.cuda.Stream) -> Tensor:
        """Memory for a copy."""
        for i, there in enumerate(self.free):
            if there.shape == like.shape and there.device == device:
                return self.free.pop(i)
        there = torch.empty_like(like, device=device)
        there.record_stream(reader)
        return there


def n_threads(trace: Trace) -> int:
    """Threads that cluster: one beside a prefill on the same processor, else all that are idle but two."""
    return 1 if trace.device.type == "cpu" else max(1, min(16, (os.cpu_count() or 1) - 2))


def threads_on(device: torch.device, trace: Trace) -> Beside:
    """What clusters there: on a GPU one layer after the other, which fills it."""
    return Beside("quantiser", n_threads(trace) if device.type == "cpu" else 1)
