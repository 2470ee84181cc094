"""Q-Filters (Godey et al., 2025): keep the keys that lie along the direction that a head's queries share.

The direction is found once per model, on another text: the first singular vector of a head's queries after rotary
embedding. A token's score is the projection of its key on it. No query, no attention and no value is looked at.

Paper     arXiv:2503.02812, 2025; Godey, Nathan; Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression
Symbols   the authors' filter F, max_length, window_length = `filters`, the budget's tokens, `window`; v1, its sign
          epsilon = `methods/calibration/qfilters.py`; kvpress' q_filters = `filters`.
Budget    the window inside, at most a quarter of it. With `evict: always` a constant number of tokens, each new one
          costing the lowest score its place.
Per step  moved: nothing; resident: the budget's tokens and generated ones, 4 * d_h bytes each per KV head. Of the model
          and not of the prompt: 4 * h_kv * d_h bytes a layer, `constant_bytes` of the report.
Differs   - the prompt is read exactly, and cut after it. The authors' cache cuts keys before the prompt's own
            attention, so that its pass is approximate.
          - directions are measured on 20 texts of 2,048 tokens of the embedded prose, unless `calibration_file` has
            others; of the authors' 20 one is not used, and theirs cannot be had here. Tasks that use the same prose
            so far on see text that the directions were found on.
          - queries are drawn with a seed, and multiplied in float64; scores are float32 whatever the model's dtype.
          - kvpress (method=qfilters_kvpress) has no window. Without directions of a model it draws some at random: here
            that is refused, or they are measured.
          - of equal scores the lower position stays.
Fails     where heads of a group disagree, so that their mean is short (`least_length` of the report), and where what is
          asked for lies off the usual direction.
Figures   drop by keys and values: #7765BD, left, :
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import Observation
from kvbench.engine.placement import Change, Evict, Kept, Placement
from kvbench.engine.shapes import ModelShape
from kvbench.methods.calibration.files import REMEDY, read
from kvbench.methods.calibration.known import Calibrated, NeedsCalibration
from kvbench.methods.scorers import lowest_slot
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits

KIND = "qfilters"


def projections(keys: Tensor, filters: Tensor) -> Tensor:
    """Lengths of keys (1, h_kv, n, d_h) along the opposite of filters (h_kv, d_h): (1, h_kv, n) float32."""
    heads = zip(keys[0], filters, strict=True)
    return torch.stack([-(head.float() @ each) for head, each in heads]).unsqueeze(0)


class QFilters(NeedsCalibration, ScoringMethod):
    calibration = KIND
    title = "Q-Filters"
    judges = "keys"
    comparable = "none"  # directions of two heads have two lengths

    @dataclass(frozen=True)
    class Params:
        window: Tokens
        evict: Literal["prompt", "always"]
        calibrate: Literal["missing", "never"]
        calibration_file: Path | None

    @dataclass(frozen=True)
    class Plan:
        tokens: int  # of a KV head, the window included
        window: int  # last tokens that stay

    params: Params
    plan: Plan

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        if params.calibration_file is not None:
            check_filters(params.calibration_file, shape)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return QFilters.Plan(budget.tokens, min(params.window, budget.tokens // 4))

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        evicts = (
            "Q-Filters evict while they decode; use method.evict=prompt with it" if params.evict == "always" else ""
        )
        return replace(super().traits_of(params), evicts=evicts)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        name = super().label(params, request)
        return name.replace(cls.title, f"{cls.title} (evicting)") if params.evict == "always" else name

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (calibrated(params),)

    def scorer(self) -> Hashable:
        return "Q-Filters", calibrated(self.params)

    def filters(self, layer: int) -> Tensor:
        return self.trace.observed(calibrated(self.params), layer).float()

    def worth(self, layer: int, keys: Tensor) -> Tensor:
        return projections(keys, self.filters(layer))

    def scores_of(self, layer: int, keys: Tensor, inputs: Tensor | None) -> Tensor:
        return self.worth(layer, keys.transpose(0, 2))[0].mT

    def place(self, layer: int, best: Tensor) -> Placement:
        """Keep, with `evict: always`, window and chosen tokens alike, with room until the first one has to leave."""
        if self.is_still:
            return super().place(layer, best)
        s, n = self.trace.s_prompt, self.ends()[1]
        last = torch.arange(s - n, s, device=best.device).expand(1, best.shape[1], -1)
        kept = torch.cat([best, last], -1)
        return Kept(kept, capacity=min(self.store.n_new, self.plan.tokens + 1 - kept.shape[-1]))

    @property
    def is_still(self) -> bool:
        return self.variant.is_full or self.params.evict == "prompt"

    def behind(self, layer: int, weights: Tensor | None) -> Change | None:
        """Evict the lowest score before the window from each full head, with `evict: always`."""
        at = self.store[layer]
        if self.is_still or at.n_kept + at.n_window <= self.plan.tokens:
            return None
        positions = at.positions()
        held = self.worth(layer, at.keys()).masked_fill(positions >= at.n_seen - self.plan.window, torch.inf)
        return Evict(lowest_slot(held, positions))

    def protected(self, layer: int) -> Sequence[int]:
        if self.is_still:
            return super().protected(layer)
        n = self.store[layer].n_seen
        return range(n - max(1, self.plan.window), n)

    def report(self) -> dict[str, Any]:
        lengths = torch.stack(
            self.trace.gathered(self.filters(layer).norm(dim=-1).amin() for layer in self.scored_layers())
        )
        shape = self.trace.shape
        return (
            super().report()
            | self.origin()
            | {
                "least_length": lengths.min().item(),
                "constant_bytes": len(shape.attention_layers) * shape.h_kv * shape.d_h * 4,
            }
        )


def calibrated(params: QFilters.Params) -> Calibrated:
    """The calibration that the method needs."""
    return Calibrated(KIND, "filters", params.calibration_file, params.calibrate == "missing")


def check_filters(file: Path, shape: ModelShape) -> None:
    """`ConfigError` where the user's file has no direction for each KV head."""
    found = read(file.expanduser(), str(file)).arrays.get("filters")
    sizes = (len(shape.attention_layers), shape.h_kv, shape.d_h)
    if found is None or found.shape != sizes:
        has = "none" if found is None else f"an array of {found.shape}"
        raise ConfigError(f"{file} has {has} for filters of layers, KV heads and dimensions {sizes}; {REMEDY} {KIND}")
    if not all(map(isfinite, found.flat)):
        raise ConfigError(f"{file} has directions that are no finite numbers; {REMEDY} {KIND}")
