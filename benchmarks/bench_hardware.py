"""How far the simulation is off where it can be checked: decode steps of the embedded model on this machine.

Calibration first, half a minute, at prompts shorter than any that is predicted: how fast weights and K and V are
read, what a number costs that a search makes (of a search that is none of the methods'), what a layer costs beside
them, and what searching and fetching cost per call, per method. Then the steps of five methods at three lengths are
measured and compared with `kvbench.evals.studies.hardware.predict`. The bar is 25 %. What is measured is divided by the
pace of the moment: a step of the calibration just before, relative to what it took then.

`--cpu` measures CPU seconds on one thread instead of wall time on all: for a machine that others use.

Not here: prefill times, whose lanes a machine without an accelerator does not have.
"""

import argparse
import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time

import torch

from kvbench.benchmarks.paired import RESULTS
from kvbench.engine.budget import EVERYTHING, BudgetRequest
from kvbench.engine.checkpoints.load import load
from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import attend_group
from kvbench.evals.studies.counts import Numbers, count
from kvbench.evals.studies.hardware import Hardware, layers_of, method_of, predict
from kvbench.kernels.topk import top_stable
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.calibration.prose import embedded_prose

METHODS = ("full", "snapkv", "quest", "clusterkv", "sparq")
SHORT = 768  # tokens of the calibration's prompts
STEPS = 24
REQUEST = BudgetRequest(Fraction(1, 5), None, Fraction(1, 64))


def rows_of(model: Model, ids: Sequence[int], names: Sequence[str]) -> dict[str, SelectiveAttention]:
    """One prefill, a row per method, ready to decode."""
    kinds = {name: method_of(name) for name in names}
    request = {name: EVERYTHING if name == "full" else REQUEST for name in names}
    variants = {
        name: kind.variant_for(params, request[name], model.shape, len(ids)) for name, (kind, params) in kinds.items()
    }
    asked = [what for variant in variants.values() for what in variant.observations]
    rows: dict[str, SelectiveAttention] = {}

    def build(trace: Trace, layer: int) -> None:
        if not rows:
            for name, variant in variants.items():
                rows[name] = variant.row(trace, STEPS + 1)
        for row in rows.values():
            row.build(layer)

    prefill(model, ids, asked, build)
    for row in rows.values():
        row.complete()
    return rows


@dataclass(frozen=True)
class Here:
    """What is timed, on what, and by which clock."""

    model: Model
    ids: Sequence[int]
    clock: Callable[[], float]


def step_seconds(here: Here, row: SelectiveAttention, feed: Sequence[int]) -> float:
    """Median step; the first ones wait for clusters and touch memory for the first time."""
    ends = [here.clock()]
    decode(here.model, row.trace, [row], max_new_tokens=0, feed=feed, on_step=lambda *_: ends.append(here.clock()))
    return statistics.median(b - a for a, b in pairwise(ends[4:]))


def read_rate(here: Here) -> float:
    """Bytes per second at which full attention reads K and V: the difference of two lengths.

    Of all layers in turn, as in a step: one alone would be read from the processor's caches.
    """
    model, clock = here.model, here.clock
    seconds, shape = {}, model.shape
    kind, params = method_of("full")
    draw = torch.Generator().manual_seed(0)
    heads = (shape.h, shape.h_kv, shape.h_kv)
    for s in (SHORT, 8 * SHORT):
        trace = Trace(shape, s, torch.device("cpu"))
        for layer in shape.attention_layers:
            k, v = (torch.randn(1, shape.h_kv, s, shape.d_h, generator=draw) for _ in range(2))
            trace.add(layer, k.to(model.dtype), v.to(model.dtype), Softmax(shape.d_h**-0.5))
        row = kind.variant_for(params, EVERYTHING, trace.shape, trace.s_prompt).row(trace, 40)
        for layer in shape.attention_layers:
            row.build(layer)
        times = []
        for _ in range(30):
            q, k_new, v_new = (torch.randn(1, h, 1, shape.d_h).to(model.dtype) for h in heads)
            start = clock()
            for layer in shape.attention_layers:
                attend_group(kind, [row], layer, q, k_new, v_new, Softmax(shape.d_h**-0.5))
            times.append(clock() - start)
        seconds[s] = statistics.median(times[5:])
    n_bytes = 7 * SHORT * 2 * shape.h_kv * shape.d_h * model.dtype.itemsize * shape.n_layers
    return n_bytes / (seconds[8 * SHORT] - seconds[SHORT])


def number_rate(here: Here) -> float:
    """Seconds per number that a search makes: the difference of two lengths of a plain one.

    Logits by one component, weights, their sums over a group, the top fifth: none of the methods searches so. Of all
    layers in turn, as a step does.
    """
    shape, clock = here.model.shape, here.clock
    seconds: dict[int, float] = {}
    numbers: dict[int, int] = {}
    draw = torch.Generator().manual_seed(0)
    for s in (SHORT, 8 * SHORT):
        keys = [torch.randn(shape.h_kv, 1, s, generator=draw).bfloat16() for _ in range(shape.n_layers)]
        q = torch.randn(shape.h_kv, shape.g, 1, generator=draw)

        def search(k: torch.Tensor, q: torch.Tensor = q, n: int = s // 5) -> torch.Tensor:
            return top_stable((q @ k.float()).softmax(-1).sum(1), n)

        counted = Numbers()
        with counted:
            search(keys[0])
        numbers[s] = counted.n
        times = []
        for _ in range(20):
            start = clock()
            for k in keys:
                search(k)
            times.append((clock() - start) / len(keys))
        seconds[s] = statistics.median(times[5:])
    return (seconds[8 * SHORT] - seconds[SHORT]) / (numbers[8 * SHORT] - numbers[SHORT])


def pace(here: Here) -> float:
    """Seconds of full attention's step at the calibration's prompt, now: machines that others use have slow minutes."""
    row = rows_of(here.model, here.ids[:SHORT], ["full"])["full"]
    return step_seconds(here, row, here.ids[SHORT : SHORT + STEPS])


def at_usual_pace(here: Here, usual: float, row: SelectiveAttention, feed: Sequence[int]) -> float:
    """Median step as it would have been at the pace of the calibration."""
    slower = pace(here) / usual
    return step_seconds(here, row, feed) / slower


def calibrate(here: Here) -> tuple[dict[str, Hardware], float]:
    """This machine, once per method, and its pace: what a layer and a call cost beside reading is the method's own."""
    model, ids = here.model, here.ids
    layers = layers_of(model.shape, model.hf.config)
    found = {}
    with model.hooked():
        pace(here)
        usual = statistics.median(pace(here) for _ in range(5))
        slower = pace(here) / usual
        rate = read_rate(here) * slower
        slower = pace(here) / usual
        number_ns = 1e9 * number_rate(here) / slower
        feed = ids[SHORT : SHORT + STEPS]
        for name in METHODS:
            measured = statistics.median(
                at_usual_pace(here, usual, rows_of(model, ids[:SHORT], [name])[name], feed) for _ in range(5)
            )
            kind, params = method_of(name)
            request = EVERYTHING if name == "full" else REQUEST
            # The simulation counts 16 bits an element; here they may be 32.
            wide = model.dtype.itemsize / 2
            bare = Hardware("here", 1e6, rate / wide / 1e9, 1e6, None, 1, 1, 1, 1, 0, 0, 0, number_ns)
            counts = count(kind, params, request, model.shape, 2048)
            share = SHORT / 2048
            short = replace(
                counts,
                attended_bytes=counts.attended_bytes * share,
                searched_bytes=counts.searched_bytes * share,
                searched_numbers=counts.searched_numbers * share,
            )
            free = predict(short, layers, bare, SHORT).tpot_s
            # All that is not explained by bytes and numbers is per layer, however large.
            found[name] = replace(bare, layer_us=(measured - free) / layers.shape.n_layers * 1e6)
    return found, usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 4000, 8000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds on one thread")
    options = parser.parse_args()
    if options.cpu:
        torch.set_num_threads(1)
    model = load("smollm2-135m", "embedded", dtype="auto", device="cpu")
    ids = model.tokenizer.encode(embedded_prose())
    here = Here(model, ids, process_time if options.cpu else perf_counter)
    start = perf_counter()
    machine, usual = calibrate(here)
    found = machine["full"]
    print(
        f"calibrated in {perf_counter() - start:.0f} s at {SHORT} tokens: {found.memory_gb_s:.1f} GB/s, "
        f"{found.number_ns:.2f} ns per number of a search"
    )
    layers = layers_of(model.shape, model.hf.config)
    lines = []
    for s in options.lengths:
        times: dict[str, list[float]] = {name: [] for name in METHODS}
        for _ in range(options.repeats):
            with model.hooked():
                for name, row in rows_of(model, ids[:s], METHODS).items():
                    feed = ids[s : s + STEPS]
                    times[name].append(at_usual_pace(here, usual, row, feed))
        for name in METHODS:
            kind, params = method_of(name)
            request = EVERYTHING if name == "full" else REQUEST
            counts = count(kind, params, request, model.shape, max(s, 2048))
            predicted = predict(counts, layers, machine[name], s)
            measured = statistics.median(times[name])
            off = predicted.tpot_s / measured - 1
            numbers = layers.shape.n_layers * counts.searched_numbers * machine[name].number_ns / 1e6
            lines.append(
                {"method": name, "tokens": s, "measured_ms": round(1e3 * measured, 2),
                 "simulated_ms": round(1e3 * predicted.tpot_s, 2), "of_it_numbers_ms": round(numbers, 2),
                 "off": f"{100 * off:+.0f} %"}
            )  # fmt: skip
            print(
                "{method:10} {tokens:6} measured {measured_ms:8} ms, simulated {simulated_ms:8} ms, {off}".format(
                    **lines[-1]
                )
            )
    file = Path(RESULTS).with_name("hardware.csv")
    with file.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, lines[0])
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    main()
