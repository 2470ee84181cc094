"""`Sharing`: the keys of `reuse=`, by which some layers of a fetching method choose for those behind them.

Anchors are spaced evenly, given, or chosen by a calibration of the model (`methods/calibration/reuse.py`), which also
says which head of an anchor a head behind it resembles. Kascade (arXiv:2512.16391) and OmniKV (ICLR 2025) are presets.

Not here: a step (`engine/layouts/handed.py`), what is refused with which method (`methods/combinations.py`). No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.declared import Count, Index, Once
from kvbench.engine.errors import ConfigError
from kvbench.engine.selection import Behind, Reuse
from kvbench.engine.shapes import Checkpoint, ModelShape

KIND = "reuse"  # of calibration


@dataclass(frozen=True)
class Sharing:
    name: str  # the file in conf/reuse
    every: Count | None = None
    anchors: Annotated[tuple[Index, ...], Once()] | None = None
    n_anchors: Count | None = None
    file: Path | None = None
    heads: Literal["same", "mapped"] = "same"
    anchor_attends: Literal["chosen", "first_all", "all"] = "chosen"
    dense_behind: Index = 0
    comm_counts: Literal["anchor", "mean"] = "anchor"

    def __post_init__(self) -> None:
        if self.file is None and (self.n_anchors is not None or self.heads == "mapped"):
            needs = "reuse.n_anchors" if self.n_anchors is not None else "reuse.heads=mapped"
            raise ConfigError(
                f"{needs} needs a calibration of the model; make one with `kvbench calibrate reuse model=NAME "
                "out=FILE` and give reuse.file=FILE"
            )

    @property
    def label(self) -> str:
        """Words behind the method's name."""
        given = " ".join(map(str, self.anchors or ()))
        what = f"every {self.every}" if self.every else given or f"{self.n_anchors} of {self.file and self.file.name}"
        notes = ["mapped"] if self.heads == "mapped" else []
        notes += {"chosen": [], "first_all": ["first to all"], "all": ["anchors to all"]}[self.anchor_attends]
        notes += [f"{self.dense_behind} dense behind"] if self.dense_behind else []
        notes += ["comm in the mean"] if self.comm_counts == "mean" else []
        return f"reuse {what} ({', '.join(notes)})" if notes else f"reuse {what}"

    def identity(self) -> dict[str, Any]:
        """What of it identifies a run, as plain data."""
        plain = {"anchors": self.anchors and [*self.anchors], "file": self.file and str(self.file)}
        return {key: value for key, value in (vars(self) | plain).items() if value is not None}

    def on(self, shape: ModelShape, whole: Sequence[int] = ()) -> Reuse:
        """Which layers of a model choose, but for those that are left `whole`; `ConfigError` where one cannot."""
        from kvbench.methods.calibration import anchors as rules  # numpy, which a refused command waits for in vain

        layers = [layer for layer in shape.attention_layers if layer not in whole]
        if self.n_anchors is None:
            anchors = sorted(self.anchors) if self.anchors else layers[:: self.every]
        elif self.n_anchors > len(layers):
            raise ConfigError(f"reuse.n_anchors={self.n_anchors} is more than the {len(layers)} layers to choose from")
        else:
            sim, importance = self.measured(shape, layers)
            value = rules.layer_similarity(sim) * importance
            anchors = [layers[i] for i in rules.best_anchors(value, self.n_anchors)]
        if strange := [layer for layer in anchors if layer not in layers]:
            raise ConfigError(
                f"reuse.anchors names layer {strange[0]}, which the method does not compress in {shape.name}; it "
                f"compresses {', '.join(map(str, layers))}"
            )
        found = self.divided(layers, anchors)
        if self.heads == "same":
            return found
        sim, _ = self.measured(shape, layers)
        at = {layer: i for i, layer in enumerate(layers)}
        mapped = [one._replace(heads=rules.best_heads(sim[at[one.anchor], at[one.layer]])) for one in found.behind]
        return replace(found, behind=tuple(mapped))

    def measured(self, shape: ModelShape, layers: Sequence[int]) -> tuple[Any, Any]:
        """How the choices of these layers serve each other, and what each layer's attention matters, of the file."""
        assert self.file is not None, "__post_init__ lets nothing pass that needs a file and has none"
        from kvbench.methods.calibration import files

        files.check_file(self.file, KIND, shape)
        arrays = files.read(self.file.expanduser(), str(self.file)).arrays
        at = [*map(shape.attention_layers.index, layers)]
        return arrays["sim"][at][:, at], arrays["importance"][at]

    def check_model(self, model: Checkpoint) -> None:
        """Raise `ConfigError` where the file is of another model."""
        if self.file is not None:
            from kvbench.methods.calibration import files

            files.check_calibration(self.file, KIND, False, model)

    def data_digest(self) -> str | None:
        """A hash of the file, which is part of a run's identity."""
        if self.file is None:
            return None
        from kvbench.methods.calibration import files

        return files.digest_of_file(self.file)

    def divided(self, layers: Sequence[int], anchors: Sequence[int]) -> Reuse:
        """What each of these layers does: a dense one has no anchor in front, or is one of the first behind it."""
        behind, dense, last, n = list[Behind](), list[int](), None, 0
        for layer in layers:
            if layer in anchors:
                last, n = layer, 0
            elif last is None or n < self.dense_behind:
                dense.append(layer)
                n += 1
            else:
                behind.append(Behind(layer, last))
        all_too = {"chosen": (), "first_all": tuple(anchors[:1]), "all": tuple(anchors)}[self.anchor_attends]
        return Reuse(tuple(anchors), tuple(behind), all_too, tuple(dense))

    def of_anchors(self, request: BudgetRequest, reuse: Reuse) -> BudgetRequest:
        """What an anchor may read to find tokens: with `comm_counts: mean` also what the layers behind it do not."""
        if self.comm_counts == "anchor" or request.comm is None:
            return request
        return replace(request, comm=min(Fraction(1), request.comm * n_layers(reuse) / len(reuse.anchors)))


def n_layers(reuse: Reuse) -> int:
    return len(reuse.anchors) + len(reuse.behind) + len(reuse.dense)


def comm_mean(comm: Fraction, reuse: Reuse) -> Fraction:
    """What is read to find tokens, of the key bytes of all layers, where an anchor reads `comm` of its own."""
    return comm * len(reuse.anchors) / n_layers(reuse)
