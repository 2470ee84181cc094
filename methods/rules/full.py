"""What Full may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/full.py`).
"""

from dataclasses import dataclass
from fractions import Fraction

from engine.budget import Budget, BudgetRequest, resolve
from methods.rules.base import Rules

EVERYTHING = BudgetRequest(ratio=Fraction(1), tokens=None, comm=Fraction(0))


class FullRules(Rules):
    title = "Full"
    drops = False
    has_budget = False

    @dataclass(frozen=True)
    class Params:
        pass

    @classmethod
    def budget_for(cls, request: BudgetRequest, s_prompt: int) -> Budget:
        return resolve(EVERYTHING, s_prompt, cls.drops)
