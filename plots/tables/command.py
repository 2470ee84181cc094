"""The papers' tables from the runs at hand: ours with interval and n, the published figure and the difference.

    python -m kvbench.plots.tables [RUNS] [--out FOLDER]     or: make paper-tables

Runs that answer a table are found by their results alone, so it does not matter which command made them. What variants
cost (`plots/costs.py`) is written next to the tables.

Not here: what each table holds (`plots/published/tables.yaml`), how a cell is made of runs (`plots/tables/papers.py`),
how a table is worded (`plots/tables/paper_words.py`), the table of one command (`evals/screen/table.py`).
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import say
from kvbench.plots import costs
from kvbench.plots.read import default_root
from kvbench.plots.tables.paper_words import paper_title, records, sheet_of
from kvbench.plots.tables.papers import PaperTable, Table, build_all, paper_tables
from kvbench.plots.tables.words import samples_below
from kvbench.results.sheet import texts, write


def write_table(out: Path, tables: Sequence[Table]) -> list[Path]:
    """All of a paper's table that the runs give, in one file per format."""
    return write(out, tables[0].paper.name, texts([sheet_of(table) for table in tables], records(tables)))


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
    try:
        samples = samples_below(options.runs)
        tables = build_all(samples)
        if timed := costs.write(options.out, samples):
            say(f"What variants cost: {', '.join(map(str, timed))}")
        for name, made in tables.items():
            if made:
                say(f"{paper_title(paper_tables()[name], made)}: {', '.join(map(str, write_table(options.out, made)))}")
    except ConfigError as error:
        return refuse(str(error))
    except OSError as error:
        return refuse(f"{options.out}: {error.strerror}; choose another --out")
    absent = [paper_tables()[name] for name, made in tables.items() if not made]
    if len(absent) == len(tables):
        say(
            f"no run below {options.runs} answers a paper's table; any runs as a table of your own:\n"
            f"    kvbench table {options.runs} --format latex\n"
            "runs for a paper's table, in minutes with the embedded model and texts; as published without scale=smoke, "
            f"with data_dir=FOLDER:\n{missing(absent)}",
            file=sys.stderr,
        )
        return 2
    if absent:
        say(f"no run answers the other {len(absent)}; these make some:\n{missing(absent)}")
    return 0


def refuse(why: str) -> int:
    say(f"kvbench.plots.tables: {why}", file=sys.stderr)
    return 2
