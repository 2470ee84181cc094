"""PyramidInfer (Yang et al., 2024): tokens leave the forward pass as it rises, and with them their keys and values.

After a layer the last tokens of the prompt ("recent") vote with their attention, averaged over all heads, later ones
with more weight. The context tokens with the fewest votes go no further: layers above never compute them. So the
prefill is cheaper, and it is approximate: the first generated token may already differ from full attention's.

Symbols   paper recent ratio, decay ratio, ensemble weight = `recent_ratio`, `decay`, `votes`; n_i = `Course.lengths()`;
          the protected tail is 1 + rec tokens = `tail`.
Per step  moved: nothing; resident: h_kv * (n_i + t) tokens in layer i at step t, the current one included.
Differs   the authors fix the decay (0.9) and keep what comes of it, 0.77 of the tokens at 32 layers; here the decay
          follows from the budget: the largest whose mean over the layers fits, cosine as theirs where that can reach
          it, else one share for all layers (`schedule: constant`), and a shorter tail with smaller budgets. Below
          a ratio of 0.3 this is a variant and its label says so: `PyramidInfer*`.
          A layer's own cache is not cut by its own votes, only those above: as their code, unlike their paper.
          Generated tokens stay, unless `compress_generated`: then, as theirs, a block of 16 is thinned whenever
          so many have left the tail, first after rec + 16 of them; it keeps the weights of rec queries per layer.
Fails     where a high layer would need what the middle ones did not look at; with few layers, for the first holds the
          whole prompt (and the second, with the cosine).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.observe import MeanWeights, Observation
from engine.prefill import Thinning
from kernels.column_sums import column_sums
from methods.base import SelectiveAttention
from methods.rules.dropping.pyramidinfer import PyramidInferRules, falling

BLOCK, BLOCK_SHARE, BLOCK_DECAY = 16, 0.9, 0.1  # the authors', in every configuration of theirs


@dataclass
class Generated:
    """What one layer did with its generated tokens: the latest queries' weights, and when it compressed."""

    weights: Tensor  # (at most 1 + rec, n) of the last queries, mean over heads, 0 where a query is older than a token
    base: int  # tokens that are not due to be compressed
    block: int  # tokens that are compressed at a time
    n_stay: int  # of a block
    distance_weight: float

    def take(self, latest: Tensor, tail: int) -> None:
        """Add the latest query's weights (n,); its last token is new to all older queries."""
        older = torch.nn.functional.pad(self.weights, (0, len(latest) - self.weights.shape[1]))
        self.weights = torch.cat([older, latest.unsqueeze(0)])[-tail:]

    def stay(self, tail: int) -> Tensor | None:
        """Indices of the tokens that stay, where a block of them has come to be compressed; its weights go with it."""
        n = self.weights.shape[1]
        if n - (tail - 1) - self.base < self.block:
            return None
        block = slice(n - tail - self.block, n - tail)
        rising = rising_weights(len(self.weights), self.distance_weight).to(self.weights)
        votes = rising @ self.weights[:, block]
        best = votes.sort(descending=True, stable=True).indices[: self.n_stay].sort().values
        best = best + block.start
        every = torch.arange(n, device=votes.device)
        stay = torch.cat([every[: block.start], best, every[block.stop :]])
        self.weights = self.weights[:, stay]
        self.base = len(stay) - (tail - 1)
        return stay


def n_of_block(block: int, share: float, decay: float, layer: int, n_layers: int) -> int:
    """How many generated tokens of a block stay in a layer."""
    return max(1, int(block * share * falling(layer, n_layers, decay)))


def rising_weights(n: int, last: float) -> Tensor:
    """Weights of the recent queries, from 1 up to `last`."""
    return torch.linspace(1, last, n)


@dataclass(frozen=True)
class Course(Thinning):
    """A prefill for itself: who goes on after each layer."""

    plan: PyramidInferRules.Plan

    def going_on(self, layer: int, q: Tensor, k: Tensor, scale: float) -> Tensor | None:
        n = k.shape[2]
        if self.plan.n_going_on(layer, n) == n - self.plan.tail:
            return None
        recent = q[:, :, -self.plan.tail :]
        rising = rising_weights(self.plan.tail, self.plan.distance_weight).to(q.device)
        sums = column_sums(recent, k, scale, rising)  # (h_kv, g, n)
        return self.survivors(layer, sums.flatten(0, 1).mean(0) / self.plan.tail)

    def survivors(self, layer: int, votes: Tensor) -> Tensor:
        """Ascending indices of those that go on, by votes (n,)."""
        n = len(votes)
        context = votes[: n - self.plan.tail].clone()
        context[: self.plan.sinks] = torch.inf
        best = context.sort(descending=True, stable=True).indices[: self.plan.n_going_on(layer, n)]
        return torch.cat([best.sort().values, torch.arange(n - self.plan.tail, n, device=votes.device)])


class PyramidInfer(PyramidInferRules, SelectiveAttention):
    params: PyramidInferRules.Params
    plan: PyramidInferRules.Plan | None  # None: the whole prompt is in the budget

    @classmethod
    def thinning(cls, plan: PyramidInferRules.Plan | None) -> Course | None:
        return None if plan is None else Course(plan)

    def setup(self) -> None:
        self.generated: dict[int, Generated] = {}
        # No block comes to be compressed before so many tokens: until then nothing has to be watched.
        self.wants_weights = (
            self.params.compress_generated and self.plan is not None and self.store.n_new >= self.plan.tail - 1 + BLOCK
        )

    @classmethod
    def observations(
        cls, params: PyramidInferRules.Params, plan: PyramidInferRules.Plan | None
    ) -> tuple[Observation, ...]:
        return (MeanWeights(plan.tail),) if params.compress_generated and plan is not None else ()

    def arrange(self, layer: int) -> None:
        self.store.keep_reached(layer)
        if self.wants_weights and self.plan is not None:
            weights = self.trace.observed(MeanWeights(self.plan.tail), layer)
            n_stay = n_of_block(BLOCK, BLOCK_SHARE, BLOCK_DECAY, layer, self.plan.n_layers)
            self.generated[layer] = Generated(weights, weights.shape[1], BLOCK, n_stay, self.plan.distance_weight)

    @property
    def is_still(self) -> bool:
        return self.variant.is_full or not self.wants_weights

    def after_attention(self, layer: int, out: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None or self.plan is None:
            return out
        generated = self.generated[layer]
        generated.take(weights[0].mean(0), self.plan.tail)
        self.store[layer].meter.count("resident_meta_bytes", generated.weights.nbytes)
        stay = generated.stay(self.plan.tail)
        if stay is not None:
            self.store[layer].drop_but(stay)
        return out

    def protected(self, layer: int) -> Sequence[int]:
        n = self.store[layer].n_seen
        if self.plan is None:
            return range(n)
        return range(n - self.plan.tail if self.wants_weights else self.trace.s_prompt - self.plan.tail, n)

    def report(self) -> dict[str, Any]:
        if self.plan is None:
            return {}
        lengths = self.plan.lengths()
        return {
            "schedule": self.plan.schedule,
            "decay": self.plan.decay,
            "tail": self.plan.tail,
            "layer_tokens": lengths,
            "kept_share": sum(lengths) / (self.plan.s * len(lengths)),
        }
