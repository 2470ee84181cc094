"""CUR (CurDKV; Sengupta et al., 2025): keep tokens whose keys and values are long compared with their neighbours'.

A row's squared length stands for its leverage, its share in what the matrix of all keys, or values, spans. Each is
taken as a share of its window of neighbours, and those of key and value are multiplied. No query is asked.

Paper     arXiv:2509.15038, 2025; Sengupta, Ayan; Value-Guided KV Compression for LLMs via Approximated CUR
          Decomposition
Symbols   paper K, V, leverage l = keys, values, `energy`; kvpress' leverage_type, use_local_approximation and
          local_window_size, num_sinks, use_random_leverage = `leverage`, `window`, `n_sink`, `sketch`.
Per step  moved: nothing; resident: the budget's tokens and generated ones, 4 * d_h bytes each.
Differs   - squared lengths are leverage only where columns are orthonormal, which the paper calls approximated. No
            code of its authors was found; this is kvpress', whose settings are the defaults.
          - sinks are kept outside of the scores. kvpress gives them 1.0, which without windows another token may reach.
          - a window of zero keys has shares of 0; kvpress divides 0 by 0.
          - a sketch is drawn from `seed`, one for all heads and layers, keys and values.
Fails     - by accident it keeps the prompt's end: where one token is left for the last window its share is 1. `rest:
            scaled` weighs that window by its length.
          - where what is asked for is not what is long; Knorm keeps the shortest keys, on as good grounds.
Figures   drop by keys and values: #9078A8, up, -.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Count, Index, Tokens, Window
from kvbench.engine.shapes import ModelShape
from kvbench.methods.scoring import ScoringMethod


def energy(x: Tensor, sketch: Tensor | None = None) -> Tensor:
    """Squared lengths of (1, h_kv, s, d_h), or of projections by a sketch (d_h, r): (1, h_kv, s) float32."""
    x = x.float()
    return (x if sketch is None else x @ sketch).square().sum(-1)


def shares(x: Tensor) -> Tensor:
    """Numbers (..., n) as shares of their sum; all 0 where that is 0."""
    total = x.sum(-1, keepdim=True)
    return x / total.where(total != 0, 1.0)


def local_shares(x: Tensor, window: int, is_scaled: bool) -> Tensor:
    """Shares of numbers (..., s) in their window's sum; with `is_scaled` a short last window weighs less."""
    s = x.shape[-1]
    n_missing = -s % window
    found = shares(torch.nn.functional.pad(x, (0, n_missing)).unflatten(-1, (-1, window))).flatten(-2)[..., :s]
    if is_scaled and n_missing:
        found[..., s - (window - n_missing) :] *= (window - n_missing) / window
    return found


def leverages(k: Tensor, v: Tensor, params: "CUR.Params") -> Tensor:
    """Scores of tokens (1, h_kv, s, d_h); a head's add up to 1: (1, h_kv, s) float32."""
    sketch = None if params.sketch is None else drawn_sketch(k.shape[-1], params.sketch, params.seed).to(k.device)
    found = [energy(x, sketch) for x in (k, v)]
    if params.window is not None:
        found = [local_shares(x, params.window, params.rest == "scaled") for x in found]
    of_keys, of_values = found
    joined = {
        "kv_product": of_keys * of_values,
        "kv_avg": (of_keys + of_values) / 2,
        "key": of_keys,
        "value": of_values,
    }
    return shares(joined[params.leverage])


def drawn_sketch(d_h: int, r: int, seed: int) -> Tensor:
    """Normal numbers (d_h, r) under which squared lengths stay as they are in the mean."""
    return torch.randn(d_h, r, generator=torch.Generator().manual_seed(seed)) / math.sqrt(r)


class CUR(ScoringMethod):
    title = "CUR"
    no_growth = "decomposes the context's keys and values at once"
    comparable = "heads"  # scores of a head add up to 1

    @dataclass(frozen=True)
    class Params:
        leverage: Literal["kv_product", "kv_avg", "key", "value"]
        window: Window | None
        rest: Literal["whole", "scaled"]
        n_sink: Tokens
        sketch: Count | None
        seed: Index

    @dataclass(frozen=True)
    class Plan:
        n_sink: int  # first tokens, always kept

    params: Params
    plan: Plan

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        return CUR.Plan(params.n_sink if params.n_sink < budget.tokens else budget.tokens // 4)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = [] if params.leverage == "kv_product" else [params.leverage]
        notes += ["global"] * (params.window is None) + ["sketched"] * (params.sketch is not None)
        name = super().label(params, request)
        return name.replace(cls.title, f"{cls.title} ({', '.join(notes)})") if notes else name

    def scores(self, layer: int) -> Tensor:
        return self.leverages(layer)[..., self.plan.n_sink :]

    def leverages(self, layer: int) -> Tensor:
        """Leverages of all tokens, sinks too, head by head, since each is made float32: (1, h_kv, s)."""
        of_heads = self.trace.of_heads(layer, self.trace.keys(layer), self.trace.values(layer))
        heads = zip(*(x.split(1, 1) for x in of_heads), strict=True)
        found = torch.cat([leverages(k, v, self.params) for k, v in heads], 1)
        return found.mean(1, keepdim=True) if self.trace.shape.is_latent else found
