"""A trace whose K and V went through codes: what methods see that choose among tokens which are packed already.

What the prefill observed, such as attention of the prompt's last queries, is that of exact K and V.

Not here: what makes codes (`methods/quantising`).
"""

from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from kvbench.engine.observe import Observation
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Quantize
from kvbench.kernels.gather import move_both


class RebuiltTrace(Trace):
    """The exact trace but for K and V, and for what variants share: it follows from them."""

    of_prompt: ClassVar = frozenset({"_exact", "_latest", "_shared"})

    def __init__(self, exact: Trace, quantize: Quantize) -> None:
        self._exact, self.quantize, self._shared = exact, quantize, {}
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

    def release(self) -> None:
        self._shared, self._latest = {}, None
        self._exact.release()

    def _seen(self, layer: int, what: Observation) -> Tensor:
        return self._exact.observed(what, layer)

    def _rebuilt(self, layer: int) -> tuple[Tensor, Tensor]:
        if self._latest is None or self._latest[0] != layer:
            exact, seen = self._exact, partial(self._seen, layer)
            k, v = self.quantize(exact.keys(layer), exact.values(layer), 0, seen).rebuilt()
            k, v = move_both(lambda x: x.contiguous(), k, v)
            self._latest = layer, k, v
        return self._latest[1:]
