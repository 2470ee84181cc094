"""What XKV may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/xkv.py`).
"""

from dataclasses import dataclass
from fractions import Fraction

from engine.budget import Budget, BudgetRequest, exact, show
from engine.checks import each_one_of
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules


class XKVRules(Rules):
    title = "XKV"
    drops = True
    comparable = "heads"

    @dataclass(frozen=True)
    class Params:
        ows: int
        kernel: int
        mode: str
        r_avg: Fraction | None
        allocation: str
        shares: tuple[float, ...] | None
        index_scope: str
        profile_bins: int

        def __post_init__(self) -> None:
            each_one_of(
                "method",
                self,
                mode=("size", "quality"),
                allocation=("exact", "sampled", "uniform"),
                index_scope=("kv_head", "layer", "query_head"),
            )
            if self.ows < 1:
                raise ConfigError(f"method.ows={self.ows} is out of range; it is a number of tokens, 1 or more")
            if self.kernel < 1 or self.kernel % 2 == 0:
                raise ConfigError(
                    f"method.kernel={self.kernel} is not possible; use an odd number of tokens, such as 7"
                )
            if self.profile_bins < 0:
                raise ConfigError(
                    f"method.profile_bins={self.profile_bins} is out of range; use 0 for no profile, or such as 64"
                )
            self.check_mode()
            self.check_shares()

        def check_mode(self) -> None:
            if self.mode == "size" and self.r_avg is not None:
                raise ConfigError(
                    f"method.r_avg={show(self.r_avg)} has no effect with method.mode=size; "
                    "leave it out or set method.mode=quality"
                )
            if self.mode == "quality" and self.r_avg is None:
                raise ConfigError("method.mode=quality needs a target; add method.r_avg=… above 0 and at most 1")
            if self.r_avg is not None and not 0 < self.r_avg <= 1:
                raise ConfigError(
                    f"method.r_avg={show(self.r_avg)} is out of range; it is a retention above 0 and at most 1"
                )
            if self.mode == "quality" and self.allocation != "exact":
                raise ConfigError(
                    f"method.mode=quality has no method.allocation={self.allocation}; use method.allocation=exact"
                )

        def check_shares(self) -> None:
            if self.allocation == "sampled" and self.shares is None:
                raise ConfigError(
                    "method.allocation=sampled needs method.shares=[…]; python -m methods.dropping.xkv RUN prints them "
                    "for the folder of a finished run with method.allocation=exact"
                )
            if self.shares is None:
                return
            if self.allocation != "sampled":
                raise ConfigError(
                    f"method.shares has no effect with method.allocation={self.allocation}; "
                    "leave it out or set method.allocation=sampled"
                )
            if not all(0 <= share < float("inf") for share in self.shares) or not any(self.shares):
                raise ConfigError(
                    "method.shares has a negative or no positive number; give one of 0 or more for each layer"
                )

    @dataclass(frozen=True)
    class Plan:
        """What is known of the division before any score is."""

        ows: int  # tokens of the window, kept in every layer
        total: int  # earlier tokens, over all layers

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        n_layers = len(shape.attention_layers)
        if params.shares is not None and len(params.shares) != n_layers:
            raise ConfigError(
                f"method.shares has {len(params.shares)} numbers and the model {n_layers} layers to compress; "
                "give one for each, from a run with the same model"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        limit = budget.tokens if params.mode == "size" else budget.s_prompt
        ows = params.ows if limit > params.ows else max(1, limit // 2)
        return XKVRules.Plan(ows, max(0, len(shape.attention_layers) * (budget.tokens - ows)))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return super().label(params, request) if params.r_avg is None else f"{cls.title} ({exact(params.r_avg)} kept)"

    @classmethod
    def uncodable(cls, params: Params) -> str:
        return super().uncodable(params) or "XKV keeps other numbers of tokens in each layer"
