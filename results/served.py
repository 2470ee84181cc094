"""Runs inside a serving engine: serving.json of their folders, and the table of what they did with the same memory.

A run of full attention has three engines: as shipped, with the method's restrictions, and the method's own. A table is
of one model, one pool of blocks and one seed; where an engine's pool turned out another, its row is marked.

Not here: who measures and writes (`serving/`), pictures (`plots/serving.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import read_json
from kvbench.results.files import read_yaml
from kvbench.results.schema import RunResult
from kvbench.results.sheet import ABSENT, Sheet

FILE = "serving.json"
METHOD = "method"  # the engine of a run's own method
SHIPPED = "as shipped"
NOT_SHIPPED = {"prefix_caching", "async_scheduling", "rung"}  # keys of the task that vLLM as shipped is not told
LIMITS = {"ttft": "first token", "tpot": "time per token after it", "e2el": "last token"}
NO_LOAD = {"rung", "ttft_ms", "tpot_ms", "e2el_ms"}  # keys of the task that say nothing of requests
HEADS = (
    "requests\nat once", "goodput,\nrequests/s", "score", "blocks", "in use,\nmean", "preempted", "steps",
    "prompt tokens\nfrom cache", "answer\ntokens/s", "TTFT ms,\nmedian (p99)", "TPOT ms,\nmedian (p99)",
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """One engine of a run."""

    result: RunResult
    engine: str
    params: Mapping[str, Any]  # of the task
    limit: int | None
    figures: Mapping[str, Any]

    @property
    def label(self) -> str:
        own = self.result.method_label
        return own if self.engine == METHOD else f"{own}, {self.engine}"

    @property
    def budget(self) -> str:
        return ABSENT if self.is_full else self.result.asked

    @property
    def is_full(self) -> bool:
        return self.result.method == "full"

    def asked(self, key: str) -> str:
        """What the task's key says of this engine."""
        is_free = self.engine == SHIPPED and key in NOT_SHIPPED
        return ABSENT if is_free else str(self.params.get(key))

    @property
    def group(self) -> tuple[Any, ...]:
        """What rows of one table share."""
        result = self.result
        return result.model, result.dtype, result.device, result.seed, self.params.get("blocks"), self.limit

    @property
    def rate(self) -> float:
        """Requests that arrive per second, without end where all are there or a file says when they come."""
        return self.params.get("rate") or inf

    def bench(self, name: str) -> Any:
        """A figure of `vllm bench serve`; None in a run from before these were measured."""
        return self.figures.get("bench", {}).get(name)


def served(folder: Path, result: RunResult) -> list[Served]:
    """The engines of a run, [] where it was not served; `ConfigError` where its file is damaged."""
    path = folder / FILE
    if not path.is_file():
        return []
    engines, config = read_json(path, "run it again"), read_yaml(folder / "config.yaml")
    try:
        found = [
            Served(result, name, config["task"]["params"], config["limit"], each) for name, each in engines.items()
        ]
        for one in found:
            line(one, [])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} has not the figures of a served run ({error}); run it again") from None
    return found


def groups(every: Sequence[Served]) -> list[list[Served]]:
    """Engines that one table can hold: full attention's, then each method's from its lowest rate on."""
    found: dict[tuple[Any, ...], list[Served]] = {}
    for one in sorted(every, key=lambda one: (not one.is_full, one.result.method_label, one.budget, one.rate)):
        found.setdefault(one.group, []).append(one)
    return [*found.values()]


def differing(some: Sequence[Served]) -> list[str]:
    """Keys of the task that are not the same in all rows."""
    keys = [key for key in some[0].params if key not in NO_LOAD]
    return [key for key in keys if len({str(one.params.get(key)) for one in some}) > 1]


def sheet_of(some: Sequence[Served]) -> Sheet:
    """The table of a group."""
    first, keys = some[0], differing(some)
    pool, result = first.figures["blocks"], first.result
    rows = [line(one, keys, "" if one.figures["blocks"] == pool else " *") for one in some]
    limits: list[Mapping[str, float]] = [one.bench("goodput") or {} for one in some]
    of_limits = " and ".join(f"{LIMITS[name]} within {limit:g} ms" for name, limit in limits[0].items())
    notes = {
        "* its pool is not the first row's: not at the same memory": any(one.figures["blocks"] != pool for one in some),
        f"goodput counts requests with {of_limits}": bool(of_limits),
        "goodput is - without a limit: task.ttft_ms, task.tpot_ms or task.e2el_ms": not any(limits),
        "rows have other limits of goodput than the first": any(each != limits[0] for each in limits),
    }
    notes |= {note: True for one in some for note in one.result.notes}
    about = (
        f"{result.model}, {result.dtype} on {result.device}, seed {result.seed}, {first.figures['requests']} requests"
    )
    heads, title = ["method", "budget", *keys, *HEADS], f"Served with {pool} blocks"
    below = [note for note, holds in notes.items() if holds]
    return Sheet(heads, rows, n_keys=2 + len(keys), title=title, about=about, notes=below)


def line(one: Served, keys: Sequence[str], mark: str = "") -> list[str]:
    """A row of the table."""
    figures = one.figures
    return [
        one.label, one.budget, *map(one.asked, keys), f"{figures['at_once']}",
        number(one.bench("request_goodput"), 3), number(figures.get("score"), 1, 100), f"{figures['blocks']}{mark}",
        number(figures["blocks_mean"], 1), f"{figures['preemptions']}", f"{figures['steps']}",
        number(figures.get("prompt_tokens_cached"), 0), number(figures["tokens_per_s"], 1),
        *(f"{1000 * each['p50']:,.0f} ({1000 * each['p99']:,.0f})" for each in (figures["ttft_s"], figures["tpot_s"])),
    ]  # fmt: skip


def number(value: float | None, digits: int, scale: float = 1) -> str:
    return ABSENT if value is None else f"{scale * value:,.{digits}f}"


def sheets(runs: Sequence[tuple[Path, RunResult]]) -> list[Sheet]:
    """The tables of served runs."""
    return [sheet_of(group) for group in groups([one for folder, result in runs for one in served(folder, result)])]
