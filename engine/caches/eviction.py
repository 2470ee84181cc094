"""On an accelerator: rows that update their sums by a step's weights, and evict by them, all in one go.

Rows of all methods share their launches. Where the steps to come are like the last one, these are planned once
(`UpdatePlan`): sums and positions stay where they are and are written over.

Not here: the arithmetic (`kernels/rows/weights.py`), what a method makes of its sums (`methods`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from kvbench.engine.layouts.slots import Slots
from kvbench.kernels.clock import Since
from kvbench.kernels.rows.weights import EVERY, Held, Receiving, Row, receive_rows

ALL = (0, 1 << 31)  # positions
NEVER = 1 << 62  # more tokens than any layer holds


class Update(NamedTuple):
    """What one row's layer takes from a step's weights.

    A token that leaves is of its head's lowest sum, of equal ones the higher position; one owner speaks for all heads.
    """

    layer: Slots
    weights: Tensor  # (1, h, n)
    owners: int  # heads that have sums of their own
    reduce: str  # one of `REDUCTIONS`: how a step's weights of an owner's query heads are added to its sums
    before: Tensor | None = None  # (1, owners, n - 1), what its tokens had received before
    most: int = NEVER  # tokens that a head holds; of more it evicts one after the step
    candidates: tuple[int, int] = ALL  # positions, the last one exclusive, of which it does
    keep: Callable[[Tensor], None] | None = None  # takes sums (1, owners, tokens), as slots are from then on
    sums: Tensor | None = None  # where they are, with room for all tokens to come: nobody takes them then
    first: int = EVERY  # slots in front of it receive nothing

    @property
    def n(self) -> int:
        return self.weights.shape[2]

    @property
    def evicts(self) -> bool:
        return self.n > self.most


def update_rows(rows: Sequence[Update]) -> None:
    """Update the sums of rows by the step that was just made."""
    found = receive_rows([asked(row) for row in rows]) if rows else ()
    for row, (sums, positions, evicted) in zip(rows, found, strict=True):
        note(row, positions, evicted)
        if row.keep is not None:
            row.keep(sums[..., :-1] if row.evicts else sums)


def asked(row: Update) -> Row:
    """What the kernels take."""
    at = row.layer
    if not row.evicts:
        return Row(row.weights, row.owners, row.reduce, row.before, sums=row.sums, first=row.first)
    assert at.n_window == at.n_seen - at.start > 0, f"layer {at.index} has a window that slid"
    held = Held(at.k, at.v, at.kept_positions, at.n_kept, at.start)
    return Row(row.weights, row.owners, row.reduce, row.before, held, *row.candidates)


def note(row: Update, positions: Tensor | None, evicted: Tensor | None) -> None:
    """Let the layer know who left at a step."""
    if row.evicts:
        assert positions is not None and evicted is not None, "nobody left"
        row.layer.has_evicted(positions, evicted)


class UpdatePlan:
    """Updates at steps that are alike: each row has as many tokens as at the last one, or one more every time."""

    def __init__(self, rows: Sequence[Update], more: Sequence[int], n_steps: int) -> None:
        """Rows as they will be at the next step; `more` tokens come to each at every step, and `n_steps` at most."""
        self.rows, self.more = rows, more
        for row, grows in zip(rows, more, strict=True):
            if not row.evicts and grows:
                n_steps = min(n_steps, row.most - row.n + grows)
            elif row.evicts == (grows > 0):
                n_steps = 0  # it fills up or slides as no updated row does
        self.n_steps = n_steps
        if n_steps == 0:
            return
        self.sums = [self.memory(row, grows) for row, grows in zip(rows, more, strict=True)]
        asked = [self.asked(row, sums) for row, sums in zip(rows, self.sums, strict=True)]
        self.planned = Receiving(asked, more, n_steps)

    def memory(self, row: Update, grows: int) -> Tensor:
        """Where a row's sums are from now on."""
        if row.sums is not None:
            return row.sums
        sums = row.weights.new_empty(1, row.owners, row.n + grows * self.n_steps)
        if row.before is not None:
            sums[..., : row.n - 1] = row.before
        if row.keep is not None:
            row.keep(sums[..., : row.n - 1])
        return sums

    def asked(self, row: Update, sums: Tensor) -> Row:
        """What the kernels take at the next step."""
        at, before = row.layer, None if row.before is None else sums[..., : row.n - 1]
        if not row.evicts:
            return Row(row.weights, row.owners, row.reduce, before, sums=sums, first=row.first)
        assert at.kept_positions is not None and at.n_kept == row.n - 1, (at.n_kept, row.n)
        held = Held(at.k, at.v, at.kept_positions, at.n_kept, at.start, at.kept_positions)
        return Row(row.weights, row.owners, row.reduce, before, held, *row.candidates, sums)

    def take(self, since: Since) -> None:
        """Update, at a step after the one that was planned; kernels know the first such step."""
        self.planned.take(since.later(1))

    def write(self, age: int) -> None:
        """Bring the step so many after it into the books of layers that have taken in its token."""
        outcomes = zip(self.rows, self.more, self.sums, self.planned.outcomes, strict=True)
        for row, grows, sums, (_, positions, evicted) in outcomes:
            if row.layer.is_over:
                continue
            n = row.n + grows * (age - 1)
            note(row, positions, evicted)
            if row.keep is not None and grows:
                row.keep(sums[..., :n])
