"""What a run's files say, as typed rows: `SampleRow` is a line of samples.jsonl, `RunResult` is result.json.

A row is checked whenever one is made or read: `ValueError` names the first key whose value is wrong. runs/README.md
says what the keys mean.

Not here: what follows from rows (`results/summary.py`), files (`results/read.py`, `folder.py`).
"""

import hashlib
import json
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from math import inf
from typing import Annotated, Any, Self

from kvbench.engine.budget import Bytes, parse_bytes, parse_memory, show
from kvbench.engine.declared import Matches
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import parse_json
from kvbench.results.files import unsealed
from kvbench.results.intervals import Bounds
from kvbench.results.keys import MEASURES, READERS, SHARE, Key, check_choice, check_keys, check_types, is_read
from kvbench.results.names import shown_task

SCHEMA_VERSION = 3
# 1: `n_samples`, `n_oom` and `n_failed` were of lines, a turn or a draw each; 2: `comm` was never off.
READABLE = (1, 2, SCHEMA_VERSION)
OFF = "off"  # in `comm_exact`: nothing limited what was read to find tokens
EXACT = "exact"  # the prefill of every run that names no other
EVICT = "evict"  # one in chunks, between which the method dropped tokens
MOST_TURNS = 10**6  # an axis has a place for each
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


@dataclass(frozen=True)
class SampleRow:
    """A line of samples.jsonl; the task's own columns stand in it under their own names."""

    id: Annotated[str, Key("of the line, unique in its run")]
    prompt_sha256: Annotated[str, Key("first 16 hex digits of the hash over the prompt's token ids")]
    prompt_tokens: Annotated[int, Key("tokens of the prompt, as asked", "tokens")]
    original_prompt_tokens: Annotated[int, Key("tokens of the prompt before its middle was cut out", "tokens")]
    generated_tokens: Annotated[int, Key("tokens of the answer", "tokens")]
    prediction: Annotated[str, Key("the answer", is_long=True)]
    references: Annotated[list[str], Key("right answers", is_long=True)]
    score: Annotated[
        float | None,
        Key(
            "as given with the answer or later: 0 to 1, or what `metric` says; null where `status` is not `ok`, and "
            "until the task's scorer has run"
        ),
    ]
    status: Annotated[str, Key("`ok`, `oom`, or `failed` where the model's numbers were NaN or infinite")]
    error: Annotated[str | None, Key("what went wrong", is_long=True)]
    prefill_s: Annotated[float | None, Key("time of reading the prompt", "s")]
    decode_s: Annotated[float | None, Key("time of all decode steps", "s")]
    tpot_s: Annotated[float | None, Key("time of the middle decode step; null with a single token", "s")]
    batch_rows: Annotated[int, Key("rows decoded in one batch with this one, itself included; they share its times")]
    ledger: Annotated[dict[str, float | bool | None], Key("the ledger's summary, `{}` where `status` is not `ok`")]
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
        if not is_read(MEASURES, measures):
            raise ValueError("key 'measures' is no object of numbers")
        for key, read in READERS.items():
            if key in self.fields and not is_read(read, self.fields[key]):
                raise ValueError(f"key {key!r} is {self.fields[key]!r:.80}, which no run writes")
        if abs(self.fields.get("turn", 1)) > MOST_TURNS:
            raise ValueError(f"key 'turn' is {self.fields['turn']}, which no run writes")
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

    method: Annotated[str, Key("name of the method's file in conf/method")]
    method_label: Annotated[str, Key("the method as printed: `SnapKV (C)`")]
    params: Annotated[dict[str, Any], Key("parameters of the method")]
    task: Annotated[str, Key("name of the task's file in conf/task")]
    task_version: Annotated[int, Key("of the task that asked; raised when a prompt or a score changes")]
    dataset: Annotated[str, Key("part of the task that was asked, as in tables")]
    data_source: Annotated[str, Key("`embedded`, `local` or `hub`")]
    model: Annotated[str, Key("name of the model's file in conf/model")]
    compressed_layers: Annotated[list[int], Key("all other layers were left as they are")]
    dtype: Annotated[str, Key("of the model's numbers")]
    device: Annotated[str, Key("kind of device")]
    seed: Annotated[int, Key("of all that is drawn")]
    ratio_exact: Annotated[
        str | None,
        Key('share of the prompt\'s tokens as asked, `"0.2"` or `"1/3"`; null with `budget`, or with bytes alone'),
        Matches(SHARE, "a share"),
    ]
    budget: Annotated[int | None, Key("tokens as asked; null with a ratio, or with bytes alone", "tokens")]
    comm_exact: Annotated[
        str,
        Key('share of the keys\' bytes that may be read to find tokens, `"1/64"`, or `off` where nothing limits it'),
        Matches(rf"off|{SHARE}", "a share, or off"),
    ]
    protocol: Annotated[
        str, Key("the compression scope: `full_prompt` or `context_only`; of turns, how they were asked")
    ]
    config_hash: Annotated[str, Key("hash of the configuration, in the folder's name")]
    versions: Annotated[dict[str, str], Key("of Python, of KVBench, and of the packages that can change a number")]
    git_sha: Annotated[str | None, Key("of the checkout, with `-dirty` where code or `conf/` differed from it")]
    peak_rss_bytes: Annotated[int, Key("most memory of the process that finished the run", "bytes")]
    notes: Annotated[list[str], Key("fallbacks that were taken openly")] = field(default_factory=list[str])
    metric: Annotated[str | None, Key("what a score is, a name of `METRICS`; absent for a plain one from 0 to 1")] = (
        None
    )
    prefill: Annotated[str, Key("name of the prefill's file in conf/prefill, or `evict`; absent where exact")] = EXACT
    prefill_params: Annotated[dict[str, Any], Key("parameters of the prefill")] = field(default_factory=dict[str, Any])
    allocator: Annotated[str | None, Key("what divided the budget, where it was not the method itself")] = None
    reuse: Annotated[str | None, Key("which layers chose tokens for others: `reuse every 4`")] = None
    keeping: Annotated[str | None, Key("what became of kept keys and values: `contiguous`, `merged values`")] = None
    budget_counts: Annotated[
        str | None, Key("`target`, `mean` or `peak` where the budget is of prompt and answer together")
    ] = None
    sampling: Annotated[dict[str, Any], Key("what is not greedy: temperature, n_answers, …")] = field(
        default_factory=dict[str, Any]
    )
    memory_exact: Annotated[
        str | None,
        Key(
            'share of the full cache\'s bytes on the device, `"1/8"`, or the bytes of one request, `"4GB"`; absent '
            "where they were not limited"
        ),
    ] = None
    adapts: Annotated[bool, Key("how much stayed followed from each prompt: there was no budget")] = False
    simulated: Annotated[bool, Key("codes are counted in bytes, but not kept: the run holds numbers")] = False
    key_share: Annotated[
        str | None, Key("of a token's bytes, those that its key has, such as `1` of a latent; absent: half")
    ] = None
    compressed_share: Annotated[
        float | None, Key("of the cache's bytes, those of the compressed layers; absent: all")
    ] = None


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
    "reuse": None,
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

    schema_version: Annotated[int, Key("of result.json")] = SCHEMA_VERSION
    status: Annotated[str, Key("`ok`; `oom` when any sample ran out of memory; `failed` when any had NaN")]
    n_samples: Annotated[int, Key("samples of which an answer is `ok`; turns and draws of one do not count apart")]
    n_oom: Annotated[int, Key("samples that ran out of memory")]
    score: Annotated[float | None, Key("0 to 1, tables multiply by 100; or what `metric` says")]
    score_ci95: Annotated[list[float] | None, Key("the 95 % interval of docs/intervals.md over samples")]
    ratio: Annotated[float | None, Key("`ratio_exact` as a decimal")]
    comm: Annotated[float | None, Key("`comm_exact` as a decimal; null: off")]
    within_budget: Annotated[bool | None, Key("true if every sample's ledger stayed within its budget")]
    tokens_budget_mean: Annotated[float | None, Key("mean of `tokens_budget`", "tokens")]
    tokens_attended_mean: Annotated[float | None, Key("mean of the ledger's", "tokens")]
    effective_ratio: Annotated[float | None, Key("mean of the ledger's")]
    bytes_resident_device: Annotated[float | None, Key("mean of the ledger's", "bytes")]
    bytes_resident_host: Annotated[float | None, Key("mean of the ledger's", "bytes")]
    bytes_resident_device_actual: Annotated[float | None, Key("mean of the ledger's", "bytes")]
    bytes_moved_kv_per_step: Annotated[float | None, Key("mean of the ledger's", "bytes")]
    bytes_moved_meta_per_step: Annotated[float | None, Key("mean of the ledger's", "bytes")]
    bytes_searched_per_step: Annotated[float | None, Key("mean of the ledger's", "bytes")]
    cache_hit_rate: Annotated[float | None, Key("mean of the ledger's")]
    prefill_s: Annotated[float | None, Key("mean of the samples'", "s")]
    tpot_s: Annotated[float | None, Key("mean of the samples'", "s")]
    batch_rows_mean: Annotated[
        float | None, Key("mean of `batch_rows`; above 1, `tpot_s` is the time of a shared batch")
    ]
    n_failed: Annotated[int, Key("samples whose numbers were NaN; absent: 0")] = 0
    measures: Annotated[dict[str, float | None] | None, Key("means of the task's other figures, by name")] = None
    probe_s: Annotated[float | None, Key("mean of the samples'", "s")] = None
    prefill_share: Annotated[float | None, Key("mean of the samples'; absent where the prefill was exact")] = None
    prefill_estimate: Annotated[float | None, Key("mean of the samples'; absent where the prefill was exact")] = None
    pseudo_tokens_mean: Annotated[float | None, Key("mean of the ledger's; absent where there are none", "tokens")] = (
        None
    )
    answer_tokens_mean: Annotated[float | None, Key("mean of `generated_tokens`", "tokens")] = None
    cut_off_share: Annotated[float | None, Key("share of answers that used up their allowance")] = None
    peak_entries: Annotated[float | None, Key("most entries that a step of any answer attended to", "entries")] = None
    footprint: Annotated[float | None, Key("mean of the ledger's")] = None
    footprint_vs_full: Annotated[
        float | None, Key("entries of answers relative to those of the run of full attention on the same prompts")
    ] = None
    reached_answers: Annotated[float | None, Key("share of answers that grew to the budget of prompt and answer")] = (
        None
    )
    reached_steps: Annotated[float | None, Key("mean of the ledger's")] = None
    pass_at_k: Annotated[
        dict[str, float | None] | None, Key("by k, where several answers were drawn, each right or wrong")
    ] = None
    resident_share: Annotated[float | None, Key("mean of the ledger's")] = None
    moved_bytes_per_step: Annotated[float | None, Key("mean of the ledger's", "bytes")] = None
    bytes_index_read_per_step: Annotated[float | None, Key("mean of the ledger's; absent in older runs", "bytes")] = (
        None
    )
    bytes_comm_per_step: Annotated[float | None, Key("mean of the ledger's", "bytes")] = None
    index_share: Annotated[float | None, Key("mean of the ledger's")] = None
    bytes_prefill_peak: Annotated[float | None, Key("mean of the ledger's", "bytes")] = None
    effective_ratios: Annotated[list[float] | None, Key("least and most of a sample, where the method adapts")] = None
    ledger_crc32: Annotated[str | None, Key("of ledger.parquet; absent in older runs")] = field(
        default=None, compare=False
    )
    samples_crc32: Annotated[
        str | None,
        Key("of samples.jsonl: a result is believed next to the lines that it was made of alone; absent in older runs"),
    ] = field(default=None, compare=False)
    score_version: Annotated[
        int | None, Key("`task_version` of scores.jsonl; absent where the scores are those of samples.jsonl")
    ] = None
    scores_crc32: Annotated[str | None, Key("of scores.jsonl")] = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_types(self)
        check_choice("status", self.status, STATUSES)
        if self.score_ci95 is not None and len(self.score_ci95) != 2:
            raise ValueError(f"key 'score_ci95' has {len(self.score_ci95)} numbers, not 2")
        if self.metric is not None:
            check_choice("metric", self.metric, tuple(METRICS))
        if self.memory_exact is not None and not is_memory(self.memory_exact):
            raise ValueError(f"key 'memory_exact' is {self.memory_exact!r:.80}, no share and no bytes")

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


def is_memory(text: str) -> bool:
    """Whether a text is a share, or bytes in their one spelling."""
    try:
        return re.fullmatch(SHARE, text) is not None or str(parse_bytes(text, "memory")) == text
    except ConfigError:
        return False


def prompt_hash(ids: Iterable[int]) -> str:
    """16 hex digits of the sha256 over a prompt's token ids: of its text and its tokenizer."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
