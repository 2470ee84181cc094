"""What timed requests hold in memory, how many of them fit at once, and a device that has no more than so much.

    weights + (n - 1) * request + max(prefill, request) <= memory

Requests are read one after another, so that the last one's prefill comes on top of all others. What a request holds is
of the device tier (`engine/books/occupied.py`). On a GPU a prefill's peak is the allocator's. Without one it is K and V
of the prompt, as the pass held them at once, and what the request allocates in addition: the process' own high-water
mark would say nothing of a device.

Not here: passes and their times (`tasks/latency.py`).
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kvbench.engine.books import occupied
from kvbench.engine.books.stopwatch import synchronize
from kvbench.engine.books.width import SHARE
from kvbench.engine.decode import decode
from kvbench.engine.machine import free_bytes, machine_bytes
from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.methods.base import SelectiveAttention

Reading = Callable[[], tuple[Trace, SelectiveAttention]]  # of a prompt, to a row that is ready to decode


@dataclass(frozen=True)
class Sizes:
    """Bytes on the device."""

    weights: int
    request: int
    prefill: int  # of one request at its peak, in addition to the weights

    def largest(self, memory: int) -> int:
        """How many requests fit at once."""
        room = memory - self.weights - max(self.prefill, self.request)
        return 0 if room < 0 else 1 + room // max(1, self.request)


def weigh(model: Model, reading: Reading, feed: Sequence[int]) -> Sizes:
    """Read one prompt and go on with it, and see what that takes."""
    collect(model.devices)
    before, read_peak = allocated_bytes(model.devices), watch_peak(model.devices)
    trace, row = reading()
    synchronize(model.devices)
    peak, ready, is_gpu = read_peak(), occupied.device_bytes(trace, row), model.device.type == "cuda"
    viewed = 0 if is_gpu else occupied.viewed_bytes(trace, row)
    decode(model, trace, [row], max_new_tokens=0, feed=feed)  # some memory is taken, and some given back, by steps
    request = max(ready, occupied.device_bytes(trace, row))
    prefill = peak - before if is_gpu and peak is not None else trace.peak_bytes + request - viewed
    return Sizes(weight_bytes(model), request, prefill)


def weight_bytes(model: Model) -> int:
    return sum(x.numel() * x.element_size() for x in model.hf.parameters())


def most_on_host(row: SelectiveAttention) -> int:
    """How many requests like this one the host's memory holds, this one included."""
    return 1 + int(SHARE * free_bytes(torch.device("cpu"))) // max(1, occupied.host_bytes(row))


def collect(devices: Sequence[torch.device]) -> None:
    """Free what earlier passes left, so that no pass pays for another."""
    gc.collect()
    synchronize(devices)
    if devices[0].type == "cuda":
        torch.cuda.empty_cache()


def allocated_bytes(devices: Sequence[torch.device]) -> int:
    """Bytes that GPUs have given out; 0 without any."""
    return sum(torch.cuda.memory_allocated(device) for device in devices if device.type == "cuda")


def watch_peak(devices: Sequence[torch.device]) -> Callable[[], int | None]:
    """A function that reads the peak memory since now: of the GPUs, or of this process where Linux lets us reset it."""
    if devices[0].type == "cuda":
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        return lambda: sum(torch.cuda.max_memory_allocated(device) for device in devices)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return lambda: None
    return high_water_mark


def high_water_mark() -> int | None:
    """Most bytes of RAM that this process held since the mark was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return None


def device_bytes(devices: Sequence[torch.device], memory_gb: float | None) -> int:
    """The memory for weights and requests: as given, or the devices'."""
    return sum(map(machine_bytes, devices)) if memory_gb is None else round(memory_gb * 1e9)


@contextmanager
def limited(devices: Sequence[torch.device], n_bytes: int) -> Iterator[None]:
    """Inside, GPUs give this process no more than so many bytes in all."""
    before = {device: torch.cuda.get_per_process_memory_fraction(device) for device in devices if device.type == "cuda"}
    try:
        for device in before:
            share = n_bytes / len(before) / machine_bytes(device)
            torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)
        yield
    finally:
        for device, share in before.items():
            torch.cuda.set_per_process_memory_fraction(share, device)
