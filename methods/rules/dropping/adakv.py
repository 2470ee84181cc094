"""What Ada-KV may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/adakv.py`).
"""

from dataclasses import dataclass
from fractions import Fraction

from engine.budget import Budget, BudgetRequest, show
from engine.checks import each_one_of
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules
from methods.rules.dropping.allocators import Allocator
from methods.rules.dropping.snapkv import SnapKVRules, fit_window


class AdaKVRules(Rules):
    title = "Ada-SnapKV"
    drops = True
    comparable = "heads"

    @dataclass(frozen=True)
    class Params(SnapKVRules.Params):
        alpha: Fraction
        floor: str
        normalize: bool
        skip: int
        match_published: bool

        def __post_init__(self) -> None:
            super().__post_init__()
            each_one_of("method", self, floor=("mix", "protect"))
            if not 0 <= self.alpha <= 1:
                raise ConfigError(
                    f"method.alpha={show(self.alpha)} is out of range; it is a share from 0 (heads share all) to 1 "
                    "(all heads alike)"
                )
            if self.skip < 0:
                raise ConfigError(
                    f"method.skip={self.skip} is out of range; it is a number of first layers whose heads are alike"
                )
            if self.floor == "protect" and (self.normalize or self.match_published):
                raise ConfigError(
                    "method.floor=protect is kvpress' rule, which has no normalize and no match_published; "
                    "use method.floor=mix with these"
                )

    @dataclass(frozen=True)
    class Plan(SnapKVRules.Plan):
        """What a layer keeps of the prompt, per KV head in the mean over its heads."""

    @classmethod
    def own_allocator(cls, params: Params) -> Allocator:
        return Allocator("head_mix" if params.floor == "mix" else "head_protect", params.alpha)

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        n_layers = len(shape.attention_layers)
        if params.skip > n_layers:
            raise ConfigError(
                f"method.skip={params.skip} is more than the {n_layers} layers of {shape.name}; use at most {n_layers}"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return AdaKVRules.Plan(budget.tokens, fit_window(budget.tokens, params.window))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        label = super().label(params, request)
        return label if params.floor == "mix" else label.replace(cls.title, f"{cls.title}, protect")
