"""Queries of a part's own in place of a step's: turned to the frame of its keys, or their numbers in its keys' order.

A part says how (`Part.asked`), and queries of all parts that say it alike are made at once.

Not here: attention (`engine/attend.py`), queries that a method makes for a step (`Part.q`).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.kernels.jit import constants

Make = Callable[[Tensor, Tensor | None], Tensor]  # of queries (n, h, 1, d_h), into a tensor if one is given


class Asked(Protocol):
    """How a part's queries are made of a step's."""

    @property
    def kind(self) -> Hashable:
        """Equal where queries can be made at once."""
        ...

    def together(self, several: Sequence[Any]) -> Make:
        """A function that makes the queries of several parts of this kind, one for each."""
        ...


class Rotated(NamedTuple):
    """Keys lie in a frame to which queries are rotated by a matrix (d_h, d_h) float32 that has this name."""

    rotation: Tensor
    name: Hashable

    @property
    def kind(self) -> Hashable:
        return "rotated", self.name, self.rotation.shape

    def together(self, several: Sequence[Any]) -> Make:
        turn = self.rotation.mT

        def make(q: Tensor, out: Tensor | None) -> Tensor:
            # A CPU's product of several rows would round otherwise than that of each.
            x = q.float() @ turn if q.device.type != "cpu" else torch.cat([row.float() @ turn for row in q.split(1)])
            return x.to(q.dtype) if out is None else out.copy_(x)

        return make


class Reordered(NamedTuple):
    """Which number of a query meets each of a key's, (1, h, 1, d_h); d_h: none does."""

    channels: Tensor

    @property
    def kind(self) -> Hashable:
        return "reordered"

    def together(self, several: Sequence["Reordered"]) -> Make:
        channels = self.channels if len(several) == 1 else torch.cat([each.channels for each in several])

        def make(q: Tensor, out: Tensor | None) -> Tensor:
            wide = torch.nn.functional.pad(q, (0, 1))  # with a number that is 0
            return wide.gather(3, channels) if out is None else torch.gather(wide, 3, channels, out=out)

        return make


class Asking:
    """Parts of one kind and their rows: makes their queries, at every step."""

    def __init__(self, rows: Sequence[int], how: Sequence[Asked], n: int, device: torch.device) -> None:
        """Take parts from `rows` of a batch of `n` rows."""
        self.n, self.make = n, how[0].together(how)
        self.rows = None if [*rows] == [*range(n)] else constants(tuple(rows), device)

    def take(self, q: Tensor, out: Tensor | None = None) -> Tensor:
        """A query for each part, (parts, h, 1, d_h); q may have more after those of the rows."""
        if self.rows is not None:
            return self.make(q.index_select(0, self.rows), out)
        return self.make(q if len(q) == self.n else q[: self.n], out)


def alike(parts: Sequence[tuple[int, Any]]) -> list[list[tuple[int, Any]]]:
    """Rows and parts that are asked in some way, those of a kind together."""
    kinds: dict[Hashable, list[tuple[int, Any]]] = {}
    for i, part in parts:
        if part.asked is not None:
            kinds.setdefault(part.asked.kind, []).append((i, part))
    return [*kinds.values()]
