"""Which files a checkpoint is: those next to its config.json, and the weights that it names wherever they lie in it.

Not here: what they hold (`digests.py`), whether a config.json is one (`header.py`).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from kvbench.engine.errors import ConfigError

LONGEST_JSON = 256 << 20  # bytes of an index; of a model of a trillion weights it has 10 MB


def files_of(where: str, suffixes: Sequence[str]) -> list[Path]:
    """The file itself, or a folder's files of these kinds and all weights that its indexes name, in a fixed order."""
    path = Path(where)
    if path.is_file():
        return [path]
    beside = sorted(file for file in path.iterdir() if file.suffix in suffixes and file.is_file())
    named = (path / name for name in sorted({*named_weights(path)}))
    return beside + [file for file in named if file not in beside and file.is_file()]


def named_weights(folder: Path) -> Iterator[str]:
    """The files of weights that config.json and indexes name, relative to the folder; `ConfigError` outside of it.

    What they name and is not there is transformers' to refuse: a folder may keep the index of weights that it lacks.
    """
    indexes = {file.name: file for file in sorted(folder.glob("*.index*.json"))}
    chosen = read_object(folder / "config.json").get("transformers_weights")
    if isinstance(chosen, str):
        yield inside(folder, "config.json", chosen)
        if chosen.endswith(".json"):
            indexes[chosen] = folder / chosen
    for name, file in indexes.items():
        shards = read_object(file).get("weight_map")
        for shard in {*shards.values()} if isinstance(shards, dict) else ():
            if isinstance(shard, str):
                yield inside(folder, name, shard)


def inside(folder: Path, where: str, name: str) -> str:
    """The name in one form, where it leads to a place below the folder; links are followed, as they are anywhere."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ConfigError(
            f"{folder / where} names the weights {name!r:.200}, which lie outside of its folder; put them into "
            f"{folder} and name them there"
        )
    return str(path)


def read_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; {} where that is nothing that could name a file."""
    try:
        found = json.loads(file.read_bytes()) if file.stat().st_size <= LONGEST_JSON else None
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
