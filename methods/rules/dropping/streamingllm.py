"""What StreamingLLM may be asked for, and what it makes of a budget: arithmetic, without torch.

Not here: the method (`methods/dropping/streamingllm.py`).
"""

from dataclasses import dataclass

from engine.budget import Budget
from engine.checks import tokens
from engine.errors import ConfigError
from engine.shapes import Checkpoint, ModelShape
from methods.rules.base import Rules


class StreamingLLMRules(Rules):
    title = "StreamingLLM"
    drops = True

    @dataclass(frozen=True)
    class Params:
        n_sink: int
        generated: str
        position: str

        def __post_init__(self) -> None:
            tokens("method.n_sink", self.n_sink)
            if self.generated not in ("inside", "on_top"):
                raise ConfigError(
                    f"method.generated={self.generated} is unknown; use inside (rolling) or on_top (static)"
                )
            if self.position not in ("original", "cache"):
                raise ConfigError(f"method.position={self.position} is unknown; use original or cache")

    @dataclass(frozen=True)
    class Plan:
        """What is kept."""

        n_sink: int
        n_recent: int  # the current token included

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
        return StreamingLLMRules.Plan(params.n_sink, budget.tokens - params.n_sink + 1)

    @classmethod
    def uncodable(cls, params: Params) -> str:
        if params.generated == "inside" or params.position == "cache":
            return (
                "StreamingLLM rolls or turns its tokens; use method.generated=on_top method.position=original with it"
            )
        return super().uncodable(params)
