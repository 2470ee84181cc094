"""What KVzip may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/kvzip.py`).
"""

from dataclasses import dataclass

from engine.budget import Budget, BudgetRequest, Frame
from engine.checks import whole_number
from engine.errors import ConfigError
from engine.shapes import ModelShape
from methods.rules.base import Rules
from methods.rules.dropping.allocators import Allocator

LEAST_CHUNK = 16  # tokens; of fewer the request to repeat them is the larger part
REQUEST_TOKENS = 32  # more than any tokenizer makes of the words that ask for a repetition


class KVzipRules(Rules):
    title = "KVzip"
    drops = True
    comparable = "layers"
    is_scorer = True
    is_question_free = True

    @dataclass(frozen=True)
    class Params:
        chunk: int
        overlap: int
        match_published: bool
        first_ids: tuple[int, ...] | None
        next_ids: tuple[int, ...] | None

        def __post_init__(self) -> None:
            whole_number("method.chunk", self.chunk, LEAST_CHUNK)
            whole_number("method.overlap", self.overlap, 0)
            if (self.first_ids is None) != (self.next_ids is None):
                raise ConfigError(
                    "method.first_ids and method.next_ids are one request each, for the first chunk and for the "
                    "others; give both or neither"
                )
            if any(i < 0 for i in (*(self.first_ids or ()), *(self.next_ids or ()))):
                raise ConfigError("method.first_ids and method.next_ids are tokens' ids, each 0 or more")

    @dataclass(frozen=True)
    class Plan:
        """What is kept of the prompt whatever its scores, and how much beside it."""

        frame: Frame
        n_free: int  # tokens of the context per head, mean over heads and layers

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        others = shape.n_own
        if others:
            raise ConfigError(
                f"{others} of {shape.n_layers} layers of {shape.name} are no full attention, or have a state beside "
                "it, and KVzip reads the context again behind the whole cache of all layers; use a model of full "
                "attention alone, or another method"
            )

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        frame = budget.frame
        n_always = frame.n_prefix + frame.n_suffix
        if budget.attends_all:
            return KVzipRules.Plan(frame, budget.tokens - n_always)
        if budget.tokens <= n_always:
            raise ConfigError(
                f"a budget of {budget.tokens} tokens for a prompt of {budget.s_prompt} leaves nothing beside the "
                f"{n_always} tokens of its template and system line, which KVzip always keeps; raise ratio or budget"
            )
        requests = [len(ids) for ids in (params.first_ids, params.next_ids) if ids is not None]
        n_read = min(params.chunk, budget.s_prompt - n_always) + params.overlap + len(frame.postfix_ids)
        n_read += max(requests, default=REQUEST_TOKENS)
        if budget.s_prompt + n_read > shape.window:
            raise ConfigError(
                f"a repetition of method.chunk={params.chunk} tokens behind a prompt of {budget.s_prompt} needs up to "
                f"{budget.s_prompt + n_read} positions, more than the {shape.window} of model {shape.name!r}; use a "
                "smaller method.chunk or shorter prompts"
            )
        return KVzipRules.Plan(frame, budget.tokens - n_always)

    @classmethod
    def own_allocator(cls, params: Params) -> Allocator:
        return Allocator("global")
