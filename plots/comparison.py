"""Methods against full attention on the same samples: one table for the terminal, one picture.

Runs of each task are compared with that task's run of full attention, sample by sample. What is called lower or higher
is so by the test that is corrected for all comparisons with it on those samples.

Not here: many budgets, models or benchmarks side by side (`plots/tables/`, `plots/figures/`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, nan
from pathlib import Path
from typing import Any

import matplotlib

from kvbench.plots import style
from kvbench.plots.figures.chart import Chart, Scale
from kvbench.plots.figures.chart import draw as draw_chart
from kvbench.plots.looks import told_apart
from kvbench.plots.read import Run, read_one
from kvbench.plots.run_sets import asked
from kvbench.plots.scored import Scored, compared
from kvbench.plots.stats import Corrected, scaled
from kvbench.plots.style import Canvas
from kvbench.results import METRICS, RunResult
from kvbench.results.names import own_tasks, without_length
from kvbench.results.sheet import Sheet, show

STAR = "*"  # a difference that the test shows


@dataclass(frozen=True)
class Row:
    """A method: its run of each task, and how it differs from full attention there."""

    label: str
    method: str
    runs: dict[str, Run]  # by task, as readers call it
    scores: dict[str, Scored]  # of each run
    against: dict[str, Corrected]  # by task; without those of full attention itself

    def device_share(self, full: "Row") -> float | None:
        """K and V on the device, relative to full attention's, mean over tasks."""
        return ratio_of(self, full, "bytes_resident_device")

    def moved_share(self, full: "Row") -> float | None:
        """Bytes moved to the device per step, relative to what full attention holds there."""
        pairs = [(moved(self.runs[task]), size(full.runs[task])) for task in full.runs if task in self.runs]
        return fsum(a / b for a, b in pairs if b) / len(pairs) if pairs else None


@dataclass(frozen=True)
class Comparison:
    tasks: list[str]
    rows: list[Row]  # full attention first

    @property
    def full(self) -> Row:
        return self.rows[0]


def compare(folders: Sequence[Path]) -> Comparison:
    """The runs in these folders; full attention is among them for each task, and each method once."""
    runs = sorted((read_one(folder) for folder in folders), key=lambda run: not run.is_full)
    full = {run.result.shown_task: run for run in runs if run.is_full}
    budgets = {asked(run) for run in runs if not run.is_full}
    by_label: dict[str, dict[str, Run]] = {}
    for run in runs:
        label, task = run.result.method_label, run.result.shown_task
        if len(budgets) > 1 and not run.is_full:
            label = f"{label} {asked(run)}"
        by_label.setdefault(label, {})[task] = run
    places = {
        (label, task): Scored.of(run.rows, by_sample=True)
        for label, own in by_label.items()
        for task, run in own.items()
    }
    whole = {task: Scored.of(run.rows, by_sample=True) for task, run in full.items()}
    variants = {name: place for name, place in places.items() if not by_label[name[0]][name[1]].is_full}
    tested = compared(variants, lambda name: whole[name[1]], lambda name: name[1])
    rows = []
    for label, own in by_label.items():
        here = {task: found for (name, task), found in tested.items() if name == label}
        rows.append(Row(label, next(iter(own.values())).method, own, {task: places[label, task] for task in own}, here))
    return Comparison(list(dict.fromkeys(run.result.shown_task for run in runs)), rows)


def is_comparable(results: Sequence[RunResult]) -> bool:
    """Whether one table can hold them: alike but for task, method and budget, full attention and another per task."""
    shared = {(r.model, r.dtype, r.device, r.seed, r.prefill) for r in results}
    tasks = {r.shown_task for r in results}
    protocols = {(r.shown_task, r.protocol) for r in results}
    variants = [(r.shown_task, r.method_label, r.ratio_exact, r.budget, r.memory_exact) for r in results]
    with_full = {r.shown_task for r in results if r.method == "full"}
    is_alike = len(shared) == 1 and len(protocols) == len(tasks)
    return is_alike and len(set(variants)) == len(variants) and with_full == tasks


def size(run: Run) -> float:
    return run.result.bytes_resident_device or 0.0


def moved(run: Run) -> float:
    return (run.result.bytes_moved_kv_per_step or 0.0) + (run.result.bytes_moved_meta_per_step or 0.0)


def ratio_of(row: Row, full: Row, key: str) -> float | None:
    """A figure relative to full attention's, mean over the tasks that both have."""
    pairs = [(getattr(row.runs[task].result, key), getattr(full.runs[task].result, key)) for task in full.runs]
    found = [a / b for a, b in pairs if a is not None and b]
    return fsum(found) / len(found) if found else None


# --- the table -----------------------------------------------------------------------------------


def table(found: Comparison) -> Sheet:
    """A row per method, a block of columns per task, and what it costs."""
    heads = ["method"]
    for task in found.tasks:
        # A word a line: names are wider than scores.
        heads += ["\n".join([*name_of(task).split(), "score"]), f"n = {n_of(found, task)}\nΔ vs Full"]
        heads += ["95 % of Δ"] if has_intervals(found, task) else []
    rows = []
    for row in found.rows:
        cells = [cell for task in found.tasks for cell in cells_of(row, task)[: 2 + has_intervals(found, task)]]
        rows.append([row.label, *cells, percent(row.device_share(found.full)), percent(row.moved_share(found.full))])
    return Sheet([*heads, "KV on\ndevice", "moved\n/step"], rows, about=about(found), notes=remarks(found))


def has_intervals(found: Comparison, task: str) -> bool:
    """Whether any difference has one: few samples have none."""
    return any(task in row.against and not row.against[task].few for row in found.rows)


def cells_of(row: Row, task: str) -> tuple[str, str, str]:
    """Score, of few samples in hits, difference with a star where the test shows one, and its interval."""
    run, found = row.runs.get(task), row.against.get(task)
    scale = 1 if run is None else METRICS[run.result.metric or "score"].scale
    score = "-" if run is None or run.result.score is None else f"{scale * run.result.score:.1f}"
    score = score if run is None else row.scores[task].hits or score
    if found is None:
        return score, "", ""
    spread = None if found.few else scaled(found.paired.difference, scale)
    ends = "-" if spread is None else f"{spread.low:+.1f} to {spread.high:+.1f}"
    return score, f"{scale * found.paired.mean:+.1f} {STAR if found.sign else ' '}", ends


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def n_of(found: Comparison, task: str) -> int:
    """Samples: turns of one do not count apart."""
    runs = [row.runs[task] for row in found.rows if task in row.runs]
    return max((len({line.sample_id for line in run.rows}) for run in runs), default=0)


def name_of(task: str) -> str:
    """The head of its columns: which length was asked is the same for all of them."""
    base, _ = without_length(task)
    return own_tasks()[base].title if base in own_tasks() else base.replace("_", " ")


def about(found: Comparison) -> str:
    """What all runs share."""
    run = next(run for row in found.rows[::-1] for run in row.runs.values())
    result = run.result
    budgets = {asked(run): None for row in found.rows[1:] for run in row.runs.values()}
    return f"{result.model} · {', '.join(budgets)} · comm {run.comm} · {result.dtype} · seed {result.seed}"


def remarks(found: Comparison) -> list[str]:
    """How to read the table, and what so few samples cannot show."""
    families = sorted({one.family for row in found.rows for one in row.against.values() if not one.few})
    star = (
        f"; {STAR} the paired test shows it (p < 0.05 after Holm's correction for {' or '.join(map(str, families))} "
        "comparisons a task)"
    )
    lines = [
        "scores are 0 to 100; Δ vs Full: the difference to full attention on the same samples"
        + (star if families else ""),
        "KV on device, moved /step: keys, values and index, as a share of all keys and values of full attention",
    ]
    for task in found.tasks:
        few = dict.fromkeys(row.against[task].few for row in found.rows if task in row.against)
        lines += [f"{name_of(task)}: {words}" for words in few if words]
    free = [row.label for row in found.rows if any(run.result.bytes_searched_per_step for run in row.runs.values())]
    if free:
        lines.append(f"{', '.join(free)} reads every key to find its tokens: an upper reference, no compression")
    return lines


def made_otherwise(found: Comparison, here: Mapping[str, Any]) -> list[str]:
    """What the sums of these runs were added up with that differs between them, or from what is `here`."""
    runs = list({run.folder: run for row in found.rows for run in row.runs.values()}.values())
    made = [arithmetic for run in runs if isinstance(arithmetic := run.environment().get("arithmetic"), dict)]
    apart = {}
    for key in sorted({key for each in (*made, here) for key in each}):
        there = list(dict.fromkeys(str(each.get(key)) for each in made))
        if there and there != [str(here.get(key))]:
            apart[key] = there
    if not apart:
        return []
    words = [f"{key} {' and '.join(there)} (here {here.get(key)})" for key, there in apart.items()]
    return [
        f"these runs were made with other arithmetic: {'; '.join(words)}; sums in another order can change single "
        "answers, above all in bfloat16, so the same comparison made here need not give the same figures"
    ]


def print_comparison(found: Comparison) -> None:
    """Print a comparison to standard output."""
    show(table(found))


# --- the picture ---------------------------------------------------------------------------------


SHARES = Scale("% of full attention's", "log", (0.8, 130), (1, 10, 100))
COSTS = "keys and values"


def draw(found: Comparison, folder: Path, name: str = "comparison") -> Path:
    """A panel of scores per task, and one of what is held and moved: the PNG's path."""
    n, names = len(found.tasks), [row.label for row in found.rows]
    chart = Chart(
        "Scores, and what they cost", Scale(kind="names", names=names),
        [*(Scale("score", "", (-3, 103), (0, 50, 100)) for _ in found.tasks), SHARES],
        0.7 + 0.25 * len(names), style.PAGE, columns=n + 1, share=True, flat=True, ratios=[*[1.0] * n, 1.25],
    )  # fmt: skip
    rows = [row for task in found.tasks for row in scores_of(found, task)]
    shares = [(row.device_share(found.full), row.moved_share(found.full)) for row in found.rows]
    with matplotlib.rc_context(Canvas().rc), told_apart(row.method for row in found.rows):
        for row, of in zip(found.rows, shares, strict=True):
            for share, line, mark in zip(of, ("on the device", "moved per step"), ("points", "hollow"), strict=True):
                own = {"panel": COSTS, "line": line, "mark": mark, "look": style.look(row.method)["color"]}
                rows.append(own | {"x": row.label, "y": 100 * share if share else nan})
        picture = draw_chart(chart, rows, Canvas(), about(found))
        picture.note("Bars: 95 % intervals of scores, from n = 20 on; dotted: full attention")
        ax = picture.axes[-1]
        for at, (word, of) in {1.28: ("held", 0), 1.56: ("moved", 1)}.items():
            ax.text(at, 1.02, word, transform=ax.transAxes, ha="right", va="bottom", fontsize=style.SMALL)
            for i, each in enumerate(shares):
                across = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "center"}
                ax.text(at, i, percent(each[of] or (None if of else 0.0)), fontsize=style.SMALL, **across)
        return style.save(picture.finish(), folder, name, ["png"])[0]


def scores_of(found: Comparison, task: str) -> Iterator[dict[str, Any]]:
    """Scores with their intervals; a line down from full attention's."""
    for row in found.rows:
        run = row.runs.get(task)
        if run is None or run.result.score is None:
            continue
        place, scale = row.scores[task], METRICS[run.result.metric or "score"].scale
        # From the samples: folders of earlier runs have intervals of another kind.
        bounds = None if place.few else scaled(place.interval, scale)
        own = {"panel": f"{name_of(task)}, n = {n_of(found, task)}", "y": scale * run.result.score, "look": row.method}
        ends = {} if bounds is None else {"low": bounds.low, "high": bounds.high}
        yield own | ends | {"x": row.label, "mark": "points"}
        if row is found.full:
            yield own | {"mark": "level"}
