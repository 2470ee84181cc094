"""What answers are made to say: a `Cue`.

Not here: who interrupts (`methods`), the step loop (`engine/batch.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cue:
    """What an answer is made to say once it has `after` tokens, unless it has said the `marker` by itself."""

    after: int
    ids: Sequence[int]
    marker: Sequence[int] = ()

    def token(self, said: Sequence[int]) -> int | None:
        """The next token of an answer that has said so much; None: its own."""
        at, n = len(said) - self.after, len(self.marker)
        if not 0 <= at < len(self.ids):
            return None
        own = [*said[: self.after]]
        has_said = n and any(own[i : i + n] == [*self.marker] for i in range(len(own) - n + 1))
        return None if has_said else self.ids[at]
