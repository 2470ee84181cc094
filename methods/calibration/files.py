"""Files of calibrations: arrays as .npz, with what they were measured on, and the refusal of any other model's.

Torch is not imported, so that a wrong file is refused before a model is loaded.

Not here: how an array is measured (`kinds.py`).
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.engine.checkpoints.digests import cache_home, read_own_bytes, write_own_bytes
from kvbench.engine.errors import ConfigError, first_line
from kvbench.engine.shapes import Checkpoint, ModelShape

MOST_BYTES = 1 << 30  # of a file that is believed
REMEDY = "make one with `kvbench calibrate`"


@dataclass(frozen=True)
class About:
    """Which calibration this is."""

    kind: str
    model: str  # as configurations call it
    digest: str  # of the model's files
    layers: tuple[int, ...]  # whose arrays there are
    h: int
    h_kv: int
    d_h: int
    text: str  # what it was measured on
    n_tokens: int
    made: str  # date

    def origin(self) -> dict[str, Any]:
        """Origin of a calibration as results have it; equal calibrations have the same."""
        return {"kind": self.kind, "text": self.text, "n_tokens": self.n_tokens}


@dataclass(frozen=True)
class Calibration:
    """Arrays of a model; the first axis of each is the layer, in the order of `about.layers`."""

    about: About
    arrays: Mapping[str, np.ndarray]


def about(kind: str, shape: ModelShape, digest: str, text: str, n_tokens: int, made: str) -> About:
    layers = tuple(shape.attention_layers)
    return About(kind, shape.name, digest, layers, shape.h, shape.h_kv, shape.d_h, text, n_tokens, made)


def write(path: Path, calibration: Calibration) -> None:
    """The file, as a whole or not at all."""
    content = io.BytesIO()
    np.savez(content, about=np.array(json.dumps(asdict(calibration.about))), **calibration.arrays)  # type: ignore[arg-type]
    write_own_bytes(path, content.getvalue())


def read(content: Path | io.BytesIO, name: str) -> Calibration:
    """A calibration; `ConfigError` where the file called `name` is none."""
    try:
        with np.load(content, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        facts = json.loads(str(arrays.pop("about")))
        facts["layers"] = tuple(facts["layers"])
        return Calibration(About(**facts), arrays)
    except OSError as error:
        raise ConfigError(
            f"the calibration file {name} cannot be read ({error.strerror or first_line(error)}); {REMEDY}"
        ) from None
    except (ValueError, TypeError, KeyError, EOFError, AttributeError, zipfile.BadZipFile):
        raise ConfigError(f"{name} is no calibration file; {REMEDY}") from None


def refuse_other(found: Calibration, name: str, kind: str, shape: ModelShape, digests: Collection[str] = ()) -> None:
    """`ConfigError` for the calibration of another model, shape or kind; without `digests` shapes alone are compared.

    The name of a model says nothing: two may have one, and one may have two.
    """
    said = found.about
    if said.kind != kind:
        raise ConfigError(f"{name} is a calibration of kind {said.kind}, and {kind} is asked for; {REMEDY} {kind}")
    ours, theirs = dims(shape.attention_layers, shape), dims(said.layers, said)
    if theirs != ours:
        raise ConfigError(f"{name} is the calibration of a model of {theirs}, and {shape.name} has {ours}; {REMEDY}")
    if digests and said.digest not in digests:
        raise ConfigError(
            f"{name} is the calibration of another model ({said.model}, {said.digest}) than {shape.name} "
            f"({next(iter(digests))}); {REMEDY}"
        )


def check_file(file: Path | None, kind: str, shape: ModelShape) -> None:
    """`ConfigError` where the user's file is none, or of another kind or shape; before a model is loaded."""
    if file is not None:
        refuse_other(read(file.expanduser(), str(file)), str(file), kind, shape)


def check_calibration(file: Path | None, kind: str, makes: bool, model: Checkpoint) -> None:
    """`ConfigError` where the user's file is of another model, or there is no calibration and none is to be made."""
    if file is not None:
        refuse_other(read(file.expanduser(), str(file)), str(file), kind, model.shape, model.digests)
    elif not (makes or model.is_drawn or kept(kind, model)):
        raise ConfigError(
            f"there is no calibration of kind {kind} for {model.shape.name}; make it with `python -m "
            f"kvbench.methods.calibrate {kind} model={model.shape.name}`, or use method.calibrate=missing"
        )


def place(kind: str, digest: str) -> Path:
    """Where the calibration of a model lies that runs find by themselves."""
    return cache_home() / f"calibrations-{os.geteuid()}" / f"{kind}-{digest}.npz"


def kept(kind: str, model: Checkpoint) -> Calibration | None:
    """The calibration in this user's cache folder; None where there is none, or a damaged one, or another user's."""
    for digest in model.digests:
        path = place(kind, digest)
        with suppress(OSError, ConfigError):
            found = read(io.BytesIO(read_own_bytes(path, MOST_BYTES)), str(path))
            refuse_other(found, str(path), kind, model.shape, model.digests)
            return found
    return None


def digest_of_file(file: Path | None) -> str | None:
    """A hash of the user's file, which is part of a run's identity."""
    return None if file is None else hashlib.sha256(file.expanduser().read_bytes()).hexdigest()[:12]


def dims(layers: tuple[int, ...], of: ModelShape | About) -> str:
    return f"{len(layers)} layers, {of.h} query heads, {of.h_kv} KV heads and {of.d_h} dimensions"
