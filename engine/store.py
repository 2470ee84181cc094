"""K and V of one variant on one sample: makes memory of a method's placements, and has the ledger of all layers.

The prompt's K and V in the trace are shared by all variants and never written to; a variant that keeps everything holds
a view of them. Once a layer is placed, `store[layer]` is what moves its tokens (`engine/layouts`) and counts what it
moves (`engine/books/meter.py`); nothing else does, so that the ledger cannot be bypassed.

Not here: which tokens (`methods`), what a cached block is (`engine/caches/blocks.py`), what the counts mean
(`engine/books/ledger.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.engine.books.audit import check_kept, correct_entry
from kvbench.engine.books.ledger import Ledger
from kvbench.engine.books.meter import Access, Meter, add_pending
from kvbench.engine.books.pending import PendingSteps
from kvbench.engine.caches.blocks import BlockCache, BlockCacheSpec
from kvbench.engine.caches.queries import QueryRing
from kvbench.engine.caches.staging import StagingBuffer
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.layouts.fetching import Fetching
from kvbench.engine.layouts.home import Home
from kvbench.engine.layouts.kept import kept_as, kept_mask
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.layouts.memory import Pair
from kvbench.engine.layouts.quantized import QuantizedLayer
from kvbench.engine.layouts.slots import Marked, Slots
from kvbench.engine.layouts.whole import DelayedView, RaggedView, View
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import (
    Change,
    Coded,
    Delayed,
    Kept,
    Made,
    Offloaded,
    OffloadedValues,
    Placement,
    Quantize,
    Ragged,
    Release,
    Searched,
    Stay,
    Whole,
)  # fmt: skip
from kvbench.engine.post_processing import AS_THEY_ARE, PostProcessing
from kvbench.engine.selection import Cost

Layouts = Mapping[type[Placement], Callable[[Any, Any], Layer]]
LAYOUTS: Layouts = {
    Whole: View.of,
    Kept: Slots.of,
    Ragged: RaggedView.ragged,
    Delayed: DelayedView.delayed,
    Offloaded: Fetching.of,
    OffloadedValues: Fetching.of_values,
    Searched: Fetching.of_some,
    Made: Marked.made,
    Coded: QuantizedLayer.of,
}


class Store:
    """All compressed layers of one variant on one sample."""

    layouts: ClassVar[Layouts] = LAYOUTS

    def __init__(self, trace: Trace, n_new: int, cache: BlockCacheSpec | None = None, checked_for: str = "") -> None:
        self.trace = trace
        self.shape = trace.shape
        self.n_new = n_new  # tokens that may be appended
        self.cache_spec = cache
        self.books = Ledger()
        self.pending: PendingSteps | None = None  # steps that neither `books` nor `placed` have yet
        self.checked_for = checked_for  # whom errors name; empty: the row is believed
        self.placed: dict[int, Layer] = {}
        self.post_processing: PostProcessing = AS_THEY_ARE  # what becomes of kept keys and values
        self.quantize: Quantize | None = None  # of a composition: what a method keeps becomes codes
        self.host_code: TokenCode | None = None  # or what it sends to the host
        self.staging_buffers: dict[
            torch.device, StagingBuffer
        ] = {}  # one for all layers of a GPU: each needs it until its attention
        self.accesses: list[Access] | None = None  # a list: layers that are placed from then on note fetches in it

    def __getitem__(self, layer: int) -> Any:
        if self.pending is not None:
            self.pending.flush()
        return self.placed[layer]

    @property
    def layers(self) -> dict[int, Layer]:
        if self.pending is not None:
            self.pending.flush()
        return self.placed

    @property
    def ledger(self) -> Ledger:
        if self.pending is not None:
            self.pending.flush()
        return self.books

    def take_ledger(self) -> Ledger:
        """The ledger of all steps so far, in whose place a new one begins."""
        ledger, self.books = self.ledger, Ledger()
        return ledger

    # What methods say.

    def place(self, layer: int, placement: Placement) -> None:
        """Put the prompt's tokens of a layer where the method says, once."""
        assert layer not in self.layers, f"layer {layer} is placed twice"
        check_kept(placement, layer, self.shape, self.trace.s_prompt, self.checked_for)
        coded = placement if self.quantize is None else self.as_codes(layer, placement, self.quantize)
        home = self.home(layer, coded)
        if self.post_processing.changes:
            home.made = self.kept_as_asked(layer, placement, home)
        made = self.layers[layer] = self.layouts[type(coded)](home, coded)
        if (queries := getattr(placement, "queries", None)) is not None:
            made.queries, made.takes_feeds = QueryRing(*queries), False
        if layer in self.trace.slots:
            made.stand(self.trace.slots[layer], self.trace.n_read)

    def change(self, layer: int, change: Change) -> None:
        """After a step, let the layer's tokens leave as the method says. The step's books have them."""
        if type(change) is not Change:
            self.layers[layer] = self.layers[layer].change(change)
        self.spend(layer, change.cost)

    def change_between(self, layer: int, change: Stay | Release) -> None:
        """A change between steps: no step attended to what leaves, and what is written is counted as rebuilt."""
        self.layers[layer].evictions = None
        self.change(layer, change)
        (made := self.layers[layer]).evictions = None
        if isinstance(change, Stay):
            self.ledger.count_rebuilt(change.slots.shape[-1] * self.shape.h_kv * made.meter.token_bytes)

    def spend(self, layer: int, cost: Cost) -> None:
        """Enter into the books what a method held, read or moved besides K and V in the step at hand."""
        self.layers[layer].meter.spend(cost)
        if cost.rebuilt_bytes:
            self.books.count_rebuilt(cost.rebuilt_bytes)  # which the layers complete

    # How it is done.

    def home(self, layer: int, placement: Placement) -> Home:
        """What the layer gets of this engine."""
        spec, fetches = self.cache_spec, isinstance(placement, Offloaded | OffloadedValues | Searched)
        blocks = BlockCache(spec) if fetches and spec is not None and spec.tokens else None
        meter = Meter(self.shape, blocks, self.accesses)
        return Home(self.trace, layer, self.n_new, meter, self.checked_for, self.host_code, self.staging_of(layer))

    def kept_as_asked(self, layer: int, placement: Placement, home: Home) -> Pair | None:
        """K and V of the prompt with those that stay changed; None where they all stay."""
        kept = kept_mask(placement, self.shape.h_kv, home.s_prompt, home.device)
        return None if kept is None or bool(kept.all()) else kept_as(self.post_processing, self.trace, layer, kept)

    def staging_of(self, layer: int) -> StagingBuffer:
        staging = StagingBuffer(self.trace.s_prompt + self.n_new, 0, len(self.shape.attention_layers))
        return self.staging_buffers.setdefault(self.trace.device_of(layer), staging)

    def as_codes(self, layer: int, placement: Placement, quantize: Quantize) -> Coded:
        """The tokens of this placement as codes."""
        s, (_, n_window, capacity) = self.trace.s_prompt, placement.size(self.trace.s_prompt, self.n_new)
        if isinstance(placement, Whole):
            return Coded(quantize)
        if type(placement) is Ragged and placement.rolls is None:
            return Coded(quantize, [head.sort().values for head in placement.chosen])
        assert isinstance(placement, Kept), f"layer {layer} cannot become codes"
        assert capacity >= n_window + self.n_new, f"layer {layer} has a window that slides"
        every = torch.arange(s, device=self.trace.device_of(layer)).expand(1, self.shape.h_kv, -1)
        first = every[..., : placement.chosen] if isinstance(placement.chosen, int) else placement.chosen
        assert first.shape[1] == self.shape.h_kv, f"layer {layer} cannot become codes"
        return Coded(quantize, torch.cat([first, every[..., s - n_window :]], -1).sort(dim=-1).values)

    # The books.

    def close(self, layer: int) -> None:
        """End the layer's step, that of its newest token: its entry goes into the ledger."""
        at, ledger = self.layers[layer], self.books  # which the layers complete
        ledger.append(at.close(at.n_seen - at.s_prompt))
        if at.meter.device_counts is not None:
            add_pending(ledger, at.meter)
        if (correct := at.correction()) is not None:
            ledger.correct(correct)
        if ledger.read:
            correct_entry(ledger, layer, self.shape)

    def attended(self, layer: int) -> Tensor:
        """Which of the tokens seen so far the last step attended to: (h, n) bool."""
        return self.layers[layer].attended()

    def allocated_bytes(self) -> int:
        """Bytes that the device tier really occupies, shared prompt tensors included where they are held."""
        return sum(layer.allocated_bytes() for layer in self.layers.values())
