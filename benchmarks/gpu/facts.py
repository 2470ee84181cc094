"""What a GPU machine is and can do, a line each: `python -m kvbench.benchmarks.gpu.facts`.

Each fact is found by itself, so that one that fails hides no other. Speeds are ceilings for what `python -m
kvbench.benchmarks.gpu` measures: a kernel's share of them says more than its milliseconds. `--device cpu` leaves out
what needs a GPU. Exit code 1: one of them failed.

Not here: packages outside their bounds (`run.py --check`), bandwidths (`python -m kvbench.benchmarks.gpu --only
copies`).
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from kvbench.benchmarks.gpu.ops import seconds_of
from kvbench.benchmarks.gpu.results import driver_version
from kvbench.benchmarks.paired import cpu_name
from kvbench.kernels.jit import jit, tl

PACKAGES = "torch triton transformers numpy accelerate hydra-core pytest flash-attn flashinfer-python".split()
GIB = 1 << 30
N_ADDED = 100_000
N_LAUNCHES = 2000
IN_A_GRAPH = 100


@jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def doubled(x: Tensor, device: torch.device) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    double[(-(-x.numel() // 1024),)](x, out, x.numel(), 1024)
    return out


def machine(device: torch.device) -> str:
    if device.type != "cuda":
        return "a CPU"
    card, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
    parts = [card.name, f"sm_{card.major}{card.minor}", f"{card.multi_processor_count} multiprocessors"]
    parts += [f"{free / GIB:.1f} of {total / GIB:.1f} GiB free", f"driver {driver_version() or 'unknown'}"]
    return ", ".join([*parts, f"CUDA {torch.version.cuda} of torch"])


def packages(device: torch.device) -> str:
    found = [f"Python {sys.version.split()[0]}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def host(device: torch.device) -> str:
    """Steps of small batches wait for Python, so its pace is one of the machine's speeds."""
    start, total = perf_counter(), 0
    for i in range(1_000_000):
        total += i
    pace = 1e9 * (perf_counter() - start) / 1e6
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return f"{cpu_name()}, {os.cpu_count()} cores, {memory:.0f} GiB, {pace:.0f} ns a turn of a loop in Python"


def triton_kernel(device: torch.device) -> str:
    x = torch.arange(N_ADDED, device=device, dtype=torch.float32)
    start = perf_counter()
    right = torch.equal(doubled(x, device), x + x)
    assert right, "a kernel's numbers are wrong"
    return f"right, {perf_counter() - start:.2f} s to compile and run it"


def launches(device: torch.device) -> str:
    x = torch.zeros(1024, device=device)
    x.add_(1)
    torch.cuda.synchronize(device)
    start = perf_counter()
    for _ in range(N_LAUNCHES):
        x.add_(1)
    requested = perf_counter() - start
    torch.cuda.synchronize(device)
    whole = perf_counter() - start
    return f"{1e6 * requested / N_LAUNCHES:.1f} us for the host, {1e6 * whole / N_LAUNCHES:.1f} us until it is done"


def graphs(device: torch.device) -> str:
    x = torch.zeros(1024, device=device)
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            x.add_(1)
    before = float(x[0])
    graph.replay()
    assert float(x[0]) == before + IN_A_GRAPH, "a replayed graph computes something else"
    return f"right, {1e6 * seconds_of(graph.replay, device) / IN_A_GRAPH:.1f} us a kernel"


def products(device: torch.device) -> str:
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return f"{2 * 8192**3 / seconds_of(lambda: a @ b, device) / 1e12:,.0f} TFLOP/s in bfloat16"


EVERYWHERE = (machine, packages, host, triton_kernel)
ON_GPUS = (launches, graphs, products)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.benchmarks.gpu.facts", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args(words).device)
    found: list[Callable[[torch.device], str]] = [*EVERYWHERE, *(ON_GPUS if device.type == "cuda" else ())]
    n_failed = 0
    if device.type == "cuda" and not Path("/dev/nvidiactl").exists():
        print("/dev/nvidiactl is not there: tests would run kernels in Triton's interpreter", flush=True)
    for fact in found:
        try:
            says = fact(device)
        except Exception:  # whatever a driver raises, the other facts are found
            n_failed += 1
            says = "FAILED\n" + traceback.format_exc(limit=-3)
        print(f"{fact.__name__.replace('_', ' '):15} {says}", flush=True)
    return int(n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
