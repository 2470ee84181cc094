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
through `trace.once`. A method that can score many rows at once overrides `select_rows`.

Not here: any method.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from engine.attend import Part
from engine.budget import NO_FRAME, BudgetRequest, Frame
from engine.caches.blocks import BlockCacheSpec
from engine.errors import ConfigError
from engine.keeping import Keeping
from engine.observe import Observation
from engine.passes.probe import Probe
from engine.placement import Change, Placement, Whole
from engine.prefill import Thinning, Trace
from engine.selection import Found
from engine.shapes import ModelShape
from engine.store import Store
from methods.allocator import UNIFORM, Allocator
from methods.rules import Coding, Rules
from methods.turns import Turns
from methods.variant import Partner, Variant

if TYPE_CHECKING:
    from engine.sampling.cues import Interruption


class SelectiveAttention(Rules, Turns, ABC):
    wants_weights: bool = False  # True: `after_attention` gets the weights, at the price of slower attention
    wants_lookahead: bool = False  # True: `select` finds `q_ahead`
    q_ahead: Tensor  # (1, h, 1, d_h), the query that the layer below foretells
    wants_input: bool = False  # True: behind a step it finds `x_now`
    x_now: Tensor  # (1, 1, D), what the layer's attention was called with
    pads: ClassVar[bool] = False  # True: `select` may return -1 for "no token"

    def __init__(self, variant: Variant, trace: Trace, n_new: int, store: type[Store] = Store) -> None:
        self.variant = variant
        self.params, self.budget, self.plan = variant.params, variant.budget, variant.plan
        self.trace = trace
        self.store = store(trace, n_new, variant.cache, variant.checked_for)
        if variant.partner is not None and not variant.is_full:
            variant.partner.join(self)
        self.store.keeping = variant.keeping
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
        partner: Coding | None = None,
        keeping: Keeping | None = None,
    ) -> Variant:
        """This method on prompts of `s_prompt` tokens; `ConfigError` where the budget is too small for it.

        Without an `allocator` a scorer's budget is divided as the method itself does. A `partner` makes codes of what
        the method keeps, or sends to the host. Without `keeping` kept tokens become what the method makes of them.
        """
        budget, plan, cache = cls.planned(params, request, shape, s_prompt, cache, frame, partner)
        divided = allocator or cls.own_allocator(params) or UNIFORM
        made = None if partner is None else Partner(partner, partner.rules.plan_for(partner.params, budget, shape))
        kept = cls.own_keeping(params) if keeping is None else keeping
        return Variant(cls, params, budget, plan, cache, divided, made, kept)

    @classmethod
    def observations(cls, params: Any, plan: Any) -> tuple[Observation, ...]:
        """What the prefill has to observe for this method, given its integers for the prompt."""
        return ()

    @classmethod
    def probes(cls, params: Any, plan: Any) -> tuple[Probe, ...]:
        """What has to be read behind the prompt before `arrange_rest`; variants that ask for the same share it."""
        return ()

    @classmethod
    def thinning(cls, plan: Any) -> Thinning | None:
        """What leaves the pass over the prompt, for methods with a prefill of their own; None: they share one."""
        return None

    def build(self, layer: int) -> None:
        """Take over a layer of the prompt. Where nothing is to be compressed, every token stays for good."""
        whole = self.variant.is_full or layer in self.skipped_layers()
        placement = Whole() if whole else self.arrange(layer)
        if placement is not None:
            self.store.place(layer, placement)

    def complete(self) -> None:
        """Finish the prompt, once every layer is built."""
        for layer, placement in ({} if self.variant.is_full else self.arrange_rest()).items():
            self.store.place(layer, placement)
        for layer in self.trace.held_layers():
            if layer not in self.store.layers:
                raise ConfigError(
                    f"{type(self).__name__}.arrange says nothing of layer {layer}; return where its tokens go, such as "
                    "Kept(positions, n_window), Offloaded(n_sink, n_window) or Whole() of engine.placement"
                )

    @abstractmethod
    def arrange(self, layer: int) -> Placement | None:
        """Where the prompt's tokens of this layer go: `Kept`, `Offloaded`, `Whole`; None: `arrange_rest` says it."""

    def arrange_rest(self) -> Mapping[int, Placement]:
        """The layers that `arrange` left, for methods that divide a budget over layers once they have seen them all."""
        return {}

    def skipped_layers(self) -> Sequence[int]:
        """Layers that the method leaves whole on purpose; its budget is checked on the others."""
        if not self.skips:
            return ()
        return [layer for layer in self.trace.shape.attention_layers if layer < self.params.full_layers]

    def protected(self, layer: int) -> Sequence[int]:
        """Positions that this method promises to attend to at the step just made, whatever the query."""
        return ()

    def sinks_and_window(self, layer: int, n_sink: int = 0) -> Sequence[int]:
        """What a retrieving method protects: the first tokens and the window; everything where nothing is fetched."""
        n, n_window = self.store[layer].n_seen, self.store[layer].n_window
        if not self.store[layer].can_fetch:
            return range(n)
        return [*range(min(n_sink, n - n_window)), *range(n - n_window, n)]

    def select(self, layer: int, q: Tensor) -> Found:
        """What to fetch for this query (1, h, 1, d_h): positions (1, h_kv or h, k) without repeats, a `Selection`."""
        return None

    @classmethod
    def select_rows(cls, rows: Sequence["SelectiveAttention"], layer: int, q: Tensor) -> Sequence[Found]:
        """`select` for all rows of this class at once; q is (n, h, 1, d_h)."""
        return [row.select(layer, q[i : i + 1]) for i, row in enumerate(rows)]

    def resident(self, layer: int, q: Tensor) -> list[Part]:
        """What is attended to without a fetch."""
        return self.store[layer].resident()

    @classmethod
    def resident_rows(cls, rows: Sequence["SelectiveAttention"], layer: int, q: Tensor) -> list[list[Part]]:
        """`resident` for all rows of this class at once; q is (n, h, 1, d_h)."""
        return [row.resident(layer, q[i : i + 1]) for i, row in enumerate(rows)]

    def after_attention(self, layer: int, out: Tensor, weights: Tensor | None) -> Tensor:
        """The layer's output (1, h, 1, d_h), for methods that correct it, by weights (1, h, s) if they want them."""
        return out

    def behind(self, layer: int, weights: Tensor | None) -> Change | None:
        """What becomes of the layer's tokens behind this step, which attended to all of them: `Evict`, `Stay`,
        `Release`, or a `Change` that only costs; None: they stay as they are."""

    @classmethod
    def after_rows(
        cls, rows: Sequence["SelectiveAttention"], layer: int, out: Tensor, weights: Sequence[Tensor | None]
    ) -> Sequence[Change | None]:
        """Both for all rows of this class at once; out (n, h, 1, d_h) is corrected in place."""
        if cls.after_attention is not SelectiveAttention.after_attention:
            for i, row in enumerate(rows):
                given = out[i : i + 1]
                if (corrected := row.after_attention(layer, given, weights[i])) is not given:
                    given.copy_(corrected)
        if cls.behind is SelectiveAttention.behind:
            return ()
        return [row.behind(layer, given) for row, given in zip(rows, weights, strict=True)]

    after_rows_on_gpu = after_rows  # overridden where all rows together need fewer launches

    def after_step(self) -> Iterable[tuple[int, Change]]:
        """What leaves which layer once a step has gone through all of them, for methods whose budget is `of_answers`.

        A layer's change is made before the next is asked for.
        """
        return ()

    def interruption(self) -> "Interruption | None":
        """What an answer is made to say from some token on; None: it speaks for itself."""
        return None

    def report(self) -> dict[str, Any]:
        """Facts of this sample, as JSON: its line has them as `method_report` where there are any."""
        return {}

    def overall_ratio(self, share: Fraction | float) -> float:
        """A share of the tokens over all layers, where it is that of the layers that are not skipped."""
        n_layers, n_full = len(self.trace.shape.attention_layers), len(self.skipped_layers())
        return float((n_full + (n_layers - n_full) * share) / n_layers)

    def shortened(self) -> dict[str, Any]:
        """For the sample's `method_report`: the number of sinks, where the budget left room for fewer."""
        wanted, n_sink = getattr(self.params, "n_sink", None), getattr(self.plan, "n_sink", None)
        if wanted is None or n_sink is None or n_sink >= wanted or self.variant.is_full:
            return {}
        return {"n_sink": n_sink}
