"""`Rules`: the half of a method's interface that needs no tensors, and so no torch.

A method's traits and parameters, and the integers that follow from its budget. `SelectiveAttention` inherits from it,
so that a method in one file writes all of this into its own class. What is the same for all stands behind the class.

Not here: what cannot be asked together (`methods/combinations.py`), what a method does with tokens
(`methods/base.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar, NamedTuple

from kvbench.engine.books.footprint import Footprint, TooSmall, far_bytes, largest, too_small
from kvbench.engine.budget import NO_FRAME, Budget, BudgetRequest, Frame, resolve, show, token_bytes
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.methods.combinations import KINDS, Case, refuse
from kvbench.methods.traits import Traits, declared

INDEX_PARTS = 32  # an index that is too large is made smaller by so many steps


class Quantizer(NamedTuple):
    """The method that makes codes in a composition."""

    rules: "type[QuantisingRules]"
    params: Any
    first: bool = False  # True: before a dropping method looks at K and V

    def token_code(self) -> TokenCode | None:
        return self.rules.token_code(self.params)

    def title(self, drops: bool) -> str:
        """Words that follow the name of a method that drops, or retrieves."""
        code = None if drops else self.token_code()
        if code is not None:
            return code.title
        return f"{self.rules.title_of(self.params)}{' first' if self.first else ''}"


def refuse_cap(shape: ModelShape, what: str, instead: str) -> None:
    """Refuse `what` adds up logits of a model that bends them: their sum is no product with a sum."""
    if shape.is_capped:
        raise ConfigError(f"{what}, and the model {shape.name!r} caps its logits, whose sum is another; use {instead}")


@dataclass(frozen=True)
class NoParams:
    """Parameters of a method that has nothing to set."""


class Rules:
    title: ClassVar[str]  # as tables print it
    version: ClassVar[int] = 1  # raised whenever its answers change; part of a run's identity
    traits: ClassVar[Traits] = Traits()  # a line of the class for each that is not the usual: `drops = True`
    Params: ClassVar[type] = NoParams  # frozen dataclass of the method's own parameters, each with its range

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.traits = declared(cls)

    @classmethod
    def traits_of(cls, params: Any) -> Traits:
        """`traits` with these parameters."""
        is_wide = "query_head" in (getattr(params, "reduce", None), getattr(params, "index_scope", None))
        return replace(cls.traits, is_query_wide=is_wide)

    @classmethod
    def check(cls, params: Any, request: BudgetRequest, shape: ModelShape) -> None:
        """Raise `ConfigError` where this configuration cannot be met by a model of this shape."""

    @classmethod
    def check_model(cls, params: Any, model: Checkpoint) -> None:
        """Raise `ConfigError` where this configuration cannot be met by this very model, whatever the prompt.

        As `check`, it is asked before any folder is made: what only the model's files tell is refused here.
        """

    @classmethod
    def check_cache(cls, params: Any, cache: BlockCacheSpec) -> None:
        """Raise `ConfigError` where the method cannot work with this cache of blocks."""

    @classmethod
    def data_digest(cls, params: Any) -> str | None:
        """A hash of the files that parameters name, which is part of a run's identity; None without any."""
        return None

    @classmethod
    def budget_for(cls, params: Any, request: BudgetRequest, s_prompt: int) -> Budget:
        """The budget that the method gets for a prompt of this length."""
        return resolve(request, s_prompt, cls.traits.drops)

    @classmethod
    def plan_for(cls, params: Any, budget: Budget, shape: ModelShape) -> Any:
        """The method's integers for prompts of one length; `ConfigError` where the budget is too small for them.

        It is asked once per variant and prompt length, before the first prefill.
        """
        return None

    @classmethod
    def fit(cls, params: Any, budget: Budget, shape: ModelShape) -> tuple[Budget, Any]:
        """Budget and integers that `budget.memory` pays for: those of as many tokens as fit, and the budget's at most.

        A method whose bytes depend on more than tokens has its own order of what it tries.
        """
        return fitted(cls, params, budget, shape)

    @classmethod
    def fit_with_index(cls, params: Any, budget: Budget, shape: ModelShape) -> tuple[Budget, Any]:
        """`fit` where `comm` is off: the budget's tokens, and in addition the published index or the largest."""
        return fitted_with_index(cls, params, budget, shape)

    @classmethod
    def index_comm(cls, params: Any, budget: Budget, shape: ModelShape) -> Fraction:
        """The `comm` that pays for the method's index as it was published: its index where `comm` is off."""
        return Fraction(1, 64)

    @classmethod
    def footprint(cls, params: Any, plan: Any, budget: Budget, shape: ModelShape) -> Footprint:
        """Footprint on the device right after the prompt; `ConfigError` where nothing can be moved away from there."""
        if not cls.traits.drops:
            asked = show(budget.given or budget.memory or Fraction(1))
            raise ConfigError(
                f"memory={asked} needs a tier to move to, and {cls.title} says of none what is left on the device; use "
                "ratio, or memory=1"
            )
        wide = shape.g if cls.traits_of(params).is_query_wide else 1
        return Footprint(budget.tokens * wide * token_bytes(shape), n_whole=len(cls.whole_layers(params, shape)))

    @classmethod
    def whole_layers(cls, params: Any, shape: ModelShape) -> Sequence[int]:
        """Layers that the method leaves whole on purpose; its budget is checked on the others."""
        n = params.full_layers if cls.traits.skips else 0
        return [layer for layer in shape.attention_layers if layer < n]

    @classmethod
    def cycle(cls, plan: Any, s_prompt: int) -> tuple[int, int]:
        """Steps before the first that is as any later one, and after how many steps the same comes again."""
        return 0, 1

    @classmethod
    def chosen(cls, report: Mapping[str, Any]) -> str:
        """Words after the label: what a byte budget chose for a prompt, such as its bits, from `report`; or ""."""
        return ""

    @classmethod
    def label(cls, params: Any, request: BudgetRequest) -> str:
        """The method's name in tables; "(C)" says that a dropping method was compensated for `comm`."""
        compensated = cls.traits.drops and request.compensates and bool(request.comm)
        return f"{cls.title} (C)" if compensated else cls.title


class QuantisingRules(Rules):
    """What a method says that makes codes, for itself or for another one."""

    @classmethod
    def check_shape(cls, params: Any, shape: ModelShape) -> None:
        """Raise `ConfigError` where it cannot pack heads of this shape."""

    @classmethod
    def title_of(cls, params: Any) -> str:
        """The method's name, with its bits."""
        return cls.title

    @classmethod
    def code_bytes(cls, plan: Any, n: int, shape: ModelShape) -> int:
        """Bytes of a layer's first `n` tokens."""
        raise NotImplementedError(cls.title)

    @classmethod
    def token_code(cls, params: Any) -> TokenCode | None:
        """How it packs a token that lies on the host; None where it cannot."""
        return None


def planned(
    rules: type[Rules], params: Any, request: BudgetRequest, shape: ModelShape, s_prompt: int,
    cache: BlockCacheSpec | None = None, frame: Frame = NO_FRAME, quantizer: Quantizer | None = None,
) -> tuple[Budget, Any, BlockCacheSpec | None]:  # fmt: skip
    """Budget, integers and block cache for prompts of `s_prompt` tokens; `ConfigError` where nothing fits."""
    refuse(KINDS, Case(rules, params, shape=shape, quantizer=quantizer))
    if quantizer is not None and (whole := quantizer.rules.whole_layers(quantizer.params, shape)):
        raise ConfigError(
            f"{quantizer.rules.title} leaves layer {whole[0]} whole, and would code all of what {rules.title} keeps; "
            "name no layers in what it is composed with"
        )
    request = request.on(shape, s_prompt)
    if request.compensates:
        request = replace(request, key_share=shape.key_share)
    if quantizer is not None and rules.traits.drops:
        return *composed(rules, params, request, shape, s_prompt, frame, quantizer), cache
    code = None if quantizer is None else quantizer.token_code()
    budget = replace(rules.budget_for(params, request, s_prompt), frame=frame, host_code=code)
    has_free_index = budget.finds_freely and not rules.traits.drops
    if has_free_index:
        budget = replace(budget, comm=rules.index_comm(params, budget, shape))
    if budget.memory is None or (budget.memory == 1 and budget.attends_all):
        return budget, rules.plan_for(params, budget, shape), cache
    fit = rules.fit_with_index if has_free_index else rules.fit
    budget, plan = fit(params, budget, shape)
    if cache is not None and cache.tokens:
        spare = rules.footprint(params, plan, budget, shape).spare(budget, shape)
        n_blocks = min(cache.tokens, spare // far_bytes(budget, shape)) // cache.block_len
        cache = replace(cache, tokens=n_blocks * cache.block_len)
    return budget, plan, cache


def composed(
    rules: type[Rules], params: Any, request: BudgetRequest, shape: ModelShape, s_prompt: int, frame: Frame,
    quantizer: Quantizer,
) -> tuple[Budget, Any]:  # fmt: skip
    """Budget and integers where the tokens that stay become codes: as many as `ratio` says and as fit in bytes."""
    budget = replace(rules.budget_for(params, request, s_prompt), frame=frame)
    if budget.memory is None or (budget.memory == 1 and budget.attends_all):
        return budget, rules.plan_for(params, budget, shape)
    packed_by, n = quantizer.rules, budget.tokens
    plan = packed_by.plan_for(quantizer.params, budget, shape)
    if request.memory_alone:
        n = s_prompt
    while n and not Footprint(packed_by.code_bytes(plan, n, shape)).fits(budget, shape):
        n -= 1  # one by one: a block of keys is smaller once it is full
    if n < 1:
        least = Fraction(packed_by.code_bytes(plan, 1, shape), s_prompt * token_bytes(shape))
        raise too_small(budget, rules.title, least)
    budget = replace(budget, tokens=n, nominal_tokens=n, ratio=Fraction(n, s_prompt))
    return budget, rules.plan_for(params, budget, shape)


def fitted(rules: type[Rules], params: Any, budget: Budget, shape: ModelShape) -> tuple[Budget, Any]:
    """`Rules.fit` where bytes follow from tokens."""

    def with_tokens(n: int) -> Budget:
        if n == budget.tokens:
            return budget
        return replace(budget, tokens=n, nominal_tokens=n, ratio=Fraction(n, budget.s_prompt))

    def held(n: int) -> Footprint | None:
        """Footprint of so many tokens; None where they are too few for a plan."""
        try:
            plan = rules.plan_for(params, with_tokens(n), shape)
        except ConfigError:
            return None
        return rules.footprint(params, plan, with_tokens(n), shape)

    def fits(n: int) -> bool:
        bytes_of = held(n)
        return bytes_of is None or bytes_of.fits(budget, shape)

    n = budget.tokens if fits(budget.tokens) else largest(1, budget.tokens, fits)
    if n < 1 or held(n) is None:
        s = budget.s_prompt
        # One token less than the fewest that make a plan is the most that make none.
        fewest = largest(1, s, lambda n: held(n) is None) + 1
        least = held(min(fewest, s))
        if least is None:
            rules.plan_for(params, budget, shape)  # says what else is wrong
            raise too_small(budget, rules.title, Fraction(1))
        raise too_small(budget, rules.title, max(Fraction(fewest, s), least.share(shape, s)))
    return with_tokens(n), rules.plan_for(params, with_tokens(n), shape)


def fitted_with_index(rules: type[Rules], params: Any, budget: Budget, shape: ModelShape) -> tuple[Budget, Any]:
    """`Rules.fit_with_index`: with the published index, or the largest one that there is room for.

    Where no index leaves room for the budget's tokens, it is the largest that costs at most half of those that the
    smallest leaves.
    """
    published, errors = budget.comm, list[ConfigError]()

    def with_index(part: int) -> tuple[Budget, Any] | None:
        """Budget and plan with so many parts of the published index; None where there is no room."""
        try:
            share = Fraction(part, INDEX_PARTS)
            return rules.fit(params, replace(budget, comm=published * share, index_share=share), shape)
        except ConfigError as error:
            errors.append(error)
            return None

    found = with_index(INDEX_PARTS)
    if found is not None and found[0].tokens >= budget.tokens:
        return found
    every = [fitted for part in range(INDEX_PARTS, 0, -1) if (fitted := with_index(part)) is not None]
    if not every:
        by_bytes = [error for error in errors if isinstance(error, TooSmall)]
        raise min(by_bytes, key=lambda error: error.smallest) if by_bytes else errors[0]
    most = max(fitted.tokens for fitted, _ in every)
    enough = most if most >= budget.tokens else ceil(most / 2)
    return next(fitted for fitted in every if fitted[0].tokens >= enough)
