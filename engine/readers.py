"""Layers that attend to K and V of another one: in a step, with queries of their own, to what its rows attended to.

Such a layer stores nothing. What its owner keeps, drops and fetches is chosen by the owner's queries alone; tokens that
leave do so once the last reader of the step has attended.

Not here: which layers these are (`engine/checkpoints/kinds.py`), a pass over a prompt, where they are given all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvbench.engine.attend import Part, attend_rows
from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import Change
from kvbench.engine.row import Row
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax


@dataclass
class Held:
    """An owner's step that is not over."""

    rows: Sequence[Row]
    parts: Sequence[list[Part]]
    changes: Sequence[tuple[Row, Change]]


def end(layer: int, held: Held) -> None:
    """Tokens leave, and the step goes into the books."""
    for row, change in held.changes:
        row.store.change(layer, change)
    for row in held.rows:
        row.store.close(layer)


class Readers:
    """Readers of one model's layers, and the steps of owners whose readers are to come."""

    def __init__(self, shape: ModelShape) -> None:
        self.name, self.owner = shape.name, dict(shape.readers)
        self.last = {owner: layer for layer, owner in shape.readers}
        self.held: dict[int, Held] = {}

    def hold(self, layer: int, held: Held) -> None:
        """An owner has attended: its step ends at once, or after its last reader."""
        if layer not in self.last:
            return end(layer, held)
        for row, parts in zip(held.rows, held.parts, strict=True):
            if any(part.q is not None for part in parts):
                raise ConfigError(
                    f"{type(row).title} turns queries for some of its tokens, and layers of the model {self.name!r} "
                    "attend to these with queries of their own; use a method that leaves queries as they are"
                )
        self.held[layer] = held

    def attend(self, layer: int, q: Tensor, softmax: Softmax) -> Tensor:
        """A reader's output (n, h, 1, d_v)."""
        owner = self.owner[layer]
        held = self.held[owner]
        out, _ = attend_rows(q, held.parts, softmax, [False] * len(held.rows))
        if self.last[owner] == layer:
            end(owner, self.held.pop(owner))
        return out
