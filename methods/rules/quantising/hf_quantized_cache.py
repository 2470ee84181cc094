"""What transformers' quantised cache may be asked for, and what it makes of a byte budget: arithmetic, without torch.

Not here: the method (`methods/quantising/hf_quantized_cache.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.budget import Budget, BudgetRequest
from engine.caches.token_code import TokenCode
from engine.checks import one_of, whole_number
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.quantising.base import QuantisingRules
from methods.rules.quantising.kivi import packed_bytes


class HFQuantizedCacheRules(QuantisingRules):
    title = "QuantizedCache"
    composes = True

    @dataclass(frozen=True)
    class Params:
        backend: str
        bits: int
        group: int
        residual: int
        axis_key: int

        def __post_init__(self) -> None:
            one_of("method.backend", self.backend, ("quanto",))
            one_of("method.bits", self.bits, (2, 4))
            whole_number("method.group", self.group, 1)
            whole_number("method.residual", self.residual, 1)
            if self.axis_key != 0:
                raise ConfigError(
                    f"method.axis_key={self.axis_key} lets groups mix heads or tokens; use 0, which is the default"
                )

    @dataclass(frozen=True)
    class Plan:
        bits: int
        group: int
        residual: int

    @classmethod
    def check_shape(cls, params: Params, shape: ModelShape) -> None:
        if shape.d_h % params.group:
            raise ConfigError(
                f"method.group={params.group} does not divide the {shape.d_h} dimensions of {shape.name}, and groups "
                "would mix tokens; use a divisor of them"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return HFQuantizedCacheRules.Plan(params.bits, params.group, params.residual)

    @classmethod
    def candidates(cls, params: Params, budget: Budget, shape: ModelShape) -> Iterable[Plan]:
        for bits in (4, 2):
            yield HFQuantizedCacheRules.Plan(bits, params.group, params.residual)

    @classmethod
    def code_bytes(cls, plan: Plan, n: int, shape: ModelShape) -> int:
        """The residual is empty behind a prompt."""
        return 2 * packed_bytes(shape.h_kv, shape.d_h, n, 0, plan.bits, plan.group)

    @classmethod
    def token_code(cls, params: Params) -> TokenCode:
        return TokenCode(params.bits, params.bits, params.group)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return cls.title if request.memory_alone else cls.title_of(params)

    @classmethod
    def title_of(cls, params: Params) -> str:
        return f"{cls.title} {params.bits} bit"
