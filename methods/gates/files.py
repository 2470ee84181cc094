"""Files of gates: safetensors whose metadata say which model they are for. Pickles are never read, and torch waits.

Not here: what a gate computes (`methods/gates/networks.py`).
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.engine.checkpoints.digests import cache_home, read_own_bytes, write_own_bytes
from kvbench.engine.errors import ConfigError, first_line
from kvbench.engine.shapes import Checkpoint, ModelShape

MOST_BYTES = 1 << 31  # of a file that is believed; an MLP of 512 for 64 layers of 8,192 takes 1.1e9
MOST_HEADER = 1 << 24
DRAWN, AUTO = "drawn", "auto"
TYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F64": np.dtype("<f8")}
HUB_FILE = "model.safetensors"
KINDS = ("kvzap", "fastkvzip")
# Of a layer, by kind: the names of its weights.
FAST = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "q_norm.weight", "k_norm.weight", "k_base", "b")
LINEAR, MLP = ("weight", "bias"), ("0.weight", "0.bias", "2.weight", "2.bias")


@dataclass(frozen=True)
class Gate:
    """A gate as its file holds it: float32 numbers by layer and name, and what the file says of itself."""

    name: str
    digest: str  # SHA-256 of the file, its first 12 letters
    facts: Mapping[str, str]
    layers: Mapping[int, Mapping[str, np.ndarray]]


def remedy(kind: str) -> str:
    return f"train one with `kvbench calibrate gate model=… method={kind}`"


def place(kind: str, digest: str) -> Path:
    """Where runs look for the gate of a model by themselves."""
    return cache_home() / f"calibrations-{os.geteuid()}" / f"{kind}-gate-{digest}.safetensors"


def content_of(gate: str, kind: str, digests: tuple[str, ...] = ()) -> tuple[str, bytes]:
    """Name and bytes of a gate: of a file, of a hub repository's, or the one in the cache folder for `auto`."""
    if gate == AUTO:
        for digest in digests:
            with suppress(OSError, ConfigError):
                return str(place(kind, digest)), read_own_bytes(place(kind, digest), MOST_BYTES)
        raise ConfigError(f"there is no gate of kind {kind} for this model; {remedy(kind)}, or give method.gate=FILE")
    path = Path(gate).expanduser()
    if not path.is_file() and gate.count("/") == 1 and not path.exists():
        path = from_hub(gate, kind)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"method.gate={gate} has more than {MOST_BYTES >> 30} GB; no gate is as large")
        return gate, path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"method.gate={gate} cannot be read ({error.strerror or first_line(error)}); {remedy(kind)}"
        ) from None


def from_hub(gate: str, kind: str) -> Path:
    """The file of a hub repository, in the hub's own cache."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(gate, HUB_FILE))
    except Exception as error:
        raise ConfigError(
            f"method.gate={gate} is no file, and no {HUB_FILE} of that name can be had from the hub "
            f"({first_line(error)}); {remedy(kind)}"
        ) from None


def parsed(name: str, content: bytes, kind: str) -> Gate:
    """A gate from the bytes of a safetensors file; `ConfigError` where they are none."""
    try:
        (length,) = struct.unpack("<Q", content[:8])
        if length > MOST_HEADER:
            raise ValueError
        header: dict[str, Any] = json.loads(content[8 : 8 + length])
        facts = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        layers: dict[int, dict[str, np.ndarray]] = {}
        for key, entry in header.items():
            folder, number, rest = key.split(".", 2)
            if folder != "layers":
                raise ValueError
            start, stop = entry["data_offsets"]
            numbers = np.frombuffer(content[8 + length + start : 8 + length + stop], TYPES[entry["dtype"]])
            if entry["dtype"] == "BF16":
                numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
            layers.setdefault(int(number), {})[rest] = numbers.astype(np.float32).reshape(entry["shape"])
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, RecursionError):
        raise ConfigError(
            f"method.gate={name} is no safetensors file with weights layers.0.…; pickles are not read: {remedy(kind)}"
        ) from None
    return Gate(name, hashlib.sha256(content).hexdigest()[:12], facts, layers)


def read(gate: str, kind: str, digests: tuple[str, ...] = ()) -> Gate:
    return parsed(*content_of(gate, kind, digests), kind)


def written(path: Path, layers: Mapping[int, Mapping[str, np.ndarray]], facts: Mapping[str, str]) -> None:
    """A gate's file, as a whole or not at all."""
    from safetensors.numpy import save

    every = ((f"layers.{layer}.{name}", x) for layer, own in layers.items() for name, x in own.items())
    arrays = {name: np.ascontiguousarray(x) for name, x in every}
    write_own_bytes(path, save(arrays, dict(facts)))


def check_shapes(gate: Gate, kind: str, shape: ModelShape) -> None:
    """Raise `ConfigError` for a gate of another kind, of other layers, or of a model of other sizes."""
    said = gate.facts.get("kind", kind)
    if said != kind:
        raise ConfigError(f"method.gate={gate.name} is a gate of kind {said}, and {kind} is asked for; {remedy(kind)}")
    if missing := [layer for layer in shape.attention_layers if layer not in gate.layers]:
        raise ConfigError(
            f"method.gate={gate.name} has no weights for layer {missing[0]} of {shape.name}, which has "
            f"{len(shape.attention_layers)} layers to compress; {remedy(kind)}"
        )
    for layer in shape.attention_layers:
        own = gate.layers[layer]
        wanted = shapes_of(kind, own, shape)
        for name, sizes in wanted.items():
            if name not in own or own[name].shape != sizes:
                found = "is missing" if name not in own else f"has the shape {list(own[name].shape)}"
                raise ConfigError(
                    f"layers.{layer}.{name} of method.gate={gate.name} {found}, and {shape.name} needs "
                    f"{list(sizes)}; {remedy(kind)}"
                )
            if not np.isfinite(own[name]).all():
                raise ConfigError(
                    f"layers.{layer}.{name} of method.gate={gate.name} has numbers that are NaN or infinite"
                )


def shapes_of(kind: str, own: Mapping[str, np.ndarray], shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """What a layer's weights have to be for this model; widths of the gate itself are its own."""
    first = "q_proj.weight" if kind == "fastkvzip" else "weight" if "weight" in own else "0.weight"
    d, h_kv, g = shape.d_model or of(own, first, 1), shape.h_kv, shape.g
    if kind == "fastkvzip":
        e, m = of(own, "q_norm.weight", 0), of(own, "k_base", 2)
        sizes = (h_kv * g * e, d), (h_kv * g * e,), (h_kv * e, d), (e,), (e,), (h_kv, 1, m, e), (h_kv, 1, g)
        return dict(zip(FAST, sizes, strict=True))
    if "weight" in own:
        return {"weight": (h_kv, d), "bias": (h_kv,)}
    hidden = of(own, "0.weight", 0)
    return dict(zip(MLP, ((hidden, d), (hidden,), (h_kv, hidden), (h_kv,)), strict=True))


def of(own: Mapping[str, np.ndarray], name: str, axis: int) -> int:
    found = own.get(name)
    return 0 if found is None or found.ndim <= axis else found.shape[axis]


def check_model(gate: str, kind: str, model: Checkpoint) -> None:
    """Raise `ConfigError` where there is no gate, or it is of another model or shape."""
    if gate == DRAWN or (gate == AUTO and model.is_drawn):
        return
    found = read(gate, kind, model.digests)
    check_shapes(found, kind, model.shape)
    said = found.facts.get("model_digest")
    if said is None:
        raise ConfigError(
            f"method.gate={gate} does not say which model it is for; write model_digest={model.digests[0]} into its "
            f"metadata if it is for {model.shape.name}"
        )
    if said not in model.digests:
        raise ConfigError(
            f"method.gate={gate} is of another model ({found.facts.get('model', 'unnamed')}, {said}) than "
            f"{model.shape.name} ({model.digests[0]}); {remedy(kind)}"
        )


def digest_of(gate: str) -> str | None:
    """A hash of the user's file, which is part of a run's identity; None where the model alone says it."""
    if gate in (DRAWN, AUTO):
        return None
    return hashlib.sha256(content_of(gate, KINDS[0])[1]).hexdigest()[:12]
