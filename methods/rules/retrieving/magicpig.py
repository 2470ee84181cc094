"""What MagicPIG may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/magicpig.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from engine.books.footprint import Footprint, held
from engine.budget import Budget, BudgetRequest, find_bytes, key_bytes, show
from engine.checks import whole_numbers
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules

ENTRY_BYTES, BOUND_BYTES, NORM_BYTES = 4, 8, 4  # of a token in a table, of a bucket, of a token's norm
MOST_BITS = 15  # a code is a 16-bit whole number with a sign
FEWEST_TABLES = 2  # a find is two collisions


class MagicPIGRules(Rules):
    title = "MagicPIG"
    drops = False
    keeps_budget_in = "mean"

    @dataclass(frozen=True)
    class Params:
        bits: int
        tables: int | str
        n_sink: int
        window: int
        dense_every: int
        seed: int

        def __post_init__(self) -> None:
            if isinstance(self.tables, str) and self.tables != "auto":
                raise ConfigError(f"method.tables={self.tables} is not a number; use a whole number from 2, or auto")
            whole_numbers("method", self, tables=FEWEST_TABLES, n_sink=0, window=0, dense_every=0, seed=0)
            if not 1 <= self.bits <= MOST_BITS:
                raise ConfigError(f"method.bits={self.bits} is out of range; a table's code has 1 to {MOST_BITS} bits")

    @dataclass(frozen=True)
    class Plan:
        """How a budget is divided."""

        n_sink: int
        window: int  # the prompt's last tokens
        k: int  # tokens that a sample has in the mean
        find_bytes: int  # that a step may read to find them, in the mean

        def middle(self, s: int) -> int:
            """Tokens of a prompt that are hashed; with less than the whole budget there are at least two."""
            return s - self.n_sink - self.window

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if request.ratio != 1 and request.comm == 0 and params.tables == "auto":
            raise ConfigError("comm=0 pays for no table; use 1/64 or more, or give method.tables")
        if len(dense_layers(params, shape.attention_layers)) == len(shape.attention_layers):
            raise ConfigError(
                f"method.dense_every={params.dense_every} leaves no layer of {shape.name} to compress; use 0, which "
                "leaves none whole, or a larger number"
            )

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        return f"{cls.title} (budget in the mean)"

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        tokens, s = budget.tokens, budget.s_prompt
        n_sink, window = min(params.n_sink, tokens // 4), min(params.window, tokens // 4)
        plan = MagicPIGRules.Plan(n_sink, window, tokens - n_sink - window, find_bytes(shape, budget))
        if params.tables != "auto" or budget.attends_all:
            return plan
        # Where all keys were spread evenly over the buckets; real ones come in larger bits.
        entries = Fraction(plan.middle(s), 1 << params.bits)
        least = FEWEST_TABLES * shape.h * (BOUND_BYTES + ENTRY_BYTES * entries)
        if least > plan.find_bytes:
            enough = ceil(10_000 * least / key_bytes(shape, s)) / 10_000
            raise ConfigError(
                f"comm={show(budget.comm)} does not pay for {FEWEST_TABLES} tables of {params.bits} bits for a prompt "
                f"of {s} tokens; use comm={enough} or more, or more method.bits"
            )
        return plan

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        return held(
            budget, shape, plan.n_sink + plan.window, fetched=plan.k * shape.g, n_whole=cls.n_whole(params, shape)
        )

    @classmethod
    def n_whole(cls, params: Params, shape: ModelShape) -> int:
        return len(dense_layers(params, shape.attention_layers))


def dense_layers(params: MagicPIGRules.Params, layers: Sequence[int]) -> list[int]:
    """Layers that stay whole: the first, and every so many layers another one."""
    return [layer for layer in layers if params.dense_every and layer % params.dense_every == 0]
