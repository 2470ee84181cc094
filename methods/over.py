"""`OverScorer`: a dropping method that chooses in a way of its own among what any other method's scores are.

Its parameter `scorer` is another method with its parameters; what that one observes, protects and refuses, it does.

Not here: the ways to choose (`methods/ranking/chunkkv.py`, `methods/ranking/criticalkv.py`).
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from kvbench.engine.budget import EVERYTHING, Budget, BudgetRequest
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import Observation
from kvbench.engine.passes.second_pass import SecondPass
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.methods.base import Variant
from kvbench.methods.named import Scorer
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits


def kind_of(scorer: Scorer) -> type[ScoringMethod]:
    """The scorer's class."""
    return cast(type[ScoringMethod], scorer.rules)


def refuse_query_heads(scorer: Scorer, title: str) -> None:
    """Raise `ConfigError` for a scorer with a set for each query head."""
    if scorer.rules.traits_of(scorer.params).is_query_wide:
        raise ConfigError(
            f"each query head has scores of its own in method.scorer, and {title} chooses for KV heads; use "
            "reduce: mean in method.scorer"
        )


class OverScorer(ScoringMethod):
    """A method over the scorer `params.scorer`, whose integers are `plan.inner`.

    With `params.match_published`, tokens that the scorer protects compete with all others, at 1 above the layer's best.
    """

    @dataclass(frozen=True)
    class Plan:
        inner: Any  # the scorer's own integers

    plan: Any

    @classmethod
    def plan_for(cls, params: Any, budget: Budget, shape: ModelShape) -> Any:
        return cls.Plan(cls.inner_plan(params, budget, shape))

    @classmethod
    def traits_of(cls, params: Any) -> Traits:
        scorer = params.scorer.rules.traits_of(params.scorer.params)
        return replace(super().traits_of(params), comparable=scorer.comparable)

    @classmethod
    def check(cls, params: Any, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        params.scorer.rules.check(params.scorer.params, request, shape)

    @classmethod
    def check_model(cls, params: Any, model: Checkpoint) -> None:
        params.scorer.rules.check_model(params.scorer.params, model)

    @classmethod
    def data_digest(cls, params: Any) -> str | None:
        return params.scorer.rules.data_digest(params.scorer.params)

    @classmethod
    def inner_plan(cls, params: Any, budget: Budget, shape: ModelShape) -> Any:
        """The scorer's integers; as published it protects what it would with room for it."""
        given = replace(budget, tokens=budget.s_prompt) if params.match_published else budget
        return params.scorer.rules.plan_for(params.scorer.params, given, shape)

    @classmethod
    def notes(cls, params: Any) -> list[str]:
        """What a label says in addition to the method's name."""
        title = params.scorer.rules.label(params.scorer.params, EVERYTHING)
        return ([] if title == "SnapKV" else [title]) + ["published"] * params.match_published

    @classmethod
    def label(cls, params: Any, request: BudgetRequest) -> str:
        notes, name = cls.notes(params), super().label(params, request)
        return name.replace(cls.title, f"{cls.title} ({', '.join(notes)})") if notes else name

    @classmethod
    def observations(cls, params: Any, plan: Any) -> tuple[Observation, ...]:
        return kind_of(params.scorer).observations(params.scorer.params, plan.inner)

    @classmethod
    def second_passes(cls, params: Any, plan: Any) -> tuple[SecondPass, ...]:
        return kind_of(params.scorer).second_passes(params.scorer.params, plan.inner)

    def setup(self) -> None:
        """The scorer is a variant of its own on this sample, which stores nothing."""
        scorer = self.params.scorer
        kind = kind_of(scorer)
        variant = Variant(kind, scorer.params, self.budget, self.plan.inner)
        self.inner = kind(variant, self.trace, 0, type(self.store))

    def ends(self) -> tuple[int, int]:
        return (0, 0) if self.params.match_published else self.inner.ends()

    def worths(self, layer: int) -> Tensor:
        """The scorer's numbers, weights as means over queries; with `match_published` of all tokens."""
        found = self.inner.shared_scores(layer) / self.inner.n_summed()
        if self.params.match_published and any(self.inner.ends()):
            found = torch.nn.functional.pad(found, self.inner.ends(), value=float(found.max()) + 1)
        return found
