"""What a run's files say, as typed rows: `SampleRow` is a line of samples.jsonl, `RunResult` is result.json.

A row is checked whenever one is made or read: `ValueError` names the first key whose value is wrong. runs/README.md
says what the keys mean.

Not here: what follows from rows (`results/summary.py`), files (`results/read.py`, `folder.py`).
"""

import hashlib
import json
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from functools import cache
from math import inf, isfinite
from types import UnionType
from typing import Any, Self, cast, get_args, get_origin

from kvbench.engine.budget import Bytes, parse_memory, show
from kvbench.engine.foreign import parse_json
from kvbench.results.files import unsealed
from kvbench.results.intervals import Bounds
from kvbench.results.names import shown_task

SCHEMA_VERSION = 3
# 1: `n_samples`, `n_oom` and `n_failed` were of lines, a turn or a draw each; 2: `comm` was never off.
READABLE = (1, 2, SCHEMA_VERSION)
OFF = "off"  # in `comm_exact`: nothing limited what was read to find tokens
EXACT = "exact"  # the prefill of every run that names no other
EVICT = "evict"  # one in chunks, between which the method dropped tokens
LARGEST = 1e300  # of numbers that are averaged: a thousand of them can still be added

# Of samples: answered, out of memory, or without an answer because the model's numbers were NaN. Of a run: that of its
# samples which stands last here.
STATUSES = ("ok", "oom", "failed")

# Fields of `RunResult` and the key of a sample's ledger summary that each is the mean of. A null
# was not measured. `within_budget`, a bool, stands next to them and must hold for every sample.
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
    of_reading: bool = field(default=False, compare=False)  # of what was read; no answer is asked for

    @property
    def bounds(self) -> Bounds:
        """What a score can be, and so a mean of scores."""
        return self.lowest, inf if self.highest is None else self.highest

    @property
    def is_share(self) -> bool:
        """Whether a score of 1 is a hit and one of 0 a miss."""
        return (self.better, self.lowest, self.highest) == ("higher", 0, 1)

    @property
    def scale(self) -> float:
        """The factor by which tables, figures and pages show a score: shares are 0 to 100."""
        return 100 if self.is_share else 1


SCORE = Metric("higher", 0, 1)
METRICS = {  # by the name that a task declares; "score" without one
    "score": SCORE,
    "recall": Metric("higher", 0, 1, of_reading=True),
    "perplexity": Metric("lower", 1, None, weight="n_targets", of_reading=True),
    "tpot_ratio": Metric("lower", 0, None, of_reading=True),
}


Check = Callable[[Any], bool]


def is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    if value is None or isinstance(value, str | int):
        return True
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, list):
        return all(map(is_plain, cast(list[Any], value)))
    items = cast(dict[Any, Any], value) if isinstance(value, dict) else {None: None}
    return all(isinstance(key, str) for key in items) and all(map(is_plain, items.values()))


def check_of(hint: Any) -> Check:
    """Whether a JSON value has a field's type; `Any` stands for every plain JSON value."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return is_plain
    if origin is UnionType:
        checks = [check_of(arg) for arg in args]
        return lambda value: any(check(value) for check in checks)
    if origin is list:
        inner = check_of(args[0])
        return lambda value: isinstance(value, list) and all(map(inner, cast(list[Any], value)))
    if origin is dict:
        inner = check_of(args[1])
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


ARE_MEASURES = check_of(dict[str, float | None])


@cache
def checks_of(kind: type) -> tuple[tuple[str, Any, Check], ...]:
    """Name, type and check of a dataclass's fields; worked out once, a report reads thousands of rows."""
    return tuple((spec.name, spec.type, check_of(spec.type)) for spec in fields(kind))


def check_types(row: Any) -> None:
    """ValueError with the first field of a dataclass whose value is not of the declared type."""
    for name, hint, check in checks_of(row.__class__):
        value = getattr(row, name)
        if not check(value):
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
    score: float | None  # 0 to 1, or as METRICS says; null without an answer, and until the task's scorer has run
    status: str  # of STATUSES
    error: str | None
    prefill_s: float | None
    decode_s: float | None
    tpot_s: float | None  # time of the middle decode step; decode_s has all of them; null with a single token
    batch_rows: int  # rows decoded in one batch with this one, itself included: they share its time
    ledger: dict[str, float | bool | None]  # the ledger's summary; {} where it ran out of memory
    fields: dict[str, Any] = field(default_factory=dict[str, Any])  # the task's: length, depth, …

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("status", self.status, STATUSES)
        may_wait = self.status == "ok" and self.fields.get("scores_later") is True
        if (self.score is not None) != (self.status == "ok") and not may_wait:
            raise ValueError(f"key 'score' is {self.score} with status {self.status!r}")
        name = self.fields.get("metric", "score")
        check_choice("metric", name, tuple(METRICS))
        metric = METRICS[name]
        top = metric.highest
        if self.score is not None and not (metric.lowest <= self.score and (top is None or self.score <= top)):
            within = f"within {metric.lowest} to {top}" if top else f"{metric.lowest} or more"
            raise ValueError(f"key 'score' is {self.score}, not {within}")
        weight = self.fields.get(metric.weight, 0) if metric.weight else 1
        if self.score is not None and not (isinstance(weight, int) and 0 < weight < LARGEST):
            raise ValueError(f"key {metric.weight!r} is {weight!r}, not a number of losses")
        measures = self.fields.get("measures", {})
        if not ARE_MEASURES(measures):
            raise ValueError("key 'measures' is no object of numbers")
        averaged = {
            **self.ledger, **measures, "score": self.score, "batch_rows": self.batch_rows,
            "prefill_s": self.prefill_s, "decode_s": self.decode_s, "tpot_s": self.tpot_s,
            "prompt_tokens": self.prompt_tokens, "generated_tokens": self.generated_tokens,
        }  # fmt: skip
        for key, value in averaged.items():
            if value is not None and abs(value) > LARGEST:
                raise ValueError(f"key {key!r} is larger than {LARGEST:g}")
        if not re.fullmatch("[0-9a-f]{16}", self.prompt_sha256):
            raise ValueError(f"key 'prompt_sha256' is {self.prompt_sha256!r}, not 16 hex digits")
        if self.status == "ok":
            check_keys(self.ledger, [*LEDGER_MEANS.values(), "within_budget"])
            if not isinstance(self.ledger["within_budget"], bool):
                raise ValueError("key 'within_budget' of the ledger is not true or false")
        if clash := ROW_KEYS.intersection(self.fields):
            raise ValueError(f"key {min(clash)!r} is a task's, and also one that every sample has")

    @property
    def sample_id(self) -> str:
        """The sample that the line is of; a sample with several turns or draws has a line for each."""
        has_more = "turn" in self.fields or "draw" in self.fields
        return str(self.fields.get("sample", self.id)) if has_more else self.id

    def to_dict(self) -> dict[str, Any]:
        """The row as it stands in samples.jsonl."""
        columns = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return columns | columns.pop("fields")

    def to_json(self) -> str:
        """The row as a line without its newline; ASCII, so that no character of a text can break it."""
        return json.dumps(self.to_dict(), ensure_ascii=True, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """A row from a line with or without a seal; ValueError where it is no sample."""
        return cls.from_data(parse_json(unsealed(line.removesuffix("\n")), is_ours=True))

    @classmethod
    def from_data(cls, data: Any) -> Self:
        """A row from the object that a line holds, its seal taken off."""
        data = check_keys(data, ROW_KEYS - {"fields"})
        if "crc32" in data:  # a seal that is damaged itself
            raise ValueError("key 'crc32' is not 8 hex digits at the line's start")
        known = {key: data.pop(key) for key in ROW_KEYS - {"fields"}}
        with bounded():
            return cls(**known, fields=data)


@contextmanager
def bounded() -> Generator[None]:
    """ValueError where values are nested more deeply than a check of their types can follow."""
    try:
        yield
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


ROW_KEYS = frozenset(spec.name for spec in fields(SampleRow))


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the runner knows of a run besides its samples."""

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
    ratio_exact: str | None  # "0.2" or "1/3"; null where `budget` is given, or bytes alone
    budget: int | None  # tokens; null where `ratio` is given, or bytes alone
    comm_exact: str  # "1/64", or "off"
    protocol: str  # the compression scope: "full_prompt" or "context_only"
    config_hash: str
    versions: dict[str, str]
    git_sha: str | None
    peak_rss_bytes: int  # of the process that finished the run
    notes: list[str] = field(default_factory=list[str])  # fallbacks taken openly
    metric: str | None = None  # a name in METRICS; null: "score"
    prefill: str = EXACT  # a file of conf/prefill
    prefill_params: dict[str, Any] = field(default_factory=dict[str, Any])
    allocator: str | None = None  # what divided the budget, where it was not the method itself
    keeping: str | None = None  # what became of kept keys and values: "contiguous", "merged values"
    budget_counts: str | None = None  # "target", "mean" or "peak" where the budget is of prompt and answer together
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])  # what is not greedy: temperature, n_answers, …
    # Share of the full cache's bytes on the device, or the bytes: "1/8", "4GB"; null where they were not limited.
    memory_exact: str | None = None
    adapts: bool = False  # how much stayed followed from each prompt: there was no budget
    simulated: bool = False  # codes are counted in bytes, but not kept: the run holds numbers
    key_share: str | None = None  # of a token's bytes, those that its key has, such as "1" of a latent; null: half
    compressed_share: float | None = None  # of the cache's bytes, those of the compressed layers; null: all


# Of answers: means over lines, null where nothing was measured.
COSTS = (
    *("answer_tokens_mean", "cut_off_share", "peak_entries", "footprint", "footprint_vs_full"),
    *("reached_answers", "reached_steps"),
)
# Keys of result.json that only some runs have, and what the others would say; they are left out there.
OPTIONAL_KEYS: dict[str, Any] = {
    "metric": None,
    "n_failed": 0,
    "measures": None,
    "probe_s": None,
    "prefill_share": None,
    "prefill_estimate": None,
    "pseudo_tokens_mean": None,
    "prefill": EXACT,
    "prefill_params": {},
    "allocator": None,
    "keeping": None,
    "budget_counts": None,
    "sampling": {},
    **dict.fromkeys(COSTS),
    "pass_at_k": None,
    "memory_exact": None,
    "simulated": False,
    "adapts": False,
    "effective_ratios": None,
    "key_share": None,
    "compressed_share": None,
    "resident_share": None,
    "moved_bytes_per_step": None,
    "bytes_index_read_per_step": None,
    "bytes_comm_per_step": None,
    "index_share": None,
    "bytes_prefill_peak": None,
    "ledger_crc32": None,
    "samples_crc32": None,
    "score_version": None,
    "scores_crc32": None,
}


class OtherSchemaError(ValueError):
    """A result.json of another version than this code can read."""


@dataclass(frozen=True, kw_only=True)
class RunResult(RunFacts):
    """result.json. What was measured is a mean over the samples that are ok, null without any."""

    schema_version: int = SCHEMA_VERSION
    status: str  # of STATUSES
    n_samples: int  # of which an answer is ok; turns and draws of a sample do not count apart
    n_oom: int
    score: float | None  # 0 to 1, or as METRICS says
    score_ci95: list[float] | None  # see `combined_ci95`
    ratio: float | None
    comm: float | None  # null: off
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
    n_failed: int = 0  # of which an answer ended in NaN
    measures: dict[str, float | None] | None = None  # means of the task's other figures, by name
    probe_s: float | None = None  # of methods that read after the prompt: in addition to `prefill_s`
    prefill_share: float | None = None  # of all pairs of query and key, what a sparse prefill computed
    prefill_estimate: float | None = None  # multiply-adds of choosing them, relative to q·k of all pairs
    pseudo_tokens_mean: float | None = None  # of methods that attend to some in place of tokens; null: none
    answer_tokens_mean: float | None = None  # generated tokens
    cut_off_share: float | None = None  # of answers that used up their allowance; they count as they were scored
    peak_entries: float | None = None  # most entries that a step of any answer attended to, mean over heads and layers
    footprint: float | None = None  # entries over prefill and decode, relative to full attention of the same length
    footprint_vs_full: float | None = None  # the same, relative to the answers of the run of full attention next to it
    reached_answers: float | None = None  # share of answers that grew to the budget of prompt and answer
    reached_steps: float | None = None  # share of steps at which the cache was that full
    pass_at_k: dict[str, float | None] | None = None  # by k, where several answers were drawn, each right or wrong
    resident_share: float | None = None  # of the full cache's bytes, over all steps; null in older runs
    moved_bytes_per_step: float | None = None  # between the tiers: K and V, index, blocks, releases
    bytes_index_read_per_step: float | None = None  # to find tokens, in whichever tier; null in older runs
    bytes_comm_per_step: float | None = None  # what `comm` allows `bytes_moved_meta_per_step`; null: off, or older
    index_share: float | None = None  # of the published index, the mean that fitted where `comm` is off; null: it is on
    bytes_prefill_peak: float | None = None  # most of K and V at once while the prompt was read; null in older runs
    # Of ledger.parquet; `finish` knows it, who summarises does not.
    effective_ratios: list[float] | None = None  # least and most of a sample, where the method adapts
    ledger_crc32: str | None = field(default=None, compare=False)
    samples_crc32: str | None = field(default=None, compare=False)  # of samples.jsonl, as `finish` left it
    score_version: int | None = None  # of the task, when it scored the answers again; null: `task_version`
    scores_crc32: str | None = field(default=None, compare=False)  # of the scores.jsonl that the score is from

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("status", self.status, STATUSES)
        if self.score_ci95 is not None and len(self.score_ci95) != 2:
            raise ValueError(f"key 'score_ci95' has {len(self.score_ci95)} numbers, not 2")
        if self.metric is not None:
            check_choice("metric", self.metric, tuple(METRICS))

    @property
    def shown_task(self) -> str:
        """The task as readers see it; see `names.py`."""
        return shown_task(self.task, self.data_source)

    @property
    def shown_dataset(self) -> str:
        """The task and what of it was asked, as readers see them."""
        parts = (word for word in self.dataset.split() if word not in (self.task, self.data_source))
        return " ".join([self.shown_task, *parts])

    @property
    def shown_comm(self) -> str:
        """The share that `comm` allows, as people give it."""
        return self.comm_exact if self.comm_exact == OFF else show(Fraction(self.comm_exact))

    @property
    def asked(self) -> str:
        """The budget in words, as people give it: `ratio 0.2`, `256 tokens`, `memory 1/8`, or two of them."""
        if self.adapts:
            least, most = self.effective_ratios or (None, None)
            between = "" if least is None else f" {least:.3f} to {most:.3f}"
            return f"adaptive{between}"
        memory, said = self.memory, ""
        if memory is not None:
            said = f"memory {memory.words if isinstance(memory, Bytes) else show(memory)}"
        if self.budget is not None:
            counts = "" if self.budget_counts in (None, "target") else f"({self.budget_counts}) "
            return f"{self.budget} tokens {counts}{said}".rstrip()
        if said and self.ratio_exact in (None, self.memory_exact):
            return said
        return f"ratio {show(Fraction(self.ratio_exact or '1'))} {said}".rstrip()

    @property
    def memory(self) -> Fraction | Bytes | None:
        """What the device could hold: a share of the full cache's bytes, or bytes."""
        return None if self.memory_exact is None else parse_memory(self.memory_exact, "memory_exact")

    @property
    def size(self) -> float | None:
        """What orders the budgets of a method: tokens, their share, or bytes where these are all that was given."""
        if isinstance(self.memory, Bytes) and self.ratio is self.budget is None:
            return float(self.memory.n)
        return self.ratio if self.budget is None else float(self.budget)

    @property
    def bytes_find_per_step(self) -> float | None:
        """Read to find tokens; of older runs without what was read of an index on the device."""
        read = self.bytes_index_read_per_step
        return self.bytes_moved_meta_per_step if read is None else read

    @property
    def waits_for_scores(self) -> bool:
        """Whether the answers are there and their task's scorer has not run yet."""
        return self.score is None and self.n_samples > 0

    def to_json(self) -> str:
        versioned = {"schema_version": self.schema_version} | asdict(self)
        for key, usual in OPTIONAL_KEYS.items():
            if versioned[key] == usual:
                del versioned[key]
        return json.dumps(versioned, ensure_ascii=True, allow_nan=False, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A result from a text with or without a seal; ValueError where it is no result."""
        data = check_keys(parse_json(unsealed(text), is_ours=True), ["schema_version"])
        version = data["schema_version"]
        if not isinstance(version, int) or isinstance(version, bool):
            raise ValueError(f"key 'schema_version' is {version!r:.80}, not a whole number")
        if version not in READABLE:  # before the keys, which may be others there
            *most, last = READABLE
            raise OtherSchemaError(
                f"schema_version is {version!r:.80}; only {', '.join(map(str, most))} and {last} can be read"
            )
        keys = [spec.name for spec in fields(cls)]
        needed = [key for key in keys if key not in OPTIONAL_KEYS]
        if unknown := sorted(check_keys(data, needed).keys() - set(keys)):
            raise ValueError(f"key {unknown[0]!r} is unknown")
        with bounded():
            return cls(**data)


def prompt_hash(ids: Iterable[int]) -> str:
    """16 hex digits of the sha256 over a prompt's token ids: of its text and its tokenizer."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
