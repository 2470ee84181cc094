"""A layer whose tokens lie on the device as codes, in a codec (`engine/caches/coded.py`).

Not here: how a method packs (`methods/quantising`), what packed bytes look like (`kernels/packed`).
"""

from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.ledger import Entry
from kvbench.engine.caches.coded import Codec
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.layouts.home import Home
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.placement import Coded
from kvbench.kernels.rows.append import Place


class CodedLayer(Layer):
    """A layer that holds its tokens in a codec. It neither fetches nor drops."""

    packs, takes_feeds = True, False

    def __init__(self, home: Home, codec: Codec, positions: Tensor | None) -> None:
        """The codec has the prompt's tokens at `positions` (1, h_kv, n) (None: all)."""
        super().__init__(home, codec.n, 0, home.n_new, positions)
        self.codec = codec

    @classmethod
    def of(cls, home: Home, placement: Coded) -> Layer:
        k, v = home.prompt(slice(None) if placement.chosen is None else placement.chosen)
        codec = placement.make(k, v, home.n_new, lambda what: home.trace.observed(what, home.layer))
        return cls(home, codec, placement.chosen)

    def append(self, k_new: Tensor, v_new: Tensor) -> None:
        self.advance(k_new, v_new)
        self.codec.append(k_new, v_new)

    def places(self, k_new: Tensor, v_new: Tensor) -> list[Place]:
        """None: codecs of all rows say them together."""
        self.advance(k_new, v_new)
        return []

    def growing(self) -> Growing | None:
        return self.codec.growing()

    def repeat(self, k_new: Tensor, v_new: Tensor) -> None:
        self.advance(k_new, v_new)
        self.codec.repeat()

    def resident(self) -> list[Part]:
        return self.codec.parts()

    def close(self, step: int) -> Entry:
        """End the step: what has aged is packed, and bytes are the codec's."""
        entry = super().close(step)
        self.codec.settle()
        return entry._replace(resident_kv_bytes=self.codec.counted_bytes())

    def allocated_bytes(self) -> int:
        return sum(x.nbytes for x in self.codec.tensors())
