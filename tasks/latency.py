"""What a variant costs: time to first and second token, time per token, memory, bytes moved, beside full attention.

Names       latency
Asks        what a variant costs in time and memory
Lengths     any
Answers     as many as are timed
Licence     none needed

A sample is a length and a batch size. After passes that do not count, the variant and full attention take turns to read
and continue it several times, in one process. A line keeps the median, the quartiles, and the ratios of the pairs.
Every pass feeds the same tokens, so all variants make the same number of steps, whatever they would write. The score is
the ratio of times per token, below 1 where the variant is faster. Full attention is paired with itself; its score shows
how much of the others' score is noise.

A batch is requests of equal length, each with K and V of its own, read one after another and decoded at once. Times to
the first and second token are those of the last request. The time to the first token ends when the variant is ready to
decode; work that it does beside the prefill may go on, and the first step waits for the rest of it, so that the time to
the second token includes it.

One more pass at the end is recorded by spans and not timed: it gives the seconds of each part of the prefill and of a
step. All of this is in a line's `timing`. The line's own `prefill_s` is the median over passes, and its `tpot_s` the
mean over steps of each step's median.

Not here: predictions for other hardware (`evals/studies/hardware.py`), the tables (`plots`).
"""

import gc
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from engine.books.clock import synchronize
from engine.books.spans import Record, recording
from engine.decode import Answer, Decoded, decode
from engine.errors import ConfigError, NotFiniteError
from engine.model import Model
from engine.passes.probe import probe
from engine.passes.trace import Trace
from engine.prefill import prefill
from engine.sampling.finite import REMEDY
from engine.shapes import ModelShape
from engine.sparse.base import SparsePrefill
from methods.base import SelectiveAttention, Variant
from methods.calibration.prose import embedded_prose
from methods.full import full_attention
from tasks.base import Sample, Task
from tasks.forced import Outcome


@dataclass(frozen=True)
class Timed:
    """What is timed: a variant, and how its prompt is read."""

    variant: Variant
    sparsity: SparsePrefill | None = None
    chunk: int | None = None  # of the prefill


@dataclass
class Pass:
    """The times of one pass: a batch of prompts is read and continued."""

    ttft_s: float
    step_seconds: list[float]
    peak_bytes: int | None

    @property
    def tt2t_s(self) -> float:
        return self.ttft_s + self.step_seconds[0]

    @property
    def tpot_s(self) -> float:
        """Of the middle step: on a GPU some steps compile kernels or capture graphs."""
        return statistics.median(self.step_seconds[1:])

    @property
    def tpot_mean_s(self) -> float:
        """With those, and with what a method does in some steps alone."""
        return statistics.fmean(self.step_seconds[1:])


@dataclass
class Timing:
    """The figures of all passes of one sample, as the runner writes them down."""

    row: SelectiveAttention
    prefill_s: float
    decoded: Decoded
    outcome: Outcome
    record: Record


@dataclass(frozen=True)
class Params:
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    n_new: int
    repeats: int
    warmup: int
    memory_gb: float | None

    def __post_init__(self) -> None:
        for key in ("lengths", "batches"):
            values = getattr(self, key)
            if not values or min(values) < 1 or len({*values}) < len(values):
                raise ConfigError(f"task.{key}={list(values)} must be different numbers from 1 on")
        if self.n_new < 3:
            raise ConfigError(
                f"task.n_new={self.n_new} is too few: the first token is the prefill's, the second the first step's; "
                "give 3 or more"
            )
        if self.repeats < 1 or self.warmup < 0:
            raise ConfigError(f"task.repeats={self.repeats} and task.warmup={self.warmup} must be at least 1 and 0")
        if self.memory_gb is not None and self.memory_gb <= 0:
            raise ConfigError(f"task.memory_gb={self.memory_gb} must be above 0")


class Latency(Task):
    name = "latency"
    version = 1
    is_timed = True
    metric = "tpot_ratio"
    Params = Params
    dataset = "latency"
    data_source = "embedded"
    notes = ("times are of this machine, each paired with full attention in the same process",)

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.params = params

    @property
    def n_passes(self) -> int:
        """Passes of a sample, the recorded one included."""
        return 2 * (self.params.warmup + self.params.repeats) + 1

    def check(self, shape: ModelShape) -> None:
        longest = max(self.params.lengths) + self.params.n_new
        if longest > shape.window:
            raise ConfigError(
                f"task.lengths={list(self.params.lengths)} with task.n_new={self.params.n_new} need {longest} tokens, "
                f"more than the {shape.window} of model {shape.name!r}; use shorter ones"
            )

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        ids = tokenizer.encode(embedded_prose())
        n = max(self.params.lengths) + self.params.n_new
        ids = (ids * (n // len(ids) + 1))[:n]
        return [
            Sample(
                id=f"{length}-tokens-batch-{batch}",
                context="",
                question="",
                ids=tuple(ids[:length]),
                # The first token is the prefill's own; those fed behind it are the others.
                forced=tuple(ids[length : length + self.params.n_new]),
                fields={"length": length, "batch": batch},
            )
            for length in self.params.lengths
            for batch in self.params.batches
        ]

    def score(self, sample: Sample, prediction: str) -> float:
        raise AssertionError("latency scores time, not an answer")

    def measure(self, model: Model, timed: Timed, sample: Sample, on_pass: Callable[[], None]) -> Timing:
        """All passes of one sample."""
        ours: list[Pass] = []
        theirs: list[Pass] = []
        row, baseline = None, Timed(full_attention(model.shape, len(sample.ids or ())))
        for i in range(self.params.warmup + self.params.repeats):
            row = None  # its K and V would be there during the next pass
            # The second of a pair finds warm caches and a slower clock, so they take turns at going first.
            for is_ours in (False, True) if i % 2 else (True, False):
                rows, done = run_pass(model, timed if is_ours else baseline, sample)
                if is_ours:
                    row = rows[0]
                if i >= self.params.warmup:
                    (ours if is_ours else theirs).append(done)
                del rows
                on_pass()
        assert row is not None
        with recording(model.device) as record:
            _, recorded = run_pass(model, timed, sample)
        on_pass()
        timing = compare(ours, theirs, batch_of(sample)) | self.sizes(model, row, ours)
        timing |= {
            "recorded_tpot_s": recorded.tpot_s,
            "prefill_parts_s": parts(record, "prefill", 1),
            "step_parts_s": parts(record, "step", len(recorded.step_seconds)),
        }
        steps = [statistics.median(at) for at in zip(*(p.step_seconds for p in ours), strict=True)]
        decoded = Decoded([Answer() for _ in range(batch_of(sample))], steps)
        prefill_s = statistics.median(p.ttft_s for p in ours)
        return Timing(row, prefill_s, decoded, Outcome(timing["tpot_ratio"], {"timing": timing}), record)

    def sizes(self, model: Model, row: SelectiveAttention, ours: Sequence[Pass]) -> dict[str, Any]:
        """Bytes of one request and of the weights, and an estimate of how many requests fit beside these."""
        peaks = [p.peak_bytes for p in ours if p.peak_bytes is not None]
        weights = sum(x.numel() * x.element_size() for x in model.hf.parameters())
        request = row.store.allocated_bytes()
        memory = device_bytes(model.devices, self.params.memory_gb)
        return {
            "peak_bytes": max(peaks, default=None),
            "weight_bytes": weights,
            "request_bytes": request,
            "largest_batch_estimated": max(0, (memory - weights) // max(1, request)),
        }


def compare(ours: Sequence[Pass], theirs: Sequence[Pass], batch: int) -> dict[str, Any]:
    """Medians of times and of the pairs' ratios; `_q` are the quartiles around a median."""
    columns: dict[str, Any] = {}
    for name in ("ttft", "tt2t", "tpot"):
        own, full = ([getattr(p, f"{name}_s") for p in passes] for passes in (ours, theirs))
        columns |= with_quartiles(f"{name}_s", own)
        columns |= with_quartiles(f"{name}_ratio", [a / b for a, b in zip(own, full, strict=True)])
        columns[f"full_{name}_s"] = statistics.median(full)
    mean = statistics.median(p.tpot_mean_s for p in ours)
    return columns | {"tpot_mean_s": mean, "tokens_per_s": batch / columns["tpot_s"]}


def with_quartiles(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Columns for the median and the quartiles."""
    several = [values[0], *values] if len(values) == 1 else values
    low, median, high = statistics.quantiles(several, n=4, method="inclusive")
    return {name: median, f"{name}_q": [low, high]}


def run_pass(model: Model, timed: Timed, sample: Sample) -> tuple[list[SelectiveAttention], Pass]:
    """Read the sample's prompts and feed its continuation to all of them at once."""
    assert sample.ids is not None and sample.forced is not None, sample.id
    collect(model.devices)
    read_peak = watch_peak(model.devices)
    n_new, rows, traces = len(sample.forced), [], []
    start = perf_counter()
    for i in range(batch_of(sample)):
        ids = [*sample.ids[i:], *sample.ids[:i]]
        trace, row = read(model, timed, ids, n_new)
        rows.append(row)
        traces.append(trace)
    synchronize(model.devices)
    ttft_s = perf_counter() - start
    # The prefill gave the first token, so one less is fed than is got.
    done = decode(model, traces[0], rows, max_new_tokens=0, feed=sample.forced[:-1])
    if not all(answer.is_finite for answer in done.answers):
        raise NotFiniteError(f"the logits of a token that was fed are NaN or infinite; {REMEDY}")
    return rows, Pass(ttft_s, done.step_seconds, read_peak())


def read(model: Model, timed: Timed, ids: Sequence[int], n_new: int) -> tuple[Trace, SelectiveAttention]:
    """Read one prompt; its trace, and the variant's row, ready to decode."""
    rows: list[SelectiveAttention] = []

    def build(trace: Trace, layer: int) -> None:
        if not rows:
            rows.append(timed.variant.row(trace, n_new))
        rows[0].build(layer)

    variant = timed.variant
    trace = prefill(model, ids, variant.observations, build, variant.thinning, timed.sparsity, timed.chunk)
    probe(model, trace, variant.probes)
    rows[0].complete()
    trace.settle()
    rows[0].trace.release()
    return trace, rows[0]


def parts(record: Record, root: str, n: int) -> dict[str, float]:
    """Mean seconds per span inside the `n` spans named `root`, without the spans inside those; the rest is "model"."""
    seconds = record.seconds(root)
    return {("model" if name == root else name): seconds[name] / n for name in seconds}


def batch_of(sample: Sample) -> int:
    return int(sample.fields["batch"])


def collect(devices: Sequence[torch.device]) -> None:
    """Free what earlier passes left, so that no pass pays for another."""
    gc.collect()
    synchronize(devices)
    if devices[0].type == "cuda":
        torch.cuda.empty_cache()


def watch_peak(devices: Sequence[torch.device]) -> Callable[[], int | None]:
    """A function that reads the peak memory since now: of the GPUs, or of this process where Linux lets us reset it."""
    if devices[0].type == "cuda":
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        return lambda: sum(torch.cuda.max_memory_allocated(device) for device in devices)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return lambda: None
    return high_water_mark


def high_water_mark() -> int | None:
    """Most bytes of RAM that this process held since the mark was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return None


def device_bytes(devices: Sequence[torch.device], memory_gb: float | None) -> int:
    """The memory for weights and requests: as given, or the devices'."""
    if memory_gb is not None:
        return int(memory_gb * 1e9)
    if devices[0].type == "cuda":
        return sum(torch.cuda.get_device_properties(device).total_memory for device in devices)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
