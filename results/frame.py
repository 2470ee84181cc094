"""Finished runs as pandas' DataFrames: a row a sample (`frame`), or a row a run (`runs`).

Columns have the names that runs/README.md explains: the keys of samples.jsonl and result.json, those of a line's ledger
and timing among them. A method's parameters are `method.KEY`, a task's other figures `measures.KEY`. What a run never
measured is missing (NaN).

Not here: tables for people (`plots/table.py`).
"""
# pyright: basic

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench import checkout
from kvbench.engine.errors import ConfigError
from kvbench.results.read import read_run
from kvbench.results.schema import RunResult, SampleRow

if TYPE_CHECKING:
    from pandas import DataFrame

OF_RUNS = (  # what identifies a run, in addition to each of its samples
    *("method", "method_label", "task", "dataset", "model", "asked", "ratio", "budget", "memory_exact", "comm_exact"),
    *("prefill", "allocator", "keeping", "protocol", "seed", "dtype", "device"),
)


def frame(*folders: Path | str) -> "DataFrame":
    """A row a sample of each finished run in or below the folders; of `runs/` where none is given."""
    from pandas import DataFrame

    rows = []
    for folder, result, samples in found(folders):
        head = {"run": str(folder)} | {key: getattr(result, key) for key in OF_RUNS} | of_method(result)
        rows += [head | of_sample(row) for row in samples]
    return tidy(DataFrame(rows))


def runs(*folders: Path | str) -> "DataFrame":
    """A row a finished run in or below the folders; of `runs/` where none is given."""
    from pandas import DataFrame

    return tidy(DataFrame([of_run(folder, result) for folder, result, _ in found(folders)]))


def found(folders: Iterable[Path | str]) -> "Iterator[tuple[Path, RunResult, list[SampleRow]]]":
    """Every finished run, each once; `ConfigError` for a folder that has none or is damaged."""
    known = set[Path]()
    for folder in map(Path, folders or (checkout.runs(),)):
        inside = sorted(file.parent for file in folder.expanduser().rglob("result.json"))
        if not inside:
            raise ConfigError(f"no finished run in or below {folder}; give the folder of a run, or one that holds some")
        for one in inside:
            if one.resolve() in known:
                continue
            known.add(one.resolve())
            try:
                yield one, *read_run(one)
            except (ValueError, OSError) as error:
                raise ConfigError(f"{one} cannot be read: {error}") from None


def of_run(folder: Path, result: RunResult) -> dict[str, Any]:
    low, high = result.score_ci95 or (None, None)
    facts = {spec.name: getattr(result, spec.name) for spec in fields(result)}
    plain = {key: value for key, value in facts.items() if not isinstance(value, dict | list)}
    measures = {f"measures.{key}": value for key, value in (result.measures or {}).items()}
    head = {"run": str(folder), "asked": result.asked, "score_low": low, "score_high": high}
    return head | plain | of_method(result) | measures


def of_method(result: RunResult) -> dict[str, Any]:
    return {f"method.{key}": value for key, value in result.params.items()}


def of_sample(row: SampleRow) -> dict[str, Any]:
    """The line, its ledger, timing and the task's own keys side by side; what is nested more deeply is left out."""
    flat: dict[str, Any] = {}
    for key, value in row.to_dict().items():
        if key in ("ledger", "timing") and isinstance(value, Mapping):
            flat |= {name: one for name, one in value.items() if not isinstance(one, dict | list)}
        elif key == "measures" and isinstance(value, Mapping):
            flat |= {f"measures.{name}": one for name, one in value.items()}
        elif not isinstance(value, dict):
            flat[key] = value
    return flat


def tidy(table: "DataFrame") -> "DataFrame":
    """A table without the columns that nothing has."""
    return table.dropna(axis="columns", how="all")
