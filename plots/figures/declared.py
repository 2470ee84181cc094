"""The figures of the papers: of which runs each is, by what these are split, and what stands on its axes.

A figure's `rows` turn a part of the runs into rows of a chart; many share one and differ in what is declared here.
Costs are measured: a point outside its budget is open and a note says why. The Oracle is no method that could be
deployed: a line of its own kind, in no front.

Not here: which runs share a figure and their values (`plots/figures/rows.py`), drawing (`plots/figures/chart.py`).
"""
# pyright: basic

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf, nan
from statistics import fmean
from typing import Any

import numpy as np

from kvbench.plots import style
from kvbench.plots.figures.chart import HATCHES, Chart, Scale, draw, shortened, tick
from kvbench.plots.figures.rows import (
    AXES,
    Axis,
    Data,
    Part,
    Row,
    as_lines,
    front_of,
    mean_of,
    nested,
    points,
    timed,
)
from kvbench.plots.run_sets import FRONT_SAID, other_setting
from kvbench.plots.scored import places
from kvbench.plots.style import SCORE, Canvas, Picture
from kvbench.results import few_samples
from kvbench.results.intervals import ANYWHERE

OUTPUT_ERROR: Any = {"value": "measures.output_error", "limits": (0.0, inf)}
N_PANELS = 16  # datasets
N_MAPS = 24
N_BARS = 7  # side by side, at each length
N_REQUESTS = 8
BARS = "95 % intervals over samples, as in docs/intervals.md; none of one sample"
# Bytes per second over PCIe, 16 lanes, one direction, as the standards have it.
LINKS = {"PCIe 1.0": 4.0e9, "PCIe 4.0": 31.5e9, "PCIe 5.0": 63.0e9}
BATCHES = (1, 16, 128)
PARTS = (
    *("model", "attention", "search", "fetch", "append", "after"),
    *("observe", "build", "wait", "offload", "cluster"),
)
WHOLE = {"prefill_parts_s": "timing.ttft_s", "step_parts_s": "timing.tpot_s"}
PROMPT, NAMES = Scale("tokens of the prompt"), Scale("tokens of the prompt", "names")
SECONDS = Scale("seconds")
LAYER = Scale("layer")


@dataclass(frozen=True)
class Drawn:
    """The rows of one picture, and what is said next to them."""

    rows: Sequence[Row]
    chart: Chart
    about: str = ""  # besides what all runs share
    notes: Sequence[str] = ()
    said: Sequence[str] = ()
    runs: Iterable[str] = ()  # that rows do not name


@dataclass(frozen=True)
class Figure:
    """One kind of figure and the experiments that make its runs."""

    name: str
    needs: str  # what runs
    experiments: tuple[str, ...]
    runs: str  # a query of `facts`
    chart: Chart  # its title may name facts and the axis
    rows: "Callable[[Figure, Part, Canvas, Data], Drawn | None]"
    split: tuple[str, ...] = ()  # a figure for each value of these facts
    outer: int = 0  # how many of them go before the order of sets
    by_set: bool = True  # whether the runs of a figure are of one set; else full attention is in no part of a split
    axis: str = ""  # the cost on the x axis
    is_choosable: bool = False  # whether another axis can be asked for
    facet: str = ""
    has_front: bool = False
    fewest: tuple[int, int] = (1, 1)  # lines, and points of a line
    # What `plain` draws:
    value: str = "value"  # column of the frame
    source: tuple[str, ...] = ()  # where lists and dictionaries of samples hold it
    by: tuple[str, ...] = ()  # columns by which values are apart, besides the run
    x: str = ""  # one of these, or a fact
    line: str = ""  # words of facts and columns; "": a method's own line
    scale: float = 1
    mark: str = "line"
    more: "Callable[[Figure, Part, list[Row]], Drawn | None] | None" = None  # what is drawn besides

    @property
    def missing(self) -> str:
        commands = [
            f"    python run.py -m experiment={name}    (scale=smoke: minutes, embedded model and data)"
            for name in self.experiments
        ]
        return "\n".join([f"{self.name}: not drawn, no runs of {self.needs}; make some with", *commands])

    def axes(self, canvas: Canvas) -> list[Axis]:
        names = canvas.axis if self.is_choosable and canvas.axis else self.axis
        return [AXES[name] for name in names.split("+")] if names else []

    def draw(self, data: Data, canvas: Canvas) -> list[Picture]:
        """A picture for each part of the runs that has something to show."""
        made = list[Picture]()
        for part in data.parts(self.runs, self.split, self.outer, self.by_set):
            words = {"given": "numbers of tokens" if part.at.get("by_tokens") else "ratios"}
            words["axis"] = " ".join(axis.words for axis in self.axes(canvas)[:1])
            words["held"] = f", {part.at['cached']} tokens cached" if part.at.get("cached") else ""
            title = self.chart.title.format(**(part.at | words))
            drawn = self.rows(replace(self, chart=replace(self.chart, title=title)), part, canvas, data)
            made += [self.picture(part, drawn, canvas, data)] if drawn is not None else []
        return made

    def picture(self, part: Part, drawn: Drawn, canvas: Canvas, data: Data) -> Picture:
        folders = dict.fromkeys([*(row["run"] for row in drawn.rows if "run" in row), *drawn.runs])
        runs = [run for run in data.runs if str(run.folder) in folders]
        about = drawn.about if not self.by_set else f"{part.run_set.about}{drawn.about}"
        picture = draw(drawn.chart, drawn.rows, canvas, about, runs)
        picture.note(*drawn.notes)
        picture.said += drawn.said
        out = [fact["label"] for run, fact in part.facts.items() if run not in folders and not fact["full"]]
        if out and self.fewest[1] > 1:
            picture.said.append(f"Not drawn: {len(out)} of the runs ({shortened(out)}), too few points for a line")
        return picture.finish(drawn.chart.legend)


def plain(figure: Figure, part: Part, canvas: Canvas, data: Data) -> Drawn | None:
    """Means of the declared value by run and the declared columns, a line for each of the declared words."""
    samples = nested(part.run_set.runs, *figure.source) if figure.source else part.samples
    is_timed = "timing" in (*figure.source, figure.value.partition(".")[0])
    samples = timed(samples) if is_timed else samples
    if figure.value not in samples or samples.empty:
        return None
    limits = None if figure.value == "score" else ANYWHERE
    found, spread = places(samples, ["run", *figure.by], figure.value, limits), dict[tuple[Any, ...], float]()
    for end in ("q1", "q3") if is_timed else ():
        ends = mean_of(samples, ["run", *figure.by], f"{figure.value}_{end}", figure.scale)
        spread |= {(*key, end): y for key, y in ends.items()}
    counts = Counter(run for run, *_ in found)
    own = dict(part.variants(run for run, n in counts.items() if n >= figure.fewest[1]) if not figure.line else ())
    lines, ranks = dict[Any, dict[Any, Row]](), dict[Any, tuple[Any, ...]]()
    for run in [*own] or part.facts:
        for key, place in reversed(found.items()):  # of several lengths that are no x the longest
            if key[0] != run or (y := replace(place, by_sample=True).mean) is None:
                continue
            own_keys = dict(zip(figure.by, key[1:], strict=True))
            fact = part.facts[run] | own_keys
            rank = PARTS.index(fact["name"]) if fact.get("name") in PARTS else len(PARTS)
            words = figure.line.format(**fact).strip()
            line = own.get(run, {"line": words})
            row = own_keys | {"x": fact[figure.x], "y": figure.scale * y, "run": run, "mark": figure.mark}
            row |= {end: spread[*key, q] for q, end in (("q1", "low"), ("q3", "high")) if (*key, q) in spread}
            lines.setdefault((line["line"], line.get("nth")), {}).setdefault(row["x"], row | line)
            ranks.setdefault((line["line"], line.get("nth")), () if own else (fact["size"], rank, words))
    order = sorted(lines, key=lambda line: ranks[line])
    kept = [lines[line] for line in order if len(lines[line]) >= figure.fewest[1]]
    kept = [line for line in kept if any(row["y"] for row in line.values())]
    rows = [
        {"nth": nth, "hatch": HATCHES[nth % len(HATCHES)]} | line[x]
        for nth, line in enumerate(kept)
        for x in sorted(line)
    ]
    if len(kept) < figure.fewest[0] or not rows:
        return None
    said = ["Bands: quartiles of the repeats"] if figure.chart.band and spread else []
    return figure.more(figure, part, rows) if figure.more else Drawn(rows, figure.chart, said=said)


# --- scores by cost ------------------------------------------------------------------------------


def by_cost(figure: Figure, part: Part, canvas: Canvas, data: Data) -> Drawn | None:
    """A line per method; a panel per dataset, or one for each of several axes, with full attention as a level."""
    axes, has_level = figure.axes(canvas), bool(figure.facet) or "+" in figure.axis
    is_error = len(axes) > 1 and part.run_set.task == "fidelity"
    if figure.axis == "footprint":
        entries = mean_of(part.samples, ["run"], "footprint_entries")
        axes = [replace(axes[0], unit=y) for (run,), y in entries.items() if part.facts[run]["full"] and y][:1]
    comms = {fact["comm"] for fact in part.facts.values() if not fact["full"]}

    def tail(run: str) -> str:
        words = "" if len(axes) > 1 else part.tails[run]
        return words if has_level or len(comms) == 1 else f"{words} comm {part.facts[run]['comm']}".strip()

    rows, others = list[Row](), list[Row]()
    for axis in axes:
        found = points(part, axis, figure.facet, **(OUTPUT_ERROR if is_error else {}))
        here = [row for row in as_lines(part, found, tail, figure.fewest[1]) if not has_level or row["look"] != "full"]
        shown = [*dict.fromkeys(row["panel"] for row in here)][:N_PANELS]
        here = [row for row in here if row["panel"] in shown]
        more = levels_of(part, found, shown) if has_level and not is_error else []
        if figure.has_front and axis is axes[0]:
            more += front_of(part, here, "lower" if is_error else "higher")
        panel = {"panel": axis.label} if len(axes) > 1 else {}
        rows, others = [*rows, *(row | panel for row in here)], [*others, *(row | panel for row in more)]
    apart = "look" if figure.has_front and not has_level else "line"
    if len({row[apart] for row in rows} - {"oracle"}) < figure.fewest[0]:
        return None
    scales = [Scale(axis.label, "cost") for axis in axes]
    chart = replace(figure.chart, x=scales if len(scales) > 1 else scales[0])
    if is_error:
        chart = replace(chart, title=chart.title.replace("Score", "Output error"), y=Scale("output error", "log"))
    counts, notes = [row["n"] for row in rows], list[str]()
    if any(row["look"] == "oracle" for row in rows):
        hidden = f"; {axes[0].hides} is not on the axis" if axes[0].hides else ""
        notes.append(f"Oracle: tokens by their true attention; no bound on scores{hidden}")
    is_compared = any(not part.facts[row["run"]]["full"] for row in rows)
    notes += [few] if is_compared and (few := few_samples(min(counts))) else []
    said = [f"n {' to '.join(map(str, sorted({min(counts), max(counts)})))} samples a point", f"Bars: {BARS}"]
    said += [FRONT_SAID] if any(row["mark"] == "front" for row in others if "mark" in row) else []
    said += [lengths(part)] if figure.axis == "footprint" else []
    return Drawn([*rows, *others], chart, notes=notes, said=said)


def levels_of(part: Part, found: Sequence[Row], panels: Iterable[str]) -> list[Row]:
    """Full attention's score as a level of each panel."""
    full = {row["panel"]: row for row in reversed(found) if part.facts[row["run"]]["full"]}
    level = {"x": nan, "line": "Full", "look": "full", "mark": "level", "why": ""}
    return [full[panel] | level for panel in panels if panel in full]


def lengths(part: Part) -> str:
    """How long answers are, in words."""
    ended = part.samples[part.samples["status"] == "ok"]
    said = [
        f"{part.facts[run]['label']}{'' if part.facts[run]['full'] else ' ' + part.facts[run]['asked']} {tokens:.0f}"
        for run, tokens in ended.groupby("run", sort=False, observed=True)["generated_tokens"].mean().items()
    ]
    return f"Tokens of an answer: {', '.join(said)}"


# --- what is drawn besides plain lines and bars ------------------------------------------------------


def allocation(figure: Figure, part: Part, means: list[Row]) -> Drawn:
    """Tokens per layer, a line per request, the mean above them."""
    requests = [*nested(part.run_set.runs, *figure.source).groupby("sample", sort=False)]
    rows = list[Row]()
    for i, (_, one) in enumerate(requests[:N_REQUESTS]):
        name = f"{min(len(requests), N_REQUESTS)} of {len(requests)} requests" if i == 0 else ""
        own = {"line": name, "mark": "faint", "look": style.PALETTE[5], "group": str(i)}
        rows += [own | {"x": x, "y": y} for x, y in zip(one["at"], one["value"], strict=True)]
    level = {"y": fmean(row["y"] for row in means), "line": "uniform", "look": "full", "mark": "level"}
    asked = part.facts[means[0]["run"]]["asked"]
    return Drawn([*rows, *means, level], replace(figure.chart, title=f"{figure.chart.title}, {asked}"))


def some_layers(figure: Figure, part: Part, rows: list[Row]) -> Drawn:
    """Five layers in colours, the others grey."""
    n_layers = 1 + max(row["at"] for row in rows)
    named = sorted({0, n_layers // 4, n_layers // 2, 3 * n_layers // 4, n_layers - 1})
    grey = {"mark": "faint", "line": ""}
    faint = [row | grey | {"group": str(row["at"])} for row in rows if row["at"] not in named]
    return Drawn([*faint, *(row | {"nth": named.index(row["at"])} for row in rows if row["at"] in named)], figure.chart)


def by_cache(figure: Figure, part: Part, rows: list[Row]) -> Drawn | None:
    """What each size of the cache saves, at the longest prompt."""
    length = max(row["length"] for row in rows)
    rows = [row for row in rows if row["length"] == length]
    saved = [f"{100 * (row['y'] / rows[0]['y'] - 1):+.1f} %" for row in rows]
    title = f"PQCache's time per token by cache, {tick(length)} tokens"
    rows = [rows[0], *(row | {"words": words} for row, words in zip(rows[1:], saved[1:], strict=True))]
    return Drawn(rows, replace(figure.chart, title=title)) if len(rows) > 1 else None


def stacked(figure: Figure, part: Part, rows: list[Row]) -> Drawn:
    """The time of unrecorded passes next to that of their parts."""
    (run,) = part.runs
    whole = mean_of(timed(part.samples), ["length"], WHOLE[figure.source[-1]])
    own = {"line": "end to end, not recorded", "look": "full", "mark": "dash"}
    fact, cache = part.facts[run], part.runs[run].setting("cache", "tokens")
    tail = other_setting(part.whole)(part.runs[run])
    about = f" · {fact['asked']}, comm {fact['comm']}, cache {cache}{' · ' if tail else ''}{tail}"
    marks = [own | {"x": n, "y": y} for (n,), y in whole.items()]
    return Drawn([*rows, *marks], replace(figure.chart, title=f"{figure.chart.title}, {fact['label']}"), about)


def transfer(figure: Figure, part: Part, canvas: Canvas, data: Data) -> Drawn | None:
    """Bytes of K and V per token as full attention measured them, by length and batch, and their time over a link."""
    rows = part.samples[part.samples["status"] == "ok"]
    if "bytes_resident_device" not in rows:
        return None
    if "timing.ttft_s" in rows:
        rows = rows[rows["timing.ttft_s"].isna()]
    rows = rows[(rows["bytes_resident_device"] > 0) & (rows["generated_tokens"] > 0)]
    columns = (rows[name] for name in ("bytes_resident_device", "prompt_tokens", "generated_tokens"))
    sizes = sorted({(float(size), int(n + new - 1), int(n)) for size, n, new in zip(*columns, strict=True)})
    if not sizes:
        return None
    per_token = fsum(size / n for size, n, _ in sizes) / len(sizes)
    ns = np.geomspace(1000, 128_000, 30)
    lines = [*((f"batch {batch}", "bytes", batch / 2**30) for batch in BATCHES)]
    lines += [(f"{name} x16", "transfer", 1 / speed) for name, speed in LINKS.items()]
    made: list[Row] = [
        {"panel": panel, "line": line, "nth": nth, "mark": "rule", "x": n, "y": n * per_token * factor}
        for nth, (line, panel, factor) in enumerate(lines)
        for n in ns
    ]
    dot = {"panel": "bytes", "line": "measured", "look": "full", "mark": "points"}
    made += [dot | {"x": n, "y": size / 2**30} for size, n, _ in sizes]
    about = f"{part.at['model']} · measured: {per_token / 1024:.1f} KiB per token · lines: that times length and batch"
    return Drawn(made, figure.chart, about, runs=part.runs)


# --- points and bars -------------------------------------------------------------------------------


def scores_of(part: Part) -> dict[str, Row]:
    """Each run's score with its interval."""
    return {row["run"]: row | {"why": ""} for row in points(part)}


def iterations(figure: Figure, part: Part, canvas: Canvas, data: Data) -> Drawn | None:
    """The score of each number of rounds of clustering against its time to the second token."""
    timing, scores = data.query("task == 'latency' and who == 'pqcache'"), scores_of(part)
    samples = data.samples(timing) if timing else part.samples[:0]
    seconds = mean_of(samples[samples["status"] == "ok"], ["run"], "timing.tt2t_s")
    times = {data.facts[run]["rounds"]: (run, x) for (run,), x in seconds.items()}
    of = {fact["rounds"]: run for run, fact in part.facts.items() if run in scores and fact["rounds"] in times}
    ordered = sorted(of, key=lambda word: float(word) if word.isdecimal() else inf)
    rows = [
        scores[of[word]] | {"x": times[word][1], "line": f"T = {word}", "nth": i, "mark": "points"}
        for i, word in enumerate(ordered)
    ]
    return Drawn(rows, figure.chart, runs=[times[word][0] for word in ordered]) if len(rows) > 1 else None


def against_retention(figure: Figure, part: Part, canvas: Canvas, data: Data) -> Drawn | None:
    """The score against mean retention, the total of tokens being the same."""
    means, scores = mean_of(part.samples, ["run"], "report.r_avg"), scores_of(part)
    rows = [scores[run] | {"x": x, "mark": "points"} for (run,), x in means.items() if run in scores]
    return Drawn(rows, figure.chart) if len({row["x"] for row in rows}) >= figure.fewest[1] else None


def code_sizes(figure: Figure, part: Part, canvas: Canvas, data: Data) -> Drawn | None:
    """The score of each size of codes, a panel per dataset."""
    m, b, nominal = (mean_of(part.samples, ["run"], f"report.{key}") for key in ("m", "b", "comm_nominal"))
    found, bars = points(part, None, "dataset"), dict[tuple[str, Any], Row]()
    for row in (row for row in found if (row["run"],) in m):
        size, is_dear = (int(m[row["run"],]), int(b[row["run"],])), nominal.get((row["run"],), 0) > 1 / 128 + 1e-9
        own = {"nth": 5, "hatch": "///"} if is_dear else {"nth": 0}
        own |= {"line": f"codes cost {'more than 1/128' if is_dear else '1/128 at most'}", "mark": "bar", "why": ""}
        bars[row["panel"], (size[0] * size[1], size)] = row | own | {"x": "{}x{}".format(*size)}
    panels = Counter(panel for panel, _ in bars)
    rows = [bars[at] for at in sorted(bars, key=lambda at: at[1]) if panels[at[0]] > 1]
    if not rows:
        return None
    title = figure.chart.title.replace("PQCache", f"PQCache on {rows[0]['panel']}" if len(panels) == 1 else "PQCache")
    return Drawn([*rows, *levels_of(part, found, panels)], replace(figure.chart, title=title))


def answer_time(figure: Figure, part: Part, canvas: Canvas, data: Data) -> Drawn | None:
    """Prefill and decoding of whole answers, by length, variants side by side."""
    samples = timed(part.samples)
    first, step = (mean_of(samples, ["run", "length"], f"timing.{key}_s") for key in ("ttft", "tpot"))
    chosen = [*part.variants(run for run, _ in first)][:N_BARS]
    if len(chosen) < 2:
        return None
    n_new = int(part.run_set.runs[0].task_param("n_new") or 0)
    lengths_ = sorted({n for run, n in first if run in dict(chosen)})
    rows = list[Row]()
    for run, line in chosen:
        for n in (n for n in lengths_ if (run, n) in first):
            own = {"x": n, "group": run, "mark": "bar", "run": run, "look": line["look"]}
            rows.append(own | {"y": first[run, n], "hatch": "///", "mark": "pale bar"})
            hatch = ("", "...", "xx", "ooo")[line["nth"] % 4]
            rows.append(own | {"y": (n_new - 1) * step[run, n], "line": line["line"], "hatch": hatch})
    striped = {"line": "striped: prefill", "look": "#BBBBBB", "hatch": "///", "group": chosen[0][0], "mark": "bar"}
    rows.append(striped | {"x": lengths_[0], "y": 0.0})
    return Drawn(rows, replace(figure.chart, title=f"Time of an answer of {n_new} tokens"))


# --- heat maps -------------------------------------------------------------------------------------


def needles(figure: Figure, part: Part, canvas: Canvas, data: Data) -> Drawn | None:
    """A panel per method, the score at each length and depth; beside each name its mean score."""
    samples = part.samples.dropna(subset=["length", "depth"]) if "depth" in part.samples else part.samples[:0]
    overall, tokens = scores_of(part), mean_of(samples, ["run", "length"], "prompt_tokens")
    chosen: dict[str, str] = {}
    for run in sorted(part.facts, key=lambda run: (not part.facts[run]["full"], part.facts[run]["label"], run)):
        chosen.setdefault(f"{part.facts[run]['label']} {part.tails[run]}".strip(), run)
    if len(chosen) < 2 or samples.empty:
        return None
    cells, rows = places(samples, ["run", "depth", "length"]), list[Row]()
    for name, run in [*chosen.items()][:N_MAPS]:
        panel = f"{name}: {overall[run]['y']:.0f}" if run in overall else name
        rows += [
            {"panel": panel, "x": n, "y": depth, "value": np.nan if place.mean is None else 100 * place.mean}
            | {"words": tick(round(tokens[run, n])), "mark": "cell", "run": run}
            for (of, depth, n), place in cells.items()
            if of == run
        ]
    n_columns = canvas.columns(len({row["panel"] for row in rows}), 1.6)
    said = ["Lengths are those of the prompts, in tokens; beside each name its mean score"]
    return Drawn(rows, replace(figure.chart, width=1.0 + 1.7 * n_columns, columns=n_columns), said=said)


def profile(figure: Figure, part: Part, canvas: Canvas, data: Data) -> Drawn | None:
    """The attention of the last tokens by layer and place, for the first sample that was profiled."""
    for run in sorted(part.runs.values(), key=lambda run: run.folder.name):
        for line in run.rows:
            if found := (line.fields.get("method_report") or {}).get("w"):
                weights = np.array(found)
                shares = np.maximum(100 * weights / np.maximum(weights.sum(1, keepdims=True), 1e-12), 1e-2)
                width = 100 / shares.shape[1]
                rows: list[Row] = [
                    {"x": (j + 0.5) * width, "y": float(i), "value": value, "mark": "cell"}
                    for (i, j), value in np.ndenumerate(shares)
                ]
                return Drawn(rows, figure.chart, " · first sample", runs=part.runs)
    return None


# --- all of them -----------------------------------------------------------------------------------

COST, SCORES = Scale("", "cost"), Scale(SCORE)
PANELS: Any = {"x": COST, "y": SCORES, "height": 1.9}
XKV = "who == 'xkv' and scored"
EXACT = (
    "task == 'fidelity' and who == 'oracle' and by_share and `method.agg` == 'query_head' and `method.n_sink` == 0 "
    "and `method.local_share` == 0"
)
FIGURES = (
    Figure("score_vs_ratio", "two budgets or more",
           ("pqcache_figure10a", "pqcache_figure10c", "clusterkv_figure9", "xkv_figure11", "xkv_figure12"), "scored",
           Chart("Score by {axis}, budgets given as {given}, comm {comm}", **PANELS), by_cost,
           split=("by_tokens", "comm"), outer=1, axis="attended", is_choosable=True, facet="dataset", fewest=(1, 2)),
    Figure("frontier", "byte budgets", ("formats_docs", "formats_needle"),
           "(task == 'fidelity' or scored) and (full or by_bytes)", Chart("Score against the {axis}", COST,
           Scale("mean score, 0 to 100"), 2.8, width=6.75, columns=2, legend=3, share=True, titled=False), by_cost,
           axis="share+reads", fewest=(2, 1), has_front=True),
    Figure("score_vs_comm", "two values of comm or more", ("pqcache_figure10d",), "scored",
           Chart("Score by {axis}, {asked}", **PANELS), by_cost, split=("asked",), axis="find", facet="dataset",
           fewest=(1, 2)),
    Figure("mxb_bars", "PQCache with several m and b", ("pqcache_figure10b",), "who in ('pqcache', 'full') and scored",
           Chart("PQCache by parts x bits, {asked}", Scale("parts x bits, by bits in all", "names"), SCORES),
           code_sizes, split=("asked",)),
    Figure("needle_heatmaps", "a needle by two methods", ("pqcache_figure9",), "task == 'needle'",
           Chart("A needle by length and depth, {asked}, comm {comm}", Scale("tokens", "names"), Scale("depth in %"),
           1.6, colour=(SCORE, 0, 100, False)), needles, split=("by_tokens", "size", "asked", "comm")),
    Figure("tt2t_vs_length", "several lengths", ("pqcache_figure11a",), "task == 'latency'",
           Chart("Time to the second token{held}", PROMPT, Scale("seconds", limits=(0, None)), legend=3, band=True),
           plain, split=("cached",), fewest=(2, 2), value="timing.tt2t_s", by=("length",), x="length"),
    Figure("tpot_vs_length", "several lengths", ("pqcache_figure11b", "clusterkv_figure13a", "clusterkv_figure13b"),
           "task == 'latency'",
           Chart("Time per token{held}", PROMPT, Scale("seconds per token", limits=(0, None)), legend=3, band=True),
           plain, split=("cached",), fewest=(2, 2), value="timing.tpot_s", by=("length",), x="length"),
    Figure("tpot_vs_cache", "several caches", ("pqcache_figure11c",),
           "task == 'latency' and who == 'pqcache' and `method.iterations` == 10",
           Chart("", Scale("tokens of the cache", "names"), Scale("ms per token")), plain, value="timing.tpot_s",
           by=("length",), x="cached", line=" ", scale=1000, mark="bar", more=by_cache),
    Figure("hit_rate_vs_k_cache", "several values of k_cache", ("pqcache_figure11d",),
           "cached > 0 and task != 'latency' and not full", Chart("Hit rate of the cache on the device",
           Scale("blocks taken in per step (k_cache)", "log2"), Scale("hits in %"), legend=2), plain, fewest=(1, 2),
           value="cache_hit_rate", x="k_cache", scale=100, line="{label} {asked}, {policy}, {cached} tokens"),
    Figure("prefill_parts", "time by part", ("pqcache_figure8", "pqcache_figure12a"), "task == 'latency' and not full",
           Chart("Where a prefill's time goes", NAMES, SECONDS), plain, split=("run",),
           source=("timing", "prefill_parts_s"), by=("name", "length"), x="length", line="{name}", mark="bar",
           more=stacked),
    Figure("decode_parts", "time by part", ("pqcache_figure12b",), "task == 'latency' and not full",
           Chart("Where a decode step's time goes", NAMES, SECONDS), plain, split=("run",),
           source=("timing", "step_parts_s"), by=("name", "length"), x="length", line="{name}", mark="bar",
           more=stacked),
    Figure("answer_time", "time by length", ("clusterkv_figure12",), "task == 'latency'",
           Chart("", NAMES, SECONDS, legend=3), answer_time),
    Figure("iterations", "several rounds of clustering, scored and timed",
           ("pqcache_figure12c", "pqcache_figure12c_latency"), "who == 'pqcache' and scored",
           Chart("Rounds of clustering: score against time", Scale("time to the second token in s"), SCORES),
           iterations, split=("but_rounds",)),
    Figure("recall_vs_budget", "recall at several budgets", ("clusterkv_figure11a", "clusterkv_figure11b"),
           "task == 'fidelity' and not full",
           Chart("Share of the true top tokens that are attended to", COST, Scale("recall in %", limits=(0, 102))),
           by_cost, split=("by_tokens",), axis="attended", is_choosable=True, fewest=(2, 2)),
    Figure("perplexity_vs_length", "perplexity", ("clusterkv_figure10",), "task == 'pg19'",
           Chart("Perplexity by length", Scale("tokens read"), Scale("perplexity")), plain, value="score",
           by=("length",), x="length"),
    Figure("xkv_retention", "XKV with uniform allocation", ("xkv_figure3",),
           f"{XKV} and `method.allocation` == 'uniform'",
           Chart("Retention per layer, all layers alike", LAYER, Scale("retention", limits=(0, None))), plain,
           source=("method_report", "retention"), by=("at",), x="at", line="{asked}"),
    Figure("xkv_tokens_at_retention", "XKV with profiles", ("xkv_figure4",), XKV,
           Chart("Tokens per layer for the same retention", LAYER, Scale("tokens", limits=(0, None))), plain,
           source=("method_report", "n_at_retention"), by=("name", "at"), x="at", line="retention {name}"),
    Figure("xkv_allocation", "XKV with exact allocation", ("xkv_figure10",),
           f"{XKV} and `method.allocation` == 'exact'",
           Chart("Tokens per layer, request by request", LAYER, Scale("tokens besides the window", limits=(0, None))),
           plain, split=("run",), source=("method_report", "n"), by=("at",), x="at", line="mean of all",
           more=allocation),
    Figure("xkv_ddid", "XKV with profiles", ("xkv_figure2",), XKV, Chart("Where the last tokens look, by layer",
           Scale("place in the prompt in %"), LAYER, 2.3, colour=("% of the layer's attention", None, None, True)),
           profile),
    Figure("xkv_score_vs_retention", "XKV with several allocations", ("xkv_figure5",), XKV,
           Chart("Score against mean retention, {asked}", Scale("mean retention over layers"), SCORES),
           against_retention, split=("asked",), fewest=(1, 3)),
    Figure("attention_distribution", "exact mass by budget", ("pqcache_figure6",), EXACT,
           Chart("Attention on the heaviest tokens, by layer",
           Scale("heaviest tokens of each head, % of the prompt", "each"), Scale("attention in %")), plain,
           fewest=(1, 2), source=("by_layer", "mass"), by=("at",), x="percent", line="layer {at}", scale=100,
           more=some_layers),
    Figure("memory_vs_transfer", "full attention", ("pqcache_figure1",), "full",
           Chart("K and V by length, and their transfer", Scale("tokens", "powers"), (Scale("GiB", "powers"),
           Scale("seconds, batch 1", "powers")), width=4.7, columns=2, titled=False), transfer, split=("model",),
           by_set=False),
    Figure("score_vs_footprint", "two budgets of prompt and answer, and full attention", ("answers",),
           "scored and (full or by_answers)", Chart("Score by {axis}", **PANELS), by_cost, axis="footprint",
           facet="dataset", fewest=(1, 2)),
    Figure("pareto", "three methods or more", ("pqcache_table2", "clusterkv_table1", "xkv_table3"),
           "scored and better == 'higher'", Chart("Score against {axis}", COST, Scale(f"mean {SCORE}"), 2.5), by_cost,
           axis="device", is_choosable=True, fewest=(2, 1), has_front=True),
)  # fmt: skip
BY_NAME = {figure.name: figure for figure in FIGURES}
