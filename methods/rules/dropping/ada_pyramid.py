"""What Ada-Pyramid may be asked for: Ada-KV's heads within PyramidKV's layers, without torch.

Not here: the method (`methods/dropping/ada_pyramid.py`).
"""

from dataclasses import dataclass

from engine.errors import ConfigError
from methods.rules.dropping.adakv import AdaKVRules
from methods.rules.dropping.allocators import Allocator


class AdaPyramidRules(AdaKVRules):
    title = "Ada-Pyramid"

    @dataclass(frozen=True)
    class Params(AdaKVRules.Params):
        beta: int

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.beta < 1:
                raise ConfigError(
                    f"method.beta={self.beta} is out of range; use 1 for equal layers, more for a steeper pyramid"
                )
            if self.floor == "protect":
                raise ConfigError("method.floor=protect is kvpress' rule, which has no pyramid; use method.floor=mix")

    @classmethod
    def own_allocator(cls, params: Params) -> Allocator:
        return Allocator("pyramid_head_mix", params.alpha, params.beta)
