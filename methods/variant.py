"""`Variant`: a method with its parameters, its budget and its integers for prompts of one length.

Not here: the method (`methods/base.py`), what follows from a budget (`methods/rules`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.budget import Budget
from engine.caches.blocks import BlockCacheSpec
from engine.observe import Observation
from engine.passes.probe import Probe
from engine.prefill import Thinning, Trace
from engine.store import Coder
from methods.rules.dropping.allocators import UNIFORM, Allocator

if TYPE_CHECKING:
    from methods.base import SelectiveAttention


@dataclass(frozen=True)
class Partner:
    """A quantising method that a dropping one is composed with: what the one keeps becomes the codes of the other."""

    method: type["SelectiveAttention"]
    params: Any
    plan: Any

    def coder(self) -> Coder:
        return self.method.coder(self.params, self.plan)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Variant:
    """A method, its parameters, its budget and its integers for prompts of one length."""

    method: type["SelectiveAttention"]
    params: Any  # method.Params
    budget: Budget
    plan: Any  # method.Plan
    cache: BlockCacheSpec | None = None  # of a method that retrieves
    allocator: Allocator = UNIFORM  # of a scorer: how layers and heads share the budget
    partner: "Partner | None" = None  # what makes codes of the tokens that the method keeps

    @property
    def is_full(self) -> bool:
        """Full attention itself: the variant attends to every token, changes none and never evicts one."""
        budget = self.budget
        is_exact = budget.memory == 1 or (budget.memory is None and not (self.method.changes or self.partner))
        return budget.attends_all and budget.never_evicts and is_exact

    @property
    def observations(self) -> tuple[Observation, ...]:
        return self.method.observations(self.params, self.plan)

    @property
    def probes(self) -> tuple[Probe, ...]:
        return () if self.is_full else self.method.probes(self.params, self.plan)

    @property
    def thinning(self) -> Thinning | None:
        return self.method.thinning(self.plan)

    def row(self, trace: Trace, n_new: int) -> "SelectiveAttention":
        """The method's instance for the sample of this trace, before `build`; `n_new` tokens may follow."""
        return self.method(self, trace, n_new)
