"""ShadowKV (Sun et al., 2025): low-rank keys on the device, values on the host, and chunks found by their mean keys.

Keys before rotary embedding are nearly of low rank. Those of all KV heads side by side are kept as two factors; values
go to the host. The mean of a chunk's rotated keys is its landmark. A few chunks whose keys resemble it least, outliers,
stay on the device as they are, and so do the prompt's last tokens. At each step landmarks say which chunks a KV head
attends to: their values are fetched, their keys are made from the factors and rotated to their own positions.

Symbols   paper c, r, outliers, local = `chunk`, `rank`, `n_outliers`, `n_local`; A, B = `rows`, `basis`;
          k = `n_selected`, n = `n_chunks`.
Per step  read to find: 2 * h_kv * (n - n_outliers) * d_h bytes of landmarks, resident; moved: values alone,
          2 * h_kv * d_h bytes of each of n_selected * chunk tokens; resident besides: both factors,
          2 * r * (s + h_kv * d_h) bytes, and K and V of outliers, local and generated tokens. The host has
          2 * h_kv * d_h bytes of each token in front of the local ones.
Differs   - the rank is a share of the keys' numbers, 160 of 1,024 as published; 160 itself would be 83 % of a small
            model's keys.
          - outliers and local tokens are part of the budget, which pays for fewer outliers where it is small;
            `budget_rule: official` has them on top (method=shadowkv_paper).
          - landmarks of 8 tokens read an eighth of the key bytes. Where `comm` pays for less, chunks are longer, and
            the label says how long; `native` leaves them as they are and says so.
          - keys of selected chunks always come from the factors. The authors' offloading class begins with exact keys.
          - the factors come from the eigenvectors of the keys' Gram matrix, added up in float64. Only their product has
            a meaning, and it is the truncated SVD's.
          - scores carry the layer's own scale, the authors' the constant sqrt(128).
          - which chunks are outliers are the store's positions of kept tokens, which no method counts.
          - given `memory`, the ratio's tokens come first; the rank falls to a sixteenth of the keys' numbers where that
            fits, then chunks grow. `method_report` names both. At `ratio=1` with `memory` below 1 it attends to all
            chunks, by low-rank keys.
          - keys of a model whose rotation is not known are factored as they are attended to, and `method_report` says
            so; that is right only where there is none.
Fails     where the mean of a chunk is near none of its keys: a single token that matters is not found. The longer the
          chunks, the more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engine.books.spans import span
from engine.budget import key_bytes
from kernels.rows.landmarks import Chunks, make_rows
from kernels.topk import top_stable
from methods.base import SelectiveAttention
from methods.rules.retrieving.shadowkv import ShadowKVRules

GRAM_TOKENS = 4096  # whose products are added up at a time


@dataclass(frozen=True)
class Factors:
    """Low-rank keys of one layer before rotary embedding, in the model's dtype."""

    rows: Tensor  # (s, r)
    basis: Tensor  # (h_kv, r, d_h); float32 on a CPU, which would convert it at every step

    def keys(self, idx: Tensor) -> Tensor:
        """Those of the tokens at idx (h_kv, k): (h_kv, k, d_h) float32."""
        rows = self.rows.index_select(0, idx.flatten()).view(*idx.shape, -1)
        return rows.to(self.basis.dtype).bmm(self.basis).float()


def factored(x: Tensor, rank: int, h_kv: int, dtype: torch.dtype) -> Factors:
    """The best factors of that rank of keys x (s, h_kv * d_h) float32."""
    leading = leading_directions(x, rank)  # (h_kv * d_h, r)
    basis = leading.mT.reshape(rank, h_kv, -1).transpose(0, 1).contiguous().to(dtype)
    return Factors((x @ leading).to(dtype), basis if basis.is_cuda else basis.float())


def leading_directions(x: Tensor, rank: int) -> Tensor:
    """Right singular vectors of x (s, n) float32 with the `rank` largest values: (n, rank) float32."""
    gram = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
    for block in x.split(GRAM_TOKENS):
        wide = block.double()
        gram.addmm_(wide.mT, wide)
    return torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(-1).float()


def chunk_means(keys: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Of keys (h_kv, n * chunk, d_h): each chunk's mean (h_kv, n, d_h), and its least cosine with it, (h_kv, n)."""
    chunks = keys.float().unflatten(1, (-1, chunk))  # (h_kv, n, chunk, d_h)
    means = chunks.mean(2)
    lengths = chunks.norm(dim=-1) * means.norm(dim=-1, keepdim=True)
    cosines = (chunks @ means.unsqueeze(-1)).squeeze(-1) / lengths.clamp(min=1e-8)
    return means, cosines.amin(-1)


@dataclass(frozen=True)
class Landmarks:
    """The chunks of one layer that can be selected; the others are outliers."""

    means: Tensor  # (h_kv, n - n_outliers, d_h) as the model's dtype has them; float32 on a CPU
    outliers: Tensor  # (h_kv, n_outliers) int64 ascending, chunks

    def numbers(self, ranks: Tensor) -> Tensor:
        """The chunks of landmarks `ranks` (h_kv, k), counted among landmarks: among all."""
        if self.outliers.shape[1] == 0:
            return ranks
        places = torch.arange(self.outliers.shape[1], device=ranks.device)
        in_front = self.outliers - places  # landmarks in front of each outlier
        return ranks + torch.searchsorted(in_front, ranks.contiguous(), right=True)


def landmarks_of(keys: Tensor, chunk: int, n_outliers: int) -> Landmarks:
    """Of keys (h_kv, n * chunk, d_h)."""
    means, cosines = chunk_means(keys, chunk)
    outliers = top_stable(-cosines, n_outliers).sort(-1).values
    usual = torch.ones_like(cosines, dtype=torch.bool).scatter_(1, outliers, False)
    chosen = means[usual].view(len(means), -1, means.shape[2]).to(keys.dtype)
    return Landmarks(chosen if chosen.is_cuda else chosen.float(), outliers)


def landmark_scores(q: Tensor, means: Tensor, scale: float) -> Tensor:
    """What queries (n, h, 1, d_h) give to landmarks (h_kv, c, d_h), the most of any query head: (n, h_kv, c) float32.

    Logarithms of probabilities, which do not underflow; each query head's are its own.
    """
    grouped = q.float().unflatten(1, (len(means), -1)).squeeze(3)  # (n, h_kv, g, d_h)
    logits = (grouped @ means.float().mT) * scale
    return (logits - logits.logsumexp(-1, keepdim=True)).amax(2)


def tokens_of(chunks: Tensor, length: int) -> Tensor:
    """Positions of the tokens of chunks (h_kv, k): (1, h_kv, k * length)."""
    within = torch.arange(length, device=chunks.device)
    return (chunks.unsqueeze(-1) * length + within).flatten(1).unsqueeze(0)


class ShadowKV(ShadowKVRules, SelectiveAttention):
    params: ShadowKVRules.Params
    plan: ShadowKVRules.Plan
    factors: dict[int, Factors]
    landmarks: dict[int, Landmarks]

    made: Tensor | None  # keys of the tokens that were just selected, where a GPU makes them at once

    def setup(self) -> None:
        self.factors, self.landmarks, self.made = {}, {}, None

    # While the prompt is read.

    def arrange(self, layer: int) -> None:
        plan, trace = self.plan, self.trace
        keys = trace.keys(layer)[0, :, : plan.n_chunks * plan.chunk]
        with span("factor", layer):
            self.factors[layer] = trace.once(("ShadowKV's factors", layer, plan.rank), lambda: self.factor(layer))
        self.landmarks[layer] = trace.once(
            ("ShadowKV's landmarks", layer, plan.chunk, plan.n_chunks, plan.n_outliers),
            lambda: landmarks_of(keys, plan.chunk, plan.n_outliers),
        )
        kept = tokens_of(self.landmarks[layer].outliers, plan.chunk)
        self.store.offload_values(layer, kept, plan.n_local(trace.s_prompt))

    def factor(self, layer: int) -> Factors:
        """The factors of the layer's keys, turned back to where they had no position."""
        keys, trace = self.trace.keys(layer), self.trace
        x = keys.float()
        if trace.turn is not None:
            x = trace.turn[layer](x, -torch.arange(trace.s_prompt, device=keys.device).unsqueeze(0))
        flat = x[0].transpose(0, 1).flatten(1)  # (s, h_kv * d_h)
        return factored(flat, self.plan.rank, trace.shape.h_kv, keys.dtype)

    # A decode step.

    @classmethod
    def select_rows(cls, rows: Sequence[SelectiveAttention], layer: int, q: Tensor) -> list[Tensor | None]:
        """On a GPU all rows' chunks are found, and their keys made, at once."""
        mine, trace = cast("Sequence[ShadowKV]", rows), rows[0].trace
        if not q.is_cuda or not mine[0].turns_pairs(layer):
            return super().select_rows(rows, layer, q)
        found = make_rows(q, [row.chunks(layer) for row in mine], trace.rotation(layer), trace.scales[layer])
        for row, (_, row.made) in zip(mine, found, strict=True):
            row.count(layer)
        return [idx for idx, _ in found]

    def turns_pairs(self, layer: int) -> bool:
        return self.trace.turn is None or self.trace.rotation(layer) is not None

    def chunks(self, layer: int) -> Chunks:
        """As the kernels take them."""
        landmarks, factors, plan = self.landmarks[layer], self.factors[layer], self.plan
        return Chunks(landmarks.means, landmarks.outliers, factors.rows, factors.basis, plan.chunk, plan.n_selected)

    def count(self, layer: int) -> None:
        """What selecting costs goes into the books."""
        plan, shape = self.plan, self.trace.shape
        factor_bytes, landmark_bytes = plan.meta_bytes(self.trace.s_prompt, shape)
        meter = self.store[layer].meter
        meter.count("resident_meta_bytes", factor_bytes + landmark_bytes)
        meter.count("moved_meta_bytes", landmark_bytes)
        meter.count("made_kv_bytes", plan.n_selected * plan.chunk * key_bytes(shape, 1))

    def select(self, layer: int, q: Tensor) -> Tensor:
        """Tokens of the best chunks of each KV head, (1, h_kv, n_selected * chunk)."""
        landmarks, plan = self.landmarks[layer], self.plan
        self.count(layer)
        scores = landmark_scores(q, landmarks.means, self.trace.scales[layer])[0]
        ranks = top_stable(scores, plan.n_selected)  # (h_kv, n_selected)
        return tokens_of(landmarks.numbers(ranks), plan.chunk)

    def made_keys(self, layer: int, idx: Tensor) -> Tensor:
        if self.made is not None:
            made, self.made = self.made, None
            return made
        keys, turn = self.factors[layer].keys(idx[0]), self.trace.turn
        if turn is not None:
            keys = turn[layer](keys.unsqueeze(1), idx[0]).squeeze(1)  # every head has positions of its own
        return keys.to(self.store[layer].k.dtype).unsqueeze(0)

    def protected(self, layer: int) -> Sequence[int]:
        return self.sinks_and_window(layer)

    def report(self) -> dict[str, Any]:
        if self.variant.is_full:
            return {}
        plan = self.plan
        report: dict[str, Any] = {
            "chunk": plan.chunk,
            "rank": plan.rank,
            "n_local": plan.n_local(self.trace.s_prompt),
            "n_outlier_chunks": plan.n_outliers,
            "n_selected_chunks": plan.n_selected,
        }
        if self.trace.turn is None:
            report["factored_keys"] = "as attended to"
        return report
