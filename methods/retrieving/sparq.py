"""SparQ (Ribar et al., 2024): a few components of the query find the tokens that are then read in full.

At each step the `r` largest components of |q| approximate all logits, reading `r` of `d_h` columns of K. The tokens
with the largest approximate logits are fetched; the attention mass that they lack, as approximated, goes to the mean
of V. K is kept twice for this, by tokens and by components, so that a component is contiguous over tokens.

Paper     arXiv:2312.04985, 2023; Ribar, Luka; SparQ Attention: Bandwidth-Efficient LLM Inference
Symbols   paper r, k, l = `r`, k + n_window - 1, n_window - 1 (local tokens are inside the paper's k); i, alpha =
          `components`, `covered`; components are one set per KV head.
Per step  moved to find: r columns of the n tokens that are neither sink nor local, 2 * h_kv * r * n bytes; fetched: K
          and V of k tokens per KV head, 4 * h_kv * k * d_h bytes; resident: sinks and window. The host holds half as
          much again as a plain cache (`method_report` has it).
Differs   - sinks, inside the budget; the authors have none (n_sink=0, local_share=0.25: method=sparq_paper). PQCache's
            authors put 32 on top of the ratio and reallocate nothing: method=sparq_pqcache.
          - generated tokens all stay local by default, so that the share of the prompt and the bytes moved are the same
            at every step. `inside` is the published form: the window slides, and once more tokens than it holds were
            generated, the columns are longer than the prompt's and may cost more than `comm`.
          - sinks and local tokens are on the device, so their columns are not counted.
          - sums of |q| and of logits are float32; of equal scores the lower position is chosen.
          - `layout: rows` keeps K once. A component then costs whole cache lines, and whole keys are counted: no `comm`
            below 1 pays for them, and results are marked.
Fails     where few components do not stand for the product, as with one of 64; the group's heads share them.
Figures   retrieve single tokens: #65A12C, hourglass, --

Not here: an exact search (`methods/retrieving/oracle.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, key_bytes, show, split
from kvbench.engine.declared import Share, Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.streams import sent_home
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Change, Offloaded
from kvbench.engine.search import KernelSearch, Units, best_tokens
from kvbench.engine.selection import Cost
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.turns.feed import Feed
from kvbench.kernels.clock import Since
from kvbench.kernels.rows.columns import Columns, Table, blend, component_keys, cover, find_components, table_of
from kvbench.kernels.scratch import Scratch
from kvbench.methods.indexed import Indexed


def top_components(q: Tensor, h_kv: int, r: int) -> Tensor:
    """The `r` components with the largest sum of |q| over a group: (n, h, 1, d_h) -> (n, h_kv, r), best first.

    Sums of 16-bit queries are often equal: then the first ones.
    """
    grouped = q.reshape(len(q), h_kv, -1, q.shape[-1]).float()  # (n, h_kv, g, d_h)
    return grouped.abs().sum(2).sort(descending=True, stable=True).indices[..., :r]


def query_weights(q: Tensor, components: Tensor, scale: float) -> Tensor:
    """Weights by which components (n, h_kv, r) of keys are multiplied for approximate logits: (n, h_kv, g, r) float32.

    A head's scale rises with the share of its |q| that the components lack: between too flat, as if all were there, and
    too sharp, as if there were no others.
    """
    grouped = q.reshape(len(q), components.shape[1], -1, q.shape[-1]).float()  # (n, h_kv, g, d_h)
    chosen = grouped.gather(-1, components.unsqueeze(2).expand(-1, -1, grouped.shape[2], -1))
    share = chosen.abs().sum(-1, keepdim=True) / grouped.abs().sum(-1, keepdim=True).clamp(min=TINY)
    return chosen * (scale * share.clamp(min=TINY).rsqrt())


def columns_at(index: Tensor, components: Tensor) -> Tensor:
    """Components (n, h_kv, r) of tokens by columns (1 or n, h_kv, d_h, s), whatever their strides: (n, h_kv, r, s)."""
    (n_own, h_kv, d_h, s), (n, _, r) = index.shape, components.shape
    if index.stride(3) != 1:  # a plain cache, where a component lies apart from token to token
        where = components.unsqueeze(2).expand(-1, -1, s, -1)
        return index.mT.expand(n, -1, -1, -1).gather(3, where).mT
    where = components + torch.arange(0, h_kv * d_h, d_h, device=index.device).unsqueeze(1)
    if n_own > 1:
        where = where + torch.arange(0, n * h_kv * d_h, h_kv * d_h, device=index.device).view(-1, 1, 1)
    return index.reshape(-1, s).index_select(0, where.flatten()).view(n, h_kv, r, s)


def covered_mass(logits: Tensor, idx: Tensor, start: int, stop: int, softmax: Softmax) -> Tensor:
    """Share of the softmax over all tokens, (n, h_kv, g, s), on `idx` (n, h_kv, k) and outside `start` to `stop`.

    (n, h_kv, g) float32. A sink is attended to.
    """
    fetched = logits.gather(-1, idx.unsqueeze(2).expand(-1, -1, logits.shape[2], -1))
    attended = torch.cat([logits[..., :start], fetched, logits[..., stop:]], -1)
    heads = logits.shape[1], -1
    return (softmax.lse(attended, heads) - softmax.lse(logits, heads)).exp().clamp(max=1.0)


@dataclass(frozen=True)
class Lacking:
    """The share that the mean of V has to stand for, in rows that a GPU searched together."""

    search: ColumnSearch
    place: int  # of this row


PUBLISHED_SHARE = Fraction(1, 4)  # of a key's components: 32 of 128, with which the paper moves an eighth of the cache


class SparQ(Indexed):
    title = "SPARQ"
    extends = True
    ops = ("columns", "topk")
    takes_newest = True

    @dataclass(frozen=True)
    class Params:
        n_sink: Tokens
        local_share: Share
        reallocate: bool
        layout: Literal["columns", "rows"]
        generated: Literal["on_top", "inside"]
        budget_rule: Literal["fair", "official"]

    @dataclass(frozen=True)
    class Plan:
        """How a budget is divided, and how many components find the selected tokens."""

        n_sink: int
        n_window: int  # latest tokens that are always attended to, the current one included
        k: int  # tokens that a KV head selects
        r: int

    params: Params
    plan: Plan
    index: dict[int, Tensor]  # the prompt's keys by columns (h_kv, d_h, s_prompt) on the host
    late: dict[int, Tensor]  # per layer the generated tokens' columns (h_kv, d_h, n_new)
    means: dict[int, Tensor]  # per layer the mean of V over all tokens so far (1, h_kv, 1, d_h)
    lacking: Lacking | None  # of the present step and layer, on a GPU
    covered: Tensor | None  # (1, h_kv, g) of the present step and layer; None: nothing is missing

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if request.ratio != 1 and request.comm is not None:
            n_components(request.comm, shape.d_h)

    @classmethod
    def index_comm(cls, params: Params, budget: Budget, shape: ModelShape) -> Fraction:
        return PUBLISHED_SHARE

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        r = 0 if budget.attends_all else n_components(budget.comm, shape.d_h)
        if params.budget_rule == "fair":
            fair = split(budget.tokens, params.n_sink, params.local_share)
            return SparQ.Plan(fair.n_sink, fair.n_local + 1, fair.k, r)
        # As PQCache's authors compute them, in double precision; sinks are on top.
        share = budget.s_prompt * float(budget.ratio)
        n_local = int(share * float(params.local_share))
        n_sink = min(params.n_sink, budget.s_prompt)
        return SparQ.Plan(n_sink, n_local + 1, int(share) - n_local, r)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        return held(budget, shape, plan.n_sink + plan.n_window - 1, fetched=plan.k)

    def setup(self) -> None:
        super().setup()
        self.late, self.means, self.covered, self.lacking = {}, {}, None, None

    # While the prompt is read.

    def arrange(self, layer: int) -> Offloaded:
        trace, store, plan = self.trace, self.store, self.plan
        n_past = min(plan.n_window - 1, trace.s_prompt - plan.n_sink)
        slides = self.params.generated == "inside"
        if self.params.layout == "columns":
            columns = self.index[layer] = prompt_columns(trace, layer)
            if not trace.keys(layer).is_cuda:  # a GPU reads generated tokens by rows
                self.late[layer] = columns.new_empty(*columns.shape[:2], store.n_new)
        if self.params.reallocate:
            self.means[layer] = trace.once(
                ("SPARQ's mean of V", layer),
                lambda: trace.values(layer).mean(2, keepdim=True, dtype=torch.float32),
            )
            if self.means[layer].is_cuda:  # where it is added to in place
                self.means[layer] = self.means[layer].clone()
        return Offloaded(plan.n_sink, n_past, plan.n_window if slides else None)

    # A decode step.

    def append(self, layer: int) -> None:
        """Add the current token to the columns and to the mean of V."""
        key, value = self.store[layer].newest  # (1, h_kv, 1, d_h)
        if layer in self.late:
            self.late[layer][:, :, self.store[layer].n_generated - 1] = key[0, :, 0]
        if layer in self.means:
            mean = self.means[layer]
            self.means[layer] = mean + (value.to(mean) - mean) / self.store[layer].n_seen

    def question(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """The components of queries that are largest, and what those of keys are multiplied with."""
        components = top_components(q, self.trace.shape.h_kv, self.plan.r)
        return components, query_weights(q, components, self.trace.softmax[layer].scale)

    def score(self, layer: int, question: tuple[Tensor, Tensor], index: Tensor) -> Tensor:
        """Approximate logits."""
        components, weights = question
        keys = columns_at(index, components.to(index.device)).to(weights)  # (n, h_kv, r, s)
        return self.trace.softmax[layer].capped(weights @ keys)

    def merge(self, layer: int, scores: Tensor) -> Tensor:
        return scores.sum(2)

    def seen(self, layer: int) -> Tensor:
        """The keys that are searched, by columns, or a plain cache (`layout: rows`)."""
        return self.index[layer].unsqueeze(0) if layer in self.index else self.trace.host(layer)[0].mT

    @classmethod
    def generated(cls, rows: Sequence[Self], layer: int) -> Tensor:
        first = rows[0]
        if layer in first.late:
            return torch.stack([row.late[layer][..., : first.store[layer].n_generated] for row in rows])
        return torch.cat([row.store[layer].generated()[0] for row in rows]).mT

    def units(self, layer: int) -> Units:
        at = self.store[layer]
        return Units(self.plan.k, at.n_seen - at.n_window, self.plan.n_sink, grows=at.slides)

    def choose(self, layer: int, ranking: Tensor, scores: Tensor) -> Tensor | None:
        """The best tokens, and what mass they and the resident ones have."""
        units = self.units(layer)
        idx = best_tokens(ranking, units)
        # With everything selected nothing is missing, which sums in half precision would not quite say.
        self.covered = None
        if idx is not None and self.params.reallocate and idx.shape[-1] < units.stop - units.start:
            self.covered = covered_mass(scores, idx, units.start, units.stop, self.trace.softmax[layer])
        return idx

    @property
    def n_choosing(self) -> int:
        return self.trace.shape.h_kv

    def kind(self, layer: int) -> Hashable:
        of_prompt = None if self.has_kernel(layer) else id(self.trace)  # whose keys are read once
        return self.plan.r, self.params.layout, self.params.reallocate, of_prompt

    @classmethod
    def plan_search(cls, rows: Sequence[Self], layer: int, scratch: Scratch | None, ahead: int) -> ColumnSearch:
        searched: list[Columns] = []
        for row in rows:
            at, units = row.store[layer], row.units(layer)
            prompt = row.index[layer] if row.params.layout == "columns" else at.host.k[0].mT
            searched.append(
                Columns(
                    prompt, at.host.late[0], row.means.get(layer), at.n_seen, units.start, units.stop, units.n_chosen,
                    grows=at.slides,
                )
            )  # fmt: skip
        return ColumnSearch(rows, layer, table_of(searched, rows[0].store[layer].device, ahead), scratch)

    @classmethod
    def searched(cls, rows: Sequence[Self], search: KernelSearch) -> None:
        assert isinstance(search, ColumnSearch)
        for i, row in enumerate(rows):
            row.lacking = Lacking(search, i) if search.corrects else None

    def cost(self, layer: int) -> Cost:
        """Components of the keys of all candidates are read."""
        units, d_h = self.units(layer), self.trace.shape.d_h
        line = self.plan.r if self.params.layout == "columns" else d_h
        return Cost(moved_bytes=self.trace.shape.h_kv * line * max(0, units.stop - units.start) * ELEMENT_BYTES)

    # A feed.

    def selects_feeds(self, layer: int) -> bool:
        """While no token leaves the window, whose columns would be read from then on."""
        at = self.store[layer]
        return self.params.layout == "columns" and self.params.generated == "on_top" and at.n_window < at.capacity

    def generated_of_feed(self, layer: int, feed: Feed) -> Tensor:
        t, m = self.store[layer].n_generated, len(feed.moments)
        self.late[layer][:, :, t : t + m] = feed.k[0].mT
        return self.late[layer][None, :, :, : t + m]

    def after_feed(self, layer: int, feed: Feed, out: Tensor, lse: Tensor) -> Tensor:
        if layer not in self.means or not self.store[layer].can_fetch:
            return out
        mean, m = self.means[layer], len(feed.moments)  # (1, h_kv, 1, d_h)
        seen = torch.tensor([n_seen for n_seen, _ in feed.moments]).view(m, 1)
        means = mean + (feed.v.to(mean) - mean).cumsum(2) / seen  # (1, h_kv, m, d_h)
        self.means[layer] = means[:, :, -1:].clone()
        if self.covered is None:
            return out
        covered = self.covered.flatten(1).mT.view(1, -1, m, 1)
        return torch.lerp(means.repeat_interleave(self.trace.shape.g, 1), out.float(), covered).to(out.dtype)

    @classmethod
    def after_rows_on_gpu(
        cls, rows: Sequence[Self], layer: int, out: Tensor, weights: Sequence[Tensor | None]
    ) -> Sequence[Change | None]:
        if all(row.lacking is None for row in rows):
            return cls.after_rows(rows, layer, out, weights)
        for i, row in enumerate(rows):
            lacking = row.lacking
            if lacking is not None and lacking.place == 0:
                n = len(lacking.search.rows)
                assert all(
                    other.lacking is not None and other.lacking.search is lacking.search for other in rows[i : i + n]
                ), "rows that were searched together lie apart"
                lacking.search.correct(out[i : i + n])
            row.lacking = None  # which knows of other rows
        return ()

    def after_attention(self, layer: int, out: Tensor, weights: Tensor | None) -> Tensor:
        """The mean of V takes the place of what was not attended to."""
        covered, lacking = self.covered, self.lacking
        if lacking is not None:  # on a GPU, where other layers read this one's K and V
            covered = lacking.search.covered[lacking.place]
            covered, self.lacking = covered.masked_fill(covered < 0, 1), None
        if covered is None:
            return out
        mean = self.means[layer].repeat_interleave(self.trace.shape.g, 1)  # (1, h, 1, d_h)
        return torch.lerp(mean, out.float(), covered.view(1, -1, 1, 1)).to(out.dtype)

    def report(self) -> dict[str, Any]:
        shape = self.trace.shape
        twice = self.params.layout == "columns"
        return {
            "n_components": self.plan.r,
            "columns_host_bytes": twice * len(self.index) * key_bytes(shape, self.trace.s_prompt + self.store.n_new),
        }


def n_components(comm: Fraction, d_h: int) -> int:
    """How many of `d_h` components `comm` pays for."""
    r = floor(comm * d_h)
    if r < 1:
        raise ConfigError(f"comm={show(comm)} pays for none of the {d_h} components of a key; use comm=1/{d_h} or more")
    return r


TINY = 2.0**-126  # the least normal number of float32


class ColumnSearch(KernelSearch):
    """Rows of one kind, and what takes the place of what they did not attend to."""

    covered: Tensor  # (rows, h), -1 where nothing is missing

    def __init__(self, rows: Sequence[SparQ], layer: int, planned: Table, scratch: Scratch | None) -> None:
        super().__init__(rows, layer, self.find_keys, scratch)
        self.planned, self.r, self.softmax = planned, rows[0].plan.r, rows[0].trace.softmax[layer]
        self.h_kv, self.corrects = rows[0].trace.shape.h_kv, rows[0].params.reallocate

    def find_keys(self, q: Tensor, k_new: Tensor, v_new: Tensor, since: Since) -> Tensor:
        q, softmax = q.contiguous(), self.softmax
        found = find_components(q, v_new.contiguous(), self.planned, self.r, softmax.scale, since)
        keys, *self.sums = component_keys(q, *found, self.planned, softmax.cap, since)
        return keys

    def find(self, q: Tensor, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        super().find(q, k_new, v_new, since)
        if self.corrects:
            logits, lses = self.sums
            self.covered = cover(self.tokens, logits, lses, self.planned, self.softmax.sink, since)

    def correct(self, out: Tensor) -> None:
        blend(out, self.covered, self.planned, self.h_kv)


def prompt_columns(trace: Trace, layer: int) -> Tensor:
    """The prompt's keys by components, (h_kv, d_h, s_prompt) on the host: once for all variants of a sample."""

    def turn() -> Tensor:
        columns = trace.keys(layer)[0].mT.contiguous()
        return columns if trace.device == trace.host_device else sent_home(columns)

    return trace.once(("SPARQ's columns", layer), turn)
