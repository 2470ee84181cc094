"""Finished runs as a file for other programs: every sample, or every run, with all that is known of it.

    kvbench export [RUNS…] --to samples.parquet|samples.csv|samples.jsonl [--level samples|runs]
    kvbench export [RUNS…] --to columns.md --level columns
    kvbench export [RUNS…] --to FOLDER --as every-eval-ever
    kvbench export [RUNS…] --to mbe.json --as mbe

What the columns mean is written by `--level columns`. `kvbench.results("samples.parquet")` reads the Parquet file
again, in seconds where it has a million rows. Runs that are damaged are named on standard error and left out.

Not here: the frame (`results/frame.py`), the two formats (`every_eval.py`, `mbe.py`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import cell
from kvbench.engine.terminal import say
from kvbench.plots.read import default_root
from kvbench.results.files import replacing
from kvbench.results.sheet import Sheet, Word, markdown

LEVELS = ("samples", "runs", "columns")
FORMS = {".parquet": "Parquet", ".csv": "CSV", ".jsonl": "JSON lines"}
OTHERS = ("every-eval-ever", "mbe")


def main(arguments: Sequence[str]) -> int:
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="kvbench export", description=about, epilog=more.partition("\n\nNot here")[0].strip("\n"),
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "runs", nargs="*", type=Path, help="folders of runs, or a Parquet file; without: where runs are"
    )
    parser.add_argument("--to", type=Path, required=True, help=f"a file: {', '.join(FORMS)}; a folder for records")
    parser.add_argument("--level", choices=LEVELS, default="samples", help="a row a sample, or a row a run")
    parser.add_argument("--as", dest="form", choices=OTHERS, help="somebody else's format")
    options = parser.parse_args(arguments)
    folders, left_out = options.runs or [default_root()], list[str]()
    try:
        words = write(options.to, folders, options.level, options.form, left_out)
    except ConfigError as error:
        return refuse(str(error))
    except OSError as error:
        return refuse(f"{options.to} cannot be written ({error.strerror}); choose another place with --to")
    for sentence in left_out:
        say(f"left out: {sentence}", file=sys.stderr)
    say(words)
    return 0


def write(to: Path, folders: Sequence[Path], level: str, form: str | None, left_out: list[str]) -> str:
    """Write one file, or the records of a folder; a sentence on what was written."""
    if form == "every-eval-ever":
        from kvbench.plots.export.every_eval import records

        n = records(to, folders, left_out)
        return f"{to}: {n} records of Every Eval Ever"
    if form == "mbe":
        from kvbench.plots.export.mbe import card

        n = card(to, folders, left_out)
        return f"{to}: {n} lines of a card of the MBE protocol"
    if level == "columns":
        return describe(to, folders, left_out)
    if to.suffix not in FORMS:
        raise ConfigError(f"--to {to} has no ending that is known; use {', '.join(FORMS)}")
    from kvbench.results.frame import frame, runs

    found = (frame if level == "samples" else runs)(*folders, left_out=left_out)
    if not len(found):
        raise ConfigError(f"no run that can be read below {', '.join(map(str, folders))}")
    to.parent.mkdir(parents=True, exist_ok=True)
    with replacing(to) as file:
        if to.suffix == ".parquet":
            found.to_parquet(file, index=False, compression="zstd")
        elif to.suffix == ".csv":
            without_formulas(found).to_csv(file, index=False)
        else:
            found.to_json(file, orient="records", lines=True, force_ascii=True)
    return f"{to}: {len(found):,} {level}, {len(found.columns)} columns, {to.stat().st_size / 1e6:.1f} MB"


def without_formulas(table: Any) -> Any:
    """A table none of whose texts a spreadsheet would compute."""
    found = table.copy()
    for name in found.columns:
        kind = str(found[name].dtype)
        if kind == "category":
            found[name] = found[name].cat.rename_categories(cell)
        elif kind in ("str", "object", "string"):
            found[name] = found[name].map(cell, na_action="ignore")
    return found.rename(columns=cell)


def describe(to: Path, folders: Sequence[Path], left_out: list[str]) -> str:
    """The columns of these runs' samples and what they mean, as Markdown."""
    from kvbench.results.frame import columns, frame

    found = columns(frame(*folders, left_out=left_out))
    rows = [
        [Word(one["column"], "code"), one["unit"], one["about"].replace("`", ""), f"{one['rows']:,}"]
        for one in found.to_dict("records")
    ]
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(markdown(Sheet(["column", "unit", "meaning", "rows that have it"], rows, n_keys=3)) + "\n")
    return f"{to}: {len(rows)} columns"


def refuse(why: str) -> int:
    say(f"kvbench export: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
