"""`kvbench.means`: mean, 95 % interval and n of any groups of a frame's rows, and their differences to a reference.

    samples = kvbench.results("runs")
    means = kvbench.means(samples, ["method_label", "ratio"], against={"method": "full"})
    means.pivot(index="ratio", columns="method_label", values="mean").plot(marker="o")

Everything counts as in tables and figures: turns and draws of a sample are one, of several datasets each counts alike,
differences are paired by prompt, and p is corrected (Holm) for all groups that have the same reference.

Not here: the statistics (`plots/stats.py`), what a group of answers is (`plots/scored.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pandas import DataFrame, concat

from kvbench.engine.errors import ConfigError
from kvbench.plots.scored import Scored, compared, places
from kvbench.results.intervals import ANYWHERE

Key = tuple[Any, ...]


def means(
    samples: DataFrame,
    by: Sequence[str] | str,
    value: Sequence[str] | str = "score",
    against: Mapping[str, Any] | None = None,
) -> DataFrame:
    """A row a group: its keys, mean, low, high, n, n_oom and over_budget; of several values `score.mean` and so on.

    `against` says what a reference is, such as `{"method": "full"}`. Of such groups a group's own is the one that
    agrees with it in most keys, the first ones first. On the prompts that both answered it has difference,
    difference_low, difference_high and p too.
    """
    keys = [by] if isinstance(by, str) else [*by]
    if not isinstance(value, str):
        each = [means(samples, keys, one, against).set_index(keys).add_prefix(f"{one}.") for one in value]
        return concat(each, axis="columns").reset_index()
    extra = [name for name in against or {} if name not in keys]
    for name in (*keys, *extra, value):
        if name not in samples:
            raise ConfigError(f"these samples have no column {name!r}; kvbench.results.columns(samples) lists theirs")
    if value != "score" and str(samples[value].dtype) in ("category", "str", "object", "string"):
        raise ConfigError(f"column {value!r} is of texts, and has no mean")
    limits = None if value == "score" else ANYWHERE
    found = places(samples, [*keys, *extra], value, limits)
    rows = {key: row_of(place) for key, place in found.items()}
    if against is not None:
        names = [*keys, *extra]
        beside = {key: reference(key, names, against, found) for key in found}
        tested = compared(found, lambda key: found.get(beside[key] or ()), lambda key: beside[key])
        for key, one in tested.items():
            spread = one.paired.difference
            rows[key] |= {
                "difference": one.paired.mean, "difference_low": spread and spread.low,
                "difference_high": spread and spread.high, "p": one.p,
            }  # fmt: skip
    return DataFrame([dict(zip(keys, key, strict=False)) | row for key, row in rows.items()])


def row_of(place: Scored) -> dict[str, Any]:
    spread = place.interval
    ends = (None, None) if spread is None else (spread.low, spread.high)
    counts = {"n": place.n, "n_oom": place.n_oom, "over_budget": place.over}
    return {"mean": place.mean, "low": ends[0], "high": ends[1]} | counts


def reference(key: Key, names: Sequence[str], against: Mapping[str, Any], found: Mapping[Key, Scored]) -> Key | None:
    """The one group that is `against` and agrees with this one most, in the first keys first."""
    wanted = {names.index(name): value for name, value in against.items()}
    those = [other for other in found if all(other[i] == value for i, value in wanted.items())]
    agreeing = {other: tuple(a == b for a, b in zip(key, other, strict=True)) for other in those}
    nearest = [other for other in those if agreeing[other] == max(agreeing.values())]
    return nearest[0] if len(nearest) == 1 else None
