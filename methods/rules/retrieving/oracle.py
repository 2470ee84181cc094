"""What Oracle may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/oracle.py`).
"""

from dataclasses import dataclass
from fractions import Fraction

from engine.books.footprint import Footprint, held
from engine.budget import Budget, split
from engine.checks import each_one_of, share, tokens
from engine.shapes import ModelShape
from methods.rules.base import Rules

AGGREGATES = ("group_sum", "query_head", "group_max", "group_logit_mean")


class OracleRules(Rules):
    title = "Oracle"
    drops = False
    fetches_more = True
    search_is_free = True

    @dataclass(frozen=True)
    class Params:
        agg: str
        n_sink: int
        local_share: Fraction
        generated: str
        budget_rule: str
        lost_mass: str

        def __post_init__(self) -> None:
            each_one_of(
                "method",
                self,
                agg=AGGREGATES,
                generated=("on_top", "inside"),
                budget_rule=("fair", "official"),
                lost_mass=("renormalise", "spread"),
            )
            tokens("method.n_sink", self.n_sink)
            share("method.local_share", self.local_share)

    @dataclass(frozen=True)
    class Plan:
        """How a budget is divided."""

        n_sink: int
        n_window: int  # latest tokens that are always attended to, the current one included
        k: int

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if params.budget_rule == "fair":
            fair = split(budget.tokens, params.n_sink, params.local_share)
            return OracleRules.Plan(fair.n_sink, fair.n_local + 1, fair.k)
        # In double precision, as the authors compute them; what the top-k leaves is local, the current token included.
        n_sink = min(params.n_sink, budget.s_prompt)
        besides = int((budget.s_prompt - n_sink) * float(budget.ratio))
        k = int(besides * float(1 - params.local_share))
        return OracleRules.Plan(n_sink, max(1, besides - k), k)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        wide = shape.g if params.agg == "query_head" else 1
        return held(budget, shape, plan.n_sink + plan.n_window - 1, fetched=plan.k * wide)
