"""StreamingLLM (Xiao et al., 2023): keep the first tokens and the latest ones, drop the middle. No scores.

The first tokens soak up attention that has nowhere to go ("sinks"); with them a window of recent tokens keeps a model
fluent for ever, but whatever lies between is forgotten.

Paper     arXiv:2309.17453, 2023; Xiao, Guangxuan; Efficient Streaming Language Models with Attention Sinks
Symbols   paper: attention sinks, recent tokens = `n_sink`, `n_recent` (current token included).
Per step  moved: nothing; resident: h_kv * (n_sink + n_recent) tokens, all heads and layers alike.
Differs   keys keep their positions (`position: original`), the only form that equals full attention at ratio 1. The
          paper numbers tokens by their slot in the cache (`position: cache`). Recent tokens have the same distances
          either way; only the sinks come nearer, so the query is turned back for the sinks instead of turning keys.
Fails     on everything that must be looked up in the middle of the prompt.
Figures   drop by place or chance: #8C49D0, square, -
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.budget import Budget
from kvbench.engine.declared import Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import Kept, Stay
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.scorers import keep_top
from kvbench.methods.traits import Traits


class StreamingLLM(SelectiveAttention):
    title = "StreamingLLM"
    drops = True

    @dataclass(frozen=True)
    class Params:
        n_sink: Tokens
        generated: Literal["inside", "on_top"]
        position: Literal["original", "cache"]

    @dataclass(frozen=True)
    class Plan:
        """How many tokens are kept."""

        n_sink: int
        n_recent: int  # the current token included

    params: Params
    plan: Plan

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        rolls = "StreamingLLM rolls or turns its tokens; use method.generated=on_top method.position=original with it"
        turns, is_still = params.position == "cache", params.generated != "inside" and params.position != "cache"
        by_place = "its queries are turned for the tokens that are there; use method.position=original"
        return replace(
            super().traits_of(params),
            extends=not turns,
            turns_queries="method=streamingllm with method.position=cache" if turns else "",
            unreadable=by_place if turns else "",
            uncodable="" if is_still else rolls,
            unchangeable="" if is_still else rolls,
        )

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        if params.position == "cache" and not model.n_rotary:
            raise ConfigError("method.position=cache needs a model with rotary positions; use method.position=original")

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if budget.tokens <= params.n_sink and not budget.attends_all:
            raise ConfigError(
                f"a budget of {budget.tokens} tokens for a prompt of {budget.s_prompt} leaves nothing beside "
                f"method.n_sink={params.n_sink} sinks; raise ratio or budget, or lower method.n_sink"
            )
        return StreamingLLM.Plan(params.n_sink, budget.tokens - params.n_sink + 1)

    def extend(self, layer: int, q: Tensor, grown: Variant) -> Stay:
        """The sinks and the last tokens of what is held stay; answers come on top until the next feed."""
        at, self.plan = self.store[layer], grown.plan
        positions = at.positions()
        n = min(positions.shape[-1], self.plan.n_sink + self.plan.n_recent - 1)
        worth = positions.float().masked_fill(positions < self.plan.n_sink, torch.inf)
        return Stay(keep_top(worth, n), self.store.n_new - (at.n_seen - self.trace.s_prompt))

    def arrange(self, layer: int) -> Kept:
        n_past = min(self.plan.n_recent - 1, self.trace.s_prompt - self.plan.n_sink)
        rolls = self.params.generated == "inside"
        return Kept(self.plan.n_sink, n_past, self.plan.n_recent if rolls else None)

    def protected(self, layer: int) -> Sequence[int]:
        n = self.store[layer].n_seen
        return [*range(self.plan.n_sink), *range(max(self.plan.n_sink, n - self.plan.n_recent), n)]

    @property
    def is_still(self) -> bool:
        return self.variant.is_full or self.params.position == "original"

    @property
    def is_stored(self) -> bool:
        return self.is_still

    def resident(self, layer: int, q: Tensor) -> list[Part]:
        parts = self.store[layer].resident()
        if self.is_still:
            return parts
        sinks, window = self.store[layer].kept_and_window()
        n_gone = self.store[layer].n_seen - sinks.k.shape[2] - window.k.shape[2]
        assert self.trace.turn is not None, "`check_model` lets no model without rotary positions pass"
        return [replace(sinks, q=self.trace.turn[layer](q, -n_gone)), window] if n_gone else parts
