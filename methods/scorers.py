"""Scores of the prompt's tokens, for methods that keep the best: free functions from a trace to scores.

A score is a number per layer, head and token, (1, heads, n) float32, and higher stays. `heads` is h_kv; it is h where
every query head chooses for itself. Methods name a scorer here and an allocator in `methods/dropping/allocators.py`;
`ScoringMethod` in `methods/base.py` joins the two.

Not here: what the prefill observes (`engine/observe.py`), and scores that only one method has.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.engine.observe import LastQueries, window_scores
from kvbench.engine.passes.trace import Trace
from kvbench.kernels.scratch import finer
from kvbench.kernels.topk import top_stable


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
    pool = torch.nn.functional.avg_pool1d if pooling == "avg" else torch.nn.functional.max_pool1d
    return pool(raw, kernel, stride=1, padding=kernel // 2)


def window_votes(trace: Trace, observed: LastQueries, w: int, layer: int) -> Tensor:
    """The last `w` queries' votes, (1, h, s - w); all variants with such a window share them, whatever their method.

    They are attention of the prompt's own pass, whatever became of K and V since.
    """
    trace = trace.exact

    def votes() -> Tensor:
        q = trace.observed(observed, layer)[:, :, -w:]
        return window_scores(q, trace.keys(layer), trace.softmax[layer])

    return trace.once(("window votes", w, layer), votes)


def by_heads(trace: Trace, layer: int, keys: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    """What `score` makes of the geometry of keys (1, h_kv, n, d_h), head by head: (1, h_kv, n).

    For latents, which a norm has made alike, it is the mean over the keys that all heads make of them.
    """
    made, _ = trace.of_heads(layer, keys, keys)
    scores = torch.cat([score(head) for head in made.split(1, 1)], 1)  # one by one: each is made float32
    return scores.mean(1, keepdim=True) if trace.shape.is_latent else scores


def layer_vector(scores: Tensor) -> Tensor:
    """Mean over heads, (1, heads, n_past) -> (n_past,) float64; means over groups give the same."""
    return finer(scores[0]).mean(0)


def keep_top(scores: Tensor, n: int) -> Tensor:
    """Ascending positions of the `n` highest of (1, heads, s), the lower position first among equals: (1, heads, n).

    Max pooling makes plateaus of equal scores, and topk promises no order there.
    """
    return top_stable(scores, n).sort(dim=-1).values


def lowest_slot(scores: Tensor, positions: Tensor) -> Tensor:
    """Slot of each head's lowest score, (1, heads, n) -> (1, heads, 1).

    Of equal scores the higher position goes, as lower ones are kept first after the prefill.
    """
    lowest = scores == scores.amin(-1, keepdim=True)
    return positions.masked_fill(~lowest, -1).argmax(-1, keepdim=True)


def lowest_slots(scores: Tensor, positions: Tensor, k: int) -> Tensor:
    """Slots of each head's `k` lowest scores, chosen as in `lowest_slot`: (1, heads, k), in no order."""
    late_first = positions.argsort(-1, descending=True)
    return late_first.gather(-1, top_stable(-scores.gather(-1, late_first), k))
