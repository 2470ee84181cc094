"""Tables of what variants cost, from runs of task=latency: a line per run, lengths side by side.

    python -m kvbench.plots.costs [RUNS] [--out FOLDER]     or, with the papers' tables: make paper-tables

A pair of numbers such as `0.72 0.58` is of the lengths in the table's heading, in their order. Ratios are medians over
pairs with full attention in the same process; `growth` is the time per token at the longest prompt over that at the
shortest. A second table says how many requests fit into the memory at once, and what so many give. The CSV has a line
per run, length and batch size, unrounded and with quartiles.

Not here: what was measured (`tasks/latency.py`), figures of it (`plots/figures/declared.py`).
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.plots.command import Page
from kvbench.plots.tables.pivot import shared, split, with_differing
from kvbench.plots.tables.shown import where
from kvbench.plots.tables.values import Frame
from kvbench.plots.tables.words import ANY, dicts, runs_of, samples_below
from kvbench.results.sheet import ABSENT, Sheet, as_csv, markdown
from kvbench.results.sheet import write as write_texts

NAME = "costs"
AXES = {"method", "budget", "ratio", "comm", "dataset"}  # in which the rows of a table differ
TIMES = ("ttft", "tt2t", "tpot")
GROWTH = "growth"
TIMED = (  # head, column, digits, scale
    ("second token, s", "timing.tt2t_s", 2, 1),
    ("to Full's", "timing.tt2t_ratio", 2, 1),
    ("ms per token", "timing.tpot_s", 1, 1e3),
    ("to Full's", "timing.tpot_ratio", 2, 1),
    (GROWTH, GROWTH, 2, 1),
    ("device MB", "bytes_resident_device", 1, 1e-6),
    ("host MB", "bytes_resident_host", 1, 1e-6),
    ("cache hits", "hit_rate", 2, 1),
)
AT_ONCE = (
    ("request, MB", "timing.request_bytes", 1, 1e-6),
    ("prefill, MB", "timing.prefill_bytes", 1, 1e-6),
    ("requests at once", "timing.largest_batch", 0, 1),
    ("decoded", "timing.batch_run", 0, 1),
    ("tokens/s", "timing.tokens_per_s_at_largest", 1, 1),
    ("to Full's", "timing.throughput_ratio", 2, 1),
)
RUN = ("model", "device", "dtype", "method", "ratio_exact", "budget", "comm_exact")
LEDGER = ("bytes_resident_device", "bytes_prefill_peak", "bytes_resident_host", "tokens_attended_mean", "hit_rate")
SIZES = (
    *("request_bytes", "prefill_bytes", "weight_bytes", "peak_bytes", "tokens_per_s", "largest_batch", "batch_run"),
    *("batch_bound", "tokens_per_s_at_largest", "tpot_s_at_largest", "peak_bytes_at_largest"),
    *("full_largest_batch", "full_batch_run", "full_tokens_per_s_at_largest", "throughput_ratio"),
)
At = Mapping[str, Any]  # a row of the frame


def timed(samples: Frame) -> list[dict[str, Any]]:
    """The rows of task=latency, short prompts first, with the hit rate of the cache of blocks or the method's own."""
    rows = dicts(samples[samples["task"] == "latency"]) if len(samples) else []
    made = [
        row
        | {"length": int(float(row["length"])), "batch": int(float(row["batch"]))}
        | {"hit_rate": row.get("report.cluster_hit_rate", row.get("cache_hit_rate")) or row.get("cache_hit_rate")}
        for row in rows
    ]
    return sorted(made, key=lambda row: (row["run"], row["length"], row["batch"]))


def sheets(samples: Frame) -> list[Sheet]:
    """A table per set of runs and batch size, and one per set of how many requests fit at once."""
    rows = timed(samples)
    if not rows:
        return []
    made: list[Sheet] = []
    runs = runs_of(samples[samples["task"] == "latency"])
    runs = runs.assign(settings=[params | cache for params, cache in zip(runs["params"], runs["cache"], strict=True)])
    for group in split(runs, AXES):
        order = sorted(dicts(with_differing(group, "method", "settings")), key=in_order)
        of = {at["run"]: [row for row in rows if row["run"] == at["run"]] for at in order}
        about = where(shared(group, AXES))
        for batch in sorted({row["batch"] for found in of.values() for row in found}):
            by_length = {
                run: {row["length"]: row for row in found if row["batch"] == batch} for run, found in of.items()
            }
            lengths = list(dict.fromkeys(length for found in by_length.values() for length in found))
            lines = [
                [*names(at), *(words([by_length[at["run"]].get(n) for n in lengths], *one[1:]) for one in TIMED)]
                for at in order
                if by_length[at["run"]]
            ]
            said = f"{about} · {', '.join(f'{n:,}' for n in lengths)} tokens · batch of {batch}"
            made.append(Sheet(["method", "budget", *(head for head, *_ in TIMED)], lines, about=said))
        made += at_once(order, of, about)
    return made


def at_once(order: Sequence[At], of: Mapping[str, Sequence[At]], about: str) -> list[Sheet]:
    """How many requests fit into the memory; none of runs from before that was counted."""
    rows = [row for found in of.values() for row in found if row.get("timing.largest_batch") is not None]
    if not rows:
        return []
    memory = order[0]["asks"].get("memory_gb", "null")
    said = "all memory of the device" if memory == "null" else f"{memory} GB"
    weights = max(row["timing.weight_bytes"] for row in rows) / 1e9
    lines = [
        [*names(at), f"{length:,}", *(words([row], *one[1:]) for one in AT_ONCE)]
        for at in order
        for length, row in counted(of[at["run"]]).items()
    ]
    about = f"{about} · requests at once in {said}, of which weights take {weights:.2f} GB"
    return [Sheet(["method", "budget", "tokens", *(head for head, *_ in AT_ONCE)], lines, about=about)]


def counted(rows: Sequence[At]) -> dict[int, At]:
    """A sample of each length, the smallest batch that was run; where none was, one that says why."""
    found: dict[int, At] = {}
    for row in rows:
        if row["length"] not in found or (found[row["length"]]["status"] != "ok" and row["status"] == "ok"):
            found[row["length"]] = row
    return found


def in_order(at: At) -> tuple[bool, str, str]:
    return at["kind"] != "full", at["label"].lower(), at["folder"]


def names(at: At) -> tuple[str, str]:
    """A run's method and budget in words."""
    return at["method"], ABSENT if at["budget"] == ANY else at["asked"]


def words(rows: Sequence[At | None], column: str, digits: int, scale: float) -> str:
    """A quantity of one run, length by length; samples that did not fit into memory say so."""
    if column == GROWTH:
        every = [row.get("timing.tpot_s") for row in rows if row is not None]
        ends = [time for time in (every[:1] + every[-1:]) if time is not None]
        return f"{ends[1] / ends[0]:.2f}" if len(every) > 1 and len(ends) == 2 else ABSENT
    said = [ABSENT if row is None else word(row, column, digits, scale) for row in rows]
    return ABSENT if {*said} == {ABSENT} else " ".join(said)


def word(row: At, column: str, digits: int, scale: float) -> str:
    if row["status"] != "ok":
        return row["status"]
    value = row.get(column)
    return ABSENT if value is None else f"{scale * value:.{digits}f}"


def records(samples: Frame) -> Iterator[dict[str, Any]]:
    """A line per run, length and batch size."""
    for row in sorted(timed(samples), key=lambda row: (row["method"] != "full", row["method_label"].lower())):
        times = {f"{name}_{unit}": row.get(f"timing.{name}_{unit}") for name in TIMES for unit in ("s", "ratio")}
        quartiles = {f"{name}_q": [row.get(f"timing.{name}_q{i}") for i in (1, 3)] for name in times}
        yield (
            {name: whole(row.get(name)) for name in RUN}
            | {"cache_tokens": whole(row.get("config.cache.tokens")), "length": row["length"], "batch": row["batch"]}
            | {"status": row["status"]}
            | times
            | {name: [] if None in ends else ends for name, ends in quartiles.items()}
            | {name: whole(row.get(f"timing.{name}")) for name in SIZES}
            | {name: whole(row.get(name)) for name in LEDGER}
            | {"run": Path(row["run"]).name}
        )


def whole(value: Any) -> Any:
    """A column of whole numbers with gaps holds floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def write(folder: Path, samples: Frame) -> list[Path]:
    """Markdown and CSV; nothing where nothing was timed."""
    made = sheets(samples)
    if not made:
        return []
    text = "\n\n".join(map(markdown, made))
    return write_texts(folder, NAME, {"md": f"# What variants cost\n\n{text}\n", "csv": as_csv(records(samples))})


NOTHING = """{} has no runs of task=latency; make some with
    python run.py -m method=full,snapkv,pqcache task=latency budget=512"""
ABOUT = (__doc__ or "").partition("\n")[0]
main = Page("kvbench.plots.costs", ABOUT, write, NOTHING, "outputs/tables", shows=True, load=samples_below).main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
