"""Pages of docs/ that are made of values that stand next to them, a line each, in a compact file.

Not here: which values, and what a page says of them (`plots/findings.py`, `plots/cited.py`).
"""

import argparse
import csv
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvbench.engine.foreign import CsvWriter
from kvbench.engine.terminal import say
from kvbench.results import SampleRow, read_config
from kvbench.results.read import parse_samples

KEPT = "scores.csv.gz"
T = TypeVar("T")


def keep(path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write rows to a file; the same rows make the same bytes."""
    text = io.StringIO()
    writer = CsvWriter(text, lineterminator="\n")
    for row in (columns, *rows):
        writer.writerow(row)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def load(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def configured(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folders of runs, finished or not, and their configurations. Other programs' folders are passed over."""
    for path in sorted(root.rglob("config.yaml")):
        config = read_config(path.parent)
        if all(isinstance(config.get(key), dict) for key in ("task", "method", "model")):
            yield path.parent, config


def samples_of(folder: Path) -> Sequence[SampleRow]:
    """Samples of a run that has ended or not, of whatever version of result.json."""
    path = folder / "samples.jsonl"
    return [*parse_samples(path, path.read_bytes())[0].values()] if path.is_file() else []


def answers(folder: Path) -> tuple[Sequence[SampleRow], str]:
    """Lines that a run has answered so far, and what it calls its method."""
    rows = samples_of(folder)
    return rows, label_of(folder, rows)


def label_of(folder: Path, rows: Sequence[SampleRow]) -> str:
    """A run's name for its method, with all that warns of what it is; "" where it has not ended and is older than that.

    Each sample says it, with what a byte budget chose for it, such as its bits. Runs from before that have it in
    result.json.
    """
    names = dict.fromkeys(name for row in rows if isinstance(name := row.fields.get("variant"), str))
    ended = folder / "result.json"
    if not names and ended.is_file():
        return str(json.loads(ended.read_text(encoding="utf-8")).get("method_label", ""))
    return " or ".join(names)


def some(lines: list[T], root: Path) -> list[T]:
    """The lines; an error where there are none, before they replace what is kept."""
    if not lines:
        raise ValueError(f"{root} holds no sample of a run of this page")
    return lines


def run(prog: str, about: str, write: Callable[[Path, Path | None], list[Path]], arguments: Sequence[str]) -> int:
    """The command line of a page: `write` gets the folder to write into, and that of runs where one is given."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=about)
    parser.add_argument("runs", nargs="?", type=Path, help="folder of runs; without it the kept values")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where to write")
    options = parser.parse_args(arguments)
    try:
        paths = write(options.out, options.runs)
    except (ValueError, OSError) as error:
        say(f"{prog}: {error}", file=sys.stderr)
        return 2
    for path in paths:
        say(path)
    return 0
