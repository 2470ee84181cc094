"""Figures of scores: by budget, by comm, by code size, by position of a needle, by length, and against bytes.

Each function takes all runs and gives a list of figures, empty where the runs have nothing to show.

Not here: time and memory (`plots/figures/costs.py`), what happens within layers (`plots/figures/layers.py`).
"""

from collections.abc import Callable, Sequence
from itertools import islice
from math import ceil, exp, isnan
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from evals.results import METRICS
from evals.tasks.needle.heatmap import pivot
from plots import style
from plots.read import Run
from plots.run_sets import (
    Line,
    RunSet,
    budget_of,
    by_dataset,
    lines,
    mean,
    other_setting,
    reports,
    run_sets,
    score_of,
)

LABELLED = ("longbench", "gsm8k", "infinitebench", "ruler", "needle")  # tasks with scores of 0 to 1
N_PANELS = 16


def scored(run: Run) -> bool:
    return run.result.task in LABELLED


def is_ratio(run: Run) -> bool:
    return run.result.budget is None


def panels(
    run_set: RunSet,
    title: str,
    xlabel: str,
    x: Callable[[Run], float | None],
    apart: Callable[[Run], Any],
    log: bool = False,
) -> Figure | None:
    """A panel per dataset, a line per method; None where no line has two points."""
    drawn: list[tuple[str, list[Line]]] = []
    for dataset in run_set.datasets()[:N_PANELS]:
        found = [
            line
            for line in lines(run_set, x, by_dataset(dataset), apart)
            if len(line.points) > 1 and line.method != "full"
        ]
        if found:
            drawn.append((dataset, found))
    if not drawn:
        return None
    columns = min(4, len(drawn))
    rows = ceil(len(drawn) / columns)
    figure, axes = style.new(
        title,
        run_set.about,
        style.COLUMN if columns == 1 else min(style.PAGE, 2.3 * columns),
        0.9 + 1.8 * rows,
        nrows=rows,
        ncols=columns,
        squeeze=False,
    )
    flat = axes.ravel()
    for ax in flat[len(drawn) :]:
        ax.set_visible(False)
    for i, (ax, (dataset, found)) in enumerate(zip(flat, drawn, strict=False)):
        for line in found:
            spread(ax, line)
        if (full := full_score(run_set, dataset)) is not None:
            ax.axhline(full, color="black", linestyle="--", linewidth=0.9, label="Full")
        ax.set(title=dataset, xlabel=xlabel, ylabel="score" if i % columns == 0 else "")
        ticks = sorted({point.x for line in found for point in line.points})
        if log:
            ax.set_xscale("log")
            ax.minorticks_off()
        ax.set_xticks(ticks, [short(tick) for tick in ticks], rotation=45 if len(ticks) > 5 else 0)
    style.legend(figure, flat[: len(drawn)])
    return figure


def spread(ax: Any, line: Line) -> None:
    """A line with its intervals as a band."""
    looks = style.look(line.method, line.nth)
    xs = [point.x for point in line.points]
    ax.plot(xs, [point.y for point in line.points], label=line.label, **looks)
    low, high = [p.low for p in line.points], [p.high for p in line.points]
    ax.fill_between(xs, low, high, color=looks["color"], alpha=0.1, linewidth=0)


def full_score(run_set: RunSet, dataset: str) -> float | None:
    found = [by_dataset(dataset)(run) for run in run_set.runs if run.is_full]
    return next((one[0] for one in found if one is not None), None)


def short(value: float) -> str:
    """A tick: 1/128 for what comm and ratios are written as, 2k for tokens."""
    if 0 < value < 1 and len(f"{value:g}") > 4 and abs(1 / value - round(1 / value)) < 1e-6:
        return f"1/{round(1 / value)}"
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def comms(run_set: RunSet) -> list[str]:
    return sorted({run.result.comm_exact for run in run_set.runs if not run.is_full})


def score_vs_ratio(runs: Sequence[Run]) -> list[Figure]:
    made = []
    for by_ratio, xlabel in ((True, "ratio"), (False, "budget in tokens")):
        for run_set in run_sets(runs, lambda run: scored(run)):
            for comm in comms(run_set):
                here = run_set.only(
                    lambda run, c=comm, r=by_ratio: run.is_full or (run.result.comm_exact == c and is_ratio(run) == r)
                )
                figure = panels(
                    here,
                    f"Score by budget, comm {comm}",
                    xlabel,
                    budget_of,
                    other_setting(here),
                    log=not by_ratio,
                )
                if figure is not None:
                    made.append(figure)
    return made


def score_vs_comm(runs: Sequence[Run]) -> list[Figure]:
    made = []
    for run_set in run_sets(runs, scored):
        for budget in sorted({budget_of(run) or 0 for run in run_set.runs if not run.is_full}):
            here = run_set.only(lambda run, b=budget: run.is_full or budget_of(run) == b)
            figure = panels(
                here,
                f"Score by what finding tokens may cost, budget {short(budget)}",
                "comm",
                lambda run: run.result.comm,
                other_setting(here),
                log=True,
            )
            if figure is not None:
                made.append(figure)
    return made


def mxb_bars(runs: Sequence[Run]) -> list[Figure]:
    made = []
    pq = run_sets(runs, lambda run: run.method in ("pqcache", "full") and scored(run))
    for run_set in pq:
        for dataset in run_set.datasets():
            found: dict[tuple[int, int], tuple[tuple[float, float, float], float]] = {}
            budgets = [run.result.ratio_exact for run in run_set.runs if code_size(run)]
            for run in run_set.runs:
                size, point = code_size(run), by_dataset(dataset)(run)
                if size and point and run.result.ratio_exact == budgets[0]:
                    nominal = mean(report["comm_nominal"] for report in reports(run)) or 0
                    found[size] = (point, nominal)
            if len(found) < 2:
                continue
            title = f"PQCache on {dataset} by parts x bits, ratio {budgets[0]}"
            figure, ax = style.new(title, run_set.about, height=2.4)
            order = sorted(found, key=lambda size: (size[0] * size[1], size))
            for i, size in enumerate(order):
                (y, low, high), nominal = found[size]
                dear = nominal > 1 / 128 + 1e-9
                ax.bar(
                    i,
                    y,
                    color=style.PALETTE[5 if dear else 0],
                    hatch="///" if dear else None,
                    edgecolor="white",
                    label="codes cost more than 1/128" if dear else "codes cost 1/128 at most",
                )
                ax.errorbar(i, y, [[y - low], [high - y]], color="black", capsize=1.5, linewidth=0.7)
            if (full := full_score(run_set, dataset)) is not None:
                ax.axhline(full, color="black", linestyle="--", linewidth=0.9, label="Full")
            ax.set_xticks(range(len(order)), [f"{m}x{b}" for m, b in order], rotation=45)
            ax.set(xlabel="parts x bits, by bits in all", ylabel="score")
            ax.grid(axis="x", visible=False)
            style.legend(figure, ax)
            made.append(figure)
    return made


def code_size(run: Run) -> tuple[int, int] | None:
    """Parts and bits that a run used."""
    for report in reports(run):
        if "m" in report and "b" in report:
            return int(report["m"]), int(report["b"])
    return None


def needle_heatmaps(runs: Sequence[Run]) -> list[Figure]:
    made = []
    for run_set in run_sets(runs, lambda run: run.result.task == "needle"):
        settings = {(budget_of(run), run.result.comm) for run in run_set.runs if not run.is_full}
        for budget, comm in sorted(settings, key=str):
            chosen: dict[str, Run] = {}
            tail = other_setting(run_set)
            for run in sorted(run_set.runs, key=lambda run: (not run.is_full, run.method)):
                if run.is_full or (budget_of(run), run.result.comm) == (budget, comm):
                    label = (
                        run.result.method_label if run.is_full else (f"{run.result.method_label} {tail(run)}").strip()
                    )
                    chosen.setdefault(label, run)
            if len(chosen) > 1:
                made.append(heatmaps(run_set, dict(islice(chosen.items(), 24)), budget, comm))
    return made


def heatmaps(run_set: RunSet, chosen: dict[str, Run], budget: float | None, comm: float) -> Figure:
    columns = min(4, len(chosen))
    rows = ceil(len(chosen) / columns)
    figure, axes = style.new(
        f"A needle by length and depth, budget {short(budget or 0)}, comm {short(comm)}",
        run_set.about,
        min(style.PAGE, 1.0 + 1.7 * columns),
        0.7 + 1.45 * rows,
        nrows=rows,
        ncols=columns,
        squeeze=False,
    )
    image = None
    for ax in axes.ravel()[len(chosen) :]:
        ax.set_visible(False)
    for i, (ax, (label, run)) in enumerate(zip(axes.ravel(), chosen.items(), strict=False)):
        table = pivot([{"depth": r.fields["depth"], "length": r.fields["length"], "score": r.score} for r in run.rows])
        image = ax.imshow(table.scores, cmap=style.HEAT, vmin=0, vmax=1, aspect="auto")
        size = len(table.lengths) * len(table.depths)
        if size <= 60:
            for y, line in enumerate(table.scores):
                for x, value in enumerate(line):
                    if not isnan(value):
                        color = "white" if value < 0.6 else "black"
                        ax.text(
                            x, y, f"{100 * value:.0f}", ha="center", va="center",
                            color=color, fontsize=5,
                        )  # fmt: skip
        every = max(1, len(table.lengths) // 5)
        ticks = range(0, len(table.lengths), every)
        ax.set_xticks(ticks, [short(table.lengths[t]) for t in ticks], rotation=45)
        every = max(1, len(table.depths) // 5)
        ticks = range(0, len(table.depths), every)
        ax.set_yticks(ticks, [f"{table.depths[t]:g}" for t in ticks])
        overall = score_of(run.rows)
        words = "" if overall is None else f" {overall[0]:.1f}"
        ax.set_title(f"{label}{words}", fontsize=6)
        ax.grid(visible=False)
        if i % columns == 0:
            ax.set_ylabel("depth in %")
        if i + columns >= len(chosen):
            ax.set_xlabel("tokens")
    if image is not None:
        figure.colorbar(image, ax=axes.ravel().tolist(), label="score", shrink=0.8)
    return figure


def perplexity_vs_length(runs: Sequence[Run]) -> list[Figure]:
    made = []
    for run_set in run_sets(runs, lambda run: run.result.task == "pg19"):
        figure, ax = style.new("Perplexity by length", run_set.about)
        tail = other_setting(run_set)
        seen: list[str] = []
        for run in sorted(run_set.runs, key=lambda run: (not run.is_full, run.method, run.folder.name)):
            at: dict[int, list[tuple[float, int]]] = {}
            for row in run.rows:
                if row.score is not None:
                    loss = float(row.fields["nll_sum"]), int(row.fields["n_targets"])
                    at.setdefault(int(row.fields["length"]), []).append(loss)
            xs = sorted(at)
            ys = [exp(sum(s for s, _ in at[n]) / sum(k for _, k in at[n])) for n in xs]
            nth = seen.count(run.method)
            if run.is_full and nth:
                continue
            budget = "" if run.is_full else f" {short(budget_of(run) or 0)} {tail(run)}"
            label = f"{run.result.method_label}{budget}".strip()
            ax.plot(xs, ys, label=label, **style.look(run.method, nth))
            seen.append(run.method)
        if not ax.lines:
            continue
        ax.set(xlabel="tokens read", ylabel="perplexity")
        style.legend(figure, ax)
        made.append(figure)
    return made


def recall_vs_budget(runs: Sequence[Run]) -> list[Figure]:
    made = []
    for run_set in run_sets(runs, lambda run: run.result.task == "fidelity" and not run.is_full):
        for by_ratio, xlabel in ((True, "ratio"), (False, "budget in tokens")):
            here = run_set.only(lambda run, r=by_ratio: is_ratio(run) == r)
            found = [line for line in lines(here, budget_of, recall_of, other_setting(here)) if len(line.points) > 1]
            if len(found) < 2:
                continue
            figure, ax = style.new("Share of the true top tokens that are attended to", run_set.about)
            for line in found:
                spread(ax, line)
            ax.set(xlabel=xlabel, ylabel="recall in %", ylim=(0, 102))
            style.legend(figure, ax)
            made.append(figure)
    return made


def recall_of(run: Run) -> tuple[float, float, float] | None:
    return score_of(run.rows)


def pareto(runs: Sequence[Run]) -> list[Figure]:
    """Score against what a run really keeps on the device, in bytes relative to full attention's."""
    made = []
    for run_set in run_sets(runs, scored):
        whole = next((run.result.bytes_resident_device for run in run_set.runs if run.is_full), None)
        points = [
            (run, 100 * run.result.bytes_resident_device / whole, 100 * run.result.score)
            for run in run_set.runs
            if whole
            and run.result.bytes_resident_device is not None
            and run.result.score is not None
            and METRICS[run.result.metric or "score"].better == "higher"
        ]
        if len({run.method for run, _, _ in points}) < 3:
            continue
        figure, ax = style.new("Score against bytes on the device", run_set.about, height=3.0)
        named: set[str] = set()
        for run, x, y in points:
            looks = style.look(run.method) | {"linestyle": ""}
            hollow = {"markerfacecolor": "none"} if run.result.within_budget is False else {}
            label = run.result.method_label
            ax.plot([x], [y], label=None if label in named else label, **looks, **hollow)
            named.add(label)
        front = best_so_far([(x, y) for _, x, y in points])
        ax.step(
            *zip(*front, strict=True),
            where="post",
            color="#555555",
            linewidth=0.8,
            label="Pareto front",
            zorder=1,
        )
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.xaxis.set_minor_formatter("")
        ax.set(xlabel="bytes on the device, % of full attention's", ylabel="mean score")
        style.legend(figure, ax)
        made.append(figure)
    return made


def best_so_far(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other point beats with as few bytes, from few to many."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


def iterations(runs: Sequence[Run]) -> list[Figure]:
    """Rounds of clustering: the score of each setting against its time to the second token."""
    made = []
    timed: dict[str, float] = {}
    for run in runs:
        if run.method == "pqcache" and run.result.task == "latency":
            seconds = mean(row.fields["timing"]["tt2t_s"] for row in run.rows if row.status == "ok")
            if seconds is not None:
                timed[str(run.result.params["iterations"])] = seconds
    for run_set in run_sets(runs, lambda run: run.method == "pqcache" and scored(run)):
        others = {
            str({k: v for k, v in run.result.params.items() if k != "iterations"})
            + str((run.result.ratio_exact, run.result.budget, run.result.comm_exact))
            + str(run.setting("cache"))
            for run in run_set.runs
        }
        for other in sorted(others):
            found = {}
            for run in run_set.runs:
                rest = {k: v for k, v in run.result.params.items() if k != "iterations"}
                key = (
                    str(rest)
                    + str((run.result.ratio_exact, run.result.budget, run.result.comm_exact))
                    + str(run.setting("cache"))
                )
                word = str(run.result.params["iterations"])
                if key == other and word in timed and (point := score_of(run.rows)):
                    found[word] = (timed[word], point)
            if len(found) < 2:
                continue
            figure, ax = style.new("Rounds of clustering: score against time", run_set.about, height=2.4)
            for i, (word, (x, (y, low, high))) in enumerate(sorted(found.items(), key=by_rounds)):
                looks = style.numbered(i, "")
                ax.errorbar(x, y, [[y - low], [high - y]], label=f"T = {word}", capsize=2, **looks)
            ax.set(xlabel="time to the second token in s", ylabel="score")
            style.legend(figure, ax)
            made.append(figure)
    return made


def by_rounds(item: tuple[str, Any]) -> float:
    return float(item[0]) if item[0].isdecimal() else np.inf
