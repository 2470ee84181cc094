"""Figures of what happens within layers: XKV's retention and allocation, and how attention is spread over tokens.

Each function takes all runs and gives a list of figures, empty where the runs have nothing to show.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbench.plots import style
from kvbench.plots.figures.axes import tick
from kvbench.plots.figures.scores import scored
from kvbench.plots.read import Run
from kvbench.plots.run_sets import Estimate, RunSet, asked, budget_of, mean, reports, run_sets, score_of
from kvbench.plots.style import Canvas, Picture

N_REQUESTS = 8


def xkv(runs: Sequence[Run], allocation: str | None = None) -> list[RunSet]:
    return run_sets(
        runs,
        lambda run: run.method == "xkv" and scored(run) and allocation in (None, run.result.params.get("allocation")),
    )


def xkv_retention(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """Retention per layer where all layers keep as much; mean over samples."""
    made = []
    for run_set in xkv(runs, "uniform"):
        found: dict[str, list[float]] = {}
        for run in sorted(run_set.runs, key=lambda run: budget_of(run) or 0):
            said = [report["retention"] for report in reports(run)]
            if said:
                found.setdefault(asked(run), np.mean(said, axis=0).tolist())
        if not found:
            continue
        picture = canvas.new("Retention per layer, all layers alike", run_set.about, run_set.runs)
        per_layer(picture.axes, found, "retention")
        made.append(picture.finish())
    return made


def per_layer(ax: Any, found: dict[str, list[float]], ylabel: str) -> None:
    for i, (label, values) in enumerate(found.items()):
        looks = style.numbered(i, style.DASHES[i // 6 % 4]) | {"markersize": 2.5}
        ax.plot(range(len(values)), values, label=label, **looks)
    ax.set(xlabel="layer", ylabel=ylabel, ylim=(0, None))


def xkv_tokens_at_retention(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """Tokens that each layer needs for one retention; mean over samples."""
    made = []
    for run_set in xkv(runs):
        per_run = (
            [r["n_at_retention"] for r in reports(run) if r.get("n_at_retention")]
            for run in sorted(run_set.runs, key=lambda run: run.folder.name)
        )
        said = next(filter(None, per_run), None)  # the prompts' needs do not depend on a run's budget
        if not said:
            continue
        picture = canvas.new("Tokens per layer for the same retention", run_set.about, run_set.runs)
        found = {f"retention {name}": np.mean([one[name] for one in said], axis=0).tolist() for name in said[0]}
        per_layer(picture.axes, found, "tokens")
        made.append(picture.finish())
    return made


def xkv_allocation(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """Tokens per layer, a line per request, the mean above them."""
    made = []
    for run_set in xkv(runs, "exact"):
        for run in sorted(run_set.runs, key=lambda run: run.folder.name):
            said = [report["n"] for report in reports(run)]
            if not said:
                continue
            picture = canvas.new(f"Tokens per layer, request by request, {asked(run)}", run_set.about, [run])
            ax = picture.axes
            for i, counts in enumerate(said[:N_REQUESTS]):
                ax.plot(
                    range(len(counts)),
                    counts,
                    color=style.PALETTE[5],
                    linewidth=0.7,
                    alpha=0.9,
                    label=f"{min(len(said), N_REQUESTS)} of {len(said)} requests" if i == 0 else None,
                )
            average = np.mean(said, axis=0)
            looks = style.numbered(0) | {"markersize": 2.5}
            ax.plot(range(len(average)), average, label="mean of all", **looks)
            uniform = float(average.mean())
            ax.axhline(uniform, color="black", linestyle="--", linewidth=0.8, label="uniform")
            ax.set(xlabel="layer", ylabel="tokens besides the window", ylim=(0, None))
            made.append(picture.finish())
    return made


def xkv_ddid(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """The attention of the last tokens by layer and place, for the first sample that was profiled."""
    made = []
    for run_set in xkv(runs):
        ordered = sorted(run_set.runs, key=lambda run: run.folder.name)
        profiles = [r["w"] for run in ordered for r in reports(run) if r.get("w")]
        if not profiles:
            continue
        weights = np.array(profiles[0])
        shares = 100 * weights / np.maximum(weights.sum(1, keepdims=True), 1e-12)
        about = f"{run_set.about} · first sample"
        picture = canvas.new("Where the last tokens look, by layer", about, ordered, height=2.3)
        ax = picture.axes
        image = ax.imshow(
            np.maximum(shares, 1e-2),
            cmap=style.HEAT,
            aspect="auto",
            norm="log",
            extent=(0, 100, len(shares) - 0.5, -0.5),
            interpolation="nearest",
        )
        ax.grid(visible=False)
        ax.set(xlabel="place in the prompt in %", ylabel="layer")
        picture.figure.colorbar(image, ax=ax, label="% of the layer's attention", format=tick)
        made.append(picture.finish())
    return made


def xkv_score_vs_retention(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """The score against mean retention, the total of tokens being the same."""
    made = []
    for run_set in xkv(runs):
        for budget in sorted({asked(run) for run in run_set.runs}):
            points: list[tuple[float, Estimate, Run]] = []
            for run in run_set.runs:
                retention = mean(report["r_avg"] for report in reports(run))
                score = score_of(run.rows)
                if asked(run) == budget and retention is not None and score is not None:
                    points.append((retention, score, run))
            if len({retention for retention, _, _ in points}) < 3:
                continue
            title = f"Score against mean retention, {budget}"
            picture = canvas.new(title, run_set.about, [run for _, _, run in points])
            for retention, y, _ in points:
                bars = [[bar] for bar in y.bars]
                picture.axes.errorbar(retention, y.mean, bars, capsize=2, **style.numbered(0, ""))
            picture.axes.set(xlabel="mean retention over layers", ylabel=style.SCORE)
            made.append(picture.finish())
    return made


def attention_distribution(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """Exact attention on the heaviest tokens against their share; lines are layers, all drawn in one colour scale."""
    made = []
    exact = run_sets(
        runs,
        lambda run: (
            run.result.task == "fidelity"
            and run.method == "oracle"
            and run.result.params.get("agg") == "query_head"
            and run.result.params.get("n_sink") == 0
            and run.result.params.get("local_share") == 0
            and run.result.ratio is not None
        ),
    )
    for run_set in exact:
        ordered = sorted(run_set.runs, key=budget_of_ratio)
        if len(ordered) < 2:
            continue
        xs = [100 * budget_of_ratio(run) for run in ordered]
        masses = np.array(
            [np.mean([np.array(row.fields["by_layer"]["mass"]) for row in run.rows], axis=0) for run in ordered]
        )
        picture = canvas.new("Attention on the heaviest tokens, by layer", run_set.about, ordered)
        ax = picture.axes
        n_layers = masses.shape[1]
        named = sorted({0, n_layers // 4, n_layers // 2, 3 * n_layers // 4, n_layers - 1})
        for layer in range(n_layers):
            if layer not in named:
                ax.plot(xs, 100 * masses[:, layer], color="#cccccc", linewidth=0.6)
        for i, layer in enumerate(named):
            ax.plot(xs, 100 * masses[:, layer], label=f"layer {layer}", **style.numbered(i))
        ax.set_xscale("log")
        ax.minorticks_off()
        ax.set_xticks(xs, [f"{x:g}" for x in xs])
        ax.set(xlabel="heaviest tokens of each head, % of the prompt", ylabel="attention in %")
        made.append(picture.finish())
    return made


def budget_of_ratio(run: Run) -> float:
    assert run.result.ratio is not None
    return run.result.ratio
