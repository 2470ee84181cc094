"""A row's layers in pages: the prompt as it lies there, and what methods make of it.

The layouts are those of `engine/layouts`. What they get from their home differs: their slots are the blocks in which
the prompt was written, of which those go back to the pool that are not needed for what stays; a host is a second pool.

Not here: blocks (`engine/paged/pool.py`), reading and answering (`engine/paged/serve.py`).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.caches.host import Host
from kvbench.engine.errors import ConfigError
from kvbench.engine.layouts.fetching import Fetching
from kvbench.engine.layouts.home import Home
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.layouts.memory import Memory, Pair
from kvbench.engine.layouts.slots import Marked, Slots
from kvbench.engine.paged.pool import Pages, Pool
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Kept, Made, Offloaded, Placement, Whole
from kvbench.engine.store import Layouts, Store


class PagedTrace(Trace):
    """A prompt whose K and V lie in pages; a read copies. All else is as the pass over the prompt left it."""

    def __init__(self, read: Trace, device: Pool, host: Pool) -> None:
        self._read, self.pools, self._shared = read, (device, host), {}
        self.pages: dict[int, Pages] = {}
        self.hosts: dict[int, PagedHost] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read, name)

    def take_in(self, layer: int, n_new: int) -> None:
        """Put a layer of the prompt into pages, with room for `n_new` tokens more."""
        self.pages[layer] = Pages(self.pools[0])
        self.pages[layer].hold(self._read.keys(layer), self._read.values(layer), n_new)
        self._read.forget(layer)

    def prompt(self, layer: int) -> Pair:
        where = self.hosts[layer].pages if layer in self.hosts else self.pages[layer]
        assert where.n_slots >= self.s_prompt, f"layer {layer} does not hold its prompt any more"
        return where.read(torch.arange(self.s_prompt).unsqueeze(0))

    def keys(self, layer: int) -> Tensor:
        return self.prompt(layer)[0]

    def values(self, layer: int) -> Tensor:
        return self.prompt(layer)[1]

    def host(self, layer: int) -> Pair:
        return self.prompt(layer)

    def held_layers(self) -> list[int]:
        return [*self.pages]

    def offload(self, layer: int) -> None:
        """A host is made where a layer asks for one."""

    def hold(self, layer: int) -> None:
        """Do nothing: what stays is what the method's placement says."""


class PagedHost(Host):
    """All tokens, in blocks of the host's pool."""

    def __init__(self, pages: Pages, prompt: Pair, n_new: int) -> None:
        self.pages, self.n_prompt, self.device = pages, prompt[0].shape[2], prompt[0].device
        self.has_keys, self.positions, self.is_near, self.n = True, None, False, self.n_prompt
        pages.hold(*prompt, n_new)

    @property
    def k(self) -> Tensor:
        """The prompt's keys."""
        return self.pages.read(torch.arange(self.n_prompt).unsqueeze(0))[0]

    @property
    def late(self) -> Pair:
        """K and V of the tokens that came after the prompt."""
        return self.pages.read(torch.arange(self.n_prompt, self.n).unsqueeze(0))

    def write(self, at: int, k_new: Tensor, v_new: Tensor) -> None:
        self.n = self.n_prompt + at + k_new.shape[2]
        self.pages.write(self.n_prompt + at, k_new, v_new)

    def tokens(self, idx: Tensor, mask: Tensor | None, late: bool) -> Part:
        """Copies: query heads of a group that choose for themselves are read one after the other."""
        rows, h_kv = idx.shape[0], self.pages.pool.h_kv
        slots = idx.clamp(min=0).transpose(0, 1).reshape(h_kv, -1)  # (h_kv, heads of it * rows * k)
        k, v = (x.view(idx.shape[1], rows, idx.shape[2], -1).transpose(0, 1) for x in self.pages.read(slots))
        return Part(k, v, mask)

    def held(self, stop: int) -> list[Pair]:
        return [self.pages.read(torch.arange(stop).unsqueeze(0))]

    def keys(self, start: int, stop: int) -> Tensor:
        return self.pages.read(torch.arange(start, stop).unsqueeze(0))[0][0]


class PagedHome(Home):
    """What a layer gets of this engine."""

    trace: PagedTrace

    def memory(self, tokens: list[Pair], n_free: int) -> Memory:
        pages = self.trace.pages[self.layer]
        k, v = (torch.cat(x, 2) for x in zip(*tokens, strict=True))
        pages.hold(k, v, n_free)
        return pages

    def host(self) -> Host:
        host = PagedHost(Pages(self.trace.pools[1]), self.prompt(), self.n_new)
        self.trace.hosts[self.layer] = host
        return host


def whole(home: PagedHome, placement: Whole) -> Layer:
    """The prompt stays in the blocks that it has."""
    n, _, capacity = placement.size(home.s_prompt, home.n_new)
    return Slots(home, home.trace.pages[home.layer], n, 0, capacity)


class PagedStore(Store):
    """All layers of one row."""

    layouts: ClassVar[Layouts] = {Whole: whole, Kept: Slots.of, Made: Marked.made, Offloaded: Fetching.of}

    def home(self, layer: int, placement: Placement) -> Home:
        home = super().home(layer, placement)
        if self.host_code is not None or home.meter.cache is not None:
            raise ConfigError("the paged engine has neither codes on its host nor a cache of blocks in front of it")
        return PagedHome(**vars(home))

    def place(self, layer: int, placement: Placement) -> None:
        if type(placement) not in self.layouts:
            raise ConfigError(f"the paged engine has no pages for {type(placement).__name__}; use kvbench.engine.store")
        super().place(layer, placement)
