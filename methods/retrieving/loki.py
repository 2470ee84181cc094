"""Loki (Singhania et al., 2024): the first principal components of keys find the tokens that are then read in full.

Keys lie near a space of few dimensions. Its axes are fitted once per model, layer and KV head, on another text. Keys
and queries are turned to them, tokens are scored by the first components alone, and K and V of those with the largest
scores are read in full. Nothing is dropped.

Paper     arXiv:2406.02542, 2024; Singhania, Prajwal; Loki: Low-rank Keys for Efficient Sparse Attention
Symbols   paper d, D, P, k = `r`, `d_h`, components (rows by falling variance), `k`; B = budget.
Per step  read to find: r components of s_prompt keys, 2 * h_kv * r * s_prompt bytes, resident; fetched: K and V of k
          tokens per query head, 4 * d_h bytes each, a token of a KV head once; resident besides: generated tokens.
          Of the model and not of the prompt: 4 * h_kv * d_h**2 bytes of components, `constant_bytes` of the report.
Differs   - the authors keep turned keys in place of keys, which loses nothing, and read the first components out of
            them. Here keys stay as they are, labels lie next to them, and all of a chosen key is counted as moved.
          - generated tokens stay on the device and are not scored, so that the bytes read are the same at every step.
            `generated: compete` scores all tokens, also the current one, which may lose; it then exceeds `comm` by the
            generated tokens. `top_k` is the published count, a share of all tokens at each step.
          - the prefill is exact. The authors' evaluation masks it row by row.
          - components are fitted on the last 4,096 tokens of the embedded prose, read at once, unless
            `calibration_file` has others; the authors take WikiText-2 in sequences of as many. Tasks that use the same
            prose so far on see text that the components were fitted to.
          - `granularity: kv_head` has one set of tokens per group, by the sum of its logits; the authors have no such.
          - `top_r` as a share of the variance may take more components than `comm` pays for: results are marked.
Fails     where few components explain keys badly, as before rotary embedding is undone in the first layers, or where
          the prompt's keys lie elsewhere than those of the calibration's text.
Figures   retrieve single tokens: #058F4C, square, -.

Not here: the fit (`methods/calibration/pca.py`), the search (`methods/retrieving/labels.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.budget import ELEMENT_BYTES, Budget, BudgetRequest, show
from kvbench.engine.declared import Is, Whole
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import Observation
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.scratch import finer
from kvbench.methods.calibration.known import Calibrated, NeedsCalibration
from kvbench.methods.retrieving.labels import Labels, LabelSearch, stored
from kvbench.methods.rules import refuse_cap
from kvbench.methods.traits import Traits

PUBLISHED_SHARE = Fraction(1, 4)  # of a key's components, the paper's d_f
Components = Annotated[int, Ge(1), Is("a whole number of components from 1")]
Variance = Annotated[Fraction, Gt(0), Lt(1), Is("a share of the variance below 1")]
Tokens = Annotated[Fraction, Gt(0), Whole(), Is("a share of the tokens up to 1, or a whole number of them above 1")]


def n_components(shares: Tensor, share: Fraction) -> int:
    """Components whose shares (h_kv, d_h) of the variance add up to less than `share`, in the head with the most."""
    return int((finer(shares).cumsum(-1) < float(share)).sum(-1).max())


def turned(x: Tensor, components: Tensor) -> Tensor:
    """Keys (1, h_kv, n, d_h) in components (h_kv, r, d_h), a head at a time: (h_kv, n, r), rounded as the keys are."""
    heads = zip(x[0], components, strict=True)
    return torch.stack([(head.float() @ some.mT).to(x.dtype).float() for head, some in heads])


class Loki(NeedsCalibration, LabelSearch):
    calibration = "pca"
    title = "Loki"

    @dataclass(frozen=True)
    class Params:
        top_r: Components | Variance | Literal["auto"]
        top_k: Tokens | None
        rotary: Literal["post", "pre"]
        granularity: Literal["query_head", "kv_head"]
        generated: Literal["stay", "compete"]
        calibrate: Literal["missing", "never"]
        calibration_file: Path | None

        def __post_init__(self) -> None:
            if self.top_k is not None and self.generated != "compete":
                raise ConfigError(
                    f"method.top_k={show(self.top_k)} counts generated tokens too; use it with "
                    "method.generated=compete, or ratio and budget for the prompt's"
                )

    @dataclass(frozen=True)
    class Plan:
        k: int  # tokens of the prompt that are selected
        r: int | None  # components; None: as many as `share` of the variance takes in the layer
        share: Fraction | None

    params: Params
    plan: Plan

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        if params.granularity == "kv_head":
            refuse_cap(shape, "method.granularity=kv_head adds up logits of a group", "method.granularity=query_head")
        if request.ratio != 1 and request.comm is not None:
            components_for(params, request.comm, shape)

    @classmethod
    def index_comm(cls, params: Params, budget: Budget, shape: ModelShape) -> Fraction:
        return Fraction(params.top_r, shape.d_h) if isinstance(params.top_r, int) else PUBLISHED_SHARE

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if budget.attends_all:
            return Loki.Plan(budget.tokens, shape.d_h, None)
        return Loki.Plan(budget.tokens, *components_for(params, budget.comm, shape))

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = ["before rotary"] if params.rotary == "pre" else []
        notes += [] if params.granularity == "query_head" else ["KV head"]
        notes += [] if params.top_r == "auto" else [f"r={params.top_r}"]
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        n_components = shape.d_h if plan.r is None else plan.r  # as many as the variance takes: at most all
        index = shape.h_kv * n_components * ELEMENT_BYTES * budget.s_prompt
        return held(budget, shape, 0, index, plan.k * (shape.g if params.granularity == "query_head" else 1))

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (fitted(params),)

    def components(self, layer: int) -> Tensor:
        """The components that score, (h_kv, r, d_h)."""
        known, r = self.trace.observed(fitted(self.params), layer), self.plan.r
        if r is None:
            assert self.plan.share is not None
            r = n_components(known[:, -1], self.plan.share)
            if r < 1:
                raise ConfigError(
                    f"method.top_r={float(self.plan.share):g} of the variance is less than the first component "
                    f"explains in layer {layer}; use a larger share, or a number of components"
                )
        return known[:, :r]

    def shared_labels(self, layer: int) -> Labels:
        trace, params = self.trace, self.params
        what = (params.rotary, params.calibration_file, self.plan.r, self.plan.share)

        def make() -> Labels:
            components = self.components(layer)
            n_bits = 8 * ELEMENT_BYTES * trace.shape.h_kv * components.shape[1]
            keys = trace.keys(layer)
            return Labels(stored(turned(keys, components), keys.dtype), components.mT.contiguous(), n_bits)

        return trace.once(("Loki's labels", layer, *what), make)

    def label_keys(self, layer: int, keys: Tensor) -> Tensor:
        return turned(keys, self.index[layer].turn.mT)

    def alike(self, layer: int) -> str:
        return self.params.granularity

    def asked_of(self, layer: int, q: Tensor) -> Tensor:
        if self.params.granularity == "query_head":
            return q[:, :, 0]
        return q[:, :, 0].float().unflatten(1, (self.trace.shape.h_kv, -1)).sum(2)  # a sum of logits is that of queries

    @property
    def n_choosing(self) -> int:
        return self.trace.shape.h if self.params.granularity == "query_head" else self.trace.shape.h_kv

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        traits = super().traits_of(params)
        return replace(traits, extends=traits.extends and params.top_k is None)

    def n_chosen(self, n: int) -> int:
        top_k = self.params.top_k
        if top_k is None:
            return super().n_chosen(n)
        return max(1, int(top_k * n)) if top_k <= 1 else int(top_k)

    def report(self) -> dict[str, Any]:
        shape = self.trace.shape
        counts = [each.keys.shape[2] for _, each in sorted(self.index.items())]
        return self.origin() | {
            "n_components": counts[0] if len(set(counts)) == 1 else counts,
            "k": self.plan.k,
            "constant_bytes": len(self.index) * shape.h_kv * shape.d_h**2 * 4,
        }


def components_for(params: Loki.Params, comm: Fraction, shape: ModelShape) -> tuple[int | None, Fraction | None]:
    """How many components score a key, or which share of the variance they explain."""
    if isinstance(params.top_r, Fraction):
        return None, params.top_r
    paid = min(floor(comm * shape.d_h), shape.d_h)
    if isinstance(params.top_r, str):
        if paid < 1:
            raise ConfigError(
                f"comm={show(comm)} pays for none of the {shape.d_h} components of a key; "
                f"use comm=1/{shape.d_h} or more"
            )
        return paid, None
    if params.top_r > shape.d_h:
        raise ConfigError(f"method.top_r={params.top_r} is more than the {shape.d_h} components of {shape.name}")
    if params.top_r > paid:
        raise ConfigError(
            f"comm={show(comm)} pays for {paid} of the method.top_r={params.top_r} components of a key; use "
            f"comm={show(Fraction(params.top_r, shape.d_h))} or more, or method.top_r=auto"
        )
    return params.top_r, None


def fitted(params: Loki.Params) -> Calibrated:
    """The calibration that the method needs."""
    return Calibrated("pca", params.rotary, params.calibration_file, params.calibrate == "missing")
