"""What an engine gives to a layer that it places: the prompt, memory, a host and the books, `Home`.

Another engine has a home of its own, and with it the layouts that are here (`engine/paged`).

Not here: which layout a placement becomes (`engine/store.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.books.meter import Meter
from kvbench.engine.caches.host import Host
from kvbench.engine.caches.packed_host import host_of
from kvbench.engine.caches.staging import StagingBuffer
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.layouts.memory import Buffers, Memory, Pair
from kvbench.engine.passes.streams import sent_home
from kvbench.engine.passes.trace import Trace
from kvbench.kernels.gather import gather_tokens, move_both


@dataclass(eq=False)
class Home:
    """The prompt, memory, host and books that the engine gives to one layer."""

    trace: Trace
    layer: int
    n_new: int  # tokens that may be appended
    meter: Meter
    checked_for: str  # whose selections are looked at before memory is read there; empty: nobody's
    host_code: TokenCode | None  # in which tokens lie on the host
    staging: StagingBuffer  # where copies of fetched tokens lie, if the host is another memory
    made: Pair | None = (
        None  # K and V of the prompt where what stays is not as the model made it (engine/post_processing.py)
    )

    @property
    def device(self) -> torch.device:
        return self.trace.device_of(self.layer)

    @property
    def s_prompt(self) -> int:
        return self.trace.s_prompt

    def prompt(self, tokens: slice | Tensor = slice(None)) -> Pair:
        """K and V of the prompt's tokens: a view of them, or a copy of those at positions (1, h_kv, n)."""
        k, v = self.made or (self.trace.keys(self.layer), self.trace.values(self.layer))
        if isinstance(tokens, slice):
            return k[:, :, tokens], v[:, :, tokens]
        return move_both(lambda x: gather_tokens(x, tokens), k, v)

    def latest(self, n: int) -> Pair:
        """The prompt's last `n` tokens."""
        return self.prompt(slice(self.s_prompt - n, self.s_prompt))

    def view(self) -> Pair:
        """The whole prompt, which stays where it is from now on."""
        self.trace.hold(self.layer)
        return self.prompt()

    def memory(self, tokens: list[Pair], n_free: int) -> Memory:
        """Slots that hold copies of these tokens, with room for `n_free` more."""
        return Buffers(tokens, n_free, joint=self.trace.shape.is_latent)

    def host(self) -> Host:
        """The tier from which all tokens of the prompt can be fetched."""
        return host_of(self.trace, self.layer, self.host_code, self.n_new)

    def values_host(self) -> Host:
        """The tier from which values of all tokens of the prompt can be fetched, and no keys."""
        self.trace.offload(self.layer)
        values = self.trace.host(self.layer)[1]
        return Host(values[..., :0], values, self.n_new)

    def some_host(self, chosen: Tensor | None, near: bool) -> Host:
        """A tier of the `chosen` tokens alone (None: all), on the device where it is `near`."""
        far = not near and self.trace.device != self.trace.host_device
        if chosen is not None:
            k, v = self.prompt(chosen)
            if far:
                k, v = move_both(sent_home, k, v)
        elif far:
            self.trace.offload(self.layer)
            k, v = self.trace.host(self.layer)
        else:
            k, v = self.view()
        return Host(k, v, self.n_new, chosen, near=near)
