"""Ada-KV (Feng et al., 2024): the heads of a layer share its budget instead of getting equal parts of it.

All heads' scores are put into one list; what a head has among the best is its share, mixed with an equal one so that
no head starves. Which tokens a head keeps with its share is SnapKV's business (`methods/dropping/snapkv.py`).

Paper     arXiv:2407.11550, 2024; Feng, Yuan; Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for
          Efficient LLM Inference
Symbols   paper alpha, budget of head i = `alpha`, a layer's part of `counts`; authors' `floor_alpha` = `alpha`,
          `base_capacity` = `cap` (window included), `head_capacity` = `of_heads`.
Per step  moved: nothing; resident: the counts of all heads, 4 * d_h bytes a token, and 4 * (h_kv + 1) bytes of offsets;
          a query head attends to its KV head's tokens, which may be far more than the budget: that is the layer's mean.
Differs   - the authors round each head's share for itself, so that a layer keeps up to h_kv tokens fewer or one more
            than asked: here the exact shares are rounded to their sum, and `match_published` gives their integers.
          - a KV head keeps one set, by its group's mean score (the authors' GQA mode); `reduce: query_head` is their
            first form, a budget for every query head, of which the KV head keeps the union.
          - `floor: protect` is kvpress' rule: each head's best are in, then the layer's best whatever their head.
            For equal alpha it equalises less, and it is not the authors'.
          The rest as in SnapKV.
Fails     as SnapKV; and where a head with flat scores holds what is asked for: its share goes to peaked ones.
Figures   drop after the prompt, by its last queries: #E07401, plus, -
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Is
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.methods.allocator import Allocator, Alpha
from kvbench.methods.dropping.allocators import Counts, head_mix, head_mix_published
from kvbench.methods.dropping.snapkv import SnapKV, WindowVotes, fit_window
from kvbench.methods.traits import Traits


def normalised_heads(scores: Tensor, c: int) -> Tensor:
    """Scores (heads, n) times the share of its sum that each head's `c` best hold."""
    best = scores.topk(min(c, scores.shape[1]), sorted=False).values.sum(-1)
    return scores * (best / scores.sum(-1).clamp(min=torch.finfo(scores.dtype).tiny)).unsqueeze(-1)


class AdaKV(WindowVotes):
    title = "Ada-SnapKV"
    no_growth = "gives heads numbers of tokens of their own, in buffers that are cut to the context's"
    is_scorer = False  # its own division of the budget is what it is
    comparable = "heads"

    @dataclass(frozen=True)
    class Params(SnapKV.Params):
        alpha: Alpha
        floor: Literal["mix", "protect"]
        normalize: bool
        skip: Annotated[int, Ge(0), Is("a number of first layers whose heads are alike")]
        match_published: bool

        def __post_init__(self) -> None:
            if self.floor == "protect" and (self.normalize or self.match_published):
                raise ConfigError(
                    "method.floor=protect is kvpress' rule, which has no normalize and no match_published; "
                    "use method.floor=mix with these"
                )

    @dataclass(frozen=True)
    class Plan(SnapKV.Plan):
        """What a layer keeps of the prompt, per KV head in the mean over its heads."""

    params: Params
    plan: Plan

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        division = Allocator("head_mix" if params.floor == "mix" else "head_protect", params.alpha)
        return replace(super().traits_of(params), allocator=division)

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        n_layers = len(shape.attention_layers)
        if params.skip > n_layers:
            raise ConfigError(
                f"method.skip={params.skip} is more than the {n_layers} layers of {shape.name}; use at most {n_layers}"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return AdaKV.Plan(budget.tokens, fit_window(budget.tokens, params.window))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        label = super().label(params, request)
        return label if params.floor == "mix" else label.replace(cls.title, f"{cls.title}, protect")

    def of_heads(self, layer: int, c: int) -> Counts:
        params = self.params
        if self.trace.shape.attention_layers.index(layer) < params.skip:
            return c
        if not (params.normalize or params.match_published):
            return super().of_heads(layer, c)
        scores = self.shared_scores(layer)[0]
        if params.normalize:
            scores = normalised_heads(scores, c)
        if params.match_published:
            return head_mix_published(scores, c, float(params.alpha))
        return head_mix(scores, c, params.alpha)
