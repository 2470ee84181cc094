"""What Knorm may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/knorm.py`).
"""

from dataclasses import dataclass
from math import ceil

from engine.budget import Budget
from engine.checks import each_one_of, whole_numbers
from engine.shapes import ModelShape
from methods.rules.base import Rules


class KnormRules(Rules):
    title = "Knorm"
    drops = True
    is_scorer = True
    skips = True
    comparable = "none"  # norms of two heads have two scales: pooled, one head would win everything

    @dataclass(frozen=True)
    class Params:
        full_layers: int
        every: int | None
        prune_after: int
        budget_rule: str

        def __post_init__(self) -> None:
            each_one_of("method", self, budget_rule=("fair", "official"))
            whole_numbers("method", self, full_layers=0, every=1, prune_after=0)

    @dataclass(frozen=True)
    class Plan:
        tokens: int  # that every KV head of a compressed layer keeps

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if budget.s_prompt < params.prune_after:
            return KnormRules.Plan(budget.s_prompt)
        if params.budget_rule == "official":
            return KnormRules.Plan(official_count(budget))
        return KnormRules.Plan(budget.tokens)

    @classmethod
    def evicts(cls, params: Params) -> str:
        return "" if params.every is None else "Knorm prunes again while it decodes; use method.every=null with it"


def official_count(budget: Budget) -> int:
    """The authors' rounding, up, of a product in double precision, as they compute it.

    Where `comm` is paid back, the share is larger by half of it.
    """
    paid = budget.tokens > budget.nominal_tokens
    share = float(budget.ratio + (budget.comm / 2 if paid else 0))
    return min(ceil(share * budget.s_prompt), budget.s_prompt)
