"""InfLLM (Xiao et al., 2024): fetch whole blocks of the past, found by a few of each block's tokens.

A block's representatives are the tokens that were attended to most while they were among the latest. A step compares
its query with the mean of each block's representatives, fetches the best blocks, and attends to them with the sinks,
the latest tokens and those that do not fill a block yet.

Paper     arXiv:2402.04617, 2024; Xiao, Chaojun; InfLLM: Training-Free Long-Context Extrapolation for LLMs with an
          Efficient Context Memory
Symbols   paper: initial tokens, l_L, l_bs, r_k = `n_sink`, `n_local` (current token included), `block_len`, `n_repr`;
          blocks per step = `k`, blocks that there are = n_blocks.
Per step  moved: K and V of k blocks, 4 * h_kv * k * block_len * d_h bytes; read in order to find them: representatives,
          resident, 2 * h * n_blocks * d_h bytes (h_kv with `repr_granularity: kv_head`), whatever `n_repr` is. What
          `comm` prices, n_repr / block_len of the keys, is in `report`. Resident: sinks, window, unfilled block.
Differs   - the prefill is exact and shared, so that scores are normalised over all tokens; the authors' pass over the
            prompt sees chosen blocks only (`prefill: streaming`, not built).
          - keys keep their positions (`position: true`), the only form that equals full attention. The authors place
            all tokens but local ones at one distance, n_local - 1 (`position: fixed`). Where a model scales its rotary
            embedding, far logits are scaled as near ones; with the whole budget positions are true.
          - 32 sinks, as all methods with sinks and a window have here; n_local is half of what is left and k what
            fits, rounded down. `budget_rule: official` rounds up and has the sinks on top, as PQCache's authors do. The
            paper's numbers are absolute: 128 sinks, 4,096 local tokens and 16 blocks.
          - of equal scores the earlier token or block is chosen.
          - weights that decode steps add are normalised over what the step attended to, as the authors' are.
          - the block cache is the store's; the authors' holds at most 32 blocks by last use.
Fails     where an answer's tokens are few and apart: a block is fetched for one token and brings its neighbours.
          Small ratios of a few thousand tokens need shorter blocks. On latents a block's representatives are whole
          rows, scored by the queries of all heads.
Figures   retrieve pages, blocks, clusters: #6E89FF, left, --
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil, floor
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, key_bytes, show, split
from kvbench.engine.caches.eviction import Update
from kvbench.engine.declared import Tokens, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import BandLogits, BandSums, Observation
from kvbench.engine.placement import Change, Offloaded, Release
from kvbench.engine.search import Launch, Units
from kvbench.engine.selection import ALWAYS, Cost, Selection
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.engine.turns.feed import Feed
from kvbench.kernels.gather import gather_tokens
from kvbench.kernels.rows.logits import block_keys, blocks_of
from kvbench.kernels.topk import top_stable
from kvbench.methods.base import Variant
from kvbench.methods.indexed import Indexed
from kvbench.methods.rules import refuse_cap
from kvbench.methods.traits import Traits

PUBLISHED_REPRESENTATIVES = 4  # of a block


def representatives(scores: Tensor, keys: Tensor, start: int, block_len: int, n_repr: int) -> tuple[Tensor, Tensor]:
    """The best-scored keys of each block: (heads, n_blocks, n_repr, d_h) float32, and their positions without d_h.

    `scores` (heads, n_blocks * block_len) are those of the tokens from `start` on; `keys` (1, h_kv, s, d_h).
    """
    heads, n = scores.shape
    blocks = scores.reshape(heads, n // block_len, block_len)
    chosen = top_stable(blocks, n_repr)  # (heads, n_blocks, n_repr)
    first = torch.arange(start, start + n, block_len, device=scores.device)
    positions = chosen + first.unsqueeze(-1)
    picked = gather_tokens(keys, positions.flatten(1).unsqueeze(0))[0].float()
    return picked.view(*positions.shape, keys.shape[-1]), positions


def block_scores(q: Tensor, means: Tensor, per_head: bool) -> Tensor:
    """Queries (n, h, 1, d_h) times means of blocks (n_blocks, heads, d_h): (n, 1, n_blocks), or (n, h, n_blocks)."""
    _, heads, d_h = means.shape
    grouped = q.float().reshape(len(q), heads, -1, d_h)  # (n, heads, h // heads, d_h)
    if per_head:
        return (grouped @ means.permute(1, 2, 0)).flatten(1, 2)
    return (grouped.sum(2).flatten(1) @ means.flatten(1).mT).unsqueeze(1)


class InfLLM(Indexed):
    title = "InfLLM"
    no_growth = "has blocks of the context alone; method.grow_blocks=true makes blocks of what follows, and grows"
    ops = ("logits", "pages", "topk")

    @dataclass(frozen=True)
    class Params:
        block_len: Window
        n_sink: Tokens
        repr_score: Literal["prob", "logit"]
        repr_granularity: Literal["query_head", "kv_head"]
        per_head: bool
        position: Literal[True, "fixed"]
        grow_blocks: bool
        budget_rule: Literal["fair", "official"]

    @dataclass(frozen=True)
    class Plan:
        """How a prompt is divided; k = 0 where the budget is the whole prompt."""

        n_sink: int
        n_local: int  # latest tokens that are always attended to, the current one included
        block_len: int
        k: int  # blocks fetched per step
        n_repr: int  # representatives of a block, per head

        def n_blocks(self, n: int) -> int:
            """Blocks for the query after `n` tokens: none of their tokens is among its local ones."""
            return max(0, (n - self.n_sink - self.n_local) // self.block_len)

    params: Params
    plan: Plan
    n_blocks: dict[int, int]  # per layer, formed so far
    index: dict[int, Tensor]  # means of representatives (n_blocks and those to come, h or h_kv, d_h) float32
    scores: dict[int, Tensor]  # per layer that forms blocks (h, slots of the window) float32

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        refuse_cap(shape, "InfLLM adds up logits of representative tokens and of heads", "another method")
        if request.ratio is not None and request.ratio < 1 and request.comm is not None:
            n_representatives(params, request.comm)

    @classmethod
    def index_comm(cls, params: Params, budget: Budget, shape: ModelShape) -> Fraction:
        return Fraction(min(PUBLISHED_REPRESENTATIVES, params.block_len), params.block_len)

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        if params.position == "fixed" and not model.n_rotary:
            raise ConfigError("method.position=fixed needs a model with rotary positions; use method.position=true")

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if budget.attends_all:
            return InfLLM.Plan(0, budget.s_prompt, params.block_len, 0, 0)
        n_repr = n_representatives(params, budget.comm)
        divide = fair_layout if params.budget_rule == "fair" else official_layout
        return divide(params, budget, n_repr)

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        n_blocks = plan.n_blocks(budget.s_prompt)
        heads = shape.h_kv if params.repr_granularity == "kv_head" else shape.h
        wide = shape.g if params.per_head else 1
        return held(
            budget, shape, budget.s_prompt - n_blocks * plan.block_len,
            heads * n_blocks * shape.d_h * ELEMENT_BYTES, min(plan.k, n_blocks) * plan.block_len * wide,
        )  # fmt: skip

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        turns = "method=infllm with method.position=fixed" if params.position == "fixed" else ""
        return replace(super().traits_of(params), extends=params.grow_blocks, turns_queries=turns)

    def extend(self, layer: int, q: Tensor, grown: Variant) -> None:
        at = self.store[layer]
        if at.can_fetch:
            self.plan = replace(
                self.plan, k=max(0, grown.budget.tokens - at.n_kept - at.n_window) // self.plan.block_len
            )

    def setup(self) -> None:
        super().setup()
        self.n_blocks, self.scores = {}, {}
        params, plan, s = self.params, self.plan, self.trace.s_prompt
        last = s + self.store.n_new - 1  # the last query comes after all tokens but one
        self.grows = params.grow_blocks and plan.n_blocks(last) > plan.n_blocks(s)
        self.wants_weights = self.grows and params.repr_score == "prob"
        self.turns = params.position == "fixed" and not self.variant.is_full
        self.q_far: Tensor | None = None  # this step's query, at the distance of all far tokens

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (observed_band(params, plan),) if plan.k else ()

    def arrange(self, layer: int) -> Offloaded:
        trace, plan, s = self.trace, self.plan, self.trace.s_prompt
        n_blocks = plan.n_blocks(s)
        n_middle = n_blocks * plan.block_len
        n_past = s - plan.n_sink - n_middle
        room = plan.n_local + plan.block_len if self.grows else n_past + self.store.n_new
        scores = trace.observed(observed_band(self.params, plan), layer)[0]  # (h, s)
        means = trace.once(
            ("InfLLM", layer, replace(plan, k=0), self.params.repr_score, self.params.repr_granularity, self.turns),
            lambda: self.means_of(
                layer, scores[:, plan.n_sink : plan.n_sink + n_middle], trace.keys(layer), plan.n_sink
            ),
        )
        self.n_blocks[layer], self.index[layer] = n_blocks, means
        if self.grows:
            most = plan.n_blocks(s + self.store.n_new)
            self.index[layer] = means.new_empty(most, *means.shape[1:])
            self.index[layer][:n_blocks] = means
            self.scores[layer] = scores.new_zeros(len(scores), room)
            self.scores[layer][:, :n_past] = scores[:, s - n_past :]
        return Offloaded(plan.n_sink, n_past, room)

    def means_of(self, layer: int, scores: Tensor, keys: Tensor, start: int, key_start: int | None = None) -> Tensor:
        """Mean of each block's representatives, (n_blocks, h or h_kv, d_h), by scores (h, n) of tokens from `start`.

        `keys` (1, h_kv, s, d_h) has the first of these tokens at `key_start`, at `start` where that is not given.
        """
        if self.params.repr_granularity == "kv_head":
            scores = scores.unflatten(0, (self.trace.shape.h_kv, -1)).sum(1)
        at = start if key_start is None else key_start
        picked, positions = representatives(scores, keys, at, self.plan.block_len, self.plan.n_repr)
        if self.turns:
            where = positions.flatten(1) + (start - at)
            picked = self.to_zero(layer, picked.flatten(1, 2).unsqueeze(0), where)[0].view_as(picked)
        return picked.mean(2).transpose(0, 1).contiguous()

    def to_zero(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys (1, heads, n, d_h) as at position 0; `positions` are (1, n) or (heads, n)."""
        assert self.trace.turn is not None, "`check_model` lets no model without rotary positions pass"
        if len(positions) == 1:
            return self.trace.turn[layer](keys, -positions)
        return self.trace.turn[layer](keys.transpose(0, 1), -positions).transpose(0, 1).contiguous()

    def resident(self, layer: int, q: Tensor) -> list[Part]:
        parts = self.store[layer].resident()
        if layer in self.scores and self.params.repr_score == "logit":
            self.add_logits(layer, q, parts[0].k)
        if not self.turns:
            return parts
        assert self.trace.turn is not None, "`check_model` lets no model without rotary positions pass"
        self.q_far = self.trace.turn[layer](q, self.plan.n_local - self.store[layer].n_seen)
        whole = parts[0]
        n_far = whole.k.shape[2] - self.plan.n_local  # sinks and what fills no block yet
        if n_far <= 0:
            return parts
        where = self.store[layer].positions()[0, :1, :n_far]
        far = Part(self.to_zero(layer, whole.k[:, :, :n_far], where), whole.v[:, :, :n_far], q=self.q_far)
        return [far, Part(whole.k[:, :, n_far:], whole.v[:, :, n_far:])]

    def add_logits(self, layer: int, q: Tensor, keys: Tensor) -> None:
        """Add the current query's logits of the tokens before it; `keys` are those of sinks and window."""
        last = self.store[layer].n_window - 1
        band = slice(max(0, last - self.plan.n_local), last)
        window = keys[0, :, self.plan.n_sink :][:, band].float()  # (h_kv, n, d_h)
        logits = q.float().view(len(window), -1, q.shape[-1]) @ window.mT
        self.scores[layer][:, band] += self.trace.softmax[layer].bent(logits.flatten(0, 1))

    @classmethod
    def asked(cls, rows: Sequence[Self], q: Tensor) -> Tensor:
        """Queries to search by: at the one distance of far tokens, where they are at one."""
        if all(row.q_far is None for row in rows):
            return q
        return torch.cat([q[i : i + 1] if row.q_far is None else row.q_far for i, row in enumerate(rows)])

    def question(self, layer: int, q: Tensor) -> Tensor:
        return q

    def score(self, layer: int, question: Tensor, index: Tensor) -> Tensor:
        return block_scores(question, index, self.params.per_head).unsqueeze(2)

    def seen(self, layer: int) -> Tensor:
        return self.index[layer][: self.n_blocks[layer]]

    def units(self, layer: int) -> Units:
        plan = self.plan
        stop = plan.n_sink + self.n_blocks[layer] * plan.block_len
        return Units(plan.k, stop, plan.n_sink, plan.block_len, plan.n_sink)

    @property
    def n_choosing(self) -> int:
        return self.trace.shape.h if self.params.per_head else 1

    @classmethod
    def launch(cls, rows: Sequence[Self], layer: int, keys: Callable[[], Tensor], ahead: int) -> Launch:
        planned, found = blocks_of([row.index[layer] for row in rows]), keys()
        n_blocks, per_head = rows[0].n_blocks[layer], rows[0].params.per_head
        return lambda q, k_new, v_new, since: block_keys(q, planned, n_blocks, per_head, found)

    def has_kernel(self, layer: int) -> bool:
        return super().has_kernel(layer) and self.n_blocks[layer] > 0

    @property
    def repeats(self) -> bool:
        """Blocks stay what they are until one is formed, at true positions."""
        return self.variant.is_full or self.is_stored

    def n_static(self, layer: int) -> int:
        return self.n_to_block(layer) - 1 if layer in self.scores else ALWAYS

    @property
    def is_stored(self) -> bool:
        """Far tokens are turned at every step, and what the query gives to local ones may be added up there."""
        return not self.turns and not (self.grows and self.params.repr_score == "logit")

    def kind(self, layer: int) -> Hashable:
        heads, plan = self.index[layer].shape[1], self.plan
        own = None if self.has_kernel(layer) else id(self.index[layer])
        return self.n_blocks[layer], heads, plan.n_sink, plan.block_len, self.params.per_head, own

    def cost(self, layer: int) -> Cost:
        """Means of the blocks that there are stay, and are read where some are looked for."""
        n_blocks = self.n_blocks[layer]
        held = self.index[layer][:n_blocks].numel() * ELEMENT_BYTES
        return Cost(held, read_bytes=held if n_blocks > self.plan.k else 0)

    def found(self, layer: int, idx: Tensor | None) -> Selection:
        return self.take(layer, idx)._replace(cost=self.cost(layer))

    def take(self, layer: int, idx: Tensor | None) -> Selection:
        if idx is None or not self.turns:
            return Selection(idx)
        tokens = idx[0] if self.params.per_head else idx[0, :1]
        return Selection(idx, turned=partial(self.brought_near, layer, tokens, self.q_far))

    def brought_near(self, layer: int, positions: Tensor, q: Tensor | None, fetched: Part) -> Part:
        """Turn fetched tokens to the one distance of far tokens, where they are at one."""
        part = fetched.gathered()
        return replace(part, k=self.to_zero(layer, part.k, positions), q=q)

    # A feed.

    def selects_feeds(self, layer: int) -> bool:
        return not self.turns and (layer not in self.scores or self.params.repr_score == "prob")

    def at_once(self, layer: int, m: int) -> int:
        """How many tokens of a feed are read at once, at most until a block is formed."""
        n = super().at_once(layer, m)
        return max(1, min(n, self.n_to_block(layer))) if layer in self.scores else n

    def after_feed(self, layer: int, feed: Feed, out: Tensor, lse: Tensor) -> Tensor:
        """Add up what local tokens got, as after each token."""
        if layer not in self.scores:
            return out
        n_sink, n_local, stop = self.plan.n_sink, self.plan.n_local, self.store[layer].n_window
        window = self.store[layer].resident()[0].k[0, :, n_sink : n_sink + stop].float()  # (h_kv, n, d_h)
        grouped = feed.q[0].float().unflatten(0, (len(window), -1))  # (h_kv, g, m, d_h)
        logits = feed.softmax.bent(grouped @ window.mT.unsqueeze(1))
        weights = (logits - lse[0].view(*grouped.shape[:3], 1)).exp()
        place, end = torch.arange(stop), torch.tensor([n_window for _, n_window in feed.moments]).unsqueeze(1)
        is_local = (place < end) & (place >= end - n_local)  # (m, n)
        self.scores[layer][:, :stop] += (weights * is_local).sum(2).flatten(0, 1)
        if self.n_to_block(layer) <= 0:
            self.store.change(layer, self.form_block(layer))
        return out

    def behind(self, layer: int, weights: Tensor | None) -> Release | None:
        """Add up what local tokens got; where as many tokens as a block has are no longer local, they become one."""
        if layer not in self.scores:
            return None
        plan, stop = self.plan, self.store[layer].n_window
        if weights is not None:  # (1, h, n): sinks, window, what was fetched
            start = max(0, stop - plan.n_local)
            local = weights[0, :, plan.n_sink + start : plan.n_sink + stop]
            self.scores[layer][:, start:stop] += local
        return self.form_block(layer) if self.n_to_block(layer) <= 0 else None

    def update(self, layer: int, weights: Tensor, ahead: int = 0) -> Update | None:
        """Let a kernel add up what local tokens got, as `behind` does."""
        if layer not in self.scores:
            return None
        at, n_sink, sums = self.store[layer], self.plan.n_sink, self.scores[layer].unsqueeze(0)
        stop = at.n_window + ahead
        return Update(
            at, weights[..., n_sink : n_sink + stop], len(self.scores[layer]), "sum", sums[..., : stop - 1], sums=sums,
            first=stop - self.plan.n_local,
        )  # fmt: skip

    @classmethod
    def after_rows_on_gpu(
        cls, rows: Sequence[Self], layer: int, out: Tensor, weights: Sequence[Tensor | None]
    ) -> Sequence[Change | None]:
        super().after_rows_on_gpu(rows, layer, out, weights)
        return [row.form_block(layer) if layer in row.scores and row.n_to_block(layer) <= 0 else None for row in rows]

    def n_to_block(self, layer: int) -> int:
        """How many tokens have to come until the next block is formed."""
        plan = self.plan
        fills_at = plan.n_sink + plan.n_local + (self.n_blocks[layer] + 1) * plan.block_len
        return fills_at - self.store[layer].n_seen

    def form_block(self, layer: int) -> Release:
        """Make the window's oldest tokens a block on the host, for the next step on."""
        plan, n_blocks, scores = self.plan, self.n_blocks[layer], self.scores[layer]
        keys = self.store[layer].resident()[0].k
        start = plan.n_sink + n_blocks * plan.block_len
        mean = self.means_of(layer, scores[:, : plan.block_len], keys.contiguous(), start, plan.n_sink)
        self.index[layer][n_blocks] = mean[0]
        self.n_blocks[layer] += 1
        scores[:, : -plan.block_len] = scores[:, plan.block_len :].clone()
        scores[:, -plan.block_len :] = 0
        return Release(plan.block_len, cost=Cost(rebuilt_bytes=plan.block_len * key_bytes(self.trace.shape, 1)))

    def report(self) -> dict[str, Any]:
        """Per layer: what the prompt's representatives take as they are kept, and as `comm` prices them."""
        plan, shape = self.plan, self.trace.shape
        n_blocks = plan.n_blocks(self.trace.s_prompt)
        heads = shape.h_kv if self.params.repr_granularity == "kv_head" else shape.h
        return {
            "n_blocks": n_blocks,
            "k_blocks": min(plan.k, n_blocks),
            "n_local": plan.n_local,
            "n_repr": plan.n_repr,
            "repr_bytes": heads * n_blocks * shape.d_h * ELEMENT_BYTES,
            "repr_nominal_bytes": shape.h_kv * n_blocks * plan.n_repr * shape.d_h * ELEMENT_BYTES,
        }


def n_representatives(params: InfLLM.Params, comm: Fraction) -> int:
    """How many representatives of a block `comm` pays for."""
    n_repr = floor(comm * params.block_len)
    if n_repr < 1:
        raise ConfigError(
            f"comm={show(comm)} pays for no representative of a block of method.block_len={params.block_len} tokens; "
            f"use comm=1/{params.block_len} or more"
        )
    return n_repr


def fair_layout(params: InfLLM.Params, budget: Budget, n_repr: int) -> InfLLM.Plan:
    """Half of the budget is local; which other tokens are blocks follows, and how many blocks cannot be attended to.

    Whatever the split, sinks, window and unfilled block are what k of n_blocks blocks leave, so the attended tokens are
    s_prompt - (n_blocks - k) * block_len. Where half of the budget leaves no block to fetch, fewer tokens are local.
    """
    s, block_len = budget.s_prompt, params.block_len
    n_sink = split(budget.tokens, params.n_sink).n_sink
    n_left_out = ceil((s - budget.tokens) / block_len)  # blocks
    plan = InfLLM.Plan(n_sink, max(1, (budget.tokens - n_sink) // 2), block_len, 0, n_repr)
    k = plan.n_blocks(s) - n_left_out
    if k >= 1:
        return replace(plan, k=k)
    n_local = s - n_sink - (n_left_out + 1) * block_len
    if n_local >= 1:
        return replace(plan, n_local=n_local, k=1)
    raise ConfigError(too_small(budget, block_len, params.n_sink))


def too_small(budget: Budget, block_len: int, n_sink: int) -> str:
    """The error's words where no block fits in besides sinks and one local token."""
    s = budget.s_prompt

    def left(n_blocks: int) -> int:
        """Local tokens where one of so many blocks is attended to."""
        least = s - (n_blocks - 1) * block_len
        return s - split(least, n_sink).n_sink - n_blocks * block_len

    most_blocks = next((n for n in range(s // block_len, 0, -1) if left(n) >= 1), 0)
    what = (
        f"a budget of {budget.tokens} tokens for a prompt of {s} has no room for a block of "
        f"method.block_len={block_len} tokens beside sinks and the current one"
    )
    if most_blocks < 2:
        return f"{what}, nor has any budget below the whole prompt; use a smaller method.block_len or ratio=1"
    smallest = s - (most_blocks - 1) * block_len
    digits = 2
    while floor(rounded_up(smallest, s, digits) * s) > smallest:
        digits += 1
    ratio = show_decimal(rounded_up(smallest, s, digits), digits)
    return f"{what}; use ratio={ratio} or more (budget={smallest}), or a smaller method.block_len"


def rounded_up(part: int, whole: int, digits: int) -> Fraction:
    """part / whole in so many decimals, the last one rounded up."""
    return Fraction(ceil(Fraction(part * 10**digits, whole)), 10**digits)


def show_decimal(value: Fraction, digits: int) -> str:
    """A share in so many decimals."""
    return f"{float(value):.{digits}f}"


def official_layout(params: InfLLM.Params, budget: Budget, n_repr: int) -> InfLLM.Plan:
    """The integers of PQCache's authors, sinks on top of the ratio; in double precision, as they compute them."""
    n_sink = min(params.n_sink, budget.s_prompt)
    besides = (budget.s_prompt - n_sink) * float(budget.ratio)
    n_local = max(1, int(besides * 0.5))
    k = max(1, ceil((besides - n_local) / params.block_len))
    return InfLLM.Plan(n_sink, n_local, params.block_len, k, n_repr)


def observed_band(params: InfLLM.Params, plan: InfLLM.Plan) -> Observation:
    """An observation that scores tokens: attention received while local or logits of later queries (the paper's text).

    The paper takes the mean of logits. All tokens of a block have as many, so their sums choose the same.
    """
    return (BandSums if params.repr_score == "prob" else BandLogits)(plan.n_local)
