"""What a layer's attention makes of products of queries and keys: a scale, and in some models a cap and a sink.

A layer multiplies them with `scale`, bends them towards a `cap`, l = cap * tanh(x / cap), and lets them compete with a
learned `sink` of each query head: a logit that is neither scaled nor hidden and has no value. Everyone who weighs
tokens does so here, so that nobody scores what the model does not see.

A sink joins once. Attention over any tokens is exact without it, its parts are joined without it, and then the output
takes one factor per query and the log-sum-exp the sink (`finish`). It is no token: it takes no place and no bytes.

Not here: attention (`engine/attend.py`, `engine/causal.py`), kernels, which get the three numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.kernels.capped import capped


@dataclass(slots=True, eq=False)
class Softmax:
    """Scale, cap and sinks of one layer. Nothing of it is changed once made."""

    scale: float
    cap: float = 0.0  # 0: none
    sink: Tensor | None = None  # (h,) float32

    @property
    def is_plain(self) -> bool:
        """Whether it is a scale and nothing else."""
        return not self.cap and self.sink is None

    def of(self, heads: slice) -> "Softmax":
        """The softmax of some query heads alone."""
        return self if self.sink is None else replace(self, sink=self.sink[heads])

    def logits(self, q: Tensor, keys: Tensor) -> Tensor:
        """Float32 logits of queries (…, d_h) and keys (…, n, d_h), which are brought to float32 here."""
        return self.capped((q.float() * self.scale) @ keys.float().mT)

    def bent(self, products: Tensor) -> Tensor:
        """Logits of products that are not scaled yet."""
        return self.capped(products * self.scale)

    def capped(self, scaled: Tensor) -> Tensor:
        """Logits of scaled products, which may be written over."""
        return capped(scaled, self.cap) if self.cap else scaled

    def sink_as(self, shape: Sequence[int]) -> Tensor | None:
        """The sinks in the shape that heads have among others, such as (h_kv, -1, 1)."""
        return None if self.sink is None else self.sink.view(*shape)

    def lse(self, logits: Tensor, shape: Sequence[int]) -> Tensor:
        """Log-sum-exp over the last dimension, the sinks included; `shape` is that of the heads before it."""
        lse, sink = logits.logsumexp(-1), self.sink_as(shape)
        return lse if sink is None else torch.logaddexp(lse, sink.to(lse))

    def weights(self, logits: Tensor, shape: Sequence[int]) -> Tensor:
        """Probabilities over the last dimension, the sinks' share left out; `shape` is that of the heads before it.

        Not for logits of which a query has none.
        """
        weights, sink = logits.softmax(-1), self.sink_as(shape)
        if sink is None:
            return weights
        return weights.mul_((logits.logsumexp(-1) - sink.to(logits)).sigmoid_().unsqueeze(-1))

    def finish(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Attention out (n, h, s, d) over all of a query's tokens and its lse (n, h, s), with the sinks."""
        if self.sink is None:
            return out, lse
        sink = self.sink.view(-1, 1)
        share = (lse - sink).sigmoid_().unsqueeze(-1)
        return (out * share).to(out.dtype), torch.logaddexp(lse, sink)
