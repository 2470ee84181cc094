"""What InfiniGen may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/infinigen.py`).
"""

from dataclasses import dataclass
from fractions import Fraction

from engine.books.footprint import Footprint, held
from engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, show
from engine.checks import each_one_of, whole_number
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules

CHOICES = {
    "comm_mode": ("native", "matched"),
    "channels": ("query_key", "query"),
    "agg": ("query_head", "group_max", "group_mean"),
    "generated": ("stay", "compete"),
    "lookahead": (0, 1),
}


class InfiniGenRules(Rules):
    title = "InfiniGen"
    drops = False
    skips = True

    @dataclass(frozen=True)
    class Params:
        comm_mode: str
        partial_ratio: Fraction
        skew: bool
        channels: str
        alpha: float | None
        agg: str
        generated: str
        lookahead: int
        full_layers: int

        def __post_init__(self) -> None:
            each_one_of("method", self, **CHOICES)
            if not 0 < self.partial_ratio <= 1:
                raise ConfigError(
                    f"method.partial_ratio={show(self.partial_ratio)} is out of range; it is a share of the "
                    "channels above 0 and at most 1, like 0.2"
                )
            if self.alpha is not None and not 0 < self.alpha < float("inf"):
                raise ConfigError(
                    f"method.alpha={self.alpha} is out of range; use a number above 0, such as 4, or null for "
                    "as many tokens as the budget has"
                )
            whole_number("method.full_layers", self.full_layers, 0)
            if self.lookahead and self.full_layers == 0:
                raise ConfigError(
                    "method.full_layers=0 has a first layer without a layer below to look ahead from; use "
                    "method.full_layers=1 or more, or method.lookahead=0"
                )

    @dataclass(frozen=True)
    class Plan:
        n_channels: int
        k_most: int  # tokens that a head may select

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        if params.comm_mode == "native" and int(params.partial_ratio * shape.d_h) < 1:
            raise ConfigError(
                f"method.partial_ratio={show(params.partial_ratio)} is no channel of the {shape.d_h} of "
                f"{shape.name}; use method.partial_ratio=1/{shape.d_h} or more"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if params.comm_mode == "native":
            return InfiniGenRules.Plan(int(params.partial_ratio * shape.d_h), budget.tokens)
        return InfiniGenRules.Plan(max(1, round(budget.comm * shape.d_h)), budget.tokens)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = ["matched"] if params.comm_mode == "matched" else []
        notes += [] if params.alpha is None else [f"alpha={params.alpha:g}"]
        notes += [] if params.lookahead else ["lookahead=0"]
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        elements = shape.h_kv * budget.s_prompt * plan.n_channels
        elements += shape.h * plan.n_channels * shape.d_model if params.lookahead else 0
        elements += shape.h_kv * shape.d_h**2 if params.skew else 0
        fetched = plan.k_most * (shape.g if params.agg == "query_head" else 1)
        return held(budget, shape, 0, ELEMENT_BYTES * elements, fetched, cls.n_whole(params, shape))
