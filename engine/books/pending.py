"""Steps of rows that are not in their books yet: those are written all at once, when somebody asks for one.

A step that is like the one before it (`engine/layouts/launch_plan.py`) needs neither ledgers nor where its layers
stand, and Python's time there is a GPU's time to wait. Who asks a store for a layer or for the ledger finds both
complete.

Not here: what a step's books are (`engine/store.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Books(Protocol):
    """What a row's books are in."""

    pending: "PendingSteps | None"


class PendingSteps:
    """Pending steps of rows that take them together."""

    def __init__(self, stores: Sequence[Books]) -> None:
        self.stores = stores
        self.steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.n_flushed = 0  # while it stays as it is, nobody has asked: layers are what they were

    def add(self, write: Callable[..., None], *args: Any) -> None:
        """A step, which `write` brings into the books of all rows."""
        if not self.steps:
            for store in self.stores:
                assert store.pending is None, "rows take steps in two batches"
                store.pending = self
        self.steps.append((write, args))

    def flush(self) -> None:
        """Bring all steps into the books."""
        for store in self.stores:
            store.pending = None
        steps, self.steps = self.steps, []
        self.n_flushed += 1
        for write, args in steps:
            write(*args)
