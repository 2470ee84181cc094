"""NVFP4: floats of 4 bits in blocks of 16 channels, an FP8 scale for each block, one more for each layer: 4.5 bits.

Blackwell's format for caches. No calibration, and every token by itself, the current one before it is attended to. Keys
may be FP8, since their errors pass the exponential of the softmax and those of values do not. MXFP4 and MXFP8 have
blocks of 32 with a power of two as scale.

Paper     none: the formats are NVIDIA's NVFP4 and the Open Compute Project's MX v1.0, the scales vLLM's and SGLang's
Symbols   g = the scale that a layer's tokens share (k_scale, v_scale of vLLM, a multiplier); 4-over-6 = `over: 4`.
Per step  moved: nothing; resident, for d_h = d_v = d: h_kv * 9d/8 bytes a token, with keys in FP8 25d/16, in MXFP4
          17d/16, in MXFP8 33d/16; 4 bytes for each side of a layer whose g is measured.
Differs   - the prompt attends to exact K and V, where engines read theirs back; g is the prompt's, where vLLM has 1
            unless the checkpoint has one (`nvfp4_vllm`).
          - divisions in place of engines' approximate reciprocals, which round a few codes the other way.
          - `over: 4` takes the sum of squares for the error by which a block chooses; the kernel was not read.
          - SGLang's fp4_mx_block16 is no MX format, and is not here.
          - layers with a sliding window stay as the model has them, as under any method here.
Fails     long answers lose a little: AIME25 with Qwen3-8B 66.7 → 64.1 in vLLM's own test.
Figures   keep fewer bits, or made keys: #9C6ADE, square, --
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.declared import Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.packed.floats import E2M1, E4M3, FloatCode
from kvbench.methods.quantising.floats import FloatMethod, FloatPlan, HostFloats, Skipped

BLOCKS = {"nvfp4": 16, "fp8": 1, "mxfp4": 32, "mxfp8": 32}  # channels that share a scale
TITLES = {"nvfp4": "NVFP4", "fp8": "FP8 K NVFP4 V", "mxfp4": "MXFP4", "mxfp8": "MXFP8"}  # by the keys' form
Keys = Literal["nvfp4", "fp8", "mxfp4", "mxfp8"]


class NVFP4(FloatMethod):
    title = "NVFP4"
    no_latents = "codes keys and values apart: here they are one"

    @dataclass(frozen=True)
    class Params:
        keys: Keys
        values: Literal["nvfp4", "mxfp4", "mxfp8"]
        global_scale: Literal["prompt", "one", "file", "found"]
        over: Literal[6, 4]
        skip_layers: Skipped
        residual: Tokens
        query: Literal["exact", "fp8"]

        def __post_init__(self) -> None:
            if self.keys != self.values and (self.keys, self.values) != ("fp8", "nvfp4"):
                raise ConfigError(
                    f"method.keys={self.keys} with method.values={self.values} is no format; use the same for both, or "
                    "method.keys=fp8 with method.values=nvfp4"
                )

        @property
        def source(self) -> str:
            return self.global_scale

    params: Params

    @classmethod
    def check_shape(cls, params: Params, shape: ModelShape) -> None:
        super().check_shape(params, shape)
        width, block = gcd(shape.d_h, shape.d_v), max(BLOCKS[params.keys], BLOCKS[params.values])
        if width % block:
            raise ConfigError(
                f"{TITLES[params.keys]} has blocks of {block} channels, and {shape.name!r} has heads of {shape.d_h}"
                f"{'' if shape.d_v == shape.d_h else f' and {shape.d_v}'}, which is no multiple; use method=fp8"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> FloatPlan:
        return FloatPlan(*codes_of(params), params.residual, params.query == "fp8")

    @classmethod
    def candidates(cls, params: Params, budget: Budget, shape: ModelShape) -> Iterable[FloatPlan]:
        """Keys in FP8 come first where there is room; other forms are those that are asked for."""
        if params.keys == "nvfp4":
            yield cls.plan_for(replace(params, keys="fp8"), budget, shape)
        yield cls.plan_for(params, budget, shape)

    @classmethod
    def smaller(cls, params: Params, shape: ModelShape) -> str:
        return "" if params.keys == "mxfp4" or gcd(shape.d_h, shape.d_v) % 32 else "method=mxfp4 from 17/64 on"

    @classmethod
    def token_code(cls, params: Params) -> TokenCode:
        return HostFloats(TITLES[params.keys].lower(), *codes_of(params))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        is_chosen = request.memory is not None and request.memory_alone and params.values == "nvfp4"
        return cls.title if is_chosen else cls.title_of(params)

    @classmethod
    def title_of(cls, params: Params) -> str:
        notes = ["g = 1"] if params.global_scale == "one" and params.values == "nvfp4" else []
        notes += ["4-over-6"] if params.over == 4 else []
        notes += ["queries too"] if params.query == "fp8" else []
        title = TITLES[params.keys]
        return f"{title} ({', '.join(notes)})" if notes else title

    @classmethod
    def chosen(cls, report: Mapping[str, Any]) -> str:
        return "(FP8 keys)" if report["key_bits"] > report["value_bits"] else ""


def codes_of(params: NVFP4.Params) -> tuple[FloatCode, FloatCode]:
    """Codes of K and of V."""
    of_block = FloatCode(
        E2M1, BLOCKS["nvfp4"], "e4m3", "one" if params.global_scale == "one" else "layer", E2M1.top * E4M3.top,
        params.global_scale in ("file", "found"), (6, 4) if params.over == 4 else (6,),
    )  # fmt: skip
    codes = {
        "nvfp4": of_block,
        "fp8": FloatCode(E4M3),
        "mxfp4": FloatCode(E2M1, BLOCKS["mxfp4"], "e8m0"),
        "mxfp8": FloatCode(E4M3, BLOCKS["mxfp8"], "e8m0"),
    }
    return codes[params.keys], codes[params.values]
