"""Loki (Singhania et al., 2024): the first principal components of keys find the tokens that are then read in full.

Keys lie near a space of few dimensions. Its axes are fitted once per model, layer and KV head, on another text. Keys
and queries are turned to them, tokens are scored by the first components alone, and K and V of those with the largest
scores are read in full. Nothing is dropped.

Symbols   paper d, D, P, k = `r`, `d_h`, components (rows by falling variance), `k`; B = budget.
Per step  read to find: r components of s_prompt keys, 2 * h_kv * r * s_prompt bytes, resident; fetched: K and V of k
          tokens per query head, 4 * d_h bytes each, a token of a KV head once; resident besides: generated tokens.
          Of the model and not of the prompt: 4 * h_kv * d_h**2 bytes of components, `constant_bytes` of the report.
Differs   - the authors keep turned keys in place of keys, which loses nothing, and read the first components out of
            them. Here keys stay as they are, labels lie beside them, and all of a chosen key is counted as moved.
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

Not here: the fit (`methods/calibration/pca.py`), the search (`methods/retrieving/labels.py`).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from engine.budget import ELEMENT_BYTES
from engine.errors import ConfigError
from engine.observe import Observation
from methods.calibration.known import Calibrated
from methods.retrieving.labels import Labels, LabelSearch, stored
from methods.rules.retrieving.loki import LokiRules


def n_components(shares: Tensor, share: Fraction) -> int:
    """Components whose shares (h_kv, d_h) of the variance add up to less than `share`, in the head with the most."""
    return int((shares.double().cumsum(-1) < float(share)).sum(-1).max())


def turned(x: Tensor, components: Tensor) -> Tensor:
    """Keys (1, h_kv, n, d_h) in components (h_kv, r, d_h), a head at a time: (h_kv, n, r), rounded as the keys are."""
    heads = zip(x[0], components, strict=True)
    return torch.stack([(head.float() @ some.mT).to(x.dtype).float() for head, some in heads])


class Loki(LokiRules, LabelSearch):
    params: LokiRules.Params
    plan: LokiRules.Plan

    @classmethod
    def observations(cls, params: LokiRules.Params, plan: LokiRules.Plan) -> tuple[Observation, ...]:
        return (fitted(params),)

    def components(self, layer: int) -> Tensor:
        """Those that score, (h_kv, r, d_h)."""
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
        return turned(keys, self.labels[layer].turn.mT)

    def kind(self, layer: int) -> Any:
        return super().kind(layer), self.params.granularity

    def asked(self, layer: int, q: Tensor) -> Tensor:
        if self.params.granularity == "query_head":
            return q[:, :, 0]
        return q[:, :, 0].float().unflatten(1, (self.trace.shape.h_kv, -1)).sum(2)  # a sum of logits is that of queries

    def n_chosen(self, n: int) -> int:
        top_k = self.params.top_k
        if top_k is None:
            return super().n_chosen(n)
        return max(1, int(top_k * n)) if top_k <= 1 else int(top_k)

    def report(self) -> dict[str, Any]:
        if self.variant.is_full:
            return {}
        shape = self.trace.shape
        counts = [each.keys.shape[2] for _, each in sorted(self.labels.items())]
        return self.origin() | {
            "n_components": counts[0] if len(set(counts)) == 1 else counts,
            "k": self.plan.k,
            "constant_bytes": len(shape.attention_layers) * shape.h_kv * shape.d_h**2 * 4,
        }


def fitted(params: LokiRules.Params) -> Calibrated:
    """What the model has to be calibrated for."""
    return Calibrated("pca", params.rotary, params.calibration_file, params.calibrate == "missing")
