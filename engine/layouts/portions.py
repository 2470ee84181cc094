"""Rows of a batch, divided by how they may take their steps, so that no row makes others wait.

On an accelerator what kernels were told at a step holds for the next one where all rows of a launch only take in
tokens and search as they did (`engine/layouts/steady.py`). A row that does more, such as one that evicts by the weights
of each step, would have them all told anew. So these rows stand behind the others, with launches of their own.

Not here: a step of a portion (`engine/step.py`).
"""

from collections.abc import Sequence

from kvbench.engine.books.unwritten import Unwritten
from kvbench.engine.layouts.steady import Steady, is_fixed
from kvbench.engine.row import Row
from kvbench.kernels.clock import Clock
from kvbench.kernels.scratch import Scratch


class Portion:
    """Rows that stand beside each other in a batch, and what kernels were told of them."""

    def __init__(self, rows: Sequence[Row], apart: Sequence[int], clock: Clock, start: int = 0) -> None:
        """`clock` counts the steps of the batch; rows are so many tokens `apart` from its first one."""
        self.rows, self.at, self.groups = rows, slice(start, start + len(rows)), runs(rows, apart)
        self.clock = clock
        self.steady: dict[int, Steady] = {}  # by layer
        self.scratch, self.unwritten = Scratch(), Unwritten([row.store for row in rows])  # of steps that are alike

    def steady_of(self, layer: int) -> Steady | None:
        """What the layer's kernels were told; None where each step tells them anew."""
        if layer not in self.steady:
            self.steady[layer] = Steady(self.groups, self.rows, layer, self.scratch, self.unwritten, self.clock)
        return self.steady[layer] if self.steady[layer].is_of_use else None


def runs(rows: Sequence[Row], apart: Sequence[int]) -> list[tuple[type[Row], slice]]:
    """Rows of one class that stand beside each other, so many tokens apart, and can be worked on together."""
    found: list[tuple[type[Row], slice]] = []
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or type(rows[i]) is not type(rows[start]) or apart[i] != apart[start]:
            found.append((type(rows[start]), slice(start, i)))
            start = i
    return found


def portions_of(rows: Sequence[Row], apart: Sequence[int], are_steady: Sequence[bool], clock: Clock) -> list[Portion]:
    """Rows that may take steady steps, which stand first, and the others."""
    n = sum(are_steady)
    some = [slice(0, n), slice(n, len(rows))]
    return [Portion(rows[at], apart[at], clock, at.start) for at in some if at.start < at.stop]


def may_be_steady(row: Row) -> bool:
    """Whether steps of all layers may be like those before them."""
    if not (row.repeats and row.is_stored) or row.store.checked_for:
        return False
    layers = [row.store[layer] for layer in row.trace.shape.attention_layers]
    return all(at.growing() is not None and all(map(is_fixed, at.resident())) for at in layers)
