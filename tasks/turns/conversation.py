"""`Conversation`: several turns on one context, and how they are asked.

A turn is a feed and its answer. In mode `independent` every question is asked after the context alone; in `golden`
after the earlier questions and their references, in `dialogue` after the earlier questions and the model's own
answers. In the last two the first question is part of what is compressed.

A turn may begin with texts that are only read (`reads`): each is a feed of its own, without an answer behind it, and
they count as read for the turn's answer. Of the first turn the first one is compressed with the context.

Not here: how turns become tokens (`encode.py`), how they are asked (`evals/batch/answers.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvbench.engine.errors import ConfigError

Mode = Literal["independent", "golden", "dialogue", "query_aware"]
Feed = Literal["compressed", "tokenwise", "dense"]
Base = Literal["context", "conversation"]


@dataclass(frozen=True)
class Asking:
    """How a task's conversations are asked."""

    mode: Mode = "independent"
    feed: Feed = "compressed"  # what a feed's own tokens attend to, and whether they are read in one pass
    budget_base: Base = "context"  # what a ratio is a share of

    @property
    def takes_back(self) -> bool:
        """Whether no turn stays for the next one to be asked behind it."""
        return self.mode not in ("golden", "dialogue")

    @property
    def label(self) -> str:
        """The label as tables print it: the mode; feed and what a ratio is a share of, where they are not the usual."""
        words = [self.mode] if self.feed == "compressed" else [self.mode, f"{self.feed} feed"]
        return ", ".join(words if self.budget_base == "context" else [*words, "growing budget"])


@dataclass(frozen=True)
class Turn:
    """One question of a conversation."""

    question: str  # as it follows the context, or an earlier answer
    references: tuple[str, ...]
    max_new_tokens: int
    answer_prefix: str = ""  # a cue after the user's turn
    reads: tuple[str, ...] = ()  # before the question, each in a feed of its own
    history: str | None = None  # what later turns find as its answer in `golden`; None: the first reference
    fields: Mapping[str, Any] = field(default_factory=dict)  # columns of the turn's own line

    @property
    def golden(self) -> str:
        return self.history if self.history is not None else (self.references or ("",))[0]


@dataclass(frozen=True)
class Conversation:
    """The turns of a sample."""

    turns: tuple[Turn, ...]
    asking: Asking
    is_rendered: bool = False  # context and questions hold all that stands around them, template and history included
    joint: str = "\n\n"  # between an answer and the next question where no chat template separates them

    def __post_init__(self) -> None:
        if not self.turns:
            raise ConfigError("a conversation has no turns; give each sample at least one question")
        if self.asking.mode == "independent" and any(turn.reads for turn in self.turns):
            raise ConfigError(
                "task.mode=independent asks every question after the context alone, where nothing more is read; use "
                "golden, dialogue or query_aware"
            )


def line_id(sample_id: str, turn: int) -> str:
    """The id of a turn's line; turns count from 1."""
    return f"{sample_id}/{turn}"


def line_ids(sample_id: str, n_turns: int) -> list[str]:
    """The ids of a sample's lines: its own, or one for each turn."""
    return [line_id(sample_id, i) for i in range(1, n_turns + 1)] if n_turns else [sample_id]
