"""Triton, where it is installed: kernels stand in their op's file and are compiled when they are first launched.

Triton itself is imported then, which takes as long as all that a refused command does. Without it kernels are plain
functions that nobody calls. A launch goes to the GPU that its tensors are on, whichever is
current; pinned host tensors may be among them, which a kernel reads where they lie. With TRITON_INTERPRET=1 in the
environment before the first import, Triton runs them on a CPU, operation by operation; the tests do where there is no
GPU.

Kernels that work for rows of several variants at once read where each row's tensors are from a list of integers: their
distances in memory from a tensor that the kernel is given, because a GPU reads its own memory and pinned memory of the
host by addresses of one kind, and a distance can be said to be even where a bare address cannot.

Modules with kernels begin with `from __future__ import annotations`, so that Triton sees names of types.

Not here: any kernel; what becomes of them on which GPU (`kernels/aot.py`).
"""

import os
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from threading import RLock
from typing import Any

import torch
from torch import Tensor

# Products and sums in one rounding, as on the CPU; Triton 3.9 warns where nobody says so.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


class Later:
    """A module that is imported when something is looked up in it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.name), name)


triton: Any = Later("triton") if find_spec("triton") else None
tl: Any = Later("triton.language") if find_spec("triton") else None


# Whether kernels run in Triton's interpreter, which takes bfloat16 for its bits where a product asks for it.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


PREPARING = RLock()  # of one thread, in which kernels prepare those that they call


class Kernel:
    """A kernel before its first launch, which needs Triton's own in its place wherever its file names one."""

    def __init__(self, fn: Any, unspecialized: Sequence[str]) -> None:
        self.fn, self.unspecialized = fn, unspecialized
        self.made: Any = None
        self.is_ready = False

    def ready(self) -> Any:
        """Triton's kernel, launched on the device of its first tensor of a GPU; so are those that it calls."""
        if not self.is_ready:
            with PREPARING:
                if self.made is None:
                    self.prepare()
        return self.made

    def prepare(self) -> None:
        """Make it, and put it and those that it calls where its file names them."""
        made = self.made = triton.jit(self.fn, do_not_specialize=[*self.unspecialized])

        def run(*args: Any, **kwargs: Any) -> Any:
            index = next((x.device.index for x in args if isinstance(x, torch.Tensor) and x.is_cuda), None)
            if index is None or index == torch.cuda.current_device():
                return type(made).run(made, *args, **kwargs)
            with torch.cuda.device(index):
                return type(made).run(made, *args, **kwargs)

        made.run = run  # what `kernel[grid](…)` calls
        names = self.fn.__globals__
        for name, value in [*names.items()]:
            if isinstance(value, Kernel):
                names[name] = value.ready()
            elif isinstance(value, Later):
                names[name] = import_module(value.name)
        self.is_ready = True

    def __getitem__(self, grid: Any) -> Any:
        return self.ready()[grid]


def jit(kernel: Any = None, unspecialized: Sequence[str] = ()) -> Any:
    """`triton.jit`, if there is one, once the kernel is launched.

    A kernel is compiled anew where an integer becomes a multiple of 16 or is one no longer, but for those named.
    """
    if kernel is None:
        return partial(jit, unspecialized=unspecialized)
    return kernel if triton is None else Kernel(kernel, unspecialized)


def cdiv(n: int, size: int) -> int:
    """Blocks of a size that n need."""
    return -(-n // size)


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is neither below n nor below `least`: Triton's blocks have such lengths."""
    return max(least, 1 << max(0, n - 1).bit_length())


def fit_rows(width: int, most: int, held: int = 16384) -> tuple[int, int]:
    """How many rows of so many numbers registers have room for at once, at most so many, and the warps they take.

    `held` are the numbers that four warps hold, besides what the kernel wants otherwise.
    """
    n_warps = 8 if width > 256 else 4
    return max(1, min(most, held * n_warps // 4 // width)), n_warps


# Bytes of shared memory that a program can have, by the GPU's architecture: 80 is A100, 86 A10 and RTX 3090, 89 L40S
# and RTX 4090, 90 H100 and H200, 100 B200, 120 RTX 5090.
SHARED = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}


def architecture(device: torch.device) -> int:
    """A GPU's, such as 90; of tensors without memory that of Triton's target, of an interpreter the latest."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    return triton.runtime.driver.active.get_current_target().arch if device.type == "meta" else max(SHARED)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program of this device can have, as the device itself says."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return SHARED.get(architecture(device), min(SHARED.values()))


def distance(x: Tensor, start: Tensor) -> int:
    """Distance from the first element of `start` to that of x, in elements of both."""
    elements, rest = divmod(x.data_ptr() - start.data_ptr(), start.element_size())
    assert x.dtype == start.dtype and not rest, (x.dtype, start.dtype, rest)
    return elements


def lanes_of(x: Tensor, distances: Iterable[int]) -> int:
    """Elements of x in 16 bytes if all of these distances are multiples of them, and else 1.

    A kernel tells Triton by `tl.multiple_of`: without it Triton loads an element at a time, since it cannot know what
    numbers a table holds.
    """
    wide = 16 // x.element_size()
    return 1 if any(number % wide for number in distances) else wide


def integers(numbers: Sequence[int]) -> Tensor:
    """(n,) int64: a quarter of `torch.tensor`'s time for six of them, an eighth for sixty."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64)


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Integers on their way to the device, (n,) int64; nobody waits for them."""
    there = integers(numbers)
    if device.type == "cuda":
        return there.pin_memory().to(device, non_blocking=True)
    return there if device.type == "meta" else there.to(device)


@lru_cache(maxsize=1024)
def constants(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Integers that are sent once, and which nobody writes over."""
    return upload(numbers, device)
