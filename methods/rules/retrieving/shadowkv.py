"""What ShadowKV may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/retrieving/shadowkv.py`).
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor

from engine.books.footprint import DIGITS, Footprint, held, largest, too_small
from engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, show
from engine.checks import one_of, whole_numbers
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules

OUTLIER_SHARE = 8  # a budget of so many chunks pays for one outlier
LEAST_RANK_SHARE = 16  # of the keys' numbers: the lowest rank that a small `memory` leads to


class ShadowKVRules(Rules):
    title = "ShadowKV"
    drops = False

    @dataclass(frozen=True)
    class Params:
        chunk: int
        rank_share: Fraction
        outlier_chunks: int
        local_chunks: int
        native: bool
        budget_rule: str

        def __post_init__(self) -> None:
            whole_numbers("method", self, chunk=1, outlier_chunks=0, local_chunks=0)
            one_of("method.budget_rule", self.budget_rule, ("harness", "official"))
            if not 0 < self.rank_share <= 1:
                raise ConfigError(
                    f"method.rank_share={show(self.rank_share)} is out of range; it is a share of the numbers in all "
                    "keys of a token, above 0 and at most 1"
                )

    @dataclass(frozen=True)
    class Plan:
        chunk: int
        rank: int
        n_chunks: int  # in front of the local tokens, outliers included
        n_outliers: int
        n_selected: int

        @property
        def is_workable(self) -> bool:
            return 1 <= self.n_selected <= self.n_chunks - self.n_outliers

        def n_local(self, s_prompt: int) -> int:
            """The prompt's last tokens, which stay as they are."""
            return s_prompt - self.n_chunks * self.chunk

        def meta_bytes(self, s_prompt: int, shape: ModelShape) -> tuple[int, int]:
            """Bytes per layer of the factors of the keys, and of the landmarks."""
            width = shape.h_kv * shape.d_h
            factors = self.rank * (s_prompt + width) * ELEMENT_BYTES
            return factors, (self.n_chunks - self.n_outliers) * width * ELEMENT_BYTES

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if request.ratio != 1 and request.comm == 0 and not params.native:
            raise ConfigError("comm=0 pays for no landmark; use comm=1/8 or another share, or method.native=true")

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        if params.native:
            return f"{cls.title} (native)" if request.comm * params.chunk < 1 else cls.title
        chunk = chunk_of(params, request.comm)
        return cls.title if chunk == params.chunk else f"{cls.title} (chunks of {chunk})"

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        s = budget.s_prompt
        if budget.attends_all and budget.memory in (None, 1):
            return ShadowKVRules.Plan(params.chunk, 0, 0, 0, 0)
        chunk, rank = chunk_of(params, budget.comm), rank_of(params, s, shape)
        n_chunks = s // chunk - params.local_chunks
        if n_chunks < 1:
            raise ConfigError(
                f"a prompt of {s} tokens has no chunk of {chunk} in front of method.local_chunks={params.local_chunks} "
                "of them; use a smaller method.local_chunks, more comm, or method.native=true"
            )
        plan = divided(params, budget.tokens, s, chunk, rank)
        if plan.n_selected < 1:
            least = next(n for n in range(1, s + 1) if divided(params, n, s, chunk, rank).n_selected > 0)
            raise ConfigError(
                f"a budget of {budget.tokens} tokens for a prompt of {s} selects no chunk of {chunk} beside outliers "
                f"and {plan.n_local(s)} local tokens; use ratio={ceil(Fraction(1000 * least, s)) / 1000} or more "
                f"(budget={least}), a smaller method.local_chunks, or more comm"
            )
        if not plan.is_workable:
            raise ConfigError(
                f"method.outlier_chunks={params.outlier_chunks} and {plan.n_selected} selected chunks are more than "
                f"the {n_chunks} chunks of a prompt of {s} tokens; use fewer, a smaller budget, or longer prompts"
            )
        return plan

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        s = budget.s_prompt
        n_exact = plan.n_local(s) + plan.n_outliers * plan.chunk
        return held(budget, shape, n_exact, sum(plan.meta_bytes(s, shape)), plan.n_selected * plan.chunk)

    @classmethod
    def fit(cls, params: Params, budget: Budget, shape: ModelShape) -> tuple[Budget, Plan]:
        """The budget's tokens with the largest rank that fits, then with longer chunks; else as many tokens as fit."""
        found = cls.fitting(params, budget, shape)
        if found is not None:
            return found
        least = 1 + largest(1, DIGITS - 1, lambda n: cls.fitting(params, with_memory(budget, n), shape) is None)
        raise too_small(budget, cls.title, Fraction(least, DIGITS))

    @classmethod
    def fitting(cls, params: Params, budget: Budget, shape: ModelShape) -> tuple[Budget, Plan] | None:
        """`fit`, None where nothing does."""
        s, width = budget.s_prompt, shape.h_kv * shape.d_h
        rank, shortest = rank_of(params, s, shape), chunk_of(params, budget.comm)
        lowest = min(rank, max(1, width // LEAST_RANK_SHARE))

        def spare(plan: ShadowKVRules.Plan) -> int:
            return cls.footprint(params, plan, budget, shape).spare(budget, shape)

        for chunk in range(shortest, s // (params.local_chunks + 1) + 1):
            plan = divided(params, budget.tokens, s, chunk, lowest)
            if plan.is_workable and (left := spare(plan)) >= 0:
                of_rank = replace(plan, rank=1).meta_bytes(s, shape)[0]
                return budget, replace(plan, rank=min(rank, lowest + left // of_rank) if chunk == shortest else lowest)
        if s // shortest <= params.local_chunks:
            return None

        def fits(tokens: int) -> bool:
            plan = divided(params, tokens, s, shortest, lowest)
            return plan.n_selected < 1 or spare(plan) >= 0

        tokens = largest(1, budget.tokens, fits)
        plan = divided(params, tokens, s, shortest, lowest)
        fewer = replace(budget, tokens=tokens, nominal_tokens=tokens, ratio=Fraction(tokens, s))
        return (fewer, plan) if plan.is_workable else None


def with_memory(budget: Budget, part: int) -> Budget:
    """The same prompt with so many of `DIGITS` parts of memory, which are the ratio too where none was given."""
    memory = Fraction(part, DIGITS)
    if not budget.memory_alone:
        return replace(budget, memory=memory)
    tokens = floor(memory * budget.s_prompt)
    return replace(budget, memory=memory, tokens=tokens, nominal_tokens=tokens, ratio=memory)


def chunk_of(params: ShadowKVRules.Params, comm: Fraction) -> int:
    """Tokens of a chunk: one landmark each is what `comm` pays for, unless the chunk is native."""
    return params.chunk if params.native or comm == 0 else max(params.chunk, ceil(1 / comm))


def rank_of(params: ShadowKVRules.Params, s: int, shape: ModelShape) -> int:
    width = shape.h_kv * shape.d_h
    rank = round(params.rank_share * width)
    if not 1 <= rank <= min(s, width):
        raise ConfigError(
            f"method.rank_share={show(params.rank_share)} makes a rank of {rank} for keys of {width} numbers and a "
            f"prompt of {s} tokens; it is from 1 to {min(s, width)}"
        )
    return rank


def divided(params: ShadowKVRules.Params, tokens: int, s: int, chunk: int, rank: int) -> ShadowKVRules.Plan:
    """Outliers and selected chunks of a budget, which pays for local tokens too, unless all that comes on top."""
    n_chunks = s // chunk - params.local_chunks
    if params.budget_rule == "official":
        n_outliers, n_selected = params.outlier_chunks, tokens // chunk
    else:
        n_outliers = min(params.outlier_chunks, tokens // (OUTLIER_SHARE * chunk))
        n_selected = (tokens - (s - n_chunks * chunk) - n_outliers * chunk) // chunk
    return ShadowKVRules.Plan(chunk, rank, n_chunks, n_outliers, max(0, n_selected))
