"""PyramidKV (Cai et al., 2024): SnapKV with most tokens in the first layer and fewest in the last.

Attention is spread widely in low layers and narrows to a few tokens in high ones ("information funneling"), so the
budget falls linearly over the layers. Which tokens a layer keeps is SnapKV's business (`methods/dropping/snapkv.py`).

Paper     arXiv:2406.02069, 2024; Cai, Zefan; PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
          Funneling
Symbols   paper alpha, beta = `window`, `beta`; its k^l, without the window, = `counts`; C = `cap - window`.
Per step  moved: nothing; resident: h_kv * (counts[layer] + window + t) tokens at step t, the current one included.
Differs   the authors round the slope down once, so their mean lies up to (n_layers - 2) / 2 tokens above `cap`: here
          `cap` is the largest whose mean is within the budget, and `match_published` gives their integers. Layers are
          counted over those that are compressed. The rest as in SnapKV.
Fails     as SnapKV; and where a high layer needs more than `window` + C / `beta` tokens. The first layer holds almost
          twice the mean, which is what memory has to be reserved for.
Figures   drop after the prompt, by its last queries: #FA5D36, diamond, --
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.engine.budget import Budget
from kvbench.engine.shapes import ModelShape
from kvbench.methods.allocator import Beta
from kvbench.methods.dropping.allocators import pyramid
from kvbench.methods.dropping.snapkv import SnapKV, WindowVotes, fit_window


def schedule(s: int, cap: int, window: int, beta: int, n_layers: int) -> "PyramidKV.Plan":
    """The schedule for one `cap`, its window shrunk where `cap` leaves no room for it."""
    w = fit_window(cap, window)
    return PyramidKV.Plan(cap, w, tuple(pyramid(s, cap, w, beta, n_layers)))


def fit_schedule(s: int, n_tokens: int, window: int, beta: int, n_layers: int) -> "PyramidKV.Plan":
    """The schedule with the largest `cap` that keeps at most `n_tokens` per layer in the mean.

    Found after at most about n_layers / 2 tries; a cap of 1 keeps one token everywhere and always fits.
    """
    tries = (schedule(s, cap, window, beta, n_layers) for cap in range(n_tokens, 0, -1))
    return next(plan for plan in tries if plan.total <= n_tokens * n_layers)


class PyramidKV(WindowVotes):
    title = "PyramidKV"
    uneven = "PyramidKV keeps other numbers of tokens in each layer"
    no_growth = "gives layers numbers of tokens of their own, which follow from the context's length"
    is_scorer = False  # its own division of the budget is what it is

    @dataclass(frozen=True)
    class Params(SnapKV.Params):
        beta: Beta
        match_published: bool

    @dataclass(frozen=True)
    class Plan:
        """What the layers keep of the prompt."""

        cap: int  # nominal mean of tokens per KV head over the layers, the window included
        window: int  # the prompt's last tokens, kept by every layer
        counts: tuple[int, ...]  # tokens before the window, per compressed layer from the first

        @property
        def total(self) -> int:
            """Tokens per KV head, all layers together."""
            return sum(self.counts) + self.window * len(self.counts)

    params: Params
    plan: Plan

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        s, n_layers = budget.s_prompt, len(shape.attention_layers)
        if budget.attends_all:
            w = fit_window(s, params.window)
            return PyramidKV.Plan(s, w, (s - w,) * n_layers)
        make = schedule if params.match_published else fit_schedule
        return make(s, budget.tokens, params.window, params.beta, n_layers)

    def counts(self) -> Sequence[int]:
        return self.plan.counts

    def report(self) -> dict[str, Any]:
        kept = [count + self.plan.window for count in self.plan.counts]
        return self.shrunk_window() | {"kept_tokens": kept}
