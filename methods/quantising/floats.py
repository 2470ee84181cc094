"""What methods share whose codes are small floats: the cache, scales of a checkpoint, layers left whole, the books.

Every token is packed as it comes, the current one before it is attended to; the latest `residual` wait at full
precision. Nothing spans tokens: a token's codes depend on no other, but for a scale that is measured over the prompt.

Not here: the formats (`kernels/packed/floats.py`), which of them a method takes (`fp8.py`, `nvfp4.py`).
"""

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import torch
from annotated_types import Gt
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest
from kvbench.engine.caches.asked import Make
from kvbench.engine.caches.packed_host import joined
from kvbench.engine.caches.quantized import LatestTokens, Packing, Packings, QuantizedCache
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.checkpoints.scales import cache_scales
from kvbench.engine.declared import Index
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.model import Model
from kvbench.engine.observe import ModelFact, Observation
from kvbench.engine.passes.trace import Known
from kvbench.engine.placement import Quantize, Seen
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.fast import takes
from kvbench.kernels.gather import is_within
from kvbench.kernels.packed.attend import Packed, Side
from kvbench.kernels.packed.codes import BY_FLOAT, Quantised
from kvbench.kernels.packed.floats import (
    E4M3,
    FloatCode,
    floats_with_room,
    measured,
    pack_token,
    quantise_floats,
    rebuild_floats,
    tables,
)
from kvbench.kernels.packed.tokens import Ageing, FloatPacking, packs_floats
from kvbench.kernels.rows.append import Place
from kvbench.kernels.select_attend import Spans
from kvbench.methods.quantising.base import QuantisingMethod

Skipped = tuple[Index, ...] | Literal["sliding"]  # layers
Reach = Annotated[float, Gt(0)]  # what the largest number becomes


@dataclass(frozen=True)
class FloatPlan:
    """How K and V of a layer are coded."""

    key: FloatCode
    value: FloatCode
    residual: int = 0  # latest tokens that stay exact
    codes_queries: bool = False

    @property
    def is_known(self) -> bool:
        """Whether a scale comes with the model."""
        return self.key.is_known or self.value.is_known


@dataclass(frozen=True)
class CheckpointScales(ModelFact):
    """The scales of a layer's K and V that its checkpoint has, (2, 1 or h_kv) float32; 1 where it has none."""

    def look_up(self, model: Model) -> Known:
        found = cache_scales(model.checkpoint.where)
        layers = model.shape.attention_layers
        return Known({layer: torch.tensor(found.get(layer, ((1.0,), (1.0,)))) for layer in layers})

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        return torch.ones(2, 1)


class CodedQueries:
    """Queries that went through e4m3 with a scale of each token and head."""

    code: ClassVar = FloatCode(E4M3, scale="float")

    @property
    def kind(self) -> str:
        return "coded"

    def together(self, several: Sequence[Any]) -> Make:
        def make(q: Tensor, out: Tensor | None) -> Tensor:
            heads, one = q.flatten(0, 1).float(), q.new_ones(1, 1, 1, dtype=torch.float32)
            coded = rebuild_floats(quantise_floats(heads, self.code, one), self.code, one).view_as(q)
            return coded.to(q.dtype) if out is None else out.copy_(coded)

        return make


class CodedSide:
    """K or V: packed tokens, and the latest ones after them."""

    def __init__(self, code: FloatCode, x: Tensor, shared: Tensor, residual: int, n_new: int) -> None:
        """Tokens x (1, h_kv, n, d), with room for `n_new` more."""
        n = x.shape[2]
        self.code, self.shared, self.residual = code, shared, residual
        self.n = n - min(n, residual)
        packed = quantise_floats(x[0, :, : self.n].float(), code, shared)
        self.packed = floats_with_room(packed, code, n + n_new - min(n + n_new, residual))
        self.late = LatestTokens(x[:, :, self.n :], residual) if residual else None
        self.nothing = x[:, :, :0]

    def append(self, x: Tensor) -> None:
        """Take in a token (1, h_kv, 1, d), and pack the one that is too old."""
        if self.late is not None:
            self.late.append(x)
            if self.late.n <= self.residual:
                return
            x = self.late.leave(1)
        pack_token(x[0].float(), self.code, self.shared, self.packed, self.n)
        self.n += 1

    @property
    def exact(self) -> Tensor:
        return self.nothing if self.late is None else self.late.view()

    def rebuilt(self) -> Tensor:
        codes, scales = (x[:, : self.n] for x in self.packed[:2])
        filled = Quantised(codes, scales, scales)
        return rebuild_floats(filled, self.code, self.shared)

    def sizes(self) -> Tensor:
        """Codes of 8 bits without their signs, of all packed tokens."""
        return self.packed.codes[:, : self.n].flatten() & 127

    def side(self) -> Side:
        """What attention reads: a number of a table times a scale, which may be looked up too."""
        code, (table, of_bytes) = self.code, tables(self.code, self.shared)
        width = code.width(self.nothing.shape[3])
        return Side(
            BY_FLOAT, code.format.bits, width, self.n, self.packed, self.exact, table, self.rebuilt, of_bytes,
            code.format.exponent_bits,
        )  # fmt: skip

    def counted_bytes(self) -> int:
        h_kv, d = self.nothing.shape[1], self.nothing.shape[3]
        n_exact = 0 if self.late is None else self.late.n
        return h_kv * (self.n * self.code.token_bytes(d) + n_exact * d * ELEMENT_BYTES)

    def tensors(self) -> list[Tensor]:
        scales = [self.packed.scales] if self.code.scale != "none" else []
        return [
            self.packed.codes, *scales, *([self.shared] if self.code.is_measured else []),
            *([] if self.late is None else [self.late.buffer]),
        ]  # fmt: skip


class FloatCache(QuantizedCache):
    """K and V as floats. A latent is coded once, as its key."""

    def __init__(self, plan: FloatPlan, k: Tensor, v: Tensor, n_new: int, scales: Sequence[Tensor]) -> None:
        """`scales` are what K's and V's tokens share."""
        self.plan, self.nothing, self.joint = plan, Part(k[:, :, :0], v[:, :, :0]), is_within(k, v)
        self.n = self.n_prompt = k.shape[2]
        self.sides = [
            CodedSide(code, x, shared, plan.residual, n_new)
            for code, x, shared in zip((plan.key, plan.value), [k] if self.joint else [k, v], scales, strict=False)
        ]

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        self.n += 1
        for side, x in zip(self.sides, (k_new, v_new), strict=False):
            side.append(x)

    @classmethod
    def append_rows(
        cls, caches: Sequence[QuantizedCache], k_new: Sequence[Tensor], v_new: Sequence[Tensor]
    ) -> list[list[Place]]:
        """Codecs of one plan make codes in one launch."""
        mine = cast("Sequence[FloatCache]", caches)
        for quantized, k, v in zip(mine, k_new, v_new, strict=True):
            if not quantized.packs_in_kernels:
                quantized.append(k, v)
        for some in alike(mine):
            first, _ = some[0]
            packing_of(some, [(k_new[i], v_new[i]) for i, _ in some], 0).pack(k_new[first], v_new[first])
            for _, quantized in some:
                quantized.repeat()
        return [[] for _ in caches]

    @classmethod
    def packing(
        cls, caches: Sequence[QuantizedCache], newest: Sequence[tuple[Tensor, Tensor]], rows: Sequence[int]
    ) -> Packing | None:
        """Every token's key and value."""
        kinds = alike(cast("Sequence[FloatCache]", caches))
        return Packings([packing_of(some, [newest[i] for i, _ in some], 1, rows[some[0][0]]) for some in kinds])

    @property
    def packs_in_kernels(self) -> bool:
        ready = not (self.joint or self.plan.residual) and takes("packing", self.nothing.k.device)
        return ready and all(packs_floats(side.code, side.nothing.shape[3]) for side in self.sides)

    def growing(self) -> Growing | None:
        room = self.sides[0].packed.codes.shape[1]
        return Growing((1,), (), room - self.n) if self.packs_in_kernels else None

    def repeat(self) -> None:
        self.n += 1
        for side in self.sides:
            side.n += 1

    def part(self) -> Part:
        sides = [side.side() for side in self.sides]
        packed = Packed(sides[0], sides[-1], self.n, self.joint, grows=(1, 1))
        return Part(self.nothing.k, self.nothing.v, packed=packed, asked=self.asked)

    def parts(self) -> list[Part]:
        """While nothing is packed, the prompt and what follows it, as full attention has them."""
        if any(side.n for side in self.sides):
            return [self.part()]
        k, v = self.sides[0].exact, self.sides[-1].exact[..., : self.nothing.v.shape[3]]
        halves = (slice(0, self.n_prompt), slice(self.n_prompt, None))
        return [Part(k[:, :, half], v[:, :, half], asked=self.asked) for half in halves]

    @property
    def asked(self) -> CodedQueries | None:
        return CodedQueries() if self.plan.codes_queries else None

    def pack_due(self) -> None:
        """Do nothing: who is too old is packed as a newer token comes."""

    def counted_bytes(self) -> int:
        return sum(side.counted_bytes() + side.code.shared_bytes(side.nothing.shape[1]) for side in self.sides)

    def tensors(self) -> list[Tensor]:
        return [x for side in self.sides for x in side.tensors()]


def alike(caches: Sequence[FloatCache]) -> list[list[tuple[int, FloatCache]]]:
    """Caches, and their places, whose tokens kernels pack in one launch."""
    found: dict[Hashable, list[tuple[int, FloatCache]]] = {}
    for i, quantized in enumerate(caches):
        if quantized.packs_in_kernels:
            found.setdefault((quantized.plan.key, quantized.plan.value), []).append((i, quantized))
    return [*found.values()]


def packing_of(
    some: Sequence[tuple[int, FloatCache]], newest: Sequence[tuple[Tensor, Tensor]], n_counted: int, row: int = 0
) -> FloatPacking:
    """Packing of the newest tokens, of which the caches have counted so many in; they come from `row` on."""

    def ageing(which: int) -> list[Ageing]:
        sides = [quantized.sides[which] for _, quantized in some]
        return [
            Ageing(x[which], side.packed, side.n - n_counted, side.shared if side.code.scale == "e4m3" else None)
            for side, x in zip(sides, newest, strict=True)
        ]

    plan = some[0][1].plan
    return FloatPacking(ageing(0), ageing(1), plan.key, plan.value, row)


class RaggedFloats(QuantizedCache):
    """A `FloatCache` for each KV head, since heads keep different numbers of tokens; what they share is there once."""

    def __init__(
        self, plan: FloatPlan, heads: Sequence[tuple[Tensor, Tensor]], n_new: int, scales: Sequence[Tensor]
    ) -> None:
        of_heads = [[x if len(x) == 1 else x[head : head + 1] for x in scales] for head in range(len(heads))]
        self.heads = [FloatCache(plan, *pair, n_new, own) for pair, own in zip(heads, of_heads, strict=True)]
        self.n = max(head.n for head in self.heads)

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        for head, k, v in zip(self.heads, k_new.split(1, 1), v_new.split(1, 1), strict=True):
            head.append(k, v)
        self.n += 1

    def part(self) -> Part:
        """All heads' tokens one after the other, rebuilt."""
        counts = [head.n for head in self.heads]
        k, v = (torch.cat(each, 2) for each in zip(*(head.rebuilt() for head in self.heads), strict=True))
        starts = torch.tensor([0, *accumulate(counts)][:-1], device=k.device)
        spans = Spans(starts, torch.tensor(counts, device=k.device), self.n)
        return Part(k, v, spans=spans, asked=self.heads[0].asked)

    def pack_due(self) -> None:
        """Do nothing, as in each head."""

    def counted_bytes(self) -> int:
        sides = [side for head in self.heads for side in head.sides]
        shared = sum(side.code.shared_bytes(len(self.heads)) for side in self.heads[0].sides)
        return shared + sum(side.counted_bytes() for side in sides)

    def tensors(self) -> list[Tensor]:
        return [*{(x.data_ptr(), x.shape): x for head in self.heads for x in head.tensors()}.values()]


class Floats(NamedTuple):
    """The quantizer of a plan."""

    plan: FloatPlan

    def __call__(self, k: Tensor, v: Tensor, n_new: int, seen: Seen) -> FloatCache:
        return FloatCache(self.plan, k, v, n_new, shared_scales(self.plan, [k[0]], [v[0]], seen))

    def of_heads(self, heads: Sequence[tuple[Tensor, Tensor]], n_new: int, seen: Seen) -> RaggedFloats:
        keys, values = zip(*heads, strict=True)
        scales = shared_scales(self.plan, [k[0] for k in keys], [v[0] for v in values], seen)
        return RaggedFloats(self.plan, heads, n_new, scales)


def shared_scales(plan: FloatPlan, keys: Sequence[Tensor], values: Sequence[Tensor], seen: Seen) -> list[Tensor]:
    """What tokens of K and of V share, (1 or h_kv, 1, 1) float32 each: known, or measured on these.

    They are one tensor (h_kv, n, d) each, or for each head one (1, n, d).
    """
    known = seen(CheckpointScales()).to(keys[0].device).view(2, -1, 1, 1) if plan.is_known else (None, None)
    found = list[Tensor]()
    for code, each, scale in zip((plan.key, plan.value), (keys, values), known, strict=True):
        if scale is not None and code.is_known:
            found.append(scale.contiguous())
        else:
            several = each if code.shared == "head" else [torch.cat([*each], 1)] if len(each) > 1 else each
            found.append(torch.cat([measured(x, code) for x in several]))
    return found


class FloatMethod(QuantisingMethod):
    """A method whose plan is a `FloatPlan`."""

    composes = True
    codes_singly = True

    plan: FloatPlan
    params: Any  # with `skip_layers`, `source`, `residual` and `query`

    @classmethod
    @abstractmethod
    def codes(cls, params: Any) -> tuple[FloatCode, FloatCode]:
        """Codes of K and of V."""

    @classmethod
    def plan_for(cls, params: Any, budget: Budget, shape: ModelShape) -> FloatPlan:
        return FloatPlan(*cls.codes(params), params.residual, params.query == "fp8")

    @classmethod
    def candidates(cls, params: Any, budget: Budget, shape: ModelShape) -> Iterable[FloatPlan]:
        """The one that is asked for: a scale is never changed to meet a budget."""
        yield cls.plan_for(params, budget, shape)

    @classmethod
    def code_bytes(cls, plan: FloatPlan, n: int, shape: ModelShape) -> int:
        n_exact = min(n, plan.residual)
        sides = [(plan.key, shape.d_h)] if shape.is_latent else [(plan.key, shape.d_h), (plan.value, shape.d_v)]
        return sum(
            shape.h_kv * ((n - n_exact) * code.token_bytes(d) + n_exact * d * ELEMENT_BYTES)
            + code.shared_bytes(shape.h_kv)
            for code, d in sides
        )

    @classmethod
    def check_shape(cls, params: Any, shape: ModelShape) -> None:
        skipped = params.skip_layers
        if strange := [] if skipped == "sliding" else sorted({*skipped} - {*shape.attention_layers}):
            layers = shape.attention_layers
            raise ConfigError(
                f"method.skip_layers names layer {strange[0]}, which is none that methods compress of {shape.name!r}; "
                f"use some of {layers[0]} to {layers[-1]}, or sliding"
            )
        width, block = gcd(shape.d_h, shape.d_v), max(code.group for code in cls.codes(params))
        if block and width % block:
            heads = f"{shape.d_h}{'' if shape.d_v == shape.d_h else f' and {shape.d_v}'}"
            raise ConfigError(
                f"{cls.title} has blocks of {block} channels, and {shape.name!r} has heads of {heads}, which is no "
                "multiple; use method=fp8"
            )
        if len(cls.whole_layers(params, shape)) >= len(shape.attention_layers):
            raise ConfigError(f"method.skip_layers leaves no layer of {shape.name!r} to code; name fewer")

    @classmethod
    def whole_layers(cls, params: Any, shape: ModelShape) -> Sequence[int]:
        """Layers with a sliding window stay as they are in any case: no method compresses them."""
        return [] if params.skip_layers == "sliding" else sorted({*params.skip_layers})

    @classmethod
    def check_model(cls, params: Any, model: Checkpoint) -> None:
        if params.source == "prompt":
            return
        found, name, h_kv = cache_scales(model.where), repr(model.shape.name), model.shape.h_kv
        if not found and params.source == "file":
            raise ConfigError(
                f"scales are to be those of the checkpoint, k_scale and v_scale, and {name} has none; use prompt in "
                "place of file"
            )
        counts = {len(scales) for both in found.values() for scales in both}
        if counts - {1, h_kv}:
            raise ConfigError(f"{name} has {max(counts)} scales for {h_kv} KV heads; use prompt in place of its own")
        if counts - {1} and any(code.shared == "layer" for code in cls.codes(params)):
            raise ConfigError(f"{name} has a scale for each KV head; use method=fp8 with method.scale=head")

    @classmethod
    def token_code(cls, params: Any) -> TokenCode:
        return HostFloats(cls.title.lower(), *cls.codes(params))

    @classmethod
    def label(cls, params: Any, request: BudgetRequest) -> str:
        return cls.title_of(params)

    @classmethod
    def observations(cls, params: Any, plan: FloatPlan) -> tuple[Observation, ...]:
        return (CheckpointScales(),) if plan.is_known else ()

    @classmethod
    def quantize(cls, params: Any, plan: FloatPlan) -> Quantize:
        return Floats(plan)

    def report(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "key_bits": plan.key.format.bits, "value_bits": plan.value.format.bits, "residual": plan.residual,
        }  # fmt: skip


@dataclass(frozen=True)
class HostFloats(TokenCode):
    """Tokens of a host as floats, each with the scales of its blocks."""

    name: str
    key: FloatCode
    value: FloatCode

    @property
    def title(self) -> str:
        return f"host {self.name}"

    def token_bytes(self, d_h: int, d_v: int) -> int:
        return self.key.token_bytes(d_h) + self.value.token_bytes(d_v)

    def shared_bytes(self, h_kv: int) -> int:
        return self.key.shared_bytes(h_kv) + self.value.shared_bytes(h_kv)

    def codec(self, k: Tensor, v: Tensor, seen: Seen) -> "HostCodec":
        return HostCodec(self, k, v, shared_scales(FloatPlan(self.key, self.value), [k], [v], seen))


class HostCodec:
    """Codes of K and of V, then the scales of their blocks."""

    def __init__(self, code: HostFloats, k: Tensor, v: Tensor, scales: Sequence[Tensor]) -> None:
        self.dtype, self.scales = k.dtype, scales
        self.sides = [(code.key, k.shape[-1]), (code.value, v.shape[-1])]

    def rows(self, k: Tensor, v: Tensor) -> Tensor:
        coded = [
            (code, quantise_floats(x.float(), code, shared.to(x.device)))
            for (code, _), x, shared in zip(self.sides, (k, v), self.scales, strict=True)
        ]
        scales = [packed.scales for code, packed in coded if code.scale != "none"]
        return joined(*(packed.codes for _, packed in coded), *scales)

    def rebuilt(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        n_codes = [d * code.format.bits // 8 for code, d in self.sides]
        n_scales = [code.token_bytes(d) - n for (code, d), n in zip(self.sides, n_codes, strict=True)]
        codes_k, codes_v, *numbers = rows.split([*n_codes, *n_scales], -1)
        found = list[Tensor]()
        for (code, _), codes, scales, shared in zip(self.sides, (codes_k, codes_v), numbers, self.scales, strict=True):
            real = scales.contiguous().view(torch.float32) if code.scale == "float" else scales
            found.append(rebuild_floats(Quantised(codes, real, real), code, shared.to(rows.device)).to(self.dtype))
        return found[0], found[1]
