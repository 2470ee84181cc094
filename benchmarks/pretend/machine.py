"""`with pretended(n):` torch sees n CUDA devices that are not there, in this thread and those that it starts work on.

Not here: what a device does (`benchmarks/pretend/cuda.py`, `benchmarks/pretend/tensors.py`).
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvbench.benchmarks.pretend.cuda import Machine, functions
from kvbench.benchmarks.pretend.graphs import Tape
from kvbench.benchmarks.pretend.tensors import MACHINE, Pretended, Rules, launch
from kvbench.kernels.build import find_compiler
from kvbench.kernels.jit import triton

ONE_KERNEL = Lock()  # the interpreter has one grid for all threads


@contextmanager
def pretended(n_devices: int = 1) -> Iterator[Machine]:
    """Inside, `torch.cuda` is a machine with so many GPUs. Triton's kernels must be in its interpreter."""
    assert not torch.cuda.is_available(), "a GPU is there: hide it with CUDA_VISIBLE_DEVICES="
    # transformers imports it in any case, and it makes tables of torch.cuda's functions, which must be torch's own.
    import_module("torch._dynamo")
    load_guard()
    machine = Machine(n_devices)
    with ExitStack() as stack:

        def put(where: Any, name: str, what: Any) -> None:
            stack.enter_context(patch.object(where, name, what, create=True))

        for name, function in functions(machine).items():
            put(torch.cuda, name, function)
        put(torch.cuda, "CUDAGraph", graph_of(machine))
        put(torch.cuda, "graph_pool_handle", object)
        put(torch._C, "_cuda_endAllocateToPool", lambda _, pool: machine.recording.remove(pool))
        put(torch._C, "_cuda_releasePool", lambda _, pool: machine.released.append(pool))
        put(Tensor, "pin_memory", lambda x, *_: machine.pin(x.clone()))
        put(Tensor, "is_pinned", lambda x, *_: not isinstance(x, Pretended) and machine.is_pinned(x))
        put(ThreadPoolExecutor, "submit", follow(machine, ThreadPoolExecutor.submit))
        if triton is not None:
            from triton.runtime.interpreter import InterpretedFunction

            put(InterpretedFunction, "run", launching(machine, InterpretedFunction.run))
        # A parameter cannot be made to lie elsewhere in place.
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        # torch.tensor(…, device=…) makes a tensor of the CPU first, and says so.
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        MACHINE.append(machine)
        stack.callback(MACHINE.pop)
        stack.enter_context(Rules(machine))
        yield machine


@cache
def load_guard() -> None:
    """Compile and load `guard.cpp`, in a second; RuntimeError where there is no compiler."""
    torch_home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "guard.so"
        command = [*find_compiler(), "-shared", "-fPIC", "-std=c++20", f"-I{torch_home / 'include'}"]
        source = str(Path(__file__).with_name("guard.cpp"))
        done = subprocess.run(
            [*command, source, f"-L{torch_home / 'lib'}", "-lc10", "-o", str(made)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command[0]} cannot compile {source}: {done.stderr[:500]}")
        ctypes.CDLL(str(made))


def graph_of(machine: Machine) -> type[Tape]:
    """`torch.cuda.CUDAGraph`."""

    class Graph(Tape):
        def __init__(self) -> None:
            super().__init__(machine)

    return Graph


def follow(machine: Machine, submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """Work for a thread, by the same rules there."""

    def submitted(pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        def ruled() -> Any:
            with Rules(machine):
                return work(*args, **kwargs)

        return submit(pool, ruled)

    return submitted


def launching(machine: Machine, run: Callable[..., Any]) -> Callable[..., None]:
    """Triton's launch of an interpreted kernel."""

    def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        def go(*args: Any, **kwargs: Any) -> None:
            with ONE_KERNEL, machine.writing():
                run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        launch(machine, kernel.fn.__name__, go, args, kwargs)

    return launched
