"""A layer's product quantiser as PQCache keeps it: centroids, packed codes, and how codes get to an accelerator.

Shapes    keys (h_kv, n, d_h), centroids (h_kv, m, c, d_m). Codes are those of tokens behind the sinks, in order.

Not here: k-means and the layout of codes (`kernels/pq_fit.py`, `pq_codes.py`), when any of it is done
(`methods/retrieving/pqcache.py`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import NamedTuple

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


AT_ONCE = 4  # layers whose codes are copied by one request


def groups_of(layers: Sequence[int], devices: Sequence[torch.device]) -> list[list[int]]:
    """Neighbours on one device, so many of them that there are two groups at least where there are two layers."""
    most, groups = max(1, min(AT_ONCE, len(layers) // 2)), list[list[int]]()
    for i, layer in enumerate(layers):
        if not groups or len(groups[-1]) == most or devices[i] != devices[i - 1]:
            groups.append([])
        groups[-1].append(layer)
    return groups


@dataclass
class Batch:
    """Copies that were asked for at once."""

    came: torch.cuda.Event
    is_awaited: bool = False  # by the model's stream


class Copied(NamedTuple):
    """Codes on the GPU, or on their way there."""

    codes: PackedCodes
    batch: Batch


class Lane:
    """Codes on their way from the host to their layer's GPU, on a stream of their own; one for all rows of a sample."""

    def __init__(self) -> None:
        self.coming: dict[int, dict[PackedCodes, Copied]] = {}  # by layer: copies by their source
        self.free: dict[tuple[object, ...], list[PackedCodes]] = {}  # copies that were read, by device and form
        self.marks: dict[torch.device, torch.cuda.Event] = {}  # what the model's stream was asked for before copies

    def request(
        self, wanted: Mapping[int, Sequence[PackedCodes]], device: torch.device, kept: Collection[int] = ()
    ) -> None:  # fmt: skip
        """Begin to copy those codes of layers on a device of which no copy was begun. Copies of layers that are neither
        wanted nor `kept` make room for them."""
        missing: dict[int, list[PackedCodes]] = {}
        for layer, codes in wanted.items():
            coming = self.coming.get(layer, {})
            some = [each for each in codes if (copy := coming.get(each)) is None or copy.codes.n != each.n]
            if some:
                missing[layer] = some
        if missing:
            for layer in [at for at in self.coming if at not in wanted and at not in kept]:
                self.give_back(copy.codes for copy in self.coming.pop(layer).values())
            self.begin(missing, device)

    def begin(self, missing: Mapping[int, Sequence[PackedCodes]], device: torch.device) -> None:
        """Copy behind what the current stream does: codes of generated tokens come from there, and it has read what
        the memory held before."""
        stream, here = stream_for("codes", device), torch.cuda.current_stream(device)
        if device not in self.marks:
            self.marks[device] = torch.cuda.Event()
        self.marks[device].record(here)
        stream.wait_event(self.marks[device])
        batch, old = Batch(torch.cuda.Event()), list[PackedCodes]()
        with torch.cuda.stream(stream):
            for layer, codes in missing.items():
                coming = self.coming.setdefault(layer, {})
                for each in dict.fromkeys(codes):
                    if each in coming:
                        old.append(coming[each].codes)
                    coming[each] = Copied(each.copy_to(self.room(each, device, here)), batch)
        batch.came.record(stream)
        self.give_back(old)

    def take(self, layer: int, codes: Sequence[PackedCodes], device: torch.device) -> list[PackedCodes]:
        """The copies, on which the current stream waits; made anew where the codes are others by now."""
        found = self.copies(layer, codes)
        if found is None:
            self.request({layer: codes}, device, kept=[*self.coming])
            found = self.copies(layer, codes)
            assert found is not None
        for copy in found:
            if not copy.batch.is_awaited:
                torch.cuda.current_stream(device).wait_event(copy.batch.came)
                copy.batch.is_awaited = True
        return [copy.codes for copy in found]

    def copies(self, layer: int, codes: Sequence[PackedCodes]) -> list[Copied] | None:
        """Of these codes as they are; None where one is missing."""
        coming, found = self.coming.get(layer, {}), list[Copied]()
        for each in codes:
            copy = coming.get(each)
            if copy is None or copy.codes.n != each.n:
                return None
            found.append(copy)
        return found

    def room(self, like: PackedCodes, device: torch.device, reader: torch.cuda.Stream) -> PackedCodes:
        """Memory for a copy."""
        if free := self.free.get((device, *like.form)):
            return free.pop(0)
        there = like.like(device)
        there.data.record_stream(reader)
        return there

    def give_back(self, copies: Iterable[PackedCodes]) -> None:
        for copy in copies:
            self.free.setdefault((copy.data.device, *copy.form), []).append(copy)


def n_threads(trace: Trace) -> int:
    """Threads that cluster: one beside a prefill on the same processor, else all that are idle but two."""
    return 1 if trace.device.type == "cpu" else max(1, min(16, (os.cpu_count() or 1) - 2))


def threads_on(device: torch.device, trace: Trace) -> Beside:
    """What clusters there: on a GPU one layer after the other, which fills it."""
    return Beside("quantiser", n_threads(trace) if device.type == "cpu" else 1)
