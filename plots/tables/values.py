"""What a cell of a table can say: the score, or the mean of any column of the frame that holds numbers.

The short names have a unit and a title of their own; a figure that a task measures besides its score needs no
`measures.` in front; every other column goes by its own name.

Not here: which cells there are (`plots/tables/pivot.py`), their words (`plots/tables/shown.py`).
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbench.plots.read import OLDER_KEYS
from kvbench.results.frame import declared
from kvbench.results.intervals import SHARE, Bounds

Frame = Any  # pandas' DataFrame or column, whose annotations know of no columns
MEASURES = "measures."
COUNTED = ("bytes", "tokens", "entries")  # units of large whole numbers


@dataclass(frozen=True)
class Value:
    """A column, and how a cell says its mean."""

    column: str
    title: str
    unit: str = ""
    digits: int = 1
    scale: float = 1.0  # of the column's unit
    per: str = ""  # column: the mean is the sum over this one's sum
    limits: Bounds | None = None  # of what a prompt can have; with them a cell has an interval over prompts

    @property
    def columns(self) -> list[str]:
        return [name for name in (self.column, self.per) if name]


VALUES = {
    "score": Value("score", "score", digits=3),
    "tokens": Value("tokens_attended_mean", "tokens attended to"),
    "allowed": Value("tokens_budget", "tokens of the prompt allowed"),
    "prompt": Value("prompt_read", "tokens of the prompt"),
    "share": Value("effective_ratio", "tokens attended to, share of the full cache", digits=3),
    "device": Value("bytes_resident_device", "K and V on the device", "MB", scale=1e6),
    "reading": Value("bytes_prefill_peak", "K and V at most while the prompt is read", "MB", scale=1e6),
    "host": Value("bytes_resident_host", "K and V on the host", "MB", scale=1e6),
    "answer_tokens": Value("answer_tokens", "tokens of an answer"),
    "cut_off": Value("cut_off", "answers cut off, share", digits=3),
    "peak": Value("peak_entries", "entries at the fullest step"),
    "footprint": Value("footprint_entries", "entries of an answer", "thousand", scale=1e3),
    "moved": Value("bytes_moved_kv_per_step", "K and V moved per step", "KB", scale=1e3),
    "find": Value("bytes_index_read_per_step", "read per step to find tokens", "KB", scale=1e3),
    "prefill_share": Value("prefill_share", "pairs that the prefill computed, share", digits=3),
    "prefill_s": Value("prefill_s", "prefill", "s", 2),
    "step_s": Value("steps_s", "decode step, shared by all variants beside", "s", 4, per="steps_timed"),
}


def column_of(samples: Frame, name: str) -> Frame:
    """A column; of one that no sample has, nothing but gaps."""
    from pandas import NA, Series

    return samples[name] if name in samples else Series(NA, samples.index, dtype="Float64")


def with_values(samples: Frame) -> Frame:
    """The samples with those columns of `VALUES` that no file has."""
    column = partial(column_of, samples)
    steps = column("generated_tokens") - 1
    is_timed = (column("decode_s") > 0) & (steps > 0)
    older = {key: column(key).fillna(column(other)) for key, other in OLDER_KEYS.items() if other in samples}
    return samples.assign(
        **older,
        answer_tokens=column("generated_tokens").where(column("cut_off").notna()),
        prompt_read=column("prompt_tokens").where(column("status") == "ok"),
        steps_s=column("decode_s").where(is_timed),
        steps_timed=steps.where(is_timed),
    )


def numbers_of(samples: Frame) -> list[str]:
    """The columns that hold numbers."""
    from pandas.api.types import is_numeric_dtype

    return [str(name) for name, kind in samples.dtypes.items() if is_numeric_dtype(kind)]


def value_named(name: str) -> Value:
    if name in VALUES:
        return VALUES[name]
    key = declared().get(name)
    unit = key.unit if key is not None else ""
    return Value(name, name.removeprefix(MEASURES), unit, 0 if unit in COUNTED else 3, limits=limits_of(name))


def limits_of(name: str) -> Bounds | None:
    """The bounds of what full attention takes of drafts: of shares, and of tokens that one of N tokens yields."""
    found = re.fullmatch(r"measures\.(?:(acceptance|rate_\d+)|\w+_length_(\d+))", name)
    if found is None:
        return None
    return SHARE if found[1] else (1.0, 1.0 + int(found[2]))


def sayable(samples: Frame) -> dict[str, str]:
    """The name of each value that cells can say, by what people may call it."""
    columns = {name: name for name in numbers_of(samples)}
    measures = {name.removeprefix(MEASURES): name for name in columns if name.startswith(MEASURES)}
    return columns | measures | {name: name for name in VALUES}
