"""NVFP4: floats of 4 bits in blocks of 16 channels, an FP8 scale for each block, one more for each layer: 4.5 bits.

Blackwell's format for caches. No calibration, and every token by itself, the current one before it is attended to. With
a byte budget alone keys are FP8 where that fits (`fp8_nvfp4.py`).

Paper     none: the format is NVIDIA's, the scales are vLLM's and SGLang's
Symbols   g = the scale that a layer's tokens share (k_scale, v_scale of vLLM, a multiplier); 4-over-6 = `over: 4`.
Per step  moved: nothing; resident: h_kv * (d_h + d_v) * 9/16 bytes a token, and 8 a layer where g is measured.
Differs   - the prompt attends to exact K and V, where engines read theirs back; g is the prompt's, where vLLM has 1
            unless the checkpoint has one (`nvfp4_vllm`).
          - divisions in place of engines' approximate reciprocals, which round a few codes the other way.
          - `over: 4` takes the sum of squares for the error by which a block chooses; the kernel was not read.
          - layers with a sliding window stay as the model has them, as under any method here.
Fails     long answers lose a little: AIME25 with Qwen3-8B 66.7 → 64.1 in vLLM's own test.
Figures   keep floats of fewer bits: #813BF5, hexagon, --
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from kvbench.engine.budget import Budget
from kvbench.engine.declared import Tokens
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.packed.floats import E2M1, E4M3, FloatCode
from kvbench.methods.quantising.floats import FloatMethod, FloatPlan, Skipped

BLOCK = 16  # channels that share a scale


class NVFP4(FloatMethod):
    title = "NVFP4"
    no_latents = "codes keys and values apart: here they are one"

    @dataclass(frozen=True)
    class Params:
        global_scale: Literal["prompt", "one", "file", "found"]
        over: Literal[6, 4]
        skip_layers: Skipped
        residual: Tokens
        query: Literal["exact", "fp8"]

        @property
        def source(self) -> str:
            return self.global_scale

    params: Params

    @classmethod
    def codes(cls, params: Params) -> tuple[FloatCode, FloatCode]:
        of_block = FloatCode(
            E2M1, BLOCK, "e4m3", "one" if params.global_scale == "one" else "layer", E2M1.top * E4M3.top,
            params.global_scale in ("file", "found"), (6, 4) if params.over == 4 else (6,),
        )  # fmt: skip
        return of_block, of_block

    @classmethod
    def candidates(cls, params: Params, budget: Budget, shape: ModelShape) -> Iterable[FloatPlan]:
        """Keys in FP8 come first where there is room."""
        plan = cls.plan_for(params, budget, shape)
        yield replace(plan, key=FloatCode(E4M3))
        yield plan

    @classmethod
    def smaller(cls, params: Params, shape: ModelShape) -> str:
        return "" if gcd(shape.d_h, shape.d_v) % 32 else "method=mxfp4 from 17/64 on"

    @classmethod
    def title_of(cls, params: Params) -> str:
        notes = ["g = 1"] if params.global_scale == "one" else []
        notes += ["4-over-6"] if params.over == 4 else []
        notes += ["queries too"] if params.query == "fp8" else []
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title

    @classmethod
    def chosen(cls, report: Mapping[str, Any]) -> str:
        return "with FP8 keys" if report["key_bits"] > report["value_bits"] else ""
