"""A cell's reply to a sample: its answer and what was measured, or why there is none.

Not here: how it is written (`evals/lines.py`).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvbench.engine.batch import Answer
from kvbench.engine.books.spans import Record
from kvbench.engine.decode import Decoded
from kvbench.evals.cells import Cell
from kvbench.methods.base import SelectiveAttention
from kvbench.tasks.forced import Outcome


@dataclass(frozen=True)
class TurnReply:
    """One turn of a conversation: what was read in it, and how long that took."""

    index: int  # from 0
    feed_ids: tuple[int, ...]  # read in this turn, the last token of an earlier answer included
    feed_s: float  # of the pass over the feed, shared by all rows of its batch
    n_before: int  # fetches noted before this turn


@dataclass
class Reply:
    """One cell's reply to a sample, or to one turn of it."""

    cell: Cell
    row: SelectiveAttention | None = None  # the method that led to its answer; None: there is no answer
    answer: Answer = field(default_factory=Answer)
    decoded: Decoded = field(default_factory=lambda: Decoded([], []))
    prefill_s: float = 0.0
    outcome: Outcome | None = None  # where the task measured what was read, not a text
    turn: TurnReply | None = None  # of a conversation
    lost: tuple[str, str] | None = None  # status and reason, where there is no answer
    text: str = ""  # of the answer


class Profile(NamedTuple):
    """Where the time of a cell's answer went."""

    cell: Cell
    record: Record
