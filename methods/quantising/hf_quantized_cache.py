"""transformers' QuantizedCache (5.23, backend quanto), the ecosystem's baseline: named after KIVI, and another method.

The whole prompt is packed at once, keys as well as values per token. Generated tokens stay exact until `residual` of
them are there; then everything, the prompt's rebuilt tokens included, is packed anew.

Paper     none: the quantised cache of transformers (Hugging Face)
Symbols   nbits, q_group_size, residual_length = `bits`, `group`, `residual`.
Per step  moved: nothing; resident: 2 * h_kv * d_h * (n * (b / 8 + 4 / g) + 2 * r) bytes, with r exact tokens, 0 after
          the prompt and at most `residual` - 1.
Differs   groups are of one token and head; transformers' lie one after the other in memory, which is the same where g
          divides d_h. Codes are attended to packed, where transformers rebuilds the prefix at every step: its latency
          is not measured here. Shifts are counted at 16 bits.
Fails     no prompt token is exact, and keys with a few large channels suffer at 2 bits.
Figures   keep fewer bits, or made keys: #0B88A5, diamond, :
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Annotated, Any, Literal, cast

from annotated_types import Ge, Le
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.caches.quantized import QuantizedCache
from kvbench.engine.caches.range_code import RangeCode
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.declared import Count, Is, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.placement import Quantize
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.packed.attend import Packed, Side
from kvbench.kernels.packed.codes import BY_TOKEN, Quantised, quantise_tokens
from kvbench.kernels.rows.append import NO_RING, Place
from kvbench.methods.quantising.base import QuantisingMethod
from kvbench.methods.quantising.kivi import packed_bytes


class RequantizedCache(QuantizedCache):
    """A prefix that is packed as a whole, and exact tokens after it."""

    def __init__(self, plan: "HFQuantizedCache.Plan", k: Tensor, v: Tensor, n_new: int) -> None:
        self.plan, self.n, self.nothing = plan, k.shape[2], Part(k[:, :, :0], v[:, :, :0])
        self.h_kv, self.d_h, self.d_v = k.shape[1], k.shape[3], v.shape[3]
        room = 1, self.h_kv, min(plan.residual, n_new)
        self.late = k.new_empty(*room, self.d_h), v.new_empty(*room, self.d_v)
        self.pack(k, v)

    def pack(self, k: Tensor, v: Tensor) -> None:
        """Pack these, which are all tokens."""
        self.keys, self.values = (self.packed(x[0]) for x in (k, v))
        self.n_packed = k.shape[2]

    def packed(self, x: Tensor) -> Quantised:
        return quantise_tokens(x, self.plan.bits, self.plan.group)

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        at = self.n - self.n_packed
        for late, new in zip(self.late, (k_new, v_new), strict=True):
            late[:, :, at : at + 1] = new
        self.n += 1

    @classmethod
    def append_rows(
        cls, caches: Sequence[QuantizedCache], k_new: Sequence[Tensor], v_new: Sequence[Tensor]
    ) -> list[list[Place]]:
        return [quantized.places() for quantized in cast("Sequence[RequantizedCache]", caches)]

    def places(self) -> list[Place]:
        """Where the current token is to be written."""
        self.n += 1
        return [(self.late[0], self.late[1], self.n - 1 - self.n_packed)]

    def growing(self) -> Growing | None:
        """How the residual grows until everything is packed anew."""
        n_exact = self.n - self.n_packed
        return Growing((1,), ((*self.late, n_exact - 1, NO_RING),), max(0, self.plan.residual - 1 - n_exact))

    def repeat(self) -> None:
        self.n += 1

    def sides(self) -> tuple[Side, Side]:
        plan = self.plan
        return (
            Side(BY_TOKEN, plan.bits, plan.group, self.n_packed, self.keys, self.late[0]),
            Side(BY_TOKEN, plan.bits, plan.group, self.n_packed, self.values, self.late[1]),
        )

    def part(self) -> Part:
        return replace(self.nothing, packed=Packed(*self.sides(), self.n))

    def pack_due(self) -> None:
        if self.n - self.n_packed >= self.plan.residual:
            self.pack(*(side.rebuilt(self.n) for side in self.sides()))

    def counted_bytes(self) -> int:
        exact = self.n - self.n_packed
        return both_bytes(self.h_kv, self.d_h, self.d_v, self.n_packed, exact, self.plan)

    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values, *self.late]


class HFQuantizedCache(QuantisingMethod):
    title = "QuantizedCache"
    no_latents = "packs keys and values apart: here they are one"
    composes = True

    @dataclass(frozen=True)
    class Params:
        backend: Literal["quanto"]
        bits: Literal[2, 4]
        group: Count
        residual: Window
        axis_key: Annotated[int, Ge(0), Le(0), Is("0, the default; others let groups mix heads or tokens")]

    @dataclass(frozen=True)
    class Plan:
        bits: int
        group: int
        residual: int

    params: Params
    plan: Plan

    @classmethod
    def check_shape(cls, params: Params, shape: ModelShape) -> None:
        if (width := gcd(shape.d_h, shape.d_v)) % params.group:
            raise ConfigError(
                f"method.group={params.group} does not divide the {width} dimensions of {shape.name}, and groups "
                "would mix tokens; use a divisor of them"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return HFQuantizedCache.Plan(params.bits, params.group, params.residual)

    @classmethod
    def candidates(cls, params: Params, budget: Budget, shape: ModelShape) -> Iterable[Plan]:
        for bits in (4, 2):
            yield HFQuantizedCache.Plan(bits, params.group, params.residual)

    @classmethod
    def code_bytes(cls, plan: Plan, n: int, shape: ModelShape) -> int:
        """Bytes of a prompt that is packed as a whole, after which the residual is empty."""
        return both_bytes(shape.h_kv, shape.d_h, shape.d_v, n, 0, plan)

    @classmethod
    def token_code(cls, params: Params) -> TokenCode:
        return RangeCode(params.bits, params.bits, params.group)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return cls.title if request.memory_alone else cls.title_of(params)

    @classmethod
    def title_of(cls, params: Params) -> str:
        return f"{cls.title} {params.bits} bit"

    @classmethod
    def chosen(cls, report: Mapping[str, Any]) -> str:
        return f"{report['bits']} bit"

    @classmethod
    def quantize(cls, params: Params, plan: Plan) -> Quantize:
        return lambda k, v, n_new, _: RequantizedCache(plan, k, v, n_new)

    def report(self) -> dict[str, Any]:
        return {"bits": self.plan.bits, "group": self.plan.group}


def both_bytes(h_kv: int, d_h: int, d_v: int, n_packed: int, n_exact: int, plan: "HFQuantizedCache.Plan") -> int:
    """K and V of a layer."""
    return sum(packed_bytes(h_kv, width, n_packed, n_exact, plan.bits, plan.group) for width in (d_h, d_v))
