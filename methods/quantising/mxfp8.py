"""MXFP8: floats of 8 bits in blocks of 32 channels, each with a power of two as scale: 8.25 bits.

Paper     none: the format is that of OCP Microscaling (MX) v1.0
Symbols   OCP: X, P_i = scale of a block, its elements; E8M0, E4M3 = formats of the two.
Per step  moved: nothing; resident: h_kv * (d_h + d_v) * 33/32 bytes a token.
Differs   as `mxfp4.py` says.
Fails     nothing that `method=fp8` with a scale per token would hold, which has as many bytes at heads of 128.
Figures   keep floats of fewer bits: #CE03E8, slant, --
"""

from typing import ClassVar

from kvbench.engine.shapes import ModelShape
from kvbench.kernels.packed.floats import E4M3
from kvbench.methods.quantising.mxfp4 import MXFP4


class MXFP8(MXFP4):
    title = "MXFP8"
    element: ClassVar = E4M3

    @classmethod
    def smaller(cls, params: MXFP4.Params, shape: ModelShape) -> str:
        return "method=mxfp4 from 17/64 on"
