"""Capturing CUDA graphs so that nothing of a capture remains where it fails.

A capture that CUDA has broken off cannot be ended: `capture_end` raises before torch's allocator hears that it is over,
and until then no cached memory can be given back. Most of what breaks a capture is waiting for the GPU, and that shows
before, without a capture.

Not here: what is captured (`engine/passes/replay.py`).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WAIT = "called a synchronizing CUDA operation"  # as torch warns


class Waits(RuntimeError):
    """Raised where what was run waited for the GPU."""


@contextmanager
def without_waiting() -> Iterator[None]:
    """Raise `Waits` after what waited for the GPU inside.

    torch only warns meanwhile: its mode holds for other threads too, and those may wait.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if any(WAIT in str(each.message) for each in said):
        raise Waits("the model waits for the GPU within a step")


BROKEN: list[Any] = []  # graphs that could not be ended; torch's allocator of pinned memory may ask them on


def begin(graph: Any, pool: Any) -> None:
    """Capture what this thread asks of the current stream; other threads may work and allocate."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")


def end(graph: Any, pool: Any, device: torch.device) -> None:
    """End a capture (`capture_end`); where that fails, the allocator is told all the same.

    `pool` is what it began with: a graph tells its own only once it was captured.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        BROKEN.append(graph)
        index = torch.cuda.current_device() if device.index is None else device.index
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
        raise
