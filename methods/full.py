"""Full attention: nothing is dropped, nothing is moved. What every method is compared with.

Paper     none: full attention
Per step  moved: nothing; resident: K and V of all tokens.
Differs   ratio, budget, comm and cache have no meaning here: it has no budget, and runs once per sweep.
Fails     never; it is what the others approximate.
"""

from dataclasses import dataclass

from kvbench.engine.budget import EVERYTHING, Budget, BudgetRequest, resolve
from kvbench.engine.placement import Whole
from kvbench.engine.shapes import ModelShape
from kvbench.methods.base import SelectiveAttention, Variant


class Full(SelectiveAttention):
    title = "Full"
    drops = False
    has_budget = False

    @dataclass(frozen=True)
    class Params:
        pass

    @classmethod
    def budget_for(cls, params: Params, request: BudgetRequest, s_prompt: int) -> Budget:
        return resolve(EVERYTHING, s_prompt, cls.traits.drops)

    def arrange(self, layer: int) -> Whole:
        return Whole()


def full_attention(shape: ModelShape, s_prompt: int) -> Variant:
    """Full attention on prompts of so many tokens, which others are compared with."""
    return Full.variant_for(Full.Params(), EVERYTHING, shape, s_prompt)
