"""What SnapKV may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/snapkv.py`).
"""

from dataclasses import dataclass

from engine.budget import Budget
from engine.checks import each_one_of
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules

POOLINGS = ("max", "avg")
REDUCTIONS = ("mean", "sum", "max", "query_head")


def fit_window(cap: int, window: int) -> int:
    """The observation window within `cap` tokens; it must leave some of them for the past."""
    return window if cap > window else max(1, cap // 2)


class SnapKVRules(Rules):
    title = "SnapKV"
    drops = True
    comparable = "heads"
    is_scorer = True

    @dataclass(frozen=True)
    class Params:
        window: int
        kernel: int
        pooling: str
        reduce: str

        def __post_init__(self) -> None:
            if self.window < 1:
                raise ConfigError(f"method.window={self.window} is out of range; it is a number of tokens, at least 1")
            if self.kernel < 1 or self.kernel % 2 == 0:
                raise ConfigError(
                    f"method.kernel={self.kernel} has no middle; use an odd number of tokens, 1 for no pooling"
                )
            each_one_of("method", self, pooling=POOLINGS, reduce=REDUCTIONS)

    @dataclass(frozen=True)
    class Plan:
        """What a layer keeps of the prompt."""

        cap: int  # tokens per KV head, the window included
        window: int  # the prompt's last tokens

    @classmethod
    def extends(cls, params: Params) -> bool:
        return params.reduce != "query_head"

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return SnapKVRules.Plan(budget.tokens, fit_window(budget.tokens, params.window))
