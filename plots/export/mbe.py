"""Finished runs as a card of Matched-Budget Evaluation (MBE, version 0.1.0): a line a model, task, method and budget.

MBE fixes the budgets, 50, 25, 12.5 and 6.25 % of the full cache's footprint, and the figures that a card has. Here the
footprint is bytes, so `memory=1/2,1/4,1/8,1/16` are its budgets, and every method has its index and codes within them:

    python run.py -m experiment=mbe              scores
    python run.py -m experiment=mbe_system       times, bytes and the largest batch
    kvbench export runs --to mbe.json --as mbe

Where task=latency was asked at a line's model, method and budget, its figures are of there; else they are those of the
runs themselves, tokens a second only of runs that decoded alone, and the largest batch is missing.

Not here: the ledger's bytes, which the budgets are checked against (`engine/books/ledger.py`).
"""

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvbench.engine.budget import Bytes
from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import one_line
from kvbench.plots.looks import family_of
from kvbench.plots.read import Run, read_one
from kvbench.plots.scored import Scored
from kvbench.results.files import write
from kvbench.results.frame import found, watched
from kvbench.results.names import own_methods

BUDGETS = {Fraction(1, 2): 50.0, Fraction(1, 4): 25.0, Fraction(1, 8): 12.5, Fraction(1, 16): 6.25}
TIMED = "latency"


def card(to: Path, folders: Sequence[Path], left_out: list[str]) -> int:
    """Write the card of all runs at these budgets, and of full attention; how many lines it has."""
    runs = list[Run]()
    for folder in watched([*found(folders)]):
        try:
            runs.append(read_one(folder))
        except (ValueError, OSError) as error:
            left_out.append(one_line(str(error)))
    system = {place(run): figures(run) for run in runs if run.result.task == TIMED}
    lines = [line_of(run, system.get(place(run))) for run in runs if run.result.task != TIMED and percent(run)]
    if all(line["budget_percent"] == 100 for line in lines):
        raise ConfigError("no run has memory=1/2, 1/4, 1/8 or 1/16; `python run.py -m experiment=mbe` makes some")
    lines.sort(key=lambda line: (line["model"], line["task"], line["method"], -line["budget_percent"]))
    head = {
        "protocol": "Matched-Budget Evaluation (MBE)",
        "version": "0.1.0",
        "budget_ladder_percent": [*BUDGETS.values()],
    }
    to.parent.mkdir(parents=True, exist_ok=True)
    write(to, json.dumps(head | {"results": lines}, indent=2, allow_nan=False) + "\n")
    return len(lines)


def percent(run: Run) -> float:
    """The budget of the ladder that a run was given; 100 of full attention, 0 of others."""
    memory = run.result.memory
    if run.is_full:
        return 100.0
    return 0.0 if memory is None or isinstance(memory, Bytes) else BUDGETS.get(memory, 0.0)


def place(run: Run) -> tuple[Any, ...]:
    return run.model, run.result.method_label, percent(run), run.result.device


def figures(run: Run) -> dict[str, Any]:
    """What task=latency measured, at its longest prompt."""
    longest = max(run.rows, key=lambda row: (int(row.fields["length"]), row.status == "ok"))
    timing: Mapping[str, Any] = longest.fields.get("timing") or {}
    ttft, rate, peak = timing.get("ttft_s"), timing.get("tokens_per_s_at_largest"), timing.get("peak_bytes")
    return {
        "prompt_tokens": longest.prompt_tokens,
        "ttft_ms": None if ttft is None else 1e3 * ttft,
        "decode_throughput_tok_s": rate,
        "peak_memory_gb": None if peak is None else peak / 1e9,
        "max_batch_before_oom": timing.get("largest_batch"),
    }


def line_of(run: Run, system: Mapping[str, Any] | None) -> dict[str, Any]:
    result, place = run.result, Scored.of(run.rows)
    spread, held = place.interval, result.bytes_resident_device
    step, reading = result.tpot_s, result.prefill_s
    measured = {
        "ttft_ms": None if reading is None else 1e3 * reading,
        "decode_throughput_tok_s": None if not step or result.batch_rows_mean != 1 else 1 / step,
        "max_batch_before_oom": None,
    }
    return {
        "model": run.model,
        "task": result.shown_task,
        "method": result.method_label,
        "budget_percent": percent(run),
        "score": place.mean,
        "score_ci95": None if spread is None else [spread.low, spread.high],
        "n": place.n,
        "peak_kv_memory_gb": None if held is None else held / 1e9,
        "within_budget": result.within_budget,
        **(measured if system is None else system),
        "hardware_tier": hardware(run),
        "dtype": result.dtype,
        "family": family_of(run.method),
        "deployment_prerequisite": prerequisite(run.method),
        "composability": composability(run),
        "embedded_data": run.embedded,
        "config_hash": result.config_hash,
    }


def hardware(run: Run) -> str:
    """The device that answered, as the run recorded it."""
    env = run.environment()
    arithmetic = env.get("arithmetic")
    name = arithmetic.get("gpu") if isinstance(arithmetic, Mapping) else None
    return str(name or env.get("cpu") or run.result.device)


def prerequisite(method: str) -> str:
    """What an engine must have in order to run the method, besides the device's memory."""
    file = own_methods().get(method.partition("+")[0])
    kinds = {"retrieving": "host memory, fetches at each step", "gates": "learned gates"}
    return kinds.get(file.parent.name, "none") if file is not None else "unknown"


def composability(run: Run) -> str:
    """What the run was composed of, where it was."""
    parts = [part for part in (run.result.allocator, run.result.reuse, run.result.keeping) if part is not None]
    return " + ".join(parts) or "alone"
