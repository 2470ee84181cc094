"""A feed of several tokens through a layer of fixed size, in which every token may drive another one out.

What leaves depends on the weights of the tokens before, so the softmax and the choice go token by token. Logits and
outputs are one product each for the whole feed.

Not here: what a method scores tokens by (`methods/dropping/h2o.py`, `methods/dropping/tova.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.engine.placement import Stay
from kvbench.engine.turns.feed import Feed
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.scorers import lowest_slot

Scores = Callable[[Tensor, int], Tensor]  # from weights (1, h, n) and the tokens held: (1, h_kv or 1, n), lowest leaves


def grown_cache(row: SelectiveAttention, layer: int, tokens: int) -> Stay:
    """All that the layer holds stays, with room for so many tokens in all before one has to leave again."""
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
    logits = feed.soft.bent(grouped @ k[0].float().mT.unsqueeze(1))  # (h_kv, g, m, n)
    hidden = torch.zeros(h_kv, 1, n, device=k.device)
    hidden[..., n_held:] = -torch.inf
    for t in range(m):
        hidden[..., n - m + t] = 0
        weights = torch.add(logits[:, :, t], hidden, out=logits[:, :, t])
        weights = feed.soft.weights(weights, (h_kv, -1))  # (h_kv, g, n)
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
