"""Streams of a GPU for work in addition to the model's own: one for each kind of work and device, in the whole process.

torch gives memory that was taken on a stream to that stream alone: a stream for each layer or sample would keep what
each of them once needed.

Not here: what the streams do (`engine/passes/beside.py`, methods).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.passes.pinned import PinnedBuffers

NO_BUFFERS = PinnedBuffers({})


def stream_for(work: str, device: torch.device) -> "torch.cuda.Stream":
    """The device's stream for this kind of work."""
    return made(torch.cuda.Stream, work, device)


@cache
def made(kind: Any, work: str, device: torch.device) -> Any:
    return kind(device)


def sent_so_far(device: torch.device) -> "torch.cuda.Event | None":
    """Event to wait for before another thread reads what a GPU was asked to send home; None: nothing is sent."""
    if device.type != "cuda":
        return None
    event, stream = torch.cuda.Event(), stream_for("copies", device)
    stream.wait_stream(torch.cuda.current_stream(device))
    event.record(stream)
    return event


def sent_home(x: Tensor, homes: PinnedBuffers = NO_BUFFERS) -> Tensor:
    """A copy in pinned memory, once the device is done; it is made after what was asked of the current stream so far,
    and what is asked of it from now on does not wait for the copy."""
    home, stream = homes.take(x.shape, x.dtype), stream_for("copies", x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        home.copy_(x, non_blocking=True)
    x.record_stream(stream)
    return home
