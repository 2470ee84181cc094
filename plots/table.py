"""Any runs as tables: choose the keys of rows and columns, and what a cell says.

    kvbench table [RUNS] [--rows method] [--columns task,ratio] [--value score] [--filter task=needle]
                          [--against METHOD] [--format markdown|latex|csv|html] [--out FOLDER] [--caption TEXT]

Without --columns they are what varies between the runs. With --against every cell says the difference to that method's
value in the same column, with the interval of the paired differences; `--value difference` is the score's to Full's.
Without --out one format goes to standard output; with it table.md, table.tex and table.csv are written.

Not here: which runs share a table (`plots/tables/pivot.py`), its words (`plots/tables/shown.py`), the papers' tables
(`python -m kvbench.plots.tables`).
"""

import argparse
import sys
from pathlib import Path

from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import say
from kvbench.plots.read import default_root
from kvbench.plots.tables.pivot import OF_SAMPLES, Pivot, WrongKey, pivots
from kvbench.plots.tables.shown import records, sheet_of
from kvbench.plots.tables.values import VALUES
from kvbench.plots.tables.words import KEYS, samples_below
from kvbench.results.sheet import texts, write

EPILOG = f"""\
keys of rows, columns and filters: {", ".join([*KEYS, *OF_SAMPLES])},
any parameter: method.NAME, task.NAME, and any other column of the samples, such as turn or config.cache.tokens

  kvbench table runs --format latex > table.tex              methods down, what varies across
  kvbench table runs --columns task,ratio --value difference  differences to full attention
  kvbench table runs --rows method,ratio --columns dataset    a benchmark's datasets side by side
  kvbench table runs --value device                           what the ledgers counted in place of scores
  kvbench cite snapkv,quest >> references.bib               the papers of the methods
"""
FORMATS = {"markdown": "md", "latex": "tex", "csv": "csv", "html": "html"}


def written(made: list[Pivot], caption: str | None = None) -> dict[str, str]:
    """Tables in all formats, by suffix."""
    return texts([sheet_of(pivot) for pivot in made], records(made), caption)


def main(arguments: list[str]) -> int:
    about = (__doc__ or "").partition("\n")[0]
    values = f"{', '.join(VALUES)}, difference, a task's figure (mass), or any column of numbers (bytes_buffer)"
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="kvbench table", description=about, epilog=EPILOG, formatter_class=form)
    parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs, or a Parquet file")
    parser.add_argument("--rows", default="method", help="keys, with commas: method, task, dataset, ratio, method.m …")
    parser.add_argument("--columns", help="keys, with commas; without, what varies")
    parser.add_argument("--value", default="score", help=values)
    parser.add_argument("--against", metavar="METHOD", help="whose value is taken off every cell's: Full, 'SnapKV (C)'")
    parser.add_argument("--filter", action="append", default=[], metavar="KEY=VALUE", help="may stand several times")
    parser.add_argument("--format", choices=FORMATS, default="markdown", help="for standard output")
    parser.add_argument("--out", type=Path, help="write all formats into this folder")
    parser.add_argument("--caption", help="of the LaTeX table, in place of our own")
    options = parser.parse_args(arguments)
    try:
        columns, keep = options.columns and keys(options.columns), dict(map(pair, options.filter))
        made = pivots(samples_below(options.runs), keys(options.rows), columns, options.value, keep, options.against)
    except ConfigError as error:
        return refuse(str(error))
    if not made:
        return refuse(f"no finished run below {options.runs}; `make run` makes some, or name another folder")
    made_texts = written(made, options.caption)
    if options.out is None:
        say(made_texts[FORMATS[options.format]], end="")
        return 0
    try:
        for path in write(options.out, "table", made_texts):
            say(path)
    except OSError as error:
        return refuse(f"{options.out}: {error.strerror}; choose another --out")
    return 0


def keys(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def pair(word: str) -> tuple[str, str]:
    key, is_pair, value = word.partition("=")
    if not is_pair:
        raise WrongKey(f"--filter {word} is no KEY=VALUE, such as task=needle")
    return key, value


def refuse(why: str) -> int:
    say(f"kvbench table: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
