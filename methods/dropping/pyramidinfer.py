"""PyramidInfer (Yang et al., 2024): tokens leave the forward pass as it rises, and with them their keys and values.

After a layer the last tokens of the prompt ("recent") vote with their attention, averaged over all heads, later ones
with more weight. The context tokens with the fewest votes go no further: layers above never compute them. So the
prefill is cheaper, and it is approximate: the first generated token may already differ from full attention's.

Paper     arXiv:2405.12532, 2024; Yang, Dongjie; PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM
          Inference
Symbols   paper recent ratio, decay ratio, ensemble weight = `recent_ratio`, `decay`, `votes`; n_i = `Course.lengths()`;
          the protected tail is 1 + rec tokens = `tail`.
Per step  moved: nothing; resident: h_kv * (n_i + t) tokens in layer i at step t, the current one included.
Differs   the authors fix the decay (0.9) and keep what comes of it, 0.77 of the tokens at 32 layers; here the decay
          follows from the budget: the largest whose mean over the layers fits, cosine as theirs where that can reach
          it, else one share for all layers (`schedule: constant`), and a shorter tail with smaller budgets. Below
          a ratio of 0.3 this is a variant and its label says so: `PyramidInfer*`.
          A layer's own cache is not cut by its own votes, only those above: as their code, unlike their paper.
          Generated tokens stay, unless `compress_generated`: then, as theirs, a block of 16 is thinned whenever
          so many have left the tail, first after rec + 16 of them; it keeps the weights of rec queries per layer.
Fails     where a high layer would need what the middle ones did not look at; with few layers, for the first holds the
          whole prompt (and the second, with the cosine).
Figures   drop after the prompt, by its last queries: #D15704, thin diamond, :
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import cos, pi
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Count, Index, Is
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import MeanWeights, Observation, query_lse
from kvbench.engine.placement import Change, Stay, Whole
from kvbench.engine.prefill import TokenPruning
from kvbench.engine.selection import Cost
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.column_sums import column_sums
from kvbench.methods.base import SelectiveAttention

SCHEDULES = ("cosine", "constant")
STARRED_BELOW = Fraction(3, 10)
Planned = Annotated[Fraction, Ge(0), Le(1), Is("a share from 0 to 1, or null for what the budget needs")]


def falling(layer: int, n_layers: int, last: float) -> float:
    """A share that falls with depth from 1 towards `last`, half a cosine."""
    return last + (1 - last) * (1 + cos(pi * layer / n_layers)) / 2


def fit_course(params: "PyramidInfer.Params", s: int, n_tokens: int, n_layers: int) -> "PyramidInfer.Plan":
    """The course that keeps most, but at most `n_tokens` per layer in the mean."""
    course = find_course(params, s, n_tokens, n_layers, n_tries=400)
    if course is None:
        works = (
            percent
            for percent in range(100 * n_tokens // s + 1, 100)
            if find_course(params, s, s * percent // 100, n_layers, n_tries=20)
        )
        percent = next(works, None)
        advice = "another method" if percent is None else f"ratio={percent / 100:g} or more"
        raise ConfigError(
            f"a budget of {n_tokens} tokens per layer cannot be met by PyramidInfer on {s} tokens and {n_layers} "
            f"layers: the first layer holds them all; use {advice}"
        )
    return course


def find_course(
    params: "PyramidInfer.Params", s: int, n_tokens: int, n_layers: int, n_tries: int
) -> "PyramidInfer.Plan | None":
    """The first schedule that meets the budget, with the largest decay that does; None where there is none.

    The stop rule lets very small decays keep more than larger ones, so decays are tried from above, then refined.
    """
    share = Fraction(n_tokens, s)
    recent = min(Fraction(1, 5), share / 4) if params.recent_ratio is None else params.recent_ratio
    low = min(64, int(share * s / 4)) if params.min_context is None else params.min_context
    tail = min(s, 1 + int(recent * s))

    def course(schedule: str, decay: float) -> "PyramidInfer.Plan":
        return PyramidInfer.Plan(
            s, n_layers, tail, low, params.sinks, params.interval, params.distance_weight, schedule, decay
        )

    def fits(schedule: str, decay: float) -> bool:
        return sum(course(schedule, decay).lengths()) <= n_tokens * n_layers

    if params.decay is not None:
        return course(params.schedule or "cosine", float(params.decay))
    for schedule in SCHEDULES if params.schedule is None else (params.schedule,):
        best = next((i for i in range(n_tries, -1, -1) if fits(schedule, i / n_tries)), None)
        if best is not None:
            fitting, too_much = best / n_tries, min(1.0, (best + 1) / n_tries)
            for _ in range(20):
                middle = (fitting + too_much) / 2
                if fits(schedule, middle):
                    fitting = middle
                else:
                    too_much = middle
            return course(schedule, fitting)
    return None


BLOCK, BLOCK_SHARE, BLOCK_DECAY = 16, 0.9, 0.1  # the authors', in every configuration of theirs


@dataclass
class Generated:
    """What one layer did with its generated tokens: the latest queries' weights, and when it compressed."""

    weights: Tensor  # (at most 1 + rec, n) of the last queries, mean over heads, 0 where a query is older than a token
    base: int  # tokens that are not due to be compressed
    block: int  # tokens that are compressed at a time
    n_stay: int  # of a block
    distance_weight: float

    def take(self, latest: Tensor, tail: int) -> None:
        """Add the latest query's weights (n,); its last token is new to all older queries."""
        older = torch.nn.functional.pad(self.weights, (0, len(latest) - self.weights.shape[1]))
        self.weights = torch.cat([older, latest.unsqueeze(0)])[-tail:]

    def stay(self, tail: int) -> Tensor | None:
        """Indices of the tokens that stay, where a block of them has come to be compressed; its weights go with it."""
        n = self.weights.shape[1]
        if n - (tail - 1) - self.base < self.block:
            return None
        block = slice(n - tail - self.block, n - tail)
        rising = rising_weights(len(self.weights), self.distance_weight).to(self.weights)
        votes = rising @ self.weights[:, block]
        best = votes.sort(descending=True, stable=True).indices[: self.n_stay].sort().values
        best = best + block.start
        every = torch.arange(n, device=votes.device)
        stay = torch.cat([every[: block.start], best, every[block.stop :]])
        self.weights = self.weights[:, stay]
        self.base = len(stay) - (tail - 1)
        return stay


def n_of_block(block: int, share: float, decay: float, layer: int, n_layers: int) -> int:
    """How many generated tokens of a block stay in a layer."""
    return max(1, int(block * share * falling(layer, n_layers, decay)))


def rising_weights(n: int, last: float) -> Tensor:
    """Weights of the recent queries, from 1 up to `last`."""
    return torch.linspace(1, last, n)


@dataclass(frozen=True)
class Course(TokenPruning):
    """A prefill for itself: who goes on after each layer."""

    plan: "PyramidInfer.Plan"

    def going_on(self, layer: int, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor | None:
        n = k.shape[2]
        if self.plan.n_going_on(layer, n) == n - self.plan.tail:
            return None
        recent = q[:, :, -self.plan.tail :]
        rising = rising_weights(self.plan.tail, self.plan.distance_weight).to(q.device)
        lse = None if softmax.is_plain else query_lse(recent, k, softmax)
        sums = column_sums(recent, k, softmax.scale, rising, lse, softmax.cap)  # (h_kv, g, n)
        return self.survivors(layer, sums.flatten(0, 1).mean(0) / self.plan.tail)

    def survivors(self, layer: int, votes: Tensor) -> Tensor:
        """Ascending indices of those that go on, by votes (n,)."""
        n = len(votes)
        context = votes[: n - self.plan.tail].clone()
        context[: self.plan.sinks] = torch.inf
        best = context.sort(descending=True, stable=True).indices[: self.plan.n_going_on(layer, n)]
        return torch.cat([best.sort().values, torch.arange(n - self.plan.tail, n, device=votes.device)])


class PyramidInfer(SelectiveAttention):
    title = "PyramidInfer"
    version = 2
    no_growth = "thins the pass over the context itself, and a feed is read in full"
    drops = True
    prunes_prompt = True

    @dataclass(frozen=True)
    class Params:
        schedule: Literal["cosine", "constant", None]
        decay: Planned | None
        recent_ratio: Planned | None
        min_context: Index | None
        sinks: Index
        interval: Count
        distance_weight: Annotated[float, Ge(1), Is("1 where all recent queries weigh alike, more where later ones do")]
        compress_generated: bool

    @dataclass(frozen=True)
    class Plan:
        """How many tokens go on after each layer: a prefill for itself."""

        s: int  # tokens of the prompt
        n_layers: int
        tail: int  # last tokens that always go on
        min_context: int  # fewer than this are not compressed any further
        sinks: int  # first surviving tokens that always go on
        interval: int  # only every so many layers compress
        distance_weight: float  # of the last query's vote; the tail's first has 1
        schedule: str
        decay: float

        def share(self, layer: int) -> float:
            """How much of a layer's context goes on."""
            return self.decay if self.schedule == "constant" else falling(layer, self.n_layers, self.decay)

        def n_going_on(self, layer: int, n: int) -> int:
            """Context tokens that go on after a layer of `n` tokens; where that is all of them, nobody votes."""
            context, share = n - self.tail, self.share(layer)
            floor = min(self.min_context, self.s - self.tail)
            if layer % self.interval or context <= floor or share >= 1:
                return context
            k = int(context * share)
            return context if k <= floor else k

        def lengths(self) -> list[int]:
            """Tokens of every layer."""
            n, lengths = self.s, []
            for layer in range(self.n_layers):
                lengths.append(n)
                n = self.n_going_on(layer, n) + self.tail
            return lengths

    params: Params
    plan: Plan | None  # None: the whole prompt is in the budget

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        others = shape.n_own
        if others:
            raise ConfigError(
                f"method=pyramidinfer leaves tokens out of the forward pass, which the {others} layers of model "
                f"{shape.name!r} without full attention, or with a state beside it, cannot follow; use another method "
                "or model"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan | None:
        if budget.attends_all:
            return None
        return fit_course(params, budget.s_prompt, budget.tokens, shape.n_layers)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        varies = params.decay is None and (request.ratio is None or request.ratio < STARRED_BELOW)
        name = super().label(params, request)
        return name.replace(cls.title, f"{cls.title}*") if varies else name

    @classmethod
    def pruning(cls, plan: Plan | None) -> Course | None:
        return None if plan is None else Course(plan)

    def setup(self) -> None:
        self.generated: dict[int, Generated] = {}
        # No block comes to be compressed before so many tokens: until then nothing has to be watched.
        self.wants_weights = (
            self.params.compress_generated and self.plan is not None and self.store.n_new >= self.plan.tail - 1 + BLOCK
        )

    @classmethod
    def observations(cls, params: Params, plan: Plan | None) -> tuple[Observation, ...]:
        return (MeanWeights(plan.tail),) if params.compress_generated and plan is not None else ()

    def arrange(self, layer: int) -> Whole:
        if self.wants_weights and self.plan is not None:
            weights = self.trace.observed(MeanWeights(self.plan.tail), layer)
            n_stay = n_of_block(BLOCK, BLOCK_SHARE, BLOCK_DECAY, layer, self.plan.n_layers)
            self.generated[layer] = Generated(weights, weights.shape[1], BLOCK, n_stay, self.plan.distance_weight)
        return Whole()

    @property
    def is_still(self) -> bool:
        return self.variant.is_full or not self.wants_weights

    def behind(self, layer: int, weights: Tensor | None) -> Change | None:
        if weights is None or self.plan is None:
            return None
        generated = self.generated[layer]
        generated.take(weights[0].mean(0), self.plan.tail)
        cost = Cost(held_bytes=generated.weights.nbytes)
        stay = generated.stay(self.plan.tail)
        return Change(cost=cost) if stay is None else Stay(stay.expand(1, self.trace.shape.h_kv, -1), cost=cost)

    def protected(self, layer: int) -> Sequence[int]:
        n = self.store[layer].n_seen
        if self.plan is None:
            return range(n)
        return range(n - self.plan.tail if self.wants_weights else self.trace.s_prompt - self.plan.tail, n)

    def report(self) -> dict[str, Any]:
        if self.plan is None:
            return {}
        lengths = self.plan.lengths()
        return {
            "schedule": self.plan.schedule,
            "decay": self.plan.decay,
            "tail": self.plan.tail,
            "layer_tokens": lengths,
            "kept_share": sum(lengths) / (self.plan.s * len(lengths)),
        }
