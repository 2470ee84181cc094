"""`QuantisingMethod`: every token is kept and attended to, as codes that a codec makes.

Not here: any codec of a method; a layer of codes (`engine/caches/coded.py`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from engine.store import Coder
from methods.base import SelectiveAttention


class QuantisingMethod(SelectiveAttention):
    """A method that writes `coder` alone."""

    @classmethod
    @abstractmethod
    def coder(cls, params: Any, plan: Any) -> Coder:
        """What makes codes of a layer's K and V."""

    def arrange(self, layer: int) -> None:
        self.store.keep_coded(layer, self.coder(self.params, self.plan))

    def protected(self, layer: int) -> Sequence[int]:
        return range(self.store[layer].n_seen)
