"""`select_alike`: rows that can be searched together.

Not here: the searches.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from torch import Tensor

from engine.selection import Found
from methods.base import SelectiveAttention

Row = TypeVar("Row", bound=SelectiveAttention)


def select_alike(
    rows: Sequence[Row],
    q: Tensor,
    key: Callable[[Row], Hashable],
    select: Callable[[Sequence[Row], Tensor], Sequence[Found]],
) -> list[Found]:
    """`select` for the rows of each `key` together, with their queries of q (n, h, 1, d_h); in the order of `rows`."""
    places: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(key(row), []).append(i)
    if len(places) == 1:
        return list(select(rows, q))
    selections: list[Found] = [None] * len(rows)
    for alike in places.values():
        for i, idx in zip(alike, select([rows[i] for i in alike], q[alike]), strict=True):
            selections[i] = idx
    return selections
