"""What SparQ may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/sparq.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import floor

from engine.books.footprint import Footprint, held
from engine.budget import Budget, BudgetRequest, show, split
from engine.checks import each_one_of, share, tokens
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules


class SparQRules(Rules):
    title = "SPARQ"
    drops = False

    @dataclass(frozen=True)
    class Params:
        n_sink: int
        local_share: Fraction
        reallocate: bool
        layout: str
        generated: str
        budget_rule: str

        def __post_init__(self) -> None:
            each_one_of(
                "method",
                self,
                layout=("columns", "rows"),
                generated=("on_top", "inside"),
                budget_rule=("fair", "official"),
            )
            tokens("method.n_sink", self.n_sink)
            share("method.local_share", self.local_share)

    @dataclass(frozen=True)
    class Plan:
        """How a budget is divided, and how many components find the selected tokens."""

        n_sink: int
        n_window: int  # latest tokens that are always attended to, the current one included
        k: int  # tokens that a KV head selects
        r: int

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if request.ratio != 1:
            n_components(request.comm, shape.d_h)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        r = 0 if budget.attends_all else n_components(budget.comm, shape.d_h)
        if params.budget_rule == "fair":
            fair = split(budget.tokens, params.n_sink, params.local_share)
            return SparQRules.Plan(fair.n_sink, fair.n_local + 1, fair.k, r)
        # As PQCache's authors compute them, in double precision; sinks are on top.
        share = budget.s_prompt * float(budget.ratio)
        n_local = int(share * float(params.local_share))
        n_sink = min(params.n_sink, budget.s_prompt)
        return SparQRules.Plan(n_sink, n_local + 1, int(share) - n_local, r)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        return held(budget, shape, plan.n_sink + plan.n_window - 1, fetched=plan.k)


def n_components(comm: Fraction, d_h: int) -> int:
    """How many of `d_h` components `comm` pays for."""
    r = floor(comm * d_h)
    if r < 1:
        raise ConfigError(f"comm={show(comm)} pays for none of the {d_h} components of a key; use comm=1/{d_h} or more")
    return r
