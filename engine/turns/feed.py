"""Tokens of a feed that a row reads in one call: `Feed`.

Not here: what is selected for each of them (`engine/selection.py`), how they are read (`engine/turns/at_once.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvbench.engine.softmax import Softmax


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
    softmax: Softmax
    moments: Sequence[Moment]  # of each token

    @property
    def queries(self) -> Tensor:
        """Queries one after the other, as if they were rows: (m, h, 1, d_h)."""
        return self.q.transpose(1, 2).transpose(0, 1).transpose(1, 2)
