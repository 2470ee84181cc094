"""Tokens of a feed that a row reads in one call: `Feed`.

Not here: what is selected for each of them (`engine/selection.py`), how they are read (`engine/turns/at_once.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.layouts.layer import Layer
from engine.softmax import Softmax


class Moment(NamedTuple):
    """Where a layer is once a token has come."""

    n_seen: int  # tokens so far, this one included
    n_window: int  # tokens in the window, this one included


@dataclass(frozen=True)
class Feed:
    """The tokens of one row in one layer."""

    q: Tensor  # (1, h, m, d_h)
    k: Tensor  # (1, h_kv, m, d_h)
    v: Tensor
    soft: Softmax
    moments: Sequence[Moment]  # of each token

    @property
    def queries(self) -> Tensor:
        """One behind the other, as if they were rows: (m, h, 1, d_h)."""
        return self.q.transpose(1, 2).transpose(0, 1).transpose(1, 2)


def moments(at: Layer, m: int) -> list[Moment]:
    """Those of the next `m` tokens."""
    return [Moment(at.n_seen + t, min(at.capacity, at.n_window + t)) for t in range(1, m + 1)]


def outgoing(at: Layer, m: int, dtype: torch.dtype) -> Tensor | None:
    """Which of the window's slots are overwritten before each of `m` tokens: (m, n_window), -inf there, 0 elsewhere.

    None where the window has room for all of them.
    """
    if at.n_window + m <= at.capacity:
        return None
    device = at.device
    slots, t = torch.arange(at.n_window, device=device), torch.arange(1, m + 1, device=device)
    age = (at.n_seen - 1 - at.start - slots) % at.capacity
    hidden = torch.zeros(m, at.n_window, dtype=dtype, device=device)
    return hidden.masked_fill_(age >= at.capacity - t.unsqueeze(1), -torch.inf)
