"""The device cache of recent selections: tokens fetched in the last steps are still there and need not move again.

One per layer, in place of a block cache (`engine/caches/blocks.py`). It is what ClusterKV calls a cache of clusters: a
selection holds whole clusters but for the last one, so tokens that stay are clusters that stay. A token of a KV head is
held once, whichever of its query heads asked.

Not here: counting bytes (`engine/books/meter.py`).
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.engine.caches.device import DeviceCache, HostTokens, LookUp


class RecentTokens(DeviceCache):
    """Which tokens of one layer the last `n_steps` selections brought."""

    def __init__(self, n_steps: int, n_tokens: int) -> None:
        assert n_steps >= 1, f"{n_steps} steps"
        self.n_steps = n_steps
        self.n_tokens = n_tokens  # prompt and all tokens that may follow
        self.selections: deque[Tensor] = deque(maxlen=n_steps)  # (h_kv, n_tokens + 1) bool each
        self.n_marked = 0  # (KV head, token) pairs on the device, the latest selection included
        self.came: list[int] = []  # on an accelerator: pairs there by the selection that asked for them last

    def access(self, idx: Tensor, h_kv: int, padded: bool) -> tuple[int, int, int]:
        """Take in a selection (1, heads, k); where `padded`, -1 stands for no token.

        Returns the tokens that KV heads ask for, each once; how many of them were held; and the same hits once per
        head of `idx`.
        """
        asked, places = mark_tokens(idx, h_kv, self.n_tokens, padded)
        hits = hits_of_heads = 0
        if self.selections:
            held = self.union()
            hits = int((asked & held).count_nonzero())
            hits_of_heads = int(held.gather(1, places).count_nonzero())
        self.selections.append(asked)
        distinct = int(asked.count_nonzero())
        one = len(self.selections) == 1
        self.n_marked = distinct if one else int(self.union().count_nonzero())
        return distinct, hits, hits_of_heads

    def look_up(self, idx: Tensor, h_kv: int, host: HostTokens, padded: bool) -> LookUp:
        return LookUp(*self.access(idx, h_kv, padded))

    def read_counts(self, n_distinct: int, n_there: int, by_age: Sequence[int], blocks: Sequence[int]) -> LookUp:
        for age in range(1, min(self.n_steps, len(self.came)) + 1):
            self.came[-age] -= by_age[age - 1]
        self.came = [*self.came, n_distinct][-self.n_steps - 1 :]
        hits, held = sum(by_age[: self.n_steps]), sum(self.came[-self.n_steps :])
        return LookUp(n_distinct, hits, n_there, late=held)

    def n_held(self, h_kv: int) -> int:
        return self.n_marked

    def union(self) -> Tensor:
        """All tokens held, (h_kv, n_tokens + 1) bool."""
        first, *others = self.selections
        for other in others:
            first = first | other
        return first


def mark_tokens(idx: Tensor, h_kv: int, n: int, padded: bool = True) -> tuple[Tensor, Tensor]:
    """Which of `n` tokens KV heads ask for, (h_kv, n + 1) bool, and in which columns those of `idx` (1, heads, k) are.

    Where `padded`, -1 stands for no token: it has the last column, which is False.
    """
    columns = idx[0].reshape(h_kv, -1)
    if padded:
        columns = columns % (n + 1)
    marks = torch.zeros(h_kv, n + 1, dtype=torch.bool, device=idx.device)
    marks.scatter_(1, columns, True)
    if padded:
        marks[:, -1] = False
    return marks, columns


def distinct_tokens(idx: Tensor, h_kv: int, n: int) -> Tensor:
    """What the heads of `idx` (1, heads, k) ask for of `n` tokens, each once per KV head, head after head."""
    marks, _ = mark_tokens(idx, h_kv, n)
    return marks.nonzero()[:, 1]
