"""How long work takes: by the CPU's clock, or between two events on a GPU's stream.

A GPU works while the CPU goes on, so that the CPU's clock would time how fast it is asked. Events are marks in its own
queue: they cost nothing while it works, and are read when all is over, which is the only time that anybody waits.

    time = Stopwatch()
    with time.running(device):
        …
    time.seconds()

Not here: named stretches inside each other (`engine/books/spans.py`).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch


def now(device: torch.device) -> Any:
    """A moment: seconds, or a mark after all that this thread has asked of a GPU."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(start: Any, stop: Any) -> float:
    """Seconds from one moment to another of the same device, which must be over on a GPU."""
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3


def asked_so_far(device: torch.device) -> "torch.cuda.Event | None":
    """Event after which a GPU has done what this thread asked of it so far; None: a CPU, which has."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until every GPU among them has done what was asked of it."""
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class Stopwatch:
    """Stretches of work, each on one device."""

    def __init__(self) -> None:
        self.stretches: list[tuple[Any, Any]] = []
        self.latest: dict[torch.device, Any] = {}  # moment of each device

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Time as one stretch what the device is asked to do inside."""
        start = now(device)
        yield
        self.latest[device] = now(device)
        self.stretches.append((start, self.latest[device]))

    def seconds(self) -> list[float]:
        """Seconds of each stretch; waits until all GPUs are done with their last ones."""
        for stop in self.latest.values():
            if not isinstance(stop, float):
                stop.synchronize()
        return [between(start, stop) for start, stop in self.stretches]
