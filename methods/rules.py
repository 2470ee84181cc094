"""`Rules`: the half of a method's interface that needs no tensors, and so no torch.

A method's parameters, what it refuses, and the integers that follow from its budget. `SelectiveAttention` inherits
from it, so that a method in one file writes all of this into its own class.

Not here: what a method does with tokens (`methods/base.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar, NamedTuple

from kvbench.engine.books.footprint import Footprint, TooSmall, far_bytes, largest, too_small
from kvbench.engine.budget import NO_FRAME, Budget, BudgetRequest, Frame, resolve, show, token_bytes
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.errors import ConfigError
from kvbench.engine.post_processing import AS_THEY_ARE, PostProcessing
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.methods.allocator import Allocator

# What scores mean the same in, from least to most; "set": all heads of a layer keep one set of tokens.
COMPARABLE = ("none", "set", "heads", "layers")
INDEX_PARTS = 32  # an index that is too large is made smaller by so many steps


class Quantizer(NamedTuple):
    """The method that makes codes in a composition."""

    rules: "type[Rules]"
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
    drops: ClassVar[bool]  # True: dropped tokens are gone, and `comm` is paid back as tokens; False: it retrieves
    Params: ClassVar[type] = NoParams  # frozen dataclass of the method's own parameters, each with its range
    takes: ClassVar[tuple[str, ...]] = ("ratio", "memory")  # a share of tokens; of bytes; "answer": prompt and answer
    has_budget: ClassVar[bool] = True  # False: ratio, budget, comm and cache mean nothing to it; it runs once per sweep
    skips: ClassVar[bool] = False  # True: it leaves the first `params.full_layers` layers whole
    changes: ClassVar[bool] = False  # True: what it keeps is not what the model made, such as codes
    composes: ClassVar[bool] = False  # True: it can make codes for another method (`compose=`)
    packs_host: ClassVar[bool] = False  # True: what it fetches may lie on the host as codes; it searches elsewhere
    prunes_prompt: ClassVar[bool] = False  # True: it has a prefill of its own, as `pruning` says
    comparable: ClassVar[str] = "none"  # scores of a dropping method: over which of COMPARABLE they may be pooled
    is_scorer: ClassVar[bool] = False  # True: it scores tokens, and any allocator may divide its budget
    is_question_free: ClassVar[bool] = False  # True: made for contexts without their question, and labelled elsewhere
    keeps_budget_in: ClassVar[str] = "step"  # "mean": selections are random, and steps hold the budget in the mean
    rolls_back: ClassVar[bool] = True  # False: its state lies where `fork_of` cannot copy it, and no turn can be undone
    of_answers: ClassVar[bool] = False  # True: its budget is of prompt and answer together, and `comm` means nothing
    fetches_more: ClassVar[bool] = False  # True: what leaves the window is searched as the prompt is, for any number
    no_growth: ClassVar[str] = ""  # why its budget cannot grow with a conversation, where `extends` says so
    reads_inputs: ClassVar[bool] = False  # True: it observes what attention modules are called with
    judges: ClassVar[str] = ""  # of a scorer: by what it scores a single new token, "keys" or "input"; "": it cannot
    no_widths: ClassVar[str] = ""  # why it makes no sense where keys and values have other widths; "": it does
    no_latents: ClassVar[str] = ""  # why it makes no sense where a token is one latent for all heads
    eager: ClassVar[str] = ""  # what its steps do that no CUDA graph of a whole step could hold; "": nothing
    attends_current: ClassVar[bool] = True  # False: the current token has to be selected like all others

    @classmethod
    def comparable_over(cls, params: Any) -> str:
        """`comparable`, where it depends on parameters."""
        return cls.comparable

    @classmethod
    def extends(cls, params: Any) -> bool:
        """Whether `extend` holds a budget that grows with a conversation."""
        return not cls.has_budget or cls.fetches_more

    @classmethod
    def unreadable(cls, params: Any) -> str:
        """Why a prompt cannot be read in chunks with eviction between them (`prefill.evict`); "" where it can."""
        if cls.prunes_prompt:
            return f"{cls.title} has a prefill of its own"
        if cls.of_answers:
            return f"{cls.title} compresses while it answers"
        return f"{cls.title} chooses by the whole prompt" if cls.drops else f"{cls.title} drops no tokens"

    @classmethod
    def in_chunks(cls, params: Any) -> Any:
        """The parameters with which it reads a prompt so."""
        return params

    @classmethod
    def reads_in_chunks(cls, params: Any) -> bool:
        """Whether these parameters are of such a prompt alone."""
        return False

    @classmethod
    def asks_question(cls, params: Any) -> bool:
        """Whether it has to know where in the prompt the question begins."""
        return False

    @classmethod
    def adapts(cls, params: Any) -> bool:
        """Whether how much stays follows from each prompt alone: ratio, budget and comm mean nothing to it then.

        Tables have such a run at what it attended to, and at no ratio.
        """
        return False

    @classmethod
    def check(cls, params: Any, request: BudgetRequest, shape: ModelShape) -> None:
        """Raise `ConfigError` where this configuration cannot be met by a model of this shape."""
        if cls.skips and params.full_layers > max(shape.attention_layers):
            raise ConfigError(
                f"method.full_layers={params.full_layers} leaves no layer of {shape.name} to compress; "
                f"use at most {max(shape.attention_layers)}"
            )

    @classmethod
    def check_model(cls, params: Any, model: Checkpoint) -> None:
        """Raise `ConfigError` where this configuration cannot be met by this very model, whatever the prompt.

        As `check`, it is asked before any folder is made: what only the model's files tell is refused here.
        """

    @classmethod
    def data_digest(cls, params: Any) -> str | None:
        """A hash of the files that parameters name, which is part of a run's identity; None without any."""
        return None

    @classmethod
    def check_cache(cls, params: Any, cache: BlockCacheSpec) -> None:
        """Raise `ConfigError` where the method cannot work with this cache of blocks."""

    @classmethod
    def check_allocator(cls, params: Any, allocator: Allocator) -> None:
        """Raise `ConfigError` where the method's budget cannot be divided so."""
        asked, name = f"allocator={allocator.name}", allocator.name
        if not cls.drops:
            raise ConfigError(f"{asked} divides what a method keeps, and {cls.title} keeps every token; leave it out")
        if not cls.is_scorer:
            raise ConfigError(
                f"{asked} would replace the division that makes {cls.title} what it is; use it with a scorer such as "
                "method=snapkv"
            )
        if name == "uniform":
            return
        if reason := cls.evicts(params):
            raise ConfigError(f"{asked} divides the prompt once, and {reason}")
        comparable = cls.comparable_over(params)
        if comparable == "none" and allocator.pools and not allocator.force:
            raise ConfigError(
                f"{asked} pools scores of different heads, and those of {cls.title} do not compare; use uniform or "
                "pyramid, or allocator.force=true all the same"
            )
        if comparable == "set" and (allocator.of_heads != "uniform"):
            raise ConfigError(
                f"{asked} gives heads of a layer different counts, and {cls.title} keeps one set for all of them; use "
                "uniform, pyramid or by_need"
            )

    @classmethod
    def budget_for(cls, request: BudgetRequest, s_prompt: int) -> Budget:
        """The budget that the method gets for a prompt of this length."""
        return resolve(request, s_prompt, cls.drops)

    @classmethod
    def budget_with(cls, params: Any, request: BudgetRequest, s_prompt: int) -> Budget:
        """`budget_for`, where it depends on parameters."""
        return cls.budget_for(request, s_prompt)

    @classmethod
    def plan_for(cls, params: Any, budget: Budget, shape: ModelShape) -> Any:
        """The method's integers for prompts of one length; `ConfigError` where the budget is too small for them.

        It is asked once per variant and prompt length, before the first prefill.
        """
        return None

    @classmethod
    def planned(
        cls, params: Any, request: BudgetRequest, shape: ModelShape, s_prompt: int,
        cache: BlockCacheSpec | None = None, frame: Frame = NO_FRAME, quantizer: Quantizer | None = None,
    ) -> tuple[Budget, Any, BlockCacheSpec | None]:  # fmt: skip
        """Budget, integers and block cache for prompts of `s_prompt` tokens; `ConfigError` where nothing fits."""
        cls.check_kinds(params, shape, quantizer)
        request = request.on(shape, s_prompt)
        if request.compensates:
            request = replace(request, key_share=shape.key_share)
        if quantizer is not None and cls.drops:
            return *cls.composed(params, request, shape, s_prompt, frame, quantizer), cache
        code = None if quantizer is None else quantizer.token_code()
        budget = replace(cls.budget_with(params, request, s_prompt), frame=frame, host_code=code)
        has_free_index = budget.finds_freely and not cls.drops
        if has_free_index:
            budget = replace(budget, comm=cls.index_comm(params, budget, shape))
        if budget.memory is None or (budget.memory == 1 and budget.attends_all):
            return budget, cls.plan_for(params, budget, shape), cache
        fit = cls.fit_with_index if has_free_index else cls.fit
        budget, plan = fit(params, budget, shape)
        if cache is not None and cache.tokens:
            spare = cls.footprint(params, plan, budget, shape).spare(budget, shape)
            n_blocks = min(cache.tokens, spare // far_bytes(budget, shape)) // cache.block_len
            cache = replace(cache, tokens=n_blocks * cache.block_len)
        return budget, plan, cache

    @classmethod
    def cycle(cls, plan: Any, s_prompt: int) -> tuple[int, int]:
        """Steps before the first that is as any later one, and after how many steps the same comes again."""
        return 0, 1

    @classmethod
    def turns_queries(cls, params: Any) -> str:
        """What makes queries meet some tokens turned, which is the queries' own: "" where nothing does."""
        return ""

    @classmethod
    def check_kinds(cls, params: Any, shape: ModelShape, quantizer: Quantizer | None = None) -> None:
        """Raise `ConfigError` where a method makes no sense of what layers of this model keep, or who reads it."""
        if shape.choosing_layers and cls.has_budget:
            raise ConfigError(
                f"the model {shape.name!r} chooses by itself what {len(shape.choosing_layers)} of its {shape.n_layers} "
                f"layers attend to, and {cls.title} is not defined on top of that; use method=full, which runs and "
                "counts the model as it is, or a model with full attention"
            )
        if shape.width != 2 * shape.d_h:
            cls.check_widths(shape, quantizer)
        both = ((cls, params), *(((quantizer.rules, quantizer.params),) if quantizer else ()))
        for rules, of in both if shape.readers else ():
            if what := rules.turns_queries(of):
                raise ConfigError(
                    f"{what} turns queries for some tokens, and {len(shape.readers)} layers of the model "
                    f"{shape.name!r} attend to these with queries of their own; use a method that leaves queries as "
                    "they are"
                )

    @classmethod
    def check_widths(cls, shape: ModelShape, quantizer: Quantizer | None) -> None:
        """Raise `ConfigError` where a method makes no sense of values that are narrower, or part of their keys."""
        says = f"has keys of {shape.d_h} and values of {shape.d_v} numbers"
        reasons = [(rules.title, rules.no_widths) for rules in (cls, *((quantizer.rules,) if quantizer else ()))]
        if shape.is_latent:
            says = "keeps one latent per token for all heads"
            reasons = [(rules.title, rules.no_latents) for rules in (cls, *((quantizer.rules,) if quantizer else ()))]
            if quantizer is not None and not cls.drops:
                reasons.append((f"{cls.title} with {quantizer.rules.title}", "packs keys and values apart on the host"))
        for title, why in reasons:
            if why:
                raise ConfigError(f"the model {shape.name!r} {says}, and {title} {why}; use another method with it")

    @classmethod
    def composed(
        cls, params: Any, request: BudgetRequest, shape: ModelShape, s_prompt: int, frame: Frame, quantizer: Quantizer
    ) -> tuple[Budget, Any]:
        """Budget and integers where the tokens that stay become codes: as many as `ratio` says and as fit in bytes."""
        budget = replace(cls.budget_with(params, request, s_prompt), frame=frame)
        if budget.memory is None or (budget.memory == 1 and budget.attends_all):
            return budget, cls.plan_for(params, budget, shape)
        packed_by, n = quantizer.rules, budget.tokens
        plan = packed_by.plan_for(quantizer.params, budget, shape)
        if request.memory_alone:
            n = s_prompt
        while n and not Footprint(packed_by.code_bytes(plan, n, shape)).fits(budget, shape):
            n -= 1  # one by one: a block of keys is smaller once it is full
        if n < 1:
            least = Fraction(packed_by.code_bytes(plan, 1, shape), s_prompt * token_bytes(shape))
            raise too_small(budget, cls.title, least)
        budget = replace(budget, tokens=n, nominal_tokens=n, ratio=Fraction(n, s_prompt))
        return budget, cls.plan_for(params, budget, shape)

    @classmethod
    def check_shape(cls, params: Any, shape: ModelShape) -> None:
        """Raise `ConfigError` where a quantising method cannot pack heads of this shape."""

    @classmethod
    def title_of(cls, params: Any) -> str:
        """The method's name, for a quantising one with its bits."""
        return cls.title

    @classmethod
    def code_bytes(cls, plan: Any, n: int, shape: ModelShape) -> int:
        """Bytes of a layer's first `n` tokens, as a quantising method packs them."""
        raise NotImplementedError(cls.title)

    @classmethod
    def token_code(cls, params: Any) -> TokenCode | None:
        """How a quantising method packs a token that lies on the host; None where it cannot."""
        return None

    @classmethod
    def uncodable(cls, params: Any) -> str:
        """Why what the method keeps, or has on the host, cannot become codes; "" where it can."""
        if cls.changes:
            return f"{cls.title} makes codes itself, and nothing is packed twice"
        if not cls.drops:
            return "" if cls.packs_host else f"{cls.title} drops no tokens, and has no host tier that could hold codes"
        if cls.prunes_prompt:
            return f"{cls.title} has a prefill of its own"
        if cls.of_answers:
            return f"{cls.title} goes on dropping while it decodes"
        if cls.skips and params.full_layers:
            return f"method.full_layers={params.full_layers} leaves layers whole; use 0 with it"
        if cls.is_query_wide(params):
            return "each query head keeps tokens of its own"
        own = cls.own_allocator(params)
        if own is not None and own.name != "uniform":
            return f"{cls.title} keeps other numbers of tokens in each layer or head"
        return cls.evicts(params)

    @classmethod
    def fit(cls, params: Any, budget: Budget, shape: ModelShape) -> tuple[Budget, Any]:
        """Budget and integers that `budget.memory` pays for: those of as many tokens as fit, and the budget's at most.

        A method whose bytes depend on more than tokens has its own order of what it tries.
        """

        def with_tokens(n: int) -> Budget:
            if n == budget.tokens:
                return budget
            return replace(budget, tokens=n, nominal_tokens=n, ratio=Fraction(n, budget.s_prompt))

        def held(n: int) -> Footprint | None:
            """Footprint of so many tokens; None where they are too few for a plan."""
            try:
                plan = cls.plan_for(params, with_tokens(n), shape)
            except ConfigError:
                return None
            return cls.footprint(params, plan, with_tokens(n), shape)

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
                cls.plan_for(params, budget, shape)  # says what else is wrong
                raise too_small(budget, cls.title, Fraction(1))
            raise too_small(budget, cls.title, max(Fraction(fewest, s), least.share(shape, s)))
        return with_tokens(n), cls.plan_for(params, with_tokens(n), shape)

    @classmethod
    def index_comm(cls, params: Any, budget: Budget, shape: ModelShape) -> Fraction:
        """The `comm` that pays for the method's index as it was published: its index where `comm` is off."""
        return Fraction(1, 64)

    @classmethod
    def fit_with_index(cls, params: Any, budget: Budget, shape: ModelShape) -> tuple[Budget, Any]:
        """`fit` where `comm` is off: the budget's tokens, and in addition the published index or the largest.

        Where no index leaves room for the budget's tokens, it is the largest that costs at most half of those that the
        smallest leaves.
        """
        published, errors = budget.comm, list[ConfigError]()

        def with_index(part: int) -> tuple[Budget, Any] | None:
            """Budget and plan with so many parts of the published index; None where there is no room."""
            try:
                share = Fraction(part, INDEX_PARTS)
                return cls.fit(params, replace(budget, comm=published * share, index_share=share), shape)
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

    @classmethod
    def footprint(cls, params: Any, plan: Any, budget: Budget, shape: ModelShape) -> Footprint:
        """Footprint on the device right after the prompt; `ConfigError` where nothing can be moved away from there."""
        if not cls.drops:
            asked = show(budget.given or budget.memory or Fraction(1))
            raise ConfigError(
                f"memory={asked} needs a tier to move to, and {cls.title} says of none what is left on the device; use "
                "ratio, or memory=1"
            )
        wide = shape.g if cls.is_query_wide(params) else 1
        return Footprint(budget.tokens * wide * token_bytes(shape), n_whole=cls.n_whole(params, shape))

    @classmethod
    def device_bytes(cls, params: Any, plan: Any, budget: Budget, shape: ModelShape) -> tuple[int, int]:
        """Bounds of what a retrieving method has on an accelerator, all layers together: K and V, 16 bits a number, and
        what it finds tokens with, which is counted at 16 bits and may lie there in 32, its integers in 64.

        `ConfigError` where the method says nothing of it.
        """
        held = cls.footprint(params, plan, budget, shape)
        n_layers = len(shape.attention_layers) - held.n_whole
        exact = replace(held, index_bytes=0).total(shape, budget.s_prompt)
        return exact, n_layers * (2 * held.index_bytes + cls.uncounted_bytes(params, plan, budget, shape))

    @classmethod
    def uncounted_bytes(cls, params: Any, plan: Any, budget: Budget, shape: ModelShape) -> int:
        """Bytes of a layer that an accelerator keeps although they are counted as the host's."""
        return 0

    @classmethod
    def is_query_wide(cls, params: Any) -> bool:
        """Whether every query head of a dropping method may keep tokens of its own, so that a KV head holds more."""
        return "query_head" in (getattr(params, "reduce", None), getattr(params, "index_scope", None))

    @classmethod
    def weighs_values(cls, params: Any) -> bool:
        """Whether the norms of values are in a scorer's numbers."""
        return False

    @classmethod
    def n_whole(cls, params: Any, shape: ModelShape) -> int:
        """Layers that the method leaves whole on purpose."""
        return sum(layer < params.full_layers for layer in shape.attention_layers) if cls.skips else 0

    @classmethod
    def n_home(cls, params: Any, shape: ModelShape) -> int:
        """Layers of which all tokens go to the host while the prompt is read."""
        is_near = cls.drops or cls.changes or not cls.has_budget
        return 0 if is_near else len(shape.attention_layers) - cls.n_whole(params, shape)

    @classmethod
    def own_allocator(cls, params: Any) -> Allocator | None:
        """How the method itself divides its budget over layers and heads; None: all alike."""
        return None

    @classmethod
    def own_post_processing(cls, params: Any) -> PostProcessing:
        """The method's own post-processing of keys and values that stay, where no key asks for another form."""
        return AS_THEY_ARE

    @classmethod
    def unchangeable(cls, params: Any) -> str:
        """Why keys and values that the method keeps stay as they are; "" where they can be made others."""
        if not cls.drops:
            return f"{cls.title} drops no tokens"
        if cls.changes:
            return f"{cls.title} makes keys and values of its own"
        if cls.prunes_prompt:
            return f"{cls.title} has a prefill of its own"
        if cls.of_answers:
            return f"{cls.title} goes on dropping while it decodes"
        if cls.is_query_wide(params):
            return "each query head keeps tokens of its own"
        return cls.evicts(params)

    @classmethod
    def evicts(cls, params: Any) -> str:
        """Why all heads have to keep equal counts with these parameters, where the method goes on dropping tokens."""
        return ""

    @classmethod
    def chosen(cls, report: Mapping[str, Any]) -> str:
        """Words after the label: what a byte budget chose for a prompt, such as its bits, from `report`; or ""."""
        return ""

    @classmethod
    def label(cls, params: Any, request: BudgetRequest) -> str:
        """The method's name in tables; "(C)" says that a dropping method was compensated for `comm`."""
        compensated = cls.drops and request.compensates and bool(request.comm)
        return f"{cls.title} (C)" if compensated else cls.title
