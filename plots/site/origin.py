"""Where a result comes from: what identifies it, what would show that it was changed, and the command that makes it.

Not here: what the keys of a configuration mean (`evals/settings.py`, which plots do not import).
"""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import NoJson, opened, parse_json, read_bytes
from kvbench.plots.read import ROOT, Run

HASHED = ("config.yaml", "samples.jsonl", "ledger.parquet", "result.json")
PLAIN = re.compile(r"[A-Za-z0-9_./:+-]+")
# Keys of a configuration, besides its groups and its budget: what a command gives by the same name.
ASKED = (
    *("comm", "compensate", "cache", "compression_scope", "seed", "limit", "offset", "data_dir", "weights"),
    *("budget_counts", "compose_order", "positions", "dropped", "merging", "device_map", "cuda_graphs"),
    *("temperature", "top_p", "top_k", "n_answers"),
)


@dataclass(frozen=True)
class Kept(Run):
    """A run of which scores are left, and no folder: what a page says of a folder's text is never said of it."""

    page: str = ""  # that has its scores
    command: str = ""


def provenance(run: Run, others: Sequence[Path] = ()) -> dict[str, Any]:
    """What identifies a run; `others` are folders of the same run of full attention under other budgets."""
    result = run.result
    prompts = "\n".join(sorted(f"{row.id} {row.prompt_sha256}" for row in run.rows))
    return {
        "config_hash": result.config_hash,
        "git_sha": result.git_sha,
        "model_id": run.setting("model", "id"),
        "model_revision": run.setting("model", "revision"),
        "model_digest": run.setting("model_digest"),
        "dtype": result.dtype,
        "device": result.device,
        "data_source": result.data_source,
        "data_digest": run.setting("data_digest"),
        "task_version": result.task_version,
        "method_version": run.setting("method_version"),
        "prompts_sha256": hashlib.sha256(prompts.encode()).hexdigest()[:16],
        "peak_rss_bytes": result.peak_rss_bytes,
        "versions": result.versions,
        "params": result.params,
        "notes": result.notes,
        "command": run.command if isinstance(run, Kept) else command(run),
        "same_as": [folder.name for folder in others],
        "files": {name: digest(path) for name in HASHED if (path := run.folder / name).is_file()},
        "env": environment(run.folder / "env.json"),
    }


def digest(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def environment(path: Path) -> dict[str, Any]:
    """env.json less the versions, which result.json has too; {} where it was lost."""
    try:
        found = parse_json(read_bytes(path))
    except (ConfigError, NoJson):
        return {}
    kept = ("platform", "cpu", "n_cores", "ram_bytes", "started", "ended")
    return {key: found[key] for key in kept if key in found} if isinstance(found, Mapping) else {}


# --- the command ---


def command(run: Run) -> str:
    """The command line that makes this run, or goes on with it, with what differs from the defaults of today."""
    return shlex.join(["python", "run.py", *words(run.config)])


def words(config: Mapping[str, Any]) -> Iterator[str]:
    """The overrides of a configuration; a method or task in a file of the user's own is named as a file."""
    for group in ("method", "task", "prefill"):
        part = config.get(group)
        if isinstance(part, Mapping) and (group != "prefill" or part.get("name") != "exact"):
            is_file = "digest" in part and "package" not in part
            yield from choice(group, str(part.get("file") or part.get("name")), part.get("params") or {}, is_file)
    model = config.get("model")
    if isinstance(model, Mapping):
        yield from choice("model", str(model.get("name")), {k: v for k, v in model.items() if k != "name"}, False)
    tokens, ratio = config.get("budget"), config.get("ratio")
    if tokens is not None or ratio is not None:
        yield f"ratio={ratio}" if tokens is None else f"budget={tokens}"
    if (memory := config.get("memory")) is not None:
        yield f"memory={memory}"
    for key in ("compose", "allocator"):
        if isinstance(part := config.get(key), Mapping):
            yield f"{key}={part.get('name')}"
    if isinstance(part := config.get("reuse"), Mapping):
        yield from choice("reuse", str(part.get("name")), {k: v for k, v in part.items() if k != "name"}, False)
    usual = defaults("", "config")
    if memory is not None and config.get("comm", "off") is None:
        usual = usual | {"comm": None}
    for key in ASKED:
        if key in config:
            yield from differing(key, config[key], usual.get(key))
    for key in ("dtype", "device"):
        if config.get(key):
            yield f"{key}={config[key]}"


def choice(group: str, name: str, params: Mapping[str, Any], is_file: bool) -> Iterator[str]:
    """A group's file, and the parameters that differ from what stands in it."""
    usual = {} if is_file else defaults(group, name)
    if group == "model" and not usual:  # a folder, a file or a name of the hub
        name, usual = str(params.get("id")), defaults(group, "any")
        params = {key: value for key, value in params.items() if key != "id"}
    yield f"{group}={name}.py" if is_file and not name.endswith((".py", ".yaml", ".yml")) else f"{group}={name}"
    for key, value in params.items():
        if not isinstance(value, str) or value.isprintable():  # else no command line takes it, and it is of a YAML file
            yield from differing(f"{group}.{key}", value, usual.get(key))


def differing(key: str, value: Any, usual: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        below = usual if isinstance(usual, Mapping) else {}
        for name, inner in value.items():
            yield from differing(f"{key}.{name}", inner, below.get(name))
    elif value != usual:
        yield f"{key}={as_word(value)}"


def as_word(value: Any) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, list):
        return "[" + ",".join(map(as_word, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if PLAIN.fullmatch(value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


@cache
def defaults(group: str, name: str) -> dict[str, Any]:
    """The values of a file in conf/ and of those that it builds on; {} where there is none of this name."""
    path = ROOT / "conf" / group / f"{name}.yaml"
    if not re.fullmatch(r"[\w.-]+", name) or not path.is_file():
        return {}
    own = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    built_on = own.pop("defaults", []) if group else []
    merged: dict[str, Any] = {}
    for below in built_on:
        if isinstance(below, str) and below != "_self_":
            merged |= defaults(group, below)
    return merged | own
