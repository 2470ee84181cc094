"""One latent per token for all heads (MLA): how the heads of a layer ask latents as they lie in the cache.

What is cached of a token is its latent, d_c numbers, and after it a rotary key of d_r, one row for all heads. A head's
key is a linear map of the latent with the rotary key after it, and its value is a linear map of the latent:
k_h = [A_h c ; r], v_h = B_h c. So q·k_h = [A_hᵀ q_nope ; q_rope] · [c ; r], and a sum of values is B_h of the sum of
latents: attention with one KV head, whose value is the first d_c numbers of its key. Only what is asked and what comes
out is mapped, however many tokens there are.

A pass over a prompt may attend head by head instead, with keys that its own tokens have anyway: they are narrower.

Not here: which layers are such (`engine/checkpoints/kinds.py`), where rows are kept (`engine/store.py`).
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.causal import Chunk
from kvbench.engine.errors import ConfigError
from kvbench.engine.softmax import Softmax


class Latent:
    """The maps of one layer, as its attention module has them."""

    def __init__(self, module: Any, d_c: int, d_r: int, like: Tensor) -> None:
        """What the module makes of unit vectors; `like` has the type and the device of its rows."""
        self.module, self.d_c = module, d_c
        one, other = (torch.eye(n, dtype=like.dtype, device=like.device)[None, None] for n in (d_c, d_r))
        keys, values = module.expand_kv(one, other.new_zeros(1, 1, d_c, d_r))  # (1, h, d_c, d_k) and (1, h, d_c, d_v)
        turned, _ = module.expand_kv(one.new_zeros(1, 1, d_r, d_c), other)
        self.d_nope = keys.shape[3] - d_r
        is_known = torch.equal(turned[..., self.d_nope :], other.expand_as(turned[..., self.d_nope :]))
        if not is_known or turned[..., : self.d_nope].any() or keys[..., self.d_nope :].any():
            raise ConfigError("its keys are no map of a latent with a rotary key behind it")
        self.of_keys = keys[0, :, :, : self.d_nope].mT.contiguous()  # (h, d_nope, d_c)
        self.of_values = values[0].contiguous()  # (h, d_c, d_v)

    def absorbed(self, q: Tensor) -> Tensor:
        """Queries of heads (n, h, s, d_k) as they ask rows: (n, h, s, d_c + d_r)."""
        return torch.cat([by_head(q[..., : self.d_nope], self.of_keys), q[..., self.d_nope :]], -1)

    def head_values(self, out: Tensor) -> Tensor:
        """Sums of latents (n, h, s, d_c) as sums of each head's values, (n, h, s, d_v)."""
        return by_head(out, self.of_values)

    def heads(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that every head has of rows (n, 1, s, d_c + d_r): (n, h, s, d_k) and (n, h, s, d_v)."""
        return self.module.expand_kv(rows[..., : self.d_c], rows[..., self.d_c :])


def by_head(x: Tensor, maps: Tensor) -> Tensor:
    """Each head's numbers (n, h, s, a) by the head's map (h, a, b), which is read once for all rows: (n, h, s, b)."""
    n, h, s, _ = x.shape
    if n == 1:
        return x @ maps
    out = x.transpose(0, 1).reshape(h, n * s, -1) @ maps  # a product of four dimensions would copy the maps n times
    return out.view(h, n, s, -1).transpose(0, 1)


class ByHeads(ABC):
    """A session that attends head by head to the tokens of its own pass."""

    @abstractmethod
    def attend_heads(
        self, layer: int, latent: Latent, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, softmax: Softmax,
        window: int | Chunk | None,
    ) -> Tensor:  # fmt: skip
        """Output (n, h, s, d_v) for queries, keys and values of all heads, of the tokens that `rows` are kept of."""
