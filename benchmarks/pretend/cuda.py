"""`torch.cuda` of a machine that has no GPU: devices, streams and events that keep the order of work and do none.

Work has a tick on its stream. A stream is settled up to the tick that somebody waited for, and with it whatever other
streams it waited for itself. Copies between device and pinned memory are on their way until then.

Not here: operators (`benchmarks/pretend/tensors.py`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from kvbench.benchmarks.pretend.counts import WAITS, Counts
from kvbench.kernels.jit import SHARED, power_of_2

MEMORY = 80 << 30  # bytes of a device


@dataclass(eq=False)
class Copy:
    """A copy on its way: rubbish lies at its target, or its source must stay as it is."""

    tick: int
    host: Tensor  # in pinned memory
    numbers: Tensor
    to_host: bool
    has_landed: bool = False

    def land(self) -> None:
        """The numbers arrive, in the eyes of what comes later on the device."""
        if self.to_host and not self.has_landed:
            with torch.inference_mode():  # it may be a tensor of that mode
                self.host.copy_(self.numbers)
        self.has_landed = True

    @property
    def was_disturbed(self) -> bool:
        """Whether somebody wrote to its source."""
        return not self.to_host and not torch.equal(bytes_of(self.host), bytes_of(self.numbers))

    def check(self) -> None:
        if self.was_disturbed:
            raise RuntimeError("pinned memory was written to while a copy from it was on its way")


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


class InStream:
    """Inside, a stream is its device's current one; a class as torch's, which is entered faster than a generator."""

    def __init__(self, machine: Machine, stream: Stream | None) -> None:
        self.machine, self.stream = machine, stream

    def __enter__(self) -> None:
        if self.stream is not None:
            streams, index = self.machine.streams, self.stream.index
            self.before, self.device = streams.get(index), self.machine.exchange(index)
            streams[index] = self.stream

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.machine.exchange(self.device)
            if self.before is None:
                del self.machine.streams[self.stream.index]
            else:
                self.machine.streams[self.stream.index] = self.before


class Machine:
    """Devices, who is current, what was counted."""

    def __init__(self, n_devices: int) -> None:
        self.n_devices = n_devices
        self.ticks = count(1)
        self.here = threading.local()
        self.all_streams: WeakSet[Stream] = WeakSet()
        self.defaults = [Stream(self, i) for i in range(n_devices)]
        self.pinned: dict[int, Tensor] = {}  # by address; kept, so that no other memory gets the address
        self.counts: Counts | None = None
        self.recording: list[Any] = []  # pools of memory that graphs are captured into
        self.released: list[Any] = []  # of those that could not be captured
        self.sync_mode = 0
        self.shares: dict[int, float] = {}  # of its memory that each device may give out, by number

    @property
    def tape(self) -> Any:
        """The graph that this thread captures."""
        return getattr(self.here, "tape", None)

    @tape.setter
    def tape(self, tape: Any) -> None:
        self.here.tape = tape

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, this thread's requests are no requests: a graph makes them."""
        self.here.is_silent = True
        try:
            yield
        finally:
            self.here.is_silent = False

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Inside, requests are counted."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    def note(self, kind: str, nbytes: int = 0, n: int = 1) -> None:
        if self.tape is not None:
            if kind in WAITS:
                self.tape.is_broken = True
                raise RuntimeError(f"operation not permitted when stream is capturing: {kind}")
            return
        if kind in WAITS and self.sync_mode:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if self.counts is not None and not getattr(self.here, "is_silent", False):
            self.counts.note(kind, nbytes, n)

    # Devices and streams of the thread.

    @property
    def current(self) -> int:
        return getattr(self.here, "device", 0)

    def exchange(self, device: int) -> int:
        """Make a device current, and return the one that was; below 0 nothing changes."""
        before = self.current
        if device >= 0:
            assert device < self.n_devices, f"there is no cuda:{device}"
            self.here.device = device
        return before

    def index(self, device: Any = None) -> int:
        """The number of a device given as number, name, `torch.device` or None."""
        if isinstance(device, int):
            return device
        found = torch.device("cuda" if device is None else device).index
        return self.current if found is None else found

    def stream(self, device: Any = None) -> Stream:
        """The thread's current stream of a device."""
        index = self.index(device)
        return self.streams.get(index, self.defaults[index])

    @property
    def streams(self) -> dict[int, Stream]:
        """The thread's current streams, where they are not the default ones."""
        if not hasattr(self.here, "streams"):
            self.here.streams = {}
        return self.here.streams

    def in_stream(self, stream: Stream | None) -> InStream:
        """As `torch.cuda.stream`."""
        return InStream(self, stream)

    def synchronize(self, device: Any = None) -> None:
        self.note("synchronize")
        self.settle(self.index(device))

    def settle(self, index: int) -> None:
        """All that was asked of a device is done."""
        for stream in list(self.all_streams):
            if stream.index == index:
                stream.settle(next(self.ticks))

    # Pinned memory.

    def pin(self, x: Tensor) -> Tensor:
        """Say that the memory of `x` is pinned; torch's allocator takes the next power of two."""
        self.note("pinned allocation", power_of_2(x.nbytes))
        self.pinned[x.untyped_storage().data_ptr()] = x
        return x

    def is_pinned(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self.pinned

    def send(self, index: int, host: Tensor, device: Tensor, to_host: bool) -> None:
        """An asynchronous copy between pinned memory and what lies on the device."""
        stream = self.stream(index)
        if not to_host:
            stream.land()
            device.copy_(host)
        copy = Copy(next(self.ticks), host, device.clone() if to_host else host.clone(), to_host)
        if to_host:
            host.fill_(torch.nan if host.is_floating_point() else -1 if host.dtype.is_signed else 255)
        stream.copies.append(copy)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, a kernel of the current stream runs. What it writes to pinned memory comes behind the copies that the
        stream waited for; another copy from there may find either."""
        stream, copies = self.stream(), self.on_their_way()
        for copy in self.disturbed(copies):
            copy.check()
        yield
        if written := self.disturbed(copies):
            earlier = {*stream.earlier()}
            for copy in written:
                if copy not in earlier:
                    raise RuntimeError("a kernel wrote to pinned memory and did not wait for a copy from it")
                copy.numbers = copy.host.clone()

    def on_their_way(self) -> set[Copy]:
        return {copy for stream in list(self.all_streams) for copy in stream.copies}

    def disturbed(self, copies: set[Copy]) -> set[Copy]:
        """Those whose source was written to, unless another thread waited for them first."""
        found = {copy for copy in copies if copy.was_disturbed}
        return found & self.on_their_way() if found else found


class Stream:
    """A queue of work of one device."""

    def __init__(self, machine: Machine, index: int) -> None:
        self.machine, self.index = machine, index
        self.device, self.cuda_stream = torch.device("cuda", index), id(self)
        self.done = 0  # the tick up to which somebody waited
        self.copies: list[Copy] = []
        self.behind: list[tuple[int, Stream, int]] = []  # from this tick on, behind another stream's tick
        machine.all_streams.add(self)

    def settle(self, tick: int) -> None:
        """Work up to a tick is done."""
        if tick <= self.done:
            return
        self.done = tick
        for since, other, its_tick in self.behind:
            if since <= tick:
                other.settle(its_tick)
        self.behind = [wait for wait in self.behind if wait[0] > tick]
        for copy in self.copies:
            if copy.tick <= tick:
                copy.check()
                copy.land()
        self.copies = [copy for copy in self.copies if copy.tick > tick]

    def land(self) -> None:
        """What comes next on this stream finds what was copied before it."""
        for copy in self.earlier():
            copy.land()

    def earlier(self) -> Iterator[Copy]:
        """Copies on their way that are done before what comes next on this stream."""
        reached, waiting = {}, [(self, next(self.machine.ticks))]
        while waiting:
            stream, tick = waiting.pop()
            if tick <= max(stream.done, reached.get(stream, 0)):
                continue
            reached[stream] = tick
            waiting += [(other, its_tick) for since, other, its_tick in stream.behind if since <= tick]
            yield from [copy for copy in stream.copies if copy.tick <= tick]

    def wait_event(self, event: Event) -> None:
        if event.stream is not None and event.tick > event.stream.done:
            self.behind.append((next(self.machine.ticks), event.stream, event.tick))

    def wait_stream(self, other: Stream) -> None:
        its_tick = next(self.machine.ticks)
        self.behind.append((next(self.machine.ticks), other, its_tick))

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self.machine) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.machine.note("synchronize")
        self.settle(next(self.machine.ticks))

    def query(self) -> bool:
        self.settle(next(self.machine.ticks))
        return True

    def __enter__(self) -> Stream:
        self.inside = self.machine.in_stream(self)
        self.inside.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inside.__exit__(*error)


class Event:
    """A mark on a stream."""

    def __init__(self, machine: Machine, enable_timing: bool = False) -> None:
        self.machine, self.has_time = machine, enable_timing
        self.stream: Stream | None = None
        self.tick, self.moment = 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.machine.note("event")
        self.stream = self.machine.stream() if stream is None else stream
        self.tick, self.moment = next(self.machine.ticks), perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (self.machine.stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        self.machine.note("synchronize")
        self.query()

    def query(self) -> bool:
        """True: the device was fast."""
        if self.stream is not None:
            self.stream.settle(self.tick)
        return True

    def elapsed_time(self, other: Event) -> float:
        for event in (self, other):
            if not event.has_time or event.stream is None:
                raise RuntimeError("an event without timing, or one that was not recorded, has no time")
            if event.tick > event.stream.done:
                raise RuntimeError("device not ready: nobody waited for this event")
        if self.stream is not None and other.stream is not None and self.stream.index != other.stream.index:
            raise RuntimeError("events of two devices have no time between them")
        return (other.moment - self.moment) * 1e3


def functions(machine: Machine) -> dict[str, Any]:
    """What takes the place of names in `torch.cuda`."""

    def nothing(*_: Any, **__: Any) -> None: ...

    def properties(device: Any = None) -> SimpleNamespace:
        name = f"pretended {machine.index(device)}"
        return SimpleNamespace(
            name=name, total_memory=MEMORY, multi_processor_count=132, major=9, minor=0,
            shared_memory_per_block_optin=SHARED[90],
        )  # fmt: skip

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    class MyStream(Stream):
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            super().__init__(machine, machine.index(device))

    class MyEvent(Event):
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            super().__init__(machine, enable_timing)

    def empty_cache() -> None:
        if machine.recording:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def set_sync_debug_mode(mode: Any) -> None:
        machine.sync_mode = {"default": 0, "warn": 1}[mode] if isinstance(mode, str) else mode

    def set_device(device: Any) -> None:
        machine.exchange(machine.index(device))

    return {
        **dict.fromkeys(("_lazy_init", "init", "reset_peak_memory_stats", "manual_seed"), nothing),
        **dict.fromkeys(("manual_seed_all", "set_rng_state", "ipc_collect"), nothing),
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), always(True)),
        **dict.fromkeys(("memory_reserved", "memory_allocated", "max_memory_reserved"), always(0)),
        "max_memory_allocated": always(1 << 20),
        "get_per_process_memory_fraction": lambda device=None: machine.shares.get(machine.index(device), 1.0),
        "set_per_process_memory_fraction": lambda share, device=None: machine.shares.update(
            {machine.index(device): share}
        ),
        "mem_get_info": always((MEMORY, MEMORY)),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "empty_cache": empty_cache,
        "get_sync_debug_mode": lambda: machine.sync_mode,
        "set_sync_debug_mode": set_sync_debug_mode,
        "device_count": always(machine.n_devices),
        "current_device": lambda: machine.current,
        "set_device": set_device,
        "_exchange_device": machine.exchange,
        "_maybe_exchange_device": machine.exchange,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_properties": properties,
        "get_device_capability": always((9, 0)),
        "synchronize": machine.synchronize,
        "current_stream": machine.stream,
        "default_stream": lambda device=None: machine.defaults[machine.index(device)],
        "stream": machine.in_stream,
        "set_stream": lambda stream: machine.streams.__setitem__(stream.index, stream),
        "Stream": MyStream,
        "Event": MyEvent,
    }
