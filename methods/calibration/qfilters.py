"""The direction that a KV head's queries share, after rotary embedding: Q-Filters' offline calibration.

Of each query head it is the first right singular vector of queries drawn from the text, with the sign by which more
than half of them have a positive product with it. The array of one layer is (h_kv, d_h): minus the mean over a group.

Not here: scores of keys (`methods/ranking/qfilters.py`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvbench.methods.calibration.base import Seen, Statistics

N_QUERIES = 3000  # of each head, from all texts together, as the authors draw
SEED = 0


def directions(x: Tensor) -> Tensor:
    """Main direction of each head's queries (h, n, d_h): (h, d_h) float32, of length 1."""
    x = x.double()
    largest = torch.linalg.eigh(x.mT @ x).eigenvectors[..., -1]  # eigenvalues ascend
    positive = ((x @ largest.unsqueeze(-1)).squeeze(-1) > 0).sum(-1)
    sign = torch.where(2 * positive > x.shape[1], 1.0, -1.0)
    return (sign.unsqueeze(-1) * largest).float()


def filters(x: Tensor, h_kv: int) -> Tensor:
    """Filters (h_kv, d_h) from queries (h, n, d_h): minus the plain mean of a group's directions."""
    return -directions(x).unflatten(0, (h_kv, -1)).mean(1)


class QFilterDirections(Statistics):
    name = "qfilters"
    n_tokens, n_block = 20 * 2048, 2048  # 20 texts of 2,048 tokens, as the authors read

    def sums(self, seen: Seen) -> dict[str, Tensor]:
        n = seen.q.shape[2]
        draw = torch.Generator().manual_seed(SEED)
        drawn = torch.randperm(n, generator=draw)[: -(-N_QUERIES * self.n_block // self.n_tokens)]
        return {"queries": seen.q[0][:, drawn.to(seen.q.device)].cpu(), "h_kv": torch.tensor(seen.k.shape[1])}

    def joined(self, earlier: dict[str, Tensor], later: dict[str, Tensor]) -> dict[str, Tensor]:
        return earlier | {"queries": torch.cat([earlier["queries"], later["queries"]], 1)}

    def arrays(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"filters": filters(sums["queries"], int(sums["h_kv"]))}
