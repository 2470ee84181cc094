"""Whole models on a GPU: agreement with a CPU, times of every method, a baseline, a sweep, and the goals for them.

Agreement   a small model in float32 says on the GPU what it says on a CPU: the same logits, and the same books.
Times       to the first and the second token and per token, of a model in Llama-3.1-8B's shape with random weights,
            each beside the nearest pass of full attention; at the shortest length all methods, then `MANY`. Beside
            them the bytes that a step reads and brings, and what `evals/studies/hardware.py` says of this GPU.
Baseline    transformers itself: with a static cache and its step as one CUDA graph, so compiled, and with flash-attn.
Memory      how many requests fit at once into the card's memory, or into as much as is given, and their tokens a
            second; full attention first, whose requests are the largest.
Sweep       twenty variants in one batch against full attention alone, both with their prefill.

What does not fit is `oom`, a result like any other.

Not here: single ops (`benchmarks/gpu/ops.py`), scores.
"""

import copy
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.benchmarks.gpu.results import Result
from kvbench.benchmarks.launches import BUDGETS, OF_CODES, config_of, read
from kvbench.engine.books.ledger import INDEX_READ, MOVED, Entry
from kvbench.engine.books.stopwatch import synchronize
from kvbench.engine.budget import ELEMENT_BYTES, EVERYTHING, BudgetRequest, token_bytes
from kvbench.engine.checkpoints.load import load_random
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError, first_line
from kvbench.engine.model import Model
from kvbench.engine.passes.capturing import begin, end
from kvbench.engine.passes.streams import stream_for
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.evals.overrides import CONF
from kvbench.evals.studies.counts import count
from kvbench.evals.studies.hardware import Layers, method_of, predict, read_hardware
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.tasks.base import Sample
from kvbench.tasks.latency import Latency, Pass, Timed, run_pass

ALL = [*BUDGETS]
MANY = "full snapkv pyramidkv h2o streamingllm sparq quest clusterkv infllm pqcache".split()
SERVED = "full snapkv quest pqcache".split()
SWEEP = "snapkv pyramidkv h2o xkv sparq quest clusterkv infllm infinigen pqcache".split()
# Time per token that is to be had in ms, by batch and tokens of the prompt, on a card that moves `OF_CARD` bytes a
# second: from 0.8 of what its memory allows for full attention to 0.6 for what chooses 2,048 tokens.
TO_HAVE = {
    "Full": {(1, 32768): 8.0, (1, 131000): 12.5, (8, 32768): 19.0},
    "SnapKV": {(1, 32768): 6.8, (1, 131000): 6.8, (8, 32768): 7.8},
    "H2O": {(1, 32768): 6.8, (1, 131000): 6.8, (8, 32768): 7.8},
    "PQCache": {(1, 32768): 8.5, (1, 131000): 8.5, (8, 32768): 18.0},
}
OF_CARD, LEAST_SHARE = 3.35e12, 0.7  # of a copy's bytes per second, by a step of full attention for one request
FLAT = ("PQCache", "ClusterKV", "Quest", "SnapKV")  # whose steps should not grow with the prompt
SWEEP_RATIOS = ("1/10", "1/5")
N_AGREE = 9  # tokens that are fed; a captured step is replayed among them
MOST_APART = 1e-3  # logits in float32, of the largest; sums in another order move them by 1e-6
SPREAD = 6  # times as large queries and keys: with weights all alike, rounding would choose between tokens
N_LAYERS_AGREE = 5  # some methods leave two of them whole
STATIC = "transformers,"  # in front of how its step is made
OF_ANSWERS = BudgetRequest(None, 2048, Fraction(0))  # of prompt and answer together


# --- agreement --------------------------------------------------------------------------------


def agreement(device: torch.device, names: Sequence[str]) -> Iterator[Result]:
    """Each method's logits and books on the GPU against those on a CPU, over the same tokens."""
    here = load_random("small", config_of(N_LAYERS_AGREE), dtype="float32", device="cpu")
    for part, weight in here.hf.named_parameters():
        if part.endswith(("q_proj.weight", "k_proj.weight")):
            weight.data *= SPREAD
    hf = copy.deepcopy(here.hf).to(device)
    there = replace(here, hf=hf, device=hf.get_input_embeddings().weight.device, facts={}, softmaxes={}, latents={})
    for name in names:
        (logits, books), (expected, expected_books) = said_by(there, name), said_by(here, name)
        error = float((logits - expected).abs().max() / expected.abs().max())
        same = books == expected_books
        note = "error: of logits" + ("" if same else ", other books")
        yield Result(
            f"{method_of(name)[0].title}: as on a CPU", "float32", same and error < MOST_APART, error, note=note
        )


class Seen:
    """The logits of a decode's steps."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Logits say enough."""

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        self.logits.append(logits.double().cpu())


def said_by(model: Model, name: str) -> tuple[Tensor, list[Entry]]:
    """Logits of the steps over a few tokens, and the ledger."""
    seen = Seen()
    with model.hooked():
        trace, (row, *_) = read(model, name)
        decode(model, trace, [row], max_new_tokens=0, feed=range(1, 1 + N_AGREE), watch=seen)
    return torch.cat(seen.logits), row.store.ledger.entries


# --- times ------------------------------------------------------------------------------------


def request_of(kind: type[SelectiveAttention], asked: BudgetRequest) -> BudgetRequest:
    """What is asked of a method, in the currency that it takes."""
    if kind.traits.of_answers:
        return OF_ANSWERS
    if kind.traits.takes == ("memory",):
        return OF_CODES
    return asked if kind.traits.has_budget else EVERYTHING


def sample_of(model: Model, s: int, n_new: int, batch: int = 1) -> Sample:
    (sample,) = Latency(Latency.Params((s,), (batch,), n_new, 1, 0, None, None), None, 0).samples(model.tokenizer)
    return sample


class Bytes(NamedTuple):
    """Of a step of all requests, mean over the steps."""

    read: float  # on the device: weights, K and V that are attended to, what finds them
    brought: float  # over the link, both ways


def bytes_of(model: Model, rows: Sequence[SelectiveAttention]) -> Bytes:
    """By the books, in the dtype of the run."""
    shape, n_bytes = model.shape, model.dtype.itemsize
    read = brought = 0.0
    for row in rows:
        ledger = row.store.ledger
        n = len(ledger.totals("tokens"))
        attended = sum(ledger.totals("attended")) / shape.g / shape.h_kv  # tokens of all KV heads, once for a group
        index = sum(map(sum, map(ledger.totals, INDEX_READ)))
        read += (attended * token_bytes(shape) * n_bytes / ELEMENT_BYTES + index) / n
        brought += sum(map(sum, map(ledger.totals, MOVED))) / n
    return Bytes(read + weights_read(model), brought)


def weights_read(model: Model) -> int:
    """Bytes of the weights that a step reads: all but the table that it takes a row of, unless that is the head too."""
    table, head = model.hf.get_input_embeddings().weight, model.hf.get_output_embeddings()
    every = sum(x.numel() * x.element_size() for x in model.hf.parameters())
    is_tied = head is None or head.weight.data_ptr() == table.data_ptr()
    return every if is_tied else every - table.numel() * table.element_size()


Found = tuple[Pass, Bytes]


def guarded(model: Model, call: Callable[[], Found]) -> Found | str:
    """A pass, or why there is none: a budget too small for the method at this length, or too little memory."""
    try:
        with model.hooked():
            return call()
    except ConfigError as error:
        return str(error)
    except (torch.OutOfMemoryError, MemoryError):
        return "oom"
    finally:
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def times(
    model: Model,
    layers: Layers,
    lengths: Mapping[int, Sequence[str]],
    n_new: int,
    repeats: int,
    asked: BudgetRequest,
    on: str | None,
    batch: int = 1,
) -> Iterator[Result]:
    """Each length's methods, each beside the pass of full attention that came last; `on` is the simulated hardware."""
    is_warm = set[tuple[str, int]]()
    for s, names in lengths.items():
        sample, full = sample_of(model, s, n_new, batch), None
        for i, name in enumerate(["full", *(name for name in names if name != "full")]):
            if i % 10 == 0:
                full = one_pass(model, "full", sample, EVERYTHING, repeats, is_warm)
            kind, params = method_of(name)
            request = request_of(kind, asked)
            found = full if name == "full" else one_pass(model, name, sample, request, repeats, is_warm)
            shape = f"{model.shape.name}, {s:,} tokens, {budget_text(request)}" + f", batch of {batch}" * (batch > 1)
            if isinstance(found, str) or found is None:
                yield Result(f"{kind.title}: decode", shape, True, note=found or "")
                continue
            done, moved = found
            result = Result(
                f"{kind.title}: decode", shape, True, ms=1e3 * done.tpot_s, ttft_s=done.ttft_s, tt2t_s=done.tt2t_s,
                peak_gb=None if done.peak_bytes is None else done.peak_bytes / 1e9, step_gb=moved.read / 1e9,
                host_gb=moved.brought / 1e9, gb_s=moved.read / done.tpot_s / 1e9,
            )  # fmt: skip
            if isinstance(full, tuple):
                result.reference_ms, result.reference_tt2t_s = 1e3 * full[0].tpot_s, full[0].tt2t_s
            if on is not None and name in MANY and batch == 1:
                counts = count(kind, params, request, model.shape, s)
                result.simulated_ms = 1e3 * predict(counts, layers, read_hardware(on), s).tpot_s
            yield result


def one_pass(
    model: Model, name: str, sample: Sample, request: BudgetRequest, repeats: int, is_warm: set[tuple[str, int]]
) -> Found | str:
    """Of so many passes the middle one; before a method's first at a length comes another, which compiles its kernels
    and takes its memory."""
    kind, params = method_of(name)
    s = len(sample.ids or ())

    def call() -> Found:
        timed = Timed(kind.variant_for(params, request, model.shape, s))
        if (name, s) not in is_warm:
            run_pass(model, timed, sample)
            is_warm.add((name, s))
        passes: list[Found] = []
        for _ in range(repeats):
            rows, done = run_pass(model, timed, sample)
            passes.append((done, bytes_of(model, rows)))
            del rows
        return sorted(passes, key=lambda found: found[0].tpot_s)[len(passes) // 2]

    return guarded(model, call)


def budget_text(request: BudgetRequest) -> str:
    return f"budget {request.tokens}" if request.ratio is None else f"ratio {float(request.ratio):g}"


def hardware_of(device: torch.device) -> str | None:
    """The file of conf/hardware that describes this GPU."""
    if device.type != "cuda":
        return None
    title = torch.cuda.get_device_name(device).lower()
    names = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml"))
    return next((name for name in names if name.partition("-")[0] in title.replace(" ", "")), None)


# --- memory -----------------------------------------------------------------------------------


def memory(
    model: Model, s: int, names: Sequence[str], n_new: int, asked: BudgetRequest, gb: float | None, most: int | None
) -> Iterator[Result]:
    """The largest batch of each method in `gb` (None: all that the card has), decoded; `most` requests at most."""
    task, sample = Latency(Latency.Params((s,), (1,), n_new, 1, 0, gb, most), None, 0), sample_of(model, s, n_new)
    for name in names:
        kind, params = method_of(name)
        request = request_of(kind, asked)
        shape = f"{model.shape.name}, {s:,} tokens, {budget_text(request)}, {'all' if gb is None else f'{gb:g} GB'}"
        timed = Timed(kind.variant_for(params, request, model.shape, s))
        try:
            with model.hooked():
                done = task.decoded_together(model, timed, sample, name)
                sizes = task.sizes_of(model, timed, sample, name)
        except (torch.OutOfMemoryError, MemoryError) as error:
            yield Result(f"{kind.title}: largest batch", shape, True, note=first_line(error) or "oom")
            continue
        rate = "" if done.tokens_per_s is None else f", {done.tokens_per_s:,.0f} tokens a second"
        why = "" if done.bound is None else f", bound by {done.bound}"
        note = f"{done.n_rows} of {done.largest} at once{rate}{why}; request {sizes.request / 1e9:.3g} GB"
        yield Result(
            f"{kind.title}: largest batch", shape, True, ms=None if done.tpot_s is None else 1e3 * done.tpot_s,
            note=f"{note}, prefill {sizes.prefill / 1e9:.3g} GB", peak_gb=done.peak_bytes and done.peak_bytes / 1e9,
        )  # fmt: skip


# --- baseline ---------------------------------------------------------------------------------


def baseline(model: Model, s: int, n_new: int) -> Iterator[Result]:
    """A step of transformers with a static cache: as one CUDA graph, compiled, and with flash attention, whose cache
    grows; without a GPU as it is. A way that this machine does not have is said in a note."""
    shape = f"{model.shape.name}, {s:,} tokens"
    ways: dict[str, Callable[[], Callable[[], object]]] = {"static cache": lambda: static_step(model, s, 3 * n_new + 8)}
    if model.device.type == "cuda":
        plain = ways["static cache"]
        ways = {
            "static cache": lambda: captured(plain(), model.device),
            "static cache, compiled": lambda: captured(
                static_step(model, s, 3 * n_new + 8, compiled(model)), model.device
            ),
            "flash attention": lambda: flash_step(model, s),
        }
    for way, make in ways.items():
        with torch.inference_mode():
            try:
                yield Result(f"{STATIC} {way}", shape, True, ms=1e3 * seconds_per_call(make(), n_new, model))
            except (torch.OutOfMemoryError, MemoryError):
                yield Result(f"{STATIC} {way}", shape, True, note="oom")
            except Exception as error:  # of whichever package the way needs
                yield Result(f"{STATIC} {way}", shape, True, note=f"none: {' '.join(str(error).split())[:200]}")


def compiled(model: Model) -> Any:
    if torch.version.cuda is None:
        raise RuntimeError("torch is built without CUDA")
    return torch.compile(model.hf)


def flash_step(model: Model, s: int) -> Callable[[], object]:
    """Greedy decoding with flash-attn, which shares a row's tokens out among programs."""
    from transformers import DynamicCache

    was = model.hf.config._attn_implementation
    model.hf.set_attn_implementation("flash_attention_2")
    cache = DynamicCache(config=model.hf.config)
    ids = torch.tensor([sample_of(model, s, 3).ids], device=model.device)
    token = model.hf(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
    model.hf.set_attn_implementation(was)

    def step() -> object:
        model.hf.set_attn_implementation("flash_attention_2")
        try:
            return token.copy_(model.hf(token, past_key_values=cache, logits_to_keep=1).logits.argmax(-1))
        finally:
            model.hf.set_attn_implementation(was)

    return step


def static_step(model: Model, s: int, room: int, hf: Any = None) -> Callable[[], object]:
    """Greedy decoding behind a prompt of `s` tokens, a token per call, in buffers that stay where they are; `hf` is the
    model as its steps are made."""
    from transformers import StaticCache

    cache = StaticCache(config=model.hf.config, max_cache_len=s + room)
    ids = torch.tensor([sample_of(model, s, 3).ids], device=model.device)
    token = model.hf(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)

    def step() -> object:
        return token.copy_((hf or model.hf)(token, past_key_values=cache, logits_to_keep=1).logits.argmax(-1))

    return step


def captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The step as one CUDA graph."""
    aside = stream_for("capture", device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with torch.cuda.stream(aside):
        begin(graph, pool)
        try:
            step()
        finally:
            end(graph, pool, device)
    return graph.replay


def seconds_per_call(step: Callable[[], object], n: int, model: Model) -> float:
    """Median over steps, each waited for, as a decoder that looks at every token does."""
    seconds = []
    for _ in range(n):
        start = perf_counter()
        step()
        synchronize(model.devices)
        seconds.append(perf_counter() - start)
    return statistics.median(seconds)


# --- sweep ------------------------------------------------------------------------------------


def sweep(model: Model, s: int, n_new: int, comm: Fraction, names: Sequence[str], ratios: Sequence[str]) -> Result:
    """Seconds of prefill and steps: all variants in one batch, and full attention alone before and behind them."""
    sample = sample_of(model, s, n_new)
    variants: list[Variant] = []
    for name in names:
        kind, params = method_of(name)
        for share in ratios:
            asked = BudgetRequest(Fraction(share), None, comm)
            if request_of(kind, asked) is not asked:
                continue  # full attention, and methods that have no ratio
            try:
                variants.append(kind.variant_for(params, asked, model.shape, s))
            except ConfigError:
                continue
    kind, params = method_of("full")
    full = [kind.variant_for(params, EVERYTHING, model.shape, s)]
    shape = f"{len(variants)} variants, {s:,} tokens, {n_new} new"
    try:
        together(model, variants, sample, n_new)  # compiles kernels
        alone = [together(model, full, sample, n_new)]
        fused = together(model, variants, sample, n_new)
        alone.append(together(model, full, sample, n_new))
    except (torch.OutOfMemoryError, MemoryError):
        return Result("sweep against Full alone", shape, True, note="oom")
    mean = statistics.fmean(alone)
    note = f"{fused / mean:.2f} times"
    return Result("sweep against Full alone", shape, True, ms=1e3 * fused, reference_ms=1e3 * mean, note=note)


def together(model: Model, variants: Sequence[Variant], sample: Sample, n_new: int) -> float:
    """Seconds from the prompt to the last token of all rows."""
    assert sample.ids is not None and sample.forced is not None
    rows: list[SelectiveAttention] = []

    def build(trace: Trace, layer: int) -> None:
        if not rows:
            rows.extend(variant.row(trace, n_new) for variant in variants)
        for row in rows:
            row.build(layer)

    gc.collect()
    synchronize(model.devices)
    start = perf_counter()
    with model.hooked():
        asked = list(dict.fromkeys(what for variant in variants for what in variant.observations))
        trace = prefill(model, sample.ids, asked, build)
        for row in rows:
            row.complete()
        trace.settle()
        decode(model, trace, rows, max_new_tokens=0, feed=sample.forced[:-1])
    synchronize(model.devices)
    return perf_counter() - start


# --- goals ------------------------------------------------------------------------------------


def goals(results: Sequence[Result]) -> Iterator[Result]:
    """What the figures were meant to be, beside what they are; of those that were measured."""
    every = [x for x in results if x.what.endswith(": decode") and x.ms]
    decoding = {(name_of(x), tokens_of(x)): x for x in every if batch_of(x) == 1}
    copy = next((x.gb_s for x in results if x.what == "copy, device"), None)
    yield from speeds(every, copy)
    pq = [x for (name, _), x in decoding.items() if name == "PQCache" and x.tt2t_s and x.reference_tt2t_s]
    if pq:
        worst = max(ratio(x.tt2t_s, x.reference_tt2t_s) for x in pq)
        yield goal("time to the second token, PQCache to Full", worst, 1.05)
    for name in dict.fromkeys(name for name, _ in decoding if name in FLAT):
        at = {s: x.ms for (other, s), x in decoding.items() if other == name}
        if len(at) > 1:
            yield goal(f"time per token, {name}, longest to shortest", ratio(at[max(at)], at[min(at)]), 1.2)
    best = min((x for x in results if x.what.startswith(STATIC) and x.ms), key=lambda x: x.ms or 0, default=None)
    if best is not None and (full := decoding.get(("Full", tokens_of(best)))):
        yield goal("time per token, Full to transformers at its fastest", ratio(full.ms, best.ms), 1.1)
    for x in results:
        if x.what == "sweep against Full alone" and x.ms:
            yield goal("sweep of twenty variants to Full alone", ratio(x.ms, x.reference_ms), 3)


def speeds(decoding: Sequence[Result], copy: float | None) -> Iterator[Result]:
    """Times per token against those that are to be had on this card, and full attention against a copy."""
    if copy is None:
        return
    for x in decoding:
        at = batch_of(x), tokens_of(x)
        if (ms := TO_HAVE.get(name_of(x), {}).get(at)) is not None:
            of_card = OF_CARD / (1e9 * copy)
            yield goal(
                f"ms per token, {name_of(x)}, batch of {at[0]}, {at[1]:,} tokens", x.ms or 0, round(ms * of_card, 2)
            )
        if name_of(x) == "Full" and at[0] == 1 and x.gb_s:
            met = "met" if x.gb_s / copy >= LEAST_SHARE else "MISSED"
            what = f"goal: share of a copy's bytes per second, Full, {at[1]:,} tokens"
            yield Result(what, f"at least {LEAST_SHARE:g}", True, note=f"{x.gb_s / copy:.2f}, {met}")


def name_of(result: Result) -> str:
    return result.what.partition(":")[0]


def batch_of(result: Result) -> int:
    return next((int(part.removeprefix("batch of ")) for part in result.shape.split(", ") if "batch of" in part), 1)


def tokens_of(result: Result) -> int:
    text: Any = next(part for part in result.shape.split(", ") if part.endswith(" tokens"))
    return int(text.removesuffix(" tokens").replace(",", ""))


def ratio(a: float | None, b: float | None) -> float:
    assert a is not None and b, (a, b)
    return a / b


def goal(what: str, found: float, most: float) -> Result:
    met = "met" if found <= most else "MISSED"
    return Result(f"goal: {what}", f"at most {most:g}", True, note=f"{found:.2f}, {met}")
