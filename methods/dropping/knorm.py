"""Knorm (Devoto et al., 2024), or the L2 norm strategy: keep the tokens whose keys are short.

Tokens with keys of low norm tend to get much attention, in most layers and heads of most models. So a token's score is
minus the norm of its key, and nothing else is looked at: the cheapest scorer that there is, and a control for others.

Paper     arXiv:2406.11430, 2024; Devoto, Alessio; A Simple and Effective L2 Norm-Based Strategy for KV Cache
          Compression
Symbols   paper: skipped layers = the first `full_layers`; kept share, prune_after = the budget's, `prune_after`.
Per step  moved: nothing; resident: h_kv * (tokens + t) tokens at step t, in the first `full_layers` layers all; no
          metadata.
Differs   - the count is the budget's floor; the authors round up (`budget_rule: official`) and leave prompts below
            `prune_after` whole (method=knorm_paper). kvpress rounds down and skips no layer (method=knorm_kvpress).
          - layers that are left whole are outside the budget; `method_report` has the share over all of them as
            `overall_ratio`. `full_layers: 0` is for comparisons at the same overall share.
          - the authors' language modelling prunes again and again while text is read. `every: n` does so after each
            `n` generated tokens; none by default.
          - of equal norms the lower position stays. No token is protected.
          - norms differ in scale from head to head, so that no budget may be divided by them.
          - of latents that all heads share, the mean over the keys that each head makes of them.
Fails     on models that normalise their keys (Qwen3, Gemma3): what is left of the norms is close to noise.
          `norm_spread` of `method_report` has their standard deviation by their mean, of a head in the mean; on such
          models it is small. The first layers show the correlation least.
Figures   drop by keys and values: #969625, pillar, -
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.engine.budget import Budget
from kvbench.engine.declared import Count, Index
from kvbench.engine.placement import Change, Evict, Kept, Placement
from kvbench.engine.shapes import ModelShape
from kvbench.methods.base import overall_ratio
from kvbench.methods.dropping.allocators import Counts
from kvbench.methods.scorers import lowest_slots
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits


def shortness(keys: Tensor) -> Tensor:
    """Minus the norms of keys (..., n, d_h): (..., n) float32."""
    return -torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)


class Knorm(ScoringMethod):
    title = "Knorm"
    judges = "keys"
    skips = True
    comparable = "none"  # norms of two heads have two scales: pooled, one head would win everything

    @dataclass(frozen=True)
    class Params:
        full_layers: Index
        every: Count | None
        prune_after: Index
        budget_rule: Literal["fair", "official"]

    @dataclass(frozen=True)
    class Plan:
        tokens: int  # that every KV head of a compressed layer keeps

    params: Params
    plan: Plan
    score = staticmethod(shortness)
    spreads: list[Tensor]  # of each compressed layer's norms

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if budget.s_prompt < params.prune_after:
            return Knorm.Plan(budget.s_prompt)
        if params.budget_rule == "official":
            return Knorm.Plan(official_count(budget))
        return Knorm.Plan(budget.tokens)

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        goes_on = "Knorm prunes again while it decodes; use method.every=null with it"
        return replace(super().traits_of(params), evicts="" if params.every is None else goes_on)

    def setup(self) -> None:
        self.spreads = []
        self.prunes = self.params.every is not None and self.plan.tokens < self.trace.s_prompt
        self.whole = frozenset(self.skipped)

    def n_free(self) -> int:
        return self.plan.tokens

    def scorer(self) -> Hashable:
        return "shortness of keys"

    def keep_best(self, layer: int, n: Counts) -> Placement:
        norms = -self.shared_scores(layer)
        self.spreads.append((norms.std(-1, correction=0) / norms.mean(-1)).mean())
        return super().keep_best(layer, n)

    def place(self, layer: int, best: Tensor) -> Placement:
        """Keep what was chosen, with room for the answer, or for as much of it as comes before it is pruned."""
        room = self.store.n_new
        if self.prunes and self.params.every is not None:
            room = min(room, self.params.every)
        return Kept(best, capacity=room)

    @property
    def is_still(self) -> bool:
        return self.variant.is_full or not self.prunes

    def behind(self, layer: int, weights: Tensor | None) -> Change | None:
        """Evict the longest keys of all once `every` tokens came."""
        at = self.store[layer]
        n_over = at.n_kept + at.n_window - self.plan.tokens
        if not self.prunes or n_over != self.params.every or layer in self.whole:
            return None
        return Evict(lowest_slots(self.worth(layer, at.keys()), at.positions(), n_over))

    def protected(self, layer: int) -> Sequence[int]:
        n = self.store[layer].n_seen
        if layer in self.whole:
            return range(n)
        return range(n - 1 if self.prunes else self.trace.s_prompt, n)

    def report(self) -> dict[str, Any]:
        share = self.plan.tokens / self.trace.s_prompt
        spread = torch.stack(self.trace.gathered(self.spreads)).mean().item()
        return super().report() | {"overall_ratio": overall_ratio(self, share), "norm_spread": spread}


def official_count(budget: Budget) -> int:
    """The authors' rounding, up, of a product in double precision, as they compute it.

    Where `comm` is paid back, the share is larger by half of it.
    """
    paid = budget.tokens > budget.nominal_tokens
    share = float(budget.ratio + (budget.comm / 2 if paid else 0))
    return min(ceil(share * budget.s_prompt), budget.s_prompt)
