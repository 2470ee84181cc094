"""R-KV (Cai et al., 2025): while reasoning, drop what nobody looks at and what says the same as another token.

Every `interval` steps the cache is cut back to the budget. A token is worth what the last queries look at it, less how
much its key resembles the other keys in the cache. Of near duplicates the latest is spared, and the last tokens stay
whatever they are worth.

Paper     arXiv:2505.24133, 2025; Cai, Zefan; R-KV: Redundancy-aware KV Cache Compression for Reasoning Models
Symbols   paper B_budget, B_buffer, alpha, lambda = `target`, `interval`, `window`, `mix`; authors' code kv_budget,
          divide_length, window_size, kernel_size, mix_lambda. I, R = `importance`, `redundancy`.
Per step  moved: nothing; resident: h_kv * (target + interval) tokens at most, and the last `window` queries, 2 * window
          * h * d_h bytes. A cut takes 4 * (target + interval)**2 bytes in addition, one KV head after the other.
Differs   - the paper spares the beta most recent of similar tokens, the authors' code exactly one, and so do we.
          - `order: score` leaves kept tokens by falling score, as the code does: pooling over neighbours and "the
            latest of the similar ones" then run over that order. `order: position` keeps them as they came, and keeps
            other tokens.
          - a cut falls on positions that `interval` divides, as in the code. Its counter goes on from prompt to prompt;
            ours begins with each sample, and every prompt of at least `target` tokens is cut, not only the first.
          - `retain_direction: first` and the two percentages of the code are not offered: the first always clears
            column 0, the others cannot be reached.
Fails     where an answer returns to what it has not looked at for longer than the interval.
Figures   drop while decoding: #DD436A, bar, -
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.engine.declared import Kernel, Share, Window
from kvbench.engine.softmax import Softmax
from kvbench.methods.decoding.cutting import CuttingMethod, best_first, in_place, with_last
from kvbench.methods.decoding.schedule import WhenToCut
from kvbench.methods.scorers import by_heads, pool_scores

SIMILAR = 0.5  # cosine above which the code calls two keys alike

LEAST_NORM = 1e-8


def window_importance(q: Tensor, keys: Tensor, softmax: Softmax, w: int, kernel: int) -> Tensor:
    """Weights that queries (1, h, n_q, d_h) give keys (1, h_kv, n, d_h) but the last `w`: (1, h_kv, n - w) float32.

    A group's logits become one by their maximum, before the softmax, which is over the keys that are scored alone; its
    sinks do so too.
    """
    n, scores, g = keys.shape[2], [], q.shape[1] // keys.shape[1]
    for i, (queries, head) in enumerate(zip(q[0].float().unflatten(0, (keys.shape[1], -1)), keys[0], strict=True)):
        logits = softmax.bent(queries @ head[: n - w].float().mT).amax(0)  # (n_q, n - w), of g heads
        sinks = softmax.of(slice(i * g, (i + 1) * g)).sink
        own = Softmax(softmax.scale, softmax.cap, None if sinks is None else sinks.amax(0, keepdim=True))
        scores.append(own.weights(logits, (1,)).mean(0))
    return pool_scores(torch.stack(scores).unsqueeze(0), kernel, "max")


def latest_alike(similar: Tensor) -> Tensor:
    """For each row of (n, n) the last column that is alike, 0 where no other is: (n, 1) int64."""
    index = torch.arange(len(similar), device=similar.device, dtype=torch.int32)
    return torch.where(similar > SIMILAR, index, 0).amax(-1, keepdim=True).long()


def key_redundancy(keys: Tensor, spared: Callable[[Tensor], Tensor] = latest_alike) -> Tensor:
    """How much each key of (1, h_kv, n, d_h) is like the others, as shares that add up to 1: (1, h_kv, n) float32.

    `spared` says which column of each row does not count.
    """
    return torch.stack([head_redundancy(head, spared) for head in keys[0]]).unsqueeze(0)


def head_redundancy(keys: Tensor, spared: Callable[[Tensor], Tensor]) -> Tensor:
    """Redundancy of one head's keys (n, d_h): (n,)."""
    x = keys.float()
    x = x / (x.norm(dim=-1, keepdim=True) + LEAST_NORM)
    similar = x @ x.mT  # (n, n)
    similar.fill_diagonal_(0)
    similar.scatter_(-1, spared(similar), 0)
    return similar.mean(0).softmax(-1)


@dataclass(frozen=True)
class Voting(WhenToCut):
    """Parameters of a method by which the last queries vote at each cut."""

    window: Window
    kernel: Kernel
    order: Literal["score", "position"]


class VotingMethod(CuttingMethod, ABC):
    """A method that keeps the last `window` tokens, and those before them that its `scores` name."""

    params: Voting

    @classmethod
    def least(cls, params: Voting) -> tuple[int, str]:
        return params.window + 1, f"the last method.window={params.window} tokens stay, and at least one before them"

    @classmethod
    def notes(cls, params: Voting) -> list[str]:
        """A table's notes where slots are ordered or cut otherwise than the authors do it."""
        return ["by position"] * (params.order == "position") + super().notes(params)

    @classmethod
    def n_queries(cls, params: Voting) -> int:
        return params.window

    def order(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        n, w = keys.shape[2], self.params.window
        best = best_first(self.scores(layer, keys), self.plan.target - w)
        return with_last(best if self.params.order == "score" else in_place(best), n, w)

    @abstractmethod
    def scores(self, layer: int, keys: Tensor) -> Tensor:
        """Scores of the tokens before the window, (1, h_kv, n - window) float32."""

    def importance(self, layer: int, keys: Tensor) -> Tensor:
        """How much the last queries look at each of them, (1, h_kv, n - window) float32."""
        return window_importance(
            self.queries(layer), keys, self.trace.softmax[layer], self.params.window, self.params.kernel
        )

    def protected(self, layer: int) -> range:
        return self.latest(self.params.window)


class RKV(VotingMethod):
    title = "R-KV"

    @dataclass(frozen=True)
    class Params(Voting):
        mix: Share

    params: Params

    def scores(self, layer: int, keys: Tensor) -> Tensor:
        w, mix = self.params.window, float(self.params.mix)
        importance = self.importance(layer, keys)
        if mix == 1:
            return importance
        redundancy = by_heads(self.trace, layer, keys, self.redundancy)
        return mix * importance - (1 - mix) * redundancy[..., : keys.shape[2] - w]

    def redundancy(self, keys: Tensor) -> Tensor:
        return key_redundancy(keys)
