"""The order to a vLLM process: `Order`, in the environment as JSON, since every process of an engine inherits that.

The method is asked for in the words of `run.py`, and read from the same conf. Without an order the plugin registers
nothing.

Not here: whether a method can be served (`serving/rehearsal.py`), vLLM (`serving/adapter`).
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import Any, ClassVar

from kvbench.engine.budget import NO_FRAME
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals.cells import Cell, Lookups, ask_one
from kvbench.evals.models import look_up
from kvbench.evals.refusals import naming
from kvbench.evals.settings import Settings, from_words, load_class
from kvbench.methods.base import Variant
from kvbench.methods.combinations import SERVING, TABLE, refusals

VARIABLE = "KVBENCH_SERVING"
VISIBLE, PAGES, DROPPING = RUNGS = ("visible", "pages", "dropping")


class Unserved(ConfigError):
    """A method that vLLM's pages cannot serve, and why: one sentence."""


@dataclass(frozen=True)
class Order:
    """A method on a rung."""

    words: tuple[str, ...]  # as run.py takes them
    rung: str  # of RUNGS
    slack: int | None = None  # of dropping: tokens that an answer may add before others leave; None: all of it stays
    ranks: int = 1  # workers that share the heads
    chains: int = 0  # conversations whose compressed state is kept for a next turn

    @classmethod
    def given(cls) -> "Order | None":
        """The order of this process; None where there is none."""
        text = os.environ.get(VARIABLE)
        return read_order(text) if text else None

    def give(self) -> None:
        """Ask this process, and all that it starts."""
        os.environ[VARIABLE] = json.dumps(asdict(self))

    @staticmethod
    def take_back() -> None:
        os.environ.pop(VARIABLE, None)

    @cached_property
    def chosen(self) -> "Chosen":
        return chosen(self.words)

    @cached_property
    def variant(self) -> Callable[[int], Variant]:
        """The method on prompts of so many tokens, with the heads of one worker."""
        shape, n = self.chosen.shape, self.ranks
        if shape.h_kv % n:
            raise ConfigError(f"the model {shape.name!r} has {shape.h_kv} KV heads, which {n} workers cannot share")
        own = replace(shape, h=shape.h // n, h_kv=shape.h_kv // n)
        return cache(lambda s_prompt: self.chosen.variant(s_prompt, own))

    def most_slots(self, s_prompt: int, n_tokens: int) -> int:
        """Slots that a head needs on the dropping rung, with so many tokens in all; the prompt is placed.

        Scheduler and workers ask it each for itself.
        """
        variant, n_new = self.variant(s_prompt), n_tokens - s_prompt
        if variant.is_full:
            return n_tokens
        return min(n_tokens, variant.budget.tokens + (n_new if self.slack is None else min(n_new, self.slack)))

    def moves(self, s_prompt: int) -> bool:
        """Whether a prompt's tokens leave their pages."""
        return self.rung == DROPPING and not self.variant(s_prompt).is_full

    def most_shared(self, s_prompt: int) -> int:
        """Tokens of a prompt that a prefix cache may hand on: those whose queries the method does not look at.

        The last one is always read, since the method takes the prompt over in the pass that does.
        """
        looks = [what.looks_at for what in self.variant(s_prompt).observations]
        return 0 if None in looks else max(0, s_prompt - max((1, *(n for n in looks if n is not None))))


@cache
def read_order(text: str) -> Order:
    """The order in a variable's text; one object, so that what it looks up is looked up once."""
    found = json.loads(text)
    return Order(**found | {"words": tuple(found["words"])})


@dataclass(frozen=True)
class Note:
    """What the scheduler lets a worker know of a request, in a place that vLLM leaves to others."""

    s_prompt: int | None = None  # tokens that are read exactly; None: the whole prompt
    chain: str | None = None  # the request that this one goes on from
    kept: Sequence[str] = ()  # those that others may still go on from

    KEY: ClassVar[str] = "kvbench"

    @classmethod
    def of(cls, params: Any) -> "Note":
        """The note in a request's sampling parameters."""
        return cls(**(params.extra_args or {}).get(cls.KEY, {}))

    def write(self, params: Any) -> None:
        params.extra_args = (params.extra_args or {}) | {self.KEY: asdict(self)}


@dataclass(frozen=True)
class Chosen:
    """The method and settings that the words choose."""

    settings: Settings
    cell: Cell
    shape: ModelShape

    @property
    def label(self) -> str:
        """The method and its budget, as `/v1/models` and tables have them."""
        method, budget = self.settings.method.name, self.settings.budget.label()
        return f"{method} {budget}" if self.cell.traits.has_budget else method

    def variant(self, s_prompt: int, shape: ModelShape | None = None) -> Variant:
        """`ConfigError` where the budget is too small for so few tokens."""
        cell, settings = self.cell, self.cell.settings
        with naming(settings):
            kind: Any = load_class(settings.method)
            more = settings.cache, settings.allocator, NO_FRAME
            return kind.variant_for(cell.params, settings.budget, shape or self.shape, s_prompt, *more)


def chosen(words: Sequence[str]) -> Chosen:
    """What words of `run.py` choose; `ConfigError` where they are wrong, or say what no serving engine does."""
    settings = from_words([*words])
    cell = ask_one(settings, Lookups())
    refuse(replace(cell, settings=settings))
    return Chosen(settings, cell, look_up(settings))


def refuse(cell: Cell, rung: str | None = None) -> None:
    """`Unserved` where a cell asks for what a serving engine, or a rung of it, has no place for."""
    for _, sentence in refusals(TABLE, cell.case(rung=rung), SERVING):
        raise Unserved(sentence)
