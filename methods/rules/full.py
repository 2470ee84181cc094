"""What Full may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/full.py`).
"""

from dataclasses import dataclass

from engine.budget import EVERYTHING, Budget, BudgetRequest, resolve
from methods.rules.base import Rules


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
