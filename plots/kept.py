"""Pages of docs/ that are made of values which stand beside them, a line each, in a compact file.

Not here: which values, and what a page says of them (`plots/findings.py`, `plots/cited.py`).
"""

import argparse
import csv
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ConfigError
from engine.foreign import CsvWriter
from engine.terminal import say
from results import SampleRow, read_config
from results.names import known
from results.read import parse_samples

KEPT = "scores.csv.gz"
T = TypeVar("T")


def keep(path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """The same rows make the same bytes."""
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
    """Of a run that has ended or not, of whatever version of result.json."""
    path = folder / "samples.jsonl"
    return [*parse_samples(path, path.read_bytes())[0].values()] if path.is_file() else []


def answers(folder: Path, config: Mapping[str, Any]) -> tuple[Sequence[SampleRow], str]:
    """What a run has answered so far, and what it calls its method."""
    rows = samples_of(folder)
    return rows, label_of(folder, config, rows) if rows else ""


def label_of(folder: Path, config: Mapping[str, Any], rows: Sequence[SampleRow]) -> str:
    """What a run calls its method, with all that warns of what it is: as its result says, or its configuration.

    What a byte budget chose of the method's own numbers stands in its samples alone.
    """
    ended = folder / "result.json"
    try:
        label = json.loads(ended.read_text(encoding="utf-8"))["method_label"] if ended.is_file() else named(config)
        return " ".join([label, *([" or ".join(words)] if (words := chosen(config, rows)) else [])])
    except (ConfigError, LookupError) as error:
        raise ValueError(f"{folder} does not say what its method is called ({error})") from None


def named(config: Mapping[str, Any]) -> str:
    """A variant's name by the configuration of its run, as the run's own table has it."""
    from evals.cells import cell_without_task  # imports torch
    from evals.submission.settings import settings_said

    return cell_without_task(settings_said(config)).label


def chosen(config: Mapping[str, Any], rows: Sequence[SampleRow]) -> list[str]:
    """What a byte budget alone chose for its prompts, such as "2 bit"."""
    reports = [row.fields["method_report"] for row in rows if row.fields.get("method_report")]
    is_alone = config.get("memory") is not None and config.get("ratio") is None and config.get("budget") is None
    if not (reports and is_alone and known(config["method"]["name"])):
        return []
    from evals.settings import load_class  # imports torch
    from evals.submission.settings import choice

    rules: Any = load_class(choice("method", config["method"]))
    return [*dict.fromkeys(filter(None, map(rules.chosen, reports)))]


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
