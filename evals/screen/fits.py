"""Which prompts fit: the longest that a model can read in the memory that is free.

    share of free memory = weights + tokens * (K and V of compressed layers + the widest point of one layer)

`engine/books/width.py` has the share and the widest point, by which runs plan too; what methods observe is counted
there, and what layers hold that nobody compresses is not counted. Shape and weights are those of the model's own class,
made without numbers.

Not here: what runs do about short memory (`engine/books/width.py`, `evals/answer.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from kvbench.engine.shapes import ModelShape

ROOT = Path(__file__).resolve().parents[2]
FORMULA = (
    "{share:.0%} of free memory = weights + tokens x (K and V of every layer + {pass_values} values per dimension)"
)


def token_values(shape: ModelShape, pass_values: int) -> int:
    """Numbers that a token of the prompt takes at the widest point of the pass."""
    return len(shape.kept_layers) * shape.h_kv * shape.width + pass_values * shape.d_model


def longest(
    shape: ModelShape, n_weights: int, free_bytes: int, element_bytes: int, share: float, pass_values: int
) -> int:
    """Tokens of the longest prompt, 0 where the weights alone do not fit; never more than the model's window."""
    room = share * free_bytes - n_weights * element_bytes
    return min(shape.window, max(0, int(room / (token_values(shape, pass_values) * element_bytes))))


@dataclass(frozen=True)
class Shipped:
    """A model of conf/model, and its architecture of conf/architecture."""

    name: str
    id: str
    architecture: Mapping[str, Any]

    @cached_property
    def config(self) -> Any:
        """transformers' configuration of it."""
        return import_module("kvbench.engine.checkpoints.load").read_config(self.id, self.architecture)

    @cached_property
    def shape(self) -> ModelShape:
        return import_module("kvbench.engine.checkpoints.kinds").shape_of(self.config, self.name)

    @cached_property
    def n_weights(self) -> int:
        """Numbers that its text model is made of."""
        return import_module("kvbench.engine.checkpoints.kinds").survey(self.config).n_weights


def shipped() -> list[Shipped]:
    """The models of conf/model whose architecture is known."""
    found = []
    for file in sorted((ROOT / "conf" / "model").glob("*.yaml")):
        spec = yaml.safe_load(file.read_text())
        shape = architecture_file(file.stem)
        if shape is not None:
            found.append(Shipped(spec["name"], spec["id"], yaml.safe_load(shape.read_text())))
    return found


def architecture_file(name: str) -> Path | None:
    """The shape of a model by its name; instructions change none."""
    files = (ROOT / "conf" / "architecture" / f"{one}.yaml" for one in (name, name.removesuffix("-instruct")))
    return next((file for file in files if file.is_file()), None)
