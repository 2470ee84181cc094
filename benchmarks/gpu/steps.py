"""Where the time of decode steps goes: `python -m kvbench.benchmarks.gpu.steps METHOD…`.

Some steps of each method run twice, as they are and under torch's profiler. Printed are kernels by their time, the
share of a step in which the GPU was busy, its gaps, and the operators that took the host longest. A GPU that is busy
for far less than a step waits for the host.

Not here: times for the books (`python -m kvbench.benchmarks.gpu --only methods`).
"""

import argparse
import statistics
import sys
import traceback
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch.profiler import ProfilerActivity, profile

from kvbench.benchmarks.gpu.__main__ import REQUEST, SMALL_LENGTHS, SMALL_REQUEST, small_or_llama
from kvbench.benchmarks.gpu.models import method_of, request_of, sample_of
from kvbench.engine.books.stopwatch import synchronize
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.tasks.base import Sample
from kvbench.tasks.latency import Timed, read

FIRST, LAST = 12, 20  # steps that are watched: kernels are compiled and graphs captured by then
MOST_KERNELS, MOST_OPERATORS = 20, 12
GAP = 20.0  # us without a kernel that are counted


def steps(model: Model, name: str, sample: Sample, request: BudgetRequest) -> None:
    """Print what a method's steps spend their time on."""
    kind, params = method_of(name)
    ids, fed = sample.ids or (), (sample.forced or ())[:-1]
    variant = kind.variant_for(params, request_of(kind, request), model.shape, len(ids))
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if model.device.type == "cuda" else [])]
    watched = profile(activities=kinds)

    def on_step(n_steps: int, n_rows: int) -> None:
        if n_steps in (FIRST, LAST):
            synchronize(model.devices)
            watched.start() if n_steps == FIRST else watched.stop()

    for call in (None, on_step):
        with model.hooked():
            trace, row = read(model, Timed(variant), ids, len(fed) + 1)
            done = decode(model, trace, [row], max_new_tokens=0, feed=fed, on_step=call)
        if call is None:
            seconds = statistics.median(done.step_seconds[FIRST:LAST])
            print(f"\n{kind.title}, {len(ids):,} tokens: {1e3 * seconds:.2f} ms a step; {graphs(done)}", flush=True)
    tell(watched, LAST - FIRST, 1e3 * seconds)


def graphs(done: Any) -> str:
    return f"{done.by_graphs} steps by graphs" + (f", since {done.why_no_graphs}" if done.why_no_graphs else "")


def tell(watched: Any, n: int, step_ms: float) -> None:
    """Print sums over `n` steps, each divided by their number."""
    on_device = [event for event in watched.events() if event.device_type.name == "CUDA"]
    spans, end = sorted((event.time_range.start, event.time_range.end) for event in on_device), 0.0
    merged: list[list[float]] = []
    for start, stop in spans:
        if merged and start <= end:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
        end = merged[-1][1]
    if merged:
        busy = sum(stop - start for start, stop in merged) / n / 1e3
        gaps = [after[0] - before[1] for before, after in pairwise(merged) if after[0] - before[1] > GAP]
        print(
            f"  the GPU is busy for {busy:.2f} ms of {step_ms:.2f}; {len(on_device) / n:.0f} kernels and copies; "
            f"{len(gaps) / n:.0f} gaps above {GAP:.0f} us, {sum(gaps) / n / 1e3:.2f} ms"
        )
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in on_device:
        kernels[event.name].append(event.time_range.end - event.time_range.start)
    for name, each in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:MOST_KERNELS]:
        print(f"  {sum(each) / n:9.1f} us, {len(each) / n:5.1f} times  {name[:100]}")
    operators = sorted(watched.key_averages(), key=lambda each: -each.self_cpu_time_total)[:MOST_OPERATORS]
    shown = (f"{each.key[:40]} {each.self_cpu_time_total / n:.0f} us" for each in operators)
    print("  the host, by operator: " + ", ".join(shown), flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.benchmarks.gpu.steps", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="three layers of the embedded model's shape")
    parser.add_argument("--length", type=int, default=None, help="tokens of the prompt; 8,192 without")
    asked = parser.parse_args(words)
    try:
        for name in asked.methods:
            method_of(name)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model, _ = small_or_llama(asked.small, asked.device)
    sample = sample_of(model, asked.length or (SMALL_LENGTHS[0] if asked.small else 8192), LAST + 4)
    n_failed = 0
    for name in asked.methods:
        try:
            steps(model, name, sample, SMALL_REQUEST if asked.small else REQUEST)
        except Exception:  # a method that fails hides no other
            n_failed += 1
            print(f"{name}: FAILED\n{traceback.format_exc(limit=-4)}", flush=True)
    return int(n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
