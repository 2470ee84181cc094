"""Finished runs as tables and figures see them: the result, its samples, the configuration, each read once.

A run may hold several datasets: its samples say which in `dataset`; without that column the run is of one.

A run that is damaged is named on standard error and left out.

Not here: checks of a folder (`results/` refuses a damaged one), statistics (`plots/stats.py`).
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import fsum
from pathlib import Path
from typing import Any

from kvbench import checkout
from kvbench.engine.foreign import one_line
from kvbench.engine.terminal import say
from kvbench.results import EXACT, RunResult, SampleRow, read_ledger
from kvbench.results.names import known
from kvbench.results.read import read_whole

RESULT = "result.json"
ROOT = Path(__file__).resolve().parents[1]
OLDER_KEYS = {  # of ledgers: what stands in the place of a key in older runs, less of it
    "bytes_index_read_per_step": "bytes_moved_meta_per_step",
}


@dataclass(frozen=True)
class Run:
    """One finished run."""

    folder: Path
    result: RunResult
    rows: tuple[SampleRow, ...]
    config: Mapping[str, Any]
    has_namesake: bool = False  # whether a run of another checkpoint of the same name was read with it

    @property
    def model(self) -> str:
        """The model's name, and its checkpoint where the name alone does not say which one it is."""
        return f"{self.result.model} {self.checkpoint}" if self.has_namesake else self.result.model

    @property
    def checkpoint(self) -> str:
        """The digest of the model's files."""
        return str(self.setting("model_digest") or "")

    @property
    def method(self) -> str:
        """The method whose setting this is: `h2o` of `h2o_pqcache`. A file of the user's own is no setting of ours.

        With another allocator, or other keys and values than were kept, it is a method of its own, which nobody
        published under the scorer's name.
        """
        method = self.result.method if self.file else known(self.result.method) or self.result.method
        found = [method, self.result.allocator, self.result.reuse, self.result.keeping]
        return "+".join(each for each in found if each is not None)

    @property
    def file(self) -> dict[str, str]:
        """The state of the user's own file or package of the method, as if it were a parameter; {} for ours."""
        digest, package = self.setting("method", "digest"), self.setting("method", "package")
        if digest is None:
            return {}
        return {"file": str(digest)[:8]} if package is None else {"package": f"{package} {str(digest)[:8]}"}

    @property
    def prefill(self) -> str:
        """The prefill without a preset's ending: `minference` for `minference_short`."""
        return self.result.prefill.removesuffix("_short")

    @property
    def is_preset(self) -> bool:
        """Whether the method's or the prefill's settings are somebody's."""
        own = self.result.allocator is self.result.reuse is self.result.keeping is None
        return own and (self.result.method, self.result.prefill) != (self.method, self.prefill)

    @property
    def is_exact(self) -> bool:
        """Whether the prefill was."""
        return self.result.prefill == EXACT

    @property
    def is_full(self) -> bool:
        """Whether every token takes part in decoding, whatever the prefill was."""
        return self.method == "full"

    @property
    def whole_layers(self) -> int:
        """How many of the first layers the method leaves as they are; its budget is that of the others."""
        found = self.result.params.get("full_layers", 0)
        return found if isinstance(found, int) else 0

    @property
    def params(self) -> dict[str, Any]:
        """The method's parameters, which file it was read from, and the prefill's parameters."""
        return (
            self.result.params
            | self.file
            | {f"prefill.{key}": value for key, value in self.result.prefill_params.items()}
        )

    @property
    def embedded(self) -> bool:
        return self.result.data_source == "embedded"

    @property
    def comm(self) -> str:
        """`comm` as people write it: 1/8, where the result has 0.125; "off"."""
        return self.result.shown_comm

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

    def environment(self) -> dict[str, Any]:
        """env.json; {} where it was lost or is damaged."""
        try:
            found = json.loads((self.folder / "env.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def ledger(self) -> dict[str, list[Any]]:
        """The columns of ledger.parquet; {} where the file was lost, or is damaged, which standard error says."""
        columns = read_ledger(self.folder, self.result)
        if not columns and (self.folder / "ledger.parquet").exists():
            say(one_line(f"left out: {self.folder / 'ledger.parquet'} is damaged"), file=sys.stderr)
        return columns


def load(root: Path) -> list[Run]:
    """Every finished run below `root` that can be read; the others are named on standard error, a line for each."""
    found, damaged = read_all(root)
    for sentence in damaged:
        say(f"left out: {sentence}", file=sys.stderr)
    return found


def read_all(root: Path) -> tuple[list[Run], list[str]]:
    """The finished runs below `root`, by folder, and a sentence for each that cannot be read."""
    runs: list[Run] = []
    damaged: list[str] = []

    def unreadable(error: OSError) -> None:
        damaged.append(one_line(f"{error.filename} cannot be read ({error.strerror})"))

    # Links are not followed: one may lead back up.
    folders = [Path(at) for at, _, names in os.walk(root, onerror=unreadable) if RESULT in names]
    for folder in sorted(folders):
        try:
            runs.append(read_one(folder))
        except ValueError as error:
            damaged.append(one_line(str(error)))
    return told_apart(runs), damaged


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs, each of which knows whether another one is of a model with the same name and other files."""
    checkpoints: dict[str, set[str]] = {}
    for run in runs:
        checkpoints.setdefault(run.result.model, set()).add(run.checkpoint)
    return [replace(run, has_namesake=len(checkpoints[run.result.model]) > 1) for run in runs]


def read_one(folder: Path) -> Run:
    """One finished run; ValueError with the name of a file that is damaged."""
    result, rows, config = read_whole(folder)
    return Run(folder, result, tuple(rows), config)


@dataclass(frozen=True, order=True)
class Conditions:
    """What runs must share to stand in one table or figure."""

    model: str
    checkpoint: str  # digest of the model's files: two checkpoints may have one name
    data_source: str
    protocol: str
    comm: str  # "" where only full attention ran, which has none
    seed: int
    limit: int  # samples; 0: all
    dtype: str
    device: str
    task_version: int
    prefill: str = ""  # with its parameters; "" where it is exact
    offset: int = 0  # samples that were left out, the first ones
    score_version: int = 0  # of the task that scored the answers again; 0 where that is `task_version`

    def __str__(self) -> str:
        parts = [
            self.model,
            f"{self.data_source} data",
            f"comm {self.comm}" if self.comm else "no comm",
            self.protocol,
            *([f"prefill {self.prefill}"] if self.prefill else []),
            *([f"scored by version {self.score_version}"] if self.score_version else []),
            f"seed {self.seed}",
            f"{'' if self.offset else 'first '}{self.limit} samples" if self.limit else "all samples",
            *([f"behind the first {self.offset}"] if self.offset else []),
            f"{self.dtype} on {self.device}",
        ]
        return " · ".join(parts)


def conditions(run: Run, comm: str | None = None) -> Conditions:
    result = run.result
    return Conditions(
        model=run.model,
        checkpoint=run.checkpoint,
        data_source=result.data_source,
        protocol=result.protocol,
        comm=run.comm if comm is None else comm,
        seed=result.seed,
        limit=run.setting("limit") or 0,
        dtype=result.dtype,
        device=result.device,
        task_version=result.task_version,
        prefill="" if run.is_exact else prefill_words(run),
        offset=run.setting("offset") or 0,
        score_version=0 if result.score_version in (None, result.task_version) else result.score_version,
    )


def prefill_words(run: Run) -> str:
    params = (f"{key}={value}" for key, value in run.result.prefill_params.items())
    return " ".join([run.prefill, *params])


def scores(rows: Iterable[SampleRow]) -> list[float]:
    """The scores of those that did not run out of memory."""
    return [row.score for row in rows if row.score is not None]


def score(row: SampleRow) -> float | None:
    return row.score


def prompt(row: SampleRow) -> str:
    """A key that tells a dataset's samples apart in all runs: the prompt, of one with several questions its name."""
    return row.sample_id if "turn" in row.fields else row.prompt_sha256


def measured(rows: Iterable[SampleRow], key: str) -> float | None:
    """Mean of a key of the samples' ledgers over those that have it, as `results` does."""
    older = OLDER_KEYS.get(key, key)
    values = [float(v) for row in rows if (v := row.ledger.get(key, row.ledger.get(older))) is not None]
    return fsum(values) / len(values) if values else None


def key_bytes_per_token(runs: Sequence[Run]) -> float | None:
    """Bytes of one token's keys in all layers, from what full attention kept; None without such a run.

    It keeps the prompt and every token that was fed: all generated ones but the last.
    """
    for run in runs:
        for row in run.rows if run.is_full else ():
            kept = row.ledger.get("bytes_resident_device")
            if kept:
                return (
                    kept
                    * float(Fraction(run.result.key_share or "1/2"))
                    / (row.prompt_tokens + row.generated_tokens - 1)
                )
    return None


def over_budget(rows: Iterable[SampleRow]) -> bool:
    """Whether any sample's ledger exceeded its budget."""
    return any(row.ledger.get("within_budget") is False for row in rows)


def default_root() -> Path:
    return Path(checkout.runs())


def finite(values: Iterable[float | None]) -> Iterator[float]:
    """Values that were measured."""
    return (value for value in values if value is not None)
