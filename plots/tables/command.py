"""The papers' tables from the runs at hand: ours with interval and n, the published figure and the difference.

    python -m plots.tables [RUNS] [--out FOLDER]     or: make paper-tables

Runs that answer a table are found by their results alone, so it does not matter which command made them. What variants
cost (`plots/costs.py`) is written beside the tables.

Not here: what each table holds (`plots/tables/papers.py`), how a cell is made of runs (`plots/tables/cells.py`), how a
table is worded (`plots/tables/paper_words.py`), the table of one command (`evals/screen/table.py`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.terminal import say
from plots import costs, scopes
from plots.read import Run, default_root, load
from plots.tables.cells import Table, build, build_efficiency
from plots.tables.paper_words import paper_title, records, sheet_of
from plots.tables.papers import EFFICIENCY, PAPER_TABLES, PaperTable
from results.sheet import texts, write


def build_all(runs: Sequence[Run]) -> dict[str, list[Table]]:
    """Every table of the papers by name; an empty list where no run answers it."""
    tables = {paper_table.name: build(paper_table, runs) for paper_table in PAPER_TABLES}
    return tables | {EFFICIENCY.name: build_efficiency(runs)}


def write_table(out: Path, paper_table: PaperTable, tables: Sequence[Table]) -> list[Path]:
    """All of a paper's table that the runs give, in one file per format."""
    return write(out, paper_table.name, texts([sheet_of(table) for table in tables], records(tables)))


def missing(paper_table: PaperTable, n_runs: int) -> str:
    """What to run for a table that has nothing to show."""
    why = "no runs yet" if n_runs == 0 else "no run that answers it"
    return f"{paper_table.title}: {why}; make some with\n    {paper_table.command}\n    {smoke(paper_table)}"


def smoke(paper_table: PaperTable) -> str:
    return f"python run.py -m experiment={paper_table.name} scale=smoke    (minutes, embedded model and data)"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m plots.tables", description=(__doc__ or "").partition("\n")[0])
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
    if not any(tables.values()):
        for paper_table in (*PAPER_TABLES, EFFICIENCY):
            say(missing(paper_table, len(runs)), file=sys.stderr)
        return 2
    for paper_table in (*PAPER_TABLES, EFFICIENCY):
        if tables[paper_table.name]:
            try:
                paths = write_table(options.out, paper_table, tables[paper_table.name])
            except OSError as error:
                return cannot_write(options.out, error)
            say(f"{paper_title(paper_table, tables[paper_table.name])}: {', '.join(str(path) for path in paths)}")
        else:
            say(missing(paper_table, len(runs)))
    return 0


def cannot_write(out: Path, error: OSError) -> int:
    say(f"plots.tables: {out}: {error.strerror}; choose another --out", file=sys.stderr)
    return 2
