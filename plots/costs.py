"""Tables of what variants cost, from runs of task=latency: a line per run, lengths side by side.

    python -m kvbench.plots.costs [RUNS] [--out FOLDER]     or, with the papers' tables: make paper-tables

A pair of numbers such as `0.72 0.58` is of the lengths in the table's heading, in their order. Ratios are medians over
pairs with full attention in the same process; `growth` is the time per token at the longest prompt over that at the
shortest. A second table says how many requests fit into the memory at once, and what so many give. The CSV has a line
per run, length and batch size, unrounded and with quartiles.

Not here: what was measured (`tasks/latency.py`), figures of it (`plots/figures/declared.py`).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvbench.plots.command import Page
from kvbench.plots.read import Run
from kvbench.plots.run_sets import RunSet, asked, other_setting, run_sets
from kvbench.results import SampleRow
from kvbench.results.sheet import ABSENT, Sheet, as_csv, markdown
from kvbench.results.sheet import write as write_texts

NAME = "costs"
HEAD = (
    "method", "budget", "second token, s", "to Full's", "ms per token", "to Full's", "growth",
    "device MB", "host MB", "cache hits",
)  # fmt: skip
AT_ONCE = (
    "method", "budget", "tokens", "request, MB", "prefill, MB", "requests at once", "decoded", "tokens/s", "to Full's",
)  # fmt: skip
RUN = ("model", "device", "dtype", "method", "ratio_exact", "budget", "comm_exact")
LEDGER = ("bytes_resident_device", "bytes_prefill_peak", "bytes_resident_host", "tokens_attended_mean")
TIMES = tuple(
    f"{name}_{unit}{tail}" for name in ("ttft", "tt2t", "tpot") for unit in ("s", "ratio") for tail in ("", "_q")
)

SIZES = (
    *("request_bytes", "prefill_bytes", "weight_bytes", "peak_bytes", "tokens_per_s", "largest_batch", "batch_run"),
    *("batch_bound", "tokens_per_s_at_largest", "tpot_s_at_largest", "peak_bytes_at_largest"),
    *("full_largest_batch", "full_batch_run", "full_tokens_per_s_at_largest", "throughput_ratio"),
)


def sheets(runs: Sequence[Run]) -> list[Sheet]:
    """A table per set of runs and batch size, and one per set of how many requests fit at once."""
    made: list[Sheet] = []
    for run_set in run_sets(runs, lambda run: run.result.task == "latency"):
        for batch in batches(run_set):
            tail = other_setting(run_set)
            rows = {run.folder: timed(run, batch) for run in run_set.runs}
            lengths = list(dict.fromkeys(n for found in rows.values() for n in found))
            lines = [
                line(run, tail(run), [rows[run.folder].get(n) for n in lengths])
                for run in sorted(run_set.runs, key=order)
                if rows[run.folder]
            ]
            if lines:
                sizes = ", ".join(f"{n:,}" for n in lengths)
                about = f"{run_set.about} · {sizes} tokens · batch of {batch}"
                made.append(Sheet(HEAD, lines, about=about))
        made += at_once(run_set)
    return made


def at_once(run_set: RunSet) -> list[Sheet]:
    """How many requests fit into the memory; none of runs from before that was counted."""
    rows = {run.folder: counted(run) for run in run_set.runs}
    weights = {
        timing(row)["weight_bytes"] for of in rows.values() for row in of.values() if "largest_batch" in timing(row)
    }
    if not weights:
        return []
    tail, memory_gb = other_setting(run_set), run_set.runs[0].task_param("memory_gb")
    memory = "all memory of the device" if memory_gb is None else f"{memory_gb:g} GB"
    about = f"{run_set.about} · requests at once in {memory}, of which weights take {max(weights) / 1e9:.2f} GB"
    lines = [
        (
            f"{run.result.method_label} {tail(run)}".strip(),
            ABSENT if run.is_full else asked(run),
            f"{length:,}",
            told_of(row, "request_bytes", ".1f", 1e-6),
            told_of(row, "prefill_bytes", ".1f", 1e-6),
            told_of(row, "largest_batch", ".0f"),
            told_of(row, "batch_run", ".0f"),
            told_of(row, "tokens_per_s_at_largest", ".1f"),
            told_of(row, "throughput_ratio", ".2f"),
        )
        for run in sorted(run_set.runs, key=order)
        for length, row in rows[run.folder].items()
    ]
    return [Sheet(AT_ONCE, lines, about=about)]


def told_of(row: SampleRow, key: str, form: str, scale: float = 1) -> str:
    """A figure of `timing`."""
    return word(row, lambda row: timing(row).get(key), form, scale)


def counted(run: Run) -> dict[int, SampleRow]:
    """A sample of each length, the smallest batch that was run; where none was, one that says why."""
    found: dict[int, SampleRow] = {}
    for row in sorted(run.rows, key=lambda row: (int(row.fields["length"]), int(row.fields["batch"]))):
        length = int(row.fields["length"])
        if length not in found or (found[length].status != "ok" and row.status == "ok"):
            found[length] = row
    return found


def order(run: Run) -> tuple[bool, str, str]:
    return not run.is_full, run.result.method_label.lower(), run.folder.name


def batches(run_set: RunSet) -> list[int]:
    return sorted({int(row.fields["batch"]) for run in run_set.runs for row in run.rows})


def timed(run: Run, batch: int) -> dict[int, SampleRow]:
    """Samples of a batch size by length, shortest first; those that did not fit into memory among them."""
    return {
        int(row.fields["length"]): row
        for row in sorted(run.rows, key=lambda row: int(row.fields["length"]))
        if int(row.fields["batch"]) == batch
    }


def line(run: Run, setting: str, rows: Sequence[SampleRow | None]) -> tuple[str, ...]:
    """One run: of each quantity its values, length by length."""

    def told(of: Callable[[SampleRow], float | None], form: str, scale: float = 1) -> str:
        words = [ABSENT if row is None else word(row, of, form, scale) for row in rows]
        return ABSENT if set(words) == {ABSENT} else " ".join(words)

    times = [tpot(row) for row in rows if row is not None]
    ends = [time for time in (times[:1] + times[-1:]) if time is not None]
    growth = f"{ends[1] / ends[0]:.2f}" if len(times) > 1 and len(ends) == 2 else ABSENT
    return (
        f"{run.result.method_label} {setting}".strip(),
        ABSENT if run.is_full else asked(run),
        told(lambda row: timing(row).get("tt2t_s"), ".2f"),
        told(lambda row: timing(row).get("tt2t_ratio"), ".2f"),
        told(tpot, ".1f", 1e3),
        told(lambda row: timing(row).get("tpot_ratio"), ".2f"),
        growth,
        told(lambda row: row.ledger.get("bytes_resident_device"), ".1f", 1e-6),
        told(lambda row: row.ledger.get("bytes_resident_host"), ".1f", 1e-6),
        told(hit_rate, ".2f"),
    )


def word(row: SampleRow, of: Callable[[SampleRow], float | None], form: str, scale: float) -> str:
    if row.status != "ok":
        return row.status
    value = of(row)
    return ABSENT if value is None else format(scale * value, form)


def timing(row: SampleRow) -> dict[str, Any]:
    return row.fields.get("timing") or {}


def tpot(row: SampleRow) -> float | None:
    return timing(row).get("tpot_s")


def hit_rate(row: SampleRow) -> float | None:
    """Hit rate of the cache of blocks, or of the method's own cache."""
    found = row.ledger.get("cache_hit_rate")
    return (row.fields.get("method_report") or {}).get("cluster_hit_rate", found)


def records(runs: Iterable[Run]) -> Iterator[dict[str, Any]]:
    """A line per run, length and batch size."""
    for run in sorted((r for r in runs if r.result.task == "latency"), key=order):
        for row in run.rows:
            yield (
                {name: getattr(run.result, name) for name in RUN}
                | {"cache_tokens": run.setting("cache", "tokens"), "length": row.fields["length"]}
                | {"batch": row.fields["batch"], "status": row.status}
                | {name: timing(row).get(name) for name in (*TIMES, *SIZES)}
                | {name: row.ledger.get(name) for name in LEDGER}
                | {"hit_rate": hit_rate(row), "run": run.folder.name}
            )


def write(folder: Path, runs: Sequence[Run]) -> list[Path]:
    """Markdown and CSV; nothing where nothing was timed."""
    made = sheets(runs)
    if not made:
        return []
    text = "\n\n".join(map(markdown, made))
    return write_texts(folder, NAME, {"md": f"# What variants cost\n\n{text}\n", "csv": as_csv(records(runs))})


NOTHING = """{} has no runs of task=latency; make some with
    python run.py -m method=full,snapkv,pqcache task=latency budget=512"""
ABOUT = (__doc__ or "").partition("\n")[0]
main = Page("kvbench.plots.costs", ABOUT, write, NOTHING, "outputs/tables", shows=True).main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
