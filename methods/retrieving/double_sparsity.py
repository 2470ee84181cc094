"""Double Sparsity (Yang et al., 2024): a few channels of the keys find the tokens that are then read in full.

Channels that matter are the same for all texts. They are chosen once per model, layer and head; of every key the values
in these few, its label, are kept apart. At a step query and labels give approximate logits, and K and V of the tokens
with the largest are read in full. As SparQ, with channels that do not depend on the query and so can lie together.

Paper     arXiv:2408.07092, 2024; Yang, Shuo; Post-Training Sparse Attention with Double Sparsity
Symbols   paper r, N or `heavy_const`, b = labels of a head, `k`, `label_bits`; B = budget; `group_factor` = d_h / r.
Per step  read to find: labels of s_prompt keys, 2 bytes each of those that a group's heads read between them, resident;
          with b < 16 of each head r * b / 8 + 4 bytes; fetched: K and V of k tokens per query head, 4 * d_h bytes each,
          a token of a KV head once; resident besides: generated tokens.
Differs   - `comm` bounds what a KV head reads, and query heads have channels of their own: each takes as many as keep
            the union of its group within `comm`, at least one. The paper counts a head's labels alone;
            `comm_mode: native` has them, and results are marked where a group reads more.
          - `granularity: auto` selects per query head where `comm` is 1/32 or more and pays for a channel of each, else
            per group: channels by the sum of its heads' scores, tokens by the sum of their logits.
          - generated tokens stay on the device and are not scored, so that the bytes read are the same at every step.
            `generated: compete` scores all tokens, also the current one, which may lose; it then exceeds `comm` by the
            generated tokens. `heavy` is the published count, the same at every step.
          - scores of channels are from the last 2,048 tokens of the embedded prose, unless `calibration_file` has
            others; the authors take 256 samples of the Pile. `calibration: as_released` reproduces two defects of their
            score `qk`. With `channel: k` their evaluation leaves all heads but the first h_kv dense, which is refused.
          - the prefill is exact. The authors' evaluation masks it row by row.
          - the first `full_layers` layers stay whole, as published. A budget is that of the other layers;
            `method_report` has the share over all of them as `overall_ratio`.
Fails     where few channels carry too little of q·k. Channels are chosen before rotary embedding and read after it,
          which mixes pairs of them.
Figures   retrieve single tokens: #037C41, pillar, -.

Not here: scores of channels (`methods/calibration/channels.py`), the search (`methods/retrieving/labels.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvbench.engine.books.footprint import Footprint, held
from kvbench.engine.budget import Budget, BudgetRequest, show
from kvbench.engine.declared import Count, Index
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import Observation
from kvbench.engine.shapes import ModelShape
from kvbench.methods.base import overall_ratio
from kvbench.methods.calibration.known import Calibrated, NeedsCalibration
from kvbench.methods.retrieving.labels import Labels, LabelSearch, stored
from kvbench.methods.rules import refuse_cap
from kvbench.methods.traits import Traits

WHOLE_BITS = 16  # of a label that is not quantised
SCALE_BITS = 32  # of a quantised vector of labels: its lowest value and its scale
LEAST_OF_HEADS = Fraction(1, 32)  # of `comm`, below which a group shares its labels unless it is told not to


def order_of(scores: Tensor) -> Tensor:
    """Channels by falling score (heads, d_h); of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def scores_of_heads(scores: Tensor, h_kv: int, per_head: bool) -> Tensor:
    """Scores (h or h_kv, d_h) for who selects: query heads, or the sum over each group (h_kv, d_h)."""
    return scores if per_head else scores.unflatten(0, (h_kv, -1)).sum(1)


def union_within(order: Tensor, h_kv: int, most: int) -> Tensor:
    """Which channels each head of order (h, d_h) takes, so that its group's are at most `most`: (h, d_h) bool.

    All heads of a group take equally many, and as many as possible.
    """
    h, d_h = order.shape
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(d_h, device=order.device).expand(h, -1))
    first = rank.unflatten(0, (h_kv, -1)).amin(1)  # with how many per head a channel is in the group's union
    n_union = (first.unsqueeze(-1) < torch.arange(1, d_h + 1, device=order.device)).sum(1)  # (h_kv, r)
    r = (n_union <= most).sum(-1).repeat_interleave(h // h_kv)
    return rank < r.unsqueeze(-1)


def quantised(labels: Tensor, bits: int) -> Tensor:
    """Vectors in `bits` bits between its lowest and its highest value, and back again."""
    if bits == WHOLE_BITS:
        return labels
    low, high = labels.amin(-1, keepdim=True), labels.amax(-1, keepdim=True)
    width = high - low
    scale = ((1 << bits) - 1) / torch.where(width > 0, width, torch.ones_like(width))
    return ((labels - low) * scale).round().clamp(0, (1 << bits) - 1) / scale + low


def taken(keys: Tensor, channels: Tensor, bits: int) -> Tensor:
    """Labels of keys (1, h_kv, n, d_h) by channels (stored, c), -1 for none: (stored, n, c) float32."""
    many = keys[0].float().repeat_interleave(len(channels) // keys.shape[1], 0)
    where = channels.clamp(min=0).unsqueeze(1).expand(-1, many.shape[1], -1)
    return quantised(many.gather(2, where), bits)


class DoubleSparsity(NeedsCalibration, LabelSearch):
    calibration = "channels"
    title = "Double Sparsity"
    skips = True

    @dataclass(frozen=True)
    class Params:
        comm_mode: Literal["native", "matched"]
        group_factor: Count
        label_bits: Annotated[int, Ge(1), Le(WHOLE_BITS)]
        channel: Literal["q", "k", "qk"]
        calibration: Literal["paper", "as_released"]
        granularity: Literal["auto", "query_head", "kv_head"]
        generated: Literal["stay", "compete"]
        heavy: Count | None
        full_layers: Index
        calibrate: Literal["missing", "never"]
        calibration_file: Path | None

        def __post_init__(self) -> None:
            if self.heavy is not None and self.generated != "compete":
                raise ConfigError(
                    f"method.heavy={self.heavy} counts generated tokens too; use it with method.generated=compete, or "
                    "budget=N for a number of the prompt's"
                )
            if self.calibration == "as_released" and self.channel != "qk":
                raise ConfigError(
                    f"method.calibration=as_released is the authors' score of method.channel=qk; method.channel="
                    f"{self.channel} has only calibration=paper"
                )

    @dataclass(frozen=True)
    class Plan:
        k: int  # tokens of the prompt that are selected
        n_labels: int  # of a query head or a group; at most, where the heads of a group share what they read
        per_head: bool  # every query head selects for itself, by channels of its own
        n_read: int | None  # most channels that the heads of a group may read between them; None: no limit

    params: Params
    plan: Plan
    channels: dict[int, Tensor]  # per layer, (stored, c), -1 where a group has fewer
    masks: dict[int, Tensor | None]  # per layer, which channels a query head asks for (h, d_h) float32; None: all there

    @classmethod
    def check(cls, params: Params, request: BudgetRequest, shape: ModelShape) -> None:
        super().check(params, request, shape)
        if request.ratio != 1 and not heads_choose(params, request.comm, shape):
            refuse_cap(shape, "method.granularity=kv_head adds up logits of a group", "method.granularity=query_head")
        if params.channel == "k" and params.granularity == "query_head" and shape.g > 1:
            raise ConfigError(
                f"method.channel=k orders channels for the {shape.h_kv} KV heads of {shape.name}, not for its "
                f"{shape.h} query heads; use method.granularity=kv_head or method.channel=q"
            )
        if request.ratio != 1 and request.comm is not None:
            labels_for(params, request.comm, shape)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if budget.attends_all:
            return DoubleSparsity.Plan(budget.tokens, shape.d_h, True, None)
        if budget.finds_freely:
            n = max(1, floor(budget.comm * shape.d_h))
            return DoubleSparsity.Plan(budget.tokens, n, heads_choose(params, None, shape), None)
        return DoubleSparsity.Plan(budget.tokens, *labels_for(params, budget.comm, shape))

    @classmethod
    def index_comm(cls, params: Params, budget: Budget, shape: ModelShape) -> Fraction:
        return Fraction(max(1, shape.d_h // params.group_factor), shape.d_h)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = ["native"] if params.comm_mode == "native" else []
        notes += [] if params.label_bits == WHOLE_BITS else [f"{params.label_bits} bits"]
        notes += [] if params.channel == "q" else [params.channel]
        return f"{cls.title} ({', '.join(notes)})" if notes else cls.title

    @classmethod
    def footprint(cls, params: Params, plan: Plan, budget: Budget, shape: ModelShape) -> Footprint:
        overhead = 0 if params.label_bits == WHOLE_BITS else SCALE_BITS
        if plan.per_head and params.label_bits == WHOLE_BITS:  # a group stores each channel once
            most = min(shape.g * plan.n_labels, shape.d_h) if plan.n_read is None else min(plan.n_read, shape.d_h)
            bits = shape.h_kv * most * WHOLE_BITS
        else:
            bits = (shape.h if plan.per_head else shape.h_kv) * (plan.n_labels * params.label_bits + overhead)
        fetched = plan.k * (shape.g if plan.per_head else 1)
        return held(budget, shape, 0, -(-bits * budget.s_prompt // 8), fetched, len(cls.whole_layers(params, shape)))

    def setup(self) -> None:
        super().setup()
        self.channels, self.masks = {}, {}

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (scored(params),)

    @property
    def is_whole(self) -> bool:
        """Labels are not quantised, so that heads of a group can share them."""
        return self.params.label_bits == WHOLE_BITS

    # While the prompt is read.

    def shared_labels(self, layer: int) -> Labels:
        trace, params, plan = self.trace, self.params, self.plan
        what = (scored(params), params.label_bits, plan.n_labels, plan.per_head, plan.n_read)
        found = trace.once(("Double Sparsity's labels", layer, *what), lambda: self.make_labels(layer))
        labels, self.channels[layer], self.masks[layer] = found
        return labels

    def make_labels(self, layer: int) -> tuple[Labels, Tensor, Tensor | None]:
        shape, plan, bits = self.trace.shape, self.plan, self.params.label_bits
        scores = scores_of_heads(self.trace.observed(scored(self.params), layer), shape.h_kv, plan.per_head)
        order, mask = order_of(scores), None
        if plan.per_head and self.is_whole:
            if plan.n_read is None:
                rank = torch.empty_like(order).scatter_(
                    1, order, torch.arange(shape.d_h, device=order.device).expand_as(order)
                )
                asks = rank < plan.n_labels
            else:
                asks = union_within(order, shape.h_kv, plan.n_read)
            channels, mask = union_of(asks, shape.h_kv), asks.float()
            n_bits = WHOLE_BITS * int((channels >= 0).sum())
        else:
            channels = order[:, : plan.n_labels]
            overhead = 0 if self.is_whole else SCALE_BITS
            n_bits = len(channels) * (plan.n_labels * bits + overhead)
        keys = self.trace.keys(layer)
        labels = stored(taken(keys, channels, bits), keys.dtype if self.is_whole else torch.float32)
        return Labels(labels, self.turn(channels), n_bits), channels, mask

    def turn(self, channels: Tensor) -> Tensor:
        """A matrix that picks the labels' channels out of a query; quantised ones are picked before."""
        n_stored, c = channels.shape
        if not self.is_whole:
            return torch.eye(c, device=channels.device).expand(n_stored, -1, -1).contiguous()
        picks = torch.zeros(n_stored, self.trace.shape.d_h, c, device=channels.device)
        return picks.scatter_(1, channels.clamp(min=0).unsqueeze(1), (channels >= 0).float().unsqueeze(1))

    # A decode step.

    def label_keys(self, layer: int, keys: Tensor) -> Tensor:
        return taken(keys, self.channels[layer], self.params.label_bits)

    def asked_of(self, layer: int, q: Tensor) -> Tensor:
        queries, mask, h_kv = q[:, :, 0], self.masks[layer], self.trace.shape.h_kv
        if mask is not None:
            return queries * mask
        queries = queries.float()
        if not self.is_whole:
            channels = self.channels[layer].repeat_interleave(queries.shape[1] // len(self.channels[layer]), 0)
            queries = quantised(queries.gather(2, channels.expand(len(q), -1, -1)), self.params.label_bits)
        return queries if self.plan.per_head else queries.unflatten(1, (h_kv, -1)).sum(2)

    @property
    def n_choosing(self) -> int:
        return self.trace.shape.h if self.plan.per_head else self.trace.shape.h_kv

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        traits = super().traits_of(params)
        return replace(traits, extends=traits.extends and params.heavy is None)

    def n_chosen(self, n: int) -> int:
        return super().n_chosen(n) if self.params.heavy is None else self.params.heavy

    def report(self) -> dict[str, Any]:
        shape, share = self.trace.shape, self.plan.k / self.trace.s_prompt
        layers = [at for at in shape.attention_layers if at in self.channels]
        return self.origin() | {
            "comm_mode": self.params.comm_mode,
            "granularity": "query_head" if self.plan.per_head else "kv_head",
            "n_labels": self.labels_of_heads(layers),
            "achieved_ratio": share,
            "overall_ratio": overall_ratio(self, share),
        }

    def labels_of_heads(self, layers: Sequence[int]) -> float:
        """Channels that a head asks for, mean over heads and layers."""
        counts = [self.masks[at] for at in layers]
        found = [float(self.plan.n_labels) if mask is None else float(mask.sum(-1).mean()) for mask in counts]
        return sum(found) / max(1, len(found))


def labels_for(params: DoubleSparsity.Params, comm: Fraction, shape: ModelShape) -> tuple[int, bool, int | None]:
    """Labels of a head, whether query heads have their own, and how many channels a group may read."""
    if params.comm_mode == "native":
        return native_labels(params, comm, shape)
    heads = params.granularity
    if heads == "auto":
        fits = params.channel != "k" and comm >= LEAST_OF_HEADS and comm >= least_comm(params, shape, 1, True)
        heads = "query_head" if fits or shape.g == 1 else "kv_head"
    per_head = heads == "query_head"
    least = least_comm(params, shape, 1, per_head)
    if comm < least:
        whose = f"each of the {shape.g} query heads of a group" if per_head and shape.g > 1 else "a KV head"
        other = ", or method.granularity=kv_head" if per_head and shape.g > 1 else ""
        of_bits = "" if params.label_bits == WHOLE_BITS else f" of {params.label_bits} bits with its scale"
        raise ConfigError(
            f"comm={show(comm)} pays for no label{of_bits} for {whose} of {shape.d_h} dimensions; "
            f"use comm={show(least)} or more{other}"
        )
    bits = comm * 16 * shape.d_h
    if params.label_bits == WHOLE_BITS:
        n = min(floor(bits / WHOLE_BITS), shape.d_h)
        return n, per_head, n if per_head else None
    n_vectors = shape.g if per_head else 1  # of a KV head: quantised vectors are not shared
    return min(floor((bits / n_vectors - SCALE_BITS) / params.label_bits), shape.d_h), per_head, None


def native_labels(params: DoubleSparsity.Params, comm: Fraction, shape: ModelShape) -> tuple[int, bool, int | None]:
    """The published number of labels, which `comm` has to pay for once; what a group reads beyond it is counted."""
    if shape.d_h % params.group_factor:
        raise ConfigError(
            f"method.group_factor={params.group_factor} does not divide the {shape.d_h} dimensions of {shape.name}; "
            "use a power of 2"
        )
    n = shape.d_h // params.group_factor
    least = least_comm(params, shape, n, False)
    if comm < least:
        raise ConfigError(
            f"comm={show(comm)} does not pay for the {n} labels of method.group_factor={params.group_factor}; use "
            f"comm={show(least)} or more, or method.comm_mode=matched"
        )
    return n, heads_choose(params, None, shape), None


def heads_choose(params: DoubleSparsity.Params, comm: Fraction | None, shape: ModelShape) -> bool:
    """Whether query heads have labels of their own: as published where `comm` is off, else by what it pays for."""
    if comm is not None:
        return labels_for(params, comm, shape)[1]
    return params.granularity == "query_head" or (params.granularity == "auto" and params.channel != "k")


def least_comm(params: DoubleSparsity.Params, shape: ModelShape, n: int, per_head: bool) -> Fraction:
    """The smallest share of the keys that `n` labels cost, where query heads may all read channels of their own."""
    overhead = 0 if params.label_bits == WHOLE_BITS else SCALE_BITS
    return Fraction(n * params.label_bits + overhead, 16 * shape.d_h) * (shape.g if per_head else 1)


def union_of(asks: Tensor, h_kv: int) -> Tensor:
    """Channels (h_kv, c), ascending, that heads of a group ask for by asks (h, d_h); -1 where it asks for fewer."""
    wanted = asks.unflatten(0, (h_kv, -1)).any(1)  # (h_kv, d_h)
    n = wanted.sum(-1, keepdim=True)
    ordered = wanted.int().sort(dim=-1, descending=True, stable=True).indices[:, : int(n.max())]
    return ordered.where(torch.arange(ordered.shape[1], device=n.device) < n, -1)


def scored(params: DoubleSparsity.Params) -> Calibrated:
    """The calibration that the method needs."""
    array = params.channel + ("_as_released" if params.calibration == "as_released" else "")
    return Calibrated("channels", array, params.calibration_file, params.calibrate == "missing")
