"""Scales of keys and values that a checkpoint has for a cache in FP8, as vLLM and SGLang find them by their names.

Not here: what is coded with them (`methods/quantising/floats.py`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.engine.checkpoints.files import files_of
from kvbench.engine.errors import ConfigError

NAME = re.compile(r"\.(\d+)\.(?:.*\.)?([kv]|kv)_scale$")  # such as model.layers.3.self_attn.k_proj.k_scale
LONGEST_HEADER = 100 << 20  # bytes, as safetensors has it

Scales = tuple[tuple[float, ...], tuple[float, ...]]  # of K and of V: one, or one for each KV head


@cache
def cache_scales(where: str) -> Mapping[int, Scales]:
    """Scales by layer; one that is found serves both K and V. Empty where the folder or hub name has none."""
    folder = folder_of(where) if where else None
    found: dict[int, dict[str, tuple[float, ...]]] = {}
    for file in [] if folder is None else files_of(str(folder), (".safetensors",)):
        for name in scale_names(file):
            if match := NAME.search(name):
                found.setdefault(int(match[1]), {})[match[2]] = numbers(file, name)
    return {layer: both(scales) for layer, scales in found.items()}


def both(scales: Mapping[str, tuple[float, ...]]) -> Scales:
    other = next(iter(scales.values()))
    k, v = (scales.get(side, scales.get("kv", other)) for side in "kv")
    return k, v


def scale_names(file: Path) -> Iterator[str]:
    """Names of scales in a safetensors file, by its header alone."""
    if file.suffix != ".safetensors":
        return
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header: Any = json.loads(content.read(length)) if length <= LONGEST_HEADER else {}
    yield from (name for name in header if NAME.search(name))


def numbers(file: Path, name: str) -> tuple[float, ...]:
    """A tensor's numbers, of which each is a scale; `ConfigError` where one is none."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        found = tuple(tensors.get_tensor(name).float().flatten().tolist())
    if not found or not all(0 < scale < float("inf") for scale in found):
        raise ConfigError(f"{file} has {name}={found!s:.60}, and a scale is above 0; use method.source=prompt")
    return found


def folder_of(where: str) -> Path | None:
    """The folder of a checkpoint, in the hub's cache where it is one of the hub; None: it is not here."""
    if Path(where).is_dir():
        return Path(where)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(where, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
