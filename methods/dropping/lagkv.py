"""LagKV (Liang et al., 2025): what a partition holds that the next one does not foretell. No attention is looked at.

The tokens after the sinks are cut into partitions. A partition's keys and values are rescaled, channel by channel, by
the range that the next partition has there; tokens whose rescaled channels then vary most stay, equally many of every
partition. The last partition has no successor and stays whole, with the remainder after it. As published it goes on
while decoding: whenever a further partition is complete, the one before it is compressed.

Paper     arXiv:2504.04704, 2025; Liang, Manlai; LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens
          Are Important
Symbols   paper: sink size S, lag L, share r of a partition = `n_sink`, `lag`, `m` tokens; lambda = `value_weight`.
Per step  moved: nothing; resident: h_kv * (tokens + t) tokens at step t; no metadata. With `evict: always` it rises to
          sinks, what is compressed, and two partitions, and then falls by lag - m: `attended_max` of `method_report`.
Differs   - `budget_rule: fair` keeps the budget's tokens exactly: sinks, last partition and remainder are in it, the
            rest is spread over the partitions, the first ones having one more. Where a partition would keep none,
            `lag` is halved, and then there are fewer sinks; `method_report` says so. `official` keeps int(r * lag)
            of each, and so more than r of the prompt (method=lagkv_paper).
          - `evict: prompt` compresses the prompt alone, which `ratio` speaks of; the authors' cache is `always`.
          - a channel in which the reference does not vary has no range. It is left out, and `flat_channels` counts it;
            the authors divide by zero there.
          - `selection: ranks` is kvpress' form (method=lagkv_kvpress): the best of all partitions by their ranks
            within each. `scores` compares the softmax sums themselves, kvpress' cross_scoring: they are what a budget
            may be divided by over heads.
          - of equal scores the lower position stays.
Fails     on prompts of few partitions, of which sinks and last partition take most of the budget, and where what is
          asked for is phrased like the text after it.
Figures   drop by keys and values: #7B6C01, hourglass, :
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Is, Named, Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Change, Evict, Kept, Placement
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.gather import gather_tokens, move_both
from kvbench.methods.base import shortened
from kvbench.methods.dropping.allocators import Counts
from kvbench.methods.scorers import keep_top, lowest_slots
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits

LEAST_LAG = 8  # tokens of a partition, below which a budget halves it no further
LABELS = {"quota": "", "ranks": " (ranks)", "scores": " (cross scores)"}

# A channel that hardly varies may scale a value beyond what float32 can square and add up; this it can.
FAR = 1e17


def spread(x: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """How much a token's channels vary once the reference's range is their unit, and how many channels have none.

    Of x and reference (..., lag, d_h) float32: the standard deviation over channels (..., lag), unbiased, and a count.
    """
    low, high = reference.amin(-2, keepdim=True), reference.amax(-2, keepdim=True)  # (..., 1, d_h)
    varies = high > low
    n = varies.sum(-1)  # (..., 1) channels
    scaled = ((x - low) / (high - low)).clamp(-FAR, FAR).where(varies, 0)
    mean = (scaled.sum(-1) / n.clamp(min=1)).unsqueeze(-1)
    squares = (scaled - mean).where(varies, 0).square().sum(-1)
    return (squares / (n - 1).clamp(min=1)).sqrt(), (~varies).sum()


def lag_scores(k: Tensor, v: Tensor, next_k: Tensor, next_v: Tensor, value_weight: float) -> tuple[Tensor, Tensor]:
    """Scores of a partition's tokens, all (..., lag, d_h): (..., lag) float32; and `spread`'s count."""
    of_keys, flat_k = spread(k.float(), next_k.float())
    of_values, flat_v = spread(v.float(), next_v.float())
    return of_keys.softmax(-1) + value_weight * of_values.softmax(-1), flat_k + flat_v


def partition_scores(trace: Trace, plan: "LagKV.Plan", value_weight: float, layer: int) -> tuple[Tensor, Tensor]:
    """The prompt's partitions, each against the next: (1, h_kv, n_parts, lag) float32, and `spread`'s count."""
    stop = plan.n_sink + (plan.n_parts + 1) * plan.lag
    scores, flat, whole = [], [], trace.of_heads(layer, trace.keys(layer), trace.values(layer))
    for head in range(whole[0].shape[1]):  # one by one: each is made float32
        k, v = (x[:, head : head + 1, plan.n_sink : stop].unflatten(2, (-1, plan.lag)) for x in whole)
        found = lag_scores(k[:, :, :-1], v[:, :, :-1], k[:, :, 1:], v[:, :, 1:], value_weight)
        scores.append(found[0])
        flat.append(found[1])
    found = torch.cat(scores, 1)
    return found.mean(1, keepdim=True) if trace.shape.is_latent else found, torch.stack(flat).sum()


def ranks(scores: Tensor) -> Tensor:
    """Places among the last dimension's scores as shares below 1, the best highest, ties to the lower index."""
    lag = scores.shape[-1]
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    falling = torch.arange(lag - 1, -1, -1, device=scores.device, dtype=torch.float32) / lag
    return torch.empty_like(scores).scatter_(-1, order, falling.expand_as(scores))


def quota(scores: Tensor, n: int) -> Tensor:
    """The `n` best of (1, heads, n_parts, lag), of each partition equally many, the first ones one more: (1, heads, n).

    Ascending places of the partitions, one partition after the other.
    """
    n_parts, lag = scores.shape[2:]
    m, n_more = divmod(n, n_parts)
    starts = torch.arange(n_parts, device=scores.device).unsqueeze(-1) * lag
    parts = (slice(n_more), m + 1), (slice(n_more, None), m)
    return torch.cat([(keep_top(scores[:, :, some], k) + starts[some]).flatten(2) for some, k in parts], -1)


class LagKV(ScoringMethod):
    title = "LagKV"
    no_growth = "compares each part of the context with the next one, and a feed has no next one yet"

    @dataclass(frozen=True)
    class Params:
        n_sink: Tokens
        lag: Annotated[int, Ge(2)]
        value_weight: Annotated[float, Ge(0), Is("0 or more, and 1 weighs values like keys")]
        selection: Annotated[str, Named((*LABELS,))]
        evict: Literal["prompt", "always"]
        budget_rule: Literal["fair", "official"]

        def __post_init__(self) -> None:
            if self.evict == "always" and self.selection != "quota":
                raise ConfigError(
                    f"method.selection={self.selection} evicts nothing while decoding; use it with method.evict=prompt"
                )

    @dataclass(frozen=True)
    class Plan:
        """How a prompt is divided, and what each part of it keeps."""

        n_sink: int  # first tokens, all kept
        lag: int  # tokens of a partition
        n_parts: int  # partitions that are compressed; the next one is their last one's reference
        n_between: int  # tokens that they keep, all together
        n_last: int  # last tokens, all kept: a whole partition and the remainder
        m: int  # tokens that a partition keeps at least; one that is complete while decoding keeps no more

        @property
        def base(self) -> int:
            """Tokens that are compressed for good, sinks among them."""
            return self.n_sink + self.n_between

        def cut(self, n: int, base: int) -> bool:
            """Whether `n` tokens, `base` of them compressed, hold a complete partition and its reference."""
            return n >= base + 2 * self.lag

        def peak(self, n: int, n_new: int) -> int:
            """The most tokens that are held at once while `n_new` follow the prompt's `n`."""
            base, most = self.base, n
            for _ in range(n_new):
                n += 1
                most = max(most, n)
                if self.cut(n, base):
                    n, base = n - (self.lag - self.m), base + self.m
            return most

    params: Params
    plan: Plan
    base: dict[int, int]  # per layer: tokens that are compressed for good, sinks among them
    flat: list[Tensor]  # channels without a range, of every partition that was compressed

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        """Softmax sums mean the same in all heads where they are not compared within their partition alone."""
        goes_on = "LagKV goes on while it decodes; use method.evict=prompt with it"
        return replace(
            super().traits_of(params),
            comparable="heads" if params.selection == "scores" else "none",
            evicts=goes_on if params.evict == "always" else "",
        )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if budget.attends_all:
            return whole(params, budget.s_prompt, params.lag)
        if params.budget_rule == "fair":
            return fit(params, budget)
        return official_quota(params, budget) if params.selection == "quota" else official_best(params, budget)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return super().label(params, request).replace(cls.title, cls.title + LABELS[params.selection])

    def setup(self) -> None:
        self.base, self.flat, self.attended_max = {}, [], 0
        self.cuts = self.params.evict == "always" and not self.variant.is_full

    def ends(self) -> tuple[int, int]:
        n_sink = min(self.plan.n_sink, self.trace.s_prompt)
        return n_sink, self.plan.n_last

    def scores(self, layer: int) -> Tensor:
        """Scores of the tokens between the ends, partition after partition."""
        if self.plan.n_parts == 0:  # the ends are all that is kept
            n = self.trace.s_prompt - sum(self.ends())
            return torch.zeros(1, self.trace.shape.h_kv, n, device=self.trace.keys(layer).device)
        scores = self.partitions(layer)[0]
        if self.params.selection == "ranks":
            scores = ranks(scores)
        return (scores / 2 if self.params.selection == "scores" else scores).flatten(2)

    def partitions(self, layer: int) -> tuple[Tensor, Tensor]:
        plan, weight = self.plan, self.params.value_weight
        key = "lag scores", plan.n_sink, plan.lag, weight, layer
        return self.trace.once(key, lambda: partition_scores(self.trace, plan, weight, layer))

    def n_free(self) -> int:
        return self.plan.n_between

    def scorer(self) -> tuple[Hashable, ...]:
        plan, params = self.plan, self.params
        return "lag", plan.n_sink, plan.lag, params.value_weight, params.selection

    def keep_best(self, layer: int, n: Counts) -> Placement:
        if self.plan.n_parts:
            self.flat.append(self.partitions(layer)[1])
        if self.params.selection != "quota" or self.plan.n_parts == 0:
            return super().keep_best(layer, n)
        counts, n_sink = self.of_heads(layer, n) if isinstance(n, int) else n, self.ends()[0]
        scores = self.shared_scores(layer).unflatten(2, (self.plan.n_parts, self.plan.lag))
        if isinstance(counts, int):
            return self.place(layer, quota(scores, counts) + n_sink)
        heads = zip(scores.split(1, 1), counts, strict=True)
        return self.place_ragged(layer, [quota(each, k)[0, 0] for each, k in heads])

    def place(self, layer: int, best: Tensor) -> Placement:
        """Keep all chosen tokens alike with `evict: always`, with room for the most that are held at once."""
        if not self.cuts:
            return super().place(layer, best)
        (n_first, n_last), s = self.ends(), self.trace.s_prompt
        every = torch.arange(s, device=best.device).expand(1, best.shape[1], -1)
        kept = torch.cat([every[..., :n_first], best, every[..., s - n_last :]], -1)
        n, n_new = kept.shape[-1], self.store.n_new
        self.base[layer] = self.plan.base
        return Kept(kept, capacity=self.plan.peak(n, n_new) - n)

    @property
    def is_still(self) -> bool:
        return self.variant.is_full or not self.cuts

    def behind(self, layer: int, weights: Tensor | None) -> Change | None:
        """Cut a partition to its best once it and its reference are complete, with `evict: always`."""
        if not self.cuts:
            return None
        plan, at, base = self.plan, self.store[layer], self.base[layer]
        n = at.n_kept + at.n_window
        self.attended_max = max(self.attended_max, n)
        if not plan.cut(n, base):
            return None
        self.base[layer] = base + plan.m
        return Evict(self.leaving(layer, base)) if plan.m < plan.lag else None

    def leaving(self, layer: int, base: int) -> Tensor:
        """Slots of the partition right after `base` without its `m` best tokens: (1, h_kv, lag - m)."""
        plan, at = self.plan, self.store[layer]
        (held,) = at.resident()
        in_order = at.positions().argsort(-1)  # slots; after `base` their positions are the same for all heads
        slots = in_order[..., base : base + plan.lag]
        tokens = partial(self.trace.of_heads, layer)
        k, v = tokens(*move_both(lambda x: gather_tokens(x, slots), held.k, held.v))
        reference = in_order[..., base + plan.lag : base + 2 * plan.lag]
        next_k, next_v = tokens(*move_both(lambda x: gather_tokens(x, reference), held.k, held.v))
        scores, flat = lag_scores(k, v, next_k, next_v, self.params.value_weight)
        self.flat.append(flat)
        scores = scores.mean(1, keepdim=True) if self.trace.shape.is_latent else scores
        places = torch.arange(plan.lag, device=slots.device).expand_as(slots)
        return slots.gather(-1, lowest_slots(scores, places, plan.lag - plan.m))

    def protected(self, layer: int) -> Sequence[int]:
        n = self.store[layer].n_seen
        n_first, n_last = self.ends()
        return sorted({*range(n_first), *range(n - self.plan.lag if self.cuts else self.trace.s_prompt - n_last, n)})

    def report(self) -> dict[str, Any]:
        n_flat = int(torch.stack(self.trace.gathered(self.flat)).sum()) if self.flat else 0
        return (
            super().report()
            | shortened(self)
            | ({"lag": self.plan.lag} if self.plan.lag < self.params.lag else {})
            | ({"flat_channels": n_flat} if n_flat else {})
            | ({"attended_max": self.attended_max} if self.cuts else {})
        )


def whole(params: LagKV.Params, s: int, m: int) -> LagKV.Plan:
    """A prompt of which nothing is compressed."""
    return LagKV.Plan(params.n_sink, params.lag, 0, 0, max(0, s - params.n_sink), m)


def divide(s: int, n_tokens: int, n_sink: int, lag: int) -> LagKV.Plan | None:
    """`n_tokens` of `s` in partitions of `lag`; None where a partition would have none, or there is none to keep."""
    n_parts, n_last = (s - n_sink) // lag - 1, lag + (s - n_sink) % lag
    n_between = n_tokens - n_sink - n_last
    if n_parts < 1 or n_between < n_parts:
        return None
    return LagKV.Plan(n_sink, lag, n_parts, n_between, n_last, n_between // n_parts)


def fitting(params: LagKV.Params, s: int, n_tokens: int) -> LagKV.Plan | None:
    """The division with the most sinks, and of those with the longest partitions, that meets a budget."""
    lags = [params.lag]
    while lags[-1] // 2 >= LEAST_LAG:
        lags.append(lags[-1] // 2)
    plans = (divide(s, n_tokens, n_sink, lag) for n_sink in range(min(params.n_sink, s), -1, -1) for lag in lags)
    return next((plan for plan in plans if plan is not None), None)


def fit(params: LagKV.Params, budget: Budget) -> LagKV.Plan:
    """The budget's tokens, exactly; shorter partitions, then fewer sinks where it has no room for those asked for."""
    s, n_tokens = budget.s_prompt, budget.tokens
    plan = fitting(params, s, n_tokens)
    if plan is not None:
        return plan
    works = (n for n in range(n_tokens + 1, s) if fitting(params, s, n))
    least = next(works, None)
    what = f"a budget of {n_tokens} tokens for a prompt of {s} leaves a partition of LagKV without a token"
    if least is None:
        raise ConfigError(f"{what}, and so does every other budget; use a longer prompt or another method")
    raise ConfigError(f"{what}; use ratio={ceil(Fraction(1000 * least, s)) / 1000} or more (budget={least})")


def official_quota(params: LagKV.Params, budget: Budget) -> LagKV.Plan:
    """The authors' integers: every partition keeps the same share, and the whole prompt more than that."""
    s, lag = budget.s_prompt, params.lag
    paid = budget.tokens > budget.nominal_tokens
    share = float(budget.ratio + (budget.comm / 2 if paid else 0))
    m = min(int(share * lag), lag)
    if m < 1:
        raise ConfigError(
            f"a share of {share:.3g} keeps no token of a partition of method.lag={lag}; raise ratio or method.lag"
        )
    if s < params.n_sink + 2 * lag:
        if params.evict == "prompt":
            raise ConfigError(
                f"a prompt of {s} tokens is shorter than method.n_sink={params.n_sink} sinks and two partitions of "
                f"method.lag={lag}, so that nothing would be dropped; lower method.lag, or use method.budget_rule=fair"
            )
        return whole(params, s, m)
    n_parts = (s - params.n_sink) // lag - 1
    return LagKV.Plan(params.n_sink, lag, n_parts, n_parts * m, lag + (s - params.n_sink) % lag, m)


def official_best(params: LagKV.Params, budget: Budget) -> LagKV.Plan:
    """kvpress' integers: the best of all partitions; sinks and recent tokens where there is no room for others."""
    s, n_tokens = budget.s_prompt, budget.tokens
    n_sink = min(params.n_sink, n_tokens)
    n_parts, n_last = (s - n_sink) // params.lag - 1, params.lag + (s - n_sink) % params.lag
    n_between = n_tokens - n_sink - n_last
    if n_parts < 1 or n_between < 0:
        return LagKV.Plan(n_sink, params.lag, 0, 0, n_tokens - n_sink, 0)
    return LagKV.Plan(n_sink, params.lag, n_parts, n_between, n_last, n_between // n_parts)
