"""A sparse prefill: of the causal attention a few columns and diagonals per head, and nothing else.

The "vertical-slash" pattern of MInference (Jiang et al., 2024, arXiv 2407.02490). In every layer the prompt's last
queries vote with their attention, for tokens that all of them look at (columns, "vertical") and for distances at which
they look back (diagonals, "slash"). Queries are worked on in blocks: all of a block attend to the kept columns and to
every column that a kept diagonal meets within the block. What comes out replaces exact attention, so the layers above,
their K and V, and whatever methods build of these are approximate. Decoding is not touched.

Symbols   paper k_v, k_s, last_q = `n_vertical`, `n_slash`, `n_last`; a diagonal is the distance from a query back to a
          key, 0 its own. For queries a to a + block - 1 the diagonal d stands for columns a - d to a - d + block - 1.
Cost      n_last * s logits to vote; then per head and block of queries as many columns as are kept. At no time more
          than `CHUNK_BYTES` of them, and masks of h * s.
Differs   the authors search a pattern of three and its sizes for every head of a model ahead of time, and take this one
          with 1,000 columns and 6,096 diagonals where they have none; here all heads are alike. Their kernel lengthens
          a run of neighbouring diagonals to whole blocks, up to block - 1 columns more than are asked for.
Fails     where a token is needed that none of the last queries looks at, as in retrieval from a long list of pairs.

Not here: when it is used (`engine/prefill.py`), exact attention (`engine/attend.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from engine.budget import show
from engine.checks import whole_numbers
from engine.errors import ConfigError
from kernels.attend_kept import attend_kept_triton, takes_triton

# Of gathered K and V with their masks, and of the votes' logits, whose softmax takes as much again.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class VerticalSlash:
    """How many columns and diagonals are kept; the keys of conf/prefill/minference.yaml."""

    n_vertical: Fraction  # columns of a head; below 1 a share of the prompt
    n_slash: Fraction  # diagonals of a head; below 1 a share of the prompt
    n_last: int  # queries that vote
    n_first: int  # columns that are always among those kept
    n_near: int  # diagonals that are always among those kept
    block: int  # queries that share their columns

    title: ClassVar[str] = "MInference"
    version: ClassVar[int] = 1  # raised whenever its answers change; part of a run's identity

    def __post_init__(self) -> None:
        for key in ("n_vertical", "n_slash"):
            value = getattr(self, key)
            if value < 0 or (value >= 1 and value.denominator != 1):
                raise ConfigError(
                    f"prefill.{key}={show(value)} is out of range; it is a whole number from 1, or a share of the "
                    "prompt from 0 to below 1"
                )
        whole_numbers("prefill", self, n_last=1, n_first=0, n_near=1, block=1)

    def counts(self, s: int) -> tuple[int, int]:
        """Columns and diagonals kept of a prompt of `s` tokens."""
        n_vertical, n_slash = (int(n) if n >= 1 else floor(n * s) for n in (self.n_vertical, self.n_slash))
        return min(s, max(n_vertical, self.n_first)), min(s, max(n_slash, self.n_near))

    def keeps_all(self, s: int) -> bool:
        """Whether this is exact attention for a prompt of `s` tokens."""
        return max(self.counts(s)) >= s

    def kept(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Which columns and which diagonals stay, (h, s) bool each."""
        n_vertical, n_slash = self.counts(k.shape[2])
        vertical, slash = votes(q[:, :, -self.n_last :], k, scale)
        return strongest(vertical, n_vertical, self.n_first), strongest(slash, n_slash, self.n_near)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Causal attention (1, h, s, d_h) over what is kept, and which share of all pairs of query and key that is.

        The share stays on the device, so that nobody waits for it.
        """
        vertical, slash = self.kept(q, k, scale)
        return attend_kept(q, k, v, scale, vertical, slash, self.block)


def votes(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the last queries q (1, h, n, d_h), summed over columns and over diagonals: (h, s) float32 each."""
    (_, h, n, _), (_, h_kv, s, _) = q.shape, k.shape
    g = h // h_kv
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    n_heads = max(1, CHUNK_BYTES // (4 * n * s))
    vertical, slash = (torch.empty(h, s, device=q.device) for _ in range(2))
    for kv_head in range(h_kv):
        transposed = k[0, kv_head].float().mT  # (d_h, s)
        for head in range(kv_head * g, (kv_head + 1) * g, n_heads):
            heads = slice(head, min(head + n_heads, (kv_head + 1) * g))
            logits = (q[0, heads].float() * scale) @ transposed  # (heads, n, s)
            logits[..., s - n :].masked_fill_(hidden, -torch.inf)
            weights = logits.softmax(-1)
            vertical[heads], slash[heads] = weights.sum(1), diagonal_sums(weights)
    return vertical, slash


def diagonal_sums(weights: Tensor) -> Tensor:
    """Sums of (heads, n, s), weights of the last n of s queries, by the distance from query to key: (heads, s)."""
    n, s = weights.shape[-2:]
    # The last query's row first, and rows cut one shorter than they are: each moves one further to the right than the
    # row before it, so that equal distances meet in a column.
    padded = pad(weights.flip(-2), (0, n)).flatten(-2)
    moved = padded[..., : n * (s + n - 1)].unflatten(-1, (n, s + n - 1))
    return moved.sum(-2)[..., :s].flip(-1)


def strongest(scores: Tensor, n: int, n_always: int) -> Tensor:
    """The first `n_always` of each row and the highest of the others, `n` in all: (h, s) bool."""
    scores[:, :n_always] = torch.inf
    best = scores.topk(n, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)


def attend_kept(
    q: Tensor, k: Tensor, v: Tensor, scale: float, vertical: Tensor, slash: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """As `VerticalSlash.attend`, over the given columns and diagonals, (h, s) bool each."""
    (_, h, s, d_h), h_kv = q.shape, k.shape[1]
    kv_head = torch.arange(h, device=q.device).unsqueeze(-1) // (h // h_kv)  # (h, 1)
    met, n_all = met_by(slash, block), h * (s * (s + 1) // 2)
    if takes_triton(q):
        out, pairs = attend_kept_triton(q, k, v, scale, vertical, met, block)
        return out, pairs.sum().double() / n_all
    out = torch.empty(1, h, s, d_h, dtype=q.dtype, device=q.device)
    n_pairs = torch.zeros((), dtype=torch.int64, device=q.device)
    for start in range(0, s, block):
        stop = min(start + block, s)
        keep = vertical[:, :stop] | met[:, block - (stop - start) : start + block].flip(-1)
        columns = listed(keep, beyond=s)  # (h, width)
        queries = torch.arange(start, stop, device=q.device).unsqueeze(-1)
        width = columns.shape[1]
        head_bytes = width * (2 * d_h + 2 * (stop - start)) * q.element_size()
        n_heads = max(1, CHUNK_BYTES // max(1, head_bytes))
        for head in range(0, h, n_heads):
            heads = slice(head, min(head + n_heads, h))
            seen = columns[heads].unsqueeze(1) <= queries  # (heads, queries, width)
            where = kv_head[heads], columns[heads].clamp(max=s - 1)
            n_pairs += seen.sum()
            out[:, heads, start:stop] = scaled_dot_product_attention(
                q[:, heads, start:stop], k[0][where].unsqueeze(0), v[0][where].unsqueeze(0),
                attn_mask=seen.unsqueeze(0), scale=scale,
            )  # fmt: skip
    return out, n_pairs.double() / n_all


def met_by(slash: Tensor, block: int) -> Tensor:
    """Whether a block of queries meets a column: (h, s + block - 1) bool, the first query less the column at block - 1.

    That is, `met[:, first - column + block - 1]`: any of the distances from first - column on is kept, `block` of them.
    """
    n_until = pad(slash.int(), (block, block - 1)).cumsum(-1)
    return n_until[:, block:] > n_until[:, :-block]


def listed(keep: Tensor, beyond: int) -> Tensor:
    """The columns that are kept, ascending, (h, most of a head); rows with fewer end in `beyond`."""
    rank = keep.cumsum(-1)  # from 1
    head, column = keep.nonzero(as_tuple=True)
    columns = column.new_full((len(keep), int(rank[:, -1].max())), beyond)
    columns[head, rank[head, column] - 1] = column
    return columns
