"""Agent traces, token by token: what is recorded is fed, and how often the next token would have been the recorded one.

Names       agent traces, forced; work on drawn records, forced
Asks        each token of an agent's recorded action
Lengths     as agent_traces
Answers     none: the recorded action is fed
Licence     MIT (tau-bench)

The same samples as `task=agent_traces task.mode=query_aware`: each decision's whole history is one prompt, which is
compressed, and the recorded action is read through the compressed cache. Nothing is parsed and nothing diverges within
an action, so that small models can be told apart by the paired difference to full attention.

Score       the share of tokens whose likeliest next token was the recorded one. `nll` is the mean loss in nats;
            `value_agreement` and `value_nll` are of the tokens of argument values alone. The first token is predicted
            by the prefill, without compression, and does not count.

Not here: traces and what is asked of them (`task.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.shapes import ModelShape
from methods.base import SelectiveAttention
from tasks.agent_traces.actions import action_of, values
from tasks.agent_traces.task import AgentTraces
from tasks.base import Sample
from tasks.forced import ForcedContinuation, ForcedTask, ForcedWatch, Outcome
from tasks.lazy import LazySamples
from tasks.prompt import first_ids


class AgentForced(ForcedTask, AgentTraces):
    """A sample for each decision, whose recorded action is fed."""

    name = "agent_forced"
    version = 1
    asking: Any = None  # no turns: each decision has a prompt of its own

    def __init__(self, params: Any, data_dir: str | None, seed: int) -> None:
        AgentTraces.__init__(self, replace(params, mode="query_aware"), data_dir, seed)
        self.turns, self.asking = self.asking, None

    def check(self, shape: ModelShape) -> None:
        AgentTraces.check(self, shape)
        self.notes[0] = "a score says how often a token is the recorded one, not whether the job is done"

    def samples(self, tokenizer: Any) -> Sequence[Sample]:
        self.asking = self.turns
        try:
            return Fed(AgentTraces.samples(self, tokenizer), tokenizer, self)
        finally:
            self.asking = None

    def watch(
        self, sample: Sample, continuation: ForcedContinuation, rows: Sequence[SelectiveAttention]
    ) -> ForcedWatch:
        assert continuation.forced is not None
        return Agreed(continuation.forced, len(rows), sample.fields["value_tokens"])


class Fed(LazySamples):
    """Decisions as prompts of tokens, with the recorded action behind them."""

    def __init__(self, samples: Sequence[Sample], tokenizer: Any, task: AgentForced) -> None:
        self.samples, self.tokenizer, self.task = samples, tokenizer, task

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, i: int) -> Sample:
        self.task.asking = self.task.turns  # drawn samples are made when they are asked for
        try:
            one = self.samples[i]
        finally:
            self.task.asking = None
        ids = first_ids(self.tokenizer, one.context + one.question)
        forced = fed(self.tokenizer, one.references[0])
        places = value_places(self.tokenizer, one.references[0])
        fields = {**one.fields, "value_tokens": [at for at in places if at < len(forced)]}
        return replace(
            one, context="", question="", ids=ids, forced=forced, max_new_tokens=len(forced), is_rendered=False,
            fields=fields,
        )  # fmt: skip


def fed(tokenizer: Any, reference: str) -> tuple[int, ...]:
    """The recorded action's tokens and the end behind them: two at least."""
    ids: list[int] = tokenizer.encode(reference, add_special_tokens=False)
    end: int | None = tokenizer.eos_token_id
    return (*ids, ids[-1] if end is None else end)


def value_places(tokenizer: Any, reference: str) -> list[int]:
    """Which tokens of an action hold argument values; all of them where a value is the whole answer."""
    action, n = action_of(reference), len(tokenizer.encode(reference, add_special_tokens=False))
    if action["kind"] != "call":
        return list(range(n))
    spans = [(at, at + len(value)) for value in values(action["arguments"]) if (at := reference.rfind(value)) >= 0]
    offsets = tokenizer(reference, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [i for i, (a, b) in enumerate(offsets) if any(a < end and start < b for start, end in spans)]


class Agreed:
    """Whether each next token is the recorded one, and its loss, for all rows."""

    def __init__(self, forced: Sequence[int], n_rows: int, value_tokens: Sequence[int]) -> None:
        self.targets = list(forced[1:])
        self.of_values = torch.tensor([i - 1 for i in value_tokens if i > 0], dtype=torch.long)
        self.losses = torch.zeros(n_rows, len(self.targets), dtype=torch.float64)
        self.hits = torch.zeros_like(self.losses)
        self.step = 0

    def attended(self, layer: int, order: Sequence[int], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Only what comes out at the top counts."""

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
        if len(self.of_values):
            measures["value_agreement"] = hits[self.of_values].mean().item()
            measures["value_nll"] = losses[self.of_values].mean().item()
        return Outcome(hits.mean().item(), {"measures": measures, "n_targets": len(self.targets)})
