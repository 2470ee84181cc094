"""What a variant costs: time to first and second token, time per token, memory, bytes moved, next to full attention's.

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
decode; work that it does during the prefill may go on, and the first step waits for the rest of it, so that the time to
the second token includes it.

One more pass at the end is recorded by spans and not timed: it gives the seconds of each part of the prefill and of a
step. All of this is in a line's `timing`. The line's own `prefill_s` is the median over passes, and its `tpot_s` the
mean over steps of each step's median.

A pass before all others counts what a request takes, and so how many fit into the memory at once; a batch that does not
fit is `oom` without a try. With `memory_gb` as many as fit are decoded together, and so is full attention at its own
largest batch, once for all variants of a sweep.

Not here: what requests hold (`tasks/memory.py`), the largest batch (`tasks/together.py`), predictions for other
hardware (`evals/studies/hardware.py`), the tables (`plots`).
"""

import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Annotated, Any

from annotated_types import Ge, Gt

from kvbench.engine.batch import Answer
from kvbench.engine.books.spans import Record, recording
from kvbench.engine.books.stopwatch import synchronize
from kvbench.engine.declared import Count, Index, Is
from kvbench.engine.decode import Decoded, decode
from kvbench.engine.errors import ConfigError, NotFiniteError
from kvbench.engine.model import Model
from kvbench.engine.passes.second_pass import run_second_passes
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import n_home, prefill
from kvbench.engine.sampling.finite import REMEDY
from kvbench.engine.shapes import ModelShape
from kvbench.engine.sparse.base import SparsePrefill
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.calibration.prose import embedded_prose
from kvbench.methods.full import full_attention
from kvbench.tasks.base import Sample, Task
from kvbench.tasks.checks import Counts
from kvbench.tasks.forced import Outcome
from kvbench.tasks.memory import Sizes, collect, device_bytes, watch_peak, weigh, weight_bytes
from kvbench.tasks.together import Together, decode_together


@dataclass(frozen=True)
class Timed:
    """A timed pass: a variant, and how its prompt is read."""

    variant: Variant
    sparsity: SparsePrefill | None = None
    chunk: int | None = None  # of the prefill
    evicts: bool = False  # whether tokens are dropped between its chunks


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
        """Seconds of the middle step: on a GPU some steps compile kernels or capture graphs."""
        return statistics.median(self.step_seconds[1:])

    @property
    def tpot_mean_s(self) -> float:
        """Mean over steps, with those that compile, and those in which a method does more."""
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
    lengths: Counts
    batches: Counts
    n_new: Annotated[int, Ge(3), Is("3 or more: the first token is the prefill's, the second the first step's")]
    repeats: Count
    warmup: Index
    memory_gb: Annotated[float, Gt(0)] | None
    most_rows: Count | None


class Latency(Task):
    name = "latency"
    version = 2
    is_timed = True
    metric = "tpot_ratio"
    Params = Params
    dataset = "latency"
    data_source = "embedded"
    notes = ("times are of this machine, each paired with full attention in the same process",)

    def __init__(self, params: Params, data_dir: str | None, seed: int) -> None:
        self.params = params
        self.sizes: dict[tuple[Hashable, int], Sizes] = {}  # by run and length
        self.together: dict[tuple[Hashable, int], Together] = {}  # likewise; a run of None is full attention

    @property
    def n_passes(self) -> int:
        """Passes of a sample: the one that counts, the largest batches, the timed ones, the recorded one."""
        return 1 + 2 * (self.params.memory_gb is not None) + 2 * (self.params.warmup + self.params.repeats) + 1

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
                # The first token is the prefill's own; those fed after it are the others.
                forced=tuple(ids[length : length + self.params.n_new]),
                fields={"length": length, "batch": batch},
            )
            for length in self.params.lengths
            for batch in self.params.batches
        ]

    def score(self, sample: Sample, prediction: str) -> float:
        raise AssertionError("latency scores time, not an answer")

    def measure(
        self, model: Model, timed: Timed, sample: Sample, on_pass: Callable[[], None], run: Hashable
    ) -> Timing:  # fmt: skip
        """Make all passes of one sample; `run` tells what is timed from other variants."""
        ours: list[Pass] = []
        theirs: list[Pass] = []
        row, baseline = None, Timed(full_attention(model.shape, len(sample.ids or ())))
        sizes = self.sizes_of(model, timed, sample, run)
        self.check_fit(model, sizes, sample)
        on_pass()
        beside = {} if self.params.memory_gb is None else self.at_largest(model, timed, sample, run, on_pass)
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
        timing = compare(ours, theirs, batch_of(sample)) | {
            "peak_bytes": max((p.peak_bytes for p in ours if p.peak_bytes is not None), default=None),
            "weight_bytes": sizes.weights,
            "request_bytes": sizes.request,
            "prefill_bytes": sizes.prefill,
            "largest_batch": sizes.largest(self.memory(model)),
            **beside,
            "recorded_tpot_s": recorded.tpot_s,
            "prefill_parts_s": parts(record, "prefill", 1),
            "step_parts_s": parts(record, "step", len(recorded.step_seconds)),
        }
        steps = [statistics.median(at) for at in zip(*(p.step_seconds for p in ours), strict=True)]
        decoded = Decoded([Answer() for _ in range(batch_of(sample))], steps)
        prefill_s = statistics.median(p.ttft_s for p in ours)
        return Timing(row, prefill_s, decoded, Outcome(timing["tpot_ratio"], {"timing": timing}), record)

    def memory(self, model: Model) -> int:
        return device_bytes(model.devices, self.params.memory_gb)

    def sizes_of(self, model: Model, timed: Timed, sample: Sample, run: Hashable) -> Sizes:
        """Bytes that a request of this length takes; the same for every batch of them."""
        assert sample.ids is not None and sample.forced is not None, sample.id
        key, ids, forced = (run, len(sample.ids)), sample.ids, sample.forced
        if key not in self.sizes:
            self.refuse_weights(model)
            self.sizes[key] = weigh(model, lambda: read(model, timed, ids, len(forced)), forced[:-1])
        return self.sizes[key]

    def refuse_weights(self, model: Model) -> None:
        """Raise `MemoryError` where the weights alone are more than the memory that is asked for."""
        weights, memory = weight_bytes(model), self.memory(model)
        if self.params.memory_gb is not None and weights >= memory:
            raise MemoryError(
                f"the weights of {model.shape.name} take {in_gb(weights)} GB, and task.memory_gb="
                f"{self.params.memory_gb:g} leaves nothing beside them; give more"
            )

    def check_fit(self, model: Model, sizes: Sizes, sample: Sample) -> None:
        """Raise `MemoryError` where a batch does not fit into the memory that is asked for."""
        largest, batch = sizes.largest(self.memory(model)), batch_of(sample)
        if self.params.memory_gb is not None and batch > largest:
            raise MemoryError(
                f"{batch} requests of {len(sample.ids or ()):,} tokens do not fit into task.memory_gb="
                f"{self.params.memory_gb:g}, {largest} do: the weights take {in_gb(sizes.weights)} GB, "
                f"a request {in_gb(sizes.request)} GB and its prefill {in_gb(sizes.prefill)} GB"
            )

    def at_largest(
        self, model: Model, timed: Timed, sample: Sample, run: Hashable, on_pass: Callable[[], None]
    ) -> dict[str, Any]:  # fmt: skip
        """The columns of the largest batch, with those of full attention at its own."""
        full = Timed(full_attention(model.shape, len(sample.ids or ())), chunk=timed.chunk)
        is_full = timed.variant.is_full and timed.sparsity is None
        theirs = self.decoded_together(model, full, sample, None)
        on_pass()
        ours = theirs if is_full else self.decoded_together(model, timed, sample, run)
        on_pass()
        return ours.columns(theirs)

    def decoded_together(self, model: Model, timed: Timed, sample: Sample, run: Hashable) -> Together:
        """Decode as many requests as fit at once; measured once for each run and length."""
        assert sample.ids is not None and sample.forced is not None, sample.id
        key, ids, forced = (run, len(sample.ids)), sample.ids, sample.forced
        if key not in self.together:
            memory, most = self.memory(model), self.params.most_rows
            largest = self.sizes_of(model, timed, sample, run).largest(memory)
            reading = lambda: read(model, timed, ids, len(forced))  # noqa: E731
            self.together[key] = decode_together(model, reading, forced[:-1], largest, most, memory)
        return self.together[key]


def in_gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.3g}"


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
    evicts = variant if timed.evicts and not variant.is_full else None
    trace = prefill(
        model, ids, variant.observations, build, variant.pruning, timed.sparsity, timed.chunk,
        n_home([variant], model.shape), evicts,
    )  # fmt: skip
    run_second_passes(model, trace, variant.second_passes)
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
