"""What KeyDiff may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/keydiff.py`).
"""

from dataclasses import dataclass

from engine.budget import Budget, BudgetRequest
from engine.checks import each_one_of, whole_numbers
from engine.shapes import ModelShape
from methods.rules.base import Rules

LABELS = {"simulated": "simulated blocks", "none": "one-shot"}


class KeyDiffRules(Rules):
    title = "KeyDiff"
    drops = True
    comparable = "heads"  # defined, but unpublished: where all keys of a head point one way, pooling starves it
    is_scorer = True

    @dataclass(frozen=True)
    class Params:
        blocks: str
        block_len: int
        evict: str

        def __post_init__(self) -> None:
            each_one_of("method", self, blocks=(*LABELS,), evict=("prompt", "always"))
            whole_numbers("method", self, block_len=1)

    @dataclass(frozen=True)
    class Plan:
        tokens: int  # that every KV head keeps

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return KeyDiffRules.Plan(budget.tokens)

    @classmethod
    def evicts(cls, params: Params) -> str:
        return "KeyDiff evicts while it decodes; use method.evict=prompt with it" if params.evict == "always" else ""

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        """Says how the prompt was read: `simulated` blocks compress keys that an exact prefill has made."""
        return super().label(params, request).replace(cls.title, f"{cls.title} ({LABELS[params.blocks]})")
