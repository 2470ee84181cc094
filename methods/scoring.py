"""`ScoringMethod`: a dropping method as a scorer, protected tokens and an allocator, which most of them are.

A method of this kind writes `scores`, what each token is worth, and says with `ends` which tokens are kept whatever
they are worth. How many of the others a layer and head keep is the allocator's: the method's own, or `allocator=NAME`.

Not here: scores that several methods share (`methods/scorers.py`), integers (`methods/dropping/allocators.py`).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.budget import key_bytes
from kvbench.engine.placement import Kept, Placement, Ragged, Stay
from kvbench.engine.selection import Cost
from kvbench.kernels.topk import top_stable
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.dropping.allocators import (
    Counts,
    best_share,
    by_need,
    divide_heads,
    globally_best,
    pyramid_within,
    uniform,
    whole_layers,
)
from kvbench.methods.scorers import by_heads, keep_top, layer_vector
from kvbench.methods.traits import Traits


class ScoringMethod(SelectiveAttention):
    """A dropping method as a scorer, protected tokens and an allocator.

    Every head keeps the protected tokens, which are the prompt's first and last ones, and of those between them the
    best by `scores`, as many as the allocator says. Scorers are in `methods/scorers.py`, allocators in
    `methods/dropping/allocators.py`; `allocator=NAME` puts another one after a scorer.
    """

    drops = True
    is_scorer = True
    counted: Sequence[Counts]  # what `counts` gave

    def ends(self) -> tuple[int, int]:
        """How many of the prompt's first tokens, and how many of its last, are protected."""
        return getattr(self.plan, "n_sink", 0), getattr(self.plan, "window", 0)

    @staticmethod
    def score(keys: Tensor) -> Tensor:
        """Scores of keys (1, h_kv, n, d_h), (1, h_kv, n) float32, for methods that look at nothing else."""
        raise NotImplementedError

    def scores(self, layer: int) -> Tensor:
        """Scores of the tokens between the ends, (1, h_kv or h, n) float32; (1, 1, n) where all heads agree."""
        n_first, n_last = self.ends()
        return self.worth(layer, self.trace.keys(layer)[:, :, n_first : self.trace.s_prompt - n_last])

    def scores_of(self, layer: int, keys: Tensor, inputs: Tensor | None) -> Tensor:
        """Scores of new tokens, each of another row, by keys (n, h_kv, 1, d_h) or attention inputs (n, 1, D),
        as `judges` says: (n, h_kv)."""
        keys = keys.transpose(0, 2)
        return (self.worth(layer, keys) if self.trace.shape.is_latent else self.score(keys))[0].mT

    def scores_at(self, layer: int, positions: Tensor, draw: int) -> Tensor:
        """Scores of tokens at positions (n,) of prompt or answer, where these alone say it: (h_kv, n)."""
        raise NotImplementedError

    def votes(self, layer: int, q: Tensor, keys: Tensor, heads: slice) -> Tensor:
        """Scores by the queries (1, g, w, d_h) of some heads of keys (1, 1, n, d_h) but the last `w`: (n - w,)."""
        raise NotImplementedError

    @classmethod
    def is_by_keys(cls) -> bool:
        """Whether what a token is worth follows from the keys that are there."""
        own = cls.score is not ScoringMethod.score or cls.worth is not ScoringMethod.worth
        return own and cls.scores is ScoringMethod.scores

    @classmethod
    def traits_of(cls, params: Any) -> Traits:
        return replace(super().traits_of(params), by_keys=cls.is_by_keys())

    def extend(self, layer: int, q: Tensor, grown: Variant) -> Stay | None:
        """Keys are worth what they are among those that are held: the best stay, with the first and the last ones."""
        if layer in self.skipped:
            return None
        at, store, tokens, (n_first, n_last) = self.store[layer], self.store, grown.budget.tokens, self.ends()
        keys, positions = at.keys(), at.positions()
        n = keys.shape[2]
        if n <= tokens:
            return None
        ends = (positions < n_first) | (positions >= at.n_seen - n_last)
        stays = keep_top(self.worth(layer, keys).masked_fill(ends, torch.inf), tokens)
        room = store.n_new - (at.n_seen - self.trace.s_prompt)
        return Stay(stays, room, cost=Cost(rebuilt_bytes=n * key_bytes(self.trace.shape, 1)))

    def worth(self, layer: int, keys: Tensor) -> Tensor:
        """`score`, head by head."""
        return by_heads(self.trace, layer, keys, self.score)

    def n_free(self) -> int:
        """Tokens between the ends that the budget pays for, mean over heads and layers."""
        return self.budget.tokens - sum(self.ends())

    def n_summed(self) -> int:
        """How many queries' weights a score adds up; 1 where it is a mean, or no weight."""
        return 1

    def scorer(self) -> Hashable:
        """A key of all that a sample's scores depend on: variants where it is equal share them."""
        return type(self).__qualname__, self.params, self.plan

    def shared_scores(self, layer: int) -> Tensor:
        return self.trace.once(("scores", self.scorer(), self.ends(), layer), lambda: self.scores(layer))

    @property
    def is_late(self) -> bool:
        """Scores are there once all layers are, and what follows the prompt was read."""
        return bool(self.variant.second_passes)

    @property
    def needs_all_layers(self) -> bool:
        """`counts` wants the scores of every layer first."""
        return self.variant.allocator.needs_all_layers

    def scored_layers(self) -> Sequence[int]:
        """The layers that share the budget."""
        skipped = frozenset(self.skipped)
        return [layer for layer in self.trace.shape.attention_layers if layer not in skipped]

    def counts(self) -> Sequence[Counts]:
        """How many of them each head keeps: for each layer that is compressed one number, or one for each head."""
        layers, allocator = self.scored_layers(), self.variant.allocator
        c, n_protected = self.n_free(), sum(self.ends())
        if allocator.of_layers == "global":
            return globally_best(self.trace.gathered(self.shared_scores(layer)[0] for layer in layers), c)
        if allocator.of_layers == "by_need":
            vectors = self.trace.gathered(layer_vector(self.shared_scores(layer)) for layer in layers)
            return by_need(torch.stack(vectors), c * len(layers))
        if allocator.of_layers == "whole_layers":
            vectors = self.trace.gathered(layer_vector(self.shared_scores(layer)) for layer in layers)
            few, n = c // 2, len(vectors[0])
            return whole_layers([best_share(vector, few) for vector in vectors], few, min(c, n), n)
        if allocator.of_layers == "pyramid":
            return pyramid_within(self.trace.s_prompt, c, n_protected, allocator.beta, len(layers))
        return uniform(c, len(layers))

    def of_heads(self, layer: int, c: int) -> Counts:
        """How the heads of a layer share its part, `c` tokens for each."""
        if self.variant.allocator.of_heads in ("uniform", "global"):
            return c
        return divide_heads(self.variant.allocator, self.shared_scores(layer)[0], c, sum(self.ends()))

    def arrange(self, layer: int) -> Placement | None:
        if self.is_late:
            return None
        if self.needs_all_layers:
            self.shared_scores(layer)  # while the layer is at hand
            return None
        layers = self.scored_layers()
        if layer == layers[0]:
            self.counted = self.counts()  # of all layers at once
        return self.keep_best(layer, self.counted[layers.index(layer)])

    def arrange_rest(self) -> Mapping[int, Placement]:
        if not (self.is_late or self.needs_all_layers):
            return {}
        self.counted = self.counts()
        layers = zip(self.scored_layers(), self.counted, strict=True)
        return {layer: self.keep_best(layer, n) for layer, n in layers}

    def keep_best(self, layer: int, n: Counts) -> Placement:
        """Keep the `n` best tokens of each head, and the protected ones."""
        counts = self.of_heads(layer, n) if isinstance(n, int) else n
        if isinstance(counts, list) and len(set(counts)) == 1:
            counts = counts[0]
        scores = self.shared_scores(layer)
        if isinstance(counts, list):
            return self.place_ragged(layer, [top_stable(scores[0, a], k) for a, k in enumerate(counts)])
        best = keep_top(scores, counts) + self.ends()[0]  # (1, heads, n)
        if best.shape[1] == 1:
            best = best.expand(-1, self.trace.shape.h_kv, -1).contiguous()
        return self.place(layer, best)

    def place(self, layer: int, best: Tensor) -> Placement:
        """The chosen tokens (1, heads, n) and the protected ones stay."""
        if n_first := self.ends()[0]:
            first = torch.arange(n_first, device=best.device).expand(1, best.shape[1], -1)
            best = torch.cat([first, best], -1)
        return Kept(best, n_window=self.ends()[1])

    def place_ragged(self, layer: int, best: Sequence[Tensor]) -> Placement:
        """Where the best tokens go, a different number for each head, counted from after the first protected ones."""
        (n_first, n_last), s, device = self.ends(), self.trace.s_prompt, best[0].device
        first, last = torch.arange(n_first, device=device), torch.arange(s - n_last, s, device=device)
        chosen = [torch.cat([first, each.sort().values + n_first, last]) for each in best]
        if len(chosen) == self.trace.shape.h_kv:
            return Ragged(chosen)
        padded = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1)
        return Kept(padded.unsqueeze(0))  # query heads chose: their KV head keeps the union

    def report(self) -> dict[str, Any]:
        """The fewest, the mean and the most of the prompt's tokens that KV heads keep, where these differ."""
        kept = [layer.kept_counts() for layer in self.store.layers.values()]
        counts = [count for layer in kept for count in layer]
        if not any(len(set(layer)) > 1 for layer in kept):
            return {}
        return {"kept_heads": {"min": min(counts), "mean": sum(counts) / len(counts), "max": max(counts)}}

    def protected(self, layer: int) -> Sequence[int]:
        n, n_first, n_last = self.store[layer].n_seen, *self.ends()
        return [*range(n_first), *range(self.trace.s_prompt - n_last, n)]
