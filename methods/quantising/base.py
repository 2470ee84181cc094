"""`QuantisingMethod`: every token is kept and attended to, as codes, in a quantized cache.

Not here: any method's cache; a layer of codes (`engine/caches/quantized.py`).
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from kvbench.engine.books.footprint import Footprint, too_small
from kvbench.engine.budget import Budget, BudgetRequest, resolve
from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import Coded, Quantize
from kvbench.engine.shapes import ModelShape
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.rules import QuantisingRules


class QuantisingMethod(QuantisingRules, SelectiveAttention):
    """A method that attends to all tokens, which are codes."""

    drops = False
    changes = True
    no_growth = "attends to every token, in fewer bits, so that nothing of it could grow"
    takes = ("memory",)

    @classmethod
    def check(cls, params: Any, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        cls.check_shape(params, shape)
        if not request.memory_alone and request.ratio != 1:
            raise ConfigError(
                f"{request.label()} drops tokens, and {cls.title} attends to everything; give memory= alone, ratio=1, "
                "or compose it with a method that drops"
            )

    @classmethod
    def budget_for(cls, params: Any, request: BudgetRequest, s_prompt: int) -> Budget:
        whole = replace(request, ratio=Fraction(1), tokens=None)
        return replace(resolve(whole, s_prompt, drops=False), memory_alone=request.memory_alone)

    @classmethod
    def candidates(cls, params: Any, budget: Budget, shape: ModelShape) -> Iterable[Any]:
        """Plans from the largest to the smallest; the first that fits is taken."""
        raise NotImplementedError

    @classmethod
    def footprint(cls, params: Any, plan: Any, budget: Budget, shape: ModelShape) -> Footprint:
        return Footprint(cls.code_bytes(plan, budget.s_prompt, shape), n_whole=len(cls.whole_layers(params, shape)))

    @classmethod
    def fit(cls, params: Any, budget: Budget, shape: ModelShape) -> tuple[Budget, Any]:
        shares: list[Fraction] = []
        for plan in cls.candidates(params, budget, shape):
            held = cls.footprint(params, plan, budget, shape)
            if held.fits(budget, shape):
                return budget, plan
            shares.append(held.share(shape, budget.s_prompt))
        smaller = f", {words}" if (words := cls.smaller(params, shape)) else ""
        composed = f", or method=snapkv compose={cls.named()}" if cls.traits.composes else ""
        asked = BudgetRequest(None, None, Fraction(0), memory=budget.memory)
        title, least = cls.label(params, asked), min(shares, default=Fraction(1))
        raise too_small(budget, title, least, smaller + composed, holds_always=cls.traits.codes_singly)

    @classmethod
    def smaller(cls, params: Any, shape: ModelShape) -> str:
        """Words for another method that needs fewer bytes than the least of this one, such as `method=nvfp4`; or ""."""
        return ""

    @classmethod
    def named(cls) -> str:
        """The method's name on a command line."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    @abstractmethod
    def quantize(cls, params: Any, plan: Any) -> Quantize:
        """The quantizer that makes codes of a layer's K and V."""

    def arrange(self, layer: int) -> Coded:
        return Coded(self.quantize(self.params, self.plan))
