"""Steps of rows that are not in their books yet: those are written while a GPU works, or when somebody asks for one.

A step that is like the one before it (`engine/layouts/launch_plan.py`) needs neither ledgers nor where its layers
stand. So its launches come first, and Python writes its books while the host would wait for its token. Who asks a store
for a layer or for the ledger finds both complete.

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
                assert store.pending in (None, self), "rows take steps in two batches"
                store.pending = self
        self.steps.append((write, args))

    def write(self) -> None:
        """Bring all steps into the books, which nobody has asked for: who does still has to `flush`."""
        if self.steps:
            self.enter()
            for store in self.stores:
                store.pending = self

    def flush(self) -> None:
        """Bring all steps into the books of somebody who asks: layers may be others from then on."""
        self.enter()
        self.n_flushed += 1

    def enter(self) -> None:
        for store in self.stores:
            store.pending = None
        steps, self.steps = self.steps, []
        for write, args in steps:
            write(*args)
