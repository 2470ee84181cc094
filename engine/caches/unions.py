"""What a KV head has to keep where its query heads chose tokens of their own: `union_of`.

Not here: who chooses (`methods`).
"""

import torch
from torch import Tensor


def union_of(chosen: Tensor, h_kv: int, s: int) -> tuple[Tensor, Tensor]:
    """Of tokens that query heads chose (1, h, k) those that their KV head has to keep, and who sees which of them.

    Ascending positions (1, h_kv, n), filled up with tokens that nobody chose, and (1, h, n) bool.
    """
    h = chosen.shape[1]
    asked = torch.zeros(h, s + 1, dtype=torch.bool, device=chosen.device)  # the last column is for no token
    asked = asked.scatter_(1, chosen[0].where(chosen[0] >= 0, s), True)[:, :s]
    wanted = asked.unflatten(0, (h_kv, -1)).any(1)  # (h_kv, s)
    n = int(wanted.sum(-1).max())
    kept = wanted.int().sort(dim=-1, descending=True, stable=True).indices[:, :n]  # (h_kv, n)
    mask = asked.gather(1, kept.repeat_interleave(h // h_kv, 0))
    return kept.unsqueeze(0), mask.unsqueeze(0)
