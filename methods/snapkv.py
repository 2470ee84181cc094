"""SnapKV (Li et al., 2024): keep what the end of the prompt looks at, drop the rest once and for good.

The last queries of the prompt ("observation window") vote with their attention weights for the tokens before them. The
votes are smoothed along the sequence, so that a winner's neighbours win with it. Every KV head keeps its winners and
the window; nothing is dropped while decoding.

Symbols   paper L_obs, kernel size, max_capacity_prompt = `window`, `kernel`, `cap` (window included).
Per step  moved: nothing; resident: h_kv * (cap + t) tokens at step t, the current one included.
Differs   K and V are not repeated to the query heads first, which costs the authors g times the memory: a KV head keeps
          one set, from its group's mean score, as KVCache-Factory and kvpress do. `reduce: query_head` gives every
          query head the authors' own set; the KV head keeps their union, and the ledger counts that. Votes stay in
          float32; the authors round them to the model's dtype, and many become equal. Equal scores: the lower
          position is kept.
          A window that would fill the budget shrinks to half of it; `method_report` says so.
Fails     where the question comes after the compression, or later text needs what the window did not look at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from engine.budget import Budget
from engine.checks import one_of
from engine.errors import ConfigError
from engine.observe import LastQueries, Observation, window_scores
from engine.prefill import Trace
from engine.shapes import ModelShape
from methods.base import SelectiveAttention

POOLINGS = ("max", "avg")
REDUCTIONS = ("mean", "sum", "max", "query_head")


@dataclass(frozen=True)
class Kept:
    """What a layer keeps of the prompt."""

    cap: int  # tokens per KV head, the window included
    window: int  # the prompt's last tokens


def fit_window(cap: int, window: int) -> int:
    """The observation window within `cap` tokens; it must leave some of them for the past."""
    return window if cap > window else max(1, cap // 2)


def reduce_group(raw: Tensor, h_kv: int, reduce: str) -> Tensor:
    """One score per KV head from those of its query heads: (1, h, s) -> (1, h_kv, s); `query_head` leaves all."""
    if reduce == "query_head":
        return raw
    grouped = raw.unflatten(1, (h_kv, -1))  # (1, h_kv, g, s)
    if reduce == "max":
        return grouped.amax(2)
    return grouped.mean(2) if reduce == "mean" else grouped.sum(2)


def pool_scores(raw: Tensor, kernel: int, pooling: str) -> Tensor:
    """Scores (1, heads, s) smoothed over `kernel` neighbours; beyond the ends `avg` counts zeros, `max` nothing."""
    pool = avg_pool1d if pooling == "avg" else max_pool1d
    return pool(raw, kernel, stride=1, padding=kernel // 2)


def window_votes(trace: Trace, observed: LastQueries, w: int, layer: int) -> Tensor:
    """The last `w` queries' votes, (1, h, s - w); all variants with such a window share them, whatever their method."""

    def votes() -> Tensor:
        q = trace.observed(observed, layer)[:, :, -w:]
        return window_scores(q, trace.keys(layer), trace.scales[layer])

    return trace.once(("window votes", w, layer), votes)


def keep_top(scores: Tensor, n: int) -> Tensor:
    """Ascending positions of the `n` highest of (1, heads, s), the lower position first among equals: (1, heads, n).

    Max pooling makes plateaus of equal scores, and topk promises no order there; hence the stable sort.
    """
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return best.sort(dim=-1).values


class SnapKV(SelectiveAttention):
    title = "SnapKV"
    drops = True

    @dataclass(frozen=True)
    class Params:
        window: int
        kernel: int
        pooling: str
        reduce: str

        def __post_init__(self) -> None:
            if self.window < 1:
                raise ConfigError(f"method.window={self.window} is out of range; it is a number of tokens, at least 1")
            if self.kernel < 1 or self.kernel % 2 == 0:
                raise ConfigError(
                    f"method.kernel={self.kernel} has no middle; use an odd number of tokens, 1 for no pooling"
                )
            for key, allowed in (("pooling", POOLINGS), ("reduce", REDUCTIONS)):
                one_of(f"method.{key}", getattr(self, key), allowed)

    params: Params
    plan: Any  # Kept; what inherits from SnapKV has integers of its own, with a `window` among them

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Any:
        return Kept(budget.tokens, fit_window(budget.tokens, params.window))

    @classmethod
    def observations(cls, params: Params, plan: Any) -> tuple[Observation, ...]:
        return (LastQueries(params.window),)

    def arrange(self, layer: int) -> None:
        chosen = keep_top(self.scores(layer), self.n_past(layer))
        self.store.keep(layer, chosen, n_window=self.plan.window)

    def n_past(self, layer: int) -> int:
        """Tokens before the window that each KV head of this layer keeps."""
        return self.plan.cap - self.plan.window

    def scores(self, layer: int) -> Tensor:
        """What decides who of the past is kept, (1, h_kv, s - w), or (1, h, s - w) for `query_head`."""
        return pool_scores(self.raw_scores(layer), self.params.kernel, self.params.pooling)

    def raw_scores(self, layer: int) -> Tensor:
        """The window's votes before pooling, (1, h_kv or h, s - w)."""
        raw = window_votes(self.trace, LastQueries(self.params.window), self.plan.window, layer)
        return reduce_group(raw, self.trace.shape.h_kv, self.params.reduce)

    def protected(self, layer: int) -> Sequence[int]:
        first = 0 if self.budget.is_full else self.trace.s_prompt - self.plan.window
        return range(first, self.store[layer].n_seen)

    def report(self) -> dict[str, Any]:
        shrunk = not self.budget.is_full and self.plan.window < self.params.window
        return {"window": self.plan.window} if shrunk else {}
