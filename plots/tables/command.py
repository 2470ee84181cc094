"""The papers' tables from the runs at hand: ours with interval and n, the published figure and the difference.

    python -m kvbench.plots.tables [RUNS] [--out FOLDER]     or: make paper-tables

Runs that answer a table are found by their results alone, so it does not matter which command made them. What variants
cost (`plots/costs.py`) is written next to the tables.

Not here: what each table holds (`plots/tables/papers.py`), how a cell is made of runs (`plots/tables/cells.py`), how a
table is worded (`plots/tables/paper_words.py`), the table of one command (`evals/screen/table.py`).
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvbench.engine.terminal import say
from kvbench.plots import costs, scopes
from kvbench.plots.read import Run, default_root, load
from kvbench.plots.tables.cells import Table, build, build_efficiency
from kvbench.plots.tables.paper_words import paper_title, records, sheet_of
from kvbench.plots.tables.papers import EFFICIENCY, PAPER_TABLES, PaperTable
from kvbench.results.sheet import texts, write


def build_all(runs: Sequence[Run]) -> dict[str, list[Table]]:
    """Every table of the papers by name; an empty list where no run answers it."""
    tables = {paper_table.name: build(paper_table, runs) for paper_table in PAPER_TABLES}
    return tables | {EFFICIENCY.name: build_efficiency(runs)}


def write_table(out: Path, paper_table: PaperTable, tables: Sequence[Table]) -> list[Path]:
    """All of a paper's table that the runs give, in one file per format."""
    return write(out, paper_table.name, texts([sheet_of(table) for table in tables], records(tables)))


def missing(tables: Iterable[PaperTable]) -> str:
    """Commands that make the runs of these tables, a line for each."""
    lines = (f"    python run.py -m experiment={one.name} scale=smoke    # {one.title}" for one in tables)
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.plots.tables", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs")
    parser.add_argument("--out", type=Path, default=Path("outputs/tables"), help="where to write")
    options = parser.parse_args(arguments)
    runs = load(options.runs)
    tables = build_all(runs)
    try:
        timed = costs.write(options.out, runs)
        scoped = scopes.write_tables(options.out, runs)
    except OSError as error:
        return cannot_write(options.out, error)
    if timed:
        say(f"What variants cost: {', '.join(str(path) for path in timed)}")
    if scoped:
        say(f"Methods with the question and without it: {', '.join(str(path) for path in scoped)}")
    absent = [one for one in (*PAPER_TABLES, EFFICIENCY) if not tables[one.name]]
    if not any(tables.values()):
        say(
            f"no run below {options.runs} answers a paper's table; any runs as a table of your own:\n"
            f"    kvbench table {options.runs} --format latex\n"
            "runs for a paper's table, in minutes with the embedded model and texts; as published without scale=smoke, "
            f"with data_dir=FOLDER:\n{missing(absent)}",
            file=sys.stderr,
        )
        return 2
    for paper_table in (*PAPER_TABLES, EFFICIENCY):
        if tables[paper_table.name]:
            try:
                paths = write_table(options.out, paper_table, tables[paper_table.name])
            except OSError as error:
                return cannot_write(options.out, error)
            say(f"{paper_title(paper_table, tables[paper_table.name])}: {', '.join(str(path) for path in paths)}")
    if absent:
        say(f"no run answers the other {len(absent)}; these make some:\n{missing(absent)}")
    return 0


def cannot_write(out: Path, error: OSError) -> int:
    say(f"kvbench.plots.tables: {out}: {error.strerror}; choose another --out", file=sys.stderr)
    return 2
