"""Any runs as tables: choose the keys of rows and columns, and what a cell says.

    python -m plots.table [RUNS] [--rows method] [--columns task,ratio] [--value score] [--filter task=needle]
                          [--against METHOD] [--format markdown|latex|csv] [--out FOLDER] [--caption TEXT]

Without --columns they are what varies between the runs. With --against every cell says its value less that method's of
the same column, with the interval of the paired differences; `--value difference` is the score less Full's. Without
--out one format goes to standard output; with it all three are written, as table.md, table.tex and table.csv.

Not here: which runs share a table (`plots/tables/generic.py`), how it is written (`plots/tables/texts.py`), the papers'
tables (`python -m plots.tables`).
"""

import argparse
import sys
from pathlib import Path

from engine.terminal import say
from plots.read import default_root, load
from plots.tables.generic import Sheet, WrongKey, sheets
from plots.tables.texts import as_csv, latex, markdown
from plots.tables.values import VALUES

FORMATS = ("markdown", "latex", "csv")


def text(made: list[Sheet], kind: str, caption: str | None = None) -> str:
    if kind == "csv":
        return as_csv(made)
    if kind == "latex":
        return "\n".join(latex(sheet, number, caption) for number, sheet in enumerate(made, 1))
    return "\n".join(markdown(sheet) for sheet in made)


def main(arguments: list[str]) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m plots.table", description=about)
    parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs")
    parser.add_argument("--rows", default="method", help="keys, with commas: method, task, dataset, ratio, method.m …")
    parser.add_argument("--columns", help="keys, with commas; without, what varies")
    parser.add_argument("--value", default="score", help=f"{', '.join(VALUES)}, difference, or a task's figure: mass")
    parser.add_argument("--against", metavar="METHOD", help="whose value is taken off every cell's: Full, 'SnapKV (C)'")
    parser.add_argument("--filter", action="append", default=[], metavar="KEY=VALUE", help="may stand several times")
    parser.add_argument("--format", choices=FORMATS, default="markdown", help="for standard output")
    parser.add_argument("--out", type=Path, help="write all formats into this folder")
    parser.add_argument("--caption", help="of the LaTeX table, in place of our own")
    options = parser.parse_args(arguments)
    try:
        made = sheets(
            load(options.runs),
            keys(options.rows),
            None if options.columns is None else keys(options.columns),
            options.value,
            dict(pair(word) for word in options.filter),
            options.against,
        )
    except WrongKey as error:
        return refuse(str(error))
    if not made:
        return refuse(f"no finished run below {options.runs}; make some with `python run.py`, or name another folder")
    if options.out is None:
        say(text(made, options.format, options.caption), end="")
        return 0
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        for kind, suffix in zip(FORMATS, ("md", "tex", "csv"), strict=True):
            path = options.out / f"table.{suffix}"
            path.write_text(text(made, kind, options.caption), encoding="utf-8", errors="replace")
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
    say(f"plots.table: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
