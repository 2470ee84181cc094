"""`Kind`: what one calibration measures of a model, and the statistics of queries and keys that most of them are.

Not here: any kind, files.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.engine.causal import Chunk, causal
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.softmax import Softmax


class Kind(ABC):
    """A kind of calibration: arrays per layer."""

    name: str
    n_tokens: int  # of the text, unless the user says how many
    n_block: int  # that are read at once

    @abstractmethod
    def measure(self, model: Model, ids: Sequence[int]) -> Mapping[str, Tensor]:
        """Arrays whose first axis is the compressed layer, from a text's tokens; inside `model.hooked()`."""

    @abstractmethod
    def of_layer(self, q: Tensor, k: Tensor) -> Mapping[str, Tensor]:
        """A stand-in where there is no model: the arrays of one layer, from its q (1, h, s, d_h) and k after rotation.

        For counts and times of random layers.
        """


class Seen(NamedTuple):
    """Queries and keys of one layer's attention for a block of text: (1, heads, n, d_h) float32."""

    q: Tensor
    k: Tensor
    q_before: Tensor  # rotary embedding
    k_before: Tensor


class Statistics(Kind):
    """A kind that is a function of sums over blocks of text."""

    least: int = 0  # tokens for each dimension of a head, below which the sums say too little

    @abstractmethod
    def sums(self, seen: Seen) -> dict[str, Tensor]:
        """The sums that a calibration adds up, from one layer and one block of text."""

    def joined(self, earlier: dict[str, Tensor], later: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums of two stretches of text."""
        return {name: x + later[name] for name, x in earlier.items()}

    @abstractmethod
    def arrays(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One layer's arrays from its sums."""

    def measure(self, model: Model, ids: Sequence[int]) -> Mapping[str, Tensor]:
        if len(ids) < self.least * model.shape.d_h:
            raise ConfigError(
                f"{len(ids)} tokens are too few for a calibration of kind {self.name} of heads of {model.shape.d_h} "
                f"dimensions; use tokens={self.least * model.shape.d_h} or more"
            )
        so_far: dict[int, dict[str, Tensor]] = {}

        def look(layer: int, seen: Seen) -> None:
            new = self.sums(seen)
            so_far[layer] = self.joined(so_far[layer], new) if layer in so_far else new

        watch(model, ids, self.n_block, look)
        found = [self.arrays(so_far[layer]) for layer in model.shape.attention_layers]
        return {name: torch.stack([each[name] for each in found]) for name in found[0]}

    def of_layer(self, q: Tensor, k: Tensor) -> Mapping[str, Tensor]:
        q, k = q.float(), k.float()
        return self.arrays(self.sums(Seen(q, k, q, k)))


def watch(model: Model, ids: Sequence[int], n_block: int, look: Callable[[int, Seen], None]) -> None:
    """Read a text in blocks that do not see each other; `look` at every compressed layer of each."""
    n_block = min(n_block, model.shape.window)
    for start in range(0, len(ids), n_block):
        block = torch.tensor([ids[start : start + n_block]], device=model.device)
        model.forward(block, 0, model.new_cache(), _Watched(model, look))


class _Watched:
    """Stands in the model's attention while a text is read."""

    def __init__(self, model: Model, look: Callable[[int, Seen], None]) -> None:
        self.model, self.look = model, look
        self.compressed = frozenset(model.shape.attention_layers)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        if layer in self.compressed:
            self.look(layer, Seen(q.float(), k.float(), self.turned_back(layer, q), self.turned_back(layer, k)))
        return causal(q, k, v, softmax, window)[0]

    def turned_back(self, layer: int, x: Tensor) -> Tensor:
        """Queries or keys (1, heads, n, d_h) as they were before rotary embedding."""
        if self.model.turn is None:
            return x.float()
        return self.model.turn[layer](x.float(), -torch.arange(x.shape[2], device=x.device).unsqueeze(0))
