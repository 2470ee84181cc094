"""manifest.json: who hands in a submission, and which paths it may have.

Not here: what stands in its files (`folder.py`, `check.py`).
"""

import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import NoJson, parse_json, read_bytes
from kvbench.results.keys import check_keys, check_types

MANIFEST = "manifest.json"
LONGEST = 500  # characters of a text
PARTS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}")  # of a path: nothing that leads up or out
RUN_FILES = ("config.yaml", "samples.jsonl", "ledger.parquet", "env.json", "result.json", "scores.jsonl")
NEEDED = RUN_FILES[:5]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest: who hands in what."""

    submitter: str
    licence: str  # of the answers, such as CC-BY-4.0
    hardware: str
    commit: str  # of KVBench
    supersedes: dict[str, str] = field(default_factory=dict[str, str])  # by a run's folder: id of the run it corrects

    def __post_init__(self) -> None:
        check_types(self)
        for key in ("submitter", "licence", "hardware", "commit"):
            if not 0 < len(getattr(self, key).strip()) <= LONGEST:
                raise ValueError(f"key {key!r} is empty or longer than {LONGEST} characters")

    def check_runs(self, runs: Collection[str]) -> None:
        """ValueError where it corrects what is no run, or by none of its own."""
        for run, old in self.supersedes.items():
            if run not in runs or not re.fullmatch("[0-9a-f]{16}", old):
                raise ValueError(f"it supersedes {old[:40]!r} by {run[:80]!r}, which is no run of it")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """ValueError where there is none that can be used."""
        try:
            found = check_keys(parse_json(read_bytes(folder / MANIFEST)), KEYS - {"supersedes"})
        except (ConfigError, NoJson) as error:
            raise ValueError(str(error)) from None
        return cls(**{key: value for key, value in found.items() if key in KEYS})


KEYS = frozenset(Manifest.__annotations__)


def why_no_place(path: str) -> str:
    """Why a submission has no file at this path; "" where it may."""
    parts = path.split("/")
    if not all(PARTS.fullmatch(part) for part in parts):
        return "which is no plain path below the folder"
    match parts:
        case ["README.md"] | ["LICENSE"] | ["manifest.json"]:
            return ""
        case ["runs", _, name]:
            return "" if name in RUN_FILES else f"and a run has {', '.join(RUN_FILES)} alone"
        case ["methods", name]:
            return "" if name.endswith(".py") else "and methods/ has Python files alone"
        case _:
            return "and a submission has README.md, LICENSE, runs/RUN/FILE and methods/NAME.py alone"
