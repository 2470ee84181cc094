"""Triton, where it is installed: kernels stand in their op's file and are compiled when they are first launched.

Without it they are plain functions that nobody calls. A launch goes to the GPU that its tensors are on, whichever is
current; pinned host tensors may be among them, which a kernel reads where they lie. With TRITON_INTERPRET=1 in the
environment before the first import, Triton runs them on a CPU, operation by operation; the tests do where there is no
GPU.

Modules with kernels begin with `from __future__ import annotations`, so that Triton sees names of types.

Not here: any kernel; what becomes of them on which GPU (`kernels/aot.py`).
"""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

triton: Any = None
tl: Any = None
if find_spec("triton") is not None:
    # Products and sums in one rounding, as on the CPU; Triton 3.9 warns where nobody says so.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    triton, tl = import_module("triton"), import_module("triton.language")


# Whether kernels run in Triton's interpreter, which takes bfloat16 for its bits where a product asks for it.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def jit(kernel: Any) -> Any:
    """`triton.jit`, if there is one, launched on the device of its first tensor of a GPU."""
    if triton is None:
        return kernel
    made = triton.jit(kernel)

    def run(*args: Any, **kwargs: Any) -> Any:
        index = next((x.device.index for x in args if isinstance(x, torch.Tensor) and x.is_cuda), None)
        if index is None or index == torch.cuda.current_device():
            return type(made).run(made, *args, **kwargs)
        with torch.cuda.device(index):
            return type(made).run(made, *args, **kwargs)

    made.run = run  # what `kernel[grid](…)` calls
    return made


def cdiv(n: int, size: int) -> int:
    """Blocks of a size that n need."""
    return -(-n // size)


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is neither below n nor below `least`: Triton's blocks have such lengths."""
    return max(least, 1 << max(0, n - 1).bit_length())
