"""MXFP4: floats of 4 bits in blocks of 32 channels, each with a power of two as scale: 4.25 bits.

One of the Open Compute Project's formats: nothing is measured, and a layer's tokens share nothing. A power of two fits
a block worse than NVFP4's scales do: its largest number may saturate, by up to a quarter.

Paper     none: the format is that of OCP Microscaling (MX) v1.0
Symbols   OCP: X, P_i = scale of a block, its elements; E8M0, E2M1 = formats of the two.
Per step  moved: nothing; resident: h_kv * (d_h + d_v) * 17/32 bytes a token.
Differs   - the prompt attends to exact K and V, where engines read theirs back.
          - compressed-tensors takes the next power from a mantissa of 1.75 on; SGLang's fp4_mx_block16 has blocks of
            16, another power and ties away from zero, and is no MX format.
          - layers with a sliding window stay as the model has them, as under any method here.
Fails     where NVFP4 does, sooner: the largest number of a block is the one that is cut.
Figures   keep floats of fewer bits: #D04726, hexagon, :
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvbench.engine.declared import Tokens
from kvbench.kernels.packed.floats import E2M1, FloatCode
from kvbench.methods.quantising.floats import FloatMethod, Skipped

BLOCK = 32  # channels that share a scale


class MXFP4(FloatMethod):
    title = "MXFP4"
    no_latents = "codes keys and values apart: here they are one"
    element: ClassVar = E2M1

    @dataclass(frozen=True)
    class Params:
        skip_layers: Skipped
        residual: Tokens
        query: Literal["exact", "fp8"]

        @property
        def source(self) -> str:
            """Nothing is known of a checkpoint."""
            return "prompt"

    params: Params

    @classmethod
    def codes(cls, params: Params) -> tuple[FloatCode, FloatCode]:
        code = FloatCode(cls.element, BLOCK, "e8m0")
        return code, code

    @classmethod
    def title_of(cls, params: Params) -> str:
        return f"{cls.title} (queries too)" if params.query == "fp8" else cls.title
