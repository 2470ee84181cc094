"""MXFP4 and MXFP8: floats of 4 or 8 bits in blocks of 32 channels, each with a power of two as scale.

The Open Compute Project's formats: 4.25 or 8.25 bits, nothing measured and nothing that a layer's tokens share. A power
of two fits a block worse than NVFP4's scales do: its largest number may saturate, by up to a quarter.

Paper     none: the formats are those of OCP Microscaling (MX) v1.0
Symbols   OCP: X, P_i = scale of a block, its elements; E8M0, E2M1, E4M3 = formats of the two.
Per step  moved: nothing; resident: h_kv * (d_h + d_v) * 17/32 bytes a token with 4 bits, 33/32 with 8.
Differs   - the prompt attends to exact K and V, where engines read theirs back.
          - compressed-tensors takes the next power from a mantissa of 1.75 on; SGLang's fp4_mx_block16 has blocks of
            16, another power and ties away from zero, and is no MX format.
          - layers with a sliding window stay as the model has them, as under any method here.
Fails     where NVFP4 does, sooner: at 4 bits the largest number of a block is the one that is cut.
Figures   keep fewer bits, or made keys: #B79AF0, square, :
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.declared import Tokens
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.packed.floats import E2M1, E4M3, FloatCode
from kvbench.methods.quantising.floats import FloatMethod, HostFloats, Skipped

BLOCK = 32  # channels that share a scale


class MXFP4(FloatMethod):
    title = "MXFP"
    no_latents = "codes keys and values apart: here they are one"

    @dataclass(frozen=True)
    class Params:
        bits: Literal[4, 8]
        skip_layers: Skipped
        residual: Tokens
        query: Literal["exact", "fp8"]
        source: ClassVar = "prompt"  # nothing is known of a checkpoint

    params: Params

    @classmethod
    def codes(cls, params: Params) -> tuple[FloatCode, FloatCode]:
        code = FloatCode(E2M1 if params.bits == 4 else E4M3, BLOCK, "e8m0")
        return code, code

    @classmethod
    def smaller(cls, params: Params, shape: ModelShape) -> str:
        return "" if params.bits == 4 else "method=mxfp4 from 17/64 on"

    @classmethod
    def token_code(cls, params: Params) -> TokenCode:
        return HostFloats(f"mxfp{params.bits}", *cls.codes(params))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return cls.title_of(params)

    @classmethod
    def title_of(cls, params: Params) -> str:
        return f"{cls.title}{params.bits}{' (queries too)' if params.query == 'fp8' else ''}"
