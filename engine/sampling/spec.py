"""What a user may say of sampling, and the seed of each draw: arithmetic, without torch.

Draw j of a prompt has a seed that follows from the run's seed, the prompt's id and j, and from nothing else: every
method draws with the same numbers, whoever else answers and whatever was answered before.

Not here: drawing (`engine/sampling/draws.py`).
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Gt, Le

from kvbench.engine.declared import Count, Is
from kvbench.engine.errors import ConfigError

LOWEST = 0.01  # temperature: below it the rounding of logits decides more than they do, and far below they overflow


@dataclass(frozen=True)
class ZeroOr:
    """0, or some number and more."""

    least: float

    def holds(self, value: float) -> bool:
        return value == 0 or value >= self.least


Temperature = Annotated[float, ZeroOr(LOWEST), Is(f"0 (the likeliest token) or at least {LOWEST}")]
TopP = Annotated[float, Gt(0), Le(1), Is("a probability above 0 and at most 1")]


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; the keys of conf/config.yaml."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: Count | None = None
    n_answers: Count = 1  # for each prompt

    def __post_init__(self) -> None:
        if self.is_greedy:
            given = f"n_answers={self.n_answers}" if self.n_answers > 1 else ""
            given = given or (f"top_p={self.top_p:g}" if self.top_p < 1 else "")
            given = given or (f"top_k={self.top_k}" if self.top_k is not None else "")
            if given:
                raise ConfigError(
                    f"{given} means nothing with temperature=0, which has one answer; give a temperature such as 0.6"
                )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def identity(self) -> dict[str, Any]:
        """The settings that identify a run: those that differ from the defaults."""
        usual = Sampling()
        return {key: value for key, value in vars(self).items() if value != getattr(usual, key)}

    def draws(self) -> list[int | None]:
        """Numbers of a prompt's draws; None where there is one alone."""
        return [None] if self.n_answers == 1 else [*range(self.n_answers)]


def draw_seed(run_seed: int, prompt_id: str, draw: int) -> int:
    """The seed of a draw, below 2**63."""
    digest = hashlib.sha256(f"{run_seed}\n{draw}\n{prompt_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def draw_id(prompt_id: str, draw: int | None) -> str:
    """Id of a draw's line."""
    return prompt_id if draw is None else f"{prompt_id}#{draw}"
