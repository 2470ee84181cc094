"""What methods look at during the prefill, against a plain prefill, at 4,096 tokens of the embedded model.

H2O: column sums of all queries. SnapKV, PyramidKV and XKV: votes of the last queries, with choosing and copying
what is kept: all that they add to the time to first token. Parity comes first: the sums of a layer against a naive
softmax, in a prompt that is short enough for its matrix.

Not here: quality (`evals`), methods that build an index (their own benchmarks).
"""

import argparse
from fractions import Fraction
from functools import partial
from time import perf_counter
from typing import Any

import torch

from kvbench.benchmarks.paired import measure, record
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.checkpoints.load import load
from kvbench.engine.model import Model
from kvbench.engine.observe import ColumnSums, Observation
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.calibration.prose import embedded_prose
from kvbench.methods.dropping.pyramidkv import PyramidKV
from kvbench.methods.dropping.snapkv import SnapKV
from kvbench.methods.dropping.xkv import XKV

REQUEST = BudgetRequest(Fraction(1, 5), None, Fraction(0))
METHODS: dict[str, tuple[type[SelectiveAttention], Any]] = {
    "SnapKV": (SnapKV, SnapKV.Params(32, 7, "max", "mean")),
    "PyramidKV": (PyramidKV, PyramidKV.Params(8, 7, "max", "mean", 20, False)),
    "XKV": (XKV, XKV.Params(8, 7, "size", None, "exact", None, "kv_head", 0)),
}


def check_parity() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 700, 64, generator=draw) for heads in (9, 3))
    logits = q.double() @ k.double().repeat_interleave(3, 1).mT * 0.125
    future = torch.ones(700, 700, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(future, -torch.inf).softmax(-1).sum(2)
    torch.testing.assert_close(ColumnSums().observe(q, k, Softmax(0.125)).double(), expected, rtol=1e-5, atol=0)


def seconds(model: Model, ids: list[int], *what: Observation) -> float:
    with model.hooked():
        return prefill(model, ids, what).seconds


def seconds_with(model: Model, ids: list[int], name: str) -> float:
    """A prefill with a method's observations, until its variant is ready to decode."""
    method, params = METHODS[name]
    variant = method.variant_for(params, REQUEST, model.shape, len(ids))
    rows: list[SelectiveAttention] = []

    def build(trace: Trace, layer: int) -> None:
        if not rows:
            rows.append(variant.row(trace, 8))
        rows[0].build(layer)

    with model.hooked():
        start = perf_counter()
        prefill(model, ids, variant.observations, build)
        rows[0].complete()
        return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    check_parity()
    for dtype in ("float32", "bfloat16"):
        model = load("smollm2-135m", "embedded", dtype=dtype, device="cpu")
        ids = model.tokenizer.encode(embedded_prose())[: options.tokens]
        shape = f"{len(ids)} tokens, {model.shape.name}"
        plain = partial(seconds, model, ids)
        summing = partial(seconds, model, ids, ColumnSums())
        pairs = measure(plain, summing, options.pairs)
        record("prefill: with column sums against plain", shape, dtype, pairs)
        for name in METHODS:
            pairs = measure(plain, partial(seconds_with, model, ids, name), options.pairs)
            record(f"prefill: with {name} against plain", shape, dtype, pairs)


if __name__ == "__main__":
    main()
