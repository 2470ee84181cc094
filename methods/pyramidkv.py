"""PyramidKV (Cai et al., 2024): SnapKV with most tokens in the first layer and fewest in the last.

Attention is spread widely in low layers and narrows to a few tokens in high ones ("information funneling"), so the
budget falls linearly over the layers. Which tokens a layer keeps is SnapKV's business (`methods/snapkv.py`).

Symbols   paper alpha, beta = `window`, `beta`; its k^l, without the window, = `counts`; C = `cap - window`.
Per step  moved: nothing; resident: h_kv * (counts[layer] + window + t) tokens at step t, the current one included.
Differs   the authors round the slope down once, so their mean lies up to (n_layers - 2) / 2 tokens above `cap`: here
          `cap` is the largest whose mean is within the budget, and `match_published` gives their integers. Layers are
          counted over those that are compressed. The rest as in SnapKV.
Fails     as SnapKV; and where a high layer needs more than `window` + C / `beta` tokens. The first layer holds almost
          twice the mean, which is what memory has to be reserved for.
"""

from dataclasses import dataclass
from typing import Any

from engine.budget import Budget
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.snapkv import SnapKV, fit_window


@dataclass(frozen=True)
class Pyramid:
    """What the layers keep of the prompt."""

    cap: int  # nominal mean of tokens per KV head over the layers, the window included
    window: int  # the prompt's last tokens, kept by every layer
    counts: tuple[int, ...]  # tokens before the window, per compressed layer from the first

    @property
    def total(self) -> int:
        """Tokens per KV head, all layers together."""
        return sum(self.counts) + self.window * len(self.counts)


def layer_counts(s: int, cap: int, w: int, beta: int, n_layers: int) -> list[int]:
    """Tokens before the window `w` that each layer keeps of a prompt of `s`; the authors' integers, floors included."""
    if s < cap:
        return [max(0, s - w)] * n_layers
    mean = cap - w
    if s < 2 * mean or n_layers == 1:
        return [mean] * n_layers
    last = mean // beta
    first = 2 * mean - last
    if first >= s - w:  # too short for this slope: the first layer keeps all, the last the balance
        first = s - w
        last = 2 * mean - first
    step = (first - last) // (n_layers - 1)
    return [first - rank * step for rank in range(n_layers)]


def pyramid(s: int, cap: int, window: int, beta: int, n_layers: int) -> Pyramid:
    """The schedule for one `cap`, its window shrunk where `cap` leaves no room for it."""
    w = fit_window(cap, window)
    return Pyramid(cap, w, tuple(layer_counts(s, cap, w, beta, n_layers)))


def fit_pyramid(s: int, n_tokens: int, window: int, beta: int, n_layers: int) -> Pyramid:
    """The schedule with the largest `cap` that keeps at most `n_tokens` per layer in the mean.

    Found after at most about n_layers / 2 tries; a cap of 1 keeps one token everywhere and always fits.
    """
    tries = (pyramid(s, cap, window, beta, n_layers) for cap in range(n_tokens, 0, -1))
    return next(plan for plan in tries if plan.total <= n_tokens * n_layers)


class PyramidKV(SnapKV):
    title = "PyramidKV"

    @dataclass(frozen=True)
    class Params(SnapKV.Params):
        beta: int
        match_published: bool

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.beta < 1:
                raise ConfigError(
                    f"method.beta={self.beta} is out of range; use 1 for equal layers, more for a steeper pyramid"
                )

    params: Params
    plan: Pyramid

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Pyramid:
        s, n_layers = budget.s_prompt, len(shape.full_layers)
        if budget.is_full:
            w = fit_window(s, params.window)
            return Pyramid(s, w, (s - w,) * n_layers)
        make = pyramid if params.match_published else fit_pyramid
        return make(s, budget.tokens, params.window, params.beta, n_layers)

    def n_past(self, layer: int) -> int:
        return self.plan.counts[self.trace.shape.full_layers.index(layer)]

    def report(self) -> dict[str, Any]:
        if self.budget.is_full:
            return {}
        kept = [count + self.plan.window for count in self.plan.counts]
        return super().report() | {"kept_tokens": kept}
