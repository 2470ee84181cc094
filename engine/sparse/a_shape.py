"""A-shape and Tri-shape (Li et al., 2024, SCBench, arXiv 2412.10319): the first tokens and the nearest ones.

Every query sees the prompt's first `n_init` tokens and the last `n_local` up to its own. Tri-shape's last `n_last`
queries see all of their past: they decide the first token of the answer. Token by token, nothing is rounded to blocks.

Cost      nothing is estimated.
Fails     where what is asked for stands in the middle; Tri-shape finds it for the first answer and not for later turns,
          whose questions meet K and V that never saw it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.engine.declared import Count, Tokens, Window
from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.base import SparsePrefill
from kvbench.engine.sparse.blocks import spans
from kvbench.kernels.attend_kept import Kept

TILE = 64  # of queries and keys that are worked on together


@dataclass(frozen=True, kw_only=True)
class AShape(SparsePrefill):
    """The keys of conf/prefill/a_shape.yaml."""

    n_init: Tokens  # first tokens
    n_local: Window  # nearest tokens, a query's own included; a `density` fixes them instead

    title: ClassVar[str] = "A-shape"

    def near(self, s: int) -> int:
        """Nearest tokens that are kept of a prompt of `s`."""
        if self.density is None:
            return self.n_local
        low, high = 1, s  # the most whose pairs are no more than allowed
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.pairs(s, middle) <= self.n_pairs(s) else (low, middle - 1)
        return low

    def pairs(self, s: int, n_local: int) -> int:
        """Pairs of a head with so many nearest tokens."""
        until = s - self.n_dense(s)
        whole = min(until, self.n_init + n_local)  # queries that see their whole past
        return (s * (s + 1) - until * (until + 1) + whole * (whole + 1)) // 2 + (until - whole) * (
            self.n_init + n_local
        )

    def keeps_all(self, s: int) -> bool:
        return s <= self.n_init + self.near(s)

    def estimate(self, s: int) -> float:
        return 0.0

    def choose(self, q: Tensor, k: Tensor, softmax: Softmax, layer: int) -> Kept:
        s, n_local = k.shape[2], self.near(k.shape[2])
        queries, keys = spans(s, TILE, TILE, q.device)
        first, start = (queries - 1) // TILE * TILE, (keys - 1) // TILE * TILE
        blocks = (start < queries) & ((start < self.n_init) | (keys > first - n_local + 1))
        return Kept(
            s, TILE, s - self.n_dense(s), blocks.expand(q.shape[1], -1, -1).contiguous(), TILE, self.n_init, n_local
        )


@dataclass(frozen=True, kw_only=True)
class TriShape(AShape):
    """The keys of conf/prefill/tri_shape.yaml."""

    n_last: Count  # queries at the end that see all of their past

    title: ClassVar[str] = "Tri-shape"

    def n_dense(self, s: int) -> int:
        return min(max(self.n_last, self.dense_last), s)
