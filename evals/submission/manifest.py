"""manifest.json: what a submission says of itself. Digests show that a file changed since, not that it is honest.

Not here: whether it is true (`folder.py`, `check.py`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import NoJson, parse_json, read_bytes
from kvbench.results.keys import check_keys, check_types

MANIFEST = "manifest.json"
FORMAT = 1
LARGEST = 8 << 20  # bytes: fifty thousand files of 160
LONGEST = 500  # characters of a text
SHA = re.compile("[0-9a-f]{64}")
PARTS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}")  # of a path: nothing that leads up or out
RUN_FILES = ("config.yaml", "samples.jsonl", "ledger.parquet", "env.json", "result.json", "scores.jsonl")
NEEDED = RUN_FILES[:5]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest: who hands in what."""

    format: int
    submitter: str
    licence: str  # of the answers, such as CC-BY-4.0
    hardware: str
    commit: str  # of KVBench
    files: dict[str, str]  # SHA-256 by path below the folder
    supersedes: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # by a run's folder: id of the run that it corrects

    def __post_init__(self) -> None:
        check_types(self)
        if self.format != FORMAT:
            raise ValueError(f"key 'format' is {self.format}, and only {FORMAT} can be read")
        for key in ("submitter", "licence", "hardware", "commit"):
            if not 0 < len(getattr(self, key).strip()) <= LONGEST:
                raise ValueError(f"key {key!r} is empty or longer than {LONGEST} characters")
        for path, sha in self.files.items():
            if why := why_no_place(path):
                raise ValueError(f"it lists {path[:80]!r}, {why}")
            if not SHA.fullmatch(sha):
                raise ValueError(f"of {path} it has no SHA-256 of 64 hex digits")
        for run, old in self.supersedes.items():
            if run not in self.runs or not re.fullmatch("[0-9a-f]{16}", old):
                raise ValueError(f"it supersedes {old[:40]!r} by {run[:80]!r}, which is no run of it")

    @property
    def runs(self) -> list[str]:
        """The folders of its runs."""
        return sorted({path.rpartition("/")[0] for path in self.files if path.startswith("runs/")})

    @property
    def methods(self) -> list[str]:
        """Files of methods that are not in the repository."""
        return sorted(path for path in self.files if path.startswith("methods/"))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """ValueError where there is none that can be used."""
        try:
            data = parse_json(read_bytes(folder / MANIFEST, LARGEST))
        except (ConfigError, NoJson) as error:
            raise ValueError(str(error)) from None
        found: Mapping[str, Any] = check_keys(data, KEYS - {"supersedes"})
        if unknown := sorted(found.keys() - KEYS):
            raise ValueError(f"key {unknown[0][:40]!r} is unknown")
        return cls(**found)


KEYS = frozenset(Manifest.__annotations__)


def why_no_place(path: str) -> str:
    """Why a submission has no file at this path; "" where it may."""
    parts = path.split("/")
    if not all(PARTS.fullmatch(part) for part in parts):
        return "which is no plain path below the folder"
    match parts:
        case ["README.md"] | ["LICENSE"]:
            return ""
        case ["runs", _, name]:
            return "" if name in RUN_FILES else f"and a run has {', '.join(RUN_FILES)} alone"
        case ["methods", name]:
            return "" if name.endswith(".py") else "and methods/ has Python files alone"
        case _:
            return "and a submission has README.md, LICENSE, runs/RUN/FILE and methods/NAME.py alone"
