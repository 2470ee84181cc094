"""What answers are made to say: `Interruption` as text, `Cue` as tokens.

Not here: who interrupts (`methods`), the step loop (`engine/decode.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol


@dataclass(frozen=True)
class Interruption:
    """What an answer is made to say once it has `after` tokens, unless it has said the `marker` by itself."""

    after: int
    text: str
    marker: str | None = None


@dataclass(frozen=True)
class Cue:
    """An interruption as tokens."""

    after: int
    ids: Sequence[int]
    marker: Sequence[int] = ()

    @classmethod
    def of(cls, interruption: Interruption, encode: Callable[[str], Sequence[int]]) -> "Cue":
        return cls(interruption.after, encode(interruption.text), encode(interruption.marker or ""))

    def token(self, said: Sequence[int]) -> int | None:
        """The next token of an answer that has said so much; None: its own."""
        at, n = len(said) - self.after, len(self.marker)
        if not 0 <= at < len(self.ids):
            return None
        own = [*said[: self.after]]
        has_said = n and any(own[i : i + n] == [*self.marker] for i in range(len(own) - n + 1))
        return None if has_said else self.ids[at]


class Speaker(Protocol):
    """Whose answer it is."""

    def interruption(self) -> Interruption | None: ...


def cues_of(rows: Sequence[Speaker], tokenizer: Any) -> dict[int, Cue]:
    """What some rows are made to say."""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    found = {i: row.interruption() for i, row in enumerate(rows)}
    return {i: Cue.of(each, encode) for i, each in found.items() if each is not None}
