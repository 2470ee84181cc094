"""Oracle: exact top-k by the true attention weights of the current query. The ceiling for selection, no compression.

PQCache's and SparQ's authors each use one. It reads all keys at every step, so no budget prices its search; what it
attends to is within the budget like everybody's.

Paper     none: a reference of this harness
Symbols   paper a, c, k = `n_sink`, `n_window` (current token included), `k`; S, n = `s_prompt`, tokens so far.
Per step  moved: K and V of k tokens, 4 * h_kv * k * d_h bytes; searched, unpriced: 2 * h_kv * n * d_h; resident: sinks
          and window.
Differs   sinks are inside the ratio, as for every method here; `budget_rule: official` puts them on top, as PQCache's
          authors do. The group's weights are summed, as both authors do; the other rules show what that choice costs.
Fails     where a task needs more tokens than the budget has: kept mass is maximal, an answer's worth need not be.
Figures   others: #777777, cross, :
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.budget import Budget, key_bytes, split
from kvbench.engine.declared import Share, Tokens
from kvbench.engine.placement import Offloaded
from kvbench.engine.search import Launch, Units, products
from kvbench.engine.selection import Cost
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.clock import Since
from kvbench.kernels.rows.logits import Searched, table_of, token_logits, weigh_logits
from kvbench.kernels.topk import top_stable_ref
from kvbench.methods.indexed import Indexed


def token_scores(logits: Tensor, agg: str, softmax: Softmax) -> Tensor:
    """One score per token from logits (n, h_kv, g, s): (n, h_kv, s), or (n, h, s) for `query_head`.

    Of a layer's heads together it is (n, 1, s).
    """
    if agg == "group_logit_mean":
        return logits.mean(2)
    if agg == "layer_logit_max":
        return logits.flatten(1, 2).amax(1, keepdim=True)
    weights = softmax.weights(logits, (logits.shape[1], -1))  # over all tokens, before any restriction
    if agg == "layer_max":
        return weights.flatten(1, 2).amax(1, keepdim=True)
    if agg in ("query_head", "layer_union"):
        return weights.flatten(1, 2)
    return weights.sum(2) if agg == "group_sum" else weights.amax(2)


def union(scores: Tensor, k: int) -> Tensor:
    """One set for all heads (1, 1, k) by scores (1, h, s): each head's best token, then each one's second, and so on.

    As LessIsMore has it: what a head in front has chosen is skipped, and the set is never larger.
    """
    ranked = top_stable_ref(scores[0], k).T.flatten().tolist()  # by rank, then by head
    return torch.tensor([[[*dict.fromkeys(ranked)][:k]]], device=scores.device)


class Oracle(Indexed):
    title = "Oracle"
    extends = True
    ops = ("logits", "topk")

    @dataclass(frozen=True)
    class Params:
        agg: Literal[
            "group_sum", "query_head", "group_max", "group_logit_mean", "layer_max", "layer_logit_max", "layer_union"
        ]
        n_sink: Tokens
        local_share: Share
        generated: Literal["on_top", "inside"]
        budget_rule: Literal["fair", "official"]
        lost_mass: Literal["renormalise", "spread"]

    @dataclass(frozen=True)
    class Plan:
        """How a budget is divided."""

        n_sink: int
        n_window: int  # latest tokens that are always attended to, the current one included
        k: int

    params: Params
    plan: Plan
    weights: Tensor  # (h, n) of the present step and layer, where `lost_mass` is spread

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if params.budget_rule == "fair":
            fair = split(budget.tokens, params.n_sink, params.local_share)
            return Oracle.Plan(fair.n_sink, fair.n_local + 1, fair.k)
        # In double precision, as the authors compute them; what the top-k leaves is local, the current token included.
        n_sink = min(params.n_sink, budget.s_prompt)
        besides = int((budget.s_prompt - n_sink) * float(budget.ratio))
        k = int(besides * float(1 - params.local_share))
        return Oracle.Plan(n_sink, max(1, besides - k), k)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        wide = shape.g if params.agg == "query_head" else 1
        return held(budget, shape, plan.n_sink + plan.n_window - 1, fetched=plan.k * wide)

    def arrange(self, layer: int) -> Offloaded:
        n_past = min(max(0, self.plan.n_window - 1), self.trace.s_prompt - self.plan.n_sink)
        slides = self.params.generated == "inside"
        self.trace.hold(layer)  # the search reads all keys where they were computed
        return Offloaded(self.plan.n_sink, n_past, self.plan.n_window if slides else None)

    def score(self, layer: int, question: Tensor, index: Tensor) -> Tensor:
        """The logits of keys."""
        return self.trace.softmax[layer].bent(products(question, index.to(question)))

    def merge(self, layer: int, scores: Tensor) -> Tensor:
        return token_scores(scores, self.params.agg, self.trace.softmax[layer])

    def seen(self, layer: int) -> Tensor:
        return self.trace.keys(layer)

    @classmethod
    def generated(cls, rows: Sequence[Self], layer: int) -> Tensor:
        return torch.cat([row.store[layer].generated()[0] for row in rows])  # (n, h_kv, t, d_h)

    def units(self, layer: int) -> Units:
        at = self.store[layer]
        return Units(self.plan.k, at.n_seen - at.n_window, self.plan.n_sink, grows=at.slides)

    def choose(self, layer: int, ranking: Tensor, scores: Tensor) -> Tensor | None:
        if self.params.lost_mass == "spread":
            self.weights = self.trace.softmax[layer].weights(scores[0].flatten(0, 1), (-1,))  # (h, n)
        units = self.units(layer)
        if self.agg == "layer_union" and units.n_chosen:
            return union(ranking[..., units.start : units.stop], units.n_chosen) + units.start
        return super().choose(layer, ranking, scores)

    @classmethod
    def launch(cls, rows: Sequence[Self], layer: int, keys: Callable[[], Tensor], ahead: int) -> Launch:
        searched: list[Searched] = []
        for row in rows:
            at, units = row.store[layer], row.units(layer)
            late = at.host.late[0]
            searched.append(Searched(row.seen(layer), late, at.n_seen, units.start, units.stop, at.slides))
        softmax, agg = rows[0].trace.softmax[layer], rows[0].params.agg
        planned = table_of(searched, searched[0].k.device, ahead)

        def launch(q: Tensor, k_new: Tensor, v_new: Tensor, since: Since) -> Tensor:
            logits, lses = token_logits(q, planned, softmax.scale, softmax.cap, softmax.sink, since)
            return weigh_logits(logits, lses, planned, agg, since)

        return launch

    def has_kernel(self, layer: int) -> bool:
        """Whether a kernel may search: a kernel makes no weights, which `lost_mass: spread` needs, nor one set for all
        heads."""
        return super().has_kernel(layer) and self.repeats and not self.agg.startswith("layer_")

    @property
    def repeats(self) -> bool:
        """Mass that is spread is corrected after every step."""
        return self.variant.is_full or self.params.lost_mass == "renormalise"

    def selects_feeds(self, layer: int) -> bool:
        return False

    def kind(self, layer: int) -> Hashable:
        return id(self.trace), self.params.agg

    def cost(self, layer: int) -> Cost:
        """Keys of all tokens are read."""
        return Cost(searched_bytes=key_bytes(self.trace.shape, self.store[layer].n_seen))

    def after_attention(self, layer: int, out: Tensor, weights: Tensor | None) -> Tensor:
        """Spread what is missing evenly over dropped tokens, with `lost_mass: spread`; the weights stay as they are."""
        if self.params.lost_mass == "renormalise" or self.variant.is_full:
            return out
        dropped = ~self.store.attended(layer)  # (h, n)
        if dropped.device.type == "cpu" and not dropped.any():  # to ask a GPU would wait for it
            return out
        lost = (self.weights * dropped).sum(-1).view(1, -1, 1, 1)
        late = self.store[layer].generated()[1]
        values = torch.cat([self.trace.values(layer), late.to(out.device)], 2).float()
        per_head = values.repeat_interleave(self.trace.shape.g, 1)  # (1, h, n, d_h)
        share = (dropped / dropped.sum(-1, keepdim=True).clamp(min=1)).view(1, *dropped.shape[:1], 1, -1)
        return ((1 - lost) * out.float() + lost * (share @ per_head)).to(out.dtype)
