"""When a method cuts its cache while the model answers, and how large the cache gets: arithmetic, without torch.

A cut leaves `target` tokens per KV head, of prompt and answer together, and comes every `interval` steps once there are
more. The step before a cut attends to everything. What `budget=B` is follows from `budget_counts`: the target itself,
the tokens that steps attend to on average once the cache is full, or the most that any step attends to.

Not here: which tokens stay (`methods/decoding`).
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from kvbench.engine.budget import Budget, BudgetRequest, show
from kvbench.engine.declared import Count, word
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.methods.rules import Rules


@dataclass(frozen=True)
class Schedule:
    """When a cache is cut, and to how many tokens."""

    target: int  # tokens that a cut leaves
    interval: int
    trigger: Literal["position", "steps", "slack", "gated"] = "position"
    at_prefill: bool = True  # a prompt of at least `target` tokens is cut as soon as it was read
    count_prompt: bool = True  # the prompt's tokens count for the trigger

    def is_due(self, n: int, n_seen: int, s_prompt: int) -> bool:
        """Whether the step that just ended is followed by a cut.

        A head holds `n` tokens of `n_seen`, the current one included.
        """
        counted = n if self.count_prompt else n - s_prompt
        if self.trigger == "slack":
            return counted >= self.target + self.interval and n > self.target
        if self.trigger == "steps":
            return (n_seen - s_prompt) % self.interval == 0 and counted > self.target
        since = n_seen - 1 if self.trigger == "position" else n_seen
        return since % self.interval == 0 and counted >= self.target and n >= self.target

    def cuts_prompt(self, s_prompt: int) -> bool:
        """Whether a prompt of so many tokens is cut before the first step."""
        return self.at_prefill and s_prompt >= self.target

    def room(self, s_prompt: int) -> int:
        """Tokens that are appended to the whole prompt before the first cut, at most."""
        if not self.count_prompt:
            return self.target + self.interval
        return max(self.target - s_prompt, 0) + self.interval

    def room_behind(self, s_prompt: int) -> int:
        """Tokens that are appended to what a cut left before the next one, at most."""
        return self.interval if self.count_prompt else self.interval + s_prompt

    def most(self, s_prompt: int) -> int:
        """Tokens that a step attends to, at most."""
        return self.target + self.interval if self.cuts_prompt(s_prompt) else s_prompt + self.room(s_prompt)


@dataclass(frozen=True)
class WhenToCut:
    """Parameters of every method that cuts by a `Schedule`."""

    interval: Count
    schedule: Literal["position", "steps"]
    at_prefill: bool


def target_of(tokens: int, counts: str | None, interval: int) -> int:
    """How many tokens a cut leaves, so that `tokens` are what `counts` says."""
    if counts == "mean":
        return tokens - (interval + 1) // 2
    return tokens - interval if counts == "peak" else tokens


class DecodingRules(Rules):
    """Rules of a method that cuts prompt and answer together by a `Schedule`."""

    drops = True
    of_answers = True
    takes = ("answer",)

    @classmethod
    def least(cls, params: Any) -> tuple[int, str]:
        """The smallest target, and why no cut can leave fewer tokens."""
        return 1, "a cut leaves at least one token"

    @classmethod
    def beside_prompt(cls, params: Any) -> tuple[int, str, dict[str, Any]] | None:
        """Tokens that a target needs besides a prompt that never leaves: how many, and their words in an error; and the
        parameter that lets the prompt compete, if there is one. None: it competes."""
        return None

    @classmethod
    def schedule(cls, params: Any, target: int) -> Schedule:
        """The schedule by which the method cuts."""
        return Schedule(target, params.interval, params.schedule, params.at_prefill)

    @classmethod
    def check(cls, params: Any, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        if request.memory is not None:
            raise ConfigError(
                f"memory={show(request.memory)} limits a prompt's cache, and {cls.title} compresses prompt and "
                "answer together; give budget=N tokens"
            )
        if request.tokens is None:
            assert request.ratio is not None
            raise ConfigError(
                f"ratio={show(request.ratio)} is a share of a prompt, and {cls.title} compresses prompt and answer "
                "together; give budget=N tokens"
            )
        if request.comm:
            raise ConfigError(
                f"comm={show(request.comm)} means nothing for {cls.title}, which moves nothing to find tokens; "
                "leave it out"
            )
        cls.target(params, request)

    @classmethod
    def target(cls, params: Any, request: BudgetRequest) -> int:
        """How many tokens a cut leaves; `ConfigError` where the method needs more."""
        assert request.tokens is not None
        target, (least, why) = target_of(request.tokens, request.counts, params.interval), cls.least(params)
        if target < least:
            smallest = least + request.tokens - target
            of = "" if request.counts in (None, "target") else f" with budget_counts={request.counts}"
            raise ConfigError(f"budget={request.tokens}{of} is too small: {why}; use budget={smallest} or more")
        return target

    @classmethod
    def budget_for(cls, params: Any, request: BudgetRequest, s_prompt: int) -> Budget:
        tokens, counts = request.tokens, request.counts or "target"
        target = cls.target(params, request)
        assert tokens is not None
        most = cls.schedule(params, target).most(s_prompt)
        n_more, what, instead = cls.beside_prompt(params) or (target - s_prompt, "", {})
        if target < s_prompt + n_more:
            others = "".join(f", or method.{key}={word(value)}" for key, value in instead.items())
            more = f" and {what} more" if n_more else ""
            raise ConfigError(
                f"budget={tokens} does not hold a protected prompt of {s_prompt} tokens{more}; use "
                f"budget={s_prompt + n_more + tokens - target} or more{others}"
            )
        if counts != "target" and most > target + params.interval:
            raise ConfigError(
                f"budget={tokens} with budget_counts={counts} is less than the {most} tokens that a step attends to "
                f"behind a prompt of {s_prompt}, which is not cut before the first step; use budget_counts=target"
            )
        return Budget(
            s_prompt,
            nominal_tokens=tokens,
            tokens=target,
            comm=Fraction(0),
            ratio=min(Fraction(tokens, s_prompt), Fraction(1)),
            counts=counts,
            most=tokens if counts == "mean" else most,
        )

    @classmethod
    def plan_for(cls, params: Any, budget: Budget, shape: ModelShape) -> Schedule:
        return cls.schedule(params, budget.tokens)

    @classmethod
    def cycle(cls, plan: Schedule, s_prompt: int) -> tuple[int, int]:
        return 0 if plan.cuts_prompt(s_prompt) else plan.room(s_prompt), plan.interval

    @classmethod
    def label(cls, params: Any, request: BudgetRequest) -> str:
        notes = cls.notes(params)
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title

    @classmethod
    def notes(cls, params: Any) -> list[str]:
        """A table's notes on parameters, after the title."""
        return ["kvpress' schedule"] if getattr(params, "schedule", "position") == "steps" else []
