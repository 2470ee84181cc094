"""ShadowKV (Sun et al., 2025): low-rank keys on the device, values on the host, and chunks found by their mean keys.

Keys before rotary embedding are nearly of low rank. Those of all KV heads side by side are kept as two factors; values
go to the host. The mean of a chunk's rotated keys is its landmark. A few chunks whose keys resemble it least, outliers,
stay on the device as they are, and so do the prompt's last tokens. At each step landmarks say which chunks a KV head
attends to: their values are fetched, their keys are made from the factors and rotated to their own positions.

Paper     arXiv:2410.21465, 2024; Sun, Hanshi; ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM
          Inference
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
Figures   retrieve single tokens: #518B07, down, --
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import Annotated, Any, Literal, Self

import torch
from annotated_types import Gt, Le
from torch import Tensor

from kvbench.engine.books.footprint import DIGITS, Footprint, held, largest, too_small
from kvbench.engine.books.spans import span
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, key_bytes, show
from kvbench.engine.declared import Count, Index, Is
from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import OffloadedValues
from kvbench.engine.search import KernelSearch, Units
from kvbench.engine.selection import Cost, Selection
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.kernels.clock import Since
from kvbench.kernels.fast import takes
from kvbench.kernels.rows.landmarks import Chunks, KeyMaking
from kvbench.kernels.scratch import Scratch, finer, finest
from kvbench.kernels.topk import top_stable
from kvbench.methods.indexed import Indexed

OUTLIER_SHARE = 8  # a budget of so many chunks pays for one outlier
LEAST_RANK_SHARE = 16  # of the keys' numbers: the lowest rank that a small `memory` leads to

GRAM_TOKENS = 4096  # whose products are added up at a time


@dataclass(frozen=True)
class Factors:
    """Low-rank keys of one layer before rotary embedding, in the model's dtype."""

    rows: Tensor  # (s, r)
    basis: Tensor  # (h_kv, r, d_h); float32 where torch would convert it at every step

    def keys(self, idx: Tensor) -> Tensor:
        """Rebuilt keys of the tokens at idx (h_kv, k): (h_kv, k, d_h) float32."""
        rows = self.rows.index_select(0, idx.flatten()).view(*idx.shape, -1)
        return rows.to(self.basis.dtype).bmm(self.basis).float()


def factored(x: Tensor, rank: int, h_kv: int, dtype: torch.dtype) -> Factors:
    """The best factors of that rank of keys x (s, h_kv * d_h) float32."""
    leading = leading_directions(x, rank)  # (h_kv * d_h, r)
    basis = leading.mT.reshape(rank, h_kv, -1).transpose(0, 1).contiguous().to(dtype)
    return Factors((x @ leading).to(dtype), basis if takes("landmarks", basis.device) else basis.float())


def leading_directions(x: Tensor, rank: int) -> Tensor:
    """Right singular vectors of x (s, n) float32 with the `rank` largest values: (n, rank) float32."""
    gram = torch.zeros(x.shape[1], x.shape[1], dtype=finest(x.device), device=x.device)
    for block in x.split(GRAM_TOKENS):
        wide = finer(block)
        gram.addmm_(wide.mT, wide)
    return torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(-1).float()


def chunk_means(keys: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Each chunk's mean, (h_kv, n, d_h), and least cosine with it, (h_kv, n), of keys (h_kv, n * chunk, d_h)."""
    chunks = keys.float().unflatten(1, (-1, chunk))  # (h_kv, n, chunk, d_h)
    means = chunks.mean(2)
    lengths = chunks.norm(dim=-1) * means.norm(dim=-1, keepdim=True)
    cosines = (chunks @ means.unsqueeze(-1)).squeeze(-1) / lengths.clamp(min=1e-8)
    return means, cosines.amin(-1)


@dataclass(frozen=True)
class Landmarks:
    """The chunks of one layer that can be selected; the others are outliers."""

    means: Tensor  # (h_kv, n - n_outliers, d_h) as the model's dtype has them; float32 without kernels
    outliers: Tensor  # (h_kv, n_outliers) int64 ascending, chunks

    def numbers(self, ranks: Tensor) -> Tensor:
        """The chunks of landmarks `ranks` (h_kv, k), counted among landmarks: among all."""
        if self.outliers.shape[1] == 0:
            return ranks
        places = torch.arange(self.outliers.shape[1], device=ranks.device)
        in_front = self.outliers - places  # landmarks in front of each outlier
        return ranks + torch.searchsorted(in_front, ranks.contiguous(), right=True)


def landmarks_of(keys: Tensor, chunk: int, n_outliers: int) -> Landmarks:
    """Landmarks of keys (h_kv, n * chunk, d_h)."""
    means, cosines = chunk_means(keys, chunk)
    outliers = top_stable(-cosines, n_outliers).sort(-1).values
    usual = torch.ones_like(cosines, dtype=torch.bool).scatter_(1, outliers, False)
    chosen = means[usual].view(len(means), -1, means.shape[2]).to(keys.dtype)
    return Landmarks(chosen if takes("landmarks", chosen.device) else chosen.float(), outliers)


def most_likely(logits: Tensor, softmax: Softmax) -> Tensor:
    """The most that any query head of a group gives to landmarks, of their logits (n, h_kv, g, c): (n, h_kv, c).

    Logarithms of probabilities, which do not underflow; each query head's are its own.
    """
    return (logits - softmax.lse(logits, (logits.shape[1], -1)).unsqueeze(-1)).amax(2)


def tokens_of(chunks: Tensor, length: int) -> Tensor:
    """Positions of the tokens of chunks (h_kv, k): (1, h_kv, k * length)."""
    within = torch.arange(length, device=chunks.device)
    return (chunks.unsqueeze(-1) * length + within).flatten(1).unsqueeze(0)


class ShadowKV(Indexed):
    title = "ShadowKV"
    ops = ("landmarks", "topk")
    no_growth = "makes keys again from a product that is fitted to the context"
    no_latents = "keeps keys as a product of low rank: a latent is one already"

    @dataclass(frozen=True)
    class Params:
        chunk: Count
        rank_share: Annotated[
            Fraction, Gt(0), Le(1), Is("a share of the numbers in all keys of a token, above 0 and at most 1")
        ]
        outlier_chunks: Index
        local_chunks: Index
        native: bool
        budget_rule: Literal["harness", "official"]

    @dataclass(frozen=True)
    class Plan:
        chunk: int
        rank: int
        n_chunks: int  # in front of the local tokens, outliers included
        n_outliers: int
        n_selected: int

        @property
        def is_workable(self) -> bool:
            return 1 <= self.n_selected <= self.n_chunks - self.n_outliers

        def n_local(self, s_prompt: int) -> int:
            """The prompt's last tokens, which stay as they are."""
            return s_prompt - self.n_chunks * self.chunk

        def meta_bytes(self, s_prompt: int, shape: ModelShape) -> tuple[int, int]:
            """Bytes per layer of the factors of the keys, and of the landmarks."""
            width = shape.h_kv * shape.d_h
            factors = self.rank * (s_prompt + width) * ELEMENT_BYTES
            return factors, (self.n_chunks - self.n_outliers) * width * ELEMENT_BYTES

    params: Params
    plan: Plan
    index: dict[int, Landmarks]
    factors: dict[int, Factors]

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        if request.ratio != 1 and request.comm == 0 and not params.native:
            raise ConfigError("comm=0 pays for no landmark; use comm=1/8 or another share, or method.native=true")

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        if params.native:
            is_over = request.comm is not None and request.comm * params.chunk < 1
            return f"{cls.title} (native)" if is_over else cls.title
        chunk = params.chunk if request.comm is None else chunk_of(params, request.comm)
        return cls.title if chunk == params.chunk else f"{cls.title} (chunks of {chunk})"

    @classmethod
    def index_comm(cls, params: Params, budget: Budget, shape: ModelShape) -> Fraction:
        return Fraction(1, params.chunk)

    @classmethod
    def fit_with_index(cls, params: Params, budget: Budget, shape: ModelShape) -> tuple[Budget, Plan]:
        """Fit the budget in ShadowKV's own order: a smaller rank before longer chunks."""
        fitted, plan = cls.fit(params, budget, shape)
        return replace(fitted, index_share=Fraction(params.chunk, plan.chunk)), plan

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        s = budget.s_prompt
        if budget.attends_all and budget.memory in (None, 1):
            return ShadowKV.Plan(params.chunk, 0, 0, 0, 0)
        chunk, rank = chunk_of(params, budget.comm), rank_of(params, s, shape)
        n_chunks = s // chunk - params.local_chunks
        if n_chunks < 1:
            raise ConfigError(
                f"a prompt of {s} tokens has no chunk of {chunk} in front of method.local_chunks={params.local_chunks} "
                "of them; use a smaller method.local_chunks, more comm, or method.native=true"
            )
        plan = divided(params, budget.tokens, s, chunk, rank)
        if plan.n_selected < 1:
            least = next(n for n in range(1, s + 1) if divided(params, n, s, chunk, rank).n_selected > 0)
            raise ConfigError(
                f"a budget of {budget.tokens} tokens for a prompt of {s} selects no chunk of {chunk} beside outliers "
                f"and {plan.n_local(s)} local tokens; use ratio={ceil(Fraction(1000 * least, s)) / 1000} or more "
                f"(budget={least}), a smaller method.local_chunks, or more comm"
            )
        if not plan.is_workable:
            raise ConfigError(
                f"method.outlier_chunks={params.outlier_chunks} and {plan.n_selected} selected chunks are more than "
                f"the {n_chunks} chunks of a prompt of {s} tokens; use fewer, a smaller budget, or longer prompts"
            )
        return plan

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        s = budget.s_prompt
        n_exact = plan.n_local(s) + plan.n_outliers * plan.chunk
        return held(budget, shape, n_exact, sum(plan.meta_bytes(s, shape)), plan.n_selected * plan.chunk)

    @classmethod
    def fit(cls, params: Params, budget: Budget, shape: ModelShape) -> tuple[Budget, Plan]:
        """The budget's tokens with the largest rank that fits, then with longer chunks; else as many tokens as fit."""
        found = cls.fitting(params, budget, shape)
        if found is not None:
            return found
        least = 1 + largest(1, DIGITS - 1, lambda n: cls.fitting(params, with_memory(budget, n), shape) is None)
        raise too_small(budget, cls.title, Fraction(least, DIGITS))

    @classmethod
    def fitting(cls, params: Params, budget: Budget, shape: ModelShape) -> tuple[Budget, Plan] | None:
        """`fit`, None where nothing does."""
        s, width = budget.s_prompt, shape.h_kv * shape.d_h
        rank, shortest = rank_of(params, s, shape), chunk_of(params, budget.comm)
        lowest = min(rank, max(1, width // LEAST_RANK_SHARE))

        def spare(plan: ShadowKV.Plan) -> int:
            return cls.footprint(params, plan, budget, shape).spare(budget, shape)

        for chunk in range(shortest, s // (params.local_chunks + 1) + 1):
            plan = divided(params, budget.tokens, s, chunk, lowest)
            if plan.is_workable and (left := spare(plan)) >= 0:
                of_rank = replace(plan, rank=1).meta_bytes(s, shape)[0]
                return budget, replace(plan, rank=min(rank, lowest + left // of_rank) if chunk == shortest else lowest)
        if s // shortest <= params.local_chunks:
            return None

        def fits(tokens: int) -> bool:
            plan = divided(params, tokens, s, shortest, lowest)
            return plan.n_selected < 1 or spare(plan) >= 0

        tokens = largest(1, budget.tokens, fits)
        plan = divided(params, tokens, s, shortest, lowest)
        fewer = replace(budget, tokens=tokens, nominal_tokens=tokens, ratio=Fraction(tokens, s))
        return (fewer, plan) if plan.is_workable else None

    def setup(self) -> None:
        super().setup()
        self.factors = {}

    # While the prompt is read.

    def arrange(self, layer: int) -> OffloadedValues:
        plan, trace = self.plan, self.trace
        keys = trace.keys(layer)[0, :, : plan.n_chunks * plan.chunk]
        self.follow(layer)
        self.index[layer] = trace.once(
            ("ShadowKV's landmarks", layer, plan.chunk, plan.n_chunks, plan.n_outliers),
            lambda: landmarks_of(keys, plan.chunk, plan.n_outliers),
        )
        kept = tokens_of(self.index[layer].outliers, plan.chunk)
        return OffloadedValues(kept, plan.n_local(trace.s_prompt))

    def follow(self, layer: int) -> None:
        """Make the layer's factors."""
        with span("factor", layer):
            key = "ShadowKV's factors", layer, self.plan.rank
            self.factors[layer] = self.trace.once(key, lambda: self.factor(layer))

    def take(self, layer: int, idx: Tensor | None) -> Selection:
        assert idx is not None, f"layer {layer} is given no chunk"
        factor_bytes, _ = self.plan.meta_bytes(self.trace.s_prompt, self.trace.shape)
        if self.store[layer].host.has_keys:  # where it attends to all tokens
            return Selection(idx, Cost(factor_bytes))
        made_bytes = idx.shape[2] * key_bytes(self.trace.shape, 1)
        return Selection(idx, Cost(factor_bytes, made_bytes=made_bytes), keys=self.made_keys(layer, idx))

    def factor(self, layer: int) -> Factors:
        """The factors of the layer's keys, turned back to where they had no position."""
        keys, trace = self.trace.keys(layer), self.trace
        x = keys.float()
        if trace.turn is not None:
            x = trace.turn[layer](x, -torch.arange(trace.s_prompt, device=keys.device).unsqueeze(0))
        flat = x[0].transpose(0, 1).flatten(1)  # (s, h_kv * d_h)
        return factored(flat, self.plan.rank, trace.shape.h_kv, keys.dtype)

    # A decode step.

    def score(self, layer: int, question: Tensor, index: Landmarks) -> Tensor:
        """Logits of landmarks."""
        return self.trace.softmax[layer].bent(question @ index.means.float().mT)

    def merge(self, layer: int, scores: Tensor) -> Tensor:
        return most_likely(scores, self.trace.softmax[layer])

    def units(self, layer: int) -> Units:
        """Chunks, counted among those with landmarks."""
        plan = self.plan
        return Units(plan.n_selected, (plan.n_chunks - plan.n_outliers) * plan.chunk, length=plan.chunk)

    def choose(self, layer: int, ranking: Tensor, scores: Tensor) -> Tensor:
        """Tokens of the best chunks of each KV head, (1, h_kv, n_selected * chunk)."""
        ranks = top_stable(ranking[0], self.plan.n_selected)  # (h_kv, n_selected)
        return tokens_of(self.index[layer].numbers(ranks), self.plan.chunk)

    def found(self, layer: int, idx: Tensor | None) -> Selection:
        assert idx is not None, f"layer {layer} selects no chunk"
        return Selection(idx, self.cost(layer), keys=self.made_keys(layer, idx))

    @property
    def n_choosing(self) -> int:
        return self.trace.shape.h_kv

    def kind(self, layer: int) -> Hashable:
        return None if self.has_kernel(layer) else id(self)

    def has_kernel(self, layer: int) -> bool:
        return super().has_kernel(layer) and self.turns_pairs(layer)

    @classmethod
    def plan_search(cls, rows: Sequence[Self], layer: int, scratch: Scratch | None, ahead: int) -> ChunkSearch:
        return ChunkSearch(rows, layer, scratch)

    def selects_feeds(self, layer: int) -> bool:
        return False

    def turns_pairs(self, layer: int) -> bool:
        return self.trace.turn is None or self.trace.rotation(layer) is not None

    def chunks(self, layer: int) -> Chunks:
        """The chunks' landmarks and factors as kernels take them."""
        landmarks, factors, plan = self.index[layer], self.factors[layer], self.plan
        return Chunks(landmarks.means, landmarks.outliers, factors.rows, factors.basis, plan.chunk, plan.n_selected)

    def cost(self, layer: int) -> Cost:
        """Factors and landmarks stay, landmarks are read, and keys are made of factors."""
        plan, shape = self.plan, self.trace.shape
        factor_bytes, landmark_bytes = plan.meta_bytes(self.trace.s_prompt, shape)
        made_bytes = plan.n_selected * plan.chunk * key_bytes(shape, 1)
        return Cost(factor_bytes + landmark_bytes, landmark_bytes, made_bytes=made_bytes)

    def made_keys(self, layer: int, idx: Tensor) -> Tensor:
        """Keys (1, h_kv, k, d_h) of these tokens, of which the host has the values alone."""
        keys, turn = self.factors[layer].keys(idx[0]), self.trace.turn
        if turn is not None:
            keys = turn[layer](keys.unsqueeze(1), idx[0]).squeeze(1)  # every head has positions of its own
        return keys.to(self.store[layer].newest[0].dtype).unsqueeze(0)

    def report(self) -> dict[str, Any]:
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


class ChunkSearch(KernelSearch):
    """Rows that find chunks and make keys of their tokens by one launch each."""

    is_repeatable = True

    def __init__(self, rows: Sequence[ShadowKV], layer: int, scratch: Scratch | None) -> None:
        trace, chunks = rows[0].trace, [row.chunks(layer) for row in rows]
        softmax, rotation = trace.softmax[layer], trace.rotation(layer)
        self.making = KeyMaking(chunks, trace.shape.h, rotation, softmax.scale, softmax.cap, softmax.sink, scratch)
        self.rows, self.layer, self.idx, self.made_keys = rows, layer, self.making.idx, self.making.keys

    def find(self, q: Tensor, k_new: Tensor, v_new: Tensor, since: Since) -> None:
        self.making.take(q)

    @property
    def is_settled(self) -> bool:
        return True


def with_memory(budget: Budget, part: int) -> Budget:
    """The prompt's budget with so many of `DIGITS` parts of memory, which are the ratio too where none was given."""
    memory = Fraction(part, DIGITS)
    if not budget.memory_alone:
        return replace(budget, memory=memory)
    tokens = floor(memory * budget.s_prompt)
    return replace(budget, memory=memory, tokens=tokens, nominal_tokens=tokens, ratio=memory)


def chunk_of(params: ShadowKV.Params, comm: Fraction) -> int:
    """Tokens of a chunk: one landmark each is what `comm` pays for, unless the chunk is native."""
    return params.chunk if params.native or comm == 0 else max(params.chunk, ceil(1 / comm))


def rank_of(params: ShadowKV.Params, s: int, shape: ModelShape) -> int:
    width = shape.h_kv * shape.d_h
    rank = round(params.rank_share * width)
    if not 1 <= rank <= min(s, width):
        raise ConfigError(
            f"method.rank_share={show(params.rank_share)} makes a rank of {rank} for keys of {width} numbers and a "
            f"prompt of {s} tokens; it is from 1 to {min(s, width)}"
        )
    return rank


def divided(params: ShadowKV.Params, tokens: int, s: int, chunk: int, rank: int) -> ShadowKV.Plan:
    """Outliers and selected chunks of a budget, which pays for local tokens too, unless all that comes on top."""
    n_chunks = s // chunk - params.local_chunks
    if params.budget_rule == "official":
        n_outliers, n_selected = params.outlier_chunks, tokens // chunk
    else:
        n_outliers = min(params.outlier_chunks, tokens // (OUTLIER_SHARE * chunk))
        n_selected = (tokens - (s - n_chunks * chunk) - n_outliers * chunk) // chunk
    return ShadowKV.Plan(chunk, rank, n_chunks, n_outliers, max(0, n_selected))
