"""Observations: by-products of the prefill that methods ask for, computed once per sample and shared by all variants.

A method declares them (`SelectiveAttention.observations`); the prefill takes the union over the variants, so equal
observations must be equal objects: frozen dataclasses, compared by their fields.

A `ModelFact` is asked for in the same way, and is no by-product: it belongs to the model, whatever the prompt, and is
looked up before the pass.

Not here: what a method makes of an observation.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvbench.engine.causal import causal
from kvbench.engine.passes.trace import Known, Trace
from kvbench.engine.softmax import Softmax
from kvbench.kernels.attend_kept import kept_sums
from kvbench.kernels.column_sums import (
    column_sums,
    column_sums_native,
    column_sums_triton,
    rows_per_block,
    takes_native,
    takes_triton,
)
from kvbench.kernels.rows.rotation import turned_back
from kvbench.kernels.scratch import at_once, finer, finest

if TYPE_CHECKING:  # slow to import, and method files import this one
    from kvbench.engine.model import Model


@dataclass(frozen=True)
class Observation(ABC):
    """Something seen of one layer while the prompt is read."""

    of_input: ClassVar[bool] = False  # whether it reads the attention's input, `trace.inputs[layer]`
    of_all_weights: ClassVar[bool] = False  # whether it adds up weights of all queries: of the pairs that a pass keeps
    of_tokens: ClassVar[bool] = False  # whether `grown` joins what chunks of a prompt show, a number for each token

    @property
    def looks_at(self) -> int | None:
        """How many of the prompt's last queries it looks at, which then are enough; None: at all of them."""
        return None

    @abstractmethod
    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        """Observe the layer's q (1, h, s, d_h) and k (1, h_kv, s, d_h), both after rotary embedding."""

    def observe_pass(self, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None) -> Tensor:
        """Observe one pass; `lse` has the log-sum-exp of each query's logits, (1, h, s), where the pass was exact."""
        return self.observe(q, k, softmax)

    def observe_layer(
        self, trace: Trace, layer: int, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None
    ) -> Tensor:
        """Observe one layer of a pass, with what the trace knows: where tokens stand, how queries turn."""
        return self.observe_pass(q, k, softmax, lse)

    def grown(self, before: Tensor | None, now: Tensor) -> Tensor:
        """What is known of all tokens that a layer holds, (1, heads, n), by `before` of those before a chunk.

        `now` is what the chunk's queries (1, h, m, d_h) show with all keys (1, h_kv, n, d_h).
        """
        raise NotImplementedError(type(self).__name__)


class ModelFact(Observation):
    """Something that is the same for all prompts of a model, such as what a calibration has found."""

    @abstractmethod
    def look_up(self, model: "Model") -> Known:
        """Get it from wherever it is kept, or make it now; asked once per model, outside of any pass."""

    def of(self, model: "Model") -> Known:
        """What is known of this model, looked up once."""
        return model.once(self, lambda: self.look_up(model))


@dataclass(frozen=True)
class LastQueries(Observation):
    """The queries of the prompt's last `w` tokens: (1, h, min(w, s), d_h)."""

    w: int

    @property
    def looks_at(self) -> int:
        return self.w

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        return q[:, :, -self.w :].clone()  # a copy: a view would keep all of the layer's queries alive


def spaced(n: int, start: int, end: int) -> range | list[int]:
    """`n` positions at even distances from `start` to `end`, the last one included; all where there are fewer."""
    length = end - start
    return range(start, end) if n >= length else [start + (i + 1) * length // n - 1 for i in range(n)]


@dataclass(frozen=True)
class SpacedQueries(Observation):
    """Queries of `n` positions at even distances, without the prompt's first and last ones: (1, h, n, d_h).

    `moved`: they are turned to the position after the prompt, where every key is in the past.
    """

    n: int
    n_first: int = 0
    n_last: int = 0
    moved: bool = False

    def places(self, q: Tensor) -> Tensor:
        return torch.tensor([*spaced(self.n, self.n_first, q.shape[2] - self.n_last)], device=q.device)

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        return q.index_select(2, self.places(q))

    def observe_layer(
        self, trace: Trace, layer: int, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None
    ) -> Tensor:
        found = self.observe(q, k, softmax)
        if not self.moved or trace.turn is None:
            return found
        return trace.turn[layer](found, (q.shape[2] - self.places(q)).unsqueeze(0))


# Bytes of one chunk's logits. Their softmax takes as much again and the keys of one KV head in float32 at most twice as
# much: with the output about 170 MB at 131,072 tokens, 32 heads of 128 dimensions and a window of 64.
SCORE_CHUNK_BYTES = 32 << 20


def window_scores(q: Tensor, keys: Tensor, softmax: Softmax, of_rows: Tensor | None = None) -> Tensor:
    """What the prompt's last `w` queries give to every token before them, summed over the window: (1, h, s - w).

    `q` (1, h, w, d_h) sees all `keys` (1, h_kv, s, d_h), those of the window causally: the window's own columns take
    part in the softmax and are cut off after it. Float32 whatever the dtype of the model. A query counts as `of_rows`
    (w,) says, else as 1.
    """
    (_, h, w, _), (_, h_kv, s, _) = q.shape, keys.shape
    assert w <= s and h % h_kv == 0, (q.shape, keys.shape)
    g, n_past = h // h_kv, s - w
    hidden = torch.ones(w, w, dtype=torch.bool, device=q.device).triu(1)
    n_heads = max(1, at_once(SCORE_CHUNK_BYTES, q.device) // (4 * max(1, w * s)))
    scores = torch.empty(1, h, n_past, device=q.device)
    for kv_head in range(h_kv):
        transposed = keys[0, kv_head].float().mT  # (d_h, s)
        for head in range(kv_head * g, (kv_head + 1) * g, n_heads):
            chunk = slice(head, min(head + n_heads, (kv_head + 1) * g))
            logits = softmax.capped((q[0, chunk].float() * softmax.scale) @ transposed)  # (heads, w, s)
            logits[..., n_past:].masked_fill_(hidden, -torch.inf)
            weights = softmax.of(chunk).weights(logits, (-1, 1))[..., :n_past]
            scores[0, chunk] = weights.sum(1) if of_rows is None else torch.einsum("hwn,w->hn", weights, of_rows)
    return scores


@dataclass(frozen=True)
class MeanWeights(Observation):
    """Weights of the prompt's last `n` queries, averaged over all query heads: (n, s) float32."""

    n: int

    @property
    def looks_at(self) -> int:
        return self.n

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        h, (_, h_kv, s, _) = q.shape[1], k.shape
        n = min(self.n, s)
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        weights = torch.zeros(n, s, device=q.device)
        for head in range(h):
            logits = softmax.logits(q[0, head, -n:], k[0, head * h_kv // h])
            logits[:, s - n :].masked_fill_(hidden, -torch.inf)
            weights += softmax.of(slice(head, head + 1)).weights(logits, (1,)) / h
        return weights


@dataclass(frozen=True)
class ColumnSums(Observation):
    """Attention that every token receives from all queries of the prompt: (1, h, s) float32.

    Each head's sum is s, less what its sink takes.

    Float32 whatever the dtype of the model, and float64 where blocks of queries are added up.
    """

    of_all_weights: ClassVar[bool] = True
    of_tokens: ClassVar[bool] = True

    def grown(self, before: Tensor | None, now: Tensor) -> Tensor:
        if before is not None:
            now[..., : before.shape[-1]] += before
        return now

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        return self.observe_pass(q, k, softmax, None)

    def observe_pass(self, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None) -> Tensor:
        if lse is None and (q.is_cuda or not softmax.is_plain):
            lse = query_lse(q, k, softmax)
        return column_sums(q, k, softmax.scale, lse=lse, cap=softmax.cap).flatten(0, 1).unsqueeze(0).float()

    def observe_layer(
        self, trace: Trace, layer: int, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None
    ) -> Tensor:
        if trace.kept is None or lse is None:
            return self.observe_pass(q, k, softmax, lse)
        return kept_sums(q, k, softmax.scale, trace.kept, lse, cap=softmax.cap).unsqueeze(0).float()


# Queries of a block, whose logits have columns for a window in addition: 64 measured best of 64 to 2,048 for windows of
# 100 to 2,000 tokens. Long windows get fewer, so that a block's logits, worked on in place, take at most these bytes.
BAND_QUERIES, BAND_BLOCK_BYTES = 64, 16 << 20


def query_lse(q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
    """Log-sum-exps of the causal logits of q (1, h, r, d_h), the last of s tokens, on k (1, h_kv, s, d_h): (1, h, r).

    With the sinks; float32.
    """
    (_, h, r, _), (_, h_kv, s, _) = q.shape, k.shape
    if q.is_cuda and r == s:  # what its kernel computes in addition is cheaper than logits in blocks
        return causal(q, k, k, softmax)[1]
    g = h // h_kv
    n_block = rows_per_block(g, s, q.device)
    hidden = torch.ones(n_block, n_block, dtype=torch.bool, device=q.device).triu(1)
    lse = torch.empty(1, h, r, device=q.device)
    for kv_head in range(h_kv):
        transposed = k[0, kv_head].float().mT  # (d_h, s)
        heads = slice(kv_head * g, (kv_head + 1) * g)
        for start in range(0, r, n_block):
            stop = min(start + n_block, r)
            n, last = stop - start, s - r + stop
            block = (q[0, heads, start:stop].float() * softmax.scale).flatten(0, 1)
            logits = softmax.capped(block @ transposed[:, :last]).view(g, n, last)
            logits[..., last - n :].masked_fill_(hidden[:n, :n], -torch.inf)
            lse[0, heads, start:stop] = softmax.of(heads).lse(logits, (-1, 1))
    return lse


def band_sums(q: Tensor, k: Tensor, softmax: Softmax, window: int, lse: Tensor) -> Tensor:
    """Attention that every key gets from the queries less than `window` after it, itself included: (1, h, s) float32.

    `lse` (1, h, s) are the log-sum-exps of a query's whole past, so that only the band's weights have to be made.
    """
    if takes_triton(q, k):
        return (
            column_sums_triton(q, k, softmax.scale, None, lse, window, softmax.cap).flatten(0, 1).unsqueeze(0).float()
        )
    if takes_native(q, k) and not softmax.cap:
        every = torch.ones(q.shape[2])
        return column_sums_native(q, k, softmax.scale, every, lse, window).flatten(0, 1).unsqueeze(0).float()
    (_, h, s, _), h_kv = q.shape, k.shape[1]
    g, window = h // h_kv, min(window, s)
    n_block = max(1, min(s, BAND_QUERIES, BAND_BLOCK_BYTES // (4 * g * (BAND_QUERIES + window))))
    corner = torch.ones(n_block, n_block, dtype=torch.bool, device=q.device)
    sums, ones = torch.zeros(h_kv, g, s, device=q.device), torch.ones(1, n_block, device=q.device)
    for kv_head in range(h_kv):
        transposed = k[0, kv_head].float().mT  # (d_h, s)
        heads = slice(kv_head * g, (kv_head + 1) * g)
        for start in range(0, s, n_block):
            stop, oldest = min(start + n_block, s), start - window + 1  # of the first query's band
            n, first = stop - start, max(0, oldest)
            block = (q[0, heads, start:stop].float() * softmax.scale).flatten(0, 1)
            logits = softmax.capped(block @ transposed[:, first:stop]).view(g, n, stop - first)
            weights = logits.sub_(lse[0, heads, start:stop].unsqueeze(-1)).exp_()
            weights[..., start - first :].masked_fill_(corner[:n, :n].triu(1), 0)
            too_old = corner[:n, :n].tril(oldest - first - 1)  # (query, column from `first` on)
            weights[..., :n].masked_fill_(too_old, 0)
            sums[kv_head, :, first:stop] += (ones[:, :n] @ weights).squeeze(1)
    return sums.flatten(0, 1).unsqueeze(0)


@dataclass(frozen=True)
class BandSums(Observation):
    """Attention that every token gets while it is among the last `window`: (1, h, s) float32.

    The softmax is over the query's whole past. The pass leaves its normalisation, which costs most to make anew:
    then on a CPU a window of a twentieth of the prompt takes 0.14 of the time of `ColumnSums`, a tenth of it 0.22
    (4,000 tokens). Of the prompt's last tokens these are partial sums.
    """

    window: int
    of_all_weights: ClassVar[bool] = True

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        return self.observe_pass(q, k, softmax, None)

    def observe_pass(self, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None) -> Tensor:
        return band_sums(q, k, softmax, self.window, query_lse(q, k, softmax) if lse is None else lse)

    def observe_layer(
        self, trace: Trace, layer: int, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None
    ) -> Tensor:
        if trace.kept is None or lse is None:
            return self.observe_pass(q, k, softmax, lse)
        return kept_sums(q, k, softmax.scale, trace.kept, lse, self.window, softmax.cap).unsqueeze(0).float()


BAND_LOGIT_TOKENS = 4096  # tokens of a head at a time: 4 MB each of queries and of their running sums


@dataclass(frozen=True)
class BandLogits(Observation):
    """Scaled logits that every token gets from the `window` queries after it, itself not included: (1, h, s) float32.

    Sums, of as many queries as there were. A sum of logits is the key times the sum of the queries, so it takes
    differences of running sums and no product of queries with keys.
    """

    window: int

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        if softmax.cap:
            return capped_band(q, k, softmax, self.window)
        (_, h, s, d_h), g = q.shape, q.shape[1] // k.shape[1]
        sums, n_block = torch.empty(1, h, s, device=q.device), at_once(BAND_LOGIT_TOKENS, q.device)
        for head in range(h):
            queries = q[0, head]
            so_far = torch.zeros(d_h, dtype=finest(q.device), device=q.device)  # of queries before a token
            ahead = queries[: self.window].sum(0, dtype=finest(q.device))  # the same, `window` tokens on
            for start in range(0, s, n_block):
                stop = min(start + n_block, s)
                until = finer(queries[start:stop]).cumsum_(0).add_(so_far)
                beyond = finer(queries[start + self.window : stop + self.window])
                # After the last query the sum stays as it is.
                beyond = torch.nn.functional.pad(beyond, (0, 0, 0, stop - start - len(beyond)))
                beyond = beyond.cumsum_(0).add_(ahead)
                so_far, ahead = until[-1], beyond[-1]
                products = (beyond - until).mul_(k[0, head // g, start:stop])
                sums[0, head, start:stop] = products.sum(-1) * softmax.scale
        return sums


def capped_band(q: Tensor, k: Tensor, softmax: Softmax, window: int) -> Tensor:
    """`BandLogits` under a cap, where a sum of logits is no product: all of them are made, some tokens at a time."""
    (_, h, s, _), h_kv = q.shape, k.shape[1]
    g, sums = h // h_kv, torch.zeros(1, h, s, device=q.device)
    for start in range(0, s, BAND_QUERIES):
        stop = min(start + BAND_QUERIES, s)
        end = min(stop + window, s)
        behind = torch.arange(start, end, device=q.device) - torch.arange(start, stop, device=q.device).unsqueeze(1)
        seen = (behind > 0) & (behind <= window)  # (tokens, queries)
        for kv_head in range(h_kv):
            heads = slice(kv_head * g, (kv_head + 1) * g)
            logits = softmax.logits(k[0, kv_head, start:stop], q[0, heads, start:end])  # (g, tokens, queries)
            sums[0, heads, start:stop] = logits.mul_(seen).sum(-1)
    return sums


BASIS_QUERIES = 1024  # queries of a head that are converted at a time; 512 and 1,024 measured best of 128 to 4,096


@dataclass(frozen=True)
class ChannelSums(Observation):
    """What every channel of a KV head carries, and a basis in which few channels carry most: (h_kv, d_h + 2, d_h).

    Float32. First the basis A, a column per channel, then the sums over tokens of |q A|, of all query heads of the
    group, and of |k A|. With `skew` A's columns are the right singular vectors of the group's queries, the last ones
    with the largest values; without, A changes nothing.
    """

    skew: bool

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        (_, h, _, d_h), h_kv = q.shape, k.shape[1]
        g = h // h_kv
        carried, n_block = torch.empty(h_kv, d_h + 2, d_h, device=q.device), at_once(BASIS_QUERIES, q.device)
        for kv_head in range(h_kv):
            queries = q[0, kv_head * g : (kv_head + 1) * g].split(n_block, 1)
            basis = torch.eye(d_h, device=q.device)
            if self.skew:
                # Q^T Q adds up block by block and has the singular vectors of Q; in float64 they are as good.
                gram = torch.zeros(d_h, d_h, dtype=finest(q.device), device=q.device)
                for block in queries:
                    flat = finer(block).flatten(0, 1)
                    gram += flat.mT @ flat
                basis = torch.linalg.eigh(gram).eigenvectors.float()
            carried[kv_head, :d_h] = basis
            keys = k[0, kv_head].unsqueeze(0).split(n_block, 1)
            for at, blocks in ((d_h, queries), (d_h + 1, keys)):
                sums = [(block.float() @ basis).abs().sum((0, 1)) for block in blocks]
                carried[kv_head, at] = torch.stack(sums).sum(0)
        return carried


TURN_BLOCK_BYTES = 1 << 20  # of queries in float32 that are turned and added up at a time, while they are in the cache


@dataclass(frozen=True)
class QueryStatistics(Observation):
    """Mean and covariance of the queries before rotary embedding: (h, 1 + d_h, d_h) float32, the mean first.

    The first `n_skip` queries are left out; the covariance is divided by the number of the others. Each query is turned
    back by its own position. A model that scales its rotary embedding has scaled the queries, and they stay so. Without
    `is_rotary` queries count as they are.
    """

    n_skip: int
    is_rotary: bool = True

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        return moments(block.float() for block in q[0, :, self.n_skip :].split(block_tokens(q), 1))

    def observe_layer(
        self, trace: Trace, layer: int, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None
    ) -> Tensor:
        if trace.turn is None or not self.is_rotary:
            return self.observe(q, k, softmax)
        turn = trace.turn[layer]
        where, n, skip = trace.positions.get(layer), block_tokens(q), self.n_skip
        if where is None and (rotation := trace.rotation(layer)) is not None:
            starts = range(skip, q.shape[2], n)
            return moments(turned_back(q[0, :, start : start + n].float(), rotation, start) for start in starts)
        where = torch.arange(q.shape[2], device=q.device) if where is None else where
        blocks = zip(q[:, :, self.n_skip :].split(n, 2), where[self.n_skip :].split(n), strict=True)
        return moments(turn(block.float(), -at.unsqueeze(0))[0] for block, at in blocks)


def block_tokens(q: Tensor) -> int:
    """Tokens of a block of `TURN_BLOCK_BYTES`."""
    return max(1, at_once(TURN_BLOCK_BYTES, q.device) // (4 * q.shape[1] * q.shape[3]))


def moments(blocks: Iterable[Tensor]) -> Tensor:
    """Mean and covariance over all tokens of blocks (h, n, d_h) float32: (h, 1 + d_h, d_h), the mean first.

    Sums are of distances from the first block's mean, so that a large mean takes no digits from the covariance.
    """
    n, centre, total, products = 0, None, None, None
    for block in blocks:
        if centre is None or total is None or products is None:
            centre = block.mean(1, keepdim=True)  # (h, 1, d_h)
            total, products = torch.zeros_like(centre), block.new_zeros(len(block), block.shape[2], block.shape[2])
        apart = block - centre
        total += apart.sum(1, keepdim=True)
        products.baddbmm_(apart.mT, apart)
        n += block.shape[1]
    assert centre is not None and total is not None and products is not None, "no token to take statistics of"
    off = total / n
    return torch.cat([centre + off, products / n - off.mT @ off], 1)
