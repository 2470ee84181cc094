"""Which prompts fit: the longest that a shipped model can read in the memory that is free.

    share of free memory = weights + tokens * (K and V of every layer + the widest point of one layer)

`engine/width.py` has the share and the widest point, by which runs plan too; what methods observe is counted there.

Not here: what runs do about short memory (`engine/width.py`, `evals/answer.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FORMULA = (
    "{share:.0%} of free memory = weights + tokens x (K and V of every layer + {pass_values} values per dimension)"
)


@dataclass(frozen=True)
class Shipped:
    """A model of conf/model, and its architecture of conf/architecture."""

    name: str
    id: str
    architecture: Mapping[str, Any]

    @property
    def window(self) -> int:
        return self.architecture["max_position_embeddings"]

    @property
    def n_weights(self) -> int:
        """Numbers in all matrices; norms and biases are a thousandth more."""
        a = self.architecture
        d, h = a["hidden_size"], a["num_attention_heads"]
        d_h = a.get("head_dim") or d // h
        attention = 2 * d * d_h * (h + a.get("num_key_value_heads", h))
        mlp = 2 * d * a["ffn_dim"] if "ffn_dim" in a else 3 * d * a["intermediate_size"]
        ends = a["vocab_size"] * d * (1 if a["tie_word_embeddings"] else 2)
        return ends + a["num_hidden_layers"] * (attention + mlp)

    def token_values(self, pass_values: int) -> int:
        """Numbers that a token of the prompt takes at the widest point of the pass."""
        a = self.architecture
        d, h = a["hidden_size"], a["num_attention_heads"]
        kv = 2 * a["num_hidden_layers"] * a.get("num_key_value_heads", h) * (a.get("head_dim") or d // h)
        return kv + pass_values * d

    def longest(self, free_bytes: int, element_bytes: int, share: float, pass_values: int) -> int:
        """Tokens of the longest prompt, 0 where the weights alone do not fit; never more than the model's window."""
        room = share * free_bytes - self.n_weights * element_bytes
        return min(self.window, max(0, int(room / (self.token_values(pass_values) * element_bytes))))


def shipped() -> list[Shipped]:
    """The models of conf/model whose architecture is known, smallest first."""
    found = []
    for file in sorted((ROOT / "conf" / "model").glob("*.yaml")):
        spec = yaml.safe_load(file.read_text())
        shape = architecture_file(file.stem)
        if shape is not None:
            found.append(Shipped(spec["name"], spec["id"], yaml.safe_load(shape.read_text())))
    return sorted(found, key=lambda model: model.n_weights)


def architecture_file(name: str) -> Path | None:
    """The shape of a model by its name; instructions change none."""
    files = (ROOT / "conf" / "architecture" / f"{one}.yaml" for one in (name, name.removesuffix("-instruct")))
    return next((file for file in files if file.is_file()), None)
