"""What Quest may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/quest.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from engine.books.footprint import Footprint, held
from engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, show
from engine.checks import each_one_of, whole_numbers
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules

AGGREGATES = ("query_head", "group_mean", "group_max")


class QuestRules(Rules):
    title = "Quest"
    drops = False
    skips = True

    @dataclass(frozen=True)
    class Params:
        comm_mode: str
        page_len: int
        variant: str
        page_generated: bool
        agg: str
        full_layers: int

        def __post_init__(self) -> None:
            each_one_of(
                "method", self, comm_mode=("native", "matched"), variant=("harness", "eval", "serving"), agg=AGGREGATES
            )
            whole_numbers("method", self, page_len=1, full_layers=0)

    @dataclass(frozen=True)
    class Plan:
        page_len: int
        tokens: int  # budget

        def k(self, n: int, variant: str) -> int:
            """Plan that a query attends to of `n` tokens."""
            n_pages = ceil(n / self.page_len)
            if variant == "eval":
                return min(max(3, min(self.tokens, n) // self.page_len), n_pages)
            return min(max(1, self.tokens // self.page_len), n_pages)

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        if request.ratio == 1 or params.variant != "harness":
            return
        if params.comm_mode == "native" and request.comm * params.page_len < 2:
            raise ConfigError(
                f"comm={show(request.comm)} does not pay for bounds of pages of method.page_len={params.page_len} "
                f"tokens; use comm={show(Fraction(2, params.page_len))} or more, or method.comm_mode=matched"
            )
        if request.comm == 0:
            raise ConfigError("comm=0 pays for no page; use 2 / tokens of the prompt or more")

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return f"{cls.title} (matched)" if params.comm_mode == "matched" else cls.title

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if params.comm_mode == "native" or budget.attends_all:
            plan = QuestRules.Plan(params.page_len, budget.tokens)
        else:
            plan = QuestRules.Plan(matched_page_len(budget), budget.tokens)
        if params.variant == "harness" and not budget.attends_all:
            refuse_unaffordable(plan, budget)
        return plan

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        s, started = budget.s_prompt, budget.s_prompt % plan.page_len if params.page_generated else 0
        bounds = 2 * shape.h_kv * shape.d_h * ELEMENT_BYTES * ceil(s / plan.page_len)
        fetched = plan.k(s, params.variant) * plan.page_len * (shape.g if params.agg == "query_head" else 1)
        return held(budget, shape, started, bounds, fetched, cls.n_whole(params, shape))


def matched_page_len(budget: Budget) -> int:
    """The shortest pages whose bounds `comm` pays for, a short last one included."""
    most = floor(budget.comm * budget.s_prompt / 2)  # pages
    if most < 1:
        raise ConfigError(
            f"comm={show(budget.comm)} pays for no page of a prompt of {budget.s_prompt} tokens; "
            f"use comm=2/{budget.s_prompt} or more"
        )
    return max(round(2 / budget.comm), ceil(budget.s_prompt / most))


def refuse_unaffordable(plan: QuestRules.Plan, budget: Budget) -> None:
    """`ConfigError` where `comm` does not pay for the bounds, or the budget for no page."""
    s, page_len = budget.s_prompt, plan.page_len
    n_pages = ceil(s / page_len)
    if 2 * n_pages > budget.comm * s:
        raise ConfigError(
            f"comm={show(budget.comm)} does not pay for bounds of the {n_pages} pages of {page_len} tokens of a prompt "
            f"of {s}; use comm={ceil(1000 * Fraction(2 * n_pages, s)) / 1000} or more, or method.comm_mode=matched"
        )
    if budget.tokens < page_len:
        raise ConfigError(
            f"a budget of {budget.tokens} tokens for a prompt of {s} has no room for a page of {page_len}, as long as "
            f"comm={show(budget.comm)} makes it; use ratio={ceil(Fraction(1000 * page_len, s)) / 1000} or more "
            f"(budget={page_len}), or more comm"
        )
