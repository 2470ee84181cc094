"""Finished runs as tables and figures see them: the result, its samples, the configuration, each read once.

A run may hold several datasets: its samples say which in `dataset`; without that column the run is of one.

Not here: checks of a folder (`evals/results.py` refuses a damaged one), statistics (`plots/stats.py`).
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import fsum
from pathlib import Path
from typing import Any

import yaml

from evals.results import RunResult, SampleRow, read_runs, read_samples

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Run:
    """One finished run."""

    folder: Path
    result: RunResult
    rows: tuple[SampleRow, ...]
    config: Mapping[str, Any]

    @property
    def method(self) -> str:
        """The method whose setting this is: `h2o` of `h2o_pqcache`."""
        return self.result.method.partition("_")[0]

    @property
    def is_full(self) -> bool:
        return self.method == "full"

    @property
    def is_compensated(self) -> bool:
        return self.result.method_label.endswith("(C)")

    @property
    def embedded(self) -> bool:
        return self.result.data_source == "embedded"

    def setting(self, *keys: str) -> Any:
        """A value of config.yaml, such as `setting("cache", "tokens")`; None where there is none."""
        node: Any = self.config
        for key in keys:
            node = node.get(key) if isinstance(node, Mapping) else None
        return node

    def task_param(self, key: str) -> Any:
        return self.setting("task", "params", key)

    def datasets(self) -> dict[str, tuple[SampleRow, ...]]:
        """The samples of each dataset, in their order."""
        parts: dict[str, list[SampleRow]] = {}
        for row in self.rows:
            parts.setdefault(str(row.fields.get("dataset", self.result.dataset)), []).append(row)
        return {name: tuple(rows) for name, rows in parts.items()}

    def ledger(self) -> dict[str, list[Any]]:
        """The columns of ledger.parquet; {} where the file was lost."""
        path = self.folder / "ledger.parquet"
        if not path.is_file():
            return {}
        parquet = importlib.import_module("pyarrow.parquet")  # slow to import and without types
        return parquet.read_table(path, partitioning=None).to_pydict()


def load(root: Path) -> list[Run]:
    """Every finished run below `root`; ValueError with the name of a file that is damaged."""
    runs = []
    for folder, result in read_runs(root) if root.is_dir() else []:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        runs.append(Run(folder, result, tuple(read_samples(folder)), config))
    return runs


@dataclass(frozen=True, order=True)
class Conditions:
    """What runs must share to stand in one table or figure."""

    model: str
    data_source: str
    protocol: str
    comm: str  # "" where only full attention ran, which has none
    seed: int
    limit: int  # samples; 0: all
    dtype: str
    device: str
    task_version: int

    def __str__(self) -> str:
        parts = [
            self.model,
            f"{self.data_source} data",
            f"comm {self.comm}" if self.comm else "no comm",
            self.protocol,
            f"seed {self.seed}",
            f"first {self.limit} samples" if self.limit else "all samples",
            f"{self.dtype} on {self.device}",
        ]
        return " · ".join(parts)


def conditions(run: Run, comm: str | None = None) -> Conditions:
    result = run.result
    return Conditions(
        model=result.model,
        data_source=result.data_source,
        protocol=result.protocol,
        comm=result.comm_exact if comm is None else comm,
        seed=result.seed,
        limit=run.setting("limit") or 0,
        dtype=result.dtype,
        device=result.device,
        task_version=result.task_version,
    )


def by_conditions(runs: Iterable[Run]) -> dict[Conditions, list[Run]]:
    """Runs that may stand side by side. Full attention joins every group that differs in comm only."""
    groups: dict[Conditions, list[Run]] = {}
    full: dict[Conditions, list[Run]] = {}
    for run in runs:
        where, comm = (full, "") if run.is_full else (groups, None)
        where.setdefault(conditions(run, comm), []).append(run)
    for key, baseline in full.items():
        others = [other for other in groups if conditions(groups[other][0], "") == key]
        for other in others:
            groups[other].extend(baseline)
        if not others:
            groups[key] = baseline
    return dict(sorted(groups.items()))


def has_budget(run: Run, budget: str) -> bool:
    """Whether a run was given this budget: "1/5" of the prompt, "256" tokens."""
    if budget.isdecimal() and budget != "1":
        return run.result.budget == int(budget)
    exact = run.result.ratio_exact
    return exact is not None and Fraction(exact) == Fraction(budget)


def scores(rows: Iterable[SampleRow]) -> list[float]:
    """The scores of those that did not run out of memory."""
    return [row.score for row in rows if row.score is not None]


def measured(rows: Iterable[SampleRow], key: str) -> float | None:
    """Mean of a key of the samples' ledgers over those that have it, as `evals.results` does."""
    values = [float(v) for row in rows if (v := row.ledger.get(key)) is not None]
    return fsum(values) / len(values) if values else None


def key_bytes_per_token(runs: Sequence[Run]) -> float | None:
    """Bytes of one token's keys in all layers, from what full attention kept; None without such a run.

    It keeps the prompt and every token that was fed: all generated ones but the last.
    """
    for run in runs:
        for row in run.rows if run.is_full else ():
            kept = row.ledger.get("bytes_resident_device")
            if kept:
                return kept / 2 / (row.prompt_tokens + row.generated_tokens - 1)
    return None


def over_budget(rows: Iterable[SampleRow]) -> bool:
    """Whether any sample's ledger exceeded its budget."""
    return any(row.ledger.get("within_budget") is False for row in rows)


def default_root() -> Path:
    return ROOT / "runs"


def finite(values: Iterable[float | None]) -> Iterator[float]:
    """Those that were measured."""
    return (value for value in values if value is not None)
