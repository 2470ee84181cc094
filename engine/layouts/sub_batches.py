"""Rows of a batch, divided by how they may take their steps, so that no row makes others wait.

On an accelerator the plan of a layer's launches holds for the next step where all rows of a launch only take in tokens
and search as they did (`engine/layouts/launch_plan.py`). A row that does more would have it made anew for all. So these
rows follow the others, with launches of their own.

Not here: a step of a sub_batch (`engine/step.py`).
"""

from collections.abc import Sequence

from kvbench.engine.books.pending import PendingSteps
from kvbench.engine.layouts.launch_plan import LaunchPlan, is_fixed
from kvbench.engine.row import Row
from kvbench.kernels.clock import Clock
from kvbench.kernels.scratch import Scratch


class SubBatch:
    """Rows that follow each other in a batch, and the plans of their layers' launches."""

    def __init__(self, rows: Sequence[Row], apart: Sequence[int], clock: Clock, start: int = 0) -> None:
        """`clock` counts the steps of the batch; rows are so many tokens `apart` from its first one."""
        self.rows, self.at, self.groups = rows, slice(start, start + len(rows)), runs(rows, apart)
        self.clock = clock
        self.plans: dict[int, LaunchPlan] = {}  # by layer
        self.scratch, self.pending = Scratch(), PendingSteps([row.store for row in rows])  # of steps that are alike

    def plan_of(self, layer: int) -> LaunchPlan | None:
        """What the layer's kernels were told; None where each step tells them anew."""
        if layer not in self.plans:
            self.plans[layer] = LaunchPlan(self.groups, self.rows, layer, self.scratch, self.pending, self.clock)
        return self.plans[layer] if self.plans[layer].is_of_use else None


def runs(rows: Sequence[Row], apart: Sequence[int]) -> list[tuple[type[Row], slice]]:
    """Slices of rows of one class at one position, which can be worked on together."""
    found: list[tuple[type[Row], slice]] = []
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or type(rows[i]) is not type(rows[start]) or apart[i] != apart[start]:
            found.append((type(rows[start]), slice(start, i)))
            start = i
    return found


def sub_batches_of(
    rows: Sequence[Row], apart: Sequence[int], are_planned: Sequence[bool], clock: Clock
) -> list[SubBatch]:
    """Rows that may take plan steps, which stand first, and the others."""
    n = sum(are_planned)
    some = [slice(0, n), slice(n, len(rows))]
    return [SubBatch(rows[at], apart[at], clock, at.start) for at in some if at.start < at.stop]


def can_be_planned(row: Row) -> bool:
    """Whether steps of all layers may be like those before them."""
    if not (row.repeats and row.is_stored) or row.store.checked_for or row.store.handed is not None:
        return False
    layers = [row.store[layer] for layer in row.trace.shape.attention_layers]
    return all(at.growing() is not None and all(map(is_fixed, at.resident())) for at in layers)
