"""Pages from their templates, and the files beside them: the same answers make the same bytes.

A template gets `page`, what it asks; `frame`, the answers; `tasks`, these by set. It may call all of `calls.py`,
`columns.py`, `fixed.py`, `queries.py`, `methods.py` and `words.py`.

Not here: the command (`__main__.py`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvbench.engine.foreign import write_csv
from kvbench.plots import style
from kvbench.plots.pages import calls, columns, fixed, methods, queries, words
from kvbench.plots.pages.asked import FLOOR, FULL, HERE, SCOPES, At, page, share, size
from kvbench.plots.pages.columns import Column, Frame, Task, tasks
from kvbench.plots.pages.figure import SVG, heat, kept, save
from kvbench.plots.pages.queries import costs
from kvbench.plots.pages.read import KEPT, keep, load, of_runs, renewed, typed
from kvbench.plots.stats import is_bound
from kvbench.results.intervals import LEVEL, Interval
from kvbench.results.sheet import plain_markdown

PAGES = {
    "results": ["results", "register"],
    "register": ["register", "results"],
    "formats": ["formats"],
    "calls": ["calls", "register"],
}
HEADS = (
    "scope", "share of bytes", "method", "n", "score", "low", "high", "share kept", "kept low", "kept high",
    "difference to full", "difference low", "difference high", "p", "p after Holm", "only below", "compared",
    "p to random after Holm", "bytes held, share of full", "host bytes", "prefill peak bytes", "bytes to find a step",
    "bytes fetched a step",
    "share of the published index", "answer in tokens", "cut off",
)  # fmt: skip


def environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    made.filters["md"] = lambda text: plain_markdown(str(text))
    for library in (calls, columns, fixed, methods, queries, words):
        made.globals |= vars(library)
    made.globals |= {
        "FULL": FULL,
        "FLOOR": FLOOR,
        "LEVEL": LEVEL,
        "SCOPES": SCOPES,
        "at_of": At,
        "share": share,
        "page_of": page,
    }
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
    frame, _ = answers.of(PAGES[name][0])
    register = fixed.registered(page("register"), answers.of("register")[0]) if answers.has("register") else []
    template = environment().get_template(f"{name}.md.j2")
    return template.render(page=page(name), frame=frame, tasks=every(name, answers), register=register)


def every(name: str, answers: Answers) -> list[Task]:
    """The sets that have answers, of all files that a page stands on."""
    return [task for source in PAGES[name] if answers.has(source) for task in answers.of(source)[1]]


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
    if name == "calls":
        yield from beside_calls(answers)
    elif name != "register":  # whose sets have their pages beside docs/results.md
        yield from beside(name, answers)


def beside(name: str, answers: Answers) -> Iterator[Path]:
    """A picture and a table of all numbers for each set; beside docs/results.md a page too."""
    of, folder, found = page("results"), answers.out / name, every(name, answers)
    with matplotlib.rc_context({**style.RC, **SVG}):
        for task in found:
            base = folder / task.asked.key
            save(heat(task, of.more["pictures"]["heat"]), base.with_suffix(".svg"), has_ground=True)
            write_csv(base.with_suffix(".csv"), HEADS, numbers(task))
            yield from (base.with_suffix(".svg"), base.with_suffix(".csv"))
            if name == "results":
                words = environment().get_template("task.md.j2").render(page=of, task=task)
                base.with_suffix(".md").write_text(words, encoding="utf-8")
                yield base.with_suffix(".md")
            if name == "results" and task.asked.key == of.more["first"]:
                taken = costs(of, answers.of(name)[0])
                save(kept(task, taken, of.more["pictures"]["kept"]), folder / "kept.svg")
                yield folder / "kept.svg"


def beside_calls(answers: Answers) -> Iterator[Path]:
    """The figure of what became of calls, and its numbers."""
    found, base = calls.of_calls(every("calls", answers)), answers.out / "calls" / "calls"
    with matplotlib.rc_context({**style.RC, **SVG}):
        save(calls.picture(found), base.with_suffix(".svg"))
    write_csv(base.with_suffix(".csv"), calls.HEADS, calls.numbers(found))
    yield from (base.with_suffix(".svg"), base.with_suffix(".csv"))


def numbers(task: Task) -> Iterator[list[Any]]:
    for column in task.columns:
        asked = column.at.asked
        head = [SCOPES[column.at.protocol], f"{float(size(asked)):g}" if "tokens" not in asked else asked]
        for name, place in column.of.items():
            called = "Full" if name == FULL else words.label(task, column.at, name)
            yield [*head, called, column.n, *scaled(place.mean, place.interval), *lead(column, name),
                   *against(task, column, name), *taken_by(column, name)]  # fmt: skip


def scaled(mean: float | None, spread: Interval | None) -> list[str]:
    ends = ["", ""] if spread is None else [f"{100 * end:.1f}" for end in (spread.low, spread.high)]
    return [f"{100 * (mean or 0.0):.1f}", *ends]


def lead(column: Column, method: str) -> list[str]:
    """What is kept of full attention's lead over random tokens, with its ends."""
    found, ends = column.share(method), column.ends(method)
    if found is None or method in (FULL, column.floor):
        return [""] * 3
    return [f"{100 * found:.1f}", *([""] * 2 if ends is None else [f"{100 * end:.1f}" for end in ends])]


def against(task: Task, column: Column, method: str) -> list[str]:
    """The difference to full attention, and the p of that to random tokens."""
    if method == FULL:
        return [""] * 8
    found = task.against_full[column.at, method]
    below = ["p"] * is_bound(found.paired.p) + ["p after Holm"] * found.is_bound
    p = f"{found.paired.p:.4g}", f"{found.p:.4g}", ", ".join(below)
    floor = column.told_from_floor.get(method)
    of_floor = "" if floor is None else f"{floor.p:.4g}"
    return [*scaled(found.paired.mean, found.paired.difference), *p, str(found.family), of_floor]


def taken_by(column: Column, method: str) -> list[str]:
    held = column.held(method)
    keys = (
        *("bytes_resident_host", "bytes_prefill_peak", "bytes_index_read_per_step", "moved_bytes_per_step"),
        "index_share",
    )
    means = [column.cost(method, key) for key in keys]
    said = ["" if mean is None else f"{mean:.4g}" for mean in means]
    return ["" if held is None else f"{held:.3g}", *said, *words.lengths(column, method)]
