"""What a cell of a table can say: a score, a figure of the ledger, a time, or what a task measures besides its score.

Not here: which cells there are (`plots/tables/generic.py`), their words (`plots/tables/words.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbench.plots.read import Run, measured
from kvbench.results import SampleRow


@dataclass(frozen=True)
class Value:
    """What a cell can say."""

    title: str
    unit: str
    of: Callable[[Sequence[SampleRow]], float | None]
    digits: int = 1


def ledger(key: str, by: float = 1.0) -> Callable[[Sequence[SampleRow]], float | None]:
    def of(rows: Sequence[SampleRow]) -> float | None:
        found = measured(rows, key)
        return None if found is None else found / by

    return of


def seconds_per_token(rows: Sequence[SampleRow]) -> float | None:
    pairs = [(row.decode_s, row.generated_tokens - 1) for row in rows if row.decode_s and row.generated_tokens > 1]
    return sum(s for s, _ in pairs) / sum(n for _, n in pairs) if pairs else None


def mean_prefill(rows: Sequence[SampleRow]) -> float | None:
    known = [row.prefill_s for row in rows if row.prefill_s is not None]
    return sum(known) / len(known) if known else None


def answer_tokens(rows: Sequence[SampleRow]) -> float | None:
    counts = [row.generated_tokens for row in rows if "cut_off" in row.fields]
    return sum(counts) / len(counts) if counts else None


def cut_off(rows: Sequence[SampleRow]) -> float | None:
    """Share of the answers that used up their allowance."""
    cut = [bool(row.fields["cut_off"]) for row in rows if "cut_off" in row.fields]
    return sum(cut) / len(cut) if cut else None


def prefill_share(rows: Sequence[SampleRow]) -> float | None:
    """Share of all pairs of query and key that a sparse prefill computed; None for an exact one."""
    shares = [row.fields["prefill_share"] for row in rows if "prefill_share" in row.fields]
    return sum(shares) / len(shares) if shares else None


VALUES: dict[str, Value] = {
    "score": Value("score", "", lambda rows: None),
    "tokens": Value("tokens attended to", "", ledger("tokens_attended_mean")),
    "share": Value("tokens attended to, share of the full cache", "", ledger("effective_ratio"), 3),
    "device": Value("K and V on the device", "MB", ledger("bytes_resident_device", 1e6)),
    "reading": Value("K and V at most while the prompt is read", "MB", ledger("bytes_prefill_peak", 1e6)),
    "host": Value("K and V on the host", "MB", ledger("bytes_resident_host", 1e6)),
    "answer_tokens": Value("tokens of an answer", "", answer_tokens),
    "cut_off": Value("answers cut off, share", "", cut_off, 3),
    "peak": Value("entries at the fullest step", "", ledger("peak_entries")),
    "footprint": Value("entries of an answer", "thousand", ledger("footprint_entries", 1e3)),
    "moved": Value("K and V moved per step", "KB", ledger("bytes_moved_kv_per_step", 1e3)),
    "find": Value("read per step to find tokens", "KB", ledger("bytes_index_read_per_step", 1e3)),
    "prefill_share": Value("pairs that the prefill computed, share", "", prefill_share, 3),
    "prefill_s": Value("prefill", "s", mean_prefill, 2),
    "step_s": Value("decode step, shared by all variants beside", "s", seconds_per_token, 4),
}


def value_named(name: str) -> Value:
    """What a cell says: one of `VALUES`, or the mean of a figure that the task takes besides its score."""
    if name in VALUES:
        return VALUES[name]

    def of(rows: Sequence[SampleRow]) -> float | None:
        taken = [row.fields["measures"][name] for row in rows if name in row.fields.get("measures", {})]
        known = [value for value in taken if value is not None]
        return sum(known) / len(known) if known else None

    return Value(name, "", of, 3)


def measures_of(runs: Sequence[Run]) -> dict[str, None]:
    """The figures that the runs' tasks take besides their scores, by name."""
    return {name: None for run in runs for name in run.result.measures or ()}


def of_one(name: str) -> Callable[[SampleRow], float | None]:
    """The value of a cell of a single line."""
    of = value_named(name).of
    return lambda row: of([row])
