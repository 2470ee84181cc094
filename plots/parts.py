"""Parts of a score against the share of tokens that is kept: which kinds of instruction fall first.

    python -m kvbench.plots.parts [RUNS] [--out outputs/parts]

A task may leave a table in a run's folder whose lines are parts of its score: a name, how many answers had it, and the
share of them that was right, by one column or more (`instructions.csv` of ifeval_system: strict and loose). Each method
has a panel for each such column, a part is a line, and full attention is its last point, at 1. A part of few answers is
in the table alone.

Not here: scores of whole samples (`plots/figures/declared.py`), turns (`plots/turns.py`).
"""

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from io import StringIO
from itertools import chain
from pathlib import Path

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import read_text, write_csv
from kvbench.plots.command import Page
from kvbench.plots.figures.chart import Chart, Scale, written
from kvbench.plots.read import Run
from kvbench.plots.style import PAGE
from kvbench.results import share_interval

TABLES = ("instructions.csv",)
FEWEST = 5  # answers of a part that is drawn
CHART = Chart(
    "Parts of the score against the share kept", Scale("share of tokens kept"),
    Scale("share right", limits=(-0.03, 1.03)), 2.0, PAGE, legend=3, share=True,
)  # fmt: skip
MOST = 1_000_000  # answers that an interval can be of


@dataclass(frozen=True)
class Part:
    """One line of a run's table."""

    name: str
    n: int
    right: dict[str, float]  # by column


def parts_of(run: Run) -> list[Part]:
    """The lines of a run's tables of parts, [] where it has none; `ValueError` where one is damaged."""
    found = list[Part]()
    for path in (run.folder / name for name in TABLES):
        if not path.exists():
            continue
        try:
            lines = list(csv.DictReader(StringIO(read_text(path))))
            for line in lines:
                name, n, *columns = line
                part = Part(line[name], int(line[n]), {column: float(line[column]) for column in columns})
                if not part.right or not 0 <= part.n <= MOST or not all(0 <= each <= 1 for each in part.right.values()):
                    raise ValueError(f"{part.name!r:.80} is no share of so many answers")
                found.append(part)
        except (ConfigError, TypeError, ValueError, csv.Error) as error:
            raise ValueError(f"{path} is no table of parts ({error}); run it again") from None
    return found


def share_of(run: Run) -> float:
    """The share of tokens that a run was to keep."""
    return 1.0 if run.is_full else float(Fraction(run.result.ratio_exact or "1"))


def groups(runs: Sequence[Run]) -> dict[str, dict[str, list[Run]]]:
    """Runs with parts that one figure can hold, by method, ascending in the share; full attention ends each line."""
    found: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        if parts_of(run) and (run.is_full or run.result.ratio_exact is not None):
            result = run.result
            title = f"{result.shown_dataset} ({result.data_source} data), {run.model}, {result.protocol}"
            found.setdefault(f"{title}, seed {result.seed}", {}).setdefault(result.method_label, []).append(run)
    for title, methods in found.items():
        full = [run for each in methods.values() for run in each if run.is_full]
        others = {label: each for label, each in methods.items() if not each[0].is_full}
        found[title] = {
            label: sorted([*each, *full], key=share_of) for label, each in (others or {"Full": []}).items()
        }  # fmt: skip
    return found


def draw(title: str, methods: dict[str, list[Run]], folder: Path, name: str) -> list[Path]:
    """A row of panels for each method, a panel for each column."""
    read = [(method, run, part) for method, runs in methods.items() for run in runs for part in parts_of(run)]
    names = sorted({part.name for _, _, part in read if part.n >= FEWEST})
    columns = list(dict.fromkeys(column for _, _, part in read for column in part.right))
    rows = [
        {"panel": f"{method}, {column}", "x": share_of(run), "y": part.right[column]}
        | {"line": part.name, "nth": names.index(part.name)}
        for method in methods
        for column in columns
        for of, run, part in sorted(read, key=lambda each: each[2].name)
        if of == method and part.name in names and column in part.right
    ]
    runs = [run for each in methods.values() for run in each]
    note = f"Of parts with at least {FEWEST} answers"
    return written(replace(CHART, columns=len(columns)), rows, title, runs, folder, name, note)


def write(runs: Sequence[Run], out: Path) -> list[Path]:
    """parts.csv, and a figure for each group."""
    out.mkdir(parents=True, exist_ok=True)
    sets, table = groups(runs), out / "parts.csv"
    lines = [
        [title, method, share_of(run), part.name, part.n, column, right, *interval(right, part.n)]
        for title, methods in sets.items()
        for method, each in methods.items()
        for run in each
        for part in parts_of(run)
        for column, right in part.right.items()
    ]
    write_csv(table, ["set", "method", "share", "part", "n", "by", "right", "low", "high"], lines)
    drawn = [draw(title, each, out, f"parts-{i}") for i, (title, each) in enumerate(sets.items(), 1)]
    return [table, *chain(*drawn)]


def interval(right: float, n: int) -> Sequence[float | str]:
    """95 % over answers; of a single one nothing."""
    found = share_interval(round(right * n), n)
    return ["", ""] if found is None else [found.low, found.high]


def write_page(out: Path, runs: Sequence[Run]) -> list[Path]:
    """parts.csv and figures; nothing without runs with parts."""
    return write(runs, out) if groups(runs) else []


NOTHING = f"no run below {{}} has a table of parts ({', '.join(TABLES)})"
main = Page("kvbench.plots.parts", (__doc__ or "").partition("\n")[0], write_page, NOTHING, "outputs/parts").main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
