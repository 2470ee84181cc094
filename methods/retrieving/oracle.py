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

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

import torch
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.budget import Budget, key_bytes, split
from kvbench.engine.checks import each_one_of, share, tokens
from kvbench.engine.placement import Offloaded
from kvbench.engine.selection import Cost, Found, Search, Selection
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.store import Store
from kvbench.kernels.rows.logits import Searched, table_of, token_logits, weigh_logits
from kvbench.kernels.scratch import Scratch
from kvbench.kernels.topk import KeyChoice
from kvbench.methods.base import SelectiveAttention

AGGREGATES = ("group_sum", "query_head", "group_max", "group_logit_mean")


def token_scores(logits: Tensor, agg: str, soft: Softmax) -> Tensor:
    """One score per token from logits (n, h_kv, g, s): (n, h_kv, s), or (n, h, s) for `query_head`."""
    if agg == "group_logit_mean":
        return logits.mean(2)
    weights = soft.weights(logits, (logits.shape[1], -1))  # over all tokens, before any restriction
    if agg == "query_head":
        return weights.flatten(1, 2)
    return weights.sum(2) if agg == "group_sum" else weights.amax(2)


def top_tokens(scores: Tensor, k: int, start: int, stop: int) -> Tensor:
    """Positions of the `k` best of the candidates `start` to `stop` (exclusive): (n, heads, k).

    topk promises no order among equal scores. Weights tie only where they underflow to zero and carry nothing.
    """
    k = max(0, min(k, stop - start))
    return scores[..., start:stop].topk(k, sorted=False).indices + start


class Oracle(SelectiveAttention):
    title = "Oracle"
    drops = False
    fetches_more = True

    @dataclass(frozen=True)
    class Params:
        agg: str
        n_sink: int
        local_share: Fraction
        generated: str
        budget_rule: str
        lost_mass: str

        def __post_init__(self) -> None:
            each_one_of(
                "method",
                self,
                agg=AGGREGATES,
                generated=("on_top", "inside"),
                budget_rule=("fair", "official"),
                lost_mass=("renormalise", "spread"),
            )
            tokens("method.n_sink", self.n_sink)
            share("method.local_share", self.local_share)

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

    @classmethod
    def search(cls, rows: Sequence[Self], layer: int, q: Tensor) -> Sequence[Found]:
        """All rows score the same prompt, so its keys are read once for all of them."""
        if q.is_cuda:
            return select_keys(rows, layer, q)
        soft = rows[0].trace.softmax[layer]
        logits = all_logits([row.store for row in rows], layer, q, soft)
        scores = {agg: token_scores(logits, agg, soft) for agg in dict.fromkeys(row.params.agg for row in rows)}
        chosen: list[Found] = []
        for i, row in enumerate(rows):
            n, own_scores = logits.shape[-1], scores[row.params.agg][i : i + 1]
            idx = top_tokens(own_scores, row.plan.k, row.plan.n_sink, n - row.store[layer].n_window)
            chosen.append(Selection(idx, row.cost(layer)))
            if row.params.lost_mass == "spread":
                row.weights = soft.weights(logits[i].flatten(0, 1), (-1,))  # (h, n)
        return chosen

    @classmethod
    def search_again(cls, rows: Sequence[Self], layer: int, q: Tensor, scratch: Scratch) -> Search | None:
        """Once every row chooses as many tokens as it may."""
        if not all(row.repeats for row in rows):
            return None
        search = TokenSearch(rows, layer, q, scratch)
        fills = zip(rows, search.idx, strict=True)
        return search if all(0 < idx.shape[2] == row.plan.k for row, idx in fills) else None

    @property
    def repeats(self) -> bool:
        """Mass that is spread is corrected behind every step."""
        return self.variant.is_full or self.params.lost_mass == "renormalise"

    def kind(self, layer: int) -> Hashable:
        return self.params.agg if self.trace.device.type == "cuda" else id(self.trace)  # whose keys are read once

    def cost(self, layer: int) -> Cost:
        return self.cost_of(self.store[layer].n_seen)

    def cost_of(self, n: int) -> Cost:
        """Keys of all `n` tokens are read."""
        return Cost(searched_bytes=key_bytes(self.trace.shape, n))

    def after_attention(self, layer: int, out: Tensor, weights: Tensor | None) -> Tensor:
        """With `lost_mass: spread` the weights stay as they are, and dropped tokens share what is missing evenly."""
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


def select_keys(rows: Sequence[Oracle], layer: int, q: Tensor) -> list[Selection]:
    """The best tokens of rows whose groups agree in one way, on a GPU: positions in the lower halves."""
    search = TokenSearch(rows, layer, q)
    logits = search.choose(q)
    for i, row in enumerate(rows):
        if row.params.lost_mass == "spread":
            row.weights = search.soft.weights(logits[i, :, : search.lengths[i]], (-1,))
    return [Selection(idx, cost) for idx, cost in zip(search.idx, search.costs(0), strict=True)]


class TokenSearch(Search):
    """Rows whose groups agree in one way, on a GPU."""

    def __init__(self, rows: Sequence[Oracle], layer: int, q: Tensor, scratch: Scratch | None = None) -> None:
        searched: list[Searched] = []
        for row in rows:
            at, keys = row.store[layer], row.trace.keys(layer)
            stop = at.n_seen - at.n_window
            searched.append(Searched(keys, at.host.late[0], at.n_seen, row.plan.n_sink, stop, at.slides))
        self.rows, self.lengths, self.told = rows, [row.n for row in searched], table_of(searched, q.device)
        self.soft, self.agg, shape = rows[0].trace.softmax[layer], rows[0].params.agg, rows[0].trace.shape
        heads = shape.h if self.agg == "query_head" else shape.h_kv
        ks = [max(0, min(row.plan.k, own.stop - own.start)) for row, own in zip(rows, searched, strict=True)]
        self.choice = KeyChoice(len(rows), heads, ks, q.device, scratch) if max(ks) else None
        out = q.new_empty(len(rows), heads, 0, dtype=torch.int64) if self.choice is None else self.choice.out
        self.idx = [out[i : i + 1, :, :k] for i, k in enumerate(ks)]

    def find(self, q: Tensor, k_new: Tensor, v_new: Tensor, age: int) -> None:
        self.choose(q, age)

    def choose(self, q: Tensor, age: int = 0) -> Tensor:
        """Returns the logits (n, h, s) of all tokens."""
        soft = self.soft
        logits, lses = token_logits(q, self.told, soft.scale, soft.cap, soft.sink, age)
        keys = weigh_logits(logits, lses, self.told, self.agg, age)
        if self.choice is not None:
            self.choice.take(keys, self.told.s + age)
        return logits

    def costs(self, age: int) -> Sequence[Cost]:
        return [row.cost_of(n + age) for row, n in zip(self.rows, self.lengths, strict=True)]


def all_logits(stores: Sequence[Store], layer: int, q: Tensor, soft: Softmax) -> Tensor:
    """Logits of every row over the prompt and its own generated tokens, (n, h_kv, g, s) float32."""
    keys = stores[0].trace.keys(layer)  # (1, h_kv, s_prompt, d_h), the same tensor for all rows
    h_kv, d_h = keys.shape[1], keys.shape[3]
    grouped = q.reshape(len(q), h_kv, -1, d_h).float()  # (n, h_kv, g, d_h)
    n, _, g, _ = grouped.shape
    over_prompt = grouped.transpose(0, 1).reshape(h_kv, n * g, d_h) @ keys[0].float().mT  # (h_kv, n * g, s_prompt)
    over_prompt = over_prompt.view(h_kv, n, g, -1).transpose(0, 1)
    late = torch.cat([store[layer].generated()[0] for store in stores])  # (n, h_kv, t, d_h)
    over_late = grouped @ late.to(grouped).mT
    return soft.bent(torch.cat([over_prompt, over_late], -1))
