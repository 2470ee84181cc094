"""Observations: by-products of the prefill that methods ask for, computed once per sample and shared by all variants.

A method declares them (`SelectiveAttention.observations`); the prefill takes the union over the variants, so equal
observations must be equal objects: frozen dataclasses, compared by their fields.

Not here: what a method makes of an observation.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Observation(ABC):
    """Something seen of one layer while the prompt is read."""

    @abstractmethod
    def observe(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """From the layer's q (1, h, s, d_h) and k (1, h_kv, s, d_h), both after rotary embedding."""


@dataclass(frozen=True)
class LastQueries(Observation):
    """The queries of the prompt's last `w` tokens: (1, h, min(w, s), d_h)."""

    w: int

    def observe(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return q[
            :, :, -self.w :
        ].clone()  # a copy: a view would keep all of the layer's queries alive
