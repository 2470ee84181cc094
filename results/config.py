"""The configuration of a run: the hash and the name that follow from it, and config.yaml, by which a folder is a run's.

Not here: what the keys mean and which are allowed (`evals/settings.py`).
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from kvbench.engine.errors import ConfigError
from kvbench.engine.terminal import printable
from kvbench.results.files import REMEDY, read_yaml

KEYS_WITHOUT_EFFECT = {"out", "logger", "hydra", "progress"}  # top-level keys that change no result


def config_hash(config: Mapping[str, Any]) -> str:
    """10 hex digits of the sha256 over a resolved configuration, less what changes no result."""
    kept = {key: value for key, value in config.items() if key not in KEYS_WITHOUT_EFFECT}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def run_name(config: Mapping[str, Any]) -> str:
    """Name of a run's folder: task, prefill if not exact, method and model for people, the hash for the rest."""
    keys = ("task", *(("prefill",) if "prefill" in config else ()), "method", "model")
    parts: list[Any] = [config[key] for key in keys]
    names: list[Any] = [part["name"] if isinstance(part, Mapping) else part for part in parts]
    safe = [re.sub(r"[^A-Za-z0-9._]+", "-", str(name)).strip("-.")[:40] for name in names]
    return "-".join([*safe, config_hash(config)])


def differing_keys(a: Any, b: Any, key: str = "") -> list[str]:
    """Dotted keys whose values differ between two configurations."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return [] if a == b else [key]
    old, new = cast(dict[str, Any], a), cast(dict[str, Any], b)
    names = sorted(old.keys() | new.keys(), key=str)  # YAML has keys that are no texts
    absent = object()  # differs from everything, null included
    pairs = [(f"{key}.{n}".lstrip("."), old.get(n, absent), new.get(n, absent)) for n in names]
    return [
        differing for name, x, y in pairs if name not in KEYS_WITHOUT_EFFECT for differing in differing_keys(x, y, name)
    ]


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config.yaml of anything but a run with this configuration."""
    try:
        old = read_yaml(path)
    except ValueError as error:
        raise ConfigError(f"{path} is not the configuration of a run ({error}); {REMEDY}") from None
    if not {"method", "task", "model"} <= old.keys():
        raise ConfigError(f"{path} is not the configuration of a run; {REMEDY}")
    keys = differing_keys(old, json.loads(json.dumps(config)))  # as JSON: tuples are lists
    if keys:
        shown = ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
        raise ConfigError(f"{path.parent} is of a run with another {printable(shown)}; {REMEDY}")


def read_config(folder: Path) -> dict[str, Any]:
    """A run's configuration; ValueError with the file's name where it cannot be read."""
    path = folder / "config.yaml"
    try:
        return cast(dict[str, Any], read_yaml(path))
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {reason}") from None
