"""The files of a submission, whose folder may hold anything: nothing is read before all of it is counted and bounded.

Not here: what the files say (`check.py`).
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import KINDS, opened
from kvbench.evals.submission.manifest import MANIFEST, NEEDED, Manifest, why_no_place

MOST_RUNS = 5_000
MOST_FILES = 6 * MOST_RUNS + 100
MOST_BYTES = 4 << 30  # of all files
LARGEST = {  # bytes of one file
    "config.yaml": 1 << 20, "env.json": 1 << 20, "result.json": 1 << 20, "manifest.json": 8 << 20,
    "samples.jsonl": 256 << 20, "scores.jsonl": 64 << 20, "ledger.parquet": 256 << 20,
}  # fmt: skip
USUAL = 1 << 20  # of others


@dataclass(frozen=True)
class Finding:
    """Something that does not hold: where, which kind of thing, and in words."""

    where: str
    kind: str
    words: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.words}"


def look(folder: Path) -> tuple[Manifest | None, list[Finding]]:
    """What a submission says it has, and what of its files does not hold. No link is followed, no archive opened."""
    try:
        mode = folder.lstat().st_mode
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror}); give the folder of a submission") from None
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"{folder} is no folder; unpack what it holds yourself and give the folder")
    found: dict[str, int] = {}
    findings: list[Finding] = []
    for path, entry in walk(folder, findings):
        found[path] = entry.st_size
    if findings:
        return None, findings  # what it holds is not read while something of it has no place
    try:
        manifest = Manifest.read(folder)
    except ValueError as error:
        return None, [Finding(MANIFEST, "manifest", str(error))]
    return manifest, list(compare(folder, manifest, found))


def walk(folder: Path, findings: list[Finding]) -> Iterator[tuple[str, os.stat_result]]:
    """Plain files by path. It stops at the first bound that is broken, whatever else there is."""
    n_files = n_runs = n_bytes = 0
    waiting = [""]
    while waiting:
        at = waiting.pop()
        with os.scandir(folder / at) as listing:
            for entry in listing:
                path = f"{at}/{entry.name}".removeprefix("/")
                status = entry.stat(follow_symlinks=False)
                n_files += 1
                n_runs += at == "runs"
                n_bytes += status.st_size
                if why := past(n_files, n_runs, n_bytes):
                    findings.append(Finding(".", "size", why))
                    return
                if why := why_refused(path, entry.name, status):
                    findings.append(Finding(path, *why))
                elif stat.S_ISDIR(status.st_mode):
                    waiting.append(path)
                else:
                    yield path, status


def past(n_files: int, n_runs: int, n_bytes: int) -> str:
    if n_runs > MOST_RUNS:
        return f"it has more than {MOST_RUNS:,} runs; hand them in by parts"
    if n_files > MOST_FILES:
        return f"it has more than {MOST_FILES:,} files"
    return f"its files have more than {MOST_BYTES >> 30} GB" if n_bytes > MOST_BYTES else ""


def why_refused(path: str, name: str, status: os.stat_result) -> tuple[str, str] | None:
    """Kind and words of why a file or folder must not be there."""
    if stat.S_ISLNK(status.st_mode):
        return "link", "it is a symbolic link, which may lead anywhere; put a copy of the file there"
    if stat.S_ISDIR(status.st_mode):
        known = path in ("runs", "methods") or (path.startswith("runs/") and path.count("/") == 1)
        return None if known else ("file", "a submission has the folders runs/, runs/RUN/ and methods/ alone")
    if not stat.S_ISREG(status.st_mode):
        return "file", "it is no regular file"
    if status.st_nlink > 1:
        return "link", "it has another name elsewhere (a hard link); put a copy of the file there"
    if path != MANIFEST and (why := why_no_place(path)):
        return "file", f"it has no place here, {why}"
    most = LARGEST.get(name, USUAL)
    if status.st_size > most:
        return "size", f"it has {status.st_size:,} bytes, more than {most:,}"
    return None


def compare(folder: Path, manifest: Manifest, found: dict[str, int]) -> Iterator[Finding]:
    """What differs between the manifest and the files."""
    for path in sorted(found.keys() - manifest.files.keys() - {MANIFEST}):
        yield Finding(path, "manifest", "it is not in manifest.json")
    for path in sorted(manifest.files.keys() - found.keys()):
        yield Finding(path, "manifest", "manifest.json has it, and it is not there")
    for path in sorted(manifest.files.keys() & found.keys()):
        with opened(folder / path) as file:
            beginning = file.read(8)
            file.seek(0)
            sha = hashlib.file_digest(file, "sha256").hexdigest()
        if sha != manifest.files[path]:
            yield Finding(path, "manifest", "its SHA-256 is not the one in manifest.json: it was changed since")
        archive = next((kind for magic, (kind, _) in KINDS.items() if beginning.startswith(magic)), None)
        if archive and not path.endswith(".parquet"):
            yield Finding(path, "file", f"it is {archive}, which nobody unpacks")
    for run in manifest.runs:
        lacking = [name for name in NEEDED if f"{run}/{name}" not in manifest.files]
        if lacking:
            yield Finding(run, "file", f"it has no {', '.join(lacking)}")
