"""Figures of scores: by what runs cost, by what finding tokens may cost, by code size, by length.

Each function takes all runs and what to draw for, and gives a list of figures, empty where the runs have nothing to
show. Costs are measured: a method's budgets are one line, a point outside its budget is open and a note says why. The
Oracle is no method that could be deployed: a line of its own kind, in no front.

Not here: maps of needles (`plots/figures/maps.py`), time and memory (`plots/figures/costs.py`), what happens within
layers (`plots/figures/layers.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, exp
from typing import Any

import numpy as np

from kvbench.plots import style
from kvbench.plots.figures.axes import AXES, Axis, scale, tick
from kvbench.plots.read import Run
from kvbench.plots.run_sets import (
    FRONT_SAID,
    Estimate,
    Line,
    RunSet,
    asked,
    by_dataset,
    front_of_lines,
    lines,
    mean,
    n_variants,
    other_setting,
    reports,
    run_sets,
    score_of,
)
from kvbench.plots.style import Canvas, Picture
from kvbench.results import METRICS, few_samples

N_PANELS = 16
ORACLE = "oracle"
BARS = "95 % intervals over samples, as in docs/intervals.md; none of one sample"
NAMED = 3  # methods that a note names before it counts


def scored(run: Run) -> bool:
    return not METRICS[run.result.metric or "score"].of_reading


def is_ratio(run: Run) -> bool:
    return run.result.budget is None


def panels(canvas: Canvas, run_set: RunSet, title: str, axis: Axis, apart: Callable[[Run], Any]) -> Picture | None:
    """A panel per dataset, a line per method, full attention as a level; None where no line has two points."""
    drawn: list[tuple[str, list[Line]]] = []
    for dataset in run_set.datasets()[:N_PANELS]:
        found = lines(run_set, axis.of, by_dataset(dataset), apart)
        found = [line for line in found if len(line.points) > 1 and line.method != "full"]
        if found:
            drawn.append((dataset, found))
    if not drawn:
        return None
    columns = canvas.columns(len(drawn))
    rows = ceil(len(drawn) / columns)
    full = [run for run in run_set.runs if run.is_full][:1]
    runs = dict.fromkeys(run.folder for _, found in drawn for line in found for run in line.runs)
    picture = canvas.new(
        title, run_set.about, [*full, *(run for run in run_set.runs if run.folder in runs)],
        style.COLUMN if columns == 1 else 2.3 * columns, 1.9 * rows, nrows=rows, ncols=columns, squeeze=False,
    )  # fmt: skip
    flat = picture.axes.ravel()
    for ax in flat[len(drawn) :]:
        ax.remove()
    for i, (ax, (dataset, found)) in enumerate(zip(flat, drawn, strict=False)):
        for line in found:
            draw_line(ax, line)
        if (level := full_score(run_set, dataset)) is not None:
            ax.axhline(level, color="black", linestyle="--", linewidth=0.9, label="Full", zorder=1)
        scale(ax, axis, [point.x for line in found for point in line.points])
        ax.set(title=dataset if len(drawn) > 1 else "", ylabel=style.SCORE if i % columns == 0 else "")
    every = [line for _, found in drawn for line in found]
    explain(picture, axis, every)
    return picture.finish()


def draw_line(ax: Any, line: Line) -> None:
    """A method's budgets, joined, with their intervals; what is outside its budget is open."""
    looks = style.look(line.method, line.nth)
    if line.method == ORACLE:
        looks |= {"linewidth": 0.8, "zorder": 1.5}
    xs, ys = [point.x for point in line.points], [point.y.mean for point in line.points]
    ax.plot(xs, ys, label=named(line), **looks)
    bars = np.transpose([point.y.bars for point in line.points])
    ax.errorbar(xs, ys, bars, fmt="none", ecolor=looks["color"], elinewidth=0.7, capsize=1.5, capthick=0.7, alpha=0.6)
    marked = [(point.x, point.y.mean) for point in line.points if point.outside]
    if marked:
        hollow = looks | {"linestyle": "", "markerfacecolor": "none", "markeredgewidth": 1.0, "zorder": 3}
        ax.plot(*zip(*marked, strict=True), **hollow)


def named(line: Line) -> str:
    return f"{line.label}: reference" if line.method == ORACLE else line.label


def explain(picture: Picture, axis: Axis, drawn: Iterable[Line]) -> None:
    """What the marks mean, and what the figure cannot show."""
    drawn = list(drawn)
    why: dict[str, list[str]] = {}
    for line in drawn:
        for point in line.points:
            if point.outside and line.label not in why.setdefault(point.outside, []):
                why[point.outside].append(line.label)
    picture.note(*(f"Open: {reason} ({shortened(who)})" for reason, who in sorted(why.items())))
    if any(line.method == ORACLE for line in drawn):
        hidden = f"; {axis.hides} is not on the axis" if axis.hides else ""
        picture.note(f"Oracle: tokens by their true attention; no bound on scores{hidden}")
    counts = [point.y.n for line in drawn for point in line.points]
    n_compared = n_variants(drawn)
    if n_compared and (few := few_samples(min(counts), n_compared)):
        picture.note(f"n {min(counts)}: {few}")
    n = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    picture.said += [
        f"n {n} samples a point",
        f"Bars: {BARS}",
    ]


def shortened(names: Sequence[str]) -> str:
    names = sorted(set(names))
    return ", ".join(names) if len(names) <= NAMED else f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"


def full_score(run_set: RunSet, dataset: str) -> float | None:
    found = [score_of(by_dataset(dataset)(run)) for run in run_set.runs if run.is_full]
    return next((one.mean for one in found if one is not None), None)


def comms(run_set: RunSet) -> list[str]:
    return sorted({run.comm for run in run_set.runs if not run.is_full})


def score_vs_ratio(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """A figure for each way to give budgets: shares of the prompt, numbers of tokens."""
    made = []
    axis = AXES[canvas.axis or "attended"]
    for by_ratio, given in ((True, "ratios"), (False, "numbers of tokens")):
        for run_set in run_sets(runs, scored):
            for comm in comms(run_set):
                here = run_set.only(
                    lambda run, c=comm, r=by_ratio: run.is_full or (run.comm == c and is_ratio(run) == r)
                )
                title = f"Score by {axis.words}, budgets given as {given}, comm {comm}"
                made.append(panels(canvas, here, title, axis, other_setting(here)))
    return [picture for picture in made if picture is not None]


def score_vs_comm(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    made = []
    axis = AXES["find"]
    for run_set in run_sets(runs, scored):
        for budget in sorted({asked(run) for run in run_set.runs if not run.is_full}):
            here = run_set.only(lambda run, b=budget: run.is_full or asked(run) == b)
            title = f"Score by {axis.words}, {budget}"
            made.append(panels(canvas, here, title, axis, other_setting(here)))
    return [picture for picture in made if picture is not None]


def mxb_bars(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    made = []
    pq = run_sets(runs, lambda run: run.method in ("pqcache", "full") and scored(run))
    for run_set in pq:
        for dataset in run_set.datasets():
            found: dict[tuple[int, int], tuple[Estimate, float, Run]] = {}
            budgets = [asked(run) for run in run_set.runs if code_size(run)]
            for run in run_set.runs:
                size, point = code_size(run), score_of(by_dataset(dataset)(run))
                if size and point and asked(run) == budgets[0]:
                    nominal = mean(report["comm_nominal"] for report in reports(run)) or 0
                    found[size] = (point, nominal, run)
            if len(found) < 2:
                continue
            title = f"PQCache on {dataset} by parts x bits, {budgets[0]}"
            full = [run for run in run_set.runs if run.is_full][:1]
            picture = canvas.new(title, run_set.about, [*full, *(run for _, _, run in found.values())])
            ax = picture.axes
            order = sorted(found, key=lambda size: (size[0] * size[1], size))
            for i, size in enumerate(order):
                point, nominal, _ = found[size]
                dear = nominal > 1 / 128 + 1e-9
                ax.bar(
                    i,
                    point.mean,
                    color=style.PALETTE[5 if dear else 0],
                    hatch="///" if dear else None,
                    edgecolor="white",
                    label="codes cost more than 1/128" if dear else "codes cost 1/128 at most",
                )
                ax.errorbar(i, point.mean, [[bar] for bar in point.bars], color="black", capsize=1.5, linewidth=0.7)
            if (level := full_score(run_set, dataset)) is not None:
                ax.axhline(level, color="black", linestyle="--", linewidth=0.9, label="Full")
            ax.set_xticks(range(len(order)), [f"{m}x{b}" for m, b in order], rotation=45)
            ax.set(xlabel="parts x bits, by bits in all", ylabel=style.SCORE)
            ax.grid(axis="x", visible=False)
            made.append(picture.finish())
    return made


def code_size(run: Run) -> tuple[int, int] | None:
    """Parts and bits that a run used."""
    for report in reports(run):
        if "m" in report and "b" in report:
            return int(report["m"]), int(report["b"])
    return None


def perplexity_vs_length(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    made = []
    for run_set in run_sets(runs, lambda run: run.result.task == "pg19"):
        picture = canvas.new("Perplexity by length", run_set.about, [])
        tail = other_setting(run_set)
        for run, nth in variants(run_set.runs):
            at: dict[int, list[tuple[float, int]]] = {}
            for row in run.rows:
                if row.score is not None:
                    loss = float(row.fields["nll_sum"]), int(row.fields["n_targets"])
                    at.setdefault(int(row.fields["length"]), []).append(loss)
            xs = sorted(at)
            ys = [exp(sum(s for s, _ in at[n]) / sum(k for _, k in at[n])) for n in xs]
            picture.axes.plot(xs, ys, label=variant(run, tail), **style.look(run.method, nth))
            picture.runs.append(run)
        if picture.runs:
            picture.axes.set(xlabel="tokens read", ylabel="perplexity")
            picture.axes.xaxis.set_major_formatter(tick)
            made.append(picture.finish())
    return made


def variants(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    """Full attention once, then the others, each with its number among those of its method."""
    seen: list[str] = []
    found: list[tuple[Run, int]] = []
    for run in sorted(runs, key=lambda run: (not run.is_full, run.method, run.folder.name)):
        nth = seen.count(run.method)
        if not (run.is_full and nth):
            found.append((run, nth))
            seen.append(run.method)
    return found


def variant(run: Run, tail: Callable[[Run], str]) -> str:
    """A method's label with what it was asked."""
    words = "" if run.is_full else f" {asked(run)} {tail(run)}"
    return f"{run.result.method_label}{words}".strip()


def recall_vs_budget(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    made = []
    axis = AXES[canvas.axis or "attended"]
    for run_set in run_sets(runs, lambda run: run.result.task == "fidelity" and not run.is_full):
        for by_ratio in (True, False):
            here = run_set.only(lambda run, r=by_ratio: is_ratio(run) == r)
            found = [line for line in lines(here, axis.of, apart=other_setting(here)) if len(line.points) > 1]
            if len(found) < 2:
                continue
            drawn = [run for line in found for run in line.runs]
            picture = canvas.new("Share of the true top tokens that are attended to", run_set.about, drawn)
            for line in found:
                draw_line(picture.axes, line)
            scale(picture.axes, axis, [point.x for line in found for point in line.points])
            picture.axes.set(ylabel="recall in %", ylim=(0, 102))
            explain(picture, axis, found)
            made.append(picture.finish())
    return made


def pareto(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """Score against what a run really costs, and which methods no other beats at as little."""
    made = []
    axis = AXES[canvas.axis or "device"]
    for run_set in run_sets(runs, scored):
        if METRICS[run_set.runs[0].result.metric or "score"].better != "higher":
            continue
        tail, several = other_setting(run_set), len(comms(run_set)) > 1

        def apart(run: Run, tail: Callable[[Run], str] = tail, several: bool = several) -> str:
            return f"{tail(run)} comm {run.comm}".strip() if several else tail(run)

        found = lines(run_set, axis.of, apart=apart)
        if len({line.method for line in found} - {ORACLE}) < 2:
            continue
        drawn = [run for line in found for run in line.runs]
        picture = canvas.new(f"Score against {axis.words}", run_set.about, drawn, height=2.5)
        for line in found:
            draw_line(picture.axes, line)
        draw_front(picture, picture.axes, front_of_lines(found))
        scale(picture.axes, axis, [point.x for line in found for point in line.points])
        picture.axes.set(ylabel=f"mean {style.SCORE}")
        explain(picture, axis, found)
        made.append(picture.finish())
    return made


def draw_front(picture: Picture, ax: Any, front: Sequence[tuple[float, float]]) -> None:
    """A band along the front, where there is one."""
    if len(front) > 1:
        xs, ys = zip(*front, strict=True)
        ax.step(xs, ys, where="post", color="#999999", linewidth=2.5, alpha=0.5, label="front", zorder=1)
        picture.said.append(FRONT_SAID)


def iterations(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """Rounds of clustering: the score of each setting against its time to the second token."""
    made = []
    timed: dict[str, tuple[float, Run]] = {}
    for run in runs:
        if run.method == "pqcache" and run.result.task == "latency":
            seconds = mean(row.fields["timing"]["tt2t_s"] for row in run.rows if row.status == "ok")
            if seconds is not None:
                timed[str(run.result.params.get("iterations"))] = seconds, run
    for run_set in run_sets(runs, lambda run: run.method == "pqcache" and scored(run)):
        by_setting: dict[str, list[Run]] = {}
        for run in run_set.runs:
            rest = {k: v for k, v in run.result.params.items() if k != "iterations"}
            by_setting.setdefault(str((rest, asked(run), run.comm, run.setting("cache"))), []).append(run)
        for _, members in sorted(by_setting.items()):
            found = {word: run for run in members if (word := str(run.result.params.get("iterations"))) in timed}
            if len(found) < 2:
                continue
            drawn = [each for word, run in found.items() for each in (run, timed[word][1])]
            picture = canvas.new("Rounds of clustering: score against time", run_set.about, drawn)
            for i, (word, run) in enumerate(sorted(found.items(), key=by_rounds)):
                if (y := score_of(run.rows)) is not None:
                    bars = [[bar] for bar in y.bars]
                    looks = style.numbered(i, "")
                    picture.axes.errorbar(timed[word][0], y.mean, bars, label=f"T = {word}", capsize=2, **looks)
            picture.axes.set(xlabel="time to the second token in s", ylabel=style.SCORE)
            made.append(picture.finish())
    return made


def by_rounds(item: tuple[str, Any]) -> float:
    return float(item[0]) if item[0].isdecimal() else np.inf
