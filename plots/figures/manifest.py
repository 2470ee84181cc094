"""manifest.json: of each figure in a folder, its caption, its files, and the runs that it was drawn from.

A run is named by its folder and by what it held: a digest over result.json, samples.jsonl and, where answers were
scored again, scores.jsonl. Who has the runs can tell whether a figure is of them.

Not here: the files themselves (`plots/style.py`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvbench.engine.foreign import read_bytes
from kvbench.plots.style import Picture

NAME = "manifest.json"
HELD = ("result.json", "samples.jsonl", "scores.jsonl")


Entry = dict[str, Any]  # title, caption, inches, files and runs of a figure


def entry(picture: Picture, paths: Sequence[Path]) -> Entry:
    folders = sorted({run.folder for run in picture.runs})
    return {
        "title": picture.title,
        "caption": picture.caption,
        "inches": [round(float(length), 3) for length in picture.figure.get_size_inches()],
        "files": [path.name for path in paths],
        "runs": [{"folder": folder.name, "sha256": digest(folder)} for folder in folders],
    }


@lru_cache(maxsize=10_000)
def digest(folder: Path) -> str:
    """Digest of what a finished run holds."""
    state = hashlib.sha256()
    for name in HELD:
        if (path := folder / name).is_file():
            state.update(name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def write(folder: Path, drawn: Mapping[str, Entry]) -> Path:
    """Write the manifest next to the figures; entries of others that still lie there stay."""
    path = folder / NAME
    try:
        earlier = json.loads(read_bytes(path, 64 << 20))["figures"] if path.is_file() else {}
        earlier = {name: each for name, each in earlier.items() if all((folder / f).is_file() for f in each["files"])}
    except (ValueError, KeyError, TypeError, AttributeError):
        earlier = {}
    text = json.dumps({"figures": dict(sorted((earlier | dict(drawn)).items()))}, indent=2, ensure_ascii=True)
    path.write_text(text + "\n", encoding="utf-8")
    return path
