"""`Variant`: a method with its parameters, its budget and its integers for prompts of one length.

Not here: the method (`methods/base.py`), what follows from a budget (`methods/rules.py`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.books.audit import checks_all
from engine.budget import Budget
from engine.caches.blocks import BlockCacheSpec
from engine.caches.rebuilt import RebuiltTrace
from engine.keeping import AS_THEY_ARE, Keeping
from engine.observe import Observation
from engine.passes.probe import Probe
from engine.placement import Coder
from engine.prefill import Thinning, Trace
from engine.store import Store
from methods.allocator import UNIFORM, Allocator
from methods.rules import Coding

if TYPE_CHECKING:
    from methods.base import SelectiveAttention


@dataclass(frozen=True)
class Partner:
    """A quantising method that another is composed with.

    What a dropping method keeps becomes codes; of a retrieving one it is what lies on the host, token by token.
    """

    coding: Coding
    plan: Any

    def coder(self) -> Coder:
        return self.coding.rules.coder(self.coding.params, self.plan)  # type: ignore[attr-defined]

    def join(self, row: "SelectiveAttention") -> None:
        """Let the row's store make codes."""
        if not row.drops:
            row.store.host_code = self.coding.token_code()
            return
        row.store.coder = self.coder()
        if self.coding.first:
            exact = row.trace
            row.trace = row.store.trace = exact.once(("rebuilt", self), lambda: RebuiltTrace(exact, self.coder()))


@dataclass(frozen=True)
class Variant:
    """A method, its parameters, its budget and its integers for prompts of one length."""

    method: type["SelectiveAttention"]
    params: Any  # method.Params
    budget: Budget
    plan: Any  # method.Plan
    cache: BlockCacheSpec | None = None  # of a method that retrieves
    allocator: Allocator = UNIFORM  # of a scorer: how layers and heads share the budget
    partner: "Partner | None" = None  # what makes codes of tokens
    keeping: Keeping = AS_THEY_ARE  # what becomes of keys and values that stay
    is_checked: bool = (
        False  # the engine looks at what it selects and counts what it attends to (engine/books/audit.py)
    )

    @property
    def is_full(self) -> bool:
        """Full attention itself: the variant attends to every token, changes none and never evicts one."""
        budget, method = self.budget, self.method
        becomes_codes = method.changes or (self.partner is not None and method.drops)
        is_exact = budget.memory == 1 or (budget.memory is None and not becomes_codes)
        return budget.attends_all and budget.never_evicts and is_exact and not method.adapts(self.params)

    @property
    def checked_for(self) -> str:
        """Whom errors about what it selects name; empty where it is believed."""
        return self.method.title if self.is_checked or checks_all() else ""

    @property
    def observations(self) -> tuple[Observation, ...]:
        own = self.method.observations(self.params, self.plan)
        if self.partner is None:
            return own
        (rules, params, _), plan = self.partner.coding, self.partner.plan
        return own + rules.observations(params, plan)  # type: ignore[attr-defined]

    @property
    def probes(self) -> tuple[Probe, ...]:
        return () if self.is_full else self.method.probes(self.params, self.plan)

    @property
    def thinning(self) -> Thinning | None:
        return self.method.thinning(self.plan)

    def row(self, trace: Trace, n_new: int, store: type[Store] = Store) -> "SelectiveAttention":
        """The method's instance for the sample of this trace, before `build`; `n_new` tokens may follow.

        The `store` is an engine's.
        """
        return self.method(self, trace, n_new, store)
