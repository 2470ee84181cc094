"""The files of a submission, whose folder may hold anything: nothing is read before all of it is counted and bounded.

Not here: what the files say (`check.py`).
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.engine.errors import ConfigError
from kvbench.evals.submission.manifest import MANIFEST, NEEDED, Manifest, why_no_place

MOST_RUNS = 5_000
MOST_FILES = 6 * MOST_RUNS + 100
MOST_BYTES = 4 << 30  # of all files
LARGE = 256 << 20  # bytes of a run's lines or ledger
USUAL = 1 << 20  # of any other file


@dataclass(frozen=True)
class Finding:
    """Something that does not hold: where, which kind of thing, and in words."""

    where: str
    kind: str
    words: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.words}"


@dataclass
class Folder:
    """What a submission has, as far as that can be said without looking into its runs."""

    manifest: Manifest | None = None
    runs: list[str] = field(default_factory=list[str])
    methods: list[str] = field(default_factory=list[str])  # files of methods that are not in the repository
    findings: list[Finding] = field(default_factory=list[Finding])


def look(root: Path) -> Folder:
    """Count and bound all files, then read the manifest. No link is followed, no archive opened."""
    try:
        mode = root.lstat().st_mode
    except OSError as error:
        raise ConfigError(f"{root} cannot be read ({error.strerror}); give the folder of a submission") from None
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"{root} is no folder; unpack what it holds yourself and give the folder")
    found = Folder()
    files = set(walk(root, found.findings))
    if found.findings:
        return found  # what it holds is not read while something of it has no place
    found.runs = sorted({path.rpartition("/")[0] for path in files if path.startswith("runs/")})
    found.methods = sorted(path for path in files if path.startswith("methods/"))
    try:
        found.manifest = Manifest.read(root)
        found.manifest.check_runs(found.runs)
    except ValueError as error:
        found.findings.append(Finding(MANIFEST, "manifest", str(error)))
    for run in found.runs:
        if lacking := [name for name in NEEDED if f"{run}/{name}" not in files]:
            found.findings.append(Finding(run, "file", f"it has no {', '.join(lacking)}"))
    return found


def walk(root: Path, findings: list[Finding]) -> Iterator[str]:
    """Paths of plain files. It stops at the first bound that is broken, whatever else there is."""
    n_files = n_runs = n_bytes = 0
    waiting = [""]
    while waiting:
        at = waiting.pop()
        with os.scandir(root / at) as listing:
            for entry in listing:
                path = f"{at}/{entry.name}".removeprefix("/")
                status = entry.stat(follow_symlinks=False)
                n_files += 1
                n_runs += at == "runs"
                n_bytes += status.st_size
                if why := past(n_files, n_runs, n_bytes):
                    findings.append(Finding(".", "size", why))
                    return
                if why := why_refused(path, status):
                    findings.append(Finding(path, *why))
                elif stat.S_ISDIR(status.st_mode):
                    waiting.append(path)
                else:
                    yield path


def past(n_files: int, n_runs: int, n_bytes: int) -> str:
    if n_runs > MOST_RUNS:
        return f"it has more than {MOST_RUNS:,} runs; hand them in by parts"
    if n_files > MOST_FILES:
        return f"it has more than {MOST_FILES:,} files"
    return f"its files have more than {MOST_BYTES >> 30} GB" if n_bytes > MOST_BYTES else ""


def why_refused(path: str, status: os.stat_result) -> tuple[str, str] | None:
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
    if why := why_no_place(path):
        return "file", f"it has no place here, {why}"
    most = LARGE if path.endswith((".jsonl", ".parquet")) else USUAL
    return ("size", f"it has {status.st_size:,} bytes, more than {most:,}") if status.st_size > most else None
