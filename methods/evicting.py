"""Methods that look at the weights of each step: `Evicting`, and how a layer lets its lowest token go, `Eviction`.

A method says what a token's score is and how many tokens a layer holds. What follows from it is the same for all: the
step, a feed of several tokens, and what an accelerator is planned.

Not here: what is kept of the prompt (`methods/dropping/h2o.py`, `methods/dropping/tova.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.engine.caches.eviction import NEVER, Update
from kvbench.engine.placement import Change, Evict, Stay
from kvbench.engine.selection import FREE, Cost
from kvbench.engine.turns.feed import Feed
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.scorers import lowest_slot, reduce_group

SCORE_BYTES = 4
Scores = Callable[[Tensor, int], Tensor]  # from weights (1, h, n) and the tokens held: (1, h_kv or 1, n), lowest leaves


class Eviction(NamedTuple):
    """How tokens are scored after a step, and when the one of the lowest score leaves; of equal ones the later."""

    reduce: str  # how weights of the query heads that share a score become one: "sum", "max" or "mean"
    tokens: int = NEVER  # that a KV head holds after a step
    adds_up: bool = True  # scores are sums over all steps; False: they are of the step at hand
    by_layer: bool = False  # all heads of a layer share their scores, and let the same token go; False: each KV head
    n_first: int = 0  # first tokens of the text that stay whatever their score
    n_last: int = 0  # and latest ones


class Evicting(SelectiveAttention):
    """A method writes `eviction`, and puts what the prompt's tokens are worth into `sums` where scores add up."""

    sums: dict[int, Tensor]  # per layer (1, h_kv or 1, n) float32, in the order of the store's slots

    def eviction(self) -> Eviction | None:
        """The rule by which steps evict; None: no step changes anything."""
        raise NotImplementedError

    def setup(self) -> None:
        self.sums, self.wants_weights = {}, not self.is_still

    @property
    def is_still(self) -> bool:
        return self.variant.is_full or self.eviction() is None

    def behind(self, layer: int, weights: Tensor | None) -> Change | None:
        rule, at = self.eviction(), self.store[layer]
        if rule is None or self.variant.is_full:
            return None
        assert weights is not None, f"{self.title} looks at weights"
        scores, cost = reduce_group(weights, self.n_owners(rule), rule.reduce), FREE
        if rule.adds_up:
            scores[..., :-1] += self.sums[layer]
            cost = Cost(held_bytes=SCORE_BYTES * scores.numel())
        if scores.shape[-1] <= rule.tokens:
            self.sums[layer] = scores
            return Change(cost=cost) if rule.adds_up else None
        positions = at.positions()[:, : scores.shape[1]]
        slots = weakest(scores, positions, rule.n_first, at.n_seen - rule.n_last)
        if rule.adds_up:
            self.sums[layer] = scores.scatter(-1, slots, scores[..., -1:])[..., :-1]  # as the layer does
        return Evict(slots.expand(-1, self.trace.shape.h_kv, -1), cost=cost)

    def n_owners(self, rule: Eviction) -> int:
        """Heads that have scores of their own."""
        return 1 if rule.by_layer else self.trace.shape.h_kv

    def update(self, layer: int, weights: Tensor, ahead: int = 0) -> Update | None:
        rule, at = self.eviction(), self.store[layer]
        if rule is None or self.variant.is_full:
            return None
        owners = self.n_owners(rule)
        planned = Update(at, weights, owners, rule.reduce, most=rule.tokens)
        if rule.n_first or rule.n_last:
            planned = planned._replace(candidates=(rule.n_first, at.n_seen + ahead - rule.n_last))
        if not rule.adds_up:
            return planned
        keep = partial(self.sums.__setitem__, layer)
        return planned._replace(before=self.sums[layer], token_bytes=SCORE_BYTES * owners, keep=keep)

    # A feed.

    def at_once(self, layer: int, m: int) -> int:
        evicts = not self.is_still and self.store[layer].device.type == "cpu"
        return m if evicts else super().at_once(layer, m)

    def read_feed(self, layer: int, feed: Feed) -> Tensor | None:
        """Read a feed's tokens as one by one: scores add up, and the lowest leaves once the cache is full."""
        rule = self.eviction()
        if rule is None or self.variant.is_full:
            return None
        owners, keeps = self.n_owners(rule), (rule.n_first, rule.n_last)
        if not rule.adds_up:
            worth: Scores = lambda weights, _: reduce_group(weights, owners, rule.reduce)  # noqa: E731
            return read_evicting(self, layer, feed, rule.tokens, keeps, worth)[0]
        sums = torch.nn.functional.pad(self.sums[layer], (0, len(feed.moments)))

        def scores(weights: Tensor, n_held: int) -> Tensor:
            self.store.spend(layer, Cost(held_bytes=SCORE_BYTES * owners * n_held))
            return sums.add_(reduce_group(weights, owners, rule.reduce))

        out, held = read_evicting(self, layer, feed, rule.tokens, keeps, scores)
        self.sums[layer] = sums.gather(-1, held)
        return out


def weakest(scores: Tensor, positions: Tensor, start: int, stop: int) -> Tensor:
    """Slot of each head's lowest score, of tokens from the position `start` to `stop`: (1, heads, 1)."""
    return lowest_slot(scores.masked_fill((positions < start) | (positions >= stop), torch.inf), positions)


def grown_cache(row: SelectiveAttention, layer: int, tokens: int) -> Stay:
    """Keep all that the layer holds, with room for so many tokens in all before one has to leave again."""
    at, store = row.store[layer], row.store
    positions = at.positions()
    slots, n = positions.argsort(-1), positions.shape[-1]
    return Stay(slots, min(store.n_new - (at.n_seen - row.trace.s_prompt), max(0, tokens + 1 - n)))


def read_evicting(
    row: SelectiveAttention, layer: int, feed: Feed, n_most: int, keeps: tuple[int, int], scores: Scores
) -> tuple[Tensor, Tensor]:
    """The outputs (1, h, m, d_h), and which of the tokens before and of the feed are still there: (1, h_kv, n).

    Beyond `n_most` tokens the one with the lowest score goes, but none of the first and the latest ones that `keeps`
    says. Scores of tokens that are not there, or not yet, mean nothing.
    """
    at, m, h_kv = row.store[layer], feed.k.shape[2], feed.k.shape[1]
    parts, (n_first, n_last) = at.resident(), keeps
    k, v = (torch.cat(x, 2) for x in ([*(p.k for p in parts), feed.k], [*(p.v for p in parts), feed.v]))
    n = k.shape[2]
    n_held = n - m
    coming = torch.arange(at.n_seen, at.n_seen + m, device=k.device).expand(1, h_kv, -1)
    positions = torch.cat([at.positions(), coming], -1)  # (1, h_kv, n)
    grouped = feed.q[0].float().unflatten(0, (h_kv, -1))  # (h_kv, g, m, d_h)
    logits = feed.softmax.bent(grouped @ k[0].float().mT.unsqueeze(1))  # (h_kv, g, m, n)
    hidden = torch.zeros(h_kv, 1, n, device=k.device)
    hidden[..., n_held:] = -torch.inf
    for t in range(m):
        hidden[..., n - m + t] = 0
        weights = torch.add(logits[:, :, t], hidden, out=logits[:, :, t])
        weights = feed.softmax.weights(weights, (h_kv, -1))  # (h_kv, g, n)
        logits[:, :, t] = weights
        n_held += 1
        at.count_in(n_held)
        worth = scores(weights.flatten(0, 1).unsqueeze(0), n_held)
        row.store.close(layer)
        if n_held > n_most:
            heads = worth.shape[1]  # 1 where all heads drop the same token: then they hold the same
            stays = (positions < n_first) | (positions >= at.n_seen - n_last) | (hidden < 0).view_as(positions)
            slots = lowest_slot(worth.masked_fill(stays[:, :heads], torch.inf), positions[:, :heads])
            hidden.scatter_(-1, slots.expand(1, h_kv, 1).view(h_kv, 1, 1), -torch.inf)
            n_held -= 1
    out = (logits.flatten(1, 2) @ v[0].float()).view(1, -1, m, v.shape[-1])
    held = (hidden[:, 0] == 0).nonzero()[:, 1].view(1, h_kv, n_held)
    at.hold(k, v, positions, held)
    return out.to(feed.q.dtype), held
