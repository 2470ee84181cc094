"""Keys and values of kept tokens as `engine/post_processing.py` says: keys turned until they stand in a row, values merged.

Not here: where they lie (`engine/layouts/slots.py`, `engine/layouts/whole.py`).
"""

from collections.abc import Sequence
from math import floor

import torch
from torch import Tensor

from kvbench.engine.passes.session import Turn
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Kept, Placement, Ragged
from kvbench.engine.post_processing import Merging, PostProcessing
from kvbench.kernels.topk import top_stable

TILE = 1 << 22  # similarities at a time
SMALLEST = 1e-6  # of a key's length, and added to a sum of values' lengths


def kept_as(post_processing: PostProcessing, trace: Trace, layer: int, kept: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a layer's prompt with what stays as it is to be, for tokens `kept` (h_kv, s) bool of each head."""
    k, v = trace.keys(layer), trace.values(layer)
    order = (
        kept.byte().sort(dim=-1, descending=True, stable=True).indices
    )  # a head's kept tokens, ascending, come first
    counts = kept.sum(-1)
    if post_processing.dropped == "merged":
        v = with_merged(k, v, order, counts.tolist(), post_processing.merging)
    if post_processing.positions == "contiguous":
        assert trace.turn is not None, "a model without rotary positions"
        k = moved_up(k, trace.turn[layer], order[:, : int(counts.max())], counts)
    return k, v


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

    A head with fewer of them has others after its `counts`, which stay.
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
