"""`DeviceCache`: which fetched tokens of one layer stay on the device, so that they need not move again.

A policy says which: runs of consecutive tokens that are wanted most (`engine/caches/blocks.py`), or all tokens of the
latest selections (`engine/caches/recent.py`). Where the device is an accelerator it looks tokens up itself, and the
policy reads its counts.

Not here: counting bytes (`engine/books/meter.py`), the memory of what stays (`engine/caches/held.py`,
`engine/caches/staging.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # settings read a cache's specification before torch is imported
    from torch import Tensor


class HostTokens(NamedTuple):
    """Tokens of a layer in a step."""

    n_seen: int
    n_kept: int  # the first ones, which are not fetched
    n_complete: int  # tokens after them that no later one changes


class LookUp(NamedTuple):
    """What a look-up found."""

    distinct: int  # tokens of KV heads that were asked for, each once
    hits: int  # of these on the device
    hits_of_heads: int  # the same once per head that asked
    filled: int = 0  # tokens that every KV head takes in in addition to what was fetched
    late: int = 0  # pairs that `n_held` did not know of before an accelerator's counts were read


class DeviceCache(ABC):
    """The fetched tokens of one layer that lie on the device."""

    n_steps: int = 0  # latest selections that stay as a whole

    @abstractmethod
    def look_up(self, idx: "Tensor", h_kv: int, host: HostTokens, padded: bool) -> LookUp:
        """Look up a selection (1, heads, k) and take in what stays; where `padded`, -1 stands for no token."""

    @abstractmethod
    def read_counts(self, n_distinct: int, n_there: int, by_age: Sequence[int], blocks: Sequence[int]) -> LookUp:
        """What an accelerator's look-up found, by its counts (`kernels/rows/union.py`, `kernels/rows/blocks.py`)."""

    @abstractmethod
    def n_held(self, h_kv: int) -> int:
        """Pairs of KV head and token that it takes room for."""
