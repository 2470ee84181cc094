"""Ada-Pyramid (Feng et al., 2024): Ada-KV's heads within PyramidKV's layers.

Most tokens are for the first layer and fewest for the last (`methods/dropping/pyramidkv.py`); the heads of a layer
share its part (`methods/dropping/adakv.py`).

Paper     arXiv:2407.11550, 2024; Feng, Yuan; Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for
          Efficient LLM Inference
Symbols   as in PyramidKV and Ada-KV; base of layer l = `counts`.
Per step  as Ada-KV.
Differs   as PyramidKV and Ada-KV: the schedule is the steepest whose mean is within the budget, and heads' shares are
          rounded to their sum. `match_published` gives the authors' integers of both, which have no branch for short
          prompts.
Fails     as PyramidKV and Ada-KV.
Figures   drop after the prompt, by its last queries: #B74A01, left, -
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.engine.errors import ConfigError
from kvbench.methods.allocator import Allocator, Beta
from kvbench.methods.dropping.adakv import AdaKV
from kvbench.methods.dropping.allocators import Counts
from kvbench.methods.traits import Traits


class AdaPyramid(AdaKV):
    title = "Ada-Pyramid"

    @dataclass(frozen=True)
    class Params(AdaKV.Params):
        beta: Beta

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.floor == "protect":
                raise ConfigError("method.floor=protect is kvpress' rule, which has no pyramid; use method.floor=mix")

    params: Params

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        division = Allocator("pyramid_head_mix", params.alpha, params.beta)
        return replace(super().traits_of(params), allocator=division)

    def counts(self) -> Sequence[Counts]:
        if not self.params.match_published:
            return super().counts()
        n_layers = len(self.trace.shape.attention_layers)
        return published(self.trace.s_prompt, self.plan.cap, self.plan.window, self.params.beta, n_layers)


def published(s: int, cap: int, w: int, beta: int, n_layers: int) -> list[int]:
    """The authors' integers: the layers' mean may lie above `cap`."""
    mean = cap - w
    last = mean // beta
    first = 2 * mean - last
    if first >= s - w:  # too short for this slope: the first layer keeps all, the last the balance
        first = s - w
        last = 2 * mean - first
    step = (first - last) // max(1, n_layers - 1)
    return [first - rank * step for rank in range(n_layers)]
