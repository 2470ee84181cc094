"""`SelectiveAttention`: the one interface that every method implements, and the parts that all of them share.

An instance is one variant on one sample. Its life: `build` once per layer as soon as the prompt's K and V are there;
then, at every decode step and layer, the current token is appended to the window, `select` says which tokens to fetch
for this query, and attention runs over what is resident and what was fetched. A typical method therefore writes two
functions: `arrange`, where the prompt's tokens go, and `select`, if it retrieves.

A dropping method calls `store.keep` in `arrange` and writes no `select`. A retrieving method calls `store.offload` and
returns positions from `select`. Either may leave single layers whole with `store.keep_all`.

Heavy work may start a thread in `arrange` and wait for it in `select`. Work that variants of one method can share goes
through `trace.once`. A method that can score many rows at once overrides `select_rows`.

Not here: any method.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from engine.attend import Part
from engine.blocks import BlockCacheSpec
from engine.budget import Budget, BudgetRequest, resolve
from engine.observe import Observation
from engine.prefill import Thinning, Trace
from engine.shapes import ModelShape
from engine.spans import span
from engine.store import Store


class SelectiveAttention(ABC):
    title: ClassVar[str]  # as tables print it
    version: ClassVar[int] = 1  # raised whenever its answers change; part of a run's identity
    drops: ClassVar[bool]  # True: dropped tokens are gone, and `comm` is paid back as tokens; False: it retrieves
    Params: ClassVar[type]  # frozen dataclass of the method's own parameters, checked in its __post_init__
    wants_weights: bool = False  # True: `after_attention` gets the weights, at the price of slower attention
    wants_lookahead: bool = False  # True: `select` finds `q_ahead`
    q_ahead: Tensor  # (1, h, 1, d_h), the query that the layer below foretells
    pads: ClassVar[bool] = False  # True: `select` may return -1 for "no token"
    thins: ClassVar[bool] = False  # True: it has a prefill of its own, as `thinning` says
    search_is_free: ClassVar[bool] = False  # True: it reads more than any `comm` allows and is labelled so

    def __init__(
        self,
        params: Any,
        request: BudgetRequest,
        trace: Trace,
        n_new: int,
        cache: BlockCacheSpec | None = None,
    ) -> None:
        self.params = params
        self.trace = trace
        self.budget = self.budget_for(request, trace.s_prompt)
        self.plan = self.plan_for(params, self.budget, trace.shape)
        self.store = Store(trace, n_new, cache)

    @classmethod  # noqa: B027
    def check(cls, params: Any, request: BudgetRequest, shape: ModelShape) -> None:
        """Raise `ConfigError` where this configuration cannot be met by a model of this shape."""

    @classmethod  # noqa: B027
    def check_cache(cls, params: Any, cache: BlockCacheSpec) -> None:
        """Raise `ConfigError` where the method cannot work with this cache of blocks."""

    @classmethod
    def budget_for(cls, request: BudgetRequest, s_prompt: int) -> Budget:
        """What the method gets of a prompt."""
        return resolve(request, s_prompt, cls.drops)

    @classmethod
    def plan_for(cls, params: Any, budget: Budget, shape: ModelShape) -> Any:
        """The method's integers for one prompt, kept as `plan`; `ConfigError` where the budget is too small for them.

        The runner calls it for every prompt before the first prefill.
        """
        return None

    @classmethod
    def observations(cls, params: Any, plan: Any) -> tuple[Observation, ...]:
        """What the prefill has to observe for this method, given its integers for the prompt."""
        return ()

    @classmethod
    def thinning(cls, plan: Any) -> Thinning | None:
        """What leaves the pass over the prompt, for methods with a prefill of their own; None: they share one."""
        return None

    @classmethod
    def label(cls, params: Any, request: BudgetRequest) -> str:
        """The method's name in tables; "(C)" says that a dropping method was compensated for `comm`."""
        compensated = cls.drops and request.compensate and request.comm > 0
        return f"{cls.title} (C)" if compensated else cls.title

    def build(self, layer: int) -> None:
        """Take over a layer of the prompt; with the whole prompt in the budget everything stays for good."""
        if self.budget.is_full:
            self.store.keep_all(layer)
        else:
            self.arrange(layer)

    def complete(self) -> None:
        """Every layer was built."""
        if not self.budget.is_full:
            self.arrange_rest()

    @abstractmethod
    def arrange(self, layer: int) -> None:
        """Say where the prompt's tokens of this layer go: `store.keep`, `store.offload` or `store.keep_all`."""

    def arrange_rest(self) -> None:  # noqa: B027
        """Place what `arrange` left, for methods that divide a budget over layers once they have seen all of them."""

    def exempt_layers(self) -> Sequence[int]:
        """Layers that the method leaves whole on purpose; its budget is checked on the others."""
        return ()

    def protected(self, layer: int) -> Sequence[int]:
        """Positions that this method promises to attend to at the step just made, whatever the query."""
        return ()

    def select(self, layer: int, q: Tensor) -> Tensor | None:
        """Positions to fetch for this query (1, h, 1, d_h): (1, h_kv or h, k) without repeats, or None."""
        return None

    @classmethod
    def select_rows(cls, rows: Sequence["SelectiveAttention"], layer: int, q: Tensor) -> list[Tensor | None]:
        """`select` for all rows of this class at once; q is (n, h, 1, d_h)."""
        return [row.select(layer, q[i : i + 1]) for i, row in enumerate(rows)]

    def resident(self, layer: int, q: Tensor) -> list[Part]:
        """What is attended to without a fetch."""
        return self.store[layer].resident()

    @classmethod
    def step_rows(
        cls,
        rows: Sequence["SelectiveAttention"],
        layer: int,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
    ) -> list[list[Part]]:
        """Append the current token of every row, select, fetch: the parts that each row attends to."""
        with span("append", layer):
            for i, row in enumerate(rows):
                row.store[layer].append(k_new[i : i + 1], v_new[i : i + 1])
        parts = [row.resident(layer, q[i : i + 1]) for i, row in enumerate(rows)]
        asking = [i for i, row in enumerate(rows) if row.store[layer].can_fetch]
        if asking:
            with span("search", layer):
                asked = cls.select_rows([rows[i] for i in asking], layer, q if len(asking) == len(rows) else q[asking])
            with span("fetch", layer):
                for i, idx in zip(asking, asked, strict=True):
                    if idx is not None:
                        parts[i] = [*parts[i], rows[i].store[layer].fetch(idx, cls.pads)]
        return parts

    def after_attention(self, layer: int, out: Tensor, weights: Tensor | None) -> Tensor:
        """The layer's output (1, h, 1, d_h), for methods that correct it or learn from the weights (1, h, s)."""
        return out

    def report(self) -> dict[str, Any]:
        """What the method has to say of this sample, as JSON; stands in its line as `method_report` where not empty."""
        return {}

    def shortened(self) -> dict[str, Any]:
        """For the sample's `method_report`: the number of sinks, where the budget left room for fewer."""
        asked, got = getattr(self.params, "n_sink", None), getattr(self.plan, "n_sink", None)
        if asked is None or got is None or got >= asked or self.budget.is_full:
            return {}
        return {"n_sink": got}
