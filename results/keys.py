"""Keys of a run's files: what each means, its unit, and the check of a value by the type that a field declares.

A field of `results/schema.py` says its key in its annotation, `Annotated[int, Key("tokens of the answer", "tokens")]`.
From these, `LEDGER` and `FIELDS` follow the checks of what is written and read, the columns of `results.frame` and the
tables of runs/README.md.

Not here: the rows (`results/schema.py`), columns (`results/frame.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, cast

from kvbench.engine.declared import Reader, reader
from kvbench.engine.errors import ConfigError

# A share as people write it: 0.2, 1/64
SHARE = r"\d{1,9}(\.\d{1,18})?|\d{1,9}/0*[1-9]\d{0,8}"


@dataclass(frozen=True)
class Key:
    """What a key of a run's files means: for the check of its value, `results.frame` and the table of columns."""

    about: str
    unit: str = ""
    is_long: bool = False  # a text of its own in each sample, and no name


# Keys of a sample's `ledger`. K and V count 16 bits an element, whatever the run computed in.
LEDGER = {
    "steps": Key("decode steps"),
    "tokens_budget": Key("tokens of the prompt that a query head may attend to, per layer", "tokens"),
    "tokens_attended_mean": Key("tokens that a query head did attend to, mean over steps and layers", "tokens"),
    "effective_ratio": Key("attended tokens relative to full attention at the same steps"),
    "bytes_resident_device": Key("K, V and metadata of all layers on the device, at the largest step", "bytes"),
    "bytes_resident_host": Key("the same on the host", "bytes"),
    "bytes_resident_device_actual": Key("as allocated on the device, in the dtype of the run", "bytes"),
    "bytes_prefill_peak": Key("most of K and V, all layers together, while the prompt was read", "bytes"),
    "bytes_moved_kv_per_step": Key("K and V moved to the device, all layers", "bytes"),
    "bytes_moved_kv_heads_per_step": Key("the same, of each query head's own tokens", "bytes"),
    "bytes_moved_meta_per_step": Key("moved or read to find tokens: what `comm` bounds", "bytes"),
    "bytes_index_read_per_step": Key("read to find tokens, an index on the device included", "bytes"),
    "bytes_comm_per_step": Key("what `comm` allows `bytes_moved_meta_per_step`; null where it is off", "bytes"),
    "bytes_searched_per_step": Key("read by an exact search, which no budget prices (oracle)", "bytes"),
    "bytes_filled_per_step": Key("K and V that filled the cache of blocks on the device", "bytes"),
    "bytes_released_per_step": Key("K and V of new tokens that went to the host", "bytes"),
    "moved_bytes_per_step": Key("moved between the tiers: K and V, index, blocks, releases", "bytes"),
    "cache_hit_rate": Key("lookups that found their block on the device"),
    "pseudo_tokens_mean": Key("tokens that a query head attended to in place of others, each for many", "tokens"),
    "resident_share": Key("of the full cache's bytes, those on the device, over all steps"),
    "bytes_buffer": Key("largest buffer for what is fetched", "bytes"),
    "index_share": Key("of the published index, what fitted next to the tokens; null where `comm` was given"),
    "within_budget": Key("true if no step exceeded its tokens or its finding bytes"),
    "peak_entries": Key("most entries that a step attended to, mean over heads and layers", "entries"),
    "footprint_entries": Key("entries over prefill and answer, mean over heads and layers", "entries"),
    "footprint": Key("the same, relative to full attention of the same length"),
    "reached_steps": Key("share of the steps at which the budget of prompt and answer was full"),
}

# Keys that tasks and methods add to a line, and the type of each that has one; tasks have others of their own.
FIELDS: dict[str, tuple[Key, Any]] = {
    "dataset": (Key("part of the task that the sample is of"), Any),
    "metric": (Key("what the score is, a name of `METRICS`; absent for a plain one from 0 to 1"), str),
    "scores_later": (Key("true where the task's scorer runs after the answers"), bool),
    "measures": (Key("the task's other figures, by name: `measures.NAME`"), dict),
    "timing": (Key("times of task=latency: `timing.NAME`"), dict),
    "method_report": (Key("what the method has to say of the sample: `report.NAME`"), dict),
    "variant": (Key("`method_label`, and what a byte budget chose for this prompt, such as `KIVI 2 bit`"), str),
    "probe_s": (Key("time of what the method had read after the prompt before it could choose", "s"), float | int),
    "prefill_share": (Key("of the pairs of query and key, those that a sparse prefill computed"), float | int),
    "prefill_estimate": (Key("multiply-adds of choosing them, relative to q·k over all pairs"), float | int),
    "cut_off": (Key("whether the answer used up its allowance"), bool),
    "turn": (Key("turn of a sample that has several, from 1 on"), int),
    "draw": (Key("draw of a sample that has several"), int),
    "length": (Key("what the task calls the sample's length"), Any),
    "depth": (Key("where in the prompt the answer stands, 0 to 1"), Any),
}

MEASURES: Reader = reader(dict[str, float | None], exact=True)
READERS = {name: reader(hint, exact=True) for name, (_, hint) in FIELDS.items() if hint is not Any}


def is_read(read: Reader, value: Any) -> bool:
    """Whether a JSON value is of the type that is read."""
    try:
        read(value, "")
    except ConfigError:
        return False
    return True


@cache
def readers_of(kind: type) -> tuple[tuple[str, Any, Reader], ...]:
    """Name, type and reader of a dataclass's fields; worked out once, a report reads thousands of rows."""
    return tuple((spec.name, spec.type, reader(spec.type, exact=True)) for spec in fields(kind))


def check_types(row: Any) -> None:
    """ValueError with the first field of a dataclass whose value is not of the declared type."""
    for name, hint, read in readers_of(row.__class__):
        if not is_read(read, value := getattr(row, name)):
            kind = hint.__name__ if isinstance(hint, type) else hint
            raise ValueError(f"key {name!r} is {value!r:.80}, not of type {kind}")


def check_choice(key: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"key {key!r} is {value!r}, not one of {', '.join(allowed)}")


def check_keys(data: Any, keys: Iterable[str]) -> dict[str, Any]:
    """`data` as a dict with at least `keys`; ValueError with the first one that is missing."""
    if not isinstance(data, dict):
        raise ValueError(f"not a JSON object but a {type(data).__name__}")
    for key in keys:
        if key not in data:
            raise ValueError(f"key {key!r} is missing")
    return cast(dict[str, Any], data)
