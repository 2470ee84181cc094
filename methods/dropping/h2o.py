"""H2O (Zhang et al., 2023): keep what has received the most attention so far, and the latest tokens; evict as you go.

Every token's score is the attention that it got from all queries since it is there ("heavy hitters" have most). Half
of a cache of fixed size is for them, half for recent tokens. At each step the newest token comes in, and the lowest
score among those that are not recent goes.

Paper     arXiv:2306.14048, 2023; Zhang, Zhenyu; H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
          Language Models
Symbols   paper: heavy budget, recent budget, accumulated score = `n_heavy`, `n_recent`, `sums`; M = `tokens`.
Per step  moved: nothing; resident: h_kv * (M + 1) tokens, the current one included, and 4 * h_kv * (M + 1) bytes of
          scores. It attends to M + 1 tokens however long the answer is, fewer than methods that keep what is generated.
Differs   - the authors' class that removes tokens is the reference (not the one that masks them: it hides one token
            too many for a step), and it has no query groups: here a KV head keeps one set, by its group's sum
            (`reduce: max` is KVCache-Factory's other choice). Its default is a set per query head, `query_head`, for
            `on_top` alone: the KV head keeps the union.
          - scores are float32; the authors round each weight to the model's dtype before they add it up.
          - `n_sink` protects first tokens, 32 as in all methods with sinks and a window here; PQCache's authors have
            them on top of the ratio (method=h2o_pqcache), H2O's have none (method=h2o_paper).
          - `generated: on_top` is KVCache-Factory's form: chosen once, nothing is evicted while decoding.
          - of equal scores the higher position goes.
Fails     where an answer needs what the prompt did not look at. Sums over the whole prompt are far above what a few
          steps can add, so generated tokens leave as soon as they are no longer recent, and early tokens, which more
          queries saw, are favoured over late ones.
Figures   drop while decoding: #BE3383, down, -
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvbench.engine.budget import Budget, split
from kvbench.engine.declared import Share, Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import ColumnSums, Observation
from kvbench.engine.placement import Kept, Stay
from kvbench.engine.selection import Cost
from kvbench.engine.shapes import ModelShape
from kvbench.methods.base import Variant
from kvbench.methods.evicting import SCORE_BYTES, Evicting, Eviction
from kvbench.methods.scorers import keep_top, reduce_group
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits


class H2O(Evicting, ScoringMethod):
    title = "H2O"
    version = 2
    comparable = "heads"
    wants_weights = True

    @dataclass(frozen=True)
    class Params:
        n_sink: Tokens
        heavy_share: Share
        reduce: Literal["sum", "max", "query_head"]
        generated: Literal["inside", "on_top"]
        budget_rule: Literal["fair", "official"]

        def __post_init__(self) -> None:
            if self.reduce == "query_head" and self.generated == "inside":
                raise ConfigError(
                    "method.reduce=query_head evicts nothing while decoding; use it with method.generated=on_top"
                )

    @dataclass(frozen=True)
    class Plan:
        """How a budget is divided; the current token comes on top."""

        n_sink: int
        n_heavy: int
        n_recent: int

        @property
        def tokens(self) -> int:
            return self.n_sink + self.n_heavy + self.n_recent

    params: Params
    plan: Plan

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if params.budget_rule == "official":
            return official_shares(params, budget)
        fair = split(budget.tokens, params.n_sink, 1 - params.heavy_share)
        return H2O.Plan(fair.n_sink, fair.k, fair.n_local)

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        traits, inside = super().traits_of(params), params.generated == "inside"
        return replace(
            traits,
            extends=inside,
            evicts="H2O evicts while it decodes; use method.generated=on_top with it" if inside else "",
            unreadable="each query head keeps tokens of its own" if traits.is_query_wide else "",
        )

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (ColumnSums(),)

    def ends(self) -> tuple[int, int]:
        return self.plan.n_sink, self.plan.n_recent

    def n_free(self) -> int:
        return self.plan.n_heavy

    def received(self, layer: int) -> Tensor:
        """Attention that every token of the prompt received, (1, h_kv or h, s)."""
        trace = self.trace
        return reduce_group(trace.observed(ColumnSums(), layer), trace.shape.h_kv, self.params.reduce)

    def scores(self, layer: int) -> Tensor:
        return self.received(layer)[..., self.plan.n_sink : self.trace.s_prompt - self.plan.n_recent]

    def place(self, layer: int, best: Tensor) -> Kept:
        """Keep all chosen tokens alike: recent ones, too, may go while the answer grows."""
        plan, s = self.plan, self.trace.s_prompt
        if s <= plan.tokens:
            every = torch.arange(s, device=best.device)
            kept = every.expand(1, best.shape[1], -1)
        else:
            sinks, recent = torch.arange(plan.n_sink), torch.arange(s - plan.n_recent, s)
            ends = [x.to(best.device).expand(1, best.shape[1], -1) for x in (sinks, recent)]
            kept = torch.cat([ends[0], best, ends[1]], -1)
        room = self.store.n_new
        if self.params.generated == "inside":
            room = min(room, plan.tokens + 1 - kept.shape[-1])
        self.sums[layer] = self.received(layer).gather(-1, kept)
        return Kept(kept, capacity=room)

    def eviction(self) -> Eviction | None:
        """Evict the lowest sum once the cache is full."""
        plan = self.plan
        if self.params.generated == "on_top":
            return None
        return Eviction(self.params.reduce, plan.tokens, n_first=plan.n_sink, n_last=plan.n_recent)

    def extend(self, layer: int, q: Tensor, grown: Variant) -> Stay:
        """The cache grows, for tokens to come. Where nothing left it while it was read, the lowest sums leave now."""
        at, plan = self.store[layer], grown.plan
        positions, sums = at.positions(), self.sums[layer]
        n = positions.shape[-1]
        ends = (positions < plan.n_sink) | (positions >= at.n_seen - plan.n_recent)
        stays = keep_top(sums.masked_fill(ends, torch.inf), min(n, plan.tokens))
        self.sums[layer] = sums.gather(-1, stays)
        room = min(self.store.n_new - (at.n_seen - self.trace.s_prompt), plan.tokens + 1 - stays.shape[-1])
        self.plan = plan
        return Stay(stays, room, cost=Cost(rebuilt_bytes=SCORE_BYTES * sums.numel()))

    def protected(self, layer: int) -> Sequence[int]:
        n = self.store[layer].n_seen
        past = self.trace.s_prompt if self.params.generated == "on_top" else n - 1
        start = max(0, past - self.plan.n_recent)
        return sorted({*range(min(self.plan.n_sink, n)), *range(start, n)})


def official_shares(params: H2O.Params, budget: Budget) -> H2O.Plan:
    """The integers of PQCache's authors, sinks on top of the ratio; in double precision, as they compute them.

    They compensate by calling with a larger ratio.
    """
    paid = budget.tokens > budget.nominal_tokens
    ratio = float(budget.ratio + (budget.comm / 2 if paid else 0))
    n_sink = min(params.n_sink, budget.s_prompt)
    besides = budget.s_prompt - n_sink
    n_heavy = int(ratio * float(params.heavy_share) * besides)
    n_recent = int(ratio * float(1 - params.heavy_share) * besides)
    if n_sink + n_heavy + n_recent < 1:
        raise ConfigError(
            f"a share of {ratio:.3g} keeps no token of a prompt of {budget.s_prompt} with "
            "method.budget_rule=official; raise ratio or budget"
        )
    return H2O.Plan(n_sink, n_heavy, n_recent)
