"""What a variant would cost on hardware that is not here: a roofline, with counts from the store. Always `simulated`.

    python -m evals.studies.hardware --on rtx4090-pcie1 --model llama-3.1-8b --methods full snapkv --lengths 8192 32768

A step's bytes come from the ledger: the variant is built on one layer of random keys of the model's shape, at two
short lengths, and steps are made; all that the ledger counts grows linearly with the prompt, so a line through the two
gives any length. Times are bytes over bandwidth and operations over rate, whichever takes longer, plus a fixed price
per layer and call.

Step      linear layers, search, a blocking fetch of the chosen tokens, attention. A search reads once everything that
          lies on the device or was moved there in order to find tokens, and has a price for every number that it makes
          on the way: scores, their sums, the marks of a top-k. These are counted too, as torch sees them, on a CPU;
          an accelerator's kernels make others. What is moved in order to find tokens is asked for one layer ahead: it
          costs time only as far as it takes longer than a layer.
Prefill   three lanes, as PQCache draws them: layers compute one after another; each layer's K and V leave for the host
          when it is done; its clustering starts when they are there. A step waits for a layer's clusters before it
          searches there, so what the lanes are late by shows in the time to the second token.

Peaks are the makers' (`conf/hardware`). The shares of them that work reaches, and the fixed prices, are typical values
and the least certain part: `benchmarks/bench_hardware.py` measures them on a real machine, and says how far the
prediction is off there.

Not here: memory that does not suffice (`fits` says so, and that is all), several devices, batches of unequal length.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from engine.books.ledger import Entry
from engine.budget import BudgetRequest, parse_fraction, token_bytes
from engine.checkpoints.load import shape_of
from engine.decode import attend_group
from engine.errors import ConfigError, unknown_name
from engine.foreign import write_csv
from engine.observe import ColumnSums
from engine.passes.trace import Trace
from engine.selection import Found
from engine.shapes import ModelShape
from engine.softmax import Softmax
from engine.terminal import say
from evals.overrides import CONF
from methods.base import SelectiveAttention
from results.sheet import Sheet, show

COUNT_AT = (2048, 4096)  # prompts that counts are taken at
CHOSEN = ("attended_bytes", "moved_kv_bytes")  # counts of chosen tokens
N_STEPS = 4
ELEMENT_BYTES = 2  # of K, V and weights
LAYER = 2  # of the one layer: beyond those that methods leave whole


@dataclass(frozen=True)
class Hardware:
    """Peaks, the shares of them that work reaches, and fixed prices."""

    title: str
    matrix_tflops: float
    memory_gb_s: float
    memory_gb: float
    link_gb_s: float | None  # None: device and host are one memory
    host_tflops: float
    share_matrix: float
    share_memory: float
    share_link: float
    layer_us: float
    call_us: float
    link_us: float
    number_ns: float  # of each number that a search makes

    @property
    def flops(self) -> float:
        return self.matrix_tflops * 1e12 * self.share_matrix

    @property
    def bandwidth(self) -> float:
        return self.memory_gb_s * 1e9 * self.share_memory

    def over_link(self, n_bytes: float) -> float:
        """Seconds of one copy between host and device."""
        if self.link_gb_s is None or n_bytes <= 0:
            return 0.0
        return n_bytes / (self.link_gb_s * 1e9 * self.share_link) + self.link_us / 1e6


@dataclass(frozen=True)
class Layers:
    """The model without its attention: how many weights are read and multiplied."""

    n_layers: int
    h: int
    d_h: int
    layer_weights: int  # of one layer, embeddings left out
    head_weights: int  # of the last product with the vocabulary
    kv_bytes: int  # of one token in one layer

    @property
    def weight_bytes(self) -> int:
        return ELEMENT_BYTES * (self.n_layers * self.layer_weights + self.head_weights)


@dataclass(frozen=True)
class Counts:
    """One variant, one layer, one step, one request; `build_flops` and `observe_flops` are of the prompt."""

    attended_bytes: float  # K and V that attention reads
    searched_bytes: float  # read on the device in order to find tokens
    moved_kv_bytes: float
    moved_meta_bytes: float
    resident_bytes: float  # on the device
    offloaded_bytes: float  # to the host during the prefill
    build_flops: float  # on the host, beside the prefill
    observe_flops: float  # on the device, within it
    searched_numbers: float = 0.0  # made on the way to the chosen tokens


@dataclass(frozen=True)
class Predicted:
    """Seconds; `parts` of a step add up to `tpot_s`."""

    ttft_s: float
    tt2t_s: float
    tpot_s: float
    parts: dict[str, float]
    fits: bool


def predict(counts: Counts, layers: Layers, hardware: Hardware, s: int, batch: int = 1) -> Predicted:
    """Times of a prompt of `s` tokens and the steps behind it."""
    parts = step_parts(counts, layers, hardware, batch)
    tpot = sum(parts.values())
    ends, computed = prefill_ends(counts, layers, hardware, s)
    head = linear(hardware, layers.head_weights, 1)
    ttft = batch * computed + head
    # The first step reaches layer i after i layers' time, and waits there for its clusters.
    at, per_layer = ttft, (tpot - parts["head"]) / layers.n_layers
    for end in ends:
        at = max(at, (batch - 1) * computed + end) + per_layer
    resident = batch * layers.n_layers * counts.resident_bytes + layers.weight_bytes
    return Predicted(ttft, at + parts["head"], tpot, parts, resident <= hardware.memory_gb * 1e9)


def step_parts(counts: Counts, layers: Layers, hardware: Hardware, batch: int) -> dict[str, float]:
    """Seconds of one step of all layers."""
    n, call = layers.n_layers, hardware.call_us / 1e6
    finds = counts.searched_bytes > 0 or counts.moved_meta_bytes > 0
    fetches = counts.moved_kv_bytes > 0
    read = linear(hardware, layers.layer_weights, batch) + hardware.layer_us / 1e6
    search = batch * (counts.searched_bytes / hardware.bandwidth + counts.searched_numbers * hardware.number_ns / 1e9)
    search += call * finds
    fetch = hardware.over_link(batch * counts.moved_kv_bytes) + call * fetches
    if hardware.link_gb_s is None and fetches:  # one memory: what is chosen is copied, or read where it lies
        fetch = call
    attention = batch * counts.attended_bytes / hardware.bandwidth
    visible = read + search + fetch + attention
    late = max(0.0, hardware.over_link(batch * counts.moved_meta_bytes) - visible)
    return {
        "model": n * read,
        "search": n * search,
        "find, not hidden": n * late,
        "fetch": n * fetch,
        "attention": n * attention,
        "head": linear(hardware, layers.head_weights, batch),
    }


def linear(hardware: Hardware, weights: int, tokens: int) -> float:
    """A product of so many tokens with so many weights."""
    return max(2 * weights * tokens / hardware.flops, ELEMENT_BYTES * weights / hardware.bandwidth)


def prefill_ends(counts: Counts, layers: Layers, hardware: Hardware, s: int) -> tuple[list[float], float]:
    """When each layer's index is ready, and when the last layer has been computed."""
    attention = 2 * layers.h * layers.d_h * s * s  # two causal products
    compute = linear(hardware, layers.layer_weights, s) + attention / hardware.flops
    compute += counts.observe_flops / hardware.flops + hardware.layer_us / 1e6
    copy = hardware.over_link(counts.offloaded_bytes)
    cluster = counts.build_flops / (hardware.host_tflops * 1e12)
    done = copied = clustered = 0.0
    ends = []
    for _ in range(layers.n_layers):
        done += compute
        copied = max(copied, done) + copy
        clustered = max(clustered, copied) + cluster
        ends.append(clustered if counts.build_flops else done)
    return ends, done


# --- counts -----------------------------------------------------------------------------------


def count(kind: type[SelectiveAttention], params: Any, request: BudgetRequest, model: ModelShape, s: int) -> Counts:
    """Counts at any length: a line through those at two short ones.

    Of a budget in tokens, what is attended to and fetched grows towards an end, as sets of query heads overlap less and
    less in a longer prompt: a line over 1 / s.
    """
    first, second = lengths(request)
    if s == first or (request.tokens is not None and s <= second):
        return count_at(kind, params, request, model, s)
    low, high = (count_at(kind, params, request, model, n) for n in (first, second))
    share = (s - first) / (second - first)
    towards = share * second / s if request.tokens is not None else share
    values = {}
    for field in fields(Counts):
        a, b = getattr(low, field.name), getattr(high, field.name)
        values[field.name] = max(0.0, a + (b - a) * (towards if field.name in CHOSEN else share))
    observes = low.observe_flops / first**2  # quadratic, unlike all else
    return replace(Counts(**values), observe_flops=observes * s * s)


def lengths(request: BudgetRequest) -> tuple[int, int]:
    """Two lengths at which the budget leaves tokens out, as it does at all that are longer."""
    least = 4 * (request.tokens or 0)
    return max(COUNT_AT[0], least), max(COUNT_AT[1], 2 * least)


def count_at(kind: type[SelectiveAttention], params: Any, request: BudgetRequest, model: ModelShape, s: int) -> Counts:
    """The ledger's counts for one layer of random keys, after enough steps to fill a cache."""
    shape = replace(model, n_layers=LAYER + 1, attention_layers=(LAYER,), window=1 << 20)
    draw = torch.Generator().manual_seed(0)
    soft = Softmax(shape.d_h**-0.5)

    def normal(heads: int, n: int) -> torch.Tensor:
        # As wide as what is counted: of numbers of 16 bits many are equal, which makes a top-k longer.
        return torch.randn(1, heads, n, shape.d_h, generator=draw).to(torch.bfloat16)

    with torch.inference_mode():
        trace = Trace(shape, s, torch.device("cpu"))
        q, k, v = (normal(heads, s) for heads in (shape.h, shape.h_kv, shape.h_kv))
        trace.add(LAYER, k, v, soft)
        variant = kind.variant_for(params, request, shape, s)
        if variant.thinning is not None:
            raise ConfigError(
                f"{kind.title} shortens its own prefill, which the simulation does not know; leave it out"
            )
        for what in variant.observations:
            trace.observe(LAYER, what, q, k, soft)
        row = variant.row(trace, N_STEPS)
        if row.wants_lookahead:
            row.wants_lookahead = False
            row.q_ahead = q[:, :, -1:]
        row.build(LAYER)
        row.complete()
        numbers = Numbers()
        counting = numbers.of_search(kind)
        for step in range(1, N_STEPS + 1):
            numbers.n = 0
            q_new, k_new, v_new = (normal(heads, 1) for heads in (shape.h, shape.h_kv, shape.h_kv))
            attend_group(counting, [row], LAYER, q_new, k_new, v_new, soft, step)
    last = row.store.ledger.entries[-1]
    build = float(row.reported().get("build_flops", 0.0))
    found = from_entry(last, shape, s, build, any(isinstance(what, ColumnSums) for what in variant.observations))
    return replace(found, searched_numbers=numbers.n)


class Numbers(TorchDispatchMode):
    """Counts the numbers that torch's operations make while it is entered; a view makes none."""

    n = 0

    def of_search(self, kind: type[SelectiveAttention]) -> type[SelectiveAttention]:
        """The class, with a search whose numbers are counted here."""

        def select_rows(rows: Sequence[SelectiveAttention], layer: int, q: torch.Tensor) -> Sequence[Found]:
            with self:
                return kind.select_rows(rows, layer, q)

        return type(f"Counting{kind.__name__}", (kind,), {"select_rows": staticmethod(select_rows)})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            parts = out if isinstance(out, tuple | list) else [out]
            self.n += sum(part.numel() for part in parts if isinstance(part, torch.Tensor))
        return out


def from_entry(entry: Entry, shape: ModelShape, s: int, build_flops: float, sums_columns: bool) -> Counts:
    """The counts in one line of a ledger."""
    token = token_bytes(shape) // shape.h_kv
    meta = entry.resident_meta_bytes + entry.moved_meta_bytes + entry.searched_bytes
    on_host = entry.resident_host_bytes > 0
    return Counts(
        attended_bytes=entry.attended / shape.h * shape.h_kv * token,
        searched_bytes=meta if on_host or entry.searched_bytes else 0,
        moved_kv_bytes=entry.moved_kv_bytes,
        moved_meta_bytes=entry.moved_meta_bytes,
        resident_bytes=entry.resident_kv_bytes + entry.resident_meta_bytes,
        offloaded_bytes=s * shape.h_kv * token if on_host else 0,
        build_flops=build_flops,
        # Logits once more, and an exponential each.
        observe_flops=(shape.h * shape.d_h + shape.h) * s * s if sums_columns else 0,
    )


# --- what to predict --------------------------------------------------------------------------


def read_hardware(name: str, key: str = "--on") -> Hardware:
    """The file of conf/hardware, checked; `key` is what named it."""
    folder = CONF / "hardware"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        raise unknown_name(key, name, names)
    values: Mapping[str, Any] = yaml.safe_load((folder / f"{name}.yaml").read_text())
    return Hardware(**{field.name: values[field.name] for field in fields(Hardware)})


def read_model(name: str) -> tuple[ModelShape, Layers]:
    """The model's shape and its weights, from conf/architecture."""
    from transformers import AutoConfig

    folder = CONF / "architecture"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        raise unknown_name("--model", name, names)
    given = yaml.safe_load((folder / f"{name}.yaml").read_text())
    config: Any = AutoConfig.for_model(**given)
    return shape_of(config, name), layers_of(shape_of(config, name), config)


def layers_of(shape: ModelShape, config: Any) -> Layers:
    """Weights of a Llama-like layer: four projections of attention, three of the gated feed-forward."""
    d, own = config.hidden_size, shape.h * shape.d_h
    attention = 2 * d * own + 2 * d * shape.h_kv * shape.d_h
    return Layers(
        n_layers=shape.n_layers,
        h=shape.h,
        d_h=shape.d_h,
        layer_weights=attention + 3 * d * config.intermediate_size,
        head_weights=d * config.vocab_size,
        kv_bytes=token_bytes(shape),
    )


@dataclass(frozen=True)
class Question:
    """What the command line asks."""

    hardware: Sequence[str]
    model: str
    methods: Sequence[str]
    lengths: Sequence[int]
    request: BudgetRequest
    batch: int


def answer(question: Question) -> list[dict[str, Any]]:
    """A row per hardware, method and length."""
    shape, layers = read_model(question.model)
    rows: list[dict[str, Any]] = []
    for method in question.methods:
        kind, params = method_of(method)
        request = FULL_REQUEST if method == "full" else question.request
        kind.check(params, request, shape)
        for s in question.lengths:
            counts = count(kind, params, request, shape, s)
            for name in question.hardware:
                hardware = read_hardware(name)
                times = predict(counts, layers, hardware, s, question.batch)
                rows.append(
                    {"simulated": True, "hardware": hardware.title, "model": question.model,
                     "method": kind.label(params, request), "tokens": s, "batch": question.batch,
                     "tt2t_s": times.tt2t_s, "tpot_s": times.tpot_s, "fits": times.fits}
                    | {f"{part}_s": seconds for part, seconds in times.parts.items()}
                )  # fmt: skip
    return rows


FULL_REQUEST = BudgetRequest(Fraction(1), None, Fraction(0))


DRAWN = {"duo_attention": ["method.heads=drawn"]}  # there is no table of heads for a model of random layers


def method_of(name: str, words: Sequence[str] = ()) -> tuple[type[SelectiveAttention], Any]:
    """A method with the parameters of its file, changed by `words`."""
    from evals.settings import from_words, load_class
    from evals.typed import build_params

    names = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
    if name not in names:
        raise unknown_name("--methods", name, names)
    part = from_words([f"method={name}", *DRAWN.get(name, []), *words]).method
    kind = load_class(part)
    return kind, build_params(kind, part.params, "method")


def sheet_of(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    heads = ("hardware", "method", "tokens", "TT2T s", "TPOT ms", "model", "search", "fetch", "attention", "fits")
    lines = [
        [
            row["hardware"], row["method"], f"{row['tokens']:,}", f"{row['tt2t_s']:.3f}", f"{1e3 * row['tpot_s']:.2f}",
            f"{1e3 * (row['model_s'] + row['head_s'] + row['find, not hidden_s']):.2f}",
            *(f"{1e3 * row[f'{part}_s']:.2f}" for part in ("search", "fetch", "attention")),
            "yes" if row["fits"] else "no",
        ]
        for row in rows
    ]  # fmt: skip
    return Sheet(heads, lines, n_keys=2, about="simulated, not measured")


def parse(words: Sequence[str] | None) -> tuple[Question, Path | None]:
    parser = argparse.ArgumentParser(
        prog="python -m evals.studies.hardware", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--on", nargs="+", default=["rtx4090-pcie1"], help="files of conf/hardware")
    parser.add_argument("--model", default="llama-3.1-8b", help="a file of conf/architecture")
    parser.add_argument("--methods", nargs="+", default=["full", "snapkv"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--ratio", default="0.2")
    parser.add_argument("--budget", type=int, default=None, help="tokens, instead of --ratio")
    parser.add_argument("--comm", default="1/64")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--csv", type=Path, default=None, help="also write the rows here")
    given = parser.parse_args(words)
    if min(given.lengths) < COUNT_AT[0] or given.batch < 1:
        raise ConfigError(f"lengths start at {COUNT_AT[0]} tokens and batches at 1")
    ratio = None if given.budget is not None else parse_fraction(given.ratio, "--ratio")
    request = BudgetRequest(ratio, given.budget, parse_fraction(given.comm, "--comm"))
    question = Question(given.on, given.model, given.methods, given.lengths, request, given.batch)
    return question, given.csv


def main(words: Sequence[str] | None = None) -> int:
    try:
        question, file = parse(words)
        rows = answer(question)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    show(sheet_of(rows))
    if file is not None:
        write_csv(file, rows[0], (row.values() for row in rows))
    assert all(math.isfinite(row["tpot_s"]) for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
