"""A prefill that observes column sums against a plain one, at 4,096 tokens of the embedded model.

Parity comes first: the sums of a layer against a naive softmax, in a prompt that is short enough for its matrix.

Not here: other observations, which copy a few queries.
"""

import argparse

import torch

from benchmarks.paired import measure, record
from engine.model import Model, load
from engine.observe import ColumnSums
from engine.prefill import prefill
from evals.data import embedded_prose


def check_parity() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 700, 64, generator=draw) for heads in (9, 3))
    logits = q.double() @ k.double().repeat_interleave(3, 1).mT * 0.125
    future = torch.ones(700, 700, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(future, -torch.inf).softmax(-1).sum(2)
    torch.testing.assert_close(
        ColumnSums().observe(q, k, 0.125).double(), expected, rtol=1e-5, atol=0
    )


def bench(model: Model, ids: list[int], dtype: str, n: int) -> None:
    def seconds(*what: ColumnSums) -> float:
        with model.hooked():
            return prefill(model, ids, what).seconds

    shape = f"{len(ids)} tokens, {model.shape.name}"
    pairs = measure(seconds, lambda: seconds(ColumnSums()), n)
    record("prefill: with column sums against plain", shape, dtype, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    check_parity()
    for dtype in ("float32", "bfloat16"):
        model = load("smollm2-135m", "embedded", dtype=dtype, device="cpu")
        ids = model.tokenizer.encode(embedded_prose())[: options.tokens]
        bench(model, ids, dtype, options.pairs)


if __name__ == "__main__":
    main()
