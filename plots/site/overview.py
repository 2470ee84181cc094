"""What the page says of each run before anybody looks at its samples: settings, scores, costs, comparisons.

Full attention is the same run under every budget, so it stands there once. A benchmark of several datasets has an
average over them, where a run answered all that most runs of the benchmark did.

Not here: comparisons (`plots/site/compare.py`), where a run comes from (`plots/site/origin.py`), its samples
(`plots/site/samples.py`).
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import fsum
from pathlib import Path
from typing import Any

from kvbench.plots.looks import told_apart
from kvbench.plots.read import Run, conditions, key_bytes_per_token, measured
from kvbench.plots.run_sets import asked, is_deployable, outside_budget, prompt_settings
from kvbench.plots.scored import Scored
from kvbench.plots.site.app import look
from kvbench.plots.site.compare import AVERAGE, Baselines, correct, put_on_fronts, rank
from kvbench.plots.site.origin import Kept
from kvbench.results import METRICS, SampleRow
from kvbench.results.intervals import FEW

AUDITED = (
    *("tokens_budget_mean", "tokens_attended_mean", "effective_ratio", "within_budget"),
    *("bytes_moved_kv_per_step", "bytes_moved_meta_per_step", "bytes_find_per_step", "bytes_searched_per_step"),
    *("bytes_resident_device", "bytes_resident_host", "bytes_resident_device_actual", "bytes_prefill_peak"),
    *("cache_hit_rate", "prefill_s", "tpot_s", "batch_rows_mean"),
)
AT_ONCE = ("largest_batch", "tokens_per_s_at_largest", "throughput_ratio")  # of timed runs, by the longest prompt
COSTS = {  # of a part: the chart's axes, and the keys of a sample's ledger that add up to each
    "tokens": ("tokens_attended_mean",),
    "share": ("effective_ratio",),
    "device": ("bytes_resident_device",),
    "resident": ("bytes_resident_device", "bytes_resident_host"),
    "moved": ("bytes_moved_kv_per_step", "bytes_index_read_per_step", "bytes_searched_per_step"),
    "memory": ("resident_share",),
    "reads": (
        *("bytes_resident_device", "bytes_moved_kv_per_step", "bytes_moved_meta_per_step"),
        "bytes_searched_per_step",
    ),
}


def overview(runs: Sequence[Run], root: Path, drawn: Iterable[str] = ()) -> dict[str, Any]:
    """Everything but samples and provenance, as plain data; `runs` are those of `full_once`.

    `drawn` are methods of other benchmarks of the same page, from which these have to be told apart.
    """
    others, baselines, shared = Others(runs), Baselines(runs), common_datasets(runs)
    described = [describe(run, others, root, baselines, shared[benchmark(run)]) for run in runs]
    name_apart(described)
    correct(described)
    rank(runs, described)
    put_on_fronts(runs, described)
    names = names_of(runs)
    with told_apart([*drawn, *(run.method for run in runs)]):
        looks = {run.result.method: look(run.method) | {"name": names[run.result.method]} for run in runs}
    return {
        "runs": described,
        "metrics": {name: {"better": m.better, "scale": m.scale} for name, m in METRICS.items()},
        "looks": looks,
        "few": FEW,
    }


def full_once(runs: Sequence[Run]) -> tuple[list[Run], dict[Path, list[Path]]]:
    """The runs with one of full attention for all budgets, that with most samples; and which others each stands for."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        key = [group_of(run), task_of(run), run.setting("task", "params"), run.params, Baselines.key(run)]
        alike.setdefault(json.dumps(key if run.is_full else str(run.folder), sort_keys=True), []).append(run)
    kept = {id(max(same, key=lambda run: run.result.n_samples)): same for same in alike.values()}
    left_out = {
        run.folder: [other.folder for other in kept[id(run)] if other is not run] for run in runs if id(run) in kept
    }
    return [run for run in runs if id(run) in kept], {folder: more for folder, more in left_out.items() if more}


def group_of(run: Run) -> str:
    """What runs must share to stand in one table of scores, as words."""
    if isinstance(run, Kept):
        return f"{run.model} · {run.result.protocol} · scores of {run.page}"
    return str(replace(conditions(run, ""), prefill="")).replace("no comm · ", "")


def task_of(run: Run) -> str:
    """A run's task, and what of its settings makes other prompts than the defaults do."""
    return " ".join(filter(None, [run.result.shown_task, prompt_settings(run)]))


def benchmark(run: Run) -> tuple[str, str]:
    return group_of(run), task_of(run)


def common_datasets(runs: Iterable[Run]) -> dict[tuple[str, str], tuple[str, ...]]:
    """The datasets that an average is over: those that most runs of a benchmark have, and the most of them."""
    seen: dict[tuple[str, str], Counter[tuple[str, ...]]] = {}
    for run in runs:
        seen.setdefault(benchmark(run), Counter())[tuple(sorted(run.datasets()))] += 1
    return {key: max(sets, key=lambda names: (sets[names], len(names))) for key, sets in seen.items()}


def describe(run: Run, others: "Others", root: Path, baselines: Baselines, shared: Sequence[str]) -> dict[str, Any]:
    """One run: its settings, what was measured, how its scores compare."""
    result = run.result
    label = " ".join([result.method_label, *others.varied(run)])
    comm = "none" if run.is_full else run.comm
    of_comm = [f"comm {comm}"] if others.several_comms and not run.is_full else []
    variant = [label] if run.is_full else [label, asked(run), *of_comm]
    return {
        "key": result.config_hash,
        "folder": run.folder.relative_to(root).as_posix() if run.folder != root else run.folder.name,
        "label": label,
        "variant": " · ".join(variant),
        "series": " · ".join([label, *of_comm]),  # what its budgets are points of
        "full": run.is_full and run.is_exact,
        "method": result.method,
        "task": task_of(run),
        "model": run.model,
        "budget": "full" if run.is_full else asked(run),
        "size": None if run.is_full else result.size,
        "comm": comm,
        "comm_size": None if run.is_full else result.comm,
        "group": group_of(run),
        "status": result.status,
        "n": result.n_samples,
        "n_oom": result.n_oom,
        "unpriced": not run.is_full and not is_deployable(run),
        "whole_layers": None if run.is_full else run.whole_layers or None,
        "kept": isinstance(run, Kept),
        "audit": audit(run) | comm_allowed(run, others) | at_once(run),
        "parts": list(parts(run, baselines, shared)),
    }


def audit(run: Run) -> dict[str, Any]:
    """What was measured of a run; nobody kept whether scores of old runs are within their budgets."""
    found = {key: getattr(run.result, key) for key in AUDITED}
    return found | {"within_budget": None, "bytes_searched_per_step": None} if isinstance(run, Kept) else found


def names_of(runs: Iterable[Run]) -> dict[str, str]:
    """Methods as a legend names them: by all that their runs are called."""
    labels: dict[str, dict[str, None]] = {}
    for run in runs:
        labels.setdefault(run.result.method, {})[run.result.method_label] = None
    return {method: " or ".join(sorted(each)) for method, each in labels.items()}


def name_apart(described: Sequence[dict[str, Any]]) -> None:
    """Let no two runs have one key: links name runs by it."""
    seen: Counter[str] = Counter()
    for run in described:
        seen[run["key"]] += 1
        if seen[run["key"]] > 1:
            run["key"] += f"~{seen[run['key']]}"


class Others:
    """What each run needs of all others, gathered once, so that thousands of runs are not compared pairwise."""

    def __init__(self, runs: Sequence[Run]) -> None:
        models: dict[str, list[Run]] = {}
        params: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for run in runs:
            models.setdefault(run.model, []).append(run)
            params.setdefault((run.result.method, run.result.prefill), []).append(run.params)
        self.several_comms = len({run.comm for run in runs if not run.is_full}) > 1
        self.key_bytes = {model: key_bytes_per_token(alike) for model, alike in models.items()}
        self.varying = {
            same: {key for one in alike for key in {*one, *alike[0]} if one.get(key) != alike[0].get(key)}
            for same, alike in params.items()
        }

    def varied(self, run: Run) -> list[str]:
        """The parameters that tell this run from others of its method and prefill, as `key=value`."""
        varying = self.varying[run.result.method, run.result.prefill]
        return [f"{key}={value}" for key, value in run.params.items() if key in varying]


def comm_allowed(run: Run, others: Others) -> dict[str, float | None]:
    """The bytes per step that `comm` allows, from the size of a key in a run of full attention on this model."""
    per_token = others.key_bytes[run.model]
    lengths = [row.prompt_tokens for row in run.rows if row.status == "ok"]
    comm = None
    if per_token and lengths and not run.is_full and run.result.comm is not None:
        comm = float(Fraction(run.result.comm_exact)) * per_token * fsum(lengths) / len(lengths)
    return {"comm_bytes": comm, "prompt_tokens": fsum(lengths) / len(lengths) if lengths else None}


def at_once(run: Run) -> dict[str, float | None]:
    """How many requests of a timed run's longest prompt fit into the memory, and what so many give."""
    rows = [row for row in run.rows if row.status == "ok" and "largest_batch" in row.fields.get("timing", {})]
    if not rows:
        return {}
    longest = max(rows, key=lambda row: row.prompt_tokens)
    return {key: longest.fields["timing"].get(key) for key in AT_ONCE}


def parts(run: Run, baselines: Baselines, shared: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The columns of a run: the average of its benchmark, where there is one, and its datasets."""
    datasets = run.datasets()
    if len(shared) > 1 and set(shared) <= datasets.keys():
        ok = [[row for row in datasets[name] if row.score is not None] for name in shared]
        metrics = {metric_of(run, rows) for rows in ok}
        # Losses and times are no shares of something, and have no mean over datasets.
        if all(ok) and len(metrics) == 1 and METRICS[min(metrics)].is_share:
            yield part(run, AVERAGE, min(metrics), ok, baselines) | {"of": list(shared)}
    for name, rows in datasets.items():
        ok = [row for row in rows if row.score is not None]
        yield part(run, name, metric_of(run, rows), [ok], baselines)


def part(
    run: Run, name: str, metric: str, datasets: Sequence[Sequence[SampleRow]], baselines: Baselines
) -> dict[str, Any]:
    rows = [row for each in datasets for row in each]
    place, is_reference = Scored.of(rows), run.is_full and run.is_exact
    return {
        "dataset": name,
        "metric": metric,
        "n": len(rows),
        "score": place.mean,
        "ci": place.interval and [place.interval.low, place.interval.high],
        "paired": None if is_reference else baselines.compare(run, metric, datasets),
        "base": None if is_reference else baselines.levels(run, metric, datasets),
        "standing": "",
        "heat": heat(rows) if name != AVERAGE else None,
        "over": place.over,
        "outside": outside_budget(run, rows),
        "cost": costs_of(run, rows, baselines.rows_of(run)),
    }


def costs_of(run: Run, rows: Sequence[SampleRow], full: Mapping[str, SampleRow]) -> dict[str, float | None]:
    """What a part costs; where no ledger says the share of the full cache, that of full attention's bytes.

    Where only scores are kept, a sum of which a part was not kept is not known.
    """
    known = {key for keys in COSTS.values() for key in keys if measured(rows, key) is not None}
    found = {
        axis: added(rows, keys) if known.issuperset(keys) or not isinstance(run, Kept) else None
        for axis, keys in COSTS.items()
    }
    whole = [full[row.id] for row in rows if row.id in full]
    if found["memory"] is None and found["device"] and len(whole) == len(rows):
        held = added(whole, COSTS["device"])
        found["memory"] = found["device"] / held if held else None
    return found


def added(rows: Sequence[SampleRow], keys: Iterable[str]) -> float | None:
    """The sum of what was measured of some keys of the ledgers."""
    found = [value for key in keys if (value := measured(rows, key)) is not None]
    return fsum(found) if found else None


def metric_of(run: Run, rows: Iterable[SampleRow]) -> str:
    """What the scores of these samples are."""
    return next(
        (str(row.fields["metric"]) for row in rows if "metric" in row.fields),
        run.result.metric or "score",
    )


def heat(rows: Iterable[SampleRow]) -> list[list[float]] | None:
    """[length asked, depth, mean score, n, mean tokens of the prompts] per cell of a needle run; None for others."""
    cells: dict[tuple[float, float], list[SampleRow]] = {}
    for row in rows:
        length, depth = row.fields.get("length"), row.fields.get("depth")
        if isinstance(length, int | float) and isinstance(depth, int | float):
            cells.setdefault((length, depth), []).append(row)
    return [
        [*cell, fsum(row.score or 0 for row in of) / len(of), len(of), fsum(row.prompt_tokens for row in of) / len(of)]
        for cell, of in sorted(cells.items())
    ] or None
