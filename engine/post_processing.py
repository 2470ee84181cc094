"""`PostProcessing`: what becomes of the keys and values that stay when others are dropped, whatever drops them.

The model made them for a whole text. `positions=contiguous` closes the gaps: kept keys are turned so that the distances
between them are those of neighbours. `dropped=merged` folds each dropped value into that of the kept token with the
most similar key. Sets of tokens, bytes and the books stay those of the method.

Symbols   `s` tokens of the prompt, `p_i` place of a head's i-th kept token of `n`.
Differs   - as published the text goes on at position n, and keys stand at 0 … n-1. Logits of a rotary embedding depend
            on distances alone: here keys move up to s-n … s-1 and the text goes on at s, which is the same and lets
            heads and layers differ in n.
          - kvpress rounds cosines to the model's dtype; here keys are turned in float32 and rounded once.
          - of dropped tokens that are similar enough the best take part, by rank; kvpress' quantile is the same rank
            where it is a number.

Not here: which tokens stay (`methods`), how keys and values become others (`engine/layouts/kept.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from annotated_types import Ge, Le

from kvbench.engine.budget import show
from kvbench.engine.declared import Is, Part

POSITIONS, DROPPED = ("kept", "contiguous"), ("gone", "merged")


@dataclass(frozen=True)
class Merging:
    """Which dropped tokens are merged; the keys of conf/config.yaml's `merging`."""

    threshold: Annotated[float, Ge(-1), Le(1), Is("a cosine, -1 to 1")] = 0.0  # of the keys, from which on
    share: Part = Fraction(1)  # of the dropped tokens, the most similar ones


@dataclass(frozen=True)
class PostProcessing:
    """What becomes of kept keys and values."""

    positions: Literal["kept", "contiguous"] = "kept"
    dropped: Literal["gone", "merged"] = "gone"
    merging: Merging = Merging()

    @property
    def changes(self) -> bool:
        return self != AS_THEY_ARE

    @property
    def asked(self) -> str:
        """The keys that ask for it, as they are given."""
        keys = ("positions", self.positions, POSITIONS), ("dropped", self.dropped, DROPPED)
        return " ".join(f"{key}={value}" for key, value, usual in keys if value != usual[0])

    def label(self) -> str:
        """Words for it, which follow a method's name."""
        words = ["contiguous"] * (self.positions == "contiguous")
        if self.dropped == "merged":
            usual, (cosine, share) = Merging(), (self.merging.threshold, self.merging.share)
            notes = [f"from {cosine:g}"] * (cosine != usual.threshold)
            notes += [f"best {show(share)}"] * (share != usual.share)
            words.append(f"merged values{' ' * bool(notes)}{', '.join(notes)}")
        return ", ".join(words)


AS_THEY_ARE = PostProcessing()
