"""What a variant would cost on hardware that is not here: a roofline, with counts from the store. Always `simulated`.

    python -m kvbench.evals.studies.hardware --on h100 --model llama-3.1-8b --methods snapkv kvzip --lengths 8k 32k
    python -m kvbench.evals.studies.hardware --on rtx4090-pcie1 rtx4090-pcie4 --methods pqcache --csv rows.csv
    python -m kvbench.evals.studies.hardware --on a100 --model gpt-oss-20b --methods kivi --memory 1/2 --batch 8

Bytes are those that the ledger counts of one layer of the model's shape (`evals/studies/counts.py`). Times are bytes
over bandwidth and operations over rate, whichever takes longer, plus a fixed price per layer and call.

Step      linear layers, search, a blocking fetch of the chosen tokens, attention. A search reads once what the ledger
          says is read in order to find tokens, and has a price for every number that it makes on the way: scores, their
          sums, the marks of a top-k. These are counted too, as torch sees them, on a CPU; an accelerator's kernels make
          others. What is moved in order to find tokens is asked for one layer ahead, as PQCache's paper draws it: it
          costs time only as far as it takes longer than a layer. Our kernels read it when they score, which hides none.
Prefill   three lanes, as PQCache draws them: layers compute one after another; each layer's K and V leave for the host
          when it is done; its clustering starts when they are there. A step waits for a layer's clusters before it
          searches there, so what the lanes are late by shows in the time to the second token. So does what a method
          lets the model read once more after the prompt, as KVzip does.

Peaks are the makers' (`conf/hardware`). The shares of them that work reaches, and the fixed prices, are typical values
and the least certain part: `benchmarks/bench_hardware.py` measures them on a real machine, and says how far the
prediction is off there.

Not here: memory that does not suffice (`fits` says so, and that is all), several devices, batches of unequal length,
experts that other requests of a batch choose, the prompt's attention within windows, and what building an index or
choosing tokens takes once per prompt, but for the clusters of PQCache and ClusterKV and the sums of H2O.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from kvbench.engine.budget import EVERYTHING, BudgetRequest
from kvbench.engine.checkpoints.kinds import check_compresses
from kvbench.engine.checkpoints.load import drawn_checkpoint, empty_model
from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError, unknown_name
from kvbench.engine.foreign import write_csv
from kvbench.engine.model import decoder_layers
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.engine.terminal import say
from kvbench.evals.models import random_config
from kvbench.evals.overrides import CONF
from kvbench.evals.settings import Choice, from_words, load_class
from kvbench.evals.studies.counts import AT, Counts, count
from kvbench.methods import combinations
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.combinations import Case
from kvbench.results.sheet import Sheet, show

ELEMENT_BYTES = 2  # of weights


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

    shape: ModelShape
    layer_weights: int  # that a token meets in a layer, in the mean: not those of experts that others go to
    head_weights: int  # of the last product with the vocabulary
    n_weights: int  # of the whole model

    @property
    def n_kept(self) -> int:
        """Layers that keep something of every token."""
        return len(self.shape.kept_layers)

    @property
    def weight_bytes(self) -> int:
        return ELEMENT_BYTES * self.n_weights


@dataclass(frozen=True)
class Predicted:
    """Seconds; `parts` of a step add up to `tpot_s`."""

    ttft_s: float
    tt2t_s: float
    tpot_s: float
    parts: dict[str, float]
    fits: bool


def predict(counts: Counts, layers: Layers, hardware: Hardware, s: int, batch: int = 1) -> Predicted:
    """Times of a prompt of `s` tokens and the steps after it."""
    parts = step_parts(counts, layers, hardware, s, batch)
    tpot = sum(parts.values())
    ends, computed = prefill_ends(counts, layers, hardware, s)
    head = linear(hardware, layers.head_weights, 1)
    ttft = batch * computed + head
    # The first step reaches layer i after i layers' time, and waits there for its clusters.
    n_second_pass = counts.second_pass_tokens
    at, per_layer = ttft, (tpot - parts["head"]) / layers.n_kept
    at += batch * layers.n_kept * reading(layers, hardware, n_second_pass, n_second_pass * (s + n_second_pass / 2))
    for end in ends:
        at = max(at, (batch - 1) * computed + end) + per_layer
    held = layers.n_kept * counts.resident_bytes + layers.shape.left_bytes(s)
    fits = batch * held + layers.weight_bytes <= hardware.memory_gb * 1e9
    return Predicted(ttft, at + parts["head"], tpot, parts, fits)


def step_parts(counts: Counts, layers: Layers, hardware: Hardware, s: int, batch: int) -> dict[str, float]:
    """Seconds of one step of all layers."""
    n, n_kept, call = layers.shape.n_layers, layers.n_kept, hardware.call_us / 1e6
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
    left = batch * layers.shape.left_bytes(s) / hardware.bandwidth
    return {
        "model": n * read,
        "search": n_kept * search,
        "find, not hidden": n_kept * late,
        "fetch": n_kept * fetch,
        "attention": (n_kept + len(layers.shape.readers)) * attention + left,
        "head": linear(hardware, layers.head_weights, batch),
    }


def linear(hardware: Hardware, weights: int, tokens: float) -> float:
    """A product of so many tokens with so many weights."""
    return max(2 * weights * tokens / hardware.flops, ELEMENT_BYTES * weights / hardware.bandwidth)


def reading(layers: Layers, hardware: Hardware, n_tokens: float, n_pairs: float) -> float:
    """Seconds to read so many tokens and pairs of query and key in a layer that keeps tokens, others shared out."""
    others = layers.shape.n_layers / layers.n_kept
    pairs = 4 * layers.shape.h * layers.shape.d_h * n_pairs / hardware.flops
    return others * linear(hardware, layers.layer_weights, n_tokens) + pairs if n_tokens else 0.0


def prefill_ends(counts: Counts, layers: Layers, hardware: Hardware, s: int) -> tuple[list[float], float]:
    """When the index of each layer that keeps tokens is ready, and when the last one has been computed."""
    compute = reading(layers, hardware, s, s * s / 2) + counts.observe_flops / hardware.flops
    compute += layers.shape.n_layers / layers.n_kept * hardware.layer_us / 1e6
    copy = hardware.over_link(counts.offloaded_bytes)
    cluster = counts.build_flops / (hardware.host_tflops * 1e12)
    done = copied = clustered = 0.0
    ends = []
    for _ in range(layers.n_kept):
        done += compute
        copied = max(copied, done) + copy
        clustered = max(clustered, copied) + cluster
        ends.append(clustered if counts.build_flops else done)
    return ends, done


# --- what to predict --------------------------------------------------------------------------


def read_hardware(name: str, key: str = "--on") -> Hardware:
    """The file of conf/hardware, checked; `key` is what named it."""
    folder = CONF / "hardware"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in names:
        raise unknown_name(key, name, names)
    values: Mapping[str, Any] = yaml.safe_load((folder / f"{name}.yaml").read_text())
    return Hardware(**{field.name: values[field.name] for field in fields(Hardware)})


def read_model(name: str) -> tuple[Checkpoint, Layers]:
    """A model and its layers without its weights; `name` is whatever `model=` of a run may be."""
    if "," in name:
        raise ConfigError(f"--model={name} is several models; give one")
    spec = from_words([f"model={name}"]).model
    config = random_config(spec)
    model = drawn_checkpoint(spec.name, config)
    check_compresses(model.shape)
    if model.shape.choosing_layers:
        raise ConfigError(f"the model {spec.name!r} chooses what it attends to, which the simulation does not know")
    return model, layers_of(model.shape, config)


def layers_of(shape: ModelShape, config: Any, trust_remote_code: bool = False) -> Layers:
    """Weights of a model, as its modules have them."""
    hf = empty_model(config, trust_remote_code)
    n_chosen = next((n for key in ("num_experts_per_tok", "top_k_experts") if (n := getattr(config, key, None))), None)
    n_met = 0.0
    for name, weights in (each for layer in decoder_layers(hf) for each in layer.named_parameters()):
        is_expert = n_chosen is not None and "experts" in name.split(".")
        n_met += weights.numel() * (n_chosen / len(weights) if is_expert and n_chosen is not None else 1)
    head = config.vocab_size * config.hidden_size
    return Layers(shape, round(n_met / shape.n_layers), head, sum(weights.numel() for weights in hf.parameters()))


@dataclass(frozen=True)
class Question:
    """The command line's question."""

    hardware: Sequence[str]
    model: str
    methods: Sequence[str]
    lengths: Sequence[int]
    budget: Sequence[str]  # as a run's command line says it, such as `ratio=0.2`
    batch: int


def answer(question: Question) -> tuple[list[dict[str, Any]], list[str]]:
    """A row per hardware, method and length; a sentence for each method that cannot be simulated."""
    model, layers = read_model(question.model)
    machines = [read_hardware(name) for name in question.hardware]
    asked = {name: asked_of(name, question.budget) for name in ("full", *question.methods)}
    rows, left_out = list[dict[str, Any]](), list[str]()
    full: dict[tuple[str, int], Predicted] = {}
    for name, (kind, params, request) in asked.items():
        try:
            refuse(kind, params, request, model)
            counts = {s: count(kind, params, request, model.shape, s) for s in question.lengths}
        except ConfigError as error:
            left_out.append(f"{name}: {error}")
            continue
        for s, machine in ((s, machine) for s in counts for machine in machines):
            times = predict(counts[s], layers, machine, s, question.batch)
            of_full = full.setdefault((machine.title, s), times)
            if name in question.methods:
                rows.append(
                    {"simulated": True, "hardware": machine.title, "model": model.shape.name,
                     "method": kind.label(params, request), "tokens": s, "batch": question.batch,
                     "tt2t_s": times.tt2t_s, "tpot_s": times.tpot_s, "tpot_to_full": times.tpot_s / of_full.tpot_s,
                     "fits": times.fits}
                    | {f"{part}_s": seconds for part, seconds in times.parts.items()}
                )  # fmt: skip
    return rows, left_out


def refuse(kind: type[SelectiveAttention], params: Any, request: BudgetRequest, model: Checkpoint) -> None:
    """Raise `ConfigError` where a run of drawn weights would be refused."""
    kept = kind.traits_of(params).post_processing
    combinations.refuse(
        (*combinations.KINDS, *combinations.KEPT),
        Case(kind, params, shape=model.shape, checkpoint=model, post_processing=kept),
    )
    kind.check(params, request, model.shape)
    kind.check_model(params, model)


def asked_of(name: str, budget: Sequence[str]) -> tuple[type[SelectiveAttention], Any, BudgetRequest]:
    """A method with the parameters of its file, and what a run of it with these words would be given."""
    asked = from_words([f"method={name}", *budget])
    kind, params = made_of(asked.method)
    return kind, params, asked.budget if kind.traits.has_budget else EVERYTHING


def method_of(name: str, words: Sequence[str] = ()) -> tuple[type[SelectiveAttention], Any]:
    """A method with the parameters of its file, changed by `words`."""
    return made_of(from_words([f"method={name}", *words]).method)


def made_of(part: Choice) -> tuple[type[SelectiveAttention], Any]:
    """A method; a table of heads is a drawn one."""
    kind = load_class(part)
    drawn = {"heads": "drawn"} if part.params.get("heads") == "auto" else {}
    return kind, build_params(kind, {**part.params, **drawn}, "method")


def sheet_of(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Sheet:
    heads = (
        *("hardware", "method", "tokens", "TT2T s", "TPOT ms", "to Full"),
        *("model", "search", "fetch", "attention", "fits"),
    )
    lines = [
        [
            row["hardware"], row["method"], f"{row['tokens']:,}", f"{row['tt2t_s']:.3f}", f"{1e3 * row['tpot_s']:.2f}",
            f"{row['tpot_to_full']:.2f}",
            f"{1e3 * (row['model_s'] + row['head_s'] + row['find, not hidden_s']):.2f}",
            *(f"{1e3 * row[f'{part}_s']:.2f}" for part in ("search", "fetch", "attention")),
            "yes" if row["fits"] else "no",
        ]
        for row in rows
    ]  # fmt: skip
    about = "simulated, not measured; model, search, fetch and attention are ms of TPOT"
    return Sheet(heads, lines, n_keys=2, about=about, notes=notes)


def parse(words: Sequence[str] | None) -> tuple[Question, Path | None]:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.evals.studies.hardware", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(__doc__ or "").partition("\n\nBytes are")[0],
    )  # fmt: skip
    add = parser.add_argument
    add("--on", nargs="+", default=["rtx4090-pcie1"], help="files of conf/hardware")
    add("--model", default="llama-3.1-8b", help="as in a run: a file of conf/model, a hub name, a folder")
    add("--methods", nargs="+", default=["full", "snapkv"], help="files of conf/method")
    add("--lengths", nargs="+", default=["8k", "32k"], help="tokens of a prompt, like 4096 or 4k")
    for key, what in BUDGET.items():
        add(f"--{key}", help=f"{what}, as in a run")
    add("--batch", type=int, default=1, help="requests that decode at once")
    add("--csv", type=Path, help="also write the rows here")
    given = parser.parse_args(words)
    lengths = [n_tokens(text) for text in listed(given.lengths)]
    if min(lengths) < AT[0] or given.batch < 1:
        raise ConfigError(f"lengths start at {AT[0]} tokens and batches at 1")
    budget = [f"{key}={value}" for key in BUDGET if (value := getattr(given, key)) is not None]
    question = Question(listed(given.on), given.model, listed(given.methods), lengths, budget, given.batch)
    return question, given.csv


BUDGET = {
    "ratio": "share of the prompt attended to",
    "budget": "the same in tokens",
    "memory": "share of the cache's bytes on the device",
    "comm": "bytes moved to find tokens, relative to the keys'",
}


def listed(given: Sequence[str]) -> list[str]:
    """Words between blanks or commas, each once."""
    return [*dict.fromkeys(word for text in given for word in text.split(",") if word)]


def n_tokens(text: str) -> int:
    found = re.fullmatch(r"(\d{1,9})(k?)", text.lower())
    if found is None:
        raise ConfigError(f"--lengths={text} is no number of tokens; write it as 32768 or 32k")
    return int(found[1]) * (1024 if found[2] else 1)


def main(words: Sequence[str] | None = None) -> int:
    try:
        question, file = parse(words)
        rows, left_out = answer(question)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    if not rows:
        say("\n".join(f"error: {why}" for why in left_out), file=sys.stderr)
        return 2
    show(sheet_of(rows, left_out))
    if file is not None:
        write_csv(file, rows[0], (row.values() for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
