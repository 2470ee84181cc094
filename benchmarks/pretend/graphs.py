"""CUDA graphs that do their operators and kernels again: what was captured has numbers only after it was replayed.

While it is captured nothing is written to what was there before.

Not here: operators (`benchmarks/pretend/tensors.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kvbench.benchmarks.pretend.cuda import Machine


@dataclass
class Tape:
    """What was captured: each operator or kernel, its arguments, and the numbers that it made."""

    machine: Machine
    work: list[tuple[Callable[[], Any], list[Tensor]]] = field(default_factory=list)
    is_whole: bool = False
    is_broken: bool = False  # something was asked for that cannot be captured
    mempool: Any = None

    def add(self, again: Callable[[], Any], made: list[Tensor]) -> None:
        self.work.append((again, made))

    # As torch.cuda.CUDAGraph.

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        machine = self.machine
        if machine.tape is not None:
            raise RuntimeError("a stream is capturing already")
        if machine.stream() is machine.defaults[machine.current]:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        machine.tape = self
        self.mempool = object() if pool is None else pool
        machine.recording.append(self.mempool)

    def capture_end(self) -> None:
        """Nothing was done while it was captured: rubbish lies in what was made."""
        if self.machine.tape is not self:
            raise RuntimeError("this graph is not being captured")
        self.machine.tape = None
        if self.is_broken:  # and the allocator goes on recording
            raise RuntimeError("operation failed due to a previous error during capture")
        self.is_whole = True
        self.machine.recording.remove(self.mempool)
        for _, made in self.work:
            for x in made:
                if x.is_floating_point():
                    x.fill_(torch.nan)

    def pool(self) -> Any:
        if not self.is_whole:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.mempool

    def replay(self) -> None:
        assert self.is_whole, "the graph was not captured"
        self.machine.note("launch")
        self.machine.note("graph")
        with self.machine.uncounted():
            for again, made in self.work:
                for x, new in zip(made, fresh(again(), made), strict=True):
                    x.copy_(new)


def fresh(out: Any, like: list[Tensor]) -> list[Tensor]:
    """The tensors of an operator's output, as many as `like` has."""
    return [x for x in tree_leaves(out) if isinstance(x, Tensor)] if like else []
