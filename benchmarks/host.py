"""How long the host works at a layer of a decode step on a GPU: `python -m kvbench.benchmarks.host`.

What engine and methods do around a layer's attention, in Python and in torch: where tokens lie, what kernels are told,
the books. Launches are stubbed: Triton's kernels do nothing, and the time in which a CPU does an operator's work is
left out (`benchmarks/pretend/silent.cpp`), so no GPU is needed. The model's own part, which CUDA graphs replay, is not
in it. CSV on standard output: microseconds of a layer, the median of the steps, and those of its books, which are
written behind the steps where these are alike; exit code 1 above the goal.

Not here: how often a step launches and waits (`benchmarks/launches.py`), how long a GPU works.
"""

import argparse
import csv
import ctypes
import gc
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # before Triton's kernels are imported
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor

import kvbench.engine.batch
import kvbench.engine.causal
from kvbench.benchmarks.launches import config_of, read
from kvbench.benchmarks.pretend.cuda import Machine, functions
from kvbench.engine.books.pending import PendingSteps
from kvbench.engine.checkpoints.load import load_random
from kvbench.engine.decode import decode
from kvbench.kernels.build import find_compiler
from kvbench.kernels.jit import Kernel
from kvbench.results.names import own_methods

GOAL = 60  # microseconds of a layer, with one row and with ten
N_LAYERS = 8
WARM = 20  # steps that are left out
ASKED = (("full", 1), ("pqcache", 1), ("snapkv", 10))


@contextmanager
def silent() -> Iterator[Callable[[], float]]:
    """Inside, torch sees a GPU, and no kernel of Triton does anything; yields the seconds of a CPU's work so far."""
    # Both make tables of torch's functions, which must be torch's own.
    import_module("torch._dynamo")
    import_module("torch.utils._device")._device_constructors()
    library = compiled()
    library.worked_so_far.restype = ctypes.c_double
    machine = Machine(1)
    empty = torch.empty
    with ExitStack() as stack:

        def put(where: Any, name: str, what: Any) -> None:
            stack.enter_context(patch.object(where, name, what, create=True))

        for name, function in functions(machine).items():
            put(torch.cuda, name, function)
        put(torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more))
        put(Tensor, "pin_memory", lambda x, *_: x)
        put(Tensor, "is_pinned", lambda x, *_: not x.is_cuda)
        put(Tensor, "record_stream", lambda *_: None)
        put(Kernel, "__getitem__", lambda *_: lambda *_, **__: None)
        yield library.worked_so_far


def compiled() -> ctypes.CDLL:
    """`silent.cpp`, which takes half a minute."""
    torch_home = Path(torch.__file__).parent
    includes = (torch_home / "include", torch_home / "include" / "torch" / "csrc" / "api" / "include")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "silent.so"
        command = [*find_compiler(), "-O1", "-shared", "-fPIC", "-std=c++20", *(f"-I{path}" for path in includes)]
        source = str(Path(__file__).with_name("pretend") / "silent.cpp")
        done = subprocess.run(
            [*command, source, f"-L{torch_home / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(made)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command[0]} cannot compile {source}: {done.stderr[:500]}")
        return ctypes.CDLL(str(made))


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, attention of a prompt is something in its shape, for numbers that nobody reads."""

    def attended(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros(q.shape[:3], device=q.device)

    with patch.object(kvbench.engine.causal, "flash", attended), patch.object(kvbench.engine.causal, "fused", attended):
        yield


def microseconds(worked: Callable[[], float], method: str, n_rows: int, n_steps: int) -> tuple[float, float]:
    """Of the host, for a layer of a step: the median over steps, each the mean of its layers; of all steps' books."""
    model = load_random("small", config_of(N_LAYERS), dtype="bfloat16", device="cuda")
    spent, calls, books = [0.0], [0], [0.0]
    attend, settle = kvbench.engine.batch.attend_groups, PendingSteps.flush

    def timed(*args: Any) -> Tensor:
        start, before = perf_counter(), worked()
        out = attend(*args)
        spent[-1] += perf_counter() - start - (worked() - before)
        calls[0] += 1
        return out

    def settled(pending: PendingSteps) -> None:
        start = thread_time()  # all at once, so that no median leaves out what other programs took
        settle(pending)
        books[0] += thread_time() - start

    def on_step(done: int, n: int) -> None:
        spent.append(0.0)

    with model.hooked(), without_kernels():
        trace, rows = read(model, method, n_rows, WARM + n_steps)
        gc.freeze()  # the collector goes over all that there is, torch too, now and then: a fifth of a second
        with patch.object(kvbench.engine.batch, "attend_groups", timed), patch.object(PendingSteps, "flush", settled):
            decode(model, trace, rows, max_new_tokens=WARM + n_steps + 1, on_step=on_step)
    n_layers = calls[0] / (len(spent) - 1)
    return 1e6 * statistics.median(spent[WARM:-1]) / n_layers, 1e6 * books[0] / calls[0]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("methods", nargs="*", help="a method, or several in one batch: snapkv+quest")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args(words)
    for name in (each for several in asked.methods for each in several.split("+")):
        if name not in own_methods():
            parser.error(f"{name!r} is no method; there are {', '.join(own_methods())}")
    torch.set_num_threads(1)
    table, above = csv.writer(sys.stdout), False
    table.writerow(["method", "rows", "us_layer", "us_books", "goal"])
    with silent() as worked:
        for method, n in [(name, n) for name in asked.methods for n in asked.rows] or ASKED:
            found, books = microseconds(worked, method, n, asked.steps)
            table.writerow([method, n, f"{found:.0f}", f"{books:.0f}", GOAL])
            sys.stdout.flush()
            above |= found > GOAL
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
