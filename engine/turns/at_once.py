"""Several tokens of a feed in one call, for rows whose steps only add their token to what is resident.

All tokens of the feed see what was resident before it; among themselves they are causal. The books get an entry for
each token, as if it had come alone.

Not here: rows that select, slide or evict (`engine/turns/talk.py`).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attend import Part
from engine.causal import causal, whole
from engine.layer import Layer
from engine.passes.probe import joined

if TYPE_CHECKING:
    from methods.base import SelectiveAttention


def takes_at_once(row: "SelectiveAttention", layer: int, m: int) -> bool:
    """Whether the row may read so many tokens at once in this layer, as if they came one after the other."""
    at = row.store[layer]
    is_still = row.is_still or layer in row.skipped_layers()
    plain = at.host is None and at.queries is None and not at.is_coded
    return is_still and plain and at.rolling is None and at.capacity - at.n_window >= m


def read_at_once(row: "SelectiveAttention", layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The outputs (1, h, m, d_h) of m tokens, which the layer takes in."""
    at = row.store[layer]
    parts = [past(q, part, scale) for part in at.resident() if part.n_tokens()]
    out = joined([causal(q, k, v, scale), *parts])
    for t in range(k.shape[2]):
        slot = at.advance(k[:, :, t : t + 1], v[:, :, t : t + 1])
        if t == 0:
            take_in(at, slot, k, v)
        row.store.close(layer)
    return out


def take_in(at: Layer, slot: int, k: Tensor, v: Tensor) -> None:
    """Write the tokens to the slots from here on."""
    for buffer, new in ((at.k, k), (at.v, v)):
        buffer[:, :, slot : slot + new.shape[2]] = new


def past(q: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of all queries over one part, and the log-sum-exps."""
    part = part.gathered()
    if part.mask is None and part.bias is None:
        return whole(q, part.k, part.v, scale)
    groups = q.shape[1] // part.k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).float() for x in (part.k, part.v))
    logits = (q.float() @ keys.mT) * scale
    if part.bias is not None:
        logits = logits + part.bias.repeat_interleave(q.shape[1] // part.bias.shape[1], 1).unsqueeze(2)
    if part.mask is not None:
        mask = part.mask.repeat_interleave(q.shape[1] // part.mask.shape[1], 1)
        logits = logits.masked_fill(~mask.unsqueeze(2), -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)).exp()
    return (weights @ values).to(q.dtype), lse
