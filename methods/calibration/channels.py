"""Which channels of queries and keys carry most, per layer and head: Double Sparsity's offline calibration.

Three scores of a channel, means over the tokens of a block, summed over blocks (Yang et al., 2024): `q` is |q| per
query head and `k` is |k| per KV head, both before rotary embedding; `qk` is |q * k| of each token with itself, after
it, per query head. `qk_as_released` is what the authors' code makes of the last: of the last block only, and with heads
and tokens mixed up, since it reshapes (heads, tokens) to (tokens, heads) in place of a transpose.

Not here: how many channels a method takes.
"""

from collections.abc import Mapping

from torch import Tensor

from kvbench.methods.calibration.base import Seen, Statistics


def mean_size(x: Tensor) -> Tensor:
    """|x| of a channel, mean over tokens: (1, heads, n, d_h) -> (heads, d_h)."""
    return x[0].abs().mean(1)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Every token's q times its own k, channel by channel: (1, h, n, d_h)."""
    return q * k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def as_released(x: Tensor) -> Tensor:
    """The authors' mean over tokens of |x| (1, h, n, d_h): (h, d_h), with heads and tokens mixed up."""
    _, h, n, d_h = x.shape
    return x.abs().reshape(n, h, d_h).mean(0)


class Channels(Statistics):
    name = "channels"
    n_tokens, n_block = 2048, 512  # blocks as the authors have them

    def sums(self, seen: Seen) -> dict[str, Tensor]:
        both = products(seen.q, seen.k)
        return {
            "q": mean_size(seen.q_before),
            "k": mean_size(seen.k_before),
            "qk": mean_size(both),
            "qk_as_released": as_released(both),
        }

    def joined(self, earlier: dict[str, Tensor], later: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().joined(earlier, later) | {"qk_as_released": later["qk_as_released"]}

    def arrays(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(sums)
