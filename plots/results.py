"""docs/hour.md: every method at several budgets, on three tasks, as a page with tables and figures made from runs.

    make hour                                     the runs, then the page
    python -m kvbench.plots.results [RUNS] [--out docs]   the page alone

The runs are those of `conf/experiment/results_*.yaml`. Nothing on the page is typed: scores, intervals and bytes come
from samples.jsonl, times from there and from env.json. Of each measure RUNS must hold one set of runs: one model, data
and dtype.

Not here: the papers' tables (`plots/tables`) and figures (`plots/figures`).
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from math import fsum, inf
from pathlib import Path

import matplotlib

from kvbench.engine.terminal import printable
from kvbench.plots import frontier, style
from kvbench.plots.command import Page
from kvbench.plots.figures.results import DEVICE, RATIO, SVG, by_family, ranked, save
from kvbench.plots.grids import MORE, Grid, Measure, device_bytes, grid_of, measure, moved_bytes
from kvbench.plots.looks import told_apart
from kvbench.plots.read import Run
from kvbench.plots.run_sets import dataset_words
from kvbench.plots.scored import Scored, compared
from kvbench.plots.stats import LEVEL
from kvbench.results import few_samples
from kvbench.results.intervals import Interval
from kvbench.results.names import STAND_INS
from kvbench.results.sheet import ABSENT, Sheet, markdown, plain_markdown

NAME = "hour"
RUNS = Path("runs/results")

SCORES = (
    Measure("Embedded texts", STAND_INS["longbench"]),
    Measure("Needle, seven digits", "needle", params={"style": "own"}),
    Measure("Needle, a name", "needle", params={"style": "own_name"}),
)
FIDELITY = (
    Measure("Recall of the true top tokens", "fidelity", measure("recall"), ylabel="recall, %", against_full=False),
    Measure("Attention mass", "fidelity", measure("mass"), ylabel="mass, %", against_full=False),
    Measure(
        "KL from full attention",
        "fidelity",
        measure("kl"),
        ylabel="nats",
        better="lower",
        highest=inf,
        against_full=False,
    ),
)


# --- tables -----------------------------------------------------------------------------------


def table(
    grid: Grid,
    said: Callable[[str, float, Scored], str],
    full: str | None = None,
    methods: Sequence[str] | None = None,
) -> str:
    """Methods down, ratios across."""
    rows = [["Full", *[full] * len(grid.ratios)]] if full else []
    for method in grid.methods if methods is None else methods:
        cells = grid.cells[method]
        rows.append([grid.labels[method], *(said(method, r, cells[r]) if r in cells else ABSENT for r in grid.ratios)])
    return markdown(Sheet(["ratio", *(f"{ratio:g}" for ratio in grid.ratios)], rows))


def spanned(mean: float | None, spread: Interval | None, measure: Measure, sign: str = "") -> str:
    if mean is None:
        return ABSENT
    form = f"{sign}.{1 if measure.scale == 100 else 3}f"
    ends = "" if spread is None else f" ({measure.scale * spread.low:{form}} to {measure.scale * spread.high:{form}})"
    return f"{measure.scale * mean:{form}}{ends}"


def score_table(grid: Grid) -> str:
    def said(method: str, ratio: float, cell: Scored) -> str:
        more = " ‡" if grid.holds_more(method, ratio) else ""
        return spanned(cell.mean, cell.interval, grid.measure) + (" †" if cell.over else "") + more

    full = grid.full if grid.measure.against_full else None
    return table(grid, said, None if full is None else spanned(full.mean, full.interval, grid.measure))


def difference_table(grid: Grid) -> str:
    """A table of each variant less full attention, sample by sample; "" without it."""
    if grid.full is None or not grid.measure.against_full:
        return ""
    places = {(method, ratio): cell for method, cells in grid.cells.items() for ratio, cell in cells.items()}
    found = compared(places, lambda name: grid.full)

    def said(method: str, ratio: float, cell: Scored) -> str:
        one = found.get((method, ratio))
        if one is None:
            return ABSENT
        return spanned(one.paired.mean, one.paired.difference, grid.measure, "+") + (" *" if one.sign else "")

    few = few_samples(max((one.paired.n for one in found.values()), default=0), len(found)) if found else ""
    return table(grid, said) + (f"\n\nNo * can stand here: {few}, with {len(found)} comparisons." if few else "")


def device_table(grid: Grid) -> str:
    full = None if grid.full is None else scaled(device_bytes(grid.full), 1e-6)
    return table(grid, lambda method, ratio, cell: scaled(device_bytes(cell), 1e-6), full)


def moved_table(grid: Grid) -> str:
    """Table of the methods that move anything; the others stand below it."""
    moving = [name for name in grid.methods if any(moved_bytes(cell) for cell in grid.cells[name].values())]
    still = ["Full", *(grid.labels[name] for name in grid.methods if name not in moving)]
    found = table(grid, lambda method, ratio, cell: scaled(moved_bytes(cell), 1e-3), methods=moving)
    return f"{found}\n\nNothing moves in {plain_markdown(', '.join(still))}."


def scaled(n_bytes: float | None, by: float) -> str:
    return ABSENT if n_bytes is None else f"{n_bytes * by:,.1f}"


# --- how long it took -------------------------------------------------------------------------


def read_seconds(runs: Sequence[Run]) -> float:
    """Seconds of all prefills; one that variants shared counts once."""
    return fsum(spent for _, spent in {(row.prompt_sha256, row.prefill_s or 0.0) for run in runs for row in run.rows})


def times(grids: Sequence[Grid], runs: Sequence[Run]) -> str:
    """A line for each set of runs that shared their prefills."""
    lines = []
    for title, group in experiments(grids, runs):
        found = [run.environment() for run in group]
        starts, ends = ([at for env in found if (at := moment(env.get(key)))] for key in ("started", "ended"))
        spent = (max(ends) - min(starts)).total_seconds() if starts and ends else None
        cpu = max((env["cpu_s"] for env in found if isinstance(env.get("cpu_s"), int | float)), default=None)
        reading = minutes(read_seconds(group))
        lines.append([title, str(len(group)), str(len(group[0].rows)), reading, minutes(spent), minutes(cpu)])
    head = ["task", "runs", "samples", "reading, min", "start to end, min", "CPU, min"]
    return markdown(Sheet(head, lines))


def moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def minutes(value: float | None) -> str:
    return ABSENT if value is None else f"{value / 60:,.1f}"


def experiments(grids: Sequence[Grid], runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    done: set[str] = set()
    for grid in grids:
        group = [run for run in runs if grid.measure.has(run)]
        key = f"{grid.measure.task} {grid.measure.params}"
        if key not in done:
            done.add(key)
            yield "Fidelity" if grid.measure in FIDELITY else grid.measure.title, group


def machine(runs: Sequence[Run]) -> str:
    """Processor, cores and versions, as the runs recorded them."""
    seen: dict[str, None] = {}
    for run in runs:
        env = run.environment()
        if env:
            seen[f"{env.get('cpu')}, {env.get('n_cores')} cores, {env.get('ram_bytes', 0) / 2**30:.0f} GB"] = None
    versions = sorted({(name, version) for run in runs for name, version in run.result.versions.items()})
    chosen = [f"{name} {version}" for name, version in versions if name in ("python", "torch", "transformers")]
    commits = sorted({(run.result.git_sha or "unknown")[:10] for run in runs})
    return f"{'; '.join(seen) or 'unknown'}. {', '.join(chosen)}. Commit {', '.join(commits)}."


# --- the page ---------------------------------------------------------------------------------

HEAD = """\
# What the harness shows in an hour

Every method of the harness at {n_ratios} budgets, on three small tasks that need no download. The model is small and so
are the samples, so hardly a difference is shown; [results](results.md) asks fewer methods more samples. `make hour`
makes the runs and this page, in these steps:

    python run.py -m experiment=results_longbench out=runs/results
    python run.py -m experiment=results_needle out=runs/results
    python run.py -m experiment=results_fidelity out=runs/results
    python -m kvbench.plots.results runs/results --out docs

A ratio is the share of the prompt's tokens that a query head may attend to at a decode step: tokens, not bytes. Every
method has its default settings{presets}. In parentheses stand 95 % intervals over samples.

- `(C)`: the method drops tokens for good, and gets more of them in return ([fair budgets](fair-budgets.md)).
- `*`: a difference to full attention that is shown: paired by sample, p below {level:.0%} after Holm's correction over
  the table. A table with too few samples for any says so.
- `†`: the run's ledger exceeded its budget.
- `‡`: on the device it holds more than {more:g} times the ratio's share of the full cache's bytes: an index, what a
  first stage keeps, or layers left whole.
- `-`: was not run.
"""
BYTES = """\
## Bytes

Of the runs of {title}: {about}. Means over samples, at 16 bits an element, as the ledger has them. On the device, MB:

{device}

Moved per decode step, KB: K and V of the chosen tokens, and what was read to find them:

{moved}
"""
TIMES = """\
## How long it took

The variants of a task share one prefill per sample, except those with a prefill of their own, and decode in as few
batches as memory allows. Reading is the wall time of the shared prefill, summed over samples; the rest went into what
variants build of the prompt and into their steps. Start to end and CPU time (of all threads) are those of the process
that finished the task: what a stopped sweep had done before is not in them. Wall times include waiting for other work
of the machine.

{times}

{machine}
"""


def page(grids: Sequence[Grid], runs: Sequence[Run], pictures: Mapping[str, str]) -> str:
    presets = sorted(
        {
            f"{plain_markdown(run.result.method_label)} those of `{printable(run.result.method).replace('`', '')}`"
            for run in runs
            if run.is_preset
        }
    )
    n_ratios = max(len(grid.ratios) for grid in grids)
    parts = [
        HEAD.format(n_ratios=n_ratios, level=LEVEL, more=MORE, presets=f", {', '.join(presets)}" if presets else "")
    ]
    parts += [section(grid, pictures) for grid in grids]
    first = grids[0]
    parts.append(
        BYTES.format(
            title=first.measure.title,
            about=plain_markdown(first.about),
            device=device_table(first),
            moved=moved_table(first),
        )
    )
    parts.append(TIMES.format(times=times(grids, runs), machine=plain_markdown(machine(runs))))
    return "\n".join(parts)


def slug(title: str) -> str:
    return re.sub("[^a-z0-9]+", "-", title.lower()).strip("-")


def section(grid: Grid, pictures: Mapping[str, str]) -> str:
    n = max(cell.n for cells in grid.cells.values() for cell in cells.values())
    better = "" if grid.measure.better == "higher" else " · lower is better"
    names = dataset_words(grid.runs)
    which = f" · {names}" if names else ""
    parts = [f"## {grid.measure.title}", f"{plain_markdown(grid.about + which)} · n = {n}{better}"]
    own = slug(grid.measure.title)
    parts += [f"![{words}]({NAME}/{name}.svg)" for name, words in pictures.items() if name.startswith(f"{own}-")]
    parts.append(score_table(grid))
    if found := difference_table(grid):
        parts += ["Δ: the difference to full attention on the same samples:", found]
    return "\n\n".join(parts) + "\n"


def write(out: Path, runs: Sequence[Run]) -> list[Path]:
    """The page and its figures; nothing where no run is of a measure."""
    scores, fidelity = ([grid for one in some if (grid := grid_of(one, runs))] for some in (SCORES, FIDELITY))
    grids = [*scores, *fidelity]
    if not grids and not frontier.tables(runs):
        return []
    folder = out / NAME
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, str] = {}
    with matplotlib.rc_context({**style.RC, **SVG}), told_apart(run.method for run in runs):
        for grid in grids:
            base, title = slug(grid.measure.title), grid.measure.title
            drawn = {f"{base}-order": ranked(f"{title}: methods in the order of their scores", grid)}
            drawn[f"{base}-families"] = by_family(f"{title}: families against the budget in tokens", grid, RATIO)
            if grid in scores:
                drawn[f"{base}-bytes"] = by_family(f"{title}: families against bytes", grid, DEVICE)
            for name, picture in drawn.items():
                save(picture, folder / f"{name}.svg")
                pictures[name] = picture.title
        in_bytes = frontier.pictures(runs)
        for name, picture in in_bytes.items():
            save(picture, folder / f"{name}.svg")
    mine = {run.folder for grid in grids for run in grid.runs}
    used = [run for run in runs if run.folder in mine]
    path = out / f"{NAME}.md"
    by_bytes = frontier.part(runs, [f"{NAME}/{name}" for name in in_bytes])
    by_tokens = page(grids, used, pictures) if grids else "# What the harness shows in an hour\n"
    path.write_text("\n".join(filter(None, (by_tokens, by_bytes))), encoding="utf-8")
    return [path, *(folder / f"{name}.svg" for name in [*pictures, *in_bytes])]


NOTHING = "{} has no runs for the page; make hour makes them"
main = Page("kvbench.plots.results", "Write docs/hour.md from runs.", write, NOTHING, runs=RUNS).main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
