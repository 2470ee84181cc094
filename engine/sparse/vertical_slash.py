"""A sparse prefill: of the causal attention a few columns and diagonals per head, and nothing else.

The "vertical-slash" pattern of MInference (Jiang et al., 2024, arXiv 2407.02490). In every layer the prompt's last
queries vote with their attention, for tokens that all of them look at (columns, "vertical") and for distances at which
they look back (diagonals, "slash"). Queries are worked on in blocks: all of a block attend to the kept columns and to
every column that a kept diagonal meets within the block. What comes out replaces exact attention, so the layers above,
their K and V, and whatever methods build of these are approximate. Decoding is not touched.

Symbols   paper k_v, k_s, last_q = `n_vertical`, `n_slash`, `n_last`; a diagonal is the distance from a query back to a
          key, 0 its own. For queries a to a + block - 1 the diagonal d stands for columns a - d to a - d + block - 1.
Cost      n_last * s logits to vote; then per head and block of queries as many columns as are kept.
Differs   the authors search a pattern of three and its sizes for every head of a model ahead of time, and take this one
          with 1,000 columns and 6,096 diagonals where they have none; here all heads are alike. Their kernel lengthens
          a run of neighbouring diagonals to whole blocks, up to block - 1 columns more than are asked for.
Settings  sparse-frontier's vertical-slash (Nawrot et al., 2025, arXiv 2504.17768) is this with `n_first=4`, `n_near=64`
          and `n_last=64`: conf/prefill/vertical_slash.yaml.
Fails     where a token is needed that none of the last queries looks at, as in retrieval from a long list of pairs.

Not here: attention over it (`kernels/attend_kept.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.engine.declared import Count, Index, Is, Whole
from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.base import SparsePrefill
from kvbench.engine.sparse.blocks import places
from kvbench.kernels.attend_kept import Kept, met_by
from kvbench.kernels.scratch import finer, finest

CHUNK_BYTES = 32 << 20  # of the votes' logits, whose softmax takes as much again
HALVINGS = 12  # of the interval in which a density's counts are searched
FORM = "a whole number from 1, or a share of the prompt from 0 to below 1"
Lines = Annotated[Fraction, Ge(0), Whole(), Is(FORM)]  # columns or diagonals


@dataclass(frozen=True, kw_only=True)
class VerticalSlash(SparsePrefill):
    """How many columns and diagonals are kept; the keys of conf/prefill/minference.yaml."""

    n_vertical: Lines  # columns of a head; below 1 a share of the prompt; with a `density` their relation counts
    n_slash: Lines  # diagonals of a head; below 1 a share of the prompt
    n_last: Count  # queries that vote
    n_first: Index  # columns that are always among those kept
    n_near: Count  # diagonals that are always among those kept
    block: Count  # queries that share their columns

    title: ClassVar[str] = "MInference"
    version: ClassVar[int] = 2
    asks_last: ClassVar[bool] = True

    def counts(self, s: int) -> tuple[int, int]:
        """Columns and diagonals kept of a prompt of `s` tokens."""
        n_vertical, n_slash = (int(n) if n >= 1 else floor(n * s) for n in (self.n_vertical, self.n_slash))
        return min(s, max(n_vertical, self.n_first)), min(s, max(n_slash, self.n_near))

    def keeps_all(self, s: int) -> bool:
        if self.density is not None:
            return s <= max(self.n_first, self.n_near)
        return max(self.counts(s)) >= s

    def estimate(self, s: int) -> float:
        return min(1.0, 2 * self.n_last / s)

    def choose(self, q: Tensor, k: Tensor, softmax: Softmax, layer: int) -> Kept:
        vertical, slash = votes(q[:, :, -self.n_last :], k, softmax)
        ranks = ranked(vertical, self.n_first), ranked(slash, self.n_near)
        s = k.shape[2]
        if self.density is None:
            return self.kept(ranks, self.counts(s))
        return self.fitting(ranks, s)

    def kept(self, ranks: tuple[Tensor, Tensor], counts: tuple[int | Tensor, int | Tensor]) -> Kept:
        """The best columns and diagonals of each head."""
        vertical, slash = (rank < n for rank, n in zip(ranks, counts, strict=True))
        s = vertical.shape[1]
        return Kept(s, self.block, s - self.n_dense(s), vertical=vertical, met=met_by(slash, self.block))

    def fitting(self, ranks: tuple[Tensor, Tensor], s: int) -> Kept:
        """Keep as many columns and diagonals, in the parameters' ratio, as `density` allows: by halving, unread."""
        asked, (h, device) = self.counts(s), (len(ranks[0]), ranks[0].device)
        low = torch.zeros((), dtype=finest(device), device=device)
        high = torch.ones_like(low)

        def at(part: Tensor) -> Kept:
            least = self.n_first, self.n_near
            counts = [(part * s * n / max(asked)).floor().clamp(min=m) for n, m in zip(asked, least, strict=True)]
            return self.kept(ranks, (counts[0], counts[1]))

        for _ in range(HALVINGS):
            middle = (low + high) / 2
            fits = n_pairs(at(middle)).sum() <= h * self.n_pairs(s)
            low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
        return at(low)


def votes(q: Tensor, k: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
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
            logits = softmax.capped((q[0, heads].float() * softmax.scale) @ transposed)  # (heads, n, s)
            logits[..., s - n :].masked_fill_(hidden, -torch.inf)
            weights = softmax.of(heads).weights(logits, (-1, 1))
            vertical[heads], slash[heads] = weights.sum(1), diagonal_sums(weights)
    return vertical, slash


def diagonal_sums(weights: Tensor) -> Tensor:
    """Sums of (heads, n, s), weights of the last n of s queries, by the distance from query to key: (heads, s)."""
    n, s = weights.shape[-2:]
    # The last query's row first, and rows cut one shorter than they are: each moves one further to the right than the
    # row before it, so that equal distances meet in a column.
    padded = torch.nn.functional.pad(weights.flip(-2), (0, n)).flatten(-2)
    moved = padded[..., : n * (s + n - 1)].unflatten(-1, (n, s + n - 1))
    return moved.sum(-2)[..., :s].flip(-1)


def ranked(scores: Tensor, n_always: int) -> Tensor:
    """Where each entry of a row (h, s) stands, the first `n_always` before all others: int64 from 0."""
    scores[:, :n_always] = torch.inf
    return places(scores.sort(dim=-1, descending=True, stable=True).indices)


def n_pairs(kept: Kept) -> Tensor:
    """Pairs of each head (h,) int64, counted without making them: columns that a diagonal meets by a convolution."""
    assert kept.vertical is not None and kept.met is not None
    s, block, device = kept.s, kept.block, kept.vertical.device
    vertical, behind = kept.vertical, kept.met[:, block - 1 :].clone()  # by the first query less the column
    behind[:, 0] = False  # the block's own columns are counted below
    first = torch.arange(0, kept.dense_from, block, device=device)
    sizes = (kept.dense_from - first).clamp(max=block)
    spectra = torch.fft.rfft(torch.stack([finer(vertical), finer(behind)]), 2 * s)
    both = torch.fft.irfft(spectra.prod(0), 2 * s)[:, first].round().long()
    before = torch.nn.functional.pad(vertical.cumsum(-1), (1, 0))[:, first]
    columns = before + behind.cumsum(-1)[:, first] - both  # before the block
    own = torch.nn.functional.pad(vertical, (0, len(first) * block))[:, : len(first) * block].unflatten(1, (-1, block))
    own = own | kept.met[:, None, :block].flip(-1)
    lookers = (sizes.unsqueeze(-1) - torch.arange(block, device=device)).clamp(min=0)  # queries from each column on
    dense = (s * (s + 1) - kept.dense_from * (kept.dense_from + 1)) // 2
    return (columns * sizes).sum(-1) + (own * lookers).sum((1, 2)) + dense
