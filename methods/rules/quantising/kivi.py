"""What KIVI may be asked for, and what it makes of a byte budget: arithmetic, without torch.

Not here: the method (`methods/quantising/kivi.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.budget import ELEMENT_BYTES, Budget, BudgetRequest
from engine.caches.token_code import TokenCode
from engine.checks import whole_number
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.quantising.base import QuantisingRules

BITS = (2, 4, 8)
# (key bits, value bits, group) in falling order of effective bits: what a byte budget chooses from.
SETTINGS = ((8, 8, 32), (4, 4, 32), (4, 4, 64), (4, 4, 128), (4, 2, 32), (2, 2, 32), (2, 2, 64), (2, 2, 128))


class KIVIRules(QuantisingRules):
    title = "KIVI"
    composes = True

    @dataclass(frozen=True)
    class Params:
        key_bits: int
        value_bits: int
        group: int
        residual: int

        def __post_init__(self) -> None:
            whole_number("method.group", self.group, 1)
            whole_number("method.residual", self.residual, 1)
            for key in ("key_bits", "value_bits"):
                if (bits := getattr(self, key)) not in BITS:
                    raise ConfigError(f"method.{key}={bits} is not packed; use 2, 4 or 8")
            if self.residual % self.group:
                raise ConfigError(
                    f"method.residual={self.residual} is no multiple of method.group={self.group}; use "
                    f"{-(-self.residual // self.group) * self.group}"
                )

    @dataclass(frozen=True)
    class Plan:
        key_bits: int
        value_bits: int
        group: int
        residual: int

        def exact_keys(self, n: int) -> int:
            """Of the first `n` tokens those whose keys wait for their block to be full."""
            return n % self.residual

        def exact_values(self, n: int) -> int:
            return min(n, self.residual)

    @classmethod
    def check_shape(cls, params: Params, shape: ModelShape) -> None:
        if shape.d_h % params.group:
            fitting = [g for g in (16, 32, 64, 128) if shape.d_h % g == 0]
            raise ConfigError(
                f"method.group={params.group} does not divide the {shape.d_h} dimensions of {shape.name}; "
                f"use {fitting[-1] if fitting else shape.d_h}"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return KIVIRules.Plan(params.key_bits, params.value_bits, params.group, params.residual)

    @classmethod
    def candidates(cls, params: Params, budget: Budget, shape: ModelShape) -> Iterable[Plan]:
        """A short prompt gets a shorter residual before it gets fewer bits."""
        for key_bits, value_bits, group in SETTINGS:
            if shape.d_h % group == 0:
                for residual in range(params.residual // group * group, 0, -group):
                    yield KIVIRules.Plan(key_bits, value_bits, group, residual)

    @classmethod
    def code_bytes(cls, plan: Plan, n: int, shape: ModelShape) -> int:
        r_k, r_v = plan.exact_keys(n), plan.exact_values(n)
        keys = packed_bytes(shape.h_kv, shape.d_h, n - r_k, r_k, plan.key_bits, plan.group)
        return keys + packed_bytes(shape.h_kv, shape.d_h, n - r_v, r_v, plan.value_bits, plan.group)

    @classmethod
    def token_code(cls, params: Params) -> TokenCode:
        """Keys too in groups of channels: the tokens of a block of keys could not be fetched one by one."""
        return TokenCode(params.key_bits, params.value_bits, params.group)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        if request.memory is not None and request.memory_alone:
            return cls.title
        return cls.title_of(params)

    @classmethod
    def title_of(cls, params: Params) -> str:
        """With its bits."""
        same = params.key_bits == params.value_bits
        bits = f"{params.key_bits} bit" if same else f"K{params.key_bits} V{params.value_bits} bit"
        return f"{cls.title} {bits}"


def packed_bytes(h_kv: int, d_h: int, n_packed: int, n_exact: int, bits: int, group: int) -> int:
    """K or V of a layer: codes, 16-bit scales and zeros of their groups, exact tokens."""
    numbers = h_kv * d_h * n_packed
    return numbers * bits // 8 + 2 * ELEMENT_BYTES * numbers // group + h_kv * d_h * n_exact * ELEMENT_BYTES
