"""A run's folder: written while samples end, continued after a stop, read by tables and plots.

In this order: the rows (`SampleRow`, `RunResult`, checked whenever one is made or read), pure
functions on them (`summarise`, `config_hash`), and `RunFolder`, the only writer. Its promises:

- a sample counts once its line in samples.jsonl ends in a newline, never before and never twice;
- result.json exists only when everything else is in place; a stopped run has none;
- every file but samples.jsonl is written beside its place and renamed: it is whole or absent;
- one process at a time: an exclusive lock is held from `open` to `close`;
- a folder that is not the run's own is refused unchanged, and what others put into it stays.

runs/README.md describes every file and key. Nothing here imports torch, and only ledgers import
pyarrow, so that a table can be made on a laptop and a finished run be recognised at once.

Not here: how files are written, sealed and told from others' (`evals/results/files.py`), the loop over samples
(`evals/runner.py`), statistics over runs (`plots/stats.py`).
"""

import errno
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from functools import cache, lru_cache, partial
from io import BytesIO
from math import exp, fsum, isfinite, log
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, Self, cast, get_args, get_origin

import yaml
from filelock import FileLock, Timeout

from engine.errors import ConfigError, RunError
from evals.results.files import (
    FILES,
    HOLDER,
    LOCK,
    MARK,
    REMEDY,
    STEM,
    check_place,
    crc_of,
    file_stem,
    going_on,
    is_file,
    is_folder,
    naming,
    open_own,
    parse_json,
    read_yaml,
    remove_scratch,
    replacing,
    scratch,
    sealed,
    sync_folder,
    temporary,
    unsealed,
    write,
)
from evals.foreign import printable, read_bytes

SCHEMA_VERSION = 1
EXACT = "exact"  # the prefill of every run that names no other
N_RESAMPLES = 10_000
LARGEST_SAMPLES = 4 << 30  # bytes of samples.jsonl: a million answers of 4 kB
BOOTSTRAP_SEED = 20_240_229  # any fixed number: an interval must not change when it is made again
LARGEST = 1e300  # of numbers that are averaged: a thousand of them can still be added
KEYS_WITHOUT_EFFECT = {"out", "logger", "hydra", "progress"}  # top-level keys that change no result

# Fields of `RunResult` and the key of a sample's ledger summary that each is the mean of. A null
# was not measured. `within_budget`, a bool, stands beside them and must hold for every sample.
LEDGER_MEANS = {
    "tokens_budget_mean": "tokens_budget",
    "tokens_attended_mean": "tokens_attended_mean",
    "effective_ratio": "effective_ratio",
    "bytes_resident_device": "bytes_resident_device",
    "bytes_resident_host": "bytes_resident_host",
    "bytes_resident_device_actual": "bytes_resident_device_actual",
    "bytes_moved_kv_per_step": "bytes_moved_kv_per_step",
    "bytes_moved_meta_per_step": "bytes_moved_meta_per_step",
    "bytes_searched_per_step": "bytes_searched_per_step",
    "cache_hit_rate": "cache_hit_rate",
}


@dataclass(frozen=True)
class Metric:
    """What a score is, and how the scores of samples become that of a run."""

    better: str  # "higher" or "lower"
    lowest: float
    highest: float | None
    # A perplexity is exp of a mean loss: runs average the losses, each sample counting as often as this field says.
    weight: str | None = None


SCORE = Metric("higher", 0, 1)
METRICS = {  # by the name that a task declares; "score" without one
    "score": SCORE,
    "recall": SCORE,
    "perplexity": Metric("lower", 1, None, weight="n_targets"),
    "tpot_ratio": Metric("lower", 0, None),
}


# --- typed rows ---

Check = Callable[[Any], bool]


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    if value is None or isinstance(value, str | int):
        return True
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, list):
        return all(map(_is_plain, cast(list[Any], value)))
    items = cast(dict[Any, Any], value) if isinstance(value, dict) else {None: None}
    return all(isinstance(key, str) for key in items) and all(map(_is_plain, items.values()))


def _check_of(hint: Any) -> Check:
    """Whether a JSON value has a field's type; `Any` stands for every plain JSON value."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return _is_plain
    if origin is UnionType:
        checks = [_check_of(arg) for arg in args]
        return lambda value: any(check(value) for check in checks)
    if origin is list:
        inner = _check_of(args[0])
        return lambda value: isinstance(value, list) and all(map(inner, cast(list[Any], value)))
    if origin is dict:
        inner = _check_of(args[1])
        return lambda value: (
            isinstance(value, dict)
            and all(isinstance(key, str) for key in cast(dict[Any, Any], value))
            and all(map(inner, cast(dict[str, Any], value).values()))
        )
    if hint is float:
        return lambda value: (
            not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and isfinite(value)))
        )
    return lambda value: isinstance(value, hint) and isinstance(value, bool) == (hint is bool)


_MEASURES = _check_of(dict[str, float | None])


@cache
def _checks(kind: type) -> tuple[tuple[str, Any, Check], ...]:
    """Name, type and check of a dataclass's fields; worked out once, a report reads thousands of rows."""
    return tuple((spec.name, spec.type, _check_of(spec.type)) for spec in fields(kind))


def _check_types(row: Any) -> None:
    """ValueError with the first field of a dataclass whose value is not of the declared type."""
    for name, hint, check in _checks(row.__class__):
        value = getattr(row, name)
        if not check(value):
            kind = hint.__name__ if isinstance(hint, type) else hint
            raise ValueError(f"key {name!r} is {value!r:.80}, not of type {kind}")


def _check_choice(key: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"key {key!r} is {value!r}, not one of {', '.join(allowed)}")


def _check_keys(data: Any, keys: Iterable[str]) -> dict[str, Any]:
    """`data` as a dict with at least `keys`; ValueError with the first one that is missing."""
    if not isinstance(data, dict):
        raise ValueError(f"not a JSON object but a {type(data).__name__}")
    for key in keys:
        if key not in data:
            raise ValueError(f"key {key!r} is missing")
    return cast(dict[str, Any], data)


@dataclass(frozen=True)
class SampleRow:
    """A line of samples.jsonl; the task's own columns stand in it under their own names."""

    id: str
    prompt_sha256: str  # see `prompt_hash`
    prompt_tokens: int
    original_prompt_tokens: int  # before the middle was cut out
    generated_tokens: int
    prediction: str
    references: list[str]
    score: float | None  # 0 to 1, or as METRICS says; null where the sample ran out of memory
    status: str  # "ok" or "oom"
    error: str | None
    prefill_s: float | None
    decode_s: float | None
    tpot_s: float | None  # decode time per output token after the first; null with a single one
    batch_rows: int  # rows decoded in one batch with this one, itself included: they share its time
    ledger: dict[str, float | bool | None]  # the ledger's summary; {} where it ran out of memory
    fields: dict[str, Any] = field(default_factory=dict[str, Any])  # the task's: length, depth, …

    def __post_init__(self) -> None:
        _check_types(self)
        _check_choice("status", self.status, ("ok", "oom"))
        if (self.score is not None) != (self.status == "ok"):
            raise ValueError(f"key 'score' is {self.score} with status {self.status!r}")
        metric = METRICS.get(str(self.fields.get("metric")), SCORE)
        top = metric.highest
        if self.score is not None and not (metric.lowest <= self.score and (top is None or self.score <= top)):
            within = f"within {metric.lowest} to {top}" if top else f"{metric.lowest} or more"
            raise ValueError(f"key 'score' is {self.score}, not {within}")
        weight = self.fields.get(metric.weight, 0) if metric.weight else 1
        if self.score is not None and not (isinstance(weight, int) and 0 < weight < LARGEST):
            raise ValueError(f"key {metric.weight!r} is {weight!r}, not a number of losses")
        measures = self.fields.get("measures", {})
        if not _MEASURES(measures):
            raise ValueError("key 'measures' is no object of numbers")
        averaged = {
            **self.ledger, **measures, "score": self.score, "batch_rows": self.batch_rows,
            "prefill_s": self.prefill_s, "decode_s": self.decode_s, "tpot_s": self.tpot_s,
        }  # fmt: skip
        for key, value in averaged.items():
            if value is not None and abs(value) > LARGEST:
                raise ValueError(f"key {key!r} is larger than {LARGEST:g}")
        if not re.fullmatch("[0-9a-f]{16}", self.prompt_sha256):
            raise ValueError(f"key 'prompt_sha256' is {self.prompt_sha256!r}, not 16 hex digits")
        if self.status == "ok":
            _check_keys(self.ledger, [*LEDGER_MEANS.values(), "within_budget"])
            if not isinstance(self.ledger["within_budget"], bool):
                raise ValueError("key 'within_budget' of the ledger is not true or false")
        if clash := ROW_KEYS.intersection(self.fields):
            raise ValueError(f"key {min(clash)!r} is a task's, and also one that every sample has")

    def to_dict(self) -> dict[str, Any]:
        """The row as it stands in samples.jsonl."""
        columns = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return columns | columns.pop("fields")

    def to_json(self) -> str:
        """One line without its newline; ASCII, so that no character of a text can break it."""
        return json.dumps(self.to_dict(), ensure_ascii=True, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """From a line with or without a seal; ValueError where it is no sample."""
        return cls.from_data(parse_json(unsealed(line.removesuffix("\n"))))

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """From the object that a line holds, its seal taken off."""
        data = _check_keys(data, ROW_KEYS - {"fields"})
        if "crc32" in data:  # a seal that is damaged itself
            raise ValueError("key 'crc32' is not 8 hex digits at the line's start")
        known = {key: data.pop(key) for key in ROW_KEYS - {"fields"}}
        with _bounded():
            return cls(**known, fields=data)


@contextmanager
def _bounded() -> Generator[None]:
    """ValueError where values are nested more deeply than a check of their types can follow."""
    try:
        yield
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


ROW_KEYS = frozenset(spec.name for spec in fields(SampleRow))


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the runner knows of a run beside its samples."""

    method: str
    method_label: str  # as printed in tables, such as "H2O (C)"
    params: dict[str, Any]
    task: str
    task_version: int
    dataset: str
    data_source: str  # "embedded", "local" or "hub"
    model: str
    compressed_layers: list[int]
    dtype: str
    device: str
    seed: int
    ratio_exact: str | None  # "0.2" or "1/3"; null where `budget` is given
    budget: int | None  # tokens; null where `ratio` is given
    comm_exact: str  # "1/64"
    protocol: str  # the compression scope: "full_prompt" or "context_only"
    config_hash: str
    versions: dict[str, str]
    git_sha: str | None
    peak_rss_bytes: int  # of the process that finished the run
    notes: list[str] = field(default_factory=list[str])  # fallbacks taken openly
    metric: str | None = None  # a name in METRICS; null: "score"
    prefill: str = EXACT  # a file of conf/prefill
    prefill_params: dict[str, Any] = field(default_factory=dict[str, Any])


# Keys of result.json that only some runs have, and what the others would say; they are left out there.
OPTIONAL_KEYS: dict[str, Any] = {
    "metric": None,
    "measures": None,
    "prefill": EXACT,
    "prefill_params": {},
    "ledger_crc32": None,
}


class OtherSchemaError(ValueError):
    """A result.json of another version than this code can read."""


@dataclass(frozen=True, kw_only=True)
class RunResult(RunFacts):
    """result.json. What was measured is a mean over the samples that are ok, null without any."""

    schema_version: int = SCHEMA_VERSION
    status: str  # "ok", or "oom" when any sample ran out of memory
    n_samples: int  # that are ok
    n_oom: int
    score: float | None  # 0 to 1, or as METRICS says
    score_ci95: list[float] | None  # see `bootstrap_ci95`
    ratio: float | None
    comm: float
    within_budget: bool | None  # every sample's ledger stayed within its budget
    tokens_budget_mean: float | None
    tokens_attended_mean: float | None
    effective_ratio: float | None  # attended tokens relative to full attention at the same steps
    bytes_resident_device: float | None
    bytes_resident_host: float | None
    bytes_resident_device_actual: float | None  # as allocated, in the dtype of the run
    bytes_moved_kv_per_step: float | None
    bytes_moved_meta_per_step: float | None
    bytes_searched_per_step: float | None  # by an exact search, which no budget prices (oracle)
    cache_hit_rate: float | None
    prefill_s: float | None
    tpot_s: float | None
    batch_rows_mean: float | None  # rows that were decoded together; above 1 tpot_s is the batch's
    measures: dict[str, float | None] | None = None  # means of the task's other figures, by name
    # Of ledger.parquet; `finish` knows it, who summarises does not.
    ledger_crc32: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _check_types(self)
        _check_choice("status", self.status, ("ok", "oom"))
        if self.score_ci95 is not None and len(self.score_ci95) != 2:
            raise ValueError(f"key 'score_ci95' has {len(self.score_ci95)} numbers, not 2")
        if self.metric is not None:
            _check_choice("metric", self.metric, tuple(METRICS))

    def to_json(self) -> str:
        versioned = {"schema_version": self.schema_version} | asdict(self)
        for key, usual in OPTIONAL_KEYS.items():
            if versioned[key] == usual:
                del versioned[key]
        return json.dumps(versioned, ensure_ascii=True, allow_nan=False, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From a text with or without a seal; ValueError where it is no result."""
        data = _check_keys(parse_json(unsealed(text)), ["schema_version"])
        version = data["schema_version"]
        if not isinstance(version, int) or isinstance(version, bool):
            raise ValueError(f"key 'schema_version' is {version!r:.80}, not a whole number")
        if version != SCHEMA_VERSION:  # before the keys, which may be others there
            raise OtherSchemaError(f"schema_version is {version!r:.80}; only {SCHEMA_VERSION} can be read")
        keys = [spec.name for spec in fields(cls)]
        needed = [key for key in keys if key not in OPTIONAL_KEYS]
        if unknown := sorted(_check_keys(data, needed).keys() - set(keys)):
            raise ValueError(f"key {unknown[0]!r} is unknown")
        with _bounded():
            return cls(**data)


def prompt_hash(ids: Iterable[int]) -> str:
    """16 hex digits of the sha256 over a prompt's token ids: of its text and its tokenizer."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


# --- summaries: pure functions ---


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean over what was measured; fsum is exact, so the order of the samples does not matter."""
    measured = [value for value in values if value is not None]
    return fsum(measured) / len(measured) if measured else None


def combined(rows: Iterable[SampleRow], metric: str | None = None) -> float | None:
    """The score of a run from those of its samples: their mean, or of perplexities exp of the mean loss."""
    key = METRICS[metric or "score"].weight
    scored = [(row.score, row) for row in rows if row.score is not None]
    if key is None or not scored:
        return _mean(score for score, _ in scored)
    weights = [int(row.fields[key]) for _, row in scored]
    losses = (log(score) * n for (score, _), n in zip(scored, weights, strict=True))
    return exp(fsum(losses) / sum(weights))


def combined_ci95(rows: Iterable[SampleRow], metric: str | None = None) -> list[float] | None:
    """As `bootstrap_ci95`, of what `combined` says."""
    key = METRICS[metric or "score"].weight
    scored = [(row.score, row) for row in rows if row.score is not None]
    if key is None:
        return bootstrap_ci95([score for score, _ in scored])
    weights = [int(row.fields[key]) for _, row in scored]
    bounds = bootstrap_ci95([log(score) for score, _ in scored], weights)
    return None if bounds is None else [exp(bound) for bound in bounds]


def _measures(rows: Sequence[SampleRow]) -> dict[str, float | None] | None:
    """Means of what a task's samples carry as `measures`, a null being no measurement; None without any."""
    found = [cast(dict[str, Any], row.fields["measures"]) for row in rows if "measures" in row.fields]
    names = dict.fromkeys(name for measures in found for name in measures)
    return {name: _mean(measures.get(name) for measures in found) for name in names} or None


def bootstrap_ci95(scores: Sequence[float], weights: Sequence[int] | None = None) -> list[float] | None:
    """Percentile bootstrap over samples: [score, score] of a single one, null of none.

    The same scores give the same interval, in whatever order and on every machine.
    """
    import numpy as np

    n = len(scores)
    if n < 2:
        return [float(scores[0])] * 2 if n else None
    order = np.argsort(np.asarray(scores, dtype=np.float64), kind="stable")
    values = np.asarray(scores, dtype=np.float64)[order]
    counts = None if weights is None else np.asarray(weights, dtype=np.float64)[order]
    weighted = values if counts is None else values * counts
    means: list[Any] = []
    for drawn in _first_draws(n) if n <= 256 else _draws(n):
        part = weighted[drawn].mean(axis=1)
        means.append(part if counts is None else part / counts[drawn].mean(axis=1))
    # Without the bounds, rounding could put equal scores outside of their own interval.
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975]).clip(values[0], values[-1])
    return [float(low), float(high)]


def _draws(n: int) -> Iterator[Any]:
    """Which samples each resample has, some resamples at a time."""
    import numpy as np

    rng = np.random.default_rng(BOOTSTRAP_SEED + n)
    chunk = max(1, 1_000_000 // n)  # resamples at a time: 8 MB of indices
    for start in range(0, N_RESAMPLES, chunk):
        yield rng.integers(0, n, size=(min(chunk, N_RESAMPLES - start), n))


@lru_cache(maxsize=2)
def _first_draws(n: int) -> tuple[Any, ...]:
    """All of `_draws`, kept: a report asks for hundreds of intervals of as many samples; 20 MB at most each."""
    return tuple(_draws(n))


def summarise(rows: Sequence[SampleRow], facts: RunFacts) -> RunResult:
    """What a finished run says of itself; the order of `rows` does not matter."""
    ok = [row for row in rows if row.status == "ok"]
    means: dict[str, Any] = {name: _mean(row.ledger[key] for row in ok) for name, key in LEDGER_MEANS.items()}
    return RunResult(
        **vars(facts),
        **means,
        status="ok" if len(ok) == len(rows) else "oom",
        n_samples=len(ok),
        n_oom=len(rows) - len(ok),
        score=combined(ok, facts.metric),
        score_ci95=combined_ci95(ok, facts.metric),
        ratio=None if facts.ratio_exact is None else float(Fraction(facts.ratio_exact)),
        comm=float(Fraction(facts.comm_exact)),
        within_budget=all(row.ledger["within_budget"] for row in ok) if ok else None,
        prefill_s=_mean(row.prefill_s for row in ok),
        tpot_s=_mean(row.tpot_s for row in ok),
        batch_rows_mean=_mean(row.batch_rows for row in ok),
        measures=_measures(ok),
    )


def _disagreement(result: RunResult, rows: Collection[SampleRow]) -> str | None:
    """What a result says that its samples do not, or None."""
    scores = [row.score for row in rows]
    counts = len(scores) - scores.count(None), scores.count(None)
    if (result.n_samples, result.n_oom) != counts:
        return "{} samples and {} oom, samples.jsonl {} and {}".format(result.n_samples, result.n_oom, *counts)
    same = result.score == combined(rows, result.metric)
    return None if same else "another score than samples.jsonl"


def config_hash(config: Mapping[str, Any]) -> str:
    """10 hex digits of the sha256 over a resolved configuration, less what changes no result."""
    kept = {key: value for key, value in config.items() if key not in KEYS_WITHOUT_EFFECT}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def run_name(config: Mapping[str, Any]) -> str:
    """Name of a run's folder: task, prefill if not exact, method and model for people, the hash for the rest."""
    keys = ("task", *(("prefill",) if "prefill" in config else ()), "method", "model")
    parts: list[Any] = [config[key] for key in keys]
    names: list[Any] = [part["name"] if isinstance(part, Mapping) else part for part in parts]
    safe = [re.sub(r"[^A-Za-z0-9._]+", "-", str(name)).strip("-.")[:40] for name in names]
    return "-".join([*safe, config_hash(config)])


def _differing_keys(a: Any, b: Any, key: str = "") -> list[str]:
    """Dotted keys whose values differ between two configurations."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return [] if a == b else [key]
    old, new = cast(dict[str, Any], a), cast(dict[str, Any], b)
    names = sorted(old.keys() | new.keys(), key=str)  # YAML has keys that are no texts
    absent = object()  # differs from everything, null included
    pairs = [(f"{key}.{n}".lstrip("."), old.get(n, absent), new.get(n, absent)) for n in names]
    return [
        differing
        for name, x, y in pairs
        if name not in KEYS_WITHOUT_EFFECT
        for differing in _differing_keys(x, y, name)
    ]


# --- files ---


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config.yaml of anything but a run with this configuration."""
    try:
        old = read_yaml(path)
    except ValueError as error:
        raise ConfigError(f"{path} is not the configuration of a run ({error}); {REMEDY}") from None
    if not {"method", "task", "model"} <= old.keys():
        raise ConfigError(f"{path} is not the configuration of a run; {REMEDY}")
    keys = _differing_keys(old, json.loads(json.dumps(config)))  # as JSON: tuples are lists
    if keys:
        shown = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
        raise ConfigError(f"{path.parent} is of a run with another {printable(shown)}; {REMEDY}")


def _parse_samples(path: Path, content: bytes) -> tuple[dict[str, SampleRow], int]:
    """The rows of samples.jsonl by id, and how many bytes they take: less than all if the last
    line is torn. Any other line that is no sample, or one twice, is a ConfigError."""
    rows: dict[str, SampleRow] = {}
    n_bytes = 0
    lines = BytesIO(content).readlines()
    for number, line in enumerate(lines, start=1):
        place = f"{path} line {number}"
        try:
            data = parse_json(line if line.endswith(b"\n") else b"")
        except ValueError:
            if number == len(lines):
                break
            raise ConfigError(f"{place} is not JSON; delete it to run its sample again") from None
        try:
            row = SampleRow.from_data(_taken_off(line.decode(), data))
        except ValueError as error:
            raise ConfigError(f"{place} is not a sample ({error}); delete it to run its sample again") from None
        if row.id in rows:
            raise ConfigError(f"{place} has sample {row.id!r} a second time; delete one of the two")
        rows[row.id] = row
        n_bytes += len(line)
    return rows, n_bytes


def _taken_off(line: str, data: Any) -> dict[str, Any]:
    """The object of a line, parsed already, without its seal, which is checked against the text."""
    found = _check_keys(data, ["id"])
    # An older line has no seal and begins with its id; else a seal could be damaged unseen.
    if next(iter(found)) not in ("crc32", "id"):
        raise ValueError("it does not begin with 'id' or 'crc32'")
    text = line.removesuffix("\n")
    if unsealed(text) is not text:
        del found["crc32"]
    return found


def read_samples(folder: Path) -> list[SampleRow]:
    """The rows of a finished run; ValueError with the file's name if one of them is not whole."""
    path = folder / "samples.jsonl"
    try:
        content = read_bytes(path, LARGEST_SAMPLES)
        rows, n_bytes = _parse_samples(path, content)
    except ConfigError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if n_bytes < len(content):
        raise ValueError(f"{path} ends within a line; run the same command again to complete it")
    return list(rows.values())


def read_config(folder: Path) -> dict[str, Any]:
    """A run's configuration; ValueError with the file's name where it cannot be read."""
    path = folder / "config.yaml"
    try:
        return cast(dict[str, Any], read_yaml(path))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_ledger(folder: Path, result: RunResult) -> dict[str, list[Any]]:
    """The columns of a finished run's ledger.parquet; {} where it is lost or damaged."""
    path = folder / "ledger.parquet"
    if _ledger_damage(path, result) is not None:
        return {}
    pa, pq = _pyarrow()
    try:
        table = pq.read_table(path, partitioning=None, page_checksum_verification=True)
        return table.to_pydict()
    except (pa.ArrowException, OSError, ValueError):  # one that was written without a checksum
        return {}


def _ledger_damage(path: Path, result: RunResult) -> str | None:
    """Why the ledger of a finished run cannot be believed, or None; without pyarrow, which is slow to import."""
    if not is_file(path):
        return "lost"
    if result.ledger_crc32 is not None:
        is_whole = result.ledger_crc32 == crc_of(path)
    else:  # of an older run; its footer is what a cut takes away
        with path.open("rb") as file:
            head, n_bytes = file.read(4), file.seek(0, os.SEEK_END)
            file.seek(max(0, n_bytes - 8))
            tail = file.read()
        is_whole = head == tail[4:] == b"PAR1" and int.from_bytes(tail[:4], "little") < n_bytes
    return None if is_whole else "damaged"


def read_runs(root: Path) -> list[tuple[Path, RunResult]]:
    """Every finished run below `root`, by folder; ValueError with the name of a damaged file."""
    runs: list[tuple[Path, RunResult]] = []
    for path in sorted(root.rglob("result.json")):
        runs.append((path.parent, read_run(path.parent)[0]))
    return runs


def read_run(folder: Path) -> tuple[RunResult, list[SampleRow]]:
    """A finished run and its rows; ValueError with the name of a damaged file."""
    path = folder / "result.json"
    try:
        result = RunResult.from_json(read_bytes(path).decode())
    except OtherSchemaError as error:
        raise ValueError(f"{path}: {error}; read it with the code that wrote it") from None
    except (ValueError, ConfigError) as error:
        raise ValueError(f"{path} is not the result of a run: {error}") from None
    rows = read_samples(folder)
    if said := _disagreement(result, rows):
        raise ValueError(f"{path} says {said}; run the same command again to repair it")
    return result, rows


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder's lock, as far as it has said."""

    pid: int | None
    host: str | None

    def __str__(self) -> str:
        return "another process" if self.pid is None else f"process {self.pid} on {self.host}"


class RunFolder:
    """One run's folder, held exclusively from `open` to `close`; a context manager.

    `append` each sample as it ends, then `finish`. After `open`, `rows` are the samples that
    earlier processes completed, `finished` is the result if nothing is left to do, and `notes` say
    what was found damaged and repaired (for the log: a result is the same with and without).
    """

    def __init__(self, path: Path, config: Mapping[str, Any], lock: FileLock) -> None:
        self.path = path
        self.config = config
        self.config_hash = config_hash(config)
        self.notes: list[str] = []
        self._lock = lock
        self._n_bytes = 0  # of samples.jsonl
        self._rows: dict[str, SampleRow] = {}
        self._finished: RunResult | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        config: Mapping[str, Any],
        config_yaml: str,
        *,
        wait: bool = True,
        on_wait: Callable[[Holder], None] | None = None,
        retry_oom: bool = False,
    ) -> Self:
        """Check that the folder is new or of `config`, lock it, repair what a killed process left.

        One that is refused is left as it was. `path` may be a link to a folder; inside, none is
        followed. `config_yaml` is `config` as YAML. `retry_oom` forgets samples that ran out of memory.
        Whoever needs several folders opens them in sorted order: two processes with two orders
        would wait for each other for ever.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            check_place(path, lambda file: _check_config(file, config))
            lock = _lock(path, wait, on_wait)
        except OSError as error:
            raise _unusable(path, error) from None
        folder = cls(path, config, lock)
        try:
            # Once more, as another process may have begun or gone on since.
            has_config = check_place(path, lambda file: _check_config(file, config))
            with open_own(path / HOLDER, os.O_TRUNC) as file:
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            folder._prepare(None if has_config else config_yaml, retry_oom)
        except BaseException as error:
            folder.close()
            if isinstance(error, OSError):
                raise _unusable(path, error) from None
            raise
        return folder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the next process in. The lock file stays: two processes could lock two of them."""
        self._lock.release()

    @property
    def rows(self) -> list[SampleRow]:
        """The completed samples, in the order of their lines."""
        return list(self._rows.values())

    @property
    def finished(self) -> RunResult | None:
        """The result, if there is one and the lines that it counted are still there."""
        return self._finished

    def has(self, id: str) -> bool:
        """Whether a sample is completed."""
        return id in self._rows

    def check_prompt(self, id: str, sha256: str) -> None:
        """Refuse to go on if a completed sample was asked with another prompt than now."""
        if id in self._rows and self._rows[id].prompt_sha256 != sha256:
            raise ConfigError(
                f"sample {id!r} has another prompt now than when {self.path} was begun (the data, "
                "the tokenizer or Python's version changed); choose another folder with out=DIR or "
                "delete this one"
            )

    def append(self, row: SampleRow, ledger: Mapping[str, Sequence[float]] | None = None) -> None:
        """Complete one sample: first its ledger (columns of equal length), then its line.

        Killed between the two, a ledger without a line is left, which the sample's next attempt
        replaces. The other order could leave a completed sample without its ledger. Killed within the line, the
        newline is missing and the next `open` cuts it off. Either way the sample runs again.
        """
        assert self._finished is None, f"{self.path} is finished"
        with going_on(self.path):
            if ledger is not None:
                _write_ledger(self._part(row.id), row.id, ledger)
            else:  # of an attempt that was killed before its line
                self._part(row.id).unlink(missing_ok=True)
            self._append_line(row)

    def _append_line(self, row: SampleRow) -> None:
        assert row.id not in self._rows, f"sample {row.id!r} is already in {self.path}"
        line = sealed(row.to_json()).encode() + b"\n"
        path = self.path / "samples.jsonl"
        with naming(path), open_own(path, os.O_APPEND) as file:
            size = os.fstat(file.fileno()).st_size
            if size != self._n_bytes:
                raise RunError(
                    f"{path} has {size} bytes where this run left {self._n_bytes}: somebody else changed it; give "
                    "the same command again, which goes on with what it holds"
                )
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "it took only a part of a line")
                os.fsync(file.fileno())
            except BaseException:  # a caller that goes on must not append to half a line
                file.truncate(size)
                raise
        if size == 0:
            sync_folder(self.path)
        self._n_bytes += len(line)
        self._rows[row.id] = row

    @contextmanager
    def placing(self) -> Generator[Path]:
        """A folder for files that belong beside the result; they are put there when all are whole."""
        with going_on(self.path), scratch(self.path) as folder:
            yield folder

    def finish(self, result: RunResult, env: Mapping[str, Any]) -> None:
        """Write ledger.parquet, env.json and, when both are in place, result.json.

        Killed before result.json, all of it is done again: the parts that ledger.parquet is made
        of are removed last. Killed while they are removed, the next `open` removes the others.
        """
        assert result.config_hash == self.config_hash, f"{result.config_hash} {self.config_hash}"
        said = _disagreement(result, self._rows.values())
        assert said is None, f"the result says {said}"
        with going_on(self.path):
            result = replace(result, ledger_crc32=self._merge_ledger())
            write(self.path / "env.json", json.dumps(env, indent=2) + "\n")
            write(self.path / "result.json", sealed(result.to_json()))
            self._finished = result
            self._remove_parts()

    # Samples that other processes answer, in folders of their own below this one.

    def shards(self) -> list[Path]:
        """Folders in which other processes answered samples of this run, and which were not taken over yet."""
        folder = self.path / "shards"
        if self._finished or not is_folder(folder):
            return []
        found: list[Path] = []
        for path in sorted(filter(is_folder, folder.iterdir())):
            try:
                check_place(path, lambda file: _check_config(file, self.config))
            except ConfigError as error:
                self.notes.append(f"{path} is no shard of this run and stays as it is: {error}")
                continue
            if any(path.iterdir()):
                found.append(path)
        return found

    def take(self, shard: Path, on_wait: Callable[[Holder], None] | None = None) -> None:
        """Take over what another process completed in `shard`, once it has ended, and remove its files there.

        Killed on the way, what is left is taken the next time.
        """
        with going_on(shard):
            lock = _lock(shard, True, on_wait)
            try:
                check_place(shard, lambda file: _check_config(file, self.config))
                other = type(self)(shard, self.config, lock)
                other._prepare_samples()
                for row in other.rows:
                    if not self.has(row.id):
                        self._take_sample(row, other._part(row.id))
                for file in sorted(shard.iterdir()):
                    if re.fullmatch(rf"(trace|accesses)-{STEM}\.(json|npz)", file.name):
                        file.replace(self.path / file.name)
                other._remove_files()
            finally:
                lock.release()

    def _take_sample(self, row: SampleRow, part: Path) -> None:
        if is_file(part):
            self._part(row.id).parent.mkdir(exist_ok=True)
            with replacing(self._part(row.id)) as file:
                file.write(part.read_bytes())
        else:
            self._part(row.id).unlink(missing_ok=True)
        self._append_line(row)

    def _remove_files(self) -> None:
        """All that runs write, and the folder with it unless somebody else put something there."""
        self._remove_parts()
        remove_scratch(self.path)
        for name in FILES:
            temporary(self.path / name).unlink(missing_ok=True)
        (self.path / "samples.jsonl").unlink(missing_ok=True)
        # config.yaml says whose the folder is, as long as there is one.
        names = ("config.yaml", HOLDER, LOCK)
        if {path.name for path in self.path.iterdir()} <= set(names):
            for name in names:
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()
            if not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()

    def sort(self, ids: Sequence[str]) -> None:
        """Put the lines into this order, which is the task's, whoever answered first."""
        rows = {id: self._rows[id] for id in ids if id in self._rows}
        rows |= self._rows  # those of samples that are no longer asked stay, behind the others
        if list(rows) != list(self._rows):
            with going_on(self.path):
                self._rewrite(rows)

    def _rewrite(self, rows: dict[str, SampleRow]) -> None:
        """samples.jsonl with these lines."""
        text = "".join(sealed(row.to_json()) + "\n" for row in rows.values())
        write(self.path / "samples.jsonl", text)
        self._rows, self._n_bytes = rows, len(text.encode())

    # Opening: each step leaves a folder that can be opened again, so a kill changes nothing.

    def _prepare(self, config_yaml: str | None, retry_oom: bool) -> None:
        """Repair; `config_yaml` is None where the folder has its config.yaml."""
        self._check_schema()
        for name in FILES:
            temporary(self.path / name).unlink(missing_ok=True)
        remove_scratch(self.path)
        if config_yaml is not None:
            assert config_hash(yaml.safe_load(config_yaml)) == self.config_hash, "another config_yaml"
            write(self.path / "config.yaml", config_yaml)
        self._prepare_samples()
        if retry_oom and any(row.status == "oom" for row in self._rows.values()):
            # First the result: it must not stand beside fewer lines than it counted.
            (self.path / "result.json").unlink(missing_ok=True)
            self._rewrite({id: row for id, row in self._rows.items() if row.status != "oom"})
        self._prepare_result()
        if self._finished:
            self._remove_parts()

    def _check_schema(self) -> None:
        """Refuse a result of another version before anything is changed."""
        path = self.path / "result.json"
        try:
            RunResult.from_json(path.read_bytes().decode())
        except OtherSchemaError as error:
            raise ConfigError(f"{path}: {error}; use the code that wrote it, or {REMEDY}") from None
        except (ValueError, FileNotFoundError):  # made again, or made for the first time
            return

    def _prepare_samples(self) -> None:
        path = self.path / "samples.jsonl"
        if not path.exists():
            return
        content = path.read_bytes()
        self._rows, n_bytes = _parse_samples(path, content)
        self._n_bytes = n_bytes
        if n_bytes < len(content):
            with open_own(path, 0) as file:
                file.truncate(n_bytes)
                os.fsync(file.fileno())
            self.notes.append(f"{path} ended within a line, which is cut off and run again")

    def _prepare_result(self) -> None:
        """Read result.json; one that is damaged is moved aside, to be made again from samples."""
        path = self.path / "result.json"
        if not path.exists():
            return
        try:
            result = RunResult.from_json(path.read_bytes().decode())
            if result.config_hash != self.config_hash:
                raise ValueError(f"it says config_hash {result.config_hash}")
            if said := _disagreement(result, self._rows.values()):
                raise ValueError(f"it says {said}")
        except ValueError as error:
            path.replace(path.with_name("result.json.corrupt"))
            sync_folder(self.path)
            self.notes.append(f"{path} was damaged ({error}) and is made again")
            return
        self._finished = result
        if damage := _ledger_damage(self.path / "ledger.parquet", result):
            self.notes.append(f"{self.path / 'ledger.parquet'} is {damage} and is not used; only a new run can make it")

    # Ledgers: a part per sample while the run goes on, one file when it has finished.

    def _part(self, id: str) -> Path:
        """A sample's part, named by the id alone, since lines before it may be dropped."""
        return self.path / "ledger" / f"{file_stem(id)}.parquet"

    def _remove_parts(self) -> None:
        """The parts of completed samples, and of those that an earlier process was at when it was killed."""
        folder = self.path / "ledger"
        if not folder.is_dir():
            return
        for id in self._rows:
            self._part(id).unlink(missing_ok=True)
        for path in sorted(folder.iterdir()):
            if (path.name.endswith(MARK) and is_file(path)) or self._is_part(path):
                path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()

    def _is_part(self, path: Path) -> bool:
        """Whether somebody's file in ledger/ is of a sample: what it is called follows from what it holds."""
        if not re.fullmatch(rf"{STEM}\.parquet", path.name) or not is_file(path):
            return False
        pa, pq = _pyarrow()
        try:
            ids = pq.read_table(path, columns=["sample_id"], partitioning=None)["sample_id"]
            return len(ids) > 0 and self._part(ids[0].as_py()).name == path.name
        except (pa.ArrowException, OSError, KeyError, ValueError):
            return False

    def _merge_ledger(self) -> str:
        """ledger.parquet in the order of the lines: a row group per sample, one in memory at once.

        Samples without a part are copied from an earlier ledger.parquet: there is one if
        result.json was lost after the parts were removed. Returns the CRC of what was written.
        """
        pa, pq = _pyarrow()
        target = self.path / "ledger.parquet"
        readers: dict[str, Callable[[], Any]] = {}
        for id in self._rows:
            if is_file(part := self._part(id)):
                readers[id] = partial(_read_part, part)
        old: Any = None
        groups: dict[str, int] = {}
        if len(readers) < len(self._rows):
            old, groups = _open_ledger(target)
        for id in (self._rows.keys() & groups.keys()) - readers.keys():
            readers[id] = partial(old.read_row_group, groups[id])
        schemas = [pa.schema([("sample_id", pa.string())])]
        schemas += [] if old is None else [old.schema_arrow]
        for id in [id for id in readers if is_file(self._part(id))]:
            try:
                schemas.append(_of_numbers(pa, pq.read_schema(self._part(id))))
            except (pa.ArrowException, OSError, ValueError):
                del readers[id]
        # Columns may be integers in one sample and floats in another, or empty and of no type.
        schema = pa.unify_schemas(schemas, promote_options="permissive")
        lost = 0
        options: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
        with replacing(target) as file:
            with pq.ParquetWriter(file, schema, **options) as new:
                for id, row in self._rows.items():
                    try:
                        table = readers[id]()
                        if set(table["sample_id"].unique().to_pylist()) - {id}:
                            raise ValueError(f"it is not of sample {id!r}")
                        tables = [schema.empty_table(), table]
                        table = pa.concat_tables(tables, promote_options="permissive")
                    except (pa.ArrowException, OSError, KeyError, ValueError):
                        lost += row.status == "ok"
                        continue
                    new.write_table(table)
            file.flush()
            crc = crc_of(temporary(target))
        if old is not None:
            old.close()
        if lost:
            self.notes.append(f"{target} has no rows of {lost} of {len(self._rows)} samples")
        return crc


def _of_numbers(pa: Any, schema: Any) -> Any:
    """The schema of a ledger; ValueError where it is none."""
    for column in schema:
        kind = column.type
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if column.name != "sample_id" and not (is_number or pa.types.is_null(kind)):
            raise ValueError(f"column {column.name!r} is of type {kind}")
    return schema


def _read_part(path: Path) -> Any:
    _, pq = _pyarrow()
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read()


def _lock(path: Path, wait: bool, on_wait: Callable[[Holder], None] | None) -> FileLock:
    """Hold the folder's lock. The kernel releases it when a process dies, however it dies."""
    lock = FileLock(path / LOCK, thread_local=False, poll_interval=0.2)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        holder = _holder(path)
        if holder == Holder(os.getpid(), socket.gethostname()):
            raise ConfigError(
                f"{path} is in use twice by this command; give each of its runs another out=DIR"
            ) from None
        if not wait:
            raise ConfigError(f"{path} is in use by {holder}; wait for it to end or choose another out=DIR") from None
        if on_wait is not None:
            on_wait(holder)
        lock.acquire()
    return lock


def _holder(path: Path) -> Holder:
    """Who holds the lock, asked only while it is held: a killed process leaves its name behind."""
    try:
        data = parse_json((path / HOLDER).read_bytes())
        return Holder(int(data["pid"]), str(data["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Holder(None, None)  # it has the lock and has not written its name yet


def _unusable(path: Path, error: OSError) -> ConfigError:
    where = error.filename or path
    return ConfigError(
        f"the run's folder {path} cannot be used ({where}: {error.strerror or error}); choose another one with out=DIR"
    )


def _pyarrow() -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet: slow to import and without types, hence behind one door."""
    return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")


def _write_ledger(path: Path, id: str, columns: Mapping[str, Sequence[float]]) -> None:
    pa, pq = _pyarrow()
    n = max((len(column) for column in columns.values()), default=0)
    table = pa.table({"sample_id": pa.array([id] * n, pa.string()), **columns})
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd", write_page_checksum=True)


def _open_ledger(path: Path) -> tuple[Any, dict[str, int]]:
    """An earlier ledger.parquet and its row group per sample; (None, {}) without a readable one."""
    pa, pq = _pyarrow()
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        groups = range(file.num_row_groups)
        ids = [file.read_row_group(i, columns=["sample_id"])["sample_id"] for i in groups]
        _of_numbers(pa, file.schema_arrow)
    except (pa.ArrowException, OSError, KeyError, ValueError):
        return None, {}
    return file, {column[0].as_py(): i for i, column in enumerate(ids) if len(column)}


# --- the machine ---


@cache
def environment() -> dict[str, Any]:
    """What env.json says of the machine and the code; the runner adds its timestamps.

    Asked once per process: what runs is what was imported, whatever the checkout becomes meanwhile.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "n_cores": os.cpu_count(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": versions(),
        "git_sha": git_sha(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that can change a number."""
    packages = "torch transformers tokenizers numpy triton datasets gguf hydra-core pyarrow"
    found = {"python": platform.python_version()}
    for name in packages.split():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_sha() -> str | None:
    """Commit of this checkout, "-dirty" where code or conf/ differ; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        top, sha = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        # Only what can change a number: a run with out=DIR in the checkout is no change of it.
        changed = git("status", "--porcelain", "--", "*.py", "conf")
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if Path(top).resolve() != root:
        return None  # another project's checkout around an installed copy
    return sha + ("-dirty" if changed else "")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
