"""FP8: every number of K and V becomes one byte, a float of 8 bits, with a scale for all, or one per token and head.

What engines mean by `kv-cache-dtype fp8`, half of the bytes and next to no loss where scales suit: the row that any
other format is compared with. Every token is packed as it comes, the current one before it is attended to.

Paper     none: the formats are the Open Compute Project's 8-bit floats, the scales vLLM's and SGLang's
Symbols   vLLM: k_scale, v_scale = scales that all tokens share, static; fp8_per_token_head = `scale: token_head`.
Per step  moved: nothing; resident: h_kv * (d_h + d_v) bytes a token, 8 more with `token_head`; 8 a layer with `tensor`
          from the prompt, 8 * h_kv with `head`. Scales of the checkpoint are constants.
Differs   - the prompt attends to exact K and V, where vLLM reads its cache back; K and V are divided in float32, where
            SGLang does so in the model's dtype.
          - `query: fp8` codes queries per token and head, where vLLM has a static scale; weights stay exact, which
            FlashAttention-3 turns into FP8 too.
          - layers with a sliding window stay as the model has them, as under any method here.
          - a latent that all heads share is coded once, its rotary part too; vLLM's fp8_ds_mla leaves that at 16 bits.
Fails     `scale: one` where keys pass 448 in single channels (Qwen2.5), or where values are below 2^-10.
Figures   keep floats of fewer bits: #287F71, hexagon, -
"""

from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, cast

import torch
from torch import Tensor

from kvbench.engine.declared import Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.quantized import QuantizedLayer
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.packed.floats import E4M3, E5M2, FloatCode
from kvbench.methods.quantising.floats import FloatCache, FloatMethod, Reach, Skipped

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
SHARED: dict[str, Literal["one", "layer", "head"]] = {
    "one": "one", "tensor": "layer", "head": "head", "token_head": "one",
}  # fmt: skip
SCALE_WORDS = {
    "one": "", "tensor": "a scale per layer", "head": "a scale per head", "token_head": "a scale per token",
}  # fmt: skip


class FP8(FloatMethod):
    title = "FP8"

    @dataclass(frozen=True)
    class Params:
        format: Literal["e4m3", "e5m2"]
        scale: Literal["one", "tensor", "head", "token_head"]
        source: Literal["prompt", "file", "found"]
        range: tuple[Reach, Reach] | Literal["top"]
        skip_layers: Skipped
        residual: Tokens
        query: Literal["exact", "fp8"]

        def __post_init__(self) -> None:
            if self.source != "prompt" and self.scale in ("one", "token_head"):
                raise ConfigError(
                    f"method.source={self.source} reads scales of layers or heads, and method.scale={self.scale} has "
                    "none; use method.scale=tensor or head"
                )
            if self.range != "top" and (self.scale != "tensor" or self.source != "prompt"):
                raise ConfigError(
                    "method.range is of scales that are measured per layer; use method.scale=tensor with "
                    "method.source=prompt, or method.range=top"
                )

    params: Params

    @classmethod
    def codes(cls, params: Params) -> tuple[FloatCode, FloatCode]:
        form = FORMATS[params.format]
        reach = (form.top, form.top) if params.range == "top" else params.range
        scale: Literal["none", "float"] = "float" if params.scale == "token_head" else "none"
        k, v = (FloatCode(form, 0, scale, SHARED[params.scale], most, params.source != "prompt") for most in reach)
        return k, v

    @classmethod
    def smaller(cls, params: Params, shape: ModelShape) -> str:
        return "" if shape.is_latent or gcd(shape.d_h, shape.d_v) % 16 else "method=nvfp4 from 0.2813 on"

    def report(self) -> dict[str, Any]:
        """Which shares of each coded layer's numbers stand at the largest value, where more would, and at zero."""
        layers = [x.quantized for x in self.store.layers.values() if isinstance(x, QuantizedLayer)]
        caches = cast("list[FloatCache]", layers)
        sizes = [torch.cat([side.sizes() for side in cache.sides]) for cache in caches]
        top = self.plan.key.format.top_code
        at_top, at_zero = ([share(x == size) for x in sizes] for size in (top, 0))
        return super().report() | {"at_top": at_top, "at_zero": at_zero}

    @classmethod
    def title_of(cls, params: Params) -> str:
        notes = [] if params.format == "e4m3" else [params.format]
        if words := SCALE_WORDS[params.scale]:
            notes.append(words if params.source == "prompt" else words.replace("a scale", "the checkpoint's scale"))
        notes += ["queries too"] if params.query == "fp8" else []
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title


def share(found: Tensor) -> float:
    """Of these numbers, in few digits; 0 of none."""
    return round(int(found.sum()) / max(1, found.numel()), 6)
