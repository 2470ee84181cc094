"""ChunkKV (Liu et al., 2025): keep whole chunks of neighbours, by what a token scorer says of their tokens.

A scorer's numbers are added up over heads and averaged over each chunk of the prompt; the best chunks stay, the same
for all heads of a layer. What tokens mean together then stays together.

Paper     arXiv:2502.00299, 2025; Liu, Xiang; ChunkKV: Semantic-Preserving KV Cache Compression for Efficient
          Long-Context LLM Inference
Symbols   paper chunk size c, N_reuse = `chunk`, `reuse`, its observe window the scorer's; kvpress' ChunkKVPress(press,
          chunk_length) = `scorer`, `chunk`, its ChunkPress = `choose: within`, its EntropyGatedChunkKVPress = `choose:
          gated` and `low`.
Per step  moved: nothing; resident: the budget's tokens and generated ones, 4 * d_h bytes each per KV head.
Differs   - tokens that the scorer protects, such as SnapKV's window, are kept outside of the chunks. Of the chunk that
            no longer fits, its best tokens are kept, so that the budget is used to the last token.
          - `match_published` is kvpress' rule (method=chunkkv_kvpress): protected tokens compete, at 1 above the
            layer's best, and the number of chunks is rounded down. The short last chunk, whole by such a token, stands
            for a long one, whose tokens are lost. Where the chunks could hold more than the budget it is refused.
          - `within` gives every chunk its share, and what rounding leaves to the first ones, which kvpress loses. It
            takes scorers that look at keys alone, chunk by chunk: for others kvpress turns the queries of every chunk
            by the places of the last one's.
          - of equal chunks, and tokens, the lower position stays.
          - `reuse` is 1; the paper's 2 takes every second layer's chunks from the layer below, and kvpress has it not.
Fails     where what is asked for is one token among dull neighbours, and where a chunk cuts it in two.
Figures   drop after the prompt, by its last queries: #8E8E50, bowtie, -
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from kvbench.engine.budget import Budget
from kvbench.engine.declared import Count
from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import Placement
from kvbench.engine.shapes import ModelShape
from kvbench.methods.dropping.allocators import Counts
from kvbench.methods.named import Scorer
from kvbench.methods.over import OverScorer, kind_of, refuse_query_heads
from kvbench.methods.scorers import keep_top
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits

NO_SUM = 1e-8  # added to a chunk's sum, and within the logarithm of a share


def chunk_sums(x: Tensor, chunk: int, start: int) -> tuple[Tensor, Tensor]:
    """Sum and number of the numbers (n,) of every chunk of a prompt, from token `start` on: (C,), (C,)."""
    first, n = start % chunk, x.shape[-1]
    ends = (first, -(first + n) % chunk)
    sums = torch.nn.functional.pad(x, ends).view(-1, chunk).sum(-1)
    return sums, torch.nn.functional.pad(torch.ones_like(x), ends).view(-1, chunk).sum(-1)


def chunks_of(n: int, chunk: int, start: int, device: torch.device) -> Tensor:
    """Which chunk each of the `n` tokens from `start` on is in, counted from the first of them: (n,)."""
    return (torch.arange(n, device=device) + start % chunk) // chunk


def worth(x: Tensor, chunk: int, start: int) -> Tensor:
    """Mean of each chunk, a short one's by its own length: (C,)."""
    sums, sizes = chunk_sums(x, chunk, start)
    return sums / sizes


def entropies(x: Tensor, chunk: int, start: int) -> Tensor:
    """How evenly a chunk's numbers (n,) are spread over its tokens, from 0 to 1; 0 of a single token: (C,)."""
    of_tokens = chunks_of(x.shape[-1], chunk, start, x.device)
    n_chunks = int(of_tokens[-1]) + 1
    least = x.new_zeros(n_chunks).scatter_reduce(0, of_tokens, x, "amin")  # 0 where none is below it
    x = x - least[of_tokens]
    sums, sizes = chunk_sums(x, chunk, start)
    p = x / (sums + NO_SUM)[of_tokens]
    spread = -chunk_sums(p * (p + NO_SUM).log(), chunk, start)[0]
    return torch.where(sizes > 1, spread / sizes.clamp(min=2).log(), 0.0)


def limits(x: Tensor, chunk: int, start: int, low: int) -> Tensor:
    """How many tokens a chunk may keep: `low` of those that are good, and whose numbers are on few tokens: (C,)."""
    mean, entropy = worth(x, chunk, start), entropies(x, chunk, start)
    gated = (mean >= mean.median()) & (entropy < entropy.median())  # the lower one of two
    return torch.where(gated, low, chunk)


def in_order(x: Tensor, chunk: int, start: int, limit: Tensor | None = None) -> Tensor:
    """Indices of all tokens (n,), best chunks first, in each the best tokens first; those over its `limit` last."""
    of_tokens = chunks_of(x.shape[-1], chunk, start, x.device)
    ranks = worth(x, chunk, start).argsort(descending=True, stable=True).argsort()
    best = x.argsort(descending=True, stable=True)
    key = ranks[of_tokens[best]]
    if limit is not None:
        by_chunk = best[key.argsort(stable=True)]
        firsts = torch.searchsorted(ranks[of_tokens[by_chunk]], ranks[of_tokens[by_chunk]])
        within = torch.empty_like(firsts)
        within[by_chunk] = torch.arange(len(x), device=x.device) - firsts
        key = torch.where(within[best] < limit[of_tokens[best]], key, len(ranks))
    return best[key.argsort(stable=True)]


def published_chunks(n: int, chunk: int, ratio: Fraction) -> int:
    """How many chunks of `n` tokens kvpress keeps, by its arithmetic in floating point."""
    return max(1, int(-(-n // chunk) * (1 - float(1 - ratio))))


def shares(n: int, chunk: int, start: int, budget: int) -> list[tuple[slice, int]]:
    """Where chunks of `n` tokens lie, and how many of the budget's each keeps; the first ones get what is left."""
    cuts = sorted({0, *range(-start % chunk, n, chunk), n})
    where = [slice(a, b) for a, b in pairwise(cuts)]
    kept = [(part.stop - part.start) * budget // n for part in where]
    for i, part in enumerate(where):
        more = min(part.stop - part.start - kept[i], budget - sum(kept))
        kept[i] += min(more, 1)
    return list(zip(where, kept, strict=True))


def published_counts(parts: list[tuple[slice, int]], ratio: Fraction) -> list[tuple[slice, int]]:
    """Chunks with kvpress' counts, each rounded down in floating point, and 1 at least."""
    share = 1 - float(1 - ratio)
    return [(where, max(1, int((where.stop - where.start) * share))) for where, _ in parts]


class ChunkKV(OverScorer):
    title = "ChunkKV"
    no_growth = "keeps chunks of the context, and a feed is shorter than one"
    comparable = "set"

    @dataclass(frozen=True)
    class Params:
        scorer: Scorer
        chunk: Count
        choose: Literal["best", "gated", "within"]
        low: Count
        reuse: Count
        match_published: bool

        def __post_init__(self) -> None:
            refuse_query_heads(self.scorer, ChunkKV.title)
            if self.choose == "within" and kind_of(self.scorer).score is ScoringMethod.score:
                raise ConfigError(
                    f"method.choose=within with {self.scorer.rules.title} as method.scorer is not allowed; a chunk by "
                    "itself tells only what its own keys say: use method.scorer=knorm or keydiff with it"
                )

    @dataclass(frozen=True)
    class Plan:
        inner: object  # the scorer's own integers
        n_chunks: int | None  # that are kept; None: as many as the budget's tokens fill

    params: Params
    plan: Plan

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        evicts = "method.match_published=true counts chunks; use false with it" if params.match_published else ""
        if params.choose == "within":
            evicts = "method.choose=within gives every chunk its share; use method.choose=best with it"
        return replace(super().traits_of(params), comparable=cls.traits.comparable, evicts=evicts)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        inner = cls.inner_plan(params, budget, shape)
        if not params.match_published or params.choose != "best" or budget.attends_all:
            return ChunkKV.Plan(inner, None)
        m, rest = published_chunks(budget.s_prompt, params.chunk, budget.ratio), budget.s_prompt % params.chunk
        most = (m - 1) * params.chunk + rest if rest and getattr(inner, "window", 0) else m * params.chunk
        if most > budget.tokens:
            raise ConfigError(
                f"{m} chunks of {params.chunk} tokens are up to {most}, more than the budget of {budget.tokens}; use "
                "method.match_published=false, or a smaller method.chunk"
            )
        return ChunkKV.Plan(inner, m)

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        return super().notes(params) + [params.choose] * (params.choose != "best")

    def scores(self, layer: int) -> Tensor:
        layers = self.scored_layers()
        at = layers.index(layer)
        if at % self.params.reuse:
            return self.shared_scores(layers[at - at % self.params.reuse]).to(self.trace.device_of(layer))
        if self.params.choose == "within":
            first, last = self.ends()
            keys = self.trace.keys(layer)[:, :, first : self.trace.s_prompt - last]
            parts = [keys[:, :, where] for where, _ in self.parts(keys.shape[2], 0)]
            return torch.cat([self.inner.worth(layer, part) for part in parts], -1)
        return self.worths(layer).sum(1, keepdim=True)

    def keep_best(self, layer: int, n: Counts) -> Placement:
        assert isinstance(n, int), "all heads keep one number"
        scores, chunk, start = self.shared_scores(layer), self.params.chunk, self.ends()[0]
        if scores.shape[-1] < chunk:  # no whole one: the scorer's own choice
            best = keep_top(scores, n)
        elif self.params.choose == "within":
            best = self.of_each(scores, n)
        else:
            x = scores[0, 0]
            limit = limits(x, chunk, start, self.params.low) if self.params.choose == "gated" else None
            if self.plan.n_chunks is not None:
                sizes = chunk_sums(x, chunk, start)[1]
                chosen = worth(x, chunk, start).argsort(descending=True, stable=True)[: self.plan.n_chunks]
                n = int(sizes[chosen].sum())
            best = in_order(x, chunk, start, limit)[:n].sort().values.view(1, 1, -1)
        best = best + start
        return self.place(layer, best.expand(-1, self.trace.shape.h_kv, -1).contiguous())

    def parts(self, n_tokens: int, n: int) -> list[tuple[slice, int]]:
        """Where chunks lie, and how many of `n` tokens each keeps."""
        parts = shares(n_tokens, self.params.chunk, self.ends()[0], n)
        return published_counts(parts, self.budget.ratio) if self.params.match_published else parts

    def of_each(self, scores: Tensor, n: int) -> Tensor:
        """The best tokens of every chunk, head by head: (1, heads, n)."""
        parts = self.parts(scores.shape[-1], n)
        return torch.cat([keep_top(scores[..., where], k) + where.start for where, k in parts], -1)
