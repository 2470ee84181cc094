"""`Keeping`: what becomes of the keys and values that stay when others are dropped, whatever drops them.

The model made them for a whole text. `positions=contiguous` closes the gaps: kept keys are turned so that the distances
between them are those of neighbours. `dropped=merged` folds each dropped value into that of the kept token with the
most similar key. Sets of tokens, bytes and the books stay those of the method.

Symbols   `s` tokens of the prompt, `p_i` place of a head's i-th kept token of `n`.
Differs   - as published the text goes on at position n, and keys stand at 0 … n-1. Logits of a rotary embedding depend
            on distances alone: here keys move up to s-n … s-1 and the text goes on at s, which is the same and lets
            heads and layers differ in n.
          - kvpress rounds cosines to the model's dtype; here keys are turned in float32 and rounded once.
          - of dropped tokens that are similar enough the best take part, by rank; kvpress' quantile is the same rank
            where it is a number.

Not here: which tokens stay (`methods`), where they lie (`engine/layouts`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.budget import show
from engine.checks import one_of
from engine.errors import ConfigError
from engine.passes.rotations import Turn
from engine.placement import Kept, Placement, Ragged
from engine.shapes import Checkpoint, ModelShape
from kernels.topk import top_stable

if TYPE_CHECKING:
    from engine.prefill import Trace

POSITIONS, DROPPED = ("kept", "contiguous"), ("gone", "merged")
TILE = 1 << 22  # similarities at a time
SMALLEST = 1e-6  # of a key's length, and beside a sum of values' lengths


@dataclass(frozen=True)
class Merging:
    """Which dropped tokens are merged; the keys of conf/config.yaml's `merging`."""

    threshold: float = 0.0  # cosine of the keys from which on
    share: Fraction = Fraction(1)  # of the dropped tokens, the most similar ones

    def __post_init__(self) -> None:
        if not -1 <= self.threshold <= 1:
            raise ConfigError(f"merging.threshold={self.threshold:g} is out of range; it is a cosine, -1 to 1")
        if not 0 < self.share <= 1:
            raise ConfigError(f"merging.share={show(self.share)} is out of range; it is above 0 and at most 1")


@dataclass(frozen=True)
class Keeping:
    """What becomes of kept keys and values."""

    positions: str = "kept"
    dropped: str = "gone"
    merging: Merging = Merging()

    def __post_init__(self) -> None:
        one_of("positions", self.positions, POSITIONS)
        one_of("dropped", self.dropped, DROPPED)

    @property
    def changes(self) -> bool:
        return self != AS_THEY_ARE

    @property
    def asked(self) -> str:
        """The keys that ask for it, as they are given."""
        keys = ("positions", self.positions, POSITIONS), ("dropped", self.dropped, DROPPED)
        return " ".join(f"{key}={value}" for key, value, usual in keys if value != usual[0])

    def label(self) -> str:
        """Behind a method's name."""
        words = ["contiguous"] * (self.positions == "contiguous")
        if self.dropped == "merged":
            usual, (cosine, share) = Merging(), (self.merging.threshold, self.merging.share)
            notes = [f"from {cosine:g}"] * (cosine != usual.threshold)
            notes += [f"best {show(share)}"] * (share != usual.share)
            words.append(f"merged values{' ' * bool(notes)}{', '.join(notes)}")
        return ", ".join(words)

    def check(self, shape: ModelShape) -> None:
        """Raise `ConfigError` where a model of this shape has no keys that could be turned, or values of their own."""
        if self.changes and shape.is_latent:
            raise ConfigError(
                f"{self.asked} changes keys and values of each head, and the model {shape.name!r} keeps one latent per "
                "token for all of them; leave it out"
            )

    def check_model(self, model: Checkpoint) -> None:
        """The same, of what only its files tell, or its weights once they are loaded."""
        if self.positions == "kept":
            return
        what = f"positions={self.positions} turns keys to other positions, and the model {model.shape.name!r}"
        if not model.n_rotary:
            raise ConfigError(
                f"{what} has no rotary positions, or their angles depend on how long the text is; use kept"
            )
        if model.unturned:
            listed = ", ".join(map(str, model.unturned))
            raise ConfigError(f"{what} has layers without positions ({listed}); use positions=kept")

    def of(self, trace: "Trace", layer: int, kept: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a layer's prompt with what stays as it is to be, for tokens `kept` (h_kv, s) bool of each head."""
        k, v = trace.keys(layer), trace.values(layer)
        order = (
            kept.byte().sort(dim=-1, descending=True, stable=True).indices
        )  # a head's kept tokens, ascending, come first
        counts = kept.sum(-1)
        if self.dropped == "merged":
            v = with_merged(k, v, order, counts.tolist(), self.merging)
        if self.positions == "contiguous":
            assert trace.turn is not None, "a model without rotary positions"
            k = moved_up(k, trace.turn[layer], order[:, : int(counts.max())], counts)
        return k, v


AS_THEY_ARE = Keeping()


def kept_mask(placement: Placement, h_kv: int, s: int, device: torch.device) -> Tensor | None:
    """Which tokens of the prompt each KV head keeps, (h_kv, s) bool; None where all do."""
    if isinstance(placement, Ragged):
        heads: Sequence[Tensor] = placement.chosen
    elif isinstance(placement, Kept):
        first = placement.chosen
        first = torch.arange(first, device=device).expand(1, h_kv, -1) if isinstance(first, int) else first
        assert first.shape[1] == h_kv, "query heads choose tokens of their own"
        heads = [*first[0]]
    else:
        return None
    mask = torch.zeros(h_kv, s, dtype=torch.bool, device=device)
    for head, positions in enumerate(heads):
        mask[head].index_fill_(0, positions, True)
    if n_window := placement.size(s, 0).window:
        mask[:, s - n_window :] = True
    return mask


def moved_up(k: Tensor, turn: Turn, kept: Tensor, counts: Tensor) -> Tensor:
    """Keys (1, h_kv, s, d_h) with those at `kept` (h_kv, n), ascending, turned to stand before position s in a row.

    A head with fewer of them has others behind its `counts`, which stay.
    """
    s, n = k.shape[2], kept.shape[1]
    ranks = torch.arange(n, device=k.device)
    by = s - counts.unsqueeze(1) + ranks - kept
    by.masked_fill_(ranks >= counts.unsqueeze(1), 0)
    at = kept.view(1, *kept.shape, 1).expand(-1, -1, -1, k.shape[3])
    turned = turn(k.gather(2, at)[0].unsqueeze(1), by)  # heads in the place of rows: (h_kv, 1, n, d_h)
    return k.scatter(2, at, turned.squeeze(1).unsqueeze(0))


def with_merged(k: Tensor, v: Tensor, order: Tensor, counts: Sequence[int], merging: Merging) -> Tensor:
    """Values (1, h_kv, s, d_v) where each head's kept tokens, the first of its `order`, have taken in the others."""
    merged = v.clone()
    for head, n in enumerate(counts):
        kept, dropped = order[head, :n], order[head, n:]
        if not len(dropped):
            continue
        values = v[0, head].float()
        target, weight = targets(k[0, head], values, kept, dropped, merging)
        sums = torch.zeros_like(values).index_add_(0, target, weight.unsqueeze(1) * values[dropped])
        weights = values.new_zeros(len(values)).index_add_(0, target, weight).unsqueeze(1)
        merged[0, head] = torch.where(weights > 0, ((values + sums) / (1 + weights)).to(v.dtype), v[0, head])
    return merged


def targets(k: Tensor, v: Tensor, kept: Tensor, dropped: Tensor, merging: Merging) -> tuple[Tensor, Tensor]:
    """The kept token that each dropped one of a head goes to, and with which weight: twice (n,).

    k (s, d_h) as cached, v (s, d_v) float32.
    """
    keys = k.float()
    keys = keys / keys.norm(dim=-1, keepdim=True).clamp(min=SMALLEST)
    among = keys[kept].mT
    best = [(keys[some] @ among).max(-1) for some in dropped.split(max(1, TILE // len(kept)))]
    cosine, target = (torch.cat(x) for x in zip(*best, strict=True))
    target, length = kept[target], v.norm(dim=-1)
    passes = cosine >= merging.threshold
    if merging.share < 1:
        n = 1 + floor(merging.share * (len(dropped) - 1))
        among_best = torch.zeros_like(passes)
        among_best[top_stable(cosine.masked_fill(~passes, -torch.inf), n)] = True
        passes &= among_best
    weight = cosine.clamp(min=0) * length[dropped] / (length[dropped] + length[target] + SMALLEST)
    return target, weight.where(passes, 0)
