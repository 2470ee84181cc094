"""`CuttingMethod`: a method that cuts its cache every few steps while the model answers, as a schedule and an order.

A method of this kind writes `order`, which slots of a layer stay and in which order. When that is asked is the
schedule's (`methods/decoding/schedule.py`), the same for all. What it keeps in addition to K and V follows its tokens
in `reorder`.

Not here: any order.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kvbench.engine.observe import LastQueries, Observation
from kvbench.engine.placement import Kept, Placement, Queries, Stay, Whole
from kvbench.kernels.topk import top_stable_ref
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.decoding.schedule import DecodingRules, Schedule
from kvbench.methods.ranking.random import numbers_at


class CuttingMethod(DecodingRules, SelectiveAttention):
    plan: Schedule

    @classmethod
    def n_queries(cls, params: object) -> int:
        """How many of the latest queries `order` asks."""
        return 0

    @classmethod
    def observations(cls, params: object, plan: Schedule) -> tuple[Observation, ...]:
        w = cls.n_queries(params)
        return (LastQueries(w),) if w else ()

    @abstractmethod
    def order(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Slots that stay, (1, h_kv, target), in the order in which they lie from then on.

        Of all slots there are keys (1, h_kv, n, d_h) and positions (1, h_kv, n); the last slot has the newest token.
        """

    def reorder(self, layer: int, slots: Tensor) -> None:
        """Let what the method keeps in addition to K and V follow the tokens of these slots."""

    def arrange(self, layer: int) -> Placement:
        schedule, s, n_new, w = self.plan, self.trace.s_prompt, self.store.n_new, self.n_queries(self.params)
        queries = Queries(w, self.trace.observed(LastQueries(w), layer)) if w else None
        if not schedule.cuts_prompt(s):
            return Whole(min(n_new, schedule.room(s)), queries)
        chosen = self.trace.once(("cut prompt", self.cut_by(), layer), lambda: self.cut_prompt(layer))
        self.reorder(layer, chosen)
        return Kept(chosen, capacity=min(n_new, schedule.room_behind(s)), queries=queries)

    def cut_by(self) -> Hashable:
        """All that the first cut of a sample's prompt depends on."""
        return type(self).__qualname__, self.params, self.plan

    def cut_prompt(self, layer: int) -> Tensor:
        """Positions that stay of a prompt that fills the cache, (1, h_kv, target)."""
        keys = self.trace.keys(layer)
        positions = torch.arange(keys.shape[2], device=keys.device).expand(1, keys.shape[1], -1)
        return self.order(layer, keys, positions)

    def after_step(self) -> Iterator[tuple[int, Stay]]:
        layers = self.trace.shape.attention_layers
        held = self.store[layers[0]]
        if not self.plan.is_due(held.n_kept + held.n_window, held.n_seen, self.trace.s_prompt):
            return
        for layer, slots in self.cuts(layers):
            yield layer, Stay(slots, self.plan.room_behind(self.trace.s_prompt))
            self.reorder(layer, slots)

    def cuts(self, layers: Sequence[int]) -> Sequence[tuple[int, Tensor]]:
        """Slots that stay, for each layer. Lazily, so that a layer is cut before the next one is looked at."""
        return ((at, self.order(at, self.store[at].keys(), self.store[at].positions())) for at in layers)  # type: ignore[return-value]

    def queries(self, layer: int) -> Tensor:
        """The latest queries of the layer, the current one last; before the first step the prompt's: (1, h, w, d_h)."""
        if layer in self.store.layers:
            ring = self.store[layer].queries
            assert ring is not None, f"{self.title} asks no queries"
            return ring.latest()
        return self.trace.observed(LastQueries(self.n_queries(self.params)), layer)

    def latest(self, n: int) -> range:
        """Positions of the latest tokens: `n` of them and the current one, or all that there are."""
        return range(max(0, self.n_seen() - 1 - n), self.n_seen())

    def n_seen(self) -> int:
        return self.store[self.trace.shape.attention_layers[0]].n_seen


class DrawingMethod(CuttingMethod):
    """A method whose cuts draw: what it draws hangs on the number of the cut, and on the answer's among its draws."""

    n_cuts: Counter[int]  # of each layer, so far

    def setup(self) -> None:
        self.n_cuts = Counter()

    def cut_by(self) -> Hashable:
        return super().cut_by(), self.draw

    def reorder(self, layer: int, slots: Tensor) -> None:
        self.n_cuts[layer] += 1

    def drawn(self, layer: int, positions: Tensor, heads: Iterable[int], is_fresh: bool = True) -> Tensor:
        """Numbers from 0 to 1 for tokens (1, heads, n), anew at each cut or one for life: float32."""
        cut = self.n_cuts[layer] + 1 if is_fresh else 0
        return numbers_at(self.trace, positions, self.params.seed, layer, heads, self.draw, cut)


def best_first(scores: Tensor, n: int) -> Tensor:
    """Slots of the `n` highest of (1, h_kv, slots), best first, the lower slot first among equals."""
    return top_stable_ref(scores, n)


def with_last(best: Tensor, n_slots: int, n_last: int) -> Tensor:
    """Slots, then the last ones, (1, h_kv, k + n_last)."""
    last = torch.arange(n_slots - n_last, n_slots, device=best.device)
    return torch.cat([best, last.expand(1, best.shape[1], -1)], -1)


def in_place(slots: Tensor) -> Tensor:
    """Slots in the order in which they lie, so that slots stay in the order of positions."""
    return slots.sort(-1).values
