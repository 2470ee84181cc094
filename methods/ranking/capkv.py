"""CapKV (Yang et al., 2026): keep what adds most to the space that the values of likely tokens span.

With a linear attention and Gaussian noise, what a kept set says of the output is the log-determinant of I plus the sum
of its weighted v v^T. A token's share in it is its ridge leverage, and its weight grows with the cosine of its key and
the mean of the queries to come, as Expected Attention turns it. A value that points where others do is worth little.

Paper     arXiv:2604.25975, 2026; Yang, Jiaming; Rethinking KV Cache Eviction via a Unified Information-Theoretic
          Objective
Symbols   code tau, n_future_positions, n_sink, epsilon = `tau`, `n_future`, `plan.n_sink`, `eps`; query anchor = the
          turned mean; A, w = `capacity`, `relevance`.
Per step  moved: nothing; resident: the budget's tokens and generated ones, 4 * d_h bytes each. While the prompt is
          read: h * (d_h + d_h²) float32 per layer, the statistics of Expected Attention, of which the mean is used.
Differs   - all of it is the authors' code, which is kvpress' press. It takes cosines where the paper has products of
            lengths too, turns the anchor by the average rotation of the next positions, and takes values as they are
            for what a token adds to the output.
          - sinks are kept outside of the scores, as there.
          - matrices are inverted in float64. `eps`, which the code adds to weights within A, is 0 here; A needs none.
Fails     where what is asked for has a value like many others', such as one number among many.
Figures   drop for any question: #466F91, kite, -.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.engine.budget import Budget
from kvbench.engine.declared import Count, Is, Tokens
from kvbench.engine.observe import Observation, QueryStatistics
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.kernels.scratch import finer
from kvbench.methods.dropping.expected_attention import refuse_unturned, rotation_ahead
from kvbench.methods.scoring import ScoringMethod

CHUNK = 4096  # tokens whose weighted values are there at a time

Number = Annotated[float, Ge(0), Is("a number from 0")]


def relevance(anchor: Tensor, keys: Tensor, tau: float) -> Tensor:
    """Weights of tokens (h, n), at most 1: exp(tau * cosine) of anchors (h, d_h) and keys (h_kv, n, d_h)."""
    normalize = torch.nn.functional.normalize
    grouped = normalize(anchor, dim=-1).unflatten(0, (len(keys), -1))  # (h_kv, g, d_h)
    found = torch.cat([grouped[a] @ normalize(k.float(), dim=-1).T for a, k in enumerate(keys)])
    found = tau * found.clamp(-1, 1)
    return (found - found.amax(-1, keepdim=True)).exp()


def leverages(values: Tensor, weights: Tensor, eps: float) -> Tensor:
    """v^T A^-1 v of tokens (h, n), with A of each query head, for values (h_kv, n, d) and weights (h, n)."""
    g = len(weights) // len(values)
    found = torch.empty_like(weights)
    for a, of_head in enumerate(values):
        heads = slice(a * g, (a + 1) * g)
        capacity = torch.eye(of_head.shape[-1], device=values.device).repeat(g, 1, 1)  # (g, d, d)
        for v, w in zip(of_head.split(CHUNK), weights[heads].split(CHUNK, 1), strict=True):
            capacity += ((w + eps).unsqueeze(-1) * v.float()).mT @ v.float()
        inverse = torch.linalg.inv(finer(capacity)).float()
        parts = [((v.float() @ inverse) * v.float()).sum(-1) for v in of_head.split(CHUNK)]
        found[heads] = torch.cat(parts, -1)
    return found


class CapKV(ScoringMethod):
    title = "CapKV"
    no_growth = "expects queries behind the context, and behind a feed they are others"
    comparable = "heads"
    weighs_values = True

    @dataclass(frozen=True)
    class Params:
        tau: Number
        n_future: Count
        n_sink: Tokens
        eps: Number
        rotary: Literal["model", "none"]

    @dataclass(frozen=True)
    class Plan:
        n_sink: int  # first tokens, always kept

    params: Params
    plan: Plan

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        refuse_unturned(params.rotary, model.shape, bool(model.n_rotary))

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return CapKV.Plan(params.n_sink if params.n_sink < budget.tokens else budget.tokens // 4)

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (QueryStatistics(plan.n_sink, params.rotary == "model"),)

    def scores(self, layer: int) -> Tensor:
        trace, params, n_sink = self.trace, self.params, self.plan.n_sink
        mean = trace.observed(QueryStatistics(n_sink, params.rotary == "model"), layer)[:, 0]
        anchor = mean @ rotation_ahead(trace, layer, params.n_future, params.rotary).T
        keys, values = trace.keys(layer)[0, :, n_sink:], trace.values(layer)[0, :, n_sink:]
        weights = relevance(anchor, keys, params.tau)
        found = weights * leverages(values, weights, params.eps)
        return found.unflatten(0, (len(keys), -1)).mean(1).unsqueeze(0)
