"""The number of a step, on the device: a kernel that reads it there is launched with the same arguments at every step.

A kernel that was told of rows once has to know how many steps ago that was. As an argument it would be another number
at each launch, and no captured graph could hold it. So every device has a count of steps, which one launch advances,
and a kernel is told where it lies and what it was then.

Shapes    a clock is (1,) int64.
Checks    tests/kernels/test_clock.py.

Not here: who ticks it (`engine/batch.py`), for how many steps what kernels were told holds
(`engine/layouts/launch_plan.py`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.jit import jit, tl


class Since(NamedTuple):
    """The number of steps since one at which a clock showed `start`."""

    clock: Tensor
    start: int

    def later(self, n: int) -> Since:
        """Since a step that came so many after it."""
        return self._replace(start=self.start + n)


class Clock:
    """A count of steps on each device that asked for it, and the host's own, which says the same."""

    def __init__(self) -> None:
        self.now = 0
        self.counts: dict[torch.device, Tensor] = {}

    def at(self, device: torch.device) -> Tensor:
        if device not in self.counts:
            self.counts[device] = torch.full((1,), self.now, dtype=torch.int64, device=device)
        return self.counts[device]

    def since_now(self, device: torch.device) -> Since:
        return Since(self.at(device), self.now)

    def tick(self) -> None:
        """A step begins."""
        self.tick_host()
        self.tick_devices()

    def tick_host(self) -> None:
        """Advance the host's count alone, where a captured graph has advanced the devices'."""
        self.now += 1

    def tick_devices(self, n: int = 1) -> None:
        """Advance the devices' counts alone: what a graph captures."""
        with torch.inference_mode():  # in which counts may have been made
            for count in self.counts.values():
                count.add_(n)


@cache
def zero(device: torch.device) -> Tensor:
    """A clock that stands still."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def now(device: torch.device) -> Since:
    """The moment of a launch on its own."""
    return Since(zero(device), 0)


@jit
def steps_since(clock, start):
    """How many steps ago kernels were told, int32."""
    return (tl.load(clock) - start).to(tl.int32)
