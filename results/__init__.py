"""A run's folder: written while samples end, continued after a stop, read by tables and plots.

    schema.py    the rows: SampleRow, RunFacts, RunResult, checked whenever one is made or read
    summary.py   from rows to a result: means, `combined_ci95`
    intervals.py 95 % intervals of scores, for every table and figure
    scores.py    scores.jsonl: scores given after the answers
    config.py    config.yaml, the hash and the name of a run
    read.py      finished runs: read_run, read_runs, read_samples
    frame.py     finished runs as pandas' DataFrames; `kvbench.results(FOLDER)` is its `frame`
    folder.py    RunFolder, the only writer
    names.py     what readers call a task
    ledger.py    ledger.parquet and its parts
    lock.py      one process at a time
    files.py     how files are written, sealed and told from those of others
    machine.py   versions, commit, memory

runs/README.md describes every file and key. Nothing here imports torch, and only ledger.py imports pyarrow, so that a
table can be made on a laptop and a finished run be recognised at once.

Not here: the loop over samples (`evals/loop.py`), statistics over runs (`plots/stats.py`).
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbench.results.config import config_hash, read_config, run_name
from kvbench.results.folder import RunFolder
from kvbench.results.intervals import Interval, few_samples, hits, interval, share_interval
from kvbench.results.ledger import read_ledger
from kvbench.results.lock import Holder
from kvbench.results.machine import environment, git_sha, peak_rss_bytes
from kvbench.results.read import read_run, read_runs, read_samples
from kvbench.results.schema import (
    EVICT,
    EXACT,
    LEDGER_MEANS,
    METRICS,
    OFF,
    OtherSchemaError,
    RunFacts,
    RunResult,
    SampleRow,
    prompt_hash,
)
from kvbench.results.summary import combined, combined_ci95, summarise

__all__ = [
    "EVICT",
    "EXACT",
    "LEDGER_MEANS",
    "METRICS",
    "OFF",
    "Holder",
    "Interval",
    "OtherSchemaError",
    "RunFacts",
    "RunFolder",
    "RunResult",
    "SampleRow",
    "combined",
    "combined_ci95",
    "config_hash",
    "environment",
    "few_samples",
    "git_sha",
    "hits",
    "interval",
    "peak_rss_bytes",
    "prompt_hash",
    "read_config",
    "read_ledger",
    "read_run",
    "read_runs",
    "read_samples",
    "run_name",
    "share_interval",
    "summarise",
]


class Results(ModuleType):
    """This module, which can be called too: its name is what people look for to get samples."""

    def __call__(self, *folders: Path | str) -> Any:
        """A DataFrame, a row a sample of each finished run in or below the folders (`results/frame.py`)."""
        from kvbench.results.frame import frame

        return frame(*folders)

    def columns(self, samples: Any) -> Any:
        """The columns of such a DataFrame: name, unit, meaning, and how many rows have a value."""
        from kvbench.results.frame import columns

        return columns(samples)

    def runs(self, *folders: Path | str) -> Any:
        """A DataFrame, a row a finished run in or below the folders."""
        from kvbench.results.frame import runs

        return runs(*folders)


sys.modules[__name__].__class__ = Results
