"""What TurboQuant may be asked for, and what it makes of a byte budget: arithmetic, without torch.

Not here: the method (`methods/quantising/turboquant.py`), codebooks (`methods/quantising/codebooks.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.books.footprint import Footprint
from engine.budget import Budget, BudgetRequest
from engine.checks import each_one_of, whole_numbers
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.quantising.base import QuantisingRules

FP8 = 8  # bits of a key that is a float, not an entry of a codebook
NORM_BYTES, RANGE_BYTES = 2, 4  # of a token: a norm; a scale and the smallest value


class Bits(NamedTuple):
    """Of a key's and of a value's number."""

    key: int
    value: int


PRESETS = {  # in falling order of their bytes, as a byte budget tries them
    "k8v4": Bits(FP8, 4),
    "4bit_nc": Bits(4, 4),
    "k3v4_nc": Bits(3, 4),
    "3bit_nc": Bits(3, 3),
    "2bit_nc": Bits(2, 2),  # an extension: neither the paper's nor vLLM's
}


class TurboQuantRules(QuantisingRules):
    title = "TurboQuant"

    @dataclass(frozen=True)
    class Params:
        preset: str
        rotation: str
        objective: str
        values: str
        boundary_layers: int
        seed: int

        def __post_init__(self) -> None:
            each_one_of(
                "method", self, preset=PRESETS, rotation=("hadamard", "haar"), objective=("mse", "prod"),
                values=("uniform", "mse"),
            )  # fmt: skip
            whole_numbers("method", self, boundary_layers=0, seed=0)
            if self.objective == "prod" and self.preset == "k8v4":
                raise ConfigError(
                    "method.objective=prod needs a codebook, and the keys of method.preset=k8v4 have none"
                )

    @dataclass(frozen=True)
    class Plan:
        preset: str
        key_bits: int
        value_bits: int

    @classmethod
    def check_shape(cls, params: Params, shape: ModelShape) -> None:
        if params.rotation == "hadamard" and shape.d_h & (shape.d_h - 1):
            raise ConfigError(
                f"method.rotation=hadamard needs a power of two, and {shape.name} has {shape.d_h} dimensions; "
                "use method.rotation=haar"
            )
        if cls.n_whole(params, shape) >= len(shape.attention_layers):
            raise ConfigError(
                f"method.boundary_layers={params.boundary_layers} leaves no layer of {shape.name} to compress; use at "
                f"most {(len(shape.attention_layers) - 1) // 2}"
            )

    @classmethod
    def n_whole(cls, params: Params, shape: ModelShape) -> int:
        return len(boundary(params, shape))

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return TurboQuantRules.Plan(params.preset, *PRESETS[params.preset])

    @classmethod
    def candidates(cls, params: Params, budget: Budget, shape: ModelShape) -> Iterable[Plan]:
        """The presets from the table's first on; those without a codebook only where none is needed."""
        for name, bits in PRESETS.items():
            if params.objective == "mse" or bits.key != FP8:
                yield TurboQuantRules.Plan(name, *bits)

    @classmethod
    def token_bytes_of(cls, params: Params, plan: Plan, d_h: int) -> int:
        """Bytes of one token of a KV head."""
        return key_bytes_of(plan.key_bits, d_h, params.objective) + value_bytes_of(plan.value_bits, d_h, params.values)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        n_bytes = shape.h_kv * budget.s_prompt * cls.token_bytes_of(params, plan, shape.d_h)
        return Footprint(n_bytes, n_whole=cls.n_whole(params, shape))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = [] if request.memory_alone else [params.preset.removesuffix("_nc").replace("bit", " bit")]
        notes += ["prod"] if params.objective == "prod" else []
        notes += [f"{2 * params.boundary_layers} layers whole"] if params.boundary_layers else []
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title


def boundary(params: TurboQuantRules.Params, shape: ModelShape) -> frozenset[int]:
    """The first and last layers, which stay as they are."""
    n = params.boundary_layers
    return frozenset((*shape.attention_layers[:n], *shape.attention_layers[len(shape.attention_layers) - n :]))


def key_bytes_of(bits: int, d_h: int, objective: str) -> int:
    """A norm and codes, or eight-bit floats; the residual's length beside the signs of `prod`."""
    if bits == FP8:
        return d_h
    return -(-d_h * bits // 8) + NORM_BYTES * (2 if objective == "prod" else 1)


def value_bytes_of(bits: int, d_h: int, values: str) -> int:
    return -(-d_h * bits // 8) + (RANGE_BYTES if values == "uniform" else NORM_BYTES)
