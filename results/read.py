"""Finished runs read from their folders; whatever is damaged is a `ValueError` that names the file.

Not here: ledgers (`results/ledger.py`), runs that are not finished (`results/folder.py`).
"""

import json
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import parse_json, read_bytes, refuse_depth
from kvbench.results.config import config_hash, read_config
from kvbench.results.files import unsealed
from kvbench.results.keys import check_keys
from kvbench.results.schema import OtherSchemaError, RunResult, SampleRow
from kvbench.results.scores import REMAKE, SCORES, Scores, read_scores
from kvbench.results.summary import disagreement, of_today, with_scores

LARGEST_SAMPLES = 4 << 30  # bytes of samples.jsonl: a million answers of 4 kB


def parse_samples(path: Path, content: bytes) -> tuple[dict[str, SampleRow], int]:
    """The rows of samples.jsonl by id, and how many bytes they take: less than all if the last line is torn.

    Raises `ConfigError` for any other line that is no sample, for a sample that is there twice, and for one without a
    seal among others that have one.
    """
    rows: dict[str, SampleRow] = {}
    n_bytes = 0
    lines = BytesIO(content).readlines()
    has_seals = any(map(is_sealed, lines))
    for number, line in enumerate(lines, start=1):
        place = f"{path} line {number}"
        try:
            data = parse_json(line if line.endswith(b"\n") else b"", is_ours=True)
        except ValueError:
            if number == len(lines):
                break
            raise ConfigError(f"{place} is not JSON; delete it to run its sample again") from None
        try:
            if has_seals and not is_sealed(line):
                raise ValueError("it has no crc32, and other lines have one")
            row = SampleRow.from_data(without_seal(line.decode(), data))
        except ValueError as error:
            raise ConfigError(f"{place} is not a sample ({error}); delete it to run its sample again") from None
        if row.id in rows:
            raise ConfigError(f"{place} has sample {row.id!r} a second time; delete one of the two")
        rows[row.id] = row
        n_bytes += len(line)
    return rows, n_bytes


def is_sealed(text: bytes) -> bool:
    """Whether a line or a result says which CRC it has, as all do that are written today."""
    return text.startswith(b'{"crc32": "')


def without_seal(line: str, data: Any) -> dict[str, Any]:
    """`data`, which is the parsed `line`, without the seal; ValueError where the seal is not that of the text."""
    row = check_keys(data, ["id"])
    # An older line has no seal and begins with its id; else a seal could be damaged unseen.
    if next(iter(row)) not in ("crc32", "id"):
        raise ValueError("it does not begin with 'id' or 'crc32'")
    text = line.removesuffix("\n")
    if unsealed(text) is not text:
        del row["crc32"]
    return row


def read_samples(folder: Path) -> list[SampleRow]:
    """The rows of a run with the scores that count; ValueError with the name of a damaged file."""
    path = folder / "result.json"
    return read_run(folder)[1] if path.is_file() else read_scored(folder)[0]


def answered(folder: Path) -> frozenset[str]:
    """The ids of the samples that a run has completed so far; none where there is no run."""
    path = folder / "samples.jsonl"
    return frozenset(parse_samples(path, path.read_bytes())[0]) if path.is_file() else frozenset()


def read_scored(folder: Path) -> tuple[list[SampleRow], Scores | None, bytes]:
    """The rows of a run, the scores.jsonl that was laid over them, and what samples.jsonl holds."""
    path = folder / "samples.jsonl"
    try:
        content = read_bytes(path, LARGEST_SAMPLES)
        rows, n_bytes = parse_samples(path, content)
    except ConfigError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if n_bytes < len(content):
        raise ValueError(f"{path} ends within a line; run the same command again to complete it")
    scores = read_scores(folder)
    if scores is None:
        return list(rows.values()), None, content
    try:
        return scores.lay_over(rows.values()), scores, content
    except ValueError as error:
        raise ValueError(f"{folder / SCORES} cannot be believed ({error}); {REMAKE}") from None


def why_not_believed(result: RunResult, written: bytes, samples: bytes) -> str:
    """Why samples.jsonl is not what this result was made of; "" where it is, or may be.

    A result of today says the CRC of the whole file. Earlier ones do not, and are believed where their lines have
    seals as they have themselves, or none of them has: seals came with one change for both. Lines without a seal below
    a sealed result are believed only where scores.jsonl, which has seals of its own, was laid over them later.
    """
    if result.samples_crc32 is not None:
        if not is_sealed(written):
            return "result.json has lost its own crc32"
        changed = f"{zlib.crc32(samples):08x}" != result.samples_crc32
        return "it was changed after result.json was made of it" if changed else ""
    if not samples or is_sealed(samples) == is_sealed(written):
        return ""
    if is_sealed(samples):
        return "its lines have a crc32, and result.json has none"
    return "" if result.scores_crc32 is not None else "its lines have no crc32, and result.json has one"


def doubt(folder: Path) -> str:
    """`why_not_believed` of a folder with samples; "" where it has no result yet."""
    path = folder / "result.json"
    if not path.exists():
        return ""
    written = path.read_bytes()
    try:
        result = RunResult.from_json(written.decode())
    except ValueError:  # what the lines were when it was whole, nobody can say
        return "its lines have no crc32, and result.json is damaged"
    return why_not_believed(result, written, (folder / "samples.jsonl").read_bytes())


def read_runs(root: Path) -> list[tuple[Path, RunResult]]:
    """Every finished run below `root`, by folder; ValueError with the name of a damaged file."""
    runs: list[tuple[Path, RunResult]] = []
    for path in sorted(root.rglob("result.json")):
        runs.append((path.parent, read_run(path.parent)[0]))
    return runs


def read_run(folder: Path) -> tuple[RunResult, list[SampleRow]]:
    """A finished run and its rows; ValueError with the name of a damaged file."""
    path = folder / "result.json"
    try:
        written = read_bytes(path)
        result = RunResult.from_json(written.decode())
    except OtherSchemaError as error:
        raise ValueError(f"{path}: {error}; read it with the code that wrote it") from None
    except (ValueError, ConfigError) as error:
        raise ValueError(f"{path} is not the result of a run: {error}") from None
    rows, scores, content = read_scored(folder)
    if scores is None and result.scores_crc32 is not None:
        raise ValueError(
            f"{path} is of scores in {SCORES}, which is lost; make it again with "
            "`python -m kvbench.evals.rescore --write`"
        )
    if scores is not None and result.scores_crc32 != scores.crc32:
        result = with_scores(result, rows, scores)  # which `put_scores` was killed before
    if difference := disagreement(result, rows):
        raise ValueError(f"{path} says {difference}; run the same command again to repair it")
    if why := why_not_believed(result, written, content):
        raise ValueError(
            f"{folder / 'samples.jsonl'} cannot be believed: {why}; delete the lines that somebody changed, and run "
            "the same command again"
        )
    return of_today(result, rows), rows


class Whole(NamedTuple):
    """A finished run as tables, figures and frames see it."""

    result: RunResult
    rows: list[SampleRow]
    config: Mapping[str, Any]


TIMED = ("length", "batch")  # whole numbers that samples of task=latency have


def read_whole(folder: Path) -> Whole:
    """A finished run whose answers have scores; ValueError with the name of a file that is damaged."""
    result, rows = read_run(folder)
    if result.waits_for_scores:
        raise ValueError(
            f"{folder} has answers without scores; score them with `python -m kvbench.evals.rescore --write`"
        )
    for row in rows if result.task == "latency" else ():
        for key in TIMED:
            if not isinstance(row.fields.get(key), int):
                raise ValueError(f"{folder / 'samples.jsonl'} has a {key} that no run writes, sample {row.id!r}")
    path = folder / "config.yaml"
    try:
        config = read_config(folder)
        refuse_depth(config)  # aliases may make a tree without an end
        json.dumps(config, sort_keys=True, allow_nan=False)
        for key in ("limit", "offset"):
            if not isinstance(config.get(key), int | None):
                raise ValueError(f"its {key} is no whole number")
        if config_hash(config) != result.config_hash:
            raise ValueError(f"result.json is of another one, {result.config_hash}")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a run: {error}") from None
    return Whole(result, rows, config)
