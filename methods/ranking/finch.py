"""FINCH (Corallo and Papotti, 2024): keep the tokens that the question looks at, and close the gaps between them.

The question's tokens vote, each weight times the number of tokens before its query, so that later ones count no less.
Keys that stay are turned as if only they had been read. The question must be known before anything is dropped, so that
each question compresses the context anew.

Paper     arXiv:2408.00167, 2024; Corallo, Giulio; FINCH: Prompt-guided Key-Value Cache Compression for Large
          Language Models
Symbols   kvpress' window_size, normalize_scores, chunk_length = `window`, `normalize`, `chunk`, its rerotate_keys the
          run's key `positions`; the authors' target_token = the budget's tokens.
Budget    the question inside; a budget that leaves nothing besides it is refused.
Per step  moved: nothing; resident: the budget's tokens and generated ones, 4 * d_h bytes each per KV head.
Differs   - where the question begins is what the task says; kvpress marks it by a token of its own in the vocabulary.
            What the chat template and the task put after the question, up to the answer, is part of it.
          - the text goes on at its own position, and keys move up to it (`engine/post_processing.py`): distances are
            the same.
          - with `chunk` no token of the question is dropped; `match_published` is kvpress' rule, which may.
          - the authors read the context in segments, each followed by the question and preceded by what was kept. Here
            it is read once (method=finch_paper). Their normalised weights are computed and never used.
          - of equal scores the lower position stays.
Fails     where a fact that the question does not name leads to the one that it asks for; and with several questions,
          each of which needs the context read again.
Figures   drop after the prompt, by its last queries: #E26376, down, :
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Count, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries, Observation, window_scores
from kvbench.engine.placement import Placement
from kvbench.engine.post_processing import PostProcessing
from kvbench.engine.shapes import ModelShape
from kvbench.methods.dropping.allocators import Counts
from kvbench.methods.ranking.chunkkv import published_counts, shares
from kvbench.methods.scorers import keep_top, reduce_group
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits

USUAL_WINDOW = 64  # tokens, where nobody says where the question begins


class Finch(ScoringMethod):
    title = "FINCH"
    post_processing = PostProcessing("contiguous")
    unchangeable = ""  # as published it is changed, whatever `method.chunk`
    no_growth = "chooses tokens by the question that the context ends with"

    @dataclass(frozen=True)
    class Params:
        window: Window | None
        normalize: bool
        per: Literal["head", "layer"]
        chunk: Count | None
        match_published: bool

    @dataclass(frozen=True)
    class Plan:
        cap: int  # tokens per KV head, the question included
        window: int  # the question's tokens
        n_chunk: int | None  # tokens of a chunk

    params: Params
    plan: Plan

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        return replace(
            super().traits_of(params),
            comparable="heads" if params.per == "head" else "set",
            asks_question=params.window is None,
            evicts="" if params.chunk is None else "method.chunk gives every chunk its share; use null with it",
        )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        n, said = budget.tokens, budget.frame.n_question
        if params.window is None and said is None:
            window = min(USUAL_WINDOW, max(1, n // 2))  # to see what a budget comes to, before any prompt is there
        else:
            window = min(params.window or said or 0, budget.s_prompt)
        if window == 0:
            raise ConfigError("the prompt has no question by which FINCH could choose; give method.window=64 instead")
        if window >= n and not budget.attends_all:
            raise ConfigError(
                f"a budget of {n} tokens leaves nothing beside the {window} of the question, which FINCH keeps; raise "
                "ratio or budget"
            )
        return Finch.Plan(n, window, params.chunk)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = ["question-aware" if params.window is None else f"last {params.window}"]
        notes += ["one set per layer"] * (params.per == "layer") + [f"chunks of {params.chunk}"] * bool(params.chunk)
        notes += ["published"] * params.match_published
        return super().label(params, request).replace(cls.title, f"{cls.title} ({', '.join(notes)})")

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (LastQueries(plan.window),)

    @property
    def competes(self) -> bool:
        """The question's tokens are chosen among all others."""
        return self.params.match_published and self.plan.n_chunk is not None

    def ends(self) -> tuple[int, int]:
        return 0, 0 if self.competes else self.plan.window

    def scorer(self) -> Hashable:
        return "finch", self.plan.window, self.params.normalize, self.params.per

    def votes(self, layer: int) -> Tensor:
        """Weights of the question's queries, their mean and the group's: (1, h_kv, n) for the `n` tokens before it."""
        trace, w = self.trace.exact, self.plan.window
        q, keys = trace.observed(LastQueries(w), layer)[:, :, -w:], trace.keys(layer)
        before = torch.arange(keys.shape[2] - w, keys.shape[2], device=q.device, dtype=torch.float32)
        of_rows = before / w if self.params.normalize else torch.full_like(before, 1 / w)
        return reduce_group(window_scores(q, keys, trace.softmax[layer], of_rows), trace.shape.h_kv, "mean")

    def scores(self, layer: int) -> Tensor:
        votes = self.votes(layer)
        votes = votes.sum(1, keepdim=True) if self.params.per == "layer" else votes
        if not self.competes:
            return votes
        return torch.nn.functional.pad(votes, (0, self.plan.window), value=float(votes.max()) + 1)

    def keep_best(self, layer: int, n: Counts) -> Placement:
        if self.plan.n_chunk is None:
            return super().keep_best(layer, n)
        assert isinstance(n, int), "all heads keep one number"
        scores = self.shared_scores(layer)
        parts = shares(scores.shape[-1], self.plan.n_chunk, 0, n)
        if self.params.match_published:
            parts = published_counts(parts, self.budget.ratio)
        best = torch.cat([keep_top(scores[..., where], k) + where.start for where, k in parts], -1)
        return self.place(layer, best.expand(-1, self.trace.shape.h_kv, -1).contiguous())

    def report(self) -> dict[str, Any]:
        return super().report() | {"question_tokens": self.plan.window}
