"""What InfLLM may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/infllm.py`).
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor

from engine.books.footprint import Footprint, held
from engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, show, split
from engine.checks import tokens
from engine.errors import ConfigError
from engine.shapes import Checkpoint, ModelShape
from methods.rules.base import Rules

CHOICES = (
    ("repr_score", ("prob", "logit")),
    ("repr_granularity", ("query_head", "kv_head")),
    ("position", (True, "true", "fixed")),  # YAML reads true as a boolean
    ("budget_rule", ("fair", "official")),
)


class InfLLMRules(Rules):
    title = "InfLLM"
    drops = False

    @dataclass(frozen=True)
    class Params:
        block_len: int
        n_sink: int
        repr_score: str
        repr_granularity: str
        per_head: bool
        position: bool | str
        grow_blocks: bool
        budget_rule: str

        def __post_init__(self) -> None:
            for key, allowed in CHOICES:
                if getattr(self, key) not in allowed:
                    raise ConfigError(
                        f"method.{key}={getattr(self, key)} is unknown; use {allowed[-2]} or {allowed[-1]}"
                    )
            if self.block_len < 1:
                raise ConfigError(
                    f"method.block_len={self.block_len} is out of range; it is a number of tokens, at least 1"
                )
            tokens("method.n_sink", self.n_sink)

    @dataclass(frozen=True)
    class Plan:
        """How a prompt is divided; k = 0 where the budget is the whole prompt."""

        n_sink: int
        n_local: int  # latest tokens that are always attended to, the current one included
        block_len: int
        k: int  # blocks fetched per step
        n_repr: int  # representatives of a block, per head

        def n_blocks(self, n: int) -> int:
            """Blocks for the query behind `n` tokens: none of their tokens is among its local ones."""
            return max(0, (n - self.n_sink - self.n_local) // self.block_len)

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if request.ratio is not None and request.ratio < 1:
            n_representatives(params, request.comm)

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        if params.position == "fixed" and not model.n_rotary:
            raise ConfigError("method.position=fixed needs a model with rotary positions; use method.position=true")

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if budget.attends_all:
            return InfLLMRules.Plan(0, budget.s_prompt, params.block_len, 0, 0)
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


def n_representatives(params: InfLLMRules.Params, comm: Fraction) -> int:
    """How many representatives of a block `comm` pays for."""
    n_repr = floor(comm * params.block_len)
    if n_repr < 1:
        raise ConfigError(
            f"comm={show(comm)} pays for no representative of a block of method.block_len={params.block_len} tokens; "
            f"use comm=1/{params.block_len} or more"
        )
    return n_repr


def fair_layout(params: InfLLMRules.Params, budget: Budget, n_repr: int) -> InfLLMRules.Plan:
    """Half of the budget is local; which other tokens are blocks follows, and how many blocks cannot be attended to.

    Whatever the split, sinks, window and unfilled block are what k of n_blocks blocks leave, so the attended tokens are
    s_prompt - (n_blocks - k) * block_len. Where half of the budget leaves no block to fetch, fewer tokens are local.
    """
    s, block_len = budget.s_prompt, params.block_len
    n_sink = split(budget.tokens, params.n_sink).n_sink
    n_left_out = ceil((s - budget.tokens) / block_len)  # blocks
    plan = InfLLMRules.Plan(n_sink, max(1, (budget.tokens - n_sink) // 2), block_len, 0, n_repr)
    k = plan.n_blocks(s) - n_left_out
    if k >= 1:
        return replace(plan, k=k)
    n_local = s - n_sink - (n_left_out + 1) * block_len
    if n_local >= 1:
        return replace(plan, n_local=n_local, k=1)
    raise ConfigError(too_small(budget, block_len, params.n_sink))


def too_small(budget: Budget, block_len: int, n_sink: int) -> str:
    """What to say where no block fits in beside sinks and one local token."""
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


def official_layout(params: InfLLMRules.Params, budget: Budget, n_repr: int) -> InfLLMRules.Plan:
    """The integers of PQCache's authors, sinks on top of the ratio; in double precision, as they compute them."""
    n_sink = min(params.n_sink, budget.s_prompt)
    besides = (budget.s_prompt - n_sink) * float(budget.ratio)
    n_local = max(1, int(besides * 0.5))
    k = max(1, ceil((besides - n_local) / params.block_len))
    return InfLLMRules.Plan(n_sink, n_local, params.block_len, k, n_repr)
