"""TurboQuant (Zandieh et al., ICLR 2026): rotate a vector, and one fixed codebook serves every coordinate of all.

A vector divided by its norm and rotated has coordinates of one known distribution, so that a codebook solved once from
it is near-optimal: nothing is calibrated, and there are no scales of groups, only a norm per vector. Every token is
packed as it comes, the current one before it is attended to.

Paper     arXiv:2504.19874, 2025; Zandieh, Amir; TurboQuant: Online Vector Quantization with Near-optimal Distortion
          Rate
Symbols   paper: Pi, S, b, gamma = rotation, Gaussian matrix, bits, length of the residual.
Per step  moved: nothing; resident: h_kv * tokens * (key bytes + value bytes), with keys ceil(d_h * b / 8) + 2 and
          values ceil(d_h * b / 8) + 4; layers that stay whole at 4 * h_kv * d_h a token.
          Rotation and codebook are constants.
Differs   as vLLM's backend, which differs from the paper: Hadamard matrix without random signs in place of a random
          rotation, a codebook of the normal distribution, keys scaled to their stored norm when they are read, values
          uniform and not rotated. `objective=prod`, `values=mse` and `rotation=haar` are the paper's. vLLM leaves two
          layers whole at either end (`turboquant_vllm`); its own codebook is off by up to 0.002 standard deviations.
          Attention reads 2, 4 and 8 bits packed, on a GPU 3 bits too. Other keys and values are kept packed, and
          rebuilt for the length of a layer's attention.
Fails     small models lose much below 4 bits. `prod` is worse than `mse`: softmax amplifies the noise that it adds.
Figures   keep fewer bits, or made keys: #0AA29C, pillar, --
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.footprint import Footprint
from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.caches.asked import Rotated
from kvbench.engine.caches.quantized import Packing, Packings, QuantizedCache
from kvbench.engine.declared import Index, Named
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.placement import Quantize
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.fast import takes
from kvbench.kernels.packed.attend import Packed, Side
from kvbench.kernels.packed.codes import BY_TABLE, BY_TOKEN, BY_UNIT_TABLE, Quantised, by_group, pack, unpack, with_room
from kvbench.kernels.packed.floats import E4M3, FloatCode
from kvbench.kernels.packed.tokens import Ageing, UnitPacking
from kvbench.kernels.packed.tokens import Book as TokenBook
from kvbench.kernels.rows.append import Place
from kvbench.methods.quantising import codebooks
from kvbench.methods.quantising.base import QuantisingMethod
from kvbench.methods.quantising.floats import CodedSide
from kvbench.methods.traits import Traits

FP8 = 8  # bits of a key that is a float, not an entry of a codebook
NORM_BYTES, RANGE_BYTES = 2, 4  # of a token: a norm; a scale and the smallest value


class Bits(NamedTuple):
    """Bits of a key's and of a value's number."""

    key: int
    value: int


PRESETS = {  # in falling order of their bytes, as a byte budget tries them
    "k8v4": Bits(FP8, 4),
    "4bit_nc": Bits(4, 4),
    "k3v4_nc": Bits(3, 4),
    "3bit_nc": Bits(3, 3),
    "2bit_nc": Bits(2, 2),  # an extension: neither the paper's nor vLLM's
}


TINY = 1e-8  # added to a norm that is divided by, and the smallest scale, as vLLM has them

TINY_SQUARE = 1e-16  # under the root of a rebuilt key's norm


@dataclass(frozen=True, eq=False)
class Book:
    """The constants of a run, for heads of one size."""

    rotation: Tensor  # (d_h, d_h)
    table: Tensor  # (2**b,) of keys; of `prod` with one bit less
    midpoints: Tensor
    value_table: Tensor | None  # (2**b,), where values are rotated too
    gaussian: Tensor | None  # (d_h, d_h), of `prod`


@cache
def book_of(params: "TurboQuant.Params", plan: "TurboQuant.Plan", d_h: int) -> Book:
    """The rotation and codebooks, which follow from the parameters alone."""
    rotation = codebooks.hadamard(d_h) if params.rotation == "hadamard" else codebooks.haar(d_h, params.seed)
    if plan.key_bits == FP8:
        table = torch.zeros(1)
    elif params.objective == "prod":
        table = codebooks.centroids(d_h, plan.key_bits - 1, is_normal=False)
    else:
        table = codebooks.centroids(d_h, plan.key_bits, is_normal=True)
    rotated = params.values == "mse"
    value_table = codebooks.centroids(d_h, plan.value_bits, is_normal=False) if rotated else None
    gaussian = codebooks.gaussian(d_h, params.seed) if params.objective == "prod" else None
    return Book(rotation, table, codebooks.midpoints(table), value_table, gaussian)


class TurboQuantCache(QuantizedCache):
    """Keys and values packed token by token; there are no exact ones."""

    def __init__(
        self, params: "TurboQuant.Params", plan: "TurboQuant.Plan", book: Book, k: Tensor, v: Tensor, n_new: int
    ) -> None:
        self.params, self.plan, self.nothing = params, plan, k[:, :, :0]
        self.n, self.h_kv, self.d_h = k.shape[2], k.shape[1], k.shape[3]
        self.rotation, self.midpoints = book.rotation.to(k.device), book.midpoints.to(k.device)
        self.table = torch.nn.functional.pad(book.table, (0, max(0, 16 - len(book.table)))).to(k.device)
        self.value_table = None if book.value_table is None else book.value_table.to(k.device)
        self.gaussian = None if book.gaussian is None else book.gaussian.to(k.device)
        room = self.n + n_new
        one = torch.ones(1, 1, 1, device=k.device)
        self.floats = CodedSide(FloatCode(E4M3), k, one, 0, n_new) if plan.key_bits == FP8 else None
        self.keys = self.floats.packed if self.floats else with_room(self.coded_keys(k[0].float()), BY_TOKEN, room)
        self.values = with_room(self.coded_values(v[0].float()), BY_TOKEN, room)
        if params.objective == "mse":  # keys have one number next to their codes, and rotated values too
            self.keys = self.keys._replace(zeros=self.keys.scales)
        if params.values == "mse":
            self.values = self.values._replace(zeros=self.values.scales)

    def coded_keys(self, k: Tensor) -> Quantised:
        """Codes of keys (h_kv, n, d_h) with their norms, and for `prod` the lengths of residuals."""
        if self.params.objective == "prod":
            assert self.gaussian is not None, "no matrix for the residual"
            table = self.table[: len(self.midpoints) + 1]
            codes, norms = codebooks.mse_codes(k, self.rotation, table)
            signs, lengths = codebooks.signs_of(k, norms, table[codes.long()] @ self.rotation, self.gaussian)
            packed = torch.cat([pack(codes, self.plan.key_bits - 1), pack(signs.to(torch.uint8), 1)], -1)
            return Quantised(packed, norms.half(), lengths.half())
        norms = k.norm(dim=-1, keepdim=True)
        codes = torch.bucketize((k / (norms + TINY)) @ self.rotation.mT, self.midpoints, right=True)
        halves = norms.half()
        return Quantised(pack(codes.to(torch.uint8), self.plan.key_bits), halves, halves)

    def coded_values(self, v: Tensor) -> Quantised:
        bits = self.plan.value_bits
        if self.value_table is not None:
            codes, norms = codebooks.mse_codes(v, self.rotation, self.value_table)
            return Quantised(pack(codes, bits), norms.half(), norms.half())
        low, high = v.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).clamp(min=TINY)
        codes = ((v - low) / scale + 0.5).trunc().clamp(0, 2**bits - 1).to(torch.uint8)
        return Quantised(pack(codes, bits), by_group(scale.half()), by_group(low.half()))

    @property
    def is_rotated(self) -> bool:
        """Whether keys are attended to in the frame in which they are packed, by a query that is rotated too."""
        return self.plan.key_bits != FP8 and self.params.objective == "mse"

    def rebuilt_keys(self) -> Tensor:
        """(h_kv, n, d_h) float32, rotated where `is_rotated` says so."""
        if self.floats:
            return self.floats.rebuilt()
        codes, norms, lengths = (x[:, : self.n] for x in self.keys)
        bits = self.plan.key_bits
        if self.params.objective == "prod":
            assert self.gaussian is not None, "no matrix for the residual"
            split = -(-self.d_h * (bits - 1) // 8)
            indices = unpack(codes[..., :split], bits - 1, self.d_h)
            signs = unpack(codes[..., split:], 1, self.d_h)
            return codebooks.prod_rebuilt(
                indices, norms.float(), signs, lengths.float(), self.rotation, self.table, self.gaussian
            )
        units = self.table[unpack(codes, bits, self.d_h).long()]
        units = units / (units.square().sum(-1, keepdim=True) + TINY_SQUARE).sqrt()
        return units * norms.float()

    def rebuilt_values(self) -> Tensor:
        codes, scales, lows = (x[:, : self.n] for x in self.values)
        indices = unpack(codes, self.plan.value_bits, self.d_h)
        if self.value_table is not None:
            return codebooks.mse_rebuilt(indices, scales.float(), self.rotation, self.value_table)
        return indices * scales.float() + lows.float()

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        if self.floats:
            self.floats.append(k_new)
        keys = [] if self.floats else [(self.keys, self.coded_keys(k_new[0].float()))]
        for held, new in (*keys, (self.values, self.coded_values(v_new[0].float()))):
            for target, x in zip(held, new, strict=True):
                target[:, self.n : self.n + 1] = x
        self.n += 1

    @classmethod
    def append_rows(
        cls, caches: Sequence[QuantizedCache], k_new: Sequence[Tensor], v_new: Sequence[Tensor]
    ) -> list[list[Place]]:
        """Codecs that make codes alike do so in one launch."""
        mine = cast("Sequence[TurboQuantCache]", caches)
        for quantized, k, v in zip(mine, k_new, v_new, strict=True):
            if not quantized.packs_in_kernels:
                quantized.append(k, v)
        for some in alike(mine):
            keys = [Ageing(k_new[i], quantized.keys, quantized.n) for i, quantized in some]
            values = [Ageing(v_new[i], quantized.values, quantized.n) for i, quantized in some]
            UnitPacking(keys, values, some[0][1].book).pack(k_new[some[0][0]], v_new[some[0][0]])
            for _, quantized in some:
                quantized.n += 1
        return [[] for _ in caches]

    def part(self) -> Part:
        key_kind = BY_UNIT_TABLE if self.is_rotated else BY_TABLE
        key_bits = self.plan.key_bits if self.is_rotated else FP8  # others are rebuilt by themselves
        value_kind = BY_TOKEN if self.value_table is None else BY_TABLE
        k = Side(key_kind, key_bits, self.d_h, self.n, self.keys, self.nothing, self.table, self.rebuilt_keys)
        k = self.floats.side() if self.floats else k
        v = Side(
            value_kind, self.plan.value_bits, self.d_h, self.n, self.values, self.nothing, rebuild=self.rebuilt_values
        )
        packed, asked = Packed(k, v, self.n, grows=(1, 1)), None
        if self.is_rotated:
            asked = Rotated(self.rotation, (self.params.rotation, self.params.seed))
        return Part(self.nothing, self.nothing, packed=packed, asked=asked)

    def growing(self) -> Growing | None:
        return Growing((1,), (), self.keys.codes.shape[1] - self.n) if self.packs_in_kernels else None

    def repeat(self) -> None:
        self.n += 1

    @property
    def packs_in_kernels(self) -> bool:
        return self.is_rotated and self.value_table is None and takes("packing", self.table.device)

    @classmethod
    def packing(
        cls, caches: Sequence[QuantizedCache], newest: Sequence[tuple[Tensor, Tensor]], rows: Sequence[int]
    ) -> Packing | None:
        """Every token's key and value."""
        return Packings(
            [
                UnitPacking(
                    [Ageing(newest[i][0], quantized.keys, quantized.n - 1) for i, quantized in some],
                    [Ageing(newest[i][1], quantized.values, quantized.n - 1) for i, quantized in some],
                    some[0][1].book, rows[some[0][0]],
                )
                for some in alike(cast("Sequence[TurboQuantCache]", caches))
            ]
        )  # fmt: skip

    @property
    def book(self) -> TokenBook:
        return TokenBook(self.rotation, self.midpoints, self.plan.key_bits, self.plan.value_bits, TINY)

    def pack_due(self) -> None:
        """Do nothing: no token waits to be packed."""

    def counted_bytes(self) -> int:
        of_token = key_bytes_of(self.plan.key_bits, self.d_h, self.params.objective)
        return self.h_kv * self.n * (of_token + value_bytes_of(self.plan.value_bits, self.d_h, self.params.values))

    def tensors(self) -> list[Tensor]:
        keys = self.floats.tensors() if self.floats else self.keys
        return list({x.data_ptr(): x for x in (*keys, *self.values)}.values())


def alike(caches: Sequence[TurboQuantCache]) -> list[list[tuple[int, TurboQuantCache]]]:
    """Codecs, and their places, whose tokens kernels pack in one launch."""
    found: dict[Hashable, list[tuple[int, TurboQuantCache]]] = {}
    for i, quantized in enumerate(caches):
        if quantized.packs_in_kernels:
            found.setdefault((quantized.plan, quantized.params.rotation, quantized.params.seed), []).append(
                (i, quantized)
            )
    return [*found.values()]


class TurboQuant(QuantisingMethod):
    title = "TurboQuant"
    no_widths = "turns both by one matrix"
    no_latents = "packs keys and values apart: here they are one"

    @classmethod
    def traits_of(cls, params: "TurboQuant.Params") -> Traits:
        is_rotated = params.objective == "mse" and params.preset != "k8v4"
        turns = f"method=turboquant with method.preset={params.preset}" if is_rotated else ""
        return replace(super().traits_of(params), turns_queries=turns)

    @dataclass(frozen=True)
    class Params:
        preset: Annotated[str, Named((*PRESETS,))]
        rotation: Literal["hadamard", "haar"]
        objective: Literal["mse", "prod"]
        values: Literal["uniform", "mse"]
        boundary_layers: Index
        seed: Index

        def __post_init__(self) -> None:
            if self.objective == "prod" and self.preset == "k8v4":
                raise ConfigError(
                    "method.objective=prod needs a codebook, and the keys of method.preset=k8v4 have none"
                )

    @dataclass(frozen=True)
    class Plan:
        preset: str
        key_bits: int
        value_bits: int

    params: Params
    plan: Plan

    @classmethod
    def check_shape(cls, params: Params, shape: ModelShape) -> None:
        if params.rotation == "hadamard" and shape.d_h & (shape.d_h - 1):
            raise ConfigError(
                f"method.rotation=hadamard needs a power of two, and {shape.name} has {shape.d_h} dimensions; "
                "use method.rotation=haar"
            )
        if len(cls.whole_layers(params, shape)) >= len(shape.attention_layers):
            raise ConfigError(
                f"method.boundary_layers={params.boundary_layers} leaves no layer of {shape.name} to compress; use at "
                f"most {(len(shape.attention_layers) - 1) // 2}"
            )

    @classmethod
    def whole_layers(cls, params: Params, shape: ModelShape) -> Sequence[int]:
        return sorted(boundary(params, shape))

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return TurboQuant.Plan(params.preset, *PRESETS[params.preset])

    @classmethod
    def candidates(cls, params: Params, budget: Budget, shape: ModelShape) -> Iterable[Plan]:
        """The presets from the table's first on; those without a codebook only where none is needed."""
        for name, bits in PRESETS.items():
            if params.objective == "mse" or bits.key != FP8:
                yield TurboQuant.Plan(name, *bits)

    @classmethod
    def token_bytes_of(cls, params: Params, plan: Plan, d_h: int) -> int:
        """Bytes of one token of a KV head."""
        return key_bytes_of(plan.key_bits, d_h, params.objective) + value_bytes_of(plan.value_bits, d_h, params.values)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        n_bytes = shape.h_kv * budget.s_prompt * cls.token_bytes_of(params, plan, shape.d_h)
        return Footprint(n_bytes, n_whole=len(cls.whole_layers(params, shape)))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = [] if request.memory_alone else [preset_words(params.preset)]
        notes += ["prod"] if params.objective == "prod" else []
        notes += [f"{2 * params.boundary_layers} layers whole"] if params.boundary_layers else []
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title

    @classmethod
    def chosen(cls, report: Mapping[str, Any]) -> str:
        return f"({preset_words(report['preset'])})"

    @classmethod
    def quantize(cls, params: Params, plan: Plan) -> Quantize:
        return lambda k, v, n_new, _: TurboQuantCache(params, plan, book_of(params, plan, k.shape[3]), k, v, n_new)

    def report(self) -> dict[str, Any]:
        return {"preset": self.plan.preset}


def preset_words(preset: str) -> str:
    return preset.removesuffix("_nc").replace("bit", " bit")


def boundary(params: TurboQuant.Params, shape: ModelShape) -> frozenset[int]:
    """The first and last layers, which stay as they are."""
    n = params.boundary_layers
    return frozenset((*shape.attention_layers[:n], *shape.attention_layers[len(shape.attention_layers) - n :]))


def key_bytes_of(bits: int, d_h: int, objective: str) -> int:
    """Bytes of a norm and codes, or of eight-bit floats; for `prod` of the residual's length and signs too."""
    if bits == FP8:
        return d_h
    return -(-d_h * bits // 8) + NORM_BYTES * (2 if objective == "prod" else 1)


def value_bytes_of(bits: int, d_h: int, values: str) -> int:
    return -(-d_h * bits // 8) + (RANGE_BYTES if values == "uniform" else NORM_BYTES)
