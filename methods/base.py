"""`SelectiveAttention`: the one interface that every method implements, and the parts that all of them share.

A `Variant` is a method with its parameters, its budget and its integers for prompts of one length. It is made once per
length and passed as it is. An instance of the method is that variant on one sample. Its life: `build` once per layer as
soon as the prompt's K and V are there; then, at every decode step and layer, the current token is appended to the
window, `select` says which tokens to fetch for this query, and attention runs over what is resident and what was
fetched. A typical method therefore writes two functions: `arrange`, where the prompt's tokens go, and `select`, if it
retrieves.

A dropping method returns `Kept` from `arrange` and writes no `select`. Most of them are a scorer, protected tokens and
an allocator: they inherit from `ScoringMethod` (`methods/scoring.py`). A retrieving method returns `Offloaded`, and
positions from `select`. Either may leave single layers `Whole`. A method says with values what it wants
(`engine/placement.py`, `engine/selection.py`) and reads what there is (`store[layer]`); an engine does the rest.

Heavy work may start a thread in `arrange` and wait for it in `select`. Work that variants of one method can share goes
through `trace.once`. A method that can score many rows at once writes `kind` and `search`.

Not here: any method.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from kvbench.engine.budget import NO_FRAME, Budget, BudgetRequest, Frame
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import Observation
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Change, Placement, Quantize, Release, Stay, Whole
from kvbench.engine.post_processing import AS_THEY_ARE, PostProcessing
from kvbench.engine.sampling.cues import Cue
from kvbench.engine.search import Search
from kvbench.engine.selection import FeedSelection, Found, Reuse, Selection
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.scratch import Scratch
from kvbench.methods.allocator import UNIFORM, Allocator
from kvbench.methods.rules import Quantizer, Rules, planned

if TYPE_CHECKING:  # slow to import, and a refused command needs none of them
    from kvbench.engine.attend import Part
    from kvbench.engine.caches.eviction import Update
    from kvbench.engine.passes.second_pass import SecondPass
    from kvbench.engine.prefill import TokenPruning
    from kvbench.engine.store import Store
    from kvbench.engine.turns.feed import Feed

CHECKS_ALL = "KVBENCH_CHECK"  # in the environment: every row is checked, and not those alone whose method is not ours
HOOKS = ("after_attention", "behind", "resident")


@dataclass(frozen=True)
class Composition:
    """A quantising method that another is composed with.

    What a dropping method keeps becomes codes; of a retrieving one it is what lies on the host, token by token.
    """

    quantizer: Quantizer
    plan: Any

    def quantize(self) -> Quantize:
        return self.quantizer.rules.quantize(self.quantizer.params, self.plan)  # type: ignore[attr-defined]

    def join(self, row: "SelectiveAttention") -> None:
        """Let the row's store make codes."""
        if not row.traits.drops:
            row.store.host_code = self.quantizer.token_code()
            return
        row.store.quantize = self.quantize()
        if self.quantizer.first:
            from kvbench.engine.caches.rebuilt import RebuiltTrace

            exact = row.trace
            row.trace = row.store.trace = exact.once(("rebuilt", self), lambda: RebuiltTrace(exact, self.quantize()))


@dataclass(frozen=True)
class Variant:
    """A method, its parameters, its budget and its integers for prompts of one length."""

    method: type["SelectiveAttention"]
    params: Any  # method.Params
    budget: Budget
    plan: Any  # method.Plan
    cache: BlockCacheSpec | None = None  # of a method that retrieves
    allocator: Allocator = UNIFORM  # of a scorer: how layers and heads share the budget
    composition: "Composition | None" = None  # what makes codes of tokens
    post_processing: PostProcessing = AS_THEY_ARE  # what becomes of keys and values that stay
    reuse: Reuse | None = None  # of one that retrieves: layers that attend to what others chose
    is_checked: bool = False  # the engine looks at what it selects, counts what it attends to (engine/books/audit.py)

    @property
    def is_full(self) -> bool:
        """Full attention itself: the variant attends to every token, changes none and never evicts one."""
        budget, method = self.budget, self.method
        becomes_codes = method.traits.changes or (self.composition is not None and method.traits.drops)
        is_exact = budget.memory == 1 or (budget.memory is None and not becomes_codes)
        return budget.attends_all and budget.never_evicts and is_exact and not method.traits_of(self.params).adapts

    @property
    def checked_for(self) -> str:
        """Whom errors about what it selects name; empty where it is believed."""
        return self.method.title if self.is_checked or os.environ.get(CHECKS_ALL) == "1" else ""

    @property
    def observations(self) -> tuple[Observation, ...]:
        own = self.method.observations(self.params, self.plan)
        if self.composition is None:
            return own
        (rules, params, _), plan = self.composition.quantizer, self.composition.plan
        return own + rules.observations(params, plan)  # type: ignore[attr-defined]

    @property
    def second_passes(self) -> tuple["SecondPass", ...]:
        return () if self.is_full else self.method.second_passes(self.params, self.plan)

    @property
    def pruning(self) -> "TokenPruning | None":
        return self.method.pruning(self.plan)

    def row(self, trace: Trace, n_new: int, store: "type[Store] | None" = None) -> "SelectiveAttention":
        """The method's instance for the sample of this trace, before `build`; `n_new` tokens may follow.

        The `store` is an engine's, by default the harness's own.
        """
        from kvbench.engine.store import Store

        return self.method(self, trace, n_new, store or Store)


class SelectiveAttention(Rules, ABC):
    wants_weights: bool = False  # True: `after_attention` gets the weights, at the price of slower attention
    wants_lookahead: bool = False  # True: `select` finds `q_ahead`
    q_ahead: Tensor  # (1, h, 1, d_h), the query that the layer below foretells
    delay: int | None = None  # how many newer tokens still see one that `goes`, where each is judged by itself
    wants_input: bool = False  # True: after a step it finds `x_now`
    x_now: Tensor  # (1, 1, D), what the layer's attention was called with
    draw: int = 0  # which of a prompt's answers it belongs to; known once its layers are built
    skipped: Sequence[int]  # layers that it leaves whole

    def __init__(self, variant: Variant, trace: Trace, n_new: int, store: "type[Store]") -> None:
        self.variant = variant
        self.params, self.budget, self.plan = variant.params, variant.budget, variant.plan
        self.traits = self.traits_of(variant.params)  # pyright: ignore[reportAttributeAccessIssue]
        self.trace, self.skipped = trace, self.whole_layers(variant.params, trace.shape)
        self.store = store(trace, n_new, variant.cache, variant.checked_for)
        if variant.composition is not None and not variant.is_full:
            variant.composition.join(self)
        self.store.post_processing = variant.post_processing
        if variant.reuse is not None and not variant.is_full:
            from kvbench.engine.layouts.handed import Handed

            self.store.handed = Handed(variant.reuse)
        self.setup()

    def setup(self) -> None:
        """Create what the method keeps of one sample; `params`, `plan`, `trace` and `store` are there."""

    @classmethod
    def variant_for(
        cls,
        params: Any,
        request: BudgetRequest,
        shape: ModelShape,
        s_prompt: int,
        cache: BlockCacheSpec | None = None,
        allocator: Allocator | None = None,
        frame: Frame = NO_FRAME,
        quantizer: Quantizer | None = None,
        post_processing: PostProcessing | None = None,
    ) -> Variant:
        """This method on prompts of `s_prompt` tokens; `ConfigError` where the budget is too small for it.

        Without an `allocator` a scorer's budget is divided as the method itself does. A `quantizer` makes codes of what
        the method keeps, or sends to the host. Without `post_processing` kept tokens become what the method makes of
        them.
        """
        budget, plan, cache = planned(cls, params, request, shape, s_prompt, cache, frame, quantizer)
        traits = cls.traits_of(params)
        composition = (
            None
            if quantizer is None
            else Composition(quantizer, quantizer.rules.plan_for(quantizer.params, budget, shape))
        )
        kept = traits.post_processing if post_processing is None else post_processing
        return Variant(cls, params, budget, plan, cache, allocator or traits.allocator or UNIFORM, composition, kept)

    @classmethod
    def observations(cls, params: Any, plan: Any) -> tuple[Observation, ...]:
        """Observations that the prefill makes for this method, given its integers for the prompt."""
        return ()

    @classmethod
    def second_passes(cls, params: Any, plan: Any) -> tuple["SecondPass", ...]:
        """Second passes to make after the prompt, before `arrange_rest`; variants that ask for the same share it."""
        return ()

    @classmethod
    def pruning(cls, plan: Any) -> "TokenPruning | None":
        """How tokens leave the pass over the prompt, for methods with a prefill of their own; None: they share one."""
        return None

    def build(self, layer: int) -> None:
        """Take over a layer of the prompt. Where nothing is to be compressed, every token stays for good."""
        whole, handed = self.variant.is_full or layer in self.skipped, self.store.handed
        with self.trace.as_held(layer):
            arranged = self.arrange if handed is None else lambda at: handed.place(at, self)
            if placement := Whole() if whole else arranged(layer):
                self.store.place(layer, placement)

    def complete(self) -> None:
        """Finish the prompt, once every layer is built."""
        for layer, placement in ({} if self.variant.is_full else self.arrange_rest()).items():
            self.store.place(layer, placement)
        for layer in self.trace.held_layers():
            if layer not in self.store.layers:
                raise ConfigError(
                    f"{type(self).__name__}.arrange says nothing of layer {layer}; return where its tokens go, such as "
                    "Kept(positions, n_window), Offloaded(n_sink, n_window) or Whole() of kvbench.engine.placement"
                )
        for layer in () if self.variant.is_full else {*self.store.layers} - {*self.skipped}:
            self.store[layer].token_bytes = self.token_bytes(layer)

    def token_bytes(self, layer: int) -> int:
        """Bytes that the method holds on the device for each token of a layer, in addition to K and V."""
        return 0

    @abstractmethod
    def arrange(self, layer: int) -> Placement | None:
        """Where the prompt's tokens of this layer go: `Kept`, `Offloaded`, `Whole`; None: `arrange_rest` says it."""

    def arrange_rest(self) -> Mapping[int, Placement]:
        """The layers that `arrange` left, for methods that divide a budget over layers once they have seen them all."""
        return {}

    def protected(self, layer: int) -> Sequence[int]:
        """Positions that this method promises to attend to at the step just made, whatever the query; nobody asks full
        attention.

        A retrieving method's are sinks and window, and everything where nothing is fetched.
        """
        if self.traits.drops or not self.traits.attends_current:
            return ()
        n, n_window = self.store[layer].n_seen, self.store[layer].n_window
        if not self.store[layer].can_fetch:
            return range(n)
        return [*range(min(getattr(self.plan, "n_sink", 0), n - n_window)), *range(n - n_window, n)]

    def select(self, layer: int, q: Tensor) -> Found:
        """Positions to fetch for this query (1, h, 1, d_h): (1, h_kv or h, k) without repeats, or a `Selection`."""
        return None

    def follow(self, layer: int) -> None:
        """Prepare a layer that attends to what another one chose: it has no index, and `arrange` is not asked."""

    def take(self, layer: int, idx: Tensor | None) -> Selection:
        """What such a layer fetches at these positions, (1, h_kv or h, k)."""
        return Selection(idx)

    def kind(self, layer: int) -> Hashable:
        """Rows of which this is the same are searched together."""
        return None

    @classmethod
    def search(cls, rows: Sequence[Self], layer: int, q: Tensor) -> Sequence[Found]:
        """`select` for rows of one kind."""
        return [row.select(layer, q[i : i + 1]) for i, row in enumerate(rows)]

    @classmethod
    def search_again(
        cls, rows: Sequence[Self], layer: int, q: Tensor, scratch: Scratch, ahead: int
    ) -> Search | None:  # fmt: skip
        """The next search of rows of one kind, if they do nothing after attention, for `ahead` steps to come at most.

        None where each step is planned anew.
        """
        return None

    def resident(self, layer: int, q: Tensor) -> list["Part"]:
        """Keys and values that are attended to without a fetch."""
        return self.store[layer].resident()

    @property
    def is_stored(self) -> bool:
        """Whether what is attended to without a fetch is what the store holds, whatever the query."""
        kind, base = type(self), SelectiveAttention
        return kind.resident is base.resident

    def after_attention(self, layer: int, out: Tensor, weights: Tensor | None) -> Tensor:
        """The layer's output (1, h, 1, d_h), for methods that correct it, by weights (1, h, s) if they want them."""
        return out

    def behind(self, layer: int, weights: Tensor | None) -> Change | None:
        """What becomes of the layer's tokens after this step, which attended to all of them: `Evict`, `Stay`,
        `Release`, or a `Change` that only costs; None: they stay as they are."""

    @classmethod
    def after_rows(
        cls, rows: Sequence[Self], layer: int, out: Tensor, weights: Sequence[Tensor | None]
    ) -> Sequence[Change | None]:
        """`after_attention` and `behind` for all rows of this class at once; out (n, h, 1, d_h) changes in place."""
        if cls.after_attention is not SelectiveAttention.after_attention:
            for i, row in enumerate(rows):
                given = out[i : i + 1]
                if (corrected := row.after_attention(layer, given, weights[i])) is not given:
                    given.copy_(corrected)
        if cls.behind is SelectiveAttention.behind:
            return ()
        return [row.behind(layer, given) for row, given in zip(rows, weights, strict=True)]

    @classmethod
    def after_rows_on_gpu(
        cls, rows: Sequence[Self], layer: int, out: Tensor, weights: Sequence[Tensor | None]
    ) -> Sequence[Change | None]:
        """`after_rows` where a GPU works: rows that say what they update do so together."""
        if cls.update is SelectiveAttention.update:
            return cls.after_rows(rows, layer, out, weights)
        from kvbench.engine.caches.eviction import update_rows

        given = ((row, x) for row, x in zip(rows, weights, strict=True) if x is not None)
        found = [row.update(layer, x) for row, x in given]
        update_rows([each for each in found if each is not None])
        return ()

    def update(self, layer: int, weights: Tensor, ahead: int = 0) -> "Update | None":
        """What the layer takes from weights (1, h, n), on a GPU in place of `behind`; None: nothing.

        The step is the one just made, or one that is so many ahead of it.
        """

    def after_step(self) -> Iterable[tuple[int, Change]]:
        """Changes by layer once a step has gone through all layers, for methods whose budget is `of_answers`.

        A layer's change is made before the next is asked for.
        """
        return ()

    def cue(self, encode: Callable[[str], Sequence[int]]) -> Cue | None:
        """Words that an answer is made to say from some token on, encoded; None: it speaks for itself."""
        return None

    def report(self) -> dict[str, Any]:
        """Facts of this sample, as JSON; nobody asks full attention."""
        return {}

    # Contexts that are asked many times.

    @property
    def is_still(self) -> bool:
        """Whether a step only adds its token to what is resident."""
        kind = type(self)
        return self.variant.is_full or (
            all(getattr(kind, name) is getattr(SelectiveAttention, name) for name in HOOKS)
            and kind.after_rows.__func__ is SelectiveAttention.after_rows.__func__
        )

    @property
    def repeats(self) -> bool:
        """Whether most steps only add their token to what is resident, update or search as they did."""
        kind, base = type(self), SelectiveAttention
        if self.is_still:
            return True
        if self.wants_weights:
            return kind.update is not base.update
        return kind.search_again.__func__ is not base.search_again.__func__

    def at_once(self, layer: int, m: int) -> int:
        """How many of the next `m` tokens this layer may read in one call, 1 where they have to come alone."""
        at = self.store[layer]
        if not at.takes_feeds or self.store.handed is not None:  # a choice is handed on token by token
            return 1
        on_gpu = at.device.type != "cpu"
        if at.can_fetch:
            takes = not on_gpu and self.selects_feeds(layer)
        else:
            takes = self.is_still or layer in self.skipped
        # A query sees at least one of the window's tokens before the feed.
        most = at.capacity - (at.n_window if on_gpu else 1)
        return max(1, min(m, most)) if takes else 1

    def selects_feeds(self, layer: int) -> bool:
        """Whether `select_feed` does for many tokens what steps do for each."""
        return False

    def select_feed(self, layer: int, feed: "Feed") -> FeedSelection:
        """`select` for every token of a feed, of which the host has K and V already."""
        raise AssertionError(f"{type(self).__name__} selects for one token at a time")

    def after_feed(self, layer: int, feed: "Feed", out: Tensor, lse: Tensor) -> Tensor:
        """`after_attention` for all tokens of a feed, once they are taken in: out (1, h, m, d_h), corrected.

        `lse` (1, h, m) are the log-sum-exps of the scaled logits of all that each token attended to.
        """
        return out

    def extend(self, layer: int, q: Tensor, grown: Variant) -> Stay | Release | None:
        """Hold a feed's tokens within the budget of `grown`, the method on prompts as long as the conversation is.

        The feed stays and was read with the queries q (1, h, m, d_h). What was dropped before is gone. Returns which
        tokens stay, if some leave; what is written for that, and its `cost`, are `rebuilt_bytes` of the ledger.
        A method that fetches lets the growth go to what a step fetches, besides sinks and a window as long as it was
        right after the context: what is older leaves it for the host, and can be fetched from then on.
        """
        at = self.store[layer]
        assert self.traits.grows, f"{type(self).__name__} keeps the budget of the context"
        if not at.can_fetch:
            return None
        n_over = max(0, at.n_window - at.n_latest)
        if at.n_window < at.n_seen - at.start:  # it slid: one token at a time, or after a long feed as a whole
            n_over = at.n_window if n_over > 1 else 0
        self.plan = replace(self.plan, k=max(0, grown.budget.tokens - at.n_kept - at.n_window + n_over))
        return Release(n_over) if n_over else None

    def read_feed(self, layer: int, feed: "Feed") -> Tensor | None:
        """Take in tokens of which `at_once` allows as many; their outputs (1, h, m, d_h). None: as any row does."""
        return None


# What a sample's `method_report` has.


def reported(row: SelectiveAttention) -> dict[str, Any]:
    """All of it, where there is anything to report."""
    return {} if row.variant.is_full else shortened(row) | row.report()


def shortened(row: SelectiveAttention) -> dict[str, Any]:
    """The number of sinks, where the budget left room for fewer than asked."""
    wanted, n_sink = getattr(row.params, "n_sink", None), getattr(row.plan, "n_sink", None)
    if wanted is None or n_sink is None or n_sink >= wanted or row.variant.is_full:
        return {}
    return {"n_sink": n_sink}


def overall_ratio(row: SelectiveAttention, share: Fraction | float) -> float:
    """A share of the tokens over all layers, where it is that of the layers that are not skipped."""
    n_layers, n_full = len(row.trace.shape.attention_layers), len(row.skipped)
    return float((n_full + (n_layers - n_full) * share) / n_layers)
