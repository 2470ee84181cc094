"""A decode step of the engine against `model.generate`, and of eight rows against one, at 4,096 tokens of context.

Parity comes first: full attention must say what generate says (float32), and each of eight rows what it says alone.

Not here: single ops, and sweeps as a whole.
"""

import argparse
import copy
from fractions import Fraction
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from kvbench.benchmarks.paired import measure, record
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.checkpoints.load import load
from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.calibration.prose import embedded_prose
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.methods.full import Full
from kvbench.methods.retrieving.oracle import Oracle

N_STEPS = 16
FULL = (Full, Full.Params(), "1")
ORACLE = Oracle.Params("group_sum", 32, Fraction(1, 2), "inside", "fair", "renormalise")
PER_HEAD = Oracle.Params("query_head", 32, Fraction(1, 2), "inside", "fair", "renormalise")
STREAMING = StreamingLLM.Params(4, "inside", "original")
EIGHT: list[tuple[type[SelectiveAttention], Any, str]] = [
    FULL,
    *((Oracle, ORACLE, ratio) for ratio in ("0.05", "0.1", "0.2")),
    (Oracle, PER_HEAD, "0.1"),
    *((StreamingLLM, STREAMING, ratio) for ratio in ("0.05", "0.1", "0.2")),
]


def build(trace: Trace, *kinds: tuple[type[SelectiveAttention], Any, str]) -> list[SelectiveAttention]:
    rows = []
    for kind, params, ratio in kinds:
        row = kind.variant_for(
            params, BudgetRequest(Fraction(ratio), None, Fraction(1, 64)), trace.shape, trace.s_prompt
        ).row(trace, N_STEPS + 1)
        for layer in trace.shape.attention_layers:
            row.build(layer)
        row.complete()
        rows.append(row)
    return rows


class Generate:
    """`model.generate` from a cache that already holds the prompt."""

    def __init__(self, model: Model, ids: list[int]) -> None:
        from transformers import DynamicCache

        self.model, self.ids = model, torch.tensor([ids])
        self.cache = DynamicCache(config=model.hf.config)
        with torch.inference_mode():
            model.hf(self.ids[:, :-1], past_key_values=self.cache, logits_to_keep=1)

    def __call__(self) -> tuple[list[int], list[float]]:
        """The tokens, and the seconds of every step after the first."""
        times: list[float] = []

        def watch(ids: Any, scores: Any, **_: Any) -> torch.Tensor:
            times.append(perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        from transformers import StoppingCriteriaList

        with torch.inference_mode():
            out = self.model.hf.generate(
                self.ids, past_key_values=copy.deepcopy(self.cache), max_new_tokens=N_STEPS + 1, do_sample=False,
                eos_token_id=None, stopping_criteria=StoppingCriteriaList([watch]),
            )  # fmt: skip
        return out[0, self.ids.shape[1] :].tolist(), [b - a for a, b in pairwise(times)]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def bench(model: Model, ids: list[int], dtype: str, n: int) -> None:
    generate = Generate(model, ids)
    with model.hooked():
        trace = prefill(model, ids)

    def ours(
        *kinds: tuple[type[SelectiveAttention], Any, str],
    ) -> tuple[list[list[int]], list[float]]:
        rows = build(trace, *kinds)
        with model.hooked():
            decoded = decode(model, trace, rows, max_new_tokens=N_STEPS + 1)
        return [answer.ids for answer in decoded.answers], decoded.step_seconds

    if dtype == "float32":
        assert ours(FULL)[0][0] == generate()[0], "full attention does not say what generate says"
        assert ours(*EIGHT)[0] == [ours(kind)[0][0] for kind in EIGHT], "rows do not say what they say alone"
    shape = f"{len(ids)} tokens, {model.shape.name}"
    pairs = measure(lambda: median(generate()[1]), lambda: median(ours(FULL)[1]), n)
    record("decode step: full attention against generate", shape, dtype, pairs)
    pairs = measure(lambda: median(ours(FULL)[1]), lambda: median(ours(*EIGHT)[1]), n)
    record("decode step: eight rows against one", shape, dtype, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    for dtype in ("float32", "bfloat16"):
        model = load("smollm2-135m", "embedded", dtype=dtype, device="cpu")
        ids = model.tokenizer.encode(embedded_prose())[: options.tokens]
        bench(model, ids, dtype, options.pairs)


if __name__ == "__main__":
    main()
