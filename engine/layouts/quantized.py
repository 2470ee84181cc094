"""A layer whose tokens lie on the device as codes, in a quantized cache (`engine/caches/quantized.py`).

Not here: how a method packs (`methods/quantising`), what packed bytes look like (`kernels/packed`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.books.ledger import Entry
from kvbench.engine.caches.quantized import QuantizedCache
from kvbench.engine.errors import NotFiniteError
from kvbench.engine.layouts.growing import Growing
from kvbench.engine.layouts.home import Home
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.layouts.whole import OFFSET_BYTES
from kvbench.engine.placement import Coded
from kvbench.kernels.gather import move_both
from kvbench.kernels.rows.append import Place


class QuantizedLayer(Layer):
    """A layer that holds its tokens in a quantized cache. It neither fetches nor drops."""

    packs, takes_feeds = True, False

    def __init__(self, home: Home, quantized: QuantizedCache, positions: Tensor | None) -> None:
        """The cache has the prompt's tokens at `positions` (1, h_kv, n) (None: all)."""
        super().__init__(home, quantized.n, 0, home.n_new, positions)
        self.quantized = quantized

    @classmethod
    def of(cls, home: Home, placement: Coded) -> Layer:
        chosen, seen = placement.chosen, lambda what: home.trace.observed(what, home.layer)
        if isinstance(chosen, Sequence):
            return RaggedQuantizedLayer.of_heads(home, placement, chosen)
        k, v = home.prompt(slice(None) if chosen is None else chosen)
        refuse_nan(home.layer, k, v)
        return cls(home, placement.make(k, v, home.n_new, seen), chosen)

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
        """End the step: what has aged is packed, and bytes are the cache's."""
        entry = super().close(step)
        self.quantized.pack_due()
        return entry._replace(resident_kv_bytes=self.quantized.counted_bytes())

    def allocated_bytes(self) -> int:
        return sum(x.nbytes for x in self.quantized.tensors())


def refuse_nan(layer: int, k: Tensor, v: Tensor) -> None:
    """Raise `NotFiniteError` for a key or value that is no number, which no code stands for; infinity saturates."""
    for name, x in (("key", k), ("value", v)):
        if x.shape[2] and x.amax().isnan():
            token = int(x.isnan().any(-1).any(1).nonzero()[0, 1])
            raise NotFiniteError(f"layer {layer}: the {name} of token {token} of those that are packed is NaN")


class RaggedQuantizedLayer(QuantizedLayer):
    """A layer in which each KV head has coded tokens of its own number."""

    of_each: Sequence[int]  # of the prompt's tokens that heads keep

    @classmethod
    def of_heads(cls, home: Home, placement: Coded, chosen: Sequence[Tensor]) -> Layer:
        pairs = [
            move_both(lambda x, at=at, head=head: x[:, head : head + 1, at], *home.prompt())
            for head, at in enumerate(chosen)
        ]
        for pair in pairs:
            refuse_nan(home.layer, *pair)
        make: Any = placement.make
        quantized = make.of_heads(pairs, home.n_new, lambda what: home.trace.observed(what, home.layer))
        positions = torch.nn.utils.rnn.pad_sequence([*chosen], batch_first=True, padding_value=-1).unsqueeze(0)
        layer = cls(home, quantized, positions)
        layer.of_each = [len(at) for at in chosen]
        layer.n_spare = layer.n_kept * len(chosen) - sum(layer.of_each)
        layer.n_hidden = layer.meter.shape.g * layer.n_spare
        return layer

    def kept_counts(self) -> list[int]:
        return [*self.of_each]

    def close(self, step: int) -> Entry:
        self.meter.hold(OFFSET_BYTES * (self.meter.shape.h_kv + 1))
        return super().close(step)
