"""Quest (Tang et al., 2024): fetch the pages whose upper bound on q·k is largest.

Consecutive tokens form pages of one length. Of each page the smallest and the largest value of every channel of its
keys are kept, and with them no key of the page can score higher than the sum of max(q * kmin, q * kmax) over channels.
Every query head attends to all tokens of the pages with the highest bounds.

Paper     arXiv:2406.10774, 2024; Tang, Jiaming; Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference
Symbols   paper p, K, P = `page_len`, `k`, `n_pages`; B = budget.
Per step  read to find: bounds of the P pages, 4 * h_kv * P * d_h bytes, resident; moved: K and V of k * page_len tokens
          per query head, 4 * d_h bytes each, a token of a KV head once; resident besides: generated tokens.
Differs   - `comm_mode: matched` makes pages as long as `comm` asks: 2 / comm tokens, and as many more as it takes that
            the last, short page is paid for too. `native` has the published 16 tokens, which cost comm=1/8.
          - pages are the prompt's, and generated tokens all stay (`page_generated: true` pages them like the others).
            Then no page is special. Where they are paged, `harness` and `serving` always attend to the current page,
            as one of k; its bounds are not needed. With more pages the bounds read grow beyond the prompt's.
          - authors' two code paths differ. `eval`, which made their accuracy figures, takes at least three pages
            whatever the budget and lets the current page compete: it may lose, and then not even the current token is
            attended to. `serving` is their CUDA code. `harness` refuses budgets that have no room for a page, and
            `comm` that does not pay for the bounds; the other two go on, and results are marked.
          - pages per query head under GQA; `agg` makes a group share them. The published models have no groups.
          - the first `full_layers` layers stay whole, as published. A budget is that of the other layers;
            `method_report` has the share over all of them as `overall_ratio`.
          - of equal bounds the earlier page is chosen.
Fails     where keys of one page point apart: the bound is loose and ranks pages badly, the longer they are the more.
Figures   retrieve pages, blocks, clusters: #4A60DC, circle, -

Not here: bounds and scores (`kernels/pages.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, key_bytes, show
from kvbench.engine.declared import Index, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import Offloaded, Release
from kvbench.engine.search import Launch, Units
from kvbench.engine.selection import Cost
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.pages import page_bounds, page_keys_triton, page_scores
from kvbench.methods.base import Variant, overall_ratio
from kvbench.methods.indexed import Indexed
from kvbench.methods.rules import refuse_cap
from kvbench.methods.traits import Traits


@dataclass
class Bounds:
    """The smallest and largest keys of every page, (1, h_kv, n_pages, d_h); of generated tokens too, where paged.

    The keys' own values, held in float32 on a CPU, where to convert them at every step took longer than to score them.
    """

    kmin: Tensor
    kmax: Tensor

    def first(self, n_pages: int) -> "Bounds":
        return Bounds(self.kmin[:, :, :n_pages], self.kmax[:, :, :n_pages])

    def longer(self, n_pages: int) -> "Bounds":
        """A copy with room for so many pages."""
        copies = []
        for old in (self.kmin, self.kmax):
            copy = old.new_empty(*old.shape[:2], n_pages, old.shape[3])
            copy[:, :, : old.shape[2]] = old
            copies.append(copy)
        return Bounds(*copies)

    def take_in(self, key: Tensor, page: int, is_new: bool) -> None:
        """Widen the page by a key (1, h_kv, 1, d_h), in place."""
        kmin, kmax = self.kmin[:, :, page : page + 1], self.kmax[:, :, page : page + 1]
        if is_new:
            kmin.copy_(key)
            kmax.copy_(key)
        else:
            torch.minimum(kmin, key, out=kmin)
            torch.maximum(kmax, key, out=kmax)


class Quest(Indexed):
    title = "Quest"
    no_growth = "has pages of the context alone; method.page_generated=true pages what follows, and grows"
    skips = True
    pads = True
    packs_host = True
    ops = ("pages", "topk")

    @dataclass(frozen=True)
    class Params:
        comm_mode: Literal["native", "matched"]
        page_len: Window
        variant: Literal["harness", "eval", "serving"]
        page_generated: bool
        agg: Literal["query_head", "group_mean", "group_max"]
        full_layers: Index

    @dataclass(frozen=True)
    class Plan:
        page_len: int
        tokens: int  # budget

        def k(self, n: int, variant: str) -> int:
            """Plan that a query attends to of `n` tokens."""
            n_pages = ceil(n / self.page_len)
            if variant == "eval":
                return min(max(3, min(self.tokens, n) // self.page_len), n_pages)
            return min(max(1, self.tokens // self.page_len), n_pages)

    params: Params
    plan: Plan
    index: dict[int, Bounds]  # a variant's own where generated tokens are paged

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        if params.agg == "group_mean":
            refuse_cap(shape, "method.agg=group_mean adds up bounds of a group", "method.agg=query_head")
        if request.ratio == 1 or request.comm is None or params.variant != "harness":
            return
        if params.comm_mode == "native" and request.comm * params.page_len < 2:
            raise ConfigError(
                f"comm={show(request.comm)} does not pay for bounds of pages of method.page_len={params.page_len} "
                f"tokens; use comm={show(Fraction(2, params.page_len))} or more, or method.comm_mode=matched"
            )
        if request.comm == 0:
            raise ConfigError("comm=0 pays for no page; use 2 / tokens of the prompt or more")

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return f"{cls.title} (matched)" if params.comm_mode == "matched" and request.comm is not None else cls.title

    @classmethod
    def index_comm(cls, params: Params, budget: Budget, shape: ModelShape) -> Fraction:
        return Fraction(2 * ceil(budget.s_prompt / params.page_len), budget.s_prompt)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if params.comm_mode == "native" or budget.attends_all:
            plan = Quest.Plan(params.page_len, budget.tokens)
        else:
            plan = Quest.Plan(matched_page_len(budget), budget.tokens)
        if params.variant == "harness" and not budget.attends_all:
            refuse_unaffordable(plan, budget)
        return plan

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        s, started = budget.s_prompt, budget.s_prompt % plan.page_len if params.page_generated else 0
        bounds = 2 * shape.h_kv * shape.d_h * ELEMENT_BYTES * ceil(s / plan.page_len)
        fetched = plan.k(s, params.variant) * plan.page_len * (shape.g if params.agg == "query_head" else 1)
        return held(budget, shape, started, bounds, fetched, len(cls.whole_layers(params, shape)))

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        return replace(super().traits_of(params), extends=params.page_generated)

    def extend(self, layer: int, q: Tensor, grown: Variant) -> None:
        self.plan = replace(self.plan, tokens=grown.budget.tokens)

    # While the prompt is read.

    def arrange(self, layer: int) -> Offloaded:
        trace, page_len, n_new = self.trace, self.plan.page_len, self.store.n_new
        shared = trace.once(
            ("Quest's bounds", layer, page_len),
            lambda: Bounds(*(x if x.is_cuda else x.float() for x in page_bounds(trace.keys(layer), page_len))),
        )
        most = ceil((trace.s_prompt + n_new) / page_len)
        self.index[layer] = shared.longer(most) if self.params.page_generated else shared
        if not self.params.page_generated:
            return Offloaded(0, 0)
        started = trace.s_prompt % page_len
        if self.keeps_current:
            return Offloaded(0, started, min(page_len, started + n_new))
        return Offloaded(0, 0, capacity=0)  # the current token has to be selected, too

    @property
    def keeps_current(self) -> bool:
        """Whether the current page is always attended to, where generated tokens are paged."""
        return self.params.variant != "eval"

    # A decode step.

    def score(self, layer: int, question: Tensor, index: Bounds) -> Tensor:
        """The largest q·k that a page's bounds allow."""
        n, h_kv, g, d_h = question.shape
        # Rows become query heads of the same KV head, so that the bounds are read once.
        folded = question.transpose(0, 1).reshape(1, -1, 1, d_h)
        scores = page_scores(folded, index.kmin, index.kmax)  # (1, h_kv * n * g, pages)
        return scores.view(h_kv, n, g, -1).transpose(0, 1)

    def units(self, layer: int) -> Units:
        n, length, variant = self.store[layer].n_seen, self.plan.page_len, self.params.variant
        if not self.params.page_generated:
            return Units(self.plan.k(self.trace.s_prompt, variant), self.trace.s_prompt, length=length)
        k = self.plan.k(n, variant)
        if self.keeps_current:
            return Units(k - 1, (n - 1) // length * length, length=length)
        return Units(k, n, length=length)

    def seen(self, layer: int) -> Bounds:
        return self.index[layer].first(self.units(layer).behind)

    @classmethod
    def launch(cls, rows: Sequence[Self], layer: int, keys: Callable[[], Tensor], ahead: int) -> Launch:
        index, agg, found = rows[0].seen(layer), rows[0].params.agg, keys()
        return lambda q, k_new, v_new, since: page_keys_triton(q, index.kmin, index.kmax, agg, found)

    @property
    def repeats(self) -> bool:
        """Pages of the prompt alone stay what they are."""
        return self.variant.is_full or not self.params.page_generated

    def selects_feeds(self, layer: int) -> bool:
        return self.repeats

    def append(self, layer: int) -> None:
        """Widen the current page by the current token, where generated tokens are paged."""
        if self.params.page_generated:
            index = self.index[layer]
            page, place = divmod(self.store[layer].n_seen - 1, self.plan.page_len)
            index.take_in(self.store[layer].newest[0].to(index.kmin), page, place == 0)

    def cost(self, layer: int) -> Cost:
        """The bounds of pages that compete are read; where generated tokens are paged, the current one is taken in."""
        shape, paged, n_pages = self.trace.shape, self.params.page_generated, self.units(layer).behind
        of_page = 2 * key_bytes(shape, 1)  # bounds
        n_held = ceil(self.store[layer].n_seen / self.plan.page_len) if paged else n_pages
        return Cost(of_page * n_held, of_page * n_pages, rebuilt_bytes=paged * key_bytes(shape, 1))

    def behind(self, layer: int, weights: Tensor | None) -> Release | None:
        """A full page leaves the window, and competes with the others from now on."""
        paged, at = self.params.page_generated and self.keeps_current, self.store[layer]
        return Release() if paged and at.can_fetch and at.n_seen % self.plan.page_len == 0 else None

    def report(self) -> dict[str, Any]:
        s, page_len = self.trace.s_prompt, self.plan.page_len
        k = self.plan.k(s, self.params.variant)
        share = min(k * page_len, s) / s
        return {
            "comm_mode": self.params.comm_mode,
            "page_len": page_len,
            "n_pages": ceil(s / page_len),
            "k_pages": k,
            "achieved_ratio": share,
            "overall_ratio": overall_ratio(self, share),
        }


def matched_page_len(budget: Budget) -> int:
    """The shortest pages whose bounds `comm` pays for, a short last one included."""
    most = floor(budget.comm * budget.s_prompt / 2)  # pages
    if most < 1:
        raise ConfigError(
            f"comm={show(budget.comm)} pays for no page of a prompt of {budget.s_prompt} tokens; "
            f"use comm=2/{budget.s_prompt} or more"
        )
    by_comm = 1 if budget.finds_freely else round(2 / budget.comm)
    return max(by_comm, ceil(budget.s_prompt / most))


def refuse_unaffordable(plan: Quest.Plan, budget: Budget) -> None:
    """`ConfigError` where `comm` does not pay for the bounds, or the budget for no page."""
    s, page_len = budget.s_prompt, plan.page_len
    n_pages = ceil(s / page_len)
    if not budget.finds_freely and 2 * n_pages > budget.comm * s:
        raise ConfigError(
            f"comm={show(budget.comm)} does not pay for bounds of the {n_pages} pages of {page_len} tokens of a prompt "
            f"of {s}; use comm={ceil(1000 * Fraction(2 * n_pages, s)) / 1000} or more, or method.comm_mode=matched"
        )
    if budget.tokens < page_len:
        raise ConfigError(
            f"a budget of {budget.tokens} tokens for a prompt of {s} has no room for a page of {page_len}, as long as "
            f"comm={show(budget.comm)} makes it; use ratio={ceil(Fraction(1000 * page_len, s)) / 1000} or more "
            f"(budget={page_len}), or more comm"
        )
