"""A layer's product quantiser as PQCache keeps it: centroids, packed codes, and how codes get to an accelerator.

Shapes    keys (h_kv, n, d_h), centroids (h_kv, m, c, d_m). Codes are those of tokens after the sinks, in order.

Not here: k-means and the layout of codes (`kernels/pq_fit.py`, `kernels/pq_codes.py`), when any of it is done
(`methods/retrieving/pqcache.py`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.engine.budget import ELEMENT_BYTES
from kvbench.engine.passes.beside import Beside
from kvbench.engine.passes.streams import stream_for
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


def with_room(quantiser: Quantiser, capacity: int, memory: Tensor | None = None) -> Quantiser:
    """A copy whose codes have room for so many tokens; in that memory, if there is some."""
    old = quantiser.codes
    h_kv, m, _ = old.data.shape
    codes = PackedCodes(h_kv, m, old.b, capacity, memory=memory)
    codes.extend(old.codes())
    if memory is None and old.data.is_pinned():
        codes.data = codes.data.pin_memory()
    return replace(quantiser, codes=codes)


def first_centroids(seed: int, n: int, c: int) -> Tensor:
    """Which of `n` keys are the first centroids: the same for all layers, heads and parts."""
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


class Shelf:
    """Pinned memory for codes that grow, in which those that are copied at once lie next to each other."""

    def __init__(self) -> None:
        self.rows: Counter[int] = Counter()  # that take a place in each layer, by its bytes
        self.made: Counter[tuple[Sequence[int], int]] = Counter()  # of how many a group of layers has the places
        self.free: dict[tuple[Sequence[int], int], list[Tensor]] = {}

    def expect(self, n_bytes: int) -> None:
        """A row is going to ask for places of this size."""
        self.rows[n_bytes] += 1

    def take(self, group: tuple[int, ...], n_bytes: int) -> Tensor:
        """A place for a row's codes of one layer of a group, zeros: all rows known by now have theirs in one block."""
        of_group = group, n_bytes
        if not self.free.get(of_group):
            n_rows = max(1, self.rows[n_bytes] - self.made[of_group])
            self.made[of_group] += n_rows
            size, pinned = n_rows * len(group) * n_bytes, torch.cuda.is_available()
            self.free[of_group] = [*torch.empty(size, dtype=torch.uint8, pin_memory=pinned).zero_().split(n_bytes)]
        return self.free[of_group].pop(0)


class Load:
    """Codes that are copied at once, a copy for each stretch of memory in which some of them lie next to each other."""

    def __init__(self, wanted: Mapping[int, Collection[PackedCodes]]) -> None:
        self.layers = {layer: frozenset(codes) for layer, codes in wanted.items()}
        self.places: dict[PackedCodes, int] = {}  # where a copy begins
        self.stretches: list[tuple[Tensor, int]] = []  # on the host, and where their copies begin
        self.n_bytes, end = 0, 0
        for codes in sorted(frozenset().union(*self.layers.values()), key=lambda each: each.data.data_ptr()):
            data, start = codes.data.view(-1), self.n_bytes
            if self.stretches and data.data_ptr() == end and is_of_one(self.stretches[-1][0], data):
                before, start = self.stretches.pop()
                data = before.as_strided((len(before) + len(data),), (1,))
            self.stretches.append((data, start))
            self.places[codes] = self.n_bytes
            self.n_bytes += codes.data.nbytes
            end = codes.data.data_ptr() + codes.data.nbytes


def is_of_one(x: Tensor, y: Tensor) -> bool:
    """Whether both lie in the same allocation."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@dataclass(eq=False)
class Copies:
    """Memory of a GPU, and what was copied to it at once."""

    memory: Tensor  # (bytes,) uint8
    came: torch.cuda.Event
    load: Load
    ns: Mapping[PackedCodes, int] = field(default_factory=dict)  # tokens that each copy has
    is_awaited: bool = False  # by the model's stream
    n_held: int = 0  # layers whose copies somebody may still read

    def has(self, codes: PackedCodes) -> bool:
        """Whether there is a copy of them as they are."""
        return self.ns.get(codes) == codes.n

    def of(self, codes: PackedCodes) -> PackedCodes:
        """The copy."""
        start = self.load.places[codes]
        return codes.within(self.memory[start : start + codes.data.nbytes], self.ns[codes])


class Lane:
    """Codes on their way from the host to their layer's GPU, on a stream of their own; one for all rows of a sample."""

    is_of_rows: ClassVar[bool] = True  # a row's copy shares it, but not the codes that are in it

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.coming: dict[int, list[Copies]] = {}  # by layer, the latest ones first
        self.free: list[Copies] = []  # that were read
        self.marks: dict[torch.device, torch.cuda.Event] = {}  # what the model's stream was asked for before copies
        self.n_changes = 0  # while it stays as it is, every row's codes lie where they lay on the host

    def request(
        self, wanted: Mapping[int, Sequence[PackedCodes]], device: torch.device, kept: Collection[int] = ()
    ) -> None:  # fmt: skip
        """Begin to copy those codes of layers on a device of which no copy was begun. Copies of layers that are neither
        wanted nor `kept` make room for them."""
        missing: dict[int, list[PackedCodes]] = {}
        for layer, codes in wanted.items():
            if some := [each for each in codes if self.copies(layer, each) is None]:
                missing[layer] = some
        if missing:
            self.begin(Load(missing), device, {*wanted, *kept})

    def request_again(self, load: Load, device: torch.device, kept: Collection[int]) -> None:
        """Request anew what was requested before: all of it, where some of it was not begun."""
        for layer, codes in load.layers.items():
            for each in codes:
                if self.copies(layer, each) is None:
                    self.begin(load, device, kept)
                    return

    def begin(self, load: Load, device: torch.device, kept: Collection[int]) -> None:
        """Begin to copy a load; copies of layers that are not `kept` make room for it."""
        for layer in [at for at in self.coming if at not in kept]:
            for copies in self.coming.pop(layer):
                self.give_back(copies)
        copies = self.copy(load, device)
        copies.load, copies.ns, copies.is_awaited = load, {each: each.n for each in load.places}, False
        self.note(copies)

    def copy(self, load: Load, device: torch.device) -> Copies:
        """Start the copies after the current stream's work: codes of generated tokens come from there, and it has read
        what the memory held before."""
        stream, here = stream_for("codes", device), torch.cuda.current_stream(device)
        if device not in self.marks:
            self.marks[device] = torch.cuda.Event()
        self.marks[device].record(here)
        stream.wait_event(self.marks[device])
        with torch.cuda.stream(stream):
            copies = self.room(load, device, here)
            for host, start in load.stretches:
                copies.memory[start : start + len(host)].copy_(host, non_blocking=True)
        copies.came.record(stream)
        return copies

    def note(self, copies: Copies) -> None:
        """Note copies that are on their way, and give back others that have nothing more."""
        load = copies.load
        copies.n_held = len(load.layers)
        for layer, codes in load.layers.items():
            left, held = [copies], self.coming.get(layer, ())
            for each in held:
                if each.load is load or each.load.layers[layer] <= codes:
                    self.give_back(each)
                else:
                    left.append(each)
            self.coming[layer] = left

    def take(
        self, layer: int, codes: Sequence[PackedCodes], device: torch.device, kept: Collection[int]
    ) -> list[Copies]:  # fmt: skip
        """The copies, for which the current stream waits; made anew where the codes are others by now."""
        self.request({layer: codes}, device, kept)
        found = [copies for each in codes if (copies := self.copies(layer, each)) is not None]
        assert len(found) == len(codes), f"layer {layer}: {len(found)} of {len(codes)} are on their way"
        for copies in found:
            self.wait(copies, device)
        return found

    def take_whole(self, layer: int, codes: Sequence[PackedCodes], device: torch.device) -> Copies | None:
        """The copies as `take` gives them, where they came at once; None where they did not."""
        copies = self.coming[layer][0] if layer in self.coming else None
        if copies is None or [copies.ns.get(each) for each in codes] != [each.n for each in codes]:
            return None
        self.wait(copies, device)
        return copies

    def wait(self, copies: Copies, device: torch.device) -> None:
        """Let the current stream wait, once."""
        if not copies.is_awaited:
            torch.cuda.current_stream(device).wait_event(copies.came)
            copies.is_awaited = True

    def settle(self, device: torch.device) -> None:
        """Wait until all copies were made: the host may write to codes then."""
        stream_for("codes", device).synchronize()

    def copies(self, layer: int, codes: PackedCodes) -> Copies | None:
        """The copies that hold these codes as they are."""
        for copies in self.coming.get(layer, ()):
            if copies.has(codes):
                return copies
        return None

    def room(self, load: Load, device: torch.device, reader: torch.cuda.Stream) -> Copies:
        """Memory for its copies."""
        for i, copies in enumerate(self.free):
            if copies.memory.nbytes >= load.n_bytes and copies.memory.device == device:
                return self.free.pop(i)
        memory = torch.empty(load.n_bytes, dtype=torch.uint8, device=device)
        memory.record_stream(reader)
        return Copies(memory, torch.cuda.Event(), load)

    def give_back(self, copies: Copies) -> None:
        """Nobody reads those of one of its layers any longer."""
        copies.n_held -= 1
        if not copies.n_held:
            self.free.append(copies)


def n_threads(trace: Trace) -> int:
    """Threads that cluster: one while a prefill runs on the same processor, else all that are idle but two."""
    return 1 if trace.device.type == "cpu" else max(1, min(16, (os.cpu_count() or 1) - 2))


def threads_on(device: torch.device, trace: Trace) -> Beside:
    """Threads that cluster there: on a GPU one layer after the other, which fills it."""
    return Beside("quantiser", n_threads(trace) if device.type == "cpu" else 1)
