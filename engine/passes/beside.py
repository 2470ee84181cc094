"""Work on threads while the pass over the prompt runs: on a GPU on its own stream, after what the pass has written.

    threads = trace.once("clusters", lambda: Beside("clusters"))
    future = threads.ask("cluster", layer, device, lambda: cluster(keys), tensors=lambda made: [made.centroids])

The work may wait as often as it likes: only its own stream and its own thread do. What it leaves is done once the
future is, and belongs to the model's stream.

Not here: what is worked on, and which variants share it (`Trace.once`).
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.engine.books.spans import following, span
from kvbench.engine.books.stopwatch import asked_so_far
from kvbench.engine.passes.streams import stream_for

T = TypeVar("T")


class Beside:
    """Threads that compute alone: teams of their own would make each other and the prefill wait."""

    def __init__(self, name: str, n_threads: int = 1) -> None:
        self.pool = ThreadPoolExecutor(n_threads, name, torch.set_num_threads, (1,))

    def ask(
        self, name: str, layer: int, device: torch.device, work: Callable[[], T],
        tensors: Callable[[T], Iterable[Tensor]] = lambda made: (),
    ) -> "Future[T]":  # fmt: skip
        """Do `work` on the device; `tensors` are those of its result that lie there."""
        written = asked_so_far(device)

        def done() -> T:
            with torch.inference_mode():
                if written is None:
                    with span(name, layer):
                        return work()
                return on_stream(name, layer, device, written, work, tensors)

        return self.pool.submit(following(done))


def on_stream(
    name: str, layer: int, device: torch.device, written: "torch.cuda.Event", work: Callable[[], T],
    tensors: Callable[[T], Iterable[Tensor]],
) -> T:  # fmt: skip
    """Do `work` after `written`, on the stream for such work; it is done on return."""
    stream = stream_for("beside", device)
    stream.wait_event(written)
    with torch.cuda.stream(stream), span(name, layer):
        made = work()
    stream.synchronize()
    for x in tensors(made):
        x.record_stream(torch.cuda.default_stream(device))
    return made
