"""TOVA (Oren et al., 2024): a cache of fixed size, from which the latest query's least attended token goes.

At the prompt's end the last query's weights, averaged over all query heads of the layer, say which tokens stay. While
decoding, every step attends to what is there and to its own token; then its weights say who leaves, which may be the
newest. There is no window, there are no sinks, and no score outlives its step.

Paper     arXiv:2401.06104, 2024; Oren, Matanel; Transformers are Multi-State RNNs
Symbols   paper: multi-state size = `tokens`; weights of the latest query, their mean over heads = `scores`.
Per step  moved: nothing; resident: h_kv * (tokens + 1) tokens, the current one included, and no metadata. It attends to
          tokens + 1 however long the answer is. Its price is that a step's weights must be written down, h of them per
          token, which fused attention avoids.
Differs   - weights and their mean are float32; the authors round weights to the model's dtype, where many are equal.
          - of equal scores the higher position goes; the authors leave it to topk.
          - `evict: prompt` is kvpress' form (method=tova_kvpress): once, at the prompt's end, whose last token stays
            whatever its score; generated tokens come on top.
          All heads of a layer keep one set, so that a budget per head has no meaning here; one per layer has.
Fails     where an answer needs what the latest query does not look at: a token of low weight is gone at once, also one
          that the next step would have asked for.
Figures   drop while decoding: #CA2F42, plus, --
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.observe import MeanWeights, Observation
from kvbench.engine.placement import Kept, Placement, Stay
from kvbench.engine.shapes import ModelShape
from kvbench.methods.base import Variant
from kvbench.methods.evicting import Evicting, Eviction, grown_cache
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits

LAST_QUERY = MeanWeights(1)


class TOVA(Evicting, ScoringMethod):
    title = "TOVA"
    comparable = "set"
    unreadable = ""  # the weights of a chunk's last query are those of its own step

    @dataclass(frozen=True)
    class Params:
        evict: Literal["always", "prompt"]

    @dataclass(frozen=True)
    class Plan:
        tokens: int  # that a layer keeps, the same for all of its heads
        n_last: int  # of them, last ones of the prompt that stay whatever their score

    params: Params
    plan: Plan

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return TOVA.Plan(budget.tokens, 0 if params.evict == "always" else 1)

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        on = params.evict == "always"
        evicts = "TOVA evicts while it decodes; use method.evict=prompt with it" if on else ""
        return replace(super().traits_of(params), extends=on, evicts=evicts)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        name = super().label(params, request)
        return name if params.evict == "always" else name.replace(cls.title, f"{cls.title} (one-shot)")

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (LAST_QUERY,)

    def ends(self) -> tuple[int, int]:
        return 0, self.plan.n_last

    def scores(self, layer: int) -> Tensor:
        weights = self.trace.observed(LAST_QUERY, layer)  # (1, s)
        return weights[:, : self.trace.s_prompt - self.plan.n_last].unsqueeze(0)  # (1, 1, n)

    def n_free(self) -> int:
        return self.plan.tokens - self.plan.n_last

    def scorer(self) -> Hashable:
        return "the last query's weights"

    def place(self, layer: int, best: Tensor) -> Placement:
        """Keep what was chosen, with room for the answer, or for as much of it as comes before the first eviction."""
        if self.params.evict == "prompt":
            return super().place(layer, best)
        room = min(self.store.n_new, self.plan.tokens + 1 - best.shape[-1])
        return Kept(best, capacity=room)

    def extend(self, layer: int, q: Tensor, grown: Variant) -> Stay:
        """The cache grows, for tokens to come: what was read left it token by token."""
        self.plan = grown.plan
        return grown_cache(self, layer, self.plan.tokens)

    def eviction(self) -> Eviction | None:
        """Evict from every head, once it holds more than `tokens`, the token that this step looked at least."""
        if self.params.evict == "prompt":
            return None
        return Eviction("mean", self.plan.tokens, adds_up=False, by_layer=True)

    def protected(self, layer: int) -> Sequence[int]:
        n = self.store[layer].n_seen
        return range(n - 1 if self.params.evict == "always" else self.trace.s_prompt - 1, n)
