"""On an accelerator: rows that learn from a step's weights, and evict by them, all in one go.

Not here: the arithmetic (`kernels/rows/weights.py`), what a method makes of its sums (`methods`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.layouts.slots import Slots
from kernels.rows.weights import Held, Row, receive_rows


class Learning(NamedTuple):
    """What one row's layer learns from a step."""

    layer: Slots
    weights: Tensor  # (1, h, n)
    before: Tensor | None = None  # (1, owners, n - 1), what its tokens had received before
    candidates: tuple[int, int] | None = None  # positions, the last one exclusive, of which each head evicts one
    held_bytes: int = 0  # of what is learnt


def learn_rows(rows: Sequence[Learning], owners: int, reduce: str) -> list[Tensor]:
    """What the tokens of each row received, (1, owners, tokens), slot by slot as the layer has them from now on.

    A token that leaves is of its head's lowest sum, of equal ones the higher position; one owner speaks for all heads.
    """
    found = receive_rows([asked(row) for row in rows], owners, reduce)
    for row, (_, positions, evicted) in zip(rows, found, strict=True):
        row.layer.meter.hold(row.held_bytes)
        if positions is not None and evicted is not None:
            row.layer.has_evicted(positions, evicted)
    return [sums if evicted is None else sums[..., :-1] for sums, _, evicted in found]


def asked(row: Learning) -> Row:
    """As the kernels take it."""
    at = row.layer
    if row.candidates is None:
        return Row(row.weights, row.before)
    held = Held(at.k, at.v, at.kept_positions, at.n_kept, at.start)
    assert at.n_window == at.n_seen - at.start > 0, f"layer {at.index} has a window that slid"
    return Row(row.weights, row.before, held, *row.candidates)
