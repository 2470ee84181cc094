"""A layer whose tokens lie on the device as codes, in a quantized (`engine/caches/quantized.py`).

Not here: how a method packs (`methods/quantising`), what packed bytes look like (`kernels/packed`).
"""

from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.ledger import Entry
from kvbench.engine.caches.quantized import QuantizedCache
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.layouts.home import Home
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.placement import Coded
from kvbench.kernels.rows.append import Place


class QuantizedLayer(Layer):
    """A layer that holds its tokens in a quantized. It neither fetches nor drops."""

    packs, takes_feeds = True, False

    def __init__(self, home: Home, quantized: QuantizedCache, positions: Tensor | None) -> None:
        """The quantized has the prompt's tokens at `positions` (1, h_kv, n) (None: all)."""
        super().__init__(home, quantized.n, 0, home.n_new, positions)
        self.quantized = quantized

    @classmethod
    def of(cls, home: Home, placement: Coded) -> Layer:
        k, v = home.prompt(slice(None) if placement.chosen is None else placement.chosen)
        quantized = placement.make(k, v, home.n_new, lambda what: home.trace.observed(what, home.layer))
        return cls(home, quantized, placement.chosen)

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        self.advance(k_new, v_new)
        self.quantized.append(k_new, v_new)

    def places(self, k_new: Tensor, v_new: Tensor) -> list[Place]:
        """None: caches of all rows say them together."""
        self.advance(k_new, v_new)
        return []

    def growing(self) -> Growing | None:
        return self.quantized.growing()

    def repeat(self, k_new: Tensor, v_new: Tensor) -> None:
        self.advance(k_new, v_new)
        self.quantized.repeat()

    def resident(self) -> list[Part]:
        return self.quantized.parts()

    def close(self, step: int) -> Entry:
        """End the step: what has aged is packed, and bytes are the quantized's."""
        entry = super().close(step)
        self.quantized.pack_due()
        return entry._replace(resident_kv_bytes=self.quantized.counted_bytes())

    def allocated_bytes(self) -> int:
        return sum(x.nbytes for x in self.quantized.tensors())
