"""Compactor (Chari and Van Durme, 2025): keep keys that are outliers, and tokens that their neighbours look at.

Two scores are blended. A key's leverage, before rotary embedding, is its share in what all keys of its head span. The
other is attention within chunks of the prompt, where every query sees all keys of its chunk, later ones too. No
question is asked.

Paper     arXiv:2507.08143, 2025; Chari, Vivek; Compactor: Calibrated Query-Agnostic KV Cache Compression with
          Approximate Leverage Scores
Symbols   kvpress sketch_dimension, chunk_size, blending, sink_size_start, sink_size_end = `sketch`, `chunk`, `beta`,
          `n_sink`, `n_last`; leverages l, attention A = `leverages`, `TwoWay`.
Per step  moved: nothing; resident: the budget's tokens and generated ones, 4 * d_h bytes each per KV head.
Differs   - `beta` is a number, as scores may not depend on the budget; null is kvpress' form, one less the ratio.
          - the last chunk is as long as what is left. kvpress fills it up (`padding: published`) with queries and keys
            of zeros, which it does not hide.
          - protected tokens are kept outside of the scores; kvpress gives them the layer's highest.
          - the sketch follows from `seed`, layer and head; kvpress draws anew each time.
          - where fewer keys than sketched dimensions are scored, all have one leverage, and attention alone counts.
Fails     where a head's outliers are not what is asked for: z-scores of all heads are one, so that one loud head
          silences the others.
Figures   drop by keys and values: #A742DE, right, :
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Count, Index, Is, Tokens
from kvbench.engine.observe import Observation
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.methods.scoring import ScoringMethod

JITTER, TRIES = 0.01, 5  # on the diagonal of the keys' products, ten times as much with every try
LEAST_SPREAD = 1e-6


@dataclass(frozen=True)
class TwoWay(Observation):
    """Attention that tokens get within chunks, in which every query sees all keys: (1, h, n) float32, unscaled logits.

    Without the prompt's first and last tokens. `is_filled`: zeros make the last chunk as long as all others.
    """

    chunk: int
    n_first: int
    n_last: int
    is_filled: bool

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        (_, h, s, _), g = q.shape, q.shape[1] // k.shape[1]
        end = s - self.n_last
        sums = torch.empty(1, h, end - self.n_first, device=q.device)
        for start in range(self.n_first, end, self.chunk):
            n = min(self.chunk, end - start)
            fill = (0, 0, 0, self.chunk - n if self.is_filled else 0)
            keys = torch.nn.functional.pad(k[0, :, start : start + n].float(), fill)  # (h_kv, chunk, d_h)
            for head in range(h):
                queries = torch.nn.functional.pad(q[0, head, start : start + n].float(), fill)
                weights = (queries @ keys[head // g].mT).softmax(-1)
                sums[0, head, start - self.n_first :][:n] = weights.sum(0)[:n]
        return sums


def leverages(keys: Tensor, sketch: Tensor) -> Tensor:
    """Each key's share in what its head's (1, h_kv, n, d_h) span, seen by a sketch (h_kv, d_h, r): (1, h_kv, n)."""
    x = (keys[0].float() - keys[0].float().mean(1, keepdim=True)) @ sketch
    products, eye = x.mT @ x, torch.eye(x.shape[-1], device=x.device)
    for i in range(TRIES):
        factor, failed = torch.linalg.cholesky_ex(products + JITTER * 10**i * eye)
        if not bool(failed.any()):
            break
    return (x * torch.cholesky_solve(x.mT, factor).mT).sum(-1).clamp(min=0).unsqueeze(0)


def z_scores(x: Tensor) -> Tensor:
    """Distances from the mean of all heads and tokens, in their common standard deviation."""
    return (x - x.mean()) / x.std().clamp(min=LEAST_SPREAD)


class Compactor(ScoringMethod):
    title = "Compactor"
    no_growth = "measures tokens against the whole context at once"
    drops = True
    is_scorer = True
    comparable = "heads"
    no_latents = "asks for keys before rotary embedding: here each head makes them of one latent"

    @dataclass(frozen=True)
    class Params:
        sketch: Count
        chunk: Annotated[int, Ge(2)]
        beta: Annotated[float, Ge(0), Is("what leverage weighs, 0 or more")] | None
        parts: Literal["both", "leverage", "attention"]
        n_sink: Tokens
        n_last: Tokens
        padding: Literal["masked", "published"]
        seed: Index

    @dataclass(frozen=True)
    class Plan:
        n_sink: int
        n_last: int
        beta: float
        sketch: int  # dimensions, at most those of a head

    params: Params
    plan: Plan

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        n_last = params.n_last
        if params.n_sink + n_last > budget.tokens:
            n_last = min(n_last, budget.tokens // 4)
        n_sink = min(params.n_sink, budget.tokens - n_last)
        beta = float(1 - budget.ratio) if params.beta is None else params.beta
        return Compactor.Plan(n_sink, n_last, beta, min(params.sketch, shape.d_h))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = [params.parts] * (params.parts != "both") + ["published"] * (params.padding == "published")
        name = super().label(params, request)
        return name.replace(cls.title, f"{cls.title} ({', '.join(notes)})") if notes else name

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        if params.parts == "leverage":
            return ()
        return (TwoWay(params.chunk, plan.n_sink, plan.n_last, params.padding == "published"),)

    def ends(self) -> tuple[int, int]:
        return self.plan.n_sink, self.plan.n_last

    def scores(self, layer: int) -> Tensor:
        n = self.trace.s_prompt - sum(self.ends())
        if self.params.parts == "leverage":
            return self.leverage(layer)
        attention = self.attention(layer)
        if self.params.parts == "attention" or n < self.plan.sketch:
            return attention
        return self.plan.beta * self.leverage(layer) + attention

    def sketch(self, layer: int) -> Tensor:
        """Normal numbers of each KV head, (h_kv, d_h, sketch)."""
        shape, draw = self.trace.shape, torch.Generator()
        heads = []
        for head in range(shape.h_kv):
            draw.manual_seed((self.params.seed * 1_000_003 + layer * 1_009 + head) % 2**63)
            heads.append(torch.randn(shape.d_h, self.plan.sketch, generator=draw))
        return torch.stack(heads).to(self.trace.device_of(layer))

    def leverage(self, layer: int) -> Tensor:
        keys, (first, last) = self.trace.keys(layer).float(), self.ends()
        s = keys.shape[2]
        if self.trace.turn is not None:
            keys = self.trace.turn[layer](keys, -torch.arange(s, device=keys.device).unsqueeze(0))
        return z_scores(leverages(keys[:, :, first : s - last], self.sketch(layer) / math.sqrt(self.plan.sketch)))

    def attention(self, layer: int) -> Tensor:
        first, last = self.ends()
        what = TwoWay(self.params.chunk, first, last, self.params.padding == "published")
        found = self.trace.observed(what, layer).unflatten(1, (self.trace.shape.h_kv, -1)).mean(2)
        values = self.trace.values(layer)[:, :, first : self.trace.s_prompt - last]
        found = found * torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
        return z_scores(torch.nn.functional.avg_pool1d(found, 3, stride=1, padding=1))
