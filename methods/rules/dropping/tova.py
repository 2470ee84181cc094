"""What TOVA may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/tova.py`).
"""

from dataclasses import dataclass

from engine.budget import Budget, BudgetRequest
from engine.checks import each_one_of
from engine.shapes import ModelShape
from methods.rules.base import Rules


class TOVARules(Rules):
    title = "TOVA"
    drops = True
    comparable = "set"
    is_scorer = True

    @dataclass(frozen=True)
    class Params:
        evict: str

        def __post_init__(self) -> None:
            each_one_of("method", self, evict=("always", "prompt"))

    @dataclass(frozen=True)
    class Plan:
        tokens: int  # that a layer keeps, the same for all of its heads
        n_last: int  # of them, last ones of the prompt that stay whatever their score

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return TOVARules.Plan(budget.tokens, 0 if params.evict == "always" else 1)

    @classmethod
    def evicts(cls, params: Params) -> str:
        return "TOVA evicts while it decodes; use method.evict=prompt with it" if params.evict == "always" else ""

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        name = super().label(params, request)
        return name if params.evict == "always" else name.replace(cls.title, f"{cls.title} (one-shot)")
