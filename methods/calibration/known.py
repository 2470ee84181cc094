"""A calibration as a method asks for it: from the user's file, from the cache folder, or made at first use.

Made once for a model, for all methods, cells and runs: who starts at the same time waits. What is made goes into the
cache folder under the digest of the model; where that cannot be written, every process makes its own.

Not here: what is measured (`kinds.py`), how a file looks (`files.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import torch
from filelock import FileLock
from torch import Tensor

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.model import Model
from kvbench.engine.observe import ModelFact
from kvbench.engine.passes.trace import Known
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.terminal import say
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.calibration import files
from kvbench.methods.calibration.files import Calibration
from kvbench.methods.calibration.kinds import kind_of
from kvbench.methods.calibration.prose import embedded_prose, prose_name

LETTERS = 16  # of text for a token, more than any tokenizer puts into one on average


@dataclass(frozen=True)
class Calibrated(ModelFact):
    """One array of a calibration. Of a trace without a model, that of the layer's own queries and keys."""

    kind: str
    array: str
    file: Path | None  # None: that of the cache folder
    makes: bool  # where the cache folder has none

    def look_up(self, model: Model) -> Known:
        found = obtain(model, self.kind, self.file, self.makes)
        array = torch.from_numpy(found.arrays[self.array])
        origin = found.about.origin() | ({"file": str(self.file)} if self.file else {})
        return Known(dict(zip(found.about.layers, array, strict=True)), origin)

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        kind = kind_of(self.kind)
        return kind.of_layer(q[:, :, : kind.n_tokens], k[:, :, : kind.n_tokens])[self.array]


class NeedsCalibration(SelectiveAttention):
    """A method that observes a calibration of its model, which its `Params` name: `calibration_file`, `calibrate`."""

    calibration: ClassVar[str]  # its kind

    @classmethod
    def check(cls, params: Any, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        files.check_file(params.calibration_file, cls.calibration, shape)

    @classmethod
    def check_model(cls, params: Any, model: Checkpoint) -> None:
        files.check_calibration(params.calibration_file, cls.calibration, params.calibrate == "missing", model)

    @classmethod
    def data_digest(cls, params: Any) -> str | None:
        return files.digest_of_file(params.calibration_file)

    def origin(self) -> dict[str, Any]:
        """What the model was calibrated on, for the report."""
        (what,) = self.observations(self.params, self.plan)
        return {"calibration": dict(self.trace.origins.get(what, {}))}


def obtain(model: Model, kind: str, file: Path | None = None, makes: bool = True) -> Calibration:
    """The calibration of this model; inside `model.hooked()`, since it may be made now."""
    files.check_calibration(file, kind, makes, model.checkpoint)
    if file is not None:
        return files.read(file.expanduser(), str(file))
    if model.tokenizer is None or model.checkpoint.is_drawn:
        return drawn(model, kind)
    if found := files.kept(kind, model.checkpoint):
        return found
    path = files.place(kind, model.digest)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(path.parent / ".lock"):
            if found := files.kept(kind, model.checkpoint):
                return found
            made = make(model, kind)
            with suppress(OSError):
                files.write(path, made)
            return made
    return make(model, kind)


def make(model: Model, kind: str) -> Calibration:
    """A calibration on the embedded prose."""
    n = kind_of(kind).n_tokens
    say(f"Calibrating {model.shape.name} ({kind}) on {n:,} tokens, once", file=sys.stderr)
    return calibrate(model, kind, last_tokens(model, embedded_prose(), n), prose_name())


def calibrate(model: Model, kind: str, ids: Sequence[int], text: str) -> Calibration:
    arrays = {name: x.cpu().numpy() for name, x in kind_of(kind).measure(model, ids).items()}
    about = files.about(kind, model.shape, model.digest, text, len(ids), date.today().isoformat())
    return Calibration(about, arrays)


def last_tokens(model: Model, text: str, n: int) -> list[int]:
    """The text's last `n` tokens, or as many as it has: tasks read the embedded prose from its beginning."""
    return [*model.tokenizer.encode(text[-LETTERS * n :])][-n:]


def drawn(model: Model, kind: str) -> Calibration:
    """A calibration from drawn queries and keys, for a model of drawn weights, to which no text means anything."""
    shape, draw = model.shape, torch.Generator().manual_seed(0)
    n = 8 * shape.d_h
    found = []
    for _ in shape.attention_layers:
        q, k = (torch.randn(1, heads, n, shape.d_h, generator=draw) for heads in (shape.h, shape.h_kv))
        found.append(kind_of(kind).of_layer(q, k))
    arrays = {name: torch.stack([each[name] for each in found]).numpy() for name in found[0]}
    return Calibration(files.about(kind, shape, model.digest, "drawn at random", n, ""), arrays)
