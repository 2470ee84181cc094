"""The table that ends a run: each result beside what it really cost.

Text that all rows share stands once above the table. Numbers are never cut: on a narrow terminal
the lines wrap. "-" was not measured.

Not here: tables over many runs (`plots/tables/`), which read the folders again.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from evals.results import METRICS, RunResult

TEXTS = ("model", "task", "budget", "comm", "scope", "seed")  # columns only where they differ
NUMBERS = (  # behind the score, which is called what it is, its interval and n
    *("tokens\nattended", "prompt\nbudget", "KV KB\n/step", "find KB\n/step"),
    *("device\nMB", "host\nMB", "prefill\ns", "s\n/token"),
)
READS_ONLY = {"latency", "fidelity", "pg19"}  # tasks that ask for no answer


def print_table(done: Sequence[tuple[Path, RunResult]]) -> None:
    """To standard output, as wide as it has to be."""
    console = Console(markup=False, emoji=False, highlight=False)  # paths may look like either
    shared, view = table(done)
    needed = Measurement.get(console, console.options.update(max_width=10_000), view).maximum
    console.width = max(console.width, needed)
    console.print(shared, soft_wrap=True)
    console.print(view)
    for line in remarks([result for _, result in done]):
        console.print(line, soft_wrap=True)


def table(done: Sequence[tuple[Path, RunResult]]) -> tuple[str, Table]:
    """What all rows share, and one row per run."""
    shown = [texts(result) for _, result in done]
    differing = [i for i in range(len(TEXTS)) if len({row[i] for row in shown}) > 1]
    shared = [shown[0][i] for i in range(len(TEXTS)) if i not in differing] if shown else []
    view = Table(box=None, pad_edge=False)
    for name in ("method", *(TEXTS[i] for i in differing)):
        view.add_column(name, vertical="bottom")
    measures = measured([result for _, result in done])
    for name in (score_name(result for _, result in done), "95 %", "n", *measures, *NUMBERS):
        view.add_column(name, justify="right")
    view.add_column("folder")
    for (folder, result), row in zip(done, shown, strict=True):
        label = " ".join([result.method_label, *varied(result, [other for _, other in done])])
        label += "" if result.status == "ok" else " (out of memory)"
        cells = *score(result), *means(result, measures), *numbers(result)
        view.add_row(label, *(row[i] for i in differing), *cells, str(folder))
    return " · ".join(shared), view


def varied(result: RunResult, results: Sequence[RunResult]) -> list[str]:
    """The parameters that tell this run from others of its method and prefill, as `key=value`."""
    alike = [parameters(other) for other in results if (other.method, other.prefill) == (result.method, result.prefill)]
    return [
        f"{key}={value}" for key, value in parameters(result).items() if any(other.get(key) != value for other in alike)
    ]


def parameters(result: RunResult) -> dict[str, Any]:
    """The method's own, and the prefill's."""
    return result.params | {f"prefill.{k}": v for k, v in result.prefill_params.items()}


def texts(result: RunResult) -> tuple[str, ...]:
    """The columns of `TEXTS`."""
    task = f"{result.task} {result.dataset}".strip()
    budget = f"ratio {result.ratio_exact}" if result.budget is None else f"{result.budget} tokens"
    return (
        result.model,
        f"{task} ({result.data_source} data)",
        budget,
        f"comm {result.comm_exact}",
        result.protocol,
        f"seed {result.seed}",
    )


def score_name(results: Iterable[RunResult]) -> str:
    """What the scores of a table are; "score" where they are different things."""
    names = {result.metric or "score" for result in results}
    return names.pop() if len(names) == 1 else "score"


def measured(results: Iterable[RunResult]) -> list[str]:
    """Names of the other figures that a task took, less the one that is its score."""
    return list(
        dict.fromkeys(
            name for result in results for name in result.measures or () if name != (result.metric or "score")
        )
    )


def score(result: RunResult) -> tuple[str, ...]:
    """Score, interval, n."""
    ci = result.score_ci95
    return (
        number(result.score, 3),
        "-" if ci is None else f"{ci[0]:.3f} to {ci[1]:.3f}",
        str(result.n_samples),
    )


def means(result: RunResult, names: Sequence[str]) -> list[str]:
    """The columns of `measured`."""
    return [number((result.measures or {}).get(name), 4) for name in names]


def numbers(result: RunResult) -> tuple[str, ...]:
    """The columns of `NUMBERS`."""
    over = "!" if result.within_budget is False else ""
    return (
        over + number(result.tokens_attended_mean, 1),
        number(result.tokens_budget_mean, 1),
        number(result.bytes_moved_kv_per_step, 1, 1e3),
        number(result.bytes_moved_meta_per_step, 1, 1e3),
        number(result.bytes_resident_device, 1, 1e6),
        number(result.bytes_resident_host, 1, 1e6),
        number(result.prefill_s, 2),
        number(result.tpot_s, 3),
    )


def number(value: float | None, digits: int, unit: float = 1) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def exceeds(value: float | None, bound: float | None) -> bool:
    return value is not None and bound is not None and value > bound


def remarks(results: Sequence[RunResult]) -> list[str]:
    """What no column says, each sentence once."""
    common = [note for note in results[0].notes if all(note in other.notes for other in results)]
    lines = common + [
        f"{result.method_label}: {note}" for result in results for note in result.notes if note not in common
    ]
    is_mixed = len({result.metric for result in results}) > 1
    for name, task in {(result.metric or "score", result.task): None for result in results}:
        if is_mixed and name != "score":
            lines.append(f"the score of {task} is its {name}")
        if METRICS[name].better == "lower":
            lines.append(f"{name}: lower is better")
    rows = max((result.batch_rows_mean or 1 for result in results), default=1)
    if rows > 1:
        lines.append(f"s/token is the time of a step that up to {rows:.0f} variants shared")
    if any(r.within_budget and exceeds(r.tokens_attended_mean, r.tokens_budget_mean) for r in results):
        lines.append("attended counts generated tokens too, which come on top of the prompt's budget")
    if any(r.task not in READS_ONLY and r.protocol == "full_prompt" for r in results):
        lines.append("the first token of an answer comes from the prefill, not from the compressed cache")
    if any(result.within_budget is False for result in results):
        lines.append("! attended to more tokens, or read more to find them, than the budget allows")
    if any(result.waits_for_scores for result in results):
        lines.append("answers without a score yet: `python -m evals.rescore --write FOLDER` gives them theirs")
    searching = {result.method_label for result in results if result.bytes_searched_per_step}
    if searching:
        names = ", ".join(sorted(searching))
        lines.append(f"reads more than any comm allows to find its tokens: {names}")
    return list(dict.fromkeys(lines))
