"""Tables of methods with the question in what is compressed, and without it, side by side: `make paper-tables`.

Only runs count that were made in both scopes with the same settings, such as those of conf/experiment/scopes_*.yaml.

Not here: how a table is made of runs (`plots/tables/generic.py`) and worded (`plots/tables/words.py`).
"""

from collections.abc import Sequence
from pathlib import Path

from kvbench.plots.read import Run
from kvbench.plots.tables.generic import Pivot, pivots
from kvbench.plots.tables.words import records, sheet_of
from kvbench.results.sheet import texts, write

NAME = "scopes"
SCOPES = frozenset({"full_prompt", "context_only"})


def in_both(runs: Sequence[Run]) -> list[Run]:
    """Runs of which there is one in each scope, the same but for it."""
    seen: dict[str, set[str]] = {}
    keys = [f"{key_of(run)}" for run in runs]
    for run, key in zip(runs, keys, strict=True):
        seen.setdefault(key, set()).add(run.result.protocol)
    return [run for run, key in zip(runs, keys, strict=True) if seen[key] >= SCOPES]


def key_of(run: Run) -> list[object]:
    """What identifies a run, but for the scope and its samples' own prompts."""
    apart = ("compression_scope", "data_digest")
    return [(key, repr(value)) for key, value in sorted(run.config.items()) if key not in apart]


def tables(runs: Sequence[Run]) -> list[Pivot]:
    """A table for each task with its settings: methods down, budgets and scopes across."""
    both = in_both(runs)
    return pivots(both, ["method"], ["ratio", "scope"]) if both else []


def write_tables(out: Path, runs: Sequence[Run]) -> list[Path]:
    """The tables in all formats; nothing without runs of both scopes."""
    made = tables(runs)
    if not made:
        return []
    return write(out, NAME, texts([sheet_of(pivot) for pivot in made], records(made)))
