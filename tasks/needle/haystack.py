"""Lengths and depths of a needle test, and how needles get into the ids of a text.

Not here: which text, which needles, and what is asked about them (`tasks/needle/task.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PAPER_DEPTHS = (0, 11, 22, 33, 44, 56, 67, 78, 89, 100)


def full_stop_ids(tokenizer: Any) -> frozenset[int]:
    """Every id that is a full stop but for blanks; SentencePiece vocabularies have two."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return frozenset(i for i, text in enumerate(texts) if text.strip(" ▁") == ".")


def insertion_index(ids: Sequence[int], depth: float, stops: frozenset[int] | None) -> int:
    """Where a needle of this depth goes: after the last full stop before it; None: right there."""
    index = min(math.floor(len(ids) * depth / 100), len(ids))
    if stops is None or depth >= 100:
        return index
    while index > 0 and ids[index - 1] not in stops:
        index -= 1
    return index


def hide(
    haystack: Sequence[int], needles: Sequence[Sequence[int]], depth: float, stops: frozenset | None
) -> tuple[list[int], list[int]]:
    """The ids with all needles inside, and each needle's index in them.

    The first needle goes to `depth`, the others follow in steps of (100 - depth) / count, each into
    the text as it is by then.
    """
    ids, starts = list(haystack), []
    for i, needle in enumerate(needles):
        index = insertion_index(ids, depth + i * (100 - depth) / len(needles), stops)
        for start, earlier in zip(starts, needles, strict=False):
            if start < index < start + len(earlier):
                index = start + len(earlier)  # never into the middle of an earlier needle
        starts = [start + len(needle) if start >= index else start for start in starts] + [index]
        ids[index:index] = needle
    return ids, starts


@dataclass(frozen=True)
class Grid:
    lengths: tuple[int, ...]  # none: as the model's window allows
    depths: tuple[float, ...]  # percent
    seeds: int  # random-value needles per cell


def spaced_depths(count: int, spacing: str) -> tuple[float, ...]:
    """`count` depths from 0 to 100; `sigmoid` puts more of them near both ends."""
    linear = [100 * i / (count - 1) for i in range(count)] if count > 1 else [50.0] * count
    if spacing == "linear":
        return tuple(round(x, 3) for x in linear)
    return tuple(x if x in (0, 100) else round(100 / (1 + math.exp(-0.1 * (x - 50))), 3) for x in linear)


def steps(longest: int) -> tuple[int, ...]:
    """Sixteen equal steps up to the longest context."""
    return tuple(longest * i // 16 for i in range(1, 17))


GRIDS = {
    "default": Grid((1000, 2000, 4000), (0, 25, 50, 75, 100), 1),
    "smoke": Grid((512, 1024), (0, 50, 100), 1),
    "8k": Grid(steps(8_000), PAPER_DEPTHS, 3),
    "32k": Grid(steps(32_000), PAPER_DEPTHS, 3),
    "128k": Grid(steps(128_000), PAPER_DEPTHS, 3),
    "window": Grid((), PAPER_DEPTHS, 3),
    "original": Grid(tuple(round(1000 + 15_000 * i / 34) for i in range(35)), spaced_depths(35, "linear"), 1),
}
