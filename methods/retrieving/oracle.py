"""Oracle: exact top-k by the true attention weights of the current query. The ceiling for selection, no compression.

PQCache's and SparQ's authors each use one. It reads all keys at every step, so no budget prices its search; what it
attends to is within the budget like everybody's.

Symbols   paper a, c, k = `n_sink`, `n_window` (current token included), `k`; S, n = `s_prompt`, tokens so far.
Per step  moved: K and V of k tokens, 4 * h_kv * k * d_h bytes; searched, unpriced: 2 * h_kv * n * d_h; resident: sinks
          and window.
Differs   sinks are inside the ratio, as for every method here; `budget_rule: official` puts them on top, as PQCache's
          authors do. The group's weights are summed, as both authors do; the other rules show what that choice costs.
Fails     where a task needs more tokens than the budget has: kept mass is maximal, an answer's worth need not be.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from engine.budget import key_bytes
from engine.store import Store
from methods.base import SelectiveAttention
from methods.rules.oracle import OracleRules


def token_scores(logits: Tensor, agg: str) -> Tensor:
    """One score per token from scaled logits (n, h_kv, g, s): (n, h_kv, s), or (n, h, s) for `query_head`."""
    if agg == "group_logit_mean":
        return logits.mean(2)
    weights = logits.softmax(-1)  # over all tokens, before any restriction
    if agg == "query_head":
        return weights.flatten(1, 2)
    return weights.sum(2) if agg == "group_sum" else weights.amax(2)


def top_tokens(scores: Tensor, k: int, start: int, stop: int) -> Tensor:
    """Positions of the `k` best of the candidates `start` to `stop` (exclusive): (n, heads, k).

    topk promises no order among equal scores. Weights tie only where they underflow to zero and carry nothing.
    """
    k = max(0, min(k, stop - start))
    return scores[..., start:stop].topk(k, sorted=False).indices + start


class Oracle(OracleRules, SelectiveAttention):
    params: OracleRules.Params
    plan: OracleRules.Plan
    weights: Tensor  # (h, n) of the present step and layer, where `lost_mass` is spread

    def arrange(self, layer: int) -> None:
        n_past = min(max(0, self.plan.n_window - 1), self.trace.s_prompt - self.plan.n_sink)
        slides = self.params.generated == "inside"
        self.trace.hold(layer)  # the search reads all keys where they were computed
        self.store.offload(layer, self.plan.n_sink, n_past, self.plan.n_window if slides else None)

    def protected(self, layer: int) -> Sequence[int]:
        return self.sinks_and_window(layer, self.plan.n_sink)

    @classmethod
    def select_rows(cls, rows: Sequence[SelectiveAttention], layer: int, q: Tensor) -> list[Tensor | None]:
        """All rows score the same prompt, so its keys are read once for all of them."""
        oracles = cast("Sequence[Oracle]", rows)
        logits = all_logits([row.store for row in rows], layer, q, rows[0].trace.scales[layer])
        scores = {agg: token_scores(logits, agg) for agg in dict.fromkeys(row.params.agg for row in oracles)}
        chosen: list[Tensor | None] = []
        for i, row in enumerate(oracles):
            n = logits.shape[-1]
            row.store[layer].meter.count("searched_bytes", key_bytes(row.trace.shape, n))
            own_scores = scores[row.params.agg][i : i + 1]
            chosen.append(top_tokens(own_scores, row.plan.k, row.plan.n_sink, n - row.store[layer].n_window))
            if row.params.lost_mass == "spread":
                row.weights = logits[i].flatten(0, 1).softmax(-1)  # (h, n)
        return chosen

    def after_attention(self, layer: int, out: Tensor, weights: Tensor | None) -> Tensor:
        """With `lost_mass: spread` the weights stay as they are, and dropped tokens share what is missing evenly."""
        if self.params.lost_mass == "renormalise" or self.variant.is_full:
            return out
        dropped = ~self.store.attended(layer).to(out.device)  # (h, n)
        if not dropped.any():
            return out
        lost = (self.weights * dropped).sum(-1).view(1, -1, 1, 1)
        late = self.store[layer].generated()[1].to(out.device)  # the host has them
        values = torch.cat([self.trace.values(layer), late], 2).float()
        per_head = values.repeat_interleave(self.trace.shape.g, 1)  # (1, h, n, d_h)
        share = (dropped / dropped.sum(-1, keepdim=True)).view(1, *dropped.shape[:1], 1, -1)
        return ((1 - lost) * out.float() + lost * (share @ per_head)).to(out.dtype)


def all_logits(stores: Sequence[Store], layer: int, q: Tensor, scale: float) -> Tensor:
    """Scaled logits of every row over the prompt and its own generated tokens, (n, h_kv, g, s) float32."""
    keys = stores[0].trace.keys(layer)  # (1, h_kv, s_prompt, d_h), the same tensor for all rows
    h_kv, d_h = keys.shape[1], keys.shape[3]
    grouped = q.reshape(len(q), h_kv, -1, d_h).float()  # (n, h_kv, g, d_h)
    n, _, g, _ = grouped.shape
    over_prompt = grouped.transpose(0, 1).reshape(h_kv, n * g, d_h) @ keys[0].float().mT  # (h_kv, n * g, s_prompt)
    over_prompt = over_prompt.view(h_kv, n, g, -1).transpose(0, 1)
    late = torch.cat([store[layer].generated()[0] for store in stores])  # (n, h_kv, t, d_h)
    over_late = grouped @ late.to(grouped).mT
    return torch.cat([over_prompt, over_late], -1) * scale
