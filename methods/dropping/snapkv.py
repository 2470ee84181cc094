"""SnapKV (Li et al., 2024): keep what the end of the prompt looks at, drop the rest once and for good.

The last queries of the prompt ("observation window") vote with their attention weights for the tokens before them. The
votes are smoothed along the sequence, so that a winner's neighbours win with it. Every KV head keeps its winners and
the window; nothing is dropped while decoding.

Paper     arXiv:2404.14469, 2024; Li, Yuhong; SnapKV: LLM Knows What You are Looking for Before Generation
Symbols   paper L_obs, kernel size, max_capacity_prompt = `window`, `kernel`, `cap` (window included).
Per step  moved: nothing; resident: h_kv * (cap + t) tokens at step t, the current one included.
Differs   K and V are not repeated to the query heads first, which costs the authors g times the memory: a KV head keeps
          one set, from its group's mean score, as KVCache-Factory and kvpress do. `reduce: query_head` gives every
          query head the authors' own set; the KV head keeps their union, and the ledger counts that. Votes stay in
          float32; the authors round them to the model's dtype, and many become equal. Equal scores: the lower
          position is kept.
          A window that would fill the budget shrinks to half of it; `method_report` says so.
Fails     where the question comes after the compression, or later text needs what the window did not look at.
Figures   drop after the prompt, by its last queries: #D17E09, up, -
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.engine.budget import Budget, key_bytes
from kvbench.engine.declared import Kernel, Window
from kvbench.engine.observe import LastQueries, Observation, window_scores
from kvbench.engine.placement import Stay
from kvbench.engine.selection import Cost
from kvbench.engine.shapes import ModelShape
from kvbench.methods.base import Variant
from kvbench.methods.scorers import keep_top, pool_scores, reduce_group, window_votes
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits


def fit_window(cap: int, window: int) -> int:
    """The observation window within `cap` tokens; it must leave some of them for the past."""
    return window if cap > window else max(1, cap // 2)


class WindowVotes(ScoringMethod):
    """A scorer by the votes of the prompt's last queries, in front of which a layer keeps the winners."""

    @classmethod
    def observations(cls, params: Any, plan: Any) -> tuple[Observation, ...]:
        return (LastQueries(params.window),)

    def scores(self, layer: int) -> Tensor:
        """The window's votes for the tokens before it, pooled, (1, h_kv, s - window), or h for `query_head`."""
        params, plan, trace = self.params, self.plan, self.trace
        found = window_votes(trace, LastQueries(params.window), plan.window, layer)
        return pool_scores(reduce_group(found, trace.shape.h_kv, params.reduce), params.kernel, params.pooling)

    def n_free(self) -> int:
        return self.plan.cap - self.plan.window

    def scorer(self) -> Hashable:
        """The scorer's settings besides the window's length: methods that share them share their scores."""
        return "votes", self.params.kernel, self.params.pooling, self.params.reduce

    def report(self) -> dict[str, Any]:
        return super().report() | self.shrunk_window()

    def shrunk_window(self) -> dict[str, Any]:
        """The window, where the budget left room for a shorter one than was asked for."""
        return {"window": self.plan.window} if self.plan.window < self.params.window else {}


class SnapKV(WindowVotes):
    title = "SnapKV"
    comparable = "heads"

    @dataclass(frozen=True)
    class Params:
        window: Window
        kernel: Kernel
        pooling: Literal["max", "avg"]
        reduce: Literal["mean", "sum", "max", "query_head"]

    @dataclass(frozen=True)
    class Plan:
        """What a layer keeps of the prompt."""

        cap: int  # tokens per KV head, the window included
        window: int  # the prompt's last tokens

    params: Params
    plan: Plan

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        is_wide = params.reduce == "query_head"
        return replace(super().traits_of(params), extends=not is_wide, judges="" if is_wide else "queries")

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return SnapKV.Plan(budget.tokens, fit_window(budget.tokens, params.window))

    def n_summed(self) -> int:
        return self.plan.window

    def extend(self, layer: int, q: Tensor, grown: Variant) -> Stay | None:
        """The feed's last queries vote for all that is held before them; neighbours are those in the cache."""
        at, store, plan = self.store[layer], self.store, grown.plan
        window, keys = min(plan.window, q.shape[2]), at.keys()
        n = keys.shape[2]
        if n <= plan.cap:
            return None
        scores = self.voted(window_scores(q[:, :, -window:], keys, self.trace.softmax[layer]))
        best = keep_top(scores, plan.cap - window)
        last = torch.arange(n - window, n, device=best.device).expand(*best.shape[:2], -1)
        room = store.n_new - (at.n_seen - self.trace.s_prompt)
        return Stay(torch.cat([best, last], -1), room, cost=Cost(rebuilt_bytes=n * key_bytes(self.trace.shape, 1)))

    def votes(self, layer: int, q: Tensor, keys: Tensor, heads: slice) -> Tensor:
        return self.voted(window_scores(q, keys, self.trace.softmax[layer].of(heads)), 1)[0, 0]

    def voted(self, votes: Tensor, h_kv: int | None = None) -> Tensor:
        """Votes of query heads, (1, h, n), as scores of so many KV heads, by default the model's."""
        reduced = reduce_group(votes, h_kv or self.trace.shape.h_kv, self.params.reduce)
        return pool_scores(reduced, self.params.kernel, self.params.pooling)
