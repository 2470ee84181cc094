"""Known answers, token by token: what is right is fed, and how often the next token would have been the right one.

Nothing is parsed and nothing diverges within an answer, so that small models can be told apart by the paired difference
to full attention. The prompt's last token is fed in front of the answer: so its first token, too, is predicted through
the compressed cache, and counts.

Not here: which answers (`agent_forced.py`, `mrcr_forced.py`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.methods.base import SelectiveAttention
from kvbench.tasks.base import Sample
from kvbench.tasks.calls.damage import KINDS, shares
from kvbench.tasks.forced import ForcedContinuation, ForcedTask, ForcedWatch, Outcome
from kvbench.tasks.lazy import LazySamples
from kvbench.tasks.prompt import first_ids

PLACES = "part_tokens"  # field of a sample: which tokens of its answer are averaged apart
PARTINGS = "partings"  # field of a sample: the kind of damage where a token is the first wrong one, by number in KINDS


class FedTask(ForcedTask):
    """Another task's samples, whose right answers (`right_answer`) are fed."""

    part: ClassVar[str]  # name of the tokens that are averaged apart

    @abstractmethod
    def part_of(self, tokenizer: Any, sample: Sample, answer: str) -> Sequence[int]:
        """Which tokens of an answer are averaged apart."""

    def partings(self, tokenizer: Any, sample: Sample, answer: str) -> Sequence[str]:
        """For each token that is fed, its end included, the kind of damage where a greedy answer first parts there."""
        return ()

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        return Fed(self, super().samples(tokenizer), tokenizer)  # type: ignore[safe-super]

    def watch(
        self, sample: Sample, continuation: ForcedContinuation, rows: Sequence[SelectiveAttention]
    ) -> ForcedWatch:
        assert continuation.ids is not None
        return Agreed(
            continuation.ids, len(rows), sample.fields[PLACES], self.part, sample.fields.get(PARTINGS, ())
        )  # fmt: skip


class Fed(LazySamples):
    """Samples as prompts of tokens, with the right answer after them."""

    def __init__(self, task: FedTask, samples: Sequence[Sample], tokenizer: Any) -> None:
        self.task, self.places, self.tokenizer = task, samples, tokenizer

    def sample(self, i: int) -> Sample:
        one = self.places[i]
        answer = self.task.right_answer(one)
        *ids, last = first_ids(self.tokenizer, one.context + one.question)
        forced = (last, *answer_ids(self.tokenizer, answer))
        places = {PLACES: [*self.task.part_of(self.tokenizer, one, answer)]}
        if partings := self.task.partings(self.tokenizer, one, answer):
            places[PARTINGS] = [*map(KINDS.index, partings)]
        return replace(
            one, context="", question="", references=(answer,), ids=tuple(ids), forced=forced,
            max_new_tokens=len(forced), is_rendered=False, fields={**one.fields, **places},
        )  # fmt: skip


def answer_ids(tokenizer: Any, reference: str) -> list[int]:
    """An answer's tokens, and the end after them where the model has one."""
    ids: list[int] = tokenizer.encode(reference, add_special_tokens=False)
    end: int | None = tokenizer.eos_token_id
    return ids if end is None else [*ids, end]


def places_of(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Which tokens of a text hold some of these characters."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [i for i, (a, b) in enumerate(offsets) if any(a < end and start < b for start, end in spans)]


class Agreed:
    """Whether each next token is the right one, and its loss, for all rows."""

    def __init__(
        self, forced: Sequence[int], n_rows: int, places: Sequence[int], part: str, partings: Sequence[int] = ()
    ) -> None:
        """`places` are those of an answer's tokens that are averaged apart, under the name `part`."""
        self.targets, self.part, self.partings = list(forced[1:]), part, partings
        self.apart = torch.tensor(places, dtype=torch.long)
        self.losses = torch.zeros(n_rows, len(self.targets), dtype=torch.float64)
        self.hits = torch.zeros_like(self.losses)
        self.step = 0

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Take nothing of a layer: only what comes out at the top counts."""

    def predicted(self, order: Sequence[int], logits: Tensor) -> None:
        target, rows = self.targets[self.step], list(order)
        self.losses[rows, self.step] = (logits.logsumexp(-1) - logits[:, target]).double().cpu()
        self.hits[rows, self.step] = (logits.argmax(-1) == target).double().cpu()
        self.step += 1

    def outcomes(self) -> list[Outcome]:
        assert self.step == len(self.targets), f"{self.step} steps for {len(self.targets)} targets"
        return [self.outcome(hits, losses) for hits, losses in zip(self.hits, self.losses, strict=True)]

    def outcome(self, hits: Tensor, losses: Tensor) -> Outcome:
        measures: dict[str, float | None] = {"nll": losses.mean().item()}
        if len(self.apart):
            measures[f"{self.part}_agreement"] = hits[self.apart].mean().item()
            measures[f"{self.part}_nll"] = losses[self.apart].mean().item()
        if self.partings:
            first = int(hits.argmin()) if hits.min() == 0 else None
            measures |= shares("right" if first is None else KINDS[self.partings[first]])
        return Outcome(hits.mean().item(), {"measures": measures, "n_targets": len(self.targets)})
