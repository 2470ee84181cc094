"""What KVBench's own engine answers, with which answers from vLLM are compared: `said`, `Comparison`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.batch import Batch
from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.prefill import prefill
from kvbench.evals.models import load_model
from kvbench.methods.calibration.prose import embedded_prose
from kvbench.serving.order import chosen

NEAR = 1e-3  # of two logits, in float32, whose order sums may turn


@dataclass(frozen=True)
class Said:
    """What an engine answers."""

    ids: list[int]
    gaps: list[float] | None  # between the two best logits of each token; None: not asked for
    ledger: dict[str, Any] = field(default_factory=dict)


@dataclass
class Gaps:
    """Watches the two best logits of each row."""

    seen: list[list[float]]

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None: ...

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        for row, (best, second) in zip(order, logits.topk(2).values.tolist(), strict=True):
            self.seen[row].append(best - second)


@cache
def model() -> Model:
    return load_model(replace(chosen(("method=full",)).settings, dtype="float32", device="cpu"))


@cache
def text() -> tuple[int, ...]:
    return tuple(model().tokenizer.encode(embedded_prose()))


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Prose, each from another place."""
    return [[*text()[37 * i : 37 * i + n]] for i, n in enumerate(lengths)]


SAID: dict[tuple[str, tuple[int, ...], int], Said] = {}


def said(words: str, ids: Sequence[int], n_new: int, beside: Sequence[str] = ()) -> Said:
    """What KVBench answers: one prefill, and one batch of rows for the methods that are asked for beside it, too."""
    prompt = tuple(ids)
    if (words, prompt, n_new) not in SAID:
        several = dict.fromkeys([words, *beside])
        for each, answer in zip(several, answers_of([*several], prompt, n_new), strict=True):
            SAID[each, prompt, n_new] = answer
    return SAID[words, prompt, n_new]


def answers_of(several: Sequence[str], ids: tuple[int, ...], n_new: int) -> list[Said]:
    variants = [chosen(tuple(words.split())).variant(len(ids)) for words in several]
    rows = []

    def build(trace: Any, layer: int) -> None:
        if not rows:
            rows.extend(one.row(trace, n_new) for one in variants)
        for row in rows:
            row.build(layer)

    with torch.inference_mode(), model().hooked():
        trace = prefill(model(), ids, [what for one in variants for what in one.observations], build)
        for row in rows:
            row.complete()
        best, second = trace.logits.topk(2).values.tolist()  # type: ignore[union-attr]
        gaps = Gaps([[best - second] for _ in rows])
        answers = decode(model(), trace, rows, max_new_tokens=n_new, watch=gaps).answers
    return [Said(one.ids, seen, books(row)) for one, seen, row in zip(answers, gaps.seen, rows, strict=True)]


def turns_of(words: str, ids: Sequence[int], texts: Sequence[Sequence[int]], n_new: int) -> list[list[int]]:
    """What KVBench answers to a prompt and then to each text, with `task.feed=compressed`."""
    one = chosen(tuple(words.split())).variant(len(ids))
    with torch.inference_mode(), model().hooked():
        rows: list[Any] = []

        def build(trace: Any, layer: int) -> None:
            if not rows:
                rows.append(one.row(trace, 2048))
            rows[0].build(layer)

        trace = prefill(model(), ids, one.observations, build)
        rows[0].complete()
        batch, logits = Batch(model(), trace, rows), trace.logits.expand(1, -1)  # type: ignore[union-attr]
        found = [batch.answer(logits, [n_new])[0].ids]
        for text in texts:
            found.append(batch.answer(batch.read([[found[-1][-1], *text]]), [n_new])[0].ids)
    return found


def books(row: Any) -> dict[str, Any]:
    in_mean = row.traits.keeps_budget_in == "mean"
    with_index = not row.traits.drops
    return row.store.ledger.summary(row.budget, model().shape, row.skipped, in_mean, with_index=with_index)


@dataclass
class Comparison:
    """All answers that were compared so far."""

    n_answers: int = 0
    n_tokens: int = 0
    least: float = float("inf")  # gap of KVBench's two best logits
    ties: list[str] = field(default_factory=list)

    def agree(self, words: str, asked: Sequence[Sequence[int]], answers: Sequence[Said]) -> None:
        """Assert that answers are KVBench's, up to near ties: both engines have the two tokens' logits that close."""
        for ids, answer in zip(asked, answers, strict=True):
            own = said(words, ids, len(answer.ids))
            assert own.gaps is not None
            at = next((i for i, (a, b) in enumerate(zip(own.ids, answer.ids, strict=True)) if a != b), None)
            same = len(own.ids) if at is None else at
            self.n_answers, self.n_tokens = self.n_answers + 1, self.n_tokens + same
            self.least = min([self.least, *own.gaps[:same]])
            if at is not None:
                theirs = "not asked for" if answer.gaps is None else f"{answer.gaps[at]:.1e} apart"
                place = f"{words}, {len(ids)} tokens, token {at} of {len(answer.ids)}"
                found = f"{place}: KVBench's logits are {own.gaps[at]:.1e} apart, vLLM's {theirs}"
                assert own.gaps[at] < NEAR and (answer.gaps is None or answer.gaps[at] < NEAR), found
                self.ties.append(found)

    def lines(self) -> list[str]:
        closest = f"the two best logits were never closer than {self.least:.1e}"
        return [f"{self.n_answers} answers, {self.n_tokens} tokens are KVBench's; {closest}", *self.ties]


FOUND: list[str] = []  # figures of tests, for the summary
COMPARED = Comparison()
