"""What LagKV may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/lagkv.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite

from engine.budget import Budget, BudgetRequest
from engine.checks import each_one_of, tokens, whole_numbers
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules

LEAST_LAG = 8  # tokens of a partition, below which a budget halves it no further
LABELS = {"quota": "", "ranks": " (ranks)", "scores": " (cross scores)"}


class LagKVRules(Rules):
    title = "LagKV"
    drops = True
    is_scorer = True

    @dataclass(frozen=True)
    class Params:
        n_sink: int
        lag: int
        value_weight: float
        selection: str
        evict: str
        budget_rule: str

        def __post_init__(self) -> None:
            each_one_of(
                "method", self, selection=(*LABELS,), evict=("prompt", "always"), budget_rule=("fair", "official")
            )
            tokens("method.n_sink", self.n_sink)
            whole_numbers("method", self, lag=2)
            if not (isfinite(self.value_weight) and self.value_weight >= 0):
                raise ConfigError(
                    f"method.value_weight={self.value_weight:g} is out of range; it is 0 or more, and 1 weighs values "
                    "like keys"
                )
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

    @classmethod
    def comparable_over(cls, params: Params) -> str:
        """Softmax sums mean the same in all heads where they are not compared within their partition alone."""
        return "heads" if params.selection == "scores" else "none"

    @classmethod
    def evicts(cls, params: Params) -> str:
        return "LagKV goes on while it decodes; use method.evict=prompt with it" if params.evict == "always" else ""

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


def whole(params: LagKVRules.Params, s: int, m: int) -> LagKVRules.Plan:
    """A prompt of which nothing is compressed."""
    return LagKVRules.Plan(params.n_sink, params.lag, 0, 0, max(0, s - params.n_sink), m)


def divide(s: int, n_tokens: int, n_sink: int, lag: int) -> LagKVRules.Plan | None:
    """`n_tokens` of `s` in partitions of `lag`; None where a partition would have none, or there is none to keep."""
    n_parts, n_last = (s - n_sink) // lag - 1, lag + (s - n_sink) % lag
    n_between = n_tokens - n_sink - n_last
    if n_parts < 1 or n_between < n_parts:
        return None
    return LagKVRules.Plan(n_sink, lag, n_parts, n_between, n_last, n_between // n_parts)


def fitting(params: LagKVRules.Params, s: int, n_tokens: int) -> LagKVRules.Plan | None:
    """The division with the most sinks, and of those with the longest partitions, that meets a budget."""
    lags = [params.lag]
    while lags[-1] // 2 >= LEAST_LAG:
        lags.append(lags[-1] // 2)
    plans = (divide(s, n_tokens, n_sink, lag) for n_sink in range(min(params.n_sink, s), -1, -1) for lag in lags)
    return next((plan for plan in plans if plan is not None), None)


def fit(params: LagKVRules.Params, budget: Budget) -> LagKVRules.Plan:
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


def official_quota(params: LagKVRules.Params, budget: Budget) -> LagKVRules.Plan:
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
    return LagKVRules.Plan(params.n_sink, lag, n_parts, n_parts * m, lag + (s - params.n_sink) % lag, m)


def official_best(params: LagKVRules.Params, budget: Budget) -> LagKVRules.Plan:
    """kvpress' integers: the best of all partitions; sinks and recent tokens where there is no room for others."""
    s, n_tokens = budget.s_prompt, budget.tokens
    n_sink = min(params.n_sink, n_tokens)
    n_parts, n_last = (s - n_sink) // params.lag - 1, params.lag + (s - n_sink) % params.lag
    n_between = n_tokens - n_sink - n_last
    if n_parts < 1 or n_between < 0:
        return LagKVRules.Plan(n_sink, params.lag, 0, 0, n_tokens - n_sink, 0)
    return LagKVRules.Plan(n_sink, params.lag, n_parts, n_between, n_last, n_between // n_parts)
