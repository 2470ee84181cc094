"""A trace whose K and V went through codes: what methods see that choose among tokens which are packed already.

What the prefill observed, such as attention of the prompt's last queries, is that of exact K and V.

Not here: what makes codes (`methods/quantising`).
"""

from typing import Any

from torch import Tensor

from engine.placement import Coder
from engine.prefill import Trace
from kernels.gather import move_both


class RebuiltTrace(Trace):
    """The exact trace but for K and V, and for what variants share: it follows from them."""

    def __init__(self, exact: Trace, coder: Coder) -> None:
        self._exact, self._coder, self._shared = exact, coder, {}
        self._latest: tuple[int, Tensor, Tensor] | None = None  # layers are asked for one after the other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exact, name)

    @property
    def exact(self) -> Trace:
        return self._exact

    def keys(self, layer: int) -> Tensor:
        return self._rebuilt(layer)[0]

    def values(self, layer: int) -> Tensor:
        return self._rebuilt(layer)[1]

    def _rebuilt(self, layer: int) -> tuple[Tensor, Tensor]:
        if self._latest is None or self._latest[0] != layer:
            part = self._coder(self._exact.keys(layer), self._exact.values(layer), 0).part().gathered()
            k, v = move_both(lambda x: x.contiguous(), part.k, part.v)
            self._latest = layer, k, v
        return self._latest[1:]
