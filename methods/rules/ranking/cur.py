"""What CUR may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/ranking/cur.py`).
"""

from dataclasses import dataclass

from engine.budget import Budget, BudgetRequest
from engine.checks import each_one_of, whole_numbers
from engine.shapes import ModelShape
from methods.rules.base import Rules

LEVERAGES = ("kv_product", "kv_avg", "key", "value")


class CURRules(Rules):
    title = "CUR"
    drops = True
    is_scorer = True
    comparable = "heads"  # scores of a head add up to 1

    @dataclass(frozen=True)
    class Params:
        leverage: str
        window: int | None
        rest: str
        n_sink: int
        sketch: int | None
        seed: int

        def __post_init__(self) -> None:
            each_one_of("method", self, leverage=LEVERAGES, rest=("whole", "scaled"))
            whole_numbers("method", self, window=1, n_sink=0, sketch=1, seed=0)

    @dataclass(frozen=True)
    class Plan:
        n_sink: int  # first tokens, always kept

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return CURRules.Plan(params.n_sink if params.n_sink < budget.tokens else budget.tokens // 4)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = [] if params.leverage == "kv_product" else [params.leverage]
        notes += ["global"] * (params.window is None) + ["sketched"] * (params.sketch is not None)
        name = super().label(params, request)
        return name.replace(cls.title, f"{cls.title} ({', '.join(notes)})") if notes else name
