"""Sparse prefills against the exact one on a CPU: a layer's time, what was computed, and how far off it is.

Two layers of the embedded model's shape read a prompt exactly, and a layer's queries, keys and values are kept. Then
each rule chooses and attends, in turns with exact attention. Weights are drawn, or with --trained the model's own (all
of its layers, up to its context). Ratios go to results.csv; the table on standard output has per prefill

    share      of the causal pairs of query and key that was computed
    time       of choosing and attending, relative to exact attention's
    choosing   its part of that
    error      norm of the output's difference to exact attention's, relative to exact's; mean over layers

Not here: quality (docs/prefills.md), launches on a GPU (`benchmarks/prefills/launches.py`).
"""

import argparse
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from kvbench.benchmarks.paired import measure, quantile, record
from kvbench.engine.causal import causal
from kvbench.engine.checkpoints.load import load, load_random, read_config
from kvbench.engine.declared import build
from kvbench.engine.model import Model
from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.base import SparsePrefill
from kvbench.evals.settings import ModelSpec, architecture, from_words, load_class
from kvbench.methods.calibration.prose import embedded_prose

PREFILLS = (
    *("minference", "flexprefill", "xattention", "a_shape", "tri_shape", "block_sparse", "top_cdf"),
    *(f"{name}_short" for name in ("flexprefill", "xattention", "block_sparse", "top_cdf")),
)
Layer = tuple[Tensor, Tensor, Tensor, Softmax]


def rule_of(name: str, *words: str) -> SparsePrefill:
    """A file of conf/prefill with other values."""
    chosen = from_words([f"prefill={name}", "method=full", *words]).prefill
    assert chosen is not None
    return build(load_class(chosen), chosen.params, "prefill")


def drawn(dtype: str, s: int) -> Model:
    spec = ModelSpec("smollm2-135m", "embedded", None, False, "none", "")
    given: Any = architecture(spec)
    return load_random(
        "drawn",
        read_config("drawn", {**given, "num_hidden_layers": 2, "max_position_embeddings": s}),
        dtype=dtype,
        device="cpu",
    )


class Keeping:
    """Stands in the model's attention and keeps what each layer attends to."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: Any) -> Tensor:
        self.layers.append((q.contiguous(), k.contiguous(), v.contiguous(), softmax))
        return causal(q, k, v, softmax, window)[0]


def layers_of(model: Model, ids: list[int]) -> list[Layer]:
    keeping = Keeping()
    with model.hooked(), torch.inference_mode():
        model.forward(torch.tensor([ids]), 0, model.new_cache(), keeping)
    return keeping.layers


def seconds(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.benchmarks.prefills.bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--densities", nargs="+", default=["0.25", "0.1"])
    parser.add_argument("--prefills", nargs="+", default=PREFILLS)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--trained", action="store_true")
    options = parser.parse_args()
    print("| tokens | dtype | prefill | density | share | time | choosing | error |\n|---|---|---|---|---|---|---|---|")
    for s in options.tokens:
        for dtype in options.dtypes:
            model = load("smollm2-135m", "embedded", dtype=dtype, device="cpu") if options.trained else drawn(dtype, s)
            text = embedded_prose()
            ids = model.tokenizer.encode(text)[:s] if options.trained else [i * 7919 % 997 for i in range(s)]
            layers = layers_of(model, ids)
            for name in options.prefills:
                for density in options.densities:
                    rule = rule_of(name, f"prefill.density={density}")
                    print(line(rule, layers, s, dtype, name, density, options.pairs), flush=True)


def line(rule: SparsePrefill, layers: list[Layer], s: int, dtype: str, name: str, density: str, n: int) -> str:
    errors, shares = [], []
    for layer, (q, k, v, softmax) in enumerate(layers):
        expected = causal(q, k, v, softmax)[0].float()
        found = rule.attend(q, k, v, softmax, layer)
        errors.append(((found.out.float() - expected).norm() / expected.norm()).item())
        shares.append(found.share.item())
    q, k, v, softmax = layers[-1]
    exact = partial(seconds, partial(causal, q, k, v, softmax))
    pairs = measure(exact, partial(seconds, partial(rule.attend, q, k, v, softmax)), n)
    choosing = min(seconds(partial(rule.choose, q, k, softmax, 0)) for _ in range(2)) / quantile(pairs.baseline, 0.5)
    record(
        f"prefill: attention of {name} at density {density} against exact", f"{s} tokens, 9 heads of 64", dtype, pairs
    )
    ratio = quantile(pairs.ratios(), 0.5)
    means = sum(shares) / len(shares), ratio, choosing, sum(errors) / len(errors)
    return f"| {s} | {dtype} | {name} | {density} | " + " | ".join(f"{x:.3f}" for x in means) + " |"


if __name__ == "__main__":
    main()
