"""What the tests with vLLM share: the embedded model, prompts, what KVBench says to them, and engines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.decode import decode
from engine.model import Model
from engine.prefill import prefill
from evals.models import load_model
from methods.calibration.prose import embedded_prose
from serving.order import chosen

NEAR = 1e-3  # of two logits, in float32, whose order sums may turn


@dataclass(frozen=True)
class Said:
    """What KVBench answers."""

    ids: list[int]
    gaps: list[float]  # between the two best logits of each token
    ledger: dict[str, Any]


@dataclass
class Gaps:
    """Watches the two best logits."""

    seen: list[float]

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None: ...

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        best = logits[0].topk(2).values
        self.seen.append(float(best[0] - best[1]))


@cache
def model() -> Model:
    return load_model(replace(chosen(("method=full",)).settings, dtype="float32", device="cpu"))


@cache
def text() -> tuple[int, ...]:
    return tuple(model().tokenizer.encode(embedded_prose()))


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Prose, each from another place."""
    return [[*text()[37 * i : 37 * i + n]] for i, n in enumerate(lengths)]


@cache
def said(words: str, ids: tuple[int, ...], n_new: int) -> Said:
    """What KVBench's own engine answers."""
    variant, rows = chosen(tuple(words.split())).variant(len(ids)), []

    def build(trace: Any, layer: int) -> None:
        if not rows:
            rows.append(variant.row(trace, n_new))
        rows[0].build(layer)

    with torch.inference_mode(), model().hooked():
        trace = prefill(model(), ids, variant.observations, build)
        rows[0].complete()
        first = trace.logits.topk(2).values  # type: ignore[union-attr]
        gaps = Gaps([float(first[0] - first[1])])
        answer = decode(model(), trace, rows, max_new_tokens=n_new, watch=gaps).answers[0].ids
    row, exempt = rows[0], rows[0].skipped_layers()
    in_mean = row.keeps_budget_in == "mean"
    books = row.store.ledger.summary(row.budget, model().shape, exempt, in_mean, with_index=not row.drops)
    return Said(answer, gaps.seen, books)


def agree(words: str, asked: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[str]:
    """Assert that answers are KVBench's: the near ties behind which they part, named."""
    ties = []
    for ids, answer in zip(asked, answers, strict=True):
        own = said(words, tuple(ids), len(answer))
        at = next((i for i, (a, b) in enumerate(zip(own.ids, answer, strict=True)) if a != b), None)
        if at is None:
            continue
        assert own.gaps[at] < NEAR, f"{words}, {len(ids)} tokens: token {at} differs, logits are {own.gaps[at]} apart"
        ties.append(f"{words}, {len(ids)} tokens: token {at} of {len(answer)}, logits {own.gaps[at]:.1e} apart")
    return ties
