"""What PyramidInfer may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/pyramidinfer.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import cos, pi

from engine.budget import Budget, BudgetRequest, show
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules

SCHEDULES = ("cosine", "constant")
STARRED_BELOW = Fraction(3, 10)


def falling(layer: int, n_layers: int, last: float) -> float:
    """A share that falls with depth from 1 towards `last`, half a cosine."""
    return last + (1 - last) * (1 + cos(pi * layer / n_layers)) / 2


def fit_course(params: "PyramidInferRules.Params", s: int, n_tokens: int, n_layers: int) -> "PyramidInferRules.Plan":
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
    params: "PyramidInferRules.Params", s: int, n_tokens: int, n_layers: int, n_tries: int
) -> "PyramidInferRules.Plan | None":
    """The first schedule that meets the budget, with the largest decay that does; None where there is none.

    The stop rule lets very small decays keep more than larger ones, so decays are tried from above, then refined.
    """
    share = Fraction(n_tokens, s)
    recent = min(Fraction(1, 5), share / 4) if params.recent_ratio is None else params.recent_ratio
    low = min(64, int(share * s / 4)) if params.min_context is None else params.min_context
    tail = min(s, 1 + int(recent * s))

    def course(schedule: str, decay: float) -> "PyramidInferRules.Plan":
        return PyramidInferRules.Plan(
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


class PyramidInferRules(Rules):
    title = "PyramidInfer"
    drops = True
    thins = True

    @dataclass(frozen=True)
    class Params:
        schedule: str | None
        decay: Fraction | None
        recent_ratio: Fraction | None
        min_context: int | None
        sinks: int
        interval: int
        distance_weight: float
        compress_generated: bool

        def __post_init__(self) -> None:
            if self.schedule is not None and self.schedule not in SCHEDULES:
                raise ConfigError(
                    f"method.schedule={self.schedule} is unknown; use one of {', '.join(SCHEDULES)}, or null for "
                    "what the budget needs"
                )
            for key in ("decay", "recent_ratio"):
                value = getattr(self, key)
                if value is not None and not 0 <= value <= 1:
                    raise ConfigError(
                        f"method.{key}={show(value)} is out of range; it is a share from 0 to 1, or null for what "
                        "the budget needs"
                    )
            for key, least in (("sinks", 0), ("interval", 1), ("min_context", 0)):
                value = getattr(self, key)
                if value is not None and value < least:
                    raise ConfigError(f"method.{key}={value} is out of range; it is {least} or more")
            if self.distance_weight < 1:
                raise ConfigError(
                    f"method.distance_weight={self.distance_weight:g} is out of range; 1 weighs all recent queries "
                    "alike, more prefers later ones"
                )

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
