"""Finished runs as tables and figures see them: the result, its samples, the configuration, each read once.

A run may hold several datasets: its samples say which in `dataset`; without that column the run is of one.

Not here: checks of a folder (`evals/results.py` refuses a damaged one), statistics (`plots/stats.py`).
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import fsum
from pathlib import Path
from typing import Any

import yaml

from evals.results import EXACT, RunResult, SampleRow, read_runs, read_samples

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
        """The method whose setting this is: `h2o` of `h2o_pqcache`. A file of the user's own is no setting of ours."""
        if self.file:
            return self.result.method
        return self.result.method.partition("_")[0]

    @property
    def file(self) -> dict[str, str]:
        """Which state of the user's own file the method was, as if it were a parameter; {} for ours."""
        digest = self.setting("method", "digest")
        return {} if digest is None else {"file": digest[:8]}

    @property
    def prefill(self) -> str:
        """As `method`: `minference` of `minference_short`."""
        return self.result.prefill.partition("_")[0]

    @property
    def is_preset(self) -> bool:
        """Whether the method's or the prefill's settings are somebody's."""
        return (self.result.method, self.result.prefill) != (self.method, self.prefill)

    @property
    def is_exact(self) -> bool:
        """Whether the prefill was."""
        return self.result.prefill == EXACT

    @property
    def is_full(self) -> bool:
        """Whether every token takes part in decoding, whatever the prefill was."""
        return self.method == "full"

    @property
    def params(self) -> dict[str, Any]:
        """The method's parameters, which file it was read from, and the prefill's parameters."""
        return (
            self.result.params
            | self.file
            | {f"prefill.{key}": value for key, value in self.result.prefill_params.items()}
        )

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
    prefill: str = ""  # with its parameters; "" where it is exact

    def __str__(self) -> str:
        parts = [
            self.model,
            f"{self.data_source} data",
            f"comm {self.comm}" if self.comm else "no comm",
            self.protocol,
            *([f"prefill {self.prefill}"] if self.prefill else []),
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
        prefill="" if run.is_exact else prefill_words(run),
    )


def prefill_words(run: Run) -> str:
    params = (f"{key}={value}" for key, value in run.result.prefill_params.items())
    return " ".join([run.prefill, *params])


def by_conditions(runs: Iterable[Run]) -> dict[Conditions, list[Run]]:
    """Runs that may stand side by side.

    Full attention joins every group that differs in comm only, and runs with the exact prefill join those that differ
    in the prefill only: who wants none of the others leaves them out before.
    """
    found: dict[Conditions, list[Run]] = {}
    for run in runs:
        found.setdefault(conditions(run, "" if run.is_full else None), []).append(run)
    groups: dict[Conditions, list[Run]] = {}
    for key in found:
        alike = [other for other in found if replace(other, comm="", prefill="") == replace(key, comm="", prefill="")]
        for prefill in {other.prefill for other in alike} - {""} or {""}:
            here = sorted(
                (other for other in alike if other.prefill in ("", prefill)),
                key=lambda other: (other.comm == "", other.prefill == ""),
            )
            for comm in {other.comm for other in here} - {""} or {""}:
                groups[replace(key, comm=comm, prefill=prefill)] = [
                    run for other in here if other.comm in ("", comm) for run in found[other]
                ]
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
