"""Figures of time and memory, from runs of task=latency and from ledgers.

Each function takes all runs and gives a list of figures, empty where the runs have nothing to show.

Not here: predictions for other hardware (`evals/studies/hardware.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvbench.plots import style
from kvbench.plots.figures.axes import tick
from kvbench.plots.figures.scores import variant, variants
from kvbench.plots.read import Run
from kvbench.plots.run_sets import RunSet, asked, mean, other_setting, run_sets
from kvbench.plots.style import Canvas, Picture
from kvbench.results import SampleRow

# Bytes per second over PCIe, 16 lanes, one direction, as the standards have it.
LINKS = {"PCIe 1.0": 4.0e9, "PCIe 4.0": 31.5e9, "PCIe 5.0": 63.0e9}
BATCHES = (1, 16, 128)
MOST_BARS = 7  # side by side, at each length
PARTS = (
    *("model", "attention", "search", "fetch", "append", "after"),
    *("observe", "build", "wait", "offload", "cluster"),
)


def is_timed(run: Run) -> bool:
    return run.result.task == "latency"


def timings(rows: Iterable[SampleRow], batch: int | None = None) -> dict[int, dict[str, Any]]:
    """Timings by length, of one batch size: the smallest where none is given."""
    done = [row for row in rows if row.status == "ok" and "timing" in row.fields]
    if batch is None:
        batch = min((int(row.fields["batch"]) for row in done), default=1)
    return {
        int(row.fields["length"]): row.fields["timing"]
        for row in sorted(done, key=lambda row: int(row.fields["length"]))
        if int(row.fields["batch"]) == batch
    }


def by_cache(run_set: RunSet) -> list[tuple[int, RunSet]]:
    """Runs with as large a cache on the device; full attention, which has none, is among all."""
    sizes = sorted({run.setting("cache", "tokens") or 0 for run in run_set.runs if not run.is_full})
    return [
        (size, run_set.only(lambda r, s=size: r.is_full or (r.setting("cache", "tokens") or 0) == s)) for size in sizes
    ]


def over_length(runs: Sequence[Run], canvas: Canvas, key: str, title: str, ylabel: str) -> list[Picture]:
    made = []
    for run_set in run_sets(runs, is_timed):
        for cache, here in by_cache(run_set):
            picture = canvas.new(f"{title}{f', {cache} tokens cached' if cache else ''}", run_set.about, [])
            ax = picture.axes
            tail = other_setting(here)
            for run, nth in variants([run for run in here.runs if len(timings(run.rows)) > 1]):
                found = timings(run.rows)
                xs = list(found)
                looks = style.look(run.method, nth)
                ax.plot(xs, [each[f"{key}_s"] for each in found.values()], label=variant(run, tail), **looks)
                low, high = zip(*(each[f"{key}_s_q"] for each in found.values()), strict=True)
                ax.fill_between(xs, low, high, color=looks["color"], alpha=0.12, linewidth=0)
                picture.runs.append(run)
            if len(picture.runs) > 1:
                ax.set(xlabel="tokens of the prompt", ylabel=ylabel, ylim=(0, None))
                ax.xaxis.set_major_formatter(tick)
                picture.said.append("Bands: quartiles of the repeats")
                made.append(picture.finish(columns=3))
    return made


def tt2t_vs_length(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    return over_length(runs, canvas, "tt2t", "Time to the second token", "seconds")


def tpot_vs_length(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    return over_length(runs, canvas, "tpot", "Time per token", "seconds per token")


def tpot_vs_cache(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    made = []
    for run_set in run_sets(runs, lambda run: is_timed(run) and run.method == "pqcache"):
        found: dict[int, dict[str, Any]] = {}
        drawn: list[Run] = []
        length = max((n for run in run_set.runs for n in timings(run.rows)), default=0)
        for run in run_set.runs:
            if run.result.params.get("iterations") == 10 and length in (at := timings(run.rows)):
                found.setdefault(int(run.setting("cache", "tokens") or 0), at[length])
                drawn.append(run)
        if len(found) < 2:
            continue
        picture = canvas.new(f"PQCache's time per token by cache, {tick(length)} tokens", run_set.about, drawn)
        ax = picture.axes
        sizes = sorted(found)
        for i, size in enumerate(sizes):
            y, (low, high) = 1000 * found[size]["tpot_s"], found[size]["tpot_s_q"]
            ax.bar(i, y, color=style.PALETTE[0])
            ax.errorbar(i, y, [[y - 1000 * low], [1000 * high - y]], color="black", capsize=2)
            base = 1000 * found[sizes[0]]["tpot_s"]
            if i:
                ax.annotate(
                    f"{100 * (y / base - 1):+.1f} %",
                    (i, 1000 * high),
                    ha="center",
                    xytext=(0, 3),
                    textcoords="offset points",
                    fontsize=style.SMALL,
                )
        ax.set_xticks(range(len(sizes)), [tick(size) for size in sizes])
        ax.margins(y=0.15)
        ax.grid(axis="x", visible=False)
        ax.set(xlabel="tokens of the cache", ylabel="ms per token")
        made.append(picture.finish())
    return made


def hit_rate_vs_k_cache(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    made = []
    cached = run_sets(runs, lambda run: bool(run.setting("cache", "tokens")) and not is_timed(run) and not run.is_full)
    for run_set in cached:
        found: dict[tuple[str, str, int, str], dict[int, float]] = {}
        for run in run_set.runs:
            cache = run.setting("cache")
            if run.result.cache_hit_rate is not None:
                key = (
                    run.result.method_label,
                    cache["policy"],
                    cache["tokens"],
                    asked(run),
                )
                found.setdefault(key, {})[int(cache["k_cache"])] = run.result.cache_hit_rate
        found = {key: points for key, points in found.items() if len(points) > 1}
        if not found:
            continue
        picture = canvas.new("Hit rate of the cache on the device", run_set.about, run_set.runs)
        ax = picture.axes
        for i, ((label, policy, tokens, budget), points) in enumerate(sorted(found.items())):
            xs = sorted(points)
            name = f"{label} {budget}, {policy.upper()}, {tokens} tokens"
            looks = style.numbered(i, style.DASHES[i % 2])
            ax.plot(xs, [100 * points[x] for x in xs], label=name, **looks)
        ticks = sorted({x for points in found.values() for x in points})
        ax.set_xscale("log", base=2)
        ax.minorticks_off()
        ax.set_xticks(ticks, [str(tick) for tick in ticks])
        ax.set(xlabel="blocks taken in per step (k_cache)", ylabel="hits in %")
        made.append(picture.finish(columns=2))
    return made


def stacked(runs: Sequence[Run], canvas: Canvas, key: str, title: str, whole: str) -> list[Picture]:
    """Parts of a pass by length, stacked, the time of unrecorded passes next to them."""
    made = []
    for run_set in run_sets(runs, is_timed):
        for run in sorted(run_set.runs, key=lambda run: run.folder.name):
            found = timings(run.rows)
            names = [p for p in PARTS if any(each[key].get(p) for each in found.values())]
            names += sorted({p for each in found.values() for p in each[key]} - set(PARTS))
            if run.is_full or not names:
                continue
            picture = canvas.new(f"{title}, {run.result.method_label}", settings_of(run, run_set), [run])
            ax = picture.axes
            draw_stack(ax, found, key, names)
            ys = [each[whole] for each in found.values()]
            ax.plot(
                range(len(ys)), ys, label="end to end, not recorded", color="black", marker="_",
                markersize=12, linestyle="",
            )  # fmt: skip
            ax.set_xticks(range(len(found)), [tick(n) for n in found])
            ax.set(xlabel="tokens of the prompt", ylabel="seconds")
            ax.grid(axis="x", visible=False)
            made.append(picture.finish())
    return made


HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "--", "**", "||", "OO")


def draw_stack(ax: Any, found: Mapping[int, dict[str, Any]], key: str, names: Sequence[str]) -> None:
    bottom = np.zeros(len(found))
    for i, name in enumerate(names):
        heights = np.array([float(each[key].get(name, 0.0)) for each in found.values()])
        ax.bar(
            range(len(found)), heights, bottom=bottom, label=name, width=0.6,
            color=style.PALETTE[i % 6], hatch=HATCHES[i % len(HATCHES)], edgecolor="white", linewidth=0.3,
        )  # fmt: skip
        bottom += heights


def settings_of(run: Run, run_set: RunSet) -> str:
    cache = run.setting("cache", "tokens")
    words = f"{asked(run)}, comm {run.comm}, cache {cache}"
    tail = other_setting(run_set)(run)
    return f"{run_set.about} · {words}{' · ' if tail else ''}{tail}"


def prefill_parts(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    return stacked(runs, canvas, "prefill_parts_s", "Where a prefill's time goes", "ttft_s")


def decode_parts(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    return stacked(runs, canvas, "step_parts_s", "Where a decode step's time goes", "tpot_s")


def answer_time(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """Prefill and decoding of whole answers, by length, variants side by side."""
    made = []
    for run_set in run_sets(runs, is_timed):
        chosen = [(run, nth, found) for run, nth in variants(run_set.runs) if (found := timings(run.rows))][:MOST_BARS]
        if len(chosen) < 2:
            continue
        n_new = int(run_set.runs[0].task_param("n_new") or 0)
        title = f"Time of an answer of {n_new} tokens"
        picture = canvas.new(title, run_set.about, [run for run, _, _ in chosen])
        ax = picture.axes
        lengths = sorted({n for _, _, found in chosen for n in found})
        width = 0.8 / len(chosen)
        tail = other_setting(run_set)
        for i, (run, nth, found) in enumerate(chosen):
            places = [lengths.index(n) - 0.4 + width * (i + 0.5) for n in found]
            first = [each["ttft_s"] for each in found.values()]
            rest = [(n_new - 1) * each["tpot_s"] for each in found.values()]
            color = style.look(run.method)["color"]
            ax.bar(places, first, width, color=color, alpha=0.55, hatch="///", edgecolor="white")
            ax.bar(
                places, rest, width, bottom=first, color=color, label=variant(run, tail), edgecolor="white",
                hatch=("", "...", "xx", "ooo")[nth % 4],
            )  # fmt: skip
        ax.bar([0], [0], color="#bbbbbb", hatch="///", edgecolor="white", label="striped: prefill")
        ax.set_xticks(range(len(lengths)), [tick(n) for n in lengths])
        ax.grid(axis="x", visible=False)
        ax.set(xlabel="tokens of the prompt", ylabel="seconds")
        made.append(picture.finish(columns=3))
    return made


def memory_vs_transfer(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """Bytes of K and V per token as full attention measured them, by length and batch, and their time over a link."""
    made = []
    models: dict[str, list[Run]] = {}
    for run in runs:
        if run.is_full:
            models.setdefault(run.model, []).append(run)
    for model, members in sorted(models.items()):
        rows = [row for run in members for row in run.rows if row.status == "ok"]
        points = sorted({(*kept, row.prompt_tokens) for row in rows if (kept := bytes_of(row))})
        per_token = mean(size / n for size, n, _ in points)
        if per_token is None:
            continue
        picture = canvas.new(
            "K and V by length, and their transfer",
            f"{model} · measured: {per_token / 1024:.1f} KiB per token · lines: that times length and batch",
            members,
            style.COLUMN + 1.2,
            ncols=2,
        )
        left, right = picture.axes
        lengths = np.geomspace(1000, 128_000, 30)
        for i, batch in enumerate(BATCHES):
            looks = style.numbered(i, style.DASHES[i]) | {"marker": ""}
            left.plot(lengths, batch * lengths * per_token / 2**30, label=f"batch {batch}", **looks)
        ns = [n for _, n, _ in points]
        left.plot(ns, [size / 2**30 for size, _, _ in points], "k.", markersize=3, label="measured")
        for i, (name, speed) in enumerate(LINKS.items()):
            looks = style.numbered(i + 3, style.DASHES[i]) | {"marker": ""}
            right.plot(lengths, lengths * per_token / speed, label=f"{name} x16", **looks)
        for ax in (left, right):
            ax.set_xscale("log")
            ax.set_yscale("log")
            ax.xaxis.set_major_formatter(tick)
            ax.yaxis.set_major_formatter(tick)
            ax.set_xlabel("tokens")
        left.set_ylabel("GiB")
        right.set_ylabel("seconds, batch 1")
        made.append(picture.finish())
    return made


def bytes_of(row: SampleRow) -> tuple[float, int] | None:
    """Bytes kept at 16 bits, and of how many tokens: the prompt's and all that were fed."""
    kept = row.ledger.get("bytes_resident_device")
    timing: Callable[[str], Any] = row.fields.get
    fed = 0 if timing("timing") else row.generated_tokens - 1
    if not kept or fed < 0 or timing("timing"):
        return None
    return float(kept), row.prompt_tokens + fed
