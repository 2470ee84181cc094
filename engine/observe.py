"""Observations: by-products of the prefill that methods ask for, computed once per sample and shared by all variants.

A method declares them (`SelectiveAttention.observations`); the prefill takes the union over the variants, so equal
observations must be equal objects: frozen dataclasses, compared by their fields.

Not here: what a method makes of an observation.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Observation(ABC):
    """Something seen of one layer while the prompt is read."""

    @abstractmethod
    def observe(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """From the layer's q (1, h, s, d_h) and k (1, h_kv, s, d_h), both after rotary embedding."""


@dataclass(frozen=True)
class LastQueries(Observation):
    """The queries of the prompt's last `w` tokens: (1, h, min(w, s), d_h)."""

    w: int

    def observe(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return q[
            :, :, -self.w :
        ].clone()  # a copy: a view would keep all of the layer's queries alive


# Bytes of one chunk's logits. Their softmax takes as much again and the keys of one KV head in float32 at most twice as
# much: with the output about 170 MB at 131,072 tokens, 32 heads of 128 dimensions and a window of 64.
SCORE_CHUNK_BYTES = 32 << 20


def window_scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """What the prompt's last `w` queries give to every token before them, summed over the window: (1, h, s - w).

    `q` (1, h, w, d_h) sees all `keys` (1, h_kv, s, d_h), those of the window causally: the window's own columns take
    part in the softmax and are cut off behind it. Float32 whatever the dtype of the model.
    """
    (_, h, w, _), (_, h_kv, s, _) = q.shape, keys.shape
    assert w <= s and h % h_kv == 0, (q.shape, keys.shape)
    g, n_past = h // h_kv, s - w
    hidden = torch.ones(w, w, dtype=torch.bool, device=q.device).triu(1)
    n_heads = max(1, SCORE_CHUNK_BYTES // (4 * max(1, w * s)))
    scores = torch.empty(1, h, n_past, device=q.device)
    for kv_head in range(h_kv):
        transposed = keys[0, kv_head].float().mT  # (d_h, s)
        for head in range(kv_head * g, (kv_head + 1) * g, n_heads):
            chunk = slice(head, min(head + n_heads, (kv_head + 1) * g))
            logits = (q[0, chunk].float() * scale) @ transposed  # (heads, w, s)
            logits[..., n_past:].masked_fill_(hidden, -torch.inf)
            scores[0, chunk] = logits.softmax(-1)[..., :n_past].sum(1)
    return scores


# Bytes of one block's logits; their softmax takes as much again, the keys of one KV head in float32 at most 64 MB at
# 131,072 tokens of 128 dimensions, and the sums 8 bytes per query head and token: about 140 MB there for 32 query and
# 8 KV heads. Measured best of 1 to 32 MB together with 8 and 32 (4,096 tokens, 9 heads of 64: 0.09-0.10 s; 32,768
# tokens, 4 heads of 128: 4.1 s, 6.1 with 2 MB).
COLUMN_BLOCK_BYTES = 16 << 20


def rows_per_block(g: int, s: int) -> int:
    """How many queries of a group's `g` heads can meet `s` keys at a time."""
    return max(1, min(s, COLUMN_BLOCK_BYTES // (4 * g * s)))


def column_sums(q: Tensor, k: Tensor, scale: float, row_weights: Tensor | None = None) -> Tensor:
    """Attention that the last r queries (1, h, r, d_h) give to every key (1, h_kv, s, d_h): (h_kv, g, s) float64.

    Causal softmax over the whole row, in blocks of rows; `row_weights` (r,) weighs the queries.
    """
    (_, h, r, _), (_, h_kv, s, _) = q.shape, k.shape
    g = h // h_kv
    n_rows = min(r, rows_per_block(g, s))
    hidden = torch.ones(n_rows, n_rows, dtype=torch.bool, device=q.device).triu(1)
    if row_weights is None:
        row_weights = torch.ones(r, device=q.device)
    sums = torch.zeros(h_kv, g, s, dtype=torch.float64, device=q.device)
    for kv_head in range(h_kv):
        transposed = k[0, kv_head].float().mT  # (d_h, s)
        queries = q[0, kv_head * g : (kv_head + 1) * g]  # (g, r, d_h)
        for start in range(0, r, n_rows):
            rows = min(n_rows, r - start)
            first = s - r + start  # the key that the block's first query is
            stop = first + rows
            block = (queries[:, start : start + rows].float() * scale).flatten(0, 1)
            logits = (block @ transposed[:, :stop]).view(g, rows, stop)
            logits[..., first:].masked_fill_(hidden[:rows, :rows], -torch.inf)
            # A product with a row of weights adds rows up in nine tenths of the time of sum().
            weights = row_weights[start : start + rows].unsqueeze(0)
            sums[kv_head, :, :stop] += (weights @ logits.softmax(-1)).squeeze(1)
    return sums


@dataclass(frozen=True)
class ColumnSums(Observation):
    """Attention that every token receives from all queries of the prompt: (1, h, s) float32; each head's sum is s.

    Float32 whatever the dtype of the model, and float64 where blocks of queries are added up.
    """

    def observe(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return column_sums(q, k, scale).flatten(0, 1).unsqueeze(0).float()
