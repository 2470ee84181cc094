"""What R-KV may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/decoding/rkv.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from engine.checks import each_one_of, share
from engine.errors import ConfigError
from methods.rules.decoding.schedule import DecodingRules, check_schedule, schedule_notes


class RKVRules(DecodingRules):
    title = "R-KV"

    @dataclass(frozen=True)
    class Params:
        interval: int
        window: int
        kernel: int
        mix: Fraction
        order: str
        schedule: str
        at_prefill: bool

        def __post_init__(self) -> None:
            check_schedule(self)
            check_window(self)
            share("method.mix", self.mix)

    @classmethod
    def least(cls, params: Params) -> tuple[int, str]:
        return least_with_window(params)

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        return order_notes(params)


def check_window(params: Any) -> None:
    """Raise `ConfigError` for a window, a kernel or an order that there is not."""
    if params.window < 1:
        raise ConfigError(f"method.window={params.window} is out of range; it is a number of tokens, at least 1")
    if params.kernel < 1 or params.kernel % 2 == 0:
        raise ConfigError(f"method.kernel={params.kernel} has no middle; use an odd number of tokens, 1 for no pooling")
    each_one_of("method", params, order=("score", "position"))


def least_with_window(params: Any) -> tuple[int, str]:
    return params.window + 1, f"the last method.window={params.window} tokens stay, and at least one before them"


def order_notes(params: Any) -> list[str]:
    """What a table says where slots are ordered or cut otherwise than the authors do it."""
    return ["by position"] * (params.order == "position") + schedule_notes(params)
