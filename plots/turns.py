"""Scores of samples with several turns: by turn, and of each mode side by side.

    python -m kvbench.plots.turns [RUNS] [--out outputs/turns]

The table has a row for each method and mode, so that a method's questions inside and outside of what it compressed
stand below each other, and what its first turn and its later ones score less full attention's on the same samples: a
method that falls after the first question differs in the later ones alone. A figure has a panel for each mode and a
line for each method; another has the same less full attention's score at that turn, the drift of a cache that is kept.
Intervals (95 %) are over samples: turns of one sample are not independent of each other. Few samples have none in the
table.

Not here: runs whose samples have one question each (`plots/table.py`).
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean

from kvbench.plots.command import Page
from kvbench.plots.figures.chart import Chart, Scale, written
from kvbench.plots.figures.rows import Data, Row
from kvbench.plots.read import Run
from kvbench.plots.scored import Scored, joined, places
from kvbench.plots.stats import Paired, scaled
from kvbench.plots.style import PAGE, SCORE
from kvbench.results.intervals import few_samples, interval
from kvbench.results.sheet import Sheet, as_csv, markdown
from kvbench.results.sheet import write as write_texts

MODES = ("query_aware", "independent", "golden", "dialogue")
MOST_INTERVALS = 8  # of a panel, that can be told apart
WIDTH = 0.3  # of a turn, over which lines stand next to each other, so that their intervals can be seen
CHART = Chart(
    "Score against turn", Scale("turn", "whole"), Scale(SCORE, limits=(-3, 103)), 2.8, PAGE, legend=3, share=True,
    titled=True,
)  # fmt: skip
DRIFT = replace(CHART, title="Score less full attention's, by turn", y=Scale("score, Δ vs Full"))
Point = tuple[float, list[float] | None]  # a mean, and its interval


def with_turns(runs: Sequence[Run]) -> list[Run]:
    """Runs whose lines are turns, method by method, each in the order of modes."""
    found = [run for run in runs if any("turn" in row.fields for row in run.rows)]
    methods = list(dict.fromkeys(run.result.method_label for run in found))
    return sorted(
        found,
        key=lambda run: (
            run.result.task, run.result.dataset, run.model, not run.is_full,
            methods.index(run.result.method_label), budget_of(run), mode_rank(run), run.result.protocol,
        ),
    )  # fmt: skip


def mode_rank(run: Run) -> int:
    mode = run.result.protocol.partition(",")[0]
    return MODES.index(mode) if mode in MODES else len(MODES)


def budget_of(run: Run) -> str:
    result = run.result
    if run.is_full:
        return ""
    asked = f"budget {result.budget}" if result.ratio_exact is None else f"ratio {result.ratio_exact}"
    asked = asked if result.memory_exact is None else result.asked
    return f"{asked}, comm {run.comm}"


def by_turn(run: Run) -> dict[int, Scored]:
    """The scores of each turn."""
    samples = Data([run]).samples([run])
    found = places(samples[samples["score"].notna()], ["turn"]) if "turn" in samples else {}
    return {int(turn): replace(place, by_sample=True) for (turn,), place in sorted(found.items()) if turn != ""}


def less_full(run: Run, full: Run | None, is_first: bool) -> Point | None:
    """The mean score of the first turn, or of all others, less full attention's on the same samples."""
    if full is None or run is full:
        return None
    ours, theirs = (of_samples(one, is_first) for one in (run, full))
    differences = [score - theirs[sample] for sample, score in ours.items() if sample in theirs]
    if not differences:
        return None
    found = None if few_samples(len(differences)) else interval(differences, (-1.0, 1.0))
    return fmean(differences), None if found is None else [found.low, found.high]


def lost(ours: Mapping[int, Scored], full: Mapping[int, Scored]) -> dict[int, Paired]:
    """The scores of each turn less full attention's on the same samples."""
    pairs = {turn: place.against(full[turn]) for turn, place in ours.items() if turn in full}
    return {turn: pair for turn, pair in pairs.items() if pair is not None}


def of_samples(run: Run, is_first: bool) -> dict[str, float]:
    """Samples' scores in the first turn, or in all others."""
    chosen = [place for turn, place in by_turn(run).items() if (turn == 1) == is_first]
    return replace(joined(chosen), by_sample=True).values.get("", {}) if chosen else {}


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that one table can hold: of one task, its data, and one model."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        result = run.result
        title = f"{result.shown_dataset} ({result.data_source} data), {run.model}"
        found.setdefault(f"{title}, seed {result.seed}", []).append(run)
    return found


def sheet_of(title: str, runs: Sequence[Run]) -> Sheet:
    turns = sorted({turn for run in runs for turn in by_turn(run)})
    full = {run.result.protocol: run for run in runs if run.is_full}
    head = ["method", "budget", "mode", "samples", "score", "95 %", *(f"turn {turn}" for turn in turns)]
    head += ["turn 1, Δ vs Full", "later turns, Δ vs Full"]
    lines = []
    for run in runs:
        found, place = by_turn(run), Scored.of(run.rows, by_sample=True)
        spread = None if place.few else scaled(place.interval, 100)
        ends = "-" if spread is None else f"{spread.low:.1f} to {spread.high:.1f}"
        score = "-" if run.result.score is None else place.hits or f"{100 * run.result.score:.1f}"
        n = len({row.sample_id for row in run.rows})
        cells = [f"{100 * (found[turn].mean or 0):.1f}" if turn in found else "-" for turn in turns]
        words = [run.result.method_label, budget_of(run) or "-", run.result.protocol, str(n), score, ends, *cells]
        words += [in_words(less_full(run, full.get(run.result.protocol), is_first)) for is_first in (True, False)]
        lines.append(words)
    return Sheet(head, lines, title=title)


def in_words(point: Point | None) -> str:
    if point is None:
        return "-"
    mean, ends = point
    return f"{100 * mean:+.1f}" + ("" if ends is None else f" ({100 * ends[0]:+.1f} to {100 * ends[1]:+.1f})")


def draw(title: str, runs: Sequence[Run], folder: Path, name: str, is_drift: bool = False) -> list[Path]:
    """Score, or drift, by turn, a panel a mode; lines stand next to each other, so that intervals can be seen."""
    full = {run.result.protocol: by_turn(run) for run in runs if run.is_full}
    runs = [run for run in runs if not is_drift or (run.result.protocol in full and not run.is_full)]
    if not runs:
        return []
    budgets = list(dict.fromkeys(budget_of(run) for run in runs if not run.is_full))
    panels: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (mode_rank(run), run.result.protocol)):
        panels.setdefault(run.result.protocol, []).append(run)
    few = all(len(drawn) <= MOST_INTERVALS for drawn in panels.values())
    rows = list[Row]()
    for mode, drawn in panels.items():
        seen = Counter[str]()
        for i, run in enumerate(drawn):
            label = f"{run.result.method_label} {budget_of(run) if len(budgets) > 1 else ''}".strip()
            line = {"panel": mode, "line": label, "look": run.method, "nth": seen[run.method]}
            seen[run.method] += 1
            turns = by_turn(run)
            for turn, place in (lost(turns, full[mode]) if is_drift else turns).items():
                ends = place.difference if isinstance(place, Paired) else place.interval
                ends = ends if len(drawn) <= MOST_INTERVALS else None
                spread = {} if ends is None else {"low": 100 * ends.low, "high": 100 * ends.high}
                beside = WIDTH * (i / max(1, len(drawn) - 1) - 0.5)
                rows.append(line | spread | {"x": turn + beside, "y": 100 * (place.mean or 0)})
    about = f"{title}, {budgets[0]}" if len(budgets) == 1 else title
    note = "Vertical lines: 95 % intervals over samples" if few else "Intervals are in turns.csv"
    return written(replace(DRIFT if is_drift else CHART, columns=len(panels)), rows, about, runs, folder, name, note)


def write(runs: Sequence[Run], out: Path) -> list[Path]:
    """turns.md, turns.csv, and two figures for each group."""
    sets = groups(runs)
    records = [
        {"set": title, "method": run.result.method_label, "budget": budget_of(run), "mode": run.result.protocol}
        | {"turn": turn, "score": place.mean}
        | {end: place.interval and float(getattr(place.interval, end)) for end in ("low", "high")}
        for title, each in sets.items()
        for run in each
        for turn, place in by_turn(run).items()
    ]
    page = "\n".join(markdown(sheet_of(title, each)) for title, each in sets.items())
    drawn = [draw(title, each, out, f"turns-{i}") for i, (title, each) in enumerate(sets.items(), 1)]
    drawn += [draw(title, each, out, f"drift-{i}", is_drift=True) for i, (title, each) in enumerate(sets.items(), 1)]
    return [*write_texts(out, "turns", {"md": page, "csv": as_csv(records)}), *chain(*drawn)]


def write_page(out: Path, runs: Sequence[Run]) -> list[Path]:
    """Table and figures; nothing without samples of several turns."""
    found = with_turns(runs)
    return write(found, out) if found else []


NOTHING = "no run below {} has samples with several turns"
main = Page("kvbench.plots.turns", (__doc__ or "").partition("\n")[0], write_page, NOTHING, "outputs/turns").main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
