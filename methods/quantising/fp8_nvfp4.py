"""FP8 keys and NVFP4 values: 12.5 bits a pair, since what keys lose counts more than what values lose.

An error of a key passes through the exponential of the softmax, and one of a value does not.

Paper     none: vLLM's fp8_k_nvfp4_v
Symbols   as in `nvfp4.py`; keys have no scale.
Per step  moved: nothing; resident: h_kv * (d_h + d_v * 9/16) bytes a token, and 4 a layer where g is measured.
Differs   as `fp8.py` and `nvfp4.py` say; vLLM's was not merged when this was written.
Fails     where keys pass 448, as `fp8.py` says.
Figures   keep floats of fewer bits: #C349BB, hexagon, -.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.engine.budget import Budget
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.packed.floats import E4M3, FloatCode
from kvbench.methods.quantising.floats import FloatPlan
from kvbench.methods.quantising.nvfp4 import NVFP4


class FP8NVFP4(NVFP4):
    title = "FP8 K NVFP4 V"

    @classmethod
    def codes(cls, params: NVFP4.Params) -> tuple[FloatCode, FloatCode]:
        return FloatCode(E4M3), super().codes(params)[1]

    @classmethod
    def candidates(cls, params: NVFP4.Params, budget: Budget, shape: ModelShape) -> Iterable[FloatPlan]:
        yield cls.plan_for(params, budget, shape)

    @classmethod
    def smaller(cls, params: NVFP4.Params, shape: ModelShape) -> str:
        return "method=nvfp4 from 0.2813 on"

    @classmethod
    def chosen(cls, report: Mapping[str, Any]) -> str:
        return ""
