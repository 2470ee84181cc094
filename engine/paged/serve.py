"""Requests that share pools: each reads its prompt into blocks, gives back those that its method does not need, and
answers.

Not here: several requests in one step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.paged.pool import Pool
from kvbench.engine.paged.store import PagedStore, PagedTrace
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill

MakeRow = Callable[..., Any]  # a variant's row on a trace, for so many new tokens, with a store of this kind


@dataclass
class Request:
    """A prompt that was read, and the row that answers after it."""

    row: Any
    trace: PagedTrace
    n_read: int  # blocks of the device that its prompt took
    n_kept: int  # that are left of them, once every layer was placed

    def end(self) -> None:
        """Give all blocks back."""
        hosts = [host.pages for host in self.trace.hosts.values()]
        for pages in [*self.trace.pages.values(), *hosts]:
            pages.cover(0)


class Serving:
    """A model, and two pools that its requests share: the device's blocks and the host's."""

    def __init__(self, model: Model, n_blocks: int, n_host_blocks: int = 0, heads: int = 1) -> None:
        """`heads` KV heads share a block."""
        self.model = model
        self.device, self.host = (Pool(n, model.shape, model.dtype, heads) for n in (n_blocks, n_host_blocks))

    def read(self, ids: Sequence[int], variant: Any, n_new: int) -> Request:
        """Read a prompt, layer by layer into blocks, and place it; `n_new` tokens may follow."""
        made: list[Any] = []
        n_read = 0

        def build(read: Trace, layer: int) -> None:
            nonlocal n_read
            if not made:
                made.append(variant.row(PagedTrace(read, self.device, self.host), n_new, PagedStore))
            row = made[0]
            row.trace.take_in(layer, n_new)
            n_read += row.trace.pages[layer].n_blocks
            row.build(layer)

        with torch.inference_mode(), self.model.hooked():
            prefill(self.model, ids, variant.observations, build)
            row = made[0]
            row.complete()
        n_kept = sum(pages.n_blocks for pages in row.trace.pages.values())
        return Request(row, row.trace, n_read, n_kept)

    def answer(self, request: Request, max_new_tokens: int, stop_ids: Iterable[int] = ()) -> list[int]:
        """Token ids of the row's answer."""
        with torch.inference_mode(), self.model.hooked():
            done = decode(self.model, request.trace, [request.row], max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        return done.answers[0].ids
