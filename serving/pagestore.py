"""A row's layers in vLLM's pages: the trace, the store and the memories that a method finds there.

On the rungs `visible` and `pages` every token stays where vLLM wrote it, and a layer's slots are the positions that its
arithmetic names (`Named`). On `dropping` the slots are the request's first ones (`Moved`), and what survives is written
there once. What pages cannot hold is refused where it is asked for, in a sentence.

Not here: which blocks a request has and when (`serving/reader.py`), their layout (`serving/pages.py`).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.caches.host import Host
from kvbench.engine.layouts.fetching import Fetching
from kvbench.engine.layouts.home import Home
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.layouts.memory import Memory, Pair
from kvbench.engine.layouts.slots import Marked, Slots
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Kept, Offloaded, Placement, Ragged, Searched, Whole
from kvbench.engine.shapes import ModelShape
from kvbench.engine.store import Layouts, Store
from kvbench.serving.order import DROPPING, PAGES, VISIBLE, Unserved
from kvbench.serving.pages import Pages

NO_PLACE = {
    "Made": "puts keys and values of its own making in the prompt's place, and pages hold the model's",
    "Coded": "keeps codes, and pages hold the model's own numbers",
    "OffloadedValues": "makes fetched keys again from a form of its own, and pages hold the model's",
    "Ragged": "lets heads of a layer keep different counts, so that no block comes back; use rung=visible with it",
}


class PageTrace(Trace):
    """A prompt as vLLM's pages have it. A read copies."""

    def __init__(self, shape: ModelShape, s_prompt: int, pages: Mapping[int, Pages], rung: str) -> None:
        super().__init__(shape, s_prompt, next(iter(pages.values())).device)
        self.pages, self.rung, self.taken = pages, rung, list[int]()
        self.table = torch.empty(0, dtype=torch.long, device=self.device)  # the request's blocks, in order
        self.own = self.table  # those to which what survives moves

    def read(self, layer: int, positions: Tensor) -> Pair:
        """K and V (1, h_kv, n, d_h) at positions (h_kv or 1, n)."""
        return self.pages[layer].read(self.table, positions)

    def span(self, start: int, stop: int) -> Tensor:
        """Positions or slots (1, n), for all heads."""
        return torch.arange(start, stop, device=self.device).unsqueeze(0)

    def keys(self, layer: int) -> Tensor:
        return self.host(layer)[0]

    def values(self, layer: int) -> Tensor:
        return self.host(layer)[1]

    def host(self, layer: int) -> Pair:
        return self.read(layer, self.span(0, self.s_prompt))

    def held_layers(self) -> list[int]:
        return self.taken

    def offload(self, layer: int) -> None:
        """Move nothing."""

    def hold(self, layer: int) -> None:
        """Pages stay until vLLM takes them."""

    @property
    def turn(self) -> Any:  # type: ignore[override]
        raise Unserved("turns queries or keys to other positions, which vLLM's model does by itself alone")

    @turn.setter
    def turn(self, value: Any) -> None:
        assert value is None


class Named:
    """Slots that are positions: the layer says of which tokens. Nothing is written, since vLLM did."""

    layer: Layer
    nbytes = 0

    def __init__(self, trace: PageTrace, n_slots: int) -> None:
        self.trace, self.n_slots = trace, n_slots

    def write(self, at: int, k: Tensor, v: Tensor) -> None: ...

    def scatter(self, slots: Tensor, k: Tensor, v: Tensor) -> None: ...

    def move(self, start: int, order: Tensor | None, places: Tensor) -> None: ...

    def hold(self, k: Tensor, v: Tensor, n_free: int) -> None:
        self.n_slots = k.shape[2] + n_free

    def part(self, start: int, stop: int) -> Part:
        positions = self.layer.positions()[..., start:stop].clamp(min=0)
        return part_of(self.trace, self.layer.index, positions)


class Moved:
    """Slots that are the first ones of the request's own blocks."""

    layer: Layer
    nbytes = 0  # vLLM counts blocks

    def __init__(self, trace: PageTrace, index: int, n_slots: int) -> None:
        self.trace, self.index, self.n_slots = trace, index, n_slots

    def put(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.trace.pages[self.index].write(self.trace.own, slots, k, v)

    def write(self, at: int, k: Tensor, v: Tensor) -> None:
        self.put(self.trace.span(at, at + k.shape[2]), k, v)

    def scatter(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.put(slots.unsqueeze(0), k, v)

    def get(self, slots: Tensor) -> Pair:
        return self.trace.pages[self.index].read(self.trace.own, slots)

    def part(self, start: int, stop: int) -> Part:
        return Part(*self.get(self.trace.span(start, stop)))

    def move(self, start: int, order: Tensor | None, places: Tensor) -> None:
        slots = (
            self.trace.span(start, start + places.shape[-1]).expand(places.shape) if order is None else start + order
        )
        self.put(places[0], *self.get(slots[0]))

    def hold(self, k: Tensor, v: Tensor, n_free: int) -> None:
        self.n_slots = k.shape[2] + n_free
        self.write(0, k, v)


class PageHost(Host):
    """A host tier of all tokens, which never left their pages."""

    def __init__(self, trace: PageTrace, layer: int) -> None:
        self.trace, self.index, self.n = trace, layer, trace.s_prompt
        self.has_keys, self.positions, self.is_near, self.n_prompt = True, None, False, trace.s_prompt
        self.device = trace.device

    def read(self, start: int, stop: int) -> Pair:
        return self.trace.read(self.index, self.trace.span(start, stop))

    @property
    def k(self) -> Tensor:
        """The prompt's keys."""
        return self.read(0, self.n_prompt)[0]

    @property
    def late(self) -> Pair:
        """Keys and values that came after the prompt's."""
        return self.read(self.n_prompt, self.n)

    def write(self, at: int, k_new: Tensor, v_new: Tensor) -> None:
        self.n = self.n_prompt + at + k_new.shape[2]

    def tokens(self, idx: Tensor, mask: Tensor | None, late: bool) -> Part:
        if len(idx) > 1:  # of several tokens, in places of their own: all that there are is copied once
            return Part(*self.read(0, self.n), mask, idx=idx)
        return part_of(self.trace, self.index, idx.clamp(min=0), mask)

    def held(self, stop: int) -> list[Pair]:
        return [self.read(0, stop)]

    def keys(self, start: int, stop: int) -> Tensor:
        return self.read(start, stop)[0][0]


def part_of(trace: PageTrace, layer: int, positions: Tensor, mask: Tensor | None = None) -> Part:
    """Tokens at positions (1, h_kv or h, n): copies, or on the rung `pages` where they lie."""
    _, heads, n = positions.shape
    h_kv = trace.shape.h_kv
    if trace.rung == PAGES:
        nothing = torch.empty(1, h_kv, 0, trace.shape.d_h, device=trace.device)
        return Part(nothing, nothing, mask, idx=positions)
    k, v = trace.read(layer, positions.reshape(h_kv, -1))  # query heads of a group: one after the other
    return Part(k.view(1, heads, n, k.shape[3]), v.view(1, heads, n, v.shape[3]), mask)


class PageHome(Home):
    """The place of a layer's tokens in vLLM's pages."""

    trace: PageTrace

    def prompt(self, tokens: slice | Tensor = slice(None)) -> Pair:
        if isinstance(tokens, slice):
            start, stop, _ = tokens.indices(self.s_prompt)
            return self.trace.read(self.layer, self.trace.span(start, stop))
        return self.trace.read(self.layer, tokens[0].clamp(min=0))

    def memory(self, tokens: list[Pair], n_free: int) -> Memory:
        n = sum(k.shape[2] for k, _ in tokens)
        if self.trace.rung != DROPPING:
            return Named(self.trace, n + n_free)
        memory = Moved(self.trace, self.layer, n + n_free)
        k, v = (torch.cat(x, 2) for x in zip(*tokens, strict=True))
        memory.hold(k, v, n_free)
        return memory

    def host(self) -> Host:
        return PageHost(self.trace, self.layer)

    def values_host(self) -> Host:
        raise Unserved(NO_PLACE["OffloadedValues"])


def whole(home: PageHome, placement: Whole) -> Layer:
    """The prompt stays where it is."""
    n, _, capacity = placement.size(home.s_prompt, home.n_new)
    if home.trace.rung == DROPPING:
        return Slots(home, Moved(home.trace, home.layer, n + capacity), n, 0, capacity)
    return Slots(home, Named(home.trace, n + capacity), n, 0, capacity)


def ragged(home: PageHome, placement: Ragged) -> Layer:
    """Place each head's own tokens, and nothing where another head has more."""
    if placement.rolls is not None:
        raise Unserved("lets some heads of a layer roll while others grow, which no table of pages says")
    chosen = torch.nn.utils.rnn.pad_sequence([*placement.chosen], batch_first=True, padding_value=-1).unsqueeze(0)
    n, _, capacity = placement.size(home.s_prompt, home.n_new)
    layer = Marked(home, Named(home.trace, n + capacity), n, 0, capacity, chosen)
    layer.hide((chosen >= 0).repeat_interleave(home.trace.shape.g, 1))
    return layer


class PageStore(Store):
    """All layers of one row."""

    trace: PageTrace
    layouts: ClassVar[Layouts] = {
        Whole: whole, Kept: Slots.of, Ragged: ragged, Offloaded: Fetching.of, Searched: Fetching.of_some,
    }  # fmt: skip
    on_rung: ClassVar[Mapping[str, tuple[type[Placement], ...]]] = {
        VISIBLE: tuple(layouts),
        PAGES: (Whole, Offloaded),
        DROPPING: (Whole, Kept),
    }

    def home(self, layer: int, placement: Placement) -> Home:
        return PageHome(**vars(super().home(layer, placement)))

    def place(self, layer: int, placement: Placement) -> None:
        kind, rung = type(placement), self.trace.rung
        if kind not in self.on_rung[rung]:
            raise Unserved(NO_PLACE.get(kind.__name__, f"places tokens as {kind.__name__}, which rung={rung} does not"))
        if rung == DROPPING and isinstance(placement, Kept) and not self.is_even(placement):
            raise Unserved("lets query heads keep tokens of their own, which share a page; use rung=visible with it")
        if rung == DROPPING:
            self.check_room(layer, placement)
        super().place(layer, placement)
        made = self.layers[layer]
        if isinstance(made, Slots) and isinstance(made.memory, Named | Moved):
            made.memory.layer = made

    def check_room(self, layer: int, placement: Placement) -> None:
        home = self.home(layer, placement)
        n, n_window, _ = placement.size(home.s_prompt, home.n_new)
        if n + n_window > (most := len(self.trace.own) * self.trace.pages[layer].block):
            raise Unserved(
                f"keeps {n + n_window} tokens of {home.s_prompt} in layer {layer}, where vLLM's scheduler has blocks "
                f"for {most}: it keeps another number of tokens in each layer, and vLLM has one table of blocks for all"
            )

    def is_even(self, placement: Kept) -> bool:
        return isinstance(placement.chosen, int) or placement.chosen.shape[1] == self.shape.h_kv

    def n_held(self) -> int:
        """Slots that every layer has taken, on the dropping rung."""
        found = {at.n_kept + at.n_window for at in self.layers.values()}
        if len(found) > 1:
            raise Unserved("keeps another number of tokens in each layer, and vLLM has one table of blocks for all")
        return found.pop()

    def next_slots(self, n: int) -> Tensor:
        """Where the next `n` tokens go, in every layer alike."""
        at = next(iter(self.layers.values()))
        slots = [at.n_kept + (at.n_seen + j - at.start) % at.capacity for j in range(n)]
        return torch.tensor(slots, device=self.trace.device)
