"""Pages from their templates, and the files beside them: the same answers make the same bytes.

A template gets `page`, what it asks; `frame`, the answers; `tasks`, these by set. It may call all of `columns.py`,
`fixed.py`, `queries.py`, `methods.py` and `words.py`.

Not here: the command (`__main__.py`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvbench.engine.foreign import write_csv
from kvbench.plots import style
from kvbench.plots.pages import columns, fixed, methods, queries, words
from kvbench.plots.pages.asked import FULL, HERE, SCOPES, At, page, size
from kvbench.plots.pages.columns import Column, Frame, Task, tasks
from kvbench.plots.pages.figure import SVG, picture, save
from kvbench.plots.pages.read import KEPT, keep, load, of_runs, renewed, typed
from kvbench.plots.scored import Scored
from kvbench.plots.stats import is_bound
from kvbench.results.intervals import LEVEL
from kvbench.results.sheet import plain_markdown

PAGES = {
    "results": ["results"],
    "which-method": ["results", "cited"],
    "cited": ["cited"],
    "register": ["register"],
    "formats": ["formats"],
}
FIGURES = ("results", "formats")  # pages with a figure and a table of all numbers for each task
HEADS = (
    "scope", "share of bytes", "method", "n", "score", "low", "high", "difference to full", "difference low",
    "difference high", "p", "p after Holm", "only below", "compared", "best rank", "worst rank",
    "bytes held, share of full", "answer in tokens", "cut off",
)  # fmt: skip


def environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    made.filters |= {"md": lambda text: plain_markdown(str(text)), "code": words.code}
    for library in (columns, fixed, methods, queries, words):
        made.globals |= vars(library)
    made.globals |= {"FULL": FULL, "LEVEL": LEVEL, "SCOPES": SCOPES, "at_of": At}
    return made


class Answers:
    """The answers below a folder, each file read once for all pages."""

    def __init__(self, out: Path) -> None:
        self.out, self.known = out, dict[str, tuple[Frame, tuple[Task, ...]]]()

    def of(self, name: str) -> tuple[Frame, tuple[Task, ...]]:
        if name not in self.known:
            frame = typed(load(self.out / name / KEPT))
            self.known[name] = frame, tasks(page(name), frame)
        return self.known[name]

    def has(self, name: str) -> bool:
        return (self.out / name / KEPT).exists()


def text(name: str, answers: Answers) -> str:
    """A page; the answers of a second page, which stand on it too, may be missing."""
    first, *others = PAGES[name]
    frame, found = answers.of(first)
    beside = {other: answers.of(other)[1] if answers.has(other) else () for other in others}
    return environment().get_template(f"{name}.md.j2").render(page=page(name), frame=frame, tasks=found, **beside)


def write(names: Sequence[str], out: Path, runs: Path | None) -> list[Path]:
    """The pages that are named, or all whose answers are there; of runs, whatever page their answers change too."""
    if runs is not None:
        changed = renew(out, runs, [*dict.fromkeys(source for name in names or PAGES for source in PAGES[name])])
        more = [name for name, (first, *_) in PAGES.items() if first in changed]
        names = [*dict.fromkeys((*names, *more))] if names else []
    answers = Answers(out)
    names = names or [name for name, (first, *_) in PAGES.items() if answers.has(first)]
    if not names:
        raise ValueError(f"{out} has no answers of a page; give runs")
    return [path for name in names for path in write_one(name, answers)]


def renew(out: Path, runs: Path, sources: Sequence[str]) -> list[str]:
    """Keep the answers of runs; which pages' they are. ValueError where there are none, before anything is replaced."""
    found = {name: rows for name in sources if len(rows := of_runs(runs, name))}
    if not found:
        raise ValueError(f"{runs} holds no sample of a run of these pages: {', '.join(sources)}")
    for name, rows in found.items():
        path = out / name / KEPT
        keep(path, renewed(load(path) if path.exists() else rows[:0], rows, name))
    return [*found]


def write_one(name: str, answers: Answers) -> Iterator[Path]:
    path = answers.out / f"{name}.md"
    path.write_text(text(name, answers), encoding="utf-8")
    yield path
    if name in FIGURES:
        yield from beside(answers.of(name)[1], answers.out / name)


def beside(every: Sequence[Task], folder: Path) -> Iterator[Path]:
    """A figure and a table of all numbers for each task."""
    with matplotlib.rc_context({**style.RC, **SVG}):
        for task in every:
            if task.is_comparable:
                if not task.asked.others_of:
                    save(picture(task), folder / f"{task.asked.key}.svg")
                    yield folder / f"{task.asked.key}.svg"
                write_csv(folder / f"{task.asked.key}.csv", HEADS, numbers(task))
                yield folder / f"{task.asked.key}.csv"


def numbers(task: Task) -> Iterator[list[Any]]:
    for column in task.columns:
        asked = column.at.asked
        head = [SCOPES[column.at.protocol], f"{float(size(asked)):g}"]
        full = [*head, "Full", column.n, *ends(column.full)]
        yield [*full, *[""] * 9, 1, *words.lengths(column, FULL)]
        for name in task.methods:
            if name in column.of:
                mine = [words.label(task, column.at, name), column.n, *ends(column.of[name])]
                yield [*head, *mine, *against(task, column, name), *column.ranks[name], *costs(column, name)]


def ends(place: Scored) -> list[str]:
    spread = place.interval
    both = ["", ""] if spread is None else [f"{100 * end:.1f}" for end in (spread.low, spread.high)]
    return [f"{100 * (place.mean or 0.0):.1f}", *both]


def against(task: Task, column: Column, method: str) -> list[str]:
    found = task.against_full[column.at, method]
    spread = found.paired.difference
    both = ["", ""] if spread is None else [f"{100 * end:.1f}" for end in (spread.low, spread.high)]
    below = ["p"] * is_bound(found.paired.p) + ["p after Holm"] * found.is_bound
    p = f"{found.paired.p:.4g}", f"{found.p:.4g}", ", ".join(below)
    return [f"{100 * found.paired.mean:.1f}", *both, *p, str(found.family)]


def costs(column: Column, method: str) -> list[str]:
    return [f"{column.held(method):.3g}", *words.lengths(column, method)]
