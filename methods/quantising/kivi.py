"""KIVI (Liu et al., ICML 2024): keys quantised per channel, values per token, the latest tokens exact.

A few channels of the keys are large for all tokens, so a group of keys is consecutive tokens of one channel, and its
range is narrow. Values have no such channels, and a group is consecutive channels of one token. Keys wait at full
precision until `residual` of them can be packed at once; the last `residual` values are always exact.

Paper     arXiv:2402.02750, 2024; Liu, Zirui; KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache
Symbols   paper: B, G, R = `key_bits` and `value_bits`, `group`, `residual`; lo, scale = zeros, scales.
Per step  moved: nothing; resident: h_kv * d_h * (nK * (bK / 8 + 4 / g) + 2 * rK + nV * (bV / 8 + 4 / g) + 2 * rV)
          bytes, with nK + rK = nV + rV = tokens so far; all of it is read.
Differs   as the authors' code, and unlike the paper's listing, a block is packed after the step that fills it, which
          still attends to its exact keys. The code fails with grouped queries and fewer tokens than the residual;
          this does not. With `memory` the setting is the first of a fixed list that fits; the residual shrinks before
          the bits do. A latent that all heads share is key and value at once: it is packed once, per channel as keys
          are, with `key_bits`.
Fails     2 bits lose passages and needles, most of all where few KV heads serve many queries.
Figures   keep fewer bits, or made keys: #04787E, hourglass, -
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, cast

from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest
from kvbench.engine.caches.quantized import LatestTokens, Packing, Packings, QuantizedCache
from kvbench.engine.caches.range_code import RangeCode
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.declared import Count, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.placement import Quantize
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.fast import takes
from kvbench.kernels.gather import is_within
from kvbench.kernels.packed.attend import Packed, Side
from kvbench.kernels.packed.codes import BY_CHANNEL, BY_TOKEN, quantise_channels, quantise_tokens, with_room
from kvbench.kernels.packed.tokens import Ageing, RangePacking, packs
from kvbench.kernels.rows.append import NO_RING, Place
from kvbench.methods.quantising.base import QuantisingMethod

BITS = (2, 4, 8)
# (key bits, value bits, group) in falling order of effective bits: what a byte budget chooses from.
SETTINGS = ((8, 8, 32), (4, 4, 32), (4, 4, 64), (4, 4, 128), (4, 2, 32), (2, 2, 32), (2, 2, 64), (2, 2, 128))


class KIVICache(QuantizedCache):
    """Keys in whole blocks and a rest, values one by one and a window. Of latents the keys are all that there is."""

    def __init__(self, plan: "KIVI.Plan", k: Tensor, v: Tensor, n_new: int) -> None:
        self.plan, self.n, self.nothing, self.joint = plan, k.shape[2], Part(k[:, :, :0], v[:, :, :0]), is_within(k, v)
        self.h_kv, self.d_h, self.d_v = k.shape[1], k.shape[3], v.shape[3]
        self.n_k = self.n - plan.exact_keys(self.n)
        self.n_v = self.n - plan.exact_values(self.n)
        room = self.n + n_new
        keys = quantise_channels(k[0, :, : self.n_k], plan.key_bits, plan.group)
        self.keys = with_room(keys, BY_CHANNEL, room // plan.group + 1)
        self.late_k = LatestTokens(k[:, :, self.n_k :], plan.residual, spare=0)
        if not self.joint:
            values = quantise_tokens(v[0, :, : self.n_v], plan.value_bits, plan.group)
            self.values = with_room(values, BY_TOKEN, room)
            self.late_v = LatestTokens(v[:, :, self.n_v :], plan.residual)

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        self.pack_aged()
        self.late_k.append(k_new)
        if not self.joint:
            self.late_v.append(v_new)
        self.n += 1

    @classmethod
    def append_rows(
        cls, caches: Sequence[QuantizedCache], k_new: Sequence[Tensor], v_new: Sequence[Tensor]
    ) -> list[list[Place]]:
        """Values that aged in the step before are packed in one launch."""
        mine = cast("Sequence[KIVICache]", caches)
        packing = [quantized for quantized in mine if quantized.has_aged and quantized.packs_in_kernels]
        tokens = [
            (quantized, Ageing(quantized.late_v.leave(1), quantized.values, quantized.n_v)) for quantized in packing
        ]
        for form, some in by_form(tokens).items():
            RangePacking(some, *form).pack()
        for quantized in packing:
            quantized.n_v += 1
        return [quantized.places() for quantized in mine]

    def places(self) -> list[Place]:
        """Where the current token is to be written."""
        self.pack_aged()
        self.n += 1
        key = self.late_k.place()
        return [(key, key[..., : self.d_v] if self.joint else self.late_v.place(), 0)]

    def growing(self) -> Growing | None:
        """How exact tokens grow until a block of keys is full, values begin to age, or rows are shifted."""
        plan, k, v = self.plan, self.late_k, self.late_v
        if self.joint or (self.has_aged and not self.packs_in_kernels):
            return None
        limits = [plan.residual - 1 - k.n, k.n_left, v.n_left]
        if not self.has_aged:
            limits.append(plan.residual + 1 - v.n)
        return Growing((1,), ((k.newest(), v.newest(), 0, NO_RING),), max(0, min(limits)))

    def repeat(self) -> None:
        if self.has_aged:
            self.late_v.leave(1)
            self.n_v += 1
        self.n, self.late_k.n, self.late_v.n = self.n + 1, self.late_k.n + 1, self.late_v.n + 1

    @classmethod
    def packing(
        cls, caches: Sequence[QuantizedCache], newest: Sequence[tuple[Tensor, Tensor]], rows: Sequence[int]
    ) -> Packing | None:
        """Packs the oldest exact value of each row that has more than it holds."""
        ageing = by_form(
            (quantized, Ageing(quantized.late_v.view()[:, :, :1], quantized.values, quantized.n_v))
            for quantized in cast("Sequence[KIVICache]", caches) if quantized.has_aged
        )  # fmt: skip
        return Packings([RangePacking(tokens, *form) for form, tokens in ageing.items()]) if ageing else None

    def part(self) -> Part:
        plan = self.plan
        k = Side(BY_CHANNEL, plan.key_bits, plan.group, self.n_k, self.keys, self.late_k.view())
        if self.joint:
            return replace(self.nothing, packed=Packed(k, k, self.n, joint=True))
        v = Side(BY_TOKEN, plan.value_bits, plan.group, self.n_v, self.values, self.late_v.view())
        return replace(self.nothing, packed=Packed(k, v, self.n, grows=(0, int(self.has_aged))))

    def pack_due(self) -> None:
        plan = self.plan
        if self.late_k.n == plan.residual:
            block = quantise_channels(self.late_k.leave(plan.residual)[0], plan.key_bits, plan.group)
            first = self.n_k // plan.group
            for target, new in zip(self.keys, block, strict=True):
                target[:, first : first + new.shape[1]] = new
            self.n_k += plan.residual
        if not takes("packing", self.nothing.k.device):  # there all rows' go at once, before the next token comes
            self.pack_aged()

    @property
    def packs_in_kernels(self) -> bool:
        return packs(self.d_v, self.plan.group) and takes("packing", self.nothing.k.device)

    @property
    def has_aged(self) -> bool:
        """Whether the oldest exact value is to be packed."""
        return not self.joint and self.late_v.n > self.plan.residual

    def pack_aged(self) -> None:
        if self.has_aged:
            oldest = quantise_tokens(self.late_v.leave(1)[0], self.plan.value_bits, self.plan.group)
            for target, new in zip(self.values, oldest, strict=True):
                target[:, self.n_v : self.n_v + 1] = new
            self.n_v += 1

    def counted_bytes(self) -> int:
        """A value that has aged counts as packed."""
        plan, n_v = self.plan, self.n_v + self.has_aged
        keys = packed_bytes(self.h_kv, self.d_h, self.n_k, self.late_k.n, plan.key_bits, plan.group)
        if self.joint:
            return keys
        return keys + packed_bytes(self.h_kv, self.d_v, n_v, self.n - n_v, plan.value_bits, plan.group)

    def tensors(self) -> list[Tensor]:
        own = [*self.keys, self.late_k.buffer]
        return own if self.joint else [*own, *self.values, self.late_v.buffer]


def by_form(tokens: Iterable[tuple[KIVICache, Ageing]]) -> dict[tuple[int, int], list[Ageing]]:
    """Values that are packed in one launch, by the bits and the group of their codes."""
    found: dict[tuple[int, int], list[Ageing]] = {}
    for quantized, token in tokens:
        found.setdefault((quantized.plan.value_bits, quantized.plan.group), []).append(token)
    return found


class KIVI(QuantisingMethod):
    title = "KIVI"
    composes = True

    @dataclass(frozen=True)
    class Params:
        key_bits: Literal[2, 4, 8]
        value_bits: Literal[2, 4, 8]
        group: Count
        residual: Window

        def __post_init__(self) -> None:
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
            """How many of the first `n` tokens have keys that wait for their block to be full."""
            return n % self.residual

        def exact_values(self, n: int) -> int:
            return min(n, self.residual)

    params: Params
    plan: Plan

    @classmethod
    def check_shape(cls, params: Params, shape: ModelShape) -> None:
        width = gcd(shape.d_h, shape.d_v)
        if not shape.is_latent and width % params.group:
            fitting = [g for g in (16, 32, 64, 128) if width % g == 0]
            raise ConfigError(
                f"method.group={params.group} does not divide the {width} dimensions of {shape.name}; "
                f"use {fitting[-1] if fitting else width}"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return KIVI.Plan(params.key_bits, params.value_bits, params.group, params.residual)

    @classmethod
    def candidates(cls, params: Params, budget: Budget, shape: ModelShape) -> Iterable[Plan]:
        """A short prompt gets a shorter residual before it gets fewer bits."""
        for key_bits, value_bits, group in SETTINGS:
            if shape.is_latent or gcd(shape.d_h, shape.d_v) % group == 0:
                for residual in range(params.residual // group * group, 0, -group):
                    yield KIVI.Plan(key_bits, value_bits, group, residual)

    @classmethod
    def code_bytes(cls, plan: Plan, n: int, shape: ModelShape) -> int:
        r_k, r_v = plan.exact_keys(n), plan.exact_values(n)
        keys = packed_bytes(shape.h_kv, shape.d_h, n - r_k, r_k, plan.key_bits, plan.group)
        if shape.is_latent:
            return keys
        return keys + packed_bytes(shape.h_kv, shape.d_v, n - r_v, r_v, plan.value_bits, plan.group)

    @classmethod
    def token_code(cls, params: Params) -> TokenCode:
        """Keys too in groups of channels: the tokens of a block of keys could not be fetched one by one."""
        return RangeCode(params.key_bits, params.value_bits, params.group)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        if request.memory is not None and request.memory_alone:
            return cls.title
        return cls.title_of(params)

    @classmethod
    def title_of(cls, params: Params) -> str:
        """The method's name with its bits."""
        return f"{cls.title} {bits_words(params.key_bits, params.value_bits)}"

    @classmethod
    def chosen(cls, report: Mapping[str, Any]) -> str:
        return bits_words(report["key_bits"], report["value_bits"])

    @classmethod
    def quantize(cls, params: Params, plan: Plan) -> Quantize:
        return lambda k, v, n_new, _: KIVICache(plan, k, v, n_new)

    def report(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "key_bits": plan.key_bits, "value_bits": plan.value_bits, "group": plan.group, "residual": plan.residual,
        }  # fmt: skip


def bits_words(keys: int, values: int) -> str:
    return f"{keys} bit" if keys == values else f"K{keys} V{values} bit"


def packed_bytes(h_kv: int, d_h: int, n_packed: int, n_exact: int, bits: int, group: int) -> int:
    """K or V of a layer: codes, 16-bit scales and zeros of their groups, exact tokens."""
    numbers = h_kv * d_h * n_packed
    return numbers * bits // 8 + 2 * ELEMENT_BYTES * numbers // group + h_kv * d_h * n_exact * ELEMENT_BYTES
