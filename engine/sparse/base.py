"""What all sparse prefills have in common: a rule says per layer and head what is computed, the kernel computes it.

A rule (`SparsePrefill`) makes a `Kept` of a layer's queries and keys. Attention over it, the count of what was computed
and the sums of its weights are the same for all (`kernels/attend_kept.py`).

`density` is a budget of work: the share of the causal pairs of query and key that a layer computes, all heads together.
Then the rule's own free parameter steps back, and each layer takes the largest value that stays within the share. No
value goes below what the rule always keeps.

Not here: the rules (one file each), which pass is sparse (`engine/prefill.py`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, NamedTuple

from annotated_types import Gt, Le
from torch import Tensor

from kvbench.engine.declared import Is, Tokens, word
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.attend_kept import Kept, attend_kept
from kvbench.kernels.scratch import finer


class Attended(NamedTuple):
    """One layer's sparse attention."""

    out: Tensor  # (1, h, s, d_v)
    lse: Tensor  # (1, h, s) float32, of the pairs that are kept, and of sinks
    share: Tensor  # of all causal pairs, float64; on the device, so that nobody waits for it
    kept: Kept


FORM = "a share of the causal pairs above 0 and up to 1, or null for the prefill's own parameters"


@dataclass(frozen=True, kw_only=True)
class SparsePrefill(ABC):
    """A rule of what is computed, with its parameters: the keys of its file in conf/prefill."""

    # Share of the causal pairs to compute; None: by the rule's own parameters.
    density: Annotated[Fraction, Gt(0), Le(1), Is(FORM)] | None
    dense_last: Tokens  # queries at the prompt's end that see their whole past
    layers: tuple[int, int] | None  # the first sparse layer, and the one after the last; None: all
    observe: Literal["kept", "exact"]  # what sums over all queries are made of

    title: ClassVar[str]
    version: ClassVar[int] = 1  # raised whenever its answers change; part of a run's identity
    asks_last: ClassVar[bool] = False  # whether the prompt's last queries choose for all

    def __post_init__(self) -> None:
        if self.layers is not None and not 0 <= self.layers[0] < self.layers[1]:
            raise ConfigError(
                f"prefill.layers={word(self.layers)} has no layer; give the first sparse layer, from 0, and the one "
                "behind the last, or null for all"
            )

    def check(self, shape: ModelShape) -> None:
        """`ConfigError` where the model cannot be read so."""
        if self.layers is not None and self.layers[1] > shape.n_layers:
            raise ConfigError(
                f"prefill.layers={word(self.layers)} is out of range; model {shape.name!r} has {shape.n_layers} layers"
            )

    def data_digest(self) -> str | None:
        """Digest of a file that the rule reads."""
        return None

    def is_exact(self, layer: int, s: int) -> bool:
        """Whether a layer computes all pairs of a prompt of `s` tokens."""
        inside = self.layers is None or self.layers[0] <= layer < self.layers[1]
        return not inside or self.density == 1 or self.n_dense(s) >= s - 1 or self.keeps_all(s)

    def n_dense(self, s: int) -> int:
        """Queries at the end that see their whole past."""
        return min(self.dense_last, s)

    def n_pairs(self, s: int) -> int:
        """How many pairs `density` allows a head."""
        assert self.density is not None
        return int(self.density * (s * (s + 1) // 2))

    @abstractmethod
    def keeps_all(self, s: int) -> bool:
        """Whether the rule leaves nothing out of a prompt of `s` tokens."""

    @abstractmethod
    def choose(self, q: Tensor, k: Tensor, softmax: Softmax, layer: int) -> Kept:
        """What is computed, for q (1, h, s, d_h) and k (1, h_kv, s, d_h)."""

    @abstractmethod
    def estimate(self, s: int) -> float:
        """Multiply-adds of choosing, relative to those of q·k over all causal pairs."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, layer: int = 0) -> Attended:
        """Causal attention over what is kept."""
        s = k.shape[2]
        kept = self.choose(q, k, softmax, layer)
        out, lse, pairs = attend_kept(q, k, v, softmax.scale, kept, softmax.cap)
        out, lse = softmax.finish(out, lse)
        return Attended(out, lse, finer(pairs).mean() / (s * (s + 1) // 2), kept)
