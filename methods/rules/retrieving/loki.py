"""What Loki may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/loki.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from pathlib import Path

from engine.books.footprint import Footprint, held
from engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, show
from engine.checks import each_one_of, whole_numbers
from engine.errors import ConfigError
from engine.shapes import Checkpoint, ModelShape
from methods.calibration.files import check_calibration, check_file, digest_of_file
from methods.rules.base import Rules

CHOICES = {
    "rotary": ("post", "pre"),
    "granularity": ("query_head", "kv_head"),
    "generated": ("stay", "compete"),
    "calibrate": ("missing", "never"),
}


class LokiRules(Rules):
    title = "Loki"
    drops = False

    @dataclass(frozen=True)
    class Params:
        top_r: int | Fraction | str
        top_k: Fraction | None
        rotary: str
        granularity: str
        generated: str
        calibrate: str
        calibration_file: Path | None

        def __post_init__(self) -> None:
            each_one_of("method", self, **CHOICES)
            if isinstance(self.top_r, str) and self.top_r != "auto":
                raise ConfigError(
                    f"method.top_r={self.top_r} is no number of components; use a whole number from 1, a share of the "
                    "variance below 1, or auto"
                )
            if isinstance(self.top_r, Fraction) and not 0 < self.top_r < 1:
                raise ConfigError(
                    f"method.top_r={show(self.top_r)} is out of range; it is a whole number of components from 1, or a "
                    "share of the variance between 0 and 1"
                )
            whole_numbers("method", self, top_r=1)
            if self.top_k is not None:
                if self.top_k <= 0 or (self.top_k > 1 and self.top_k.denominator != 1):
                    raise ConfigError(
                        f"method.top_k={show(self.top_k)} is out of range; it is a share of the tokens up to 1, or a "
                        "whole number of them above 1"
                    )
                if self.generated != "compete":
                    raise ConfigError(
                        f"method.top_k={show(self.top_k)} counts generated tokens too; use it with "
                        "method.generated=compete, or ratio and budget for the prompt's"
                    )

    @dataclass(frozen=True)
    class Plan:
        k: int  # tokens of the prompt that are selected
        r: int | None  # components; None: as many as `share` of the variance takes in the layer
        share: Fraction | None

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        check_file(params.calibration_file, "pca", shape)
        if request.ratio != 1:
            components_for(params, request.comm, shape)

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        check_calibration(params.calibration_file, "pca", params.calibrate == "missing", model)

    @classmethod
    def data_digest(cls, params: Params) -> str | None:
        return digest_of_file(params.calibration_file)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if budget.attends_all:
            return LokiRules.Plan(budget.tokens, shape.d_h, None)
        return LokiRules.Plan(budget.tokens, *components_for(params, budget.comm, shape))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = ["before rotary"] if params.rotary == "pre" else []
        notes += [] if params.granularity == "query_head" else ["KV head"]
        notes += [] if params.top_r == "auto" else [f"r={params.top_r}"]
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        n_components = shape.d_h if plan.r is None else plan.r  # as many as the variance takes: at most all
        index = shape.h_kv * n_components * ELEMENT_BYTES * budget.s_prompt
        return held(budget, shape, 0, index, plan.k * (shape.g if params.granularity == "query_head" else 1))


def components_for(params: LokiRules.Params, comm: Fraction, shape: ModelShape) -> tuple[int | None, Fraction | None]:
    """How many components score a key, or which share of the variance they explain."""
    if isinstance(params.top_r, Fraction):
        return None, params.top_r
    paid = min(floor(comm * shape.d_h), shape.d_h)
    if isinstance(params.top_r, str):
        if paid < 1:
            raise ConfigError(
                f"comm={show(comm)} pays for none of the {shape.d_h} components of a key; "
                f"use comm=1/{shape.d_h} or more"
            )
        return paid, None
    if params.top_r > shape.d_h:
        raise ConfigError(f"method.top_r={params.top_r} is more than the {shape.d_h} components of {shape.name}")
    if params.top_r > paid:
        raise ConfigError(
            f"comm={show(comm)} pays for {paid} of the method.top_r={params.top_r} components of a key; use "
            f"comm={show(Fraction(params.top_r, shape.d_h))} or more, or method.top_r=auto"
        )
    return params.top_r, None
