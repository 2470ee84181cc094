"""Principal components of keys, per layer and KV head: Loki's offline calibration.

An ordinary PCA of all keys of the text, after rotary embedding (`post`) and before it (`pre`). Arrays of one layer are
(h_kv, d_h + 2, d_h): d_h components as rows, by falling variance; their mean; the share of the variance that each
explains. Signs are arbitrary, and so are components whose variances are equal.

Not here: how many components a method takes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.methods.calibration.base import Seen, Statistics


def moments(keys: Tensor) -> Tensor:
    """Sums over tokens of keys (1, h_kv, n, d_h): (h_kv, d_h + 1, d_h + 1) float64 of (k, 1) times (k, 1)."""
    ones = keys.new_ones(*keys.shape[1:3], 1)
    extended = torch.cat([keys[0], ones], -1).double()
    return extended.mT @ extended


def components(sums: Tensor) -> Tensor:
    """Components from `moments`: (h_kv, d_h + 2, d_h) float32, as the arrays are."""
    n = sums[:, -1:, -1:]
    mean = sums[:, -1:, :-1] / n  # (h_kv, 1, d_h)
    covariance = sums[:, :-1, :-1] / n - mean.mT @ mean
    variances, columns = torch.linalg.eigh(covariance)
    falling = variances.flip(-1).clamp(min=0).unsqueeze(1)
    shares = falling / falling.sum(-1, keepdim=True)
    return torch.cat([columns.flip(-1).mT, mean, shares], 1).float()


class Components(Statistics):
    name = "pca"
    # As the authors read. Blocks of 512 would not show where rotary embedding takes the keys of longer prompts.
    n_tokens, n_block = 4096, 4096
    least = 4  # fewer give components of noise

    def sums(self, seen: Seen) -> dict[str, Tensor]:
        return {"post": moments(seen.k), "pre": moments(seen.k_before)}

    def arrays(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: components(x) for name, x in sums.items()}
