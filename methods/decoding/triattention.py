"""TriAttention (2026): what future queries will look at, told from keys alone by what a model's queries are like.

Before rotary embedding a head's queries lie around a centre, measured once per model. The logit of such a query on a
key is then a known sum of cosines of their distance. A key's score is its mean over distances 1, 2, 4 … into the
future, plus a term for how far queries stray from the centre. The prompt is never dropped.

Paper     arXiv:2604.04921, 2026; Mao, Weian; TriAttention: Efficient Long Reasoning with Trigonometric KV Compression
Symbols   paper mu, nu = the centre and the mean of absolute values, per frequency; omega = `speeds`; B, N = `target`,
          `interval`; `kc` of the page = `n_free`.
Per step  moved: nothing; resident: h_kv * (target + interval) tokens at most, and 4 bytes of position for each in every
          set that differs: h_kv sets of the model (`per_head`), one (`global`), or h_kv per layer. Of the model and not
          of the prompt: `constant_bytes` of the report.
Differs   - a rotated key is scored as it lies. The authors turn it back by its position first, which is the same.
          - phases are float64; the authors' float32 is off by 1e-3 far away.
          - statistics are means over 8,192 tokens of the embedded prose, unless `calibration_file` has others. The
            authors read up to 32,768 of any text, and leave out a query norm, which belongs there. Tasks that use the
            same prose see text that the statistics were measured on.
          - of equal scores the lower position stays; the authors add noise.
          - statistics may leave query heads out, as the authors' may: NaN in a file. Those have no say; a KV head of
            which none is known goes by the mean of all heads, of its layer where layers decide alone.
          - a budget that does not hold the prompt is refused. The authors' code then keeps the first slots, and none of
            what was generated. `protect_prompt: false` lets prompt tokens compete; R-KV's do.
          - ablations of the score are not offered.
Fails     where queries of a head have no centre, and on what was said just now: the newest tokens have no window.
Figures   drop while decoding: #C82E5A, up, --
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.engine.declared import Count
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import Observation
from kvbench.engine.shapes import Checkpoint
from kvbench.kernels.scratch import finer, finest
from kvbench.kernels.topk import top_stable_ref
from kvbench.methods.calibration.known import Calibrated, NeedsCalibration
from kvbench.methods.calibration.queries import as_complex, unpaired
from kvbench.methods.decoding.cutting import CuttingMethod
from kvbench.methods.decoding.schedule import Schedule

POSITION_BYTES = 4

LEAST_DEVIATION = 1e-6


def offsets_of(n: int) -> list[int]:
    """1, 2, 4 …, so many."""
    return [1 << i for i in range(n)]


def key_scores(statistics: Tensor, keys: Tensor, n_seen: int, n_offsets: int, aggregate: str) -> Tensor:
    """Scores of rotated keys (1, h_kv, n, d_h) for each query head once `n_seen` tokens are there: (h, n) float32.

    `statistics` (h, 4, f) are those of `methods/calibration/queries.py`; a head that has none, NaN, has NaN scores.
    """
    real, imaginary, size, speeds = finer(statistics).unbind(1)  # (h, f) each
    centre = torch.complex(real, imaginary)
    ahead = n_seen + torch.tensor(offsets_of(n_offsets), dtype=finest(keys.device), device=keys.device)
    # The mean over queries of a distance, turned to where they will stand: (offsets, h, f).
    turned = centre * torch.exp(1j * ahead.view(-1, 1, 1) * speeds)
    if aggregate == "mean":
        turned = turned.mean(0, keepdim=True)
    queries = torch.cat([turned.real, turned.imag], -1).float()  # (1 or offsets, h, d_h)
    rotated = keys[0].float()  # (h_kv, n, d_h)
    by_group = queries.unflatten(1, (len(rotated), -1))  # (offsets, h_kv, g, d_h)
    cosines = (by_group @ rotated.mT).amax(0)  # (h_kv, g, n); of a mean there is one
    strays = (size - centre.abs()).float().unflatten(0, (len(rotated), -1))  # (h_kv, g, f)
    return (cosines + strays @ as_complex(rotated).abs().mT).flatten(0, 1)


def standardised(scores: Tensor) -> Tensor:
    """Scores (…, n) with mean 0 and deviation 1 over the tokens."""
    centred = scores - scores.mean(-1, keepdim=True)
    return centred / centred.square().mean(-1, keepdim=True).sqrt().clamp(min=LEAST_DEVIATION)


def best_by_position(scores: Tensor, positions: Tensor, k: int) -> Tensor:
    """Slots of the `k` highest of (h_kv, n) by falling score, the lower position first among equals."""
    early = positions.argsort(-1)
    return early.gather(-1, top_stable_ref(scores.gather(-1, early), k))


def of_groups(scores: Tensor, h_kv: int, reduce: str) -> Tensor:
    """A token's score for each KV head of a layer by its query heads that have one, (h, n) -> (h_kv, n); else NaN."""
    grouped = scores.unflatten(0, (h_kv, -1))
    if reduce == "mean":
        return grouped.nanmean(1)
    best = grouped.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)
    return best.masked_fill(grouped.isnan().all(1), torch.nan)


def with_all(scores: Tensor, every: Tensor) -> Tensor:
    """Scores (h_kv, n); a KV head whose query heads have none has the mean of `every` (heads, n), or 0."""
    return scores.where(~scores.isnan(), every.nanmean(0)).nan_to_num(0.0)


def per_head(scores: Sequence[Tensor], h_kv: int) -> Tensor:
    """A token's score for each KV head in all layers, (h, n) per layer -> (h_kv, n)."""
    best = torch.stack([of_groups(layer, h_kv, "max") for layer in scores])
    return with_all(best.nanmean(0), torch.cat([*scores]))


def chosen_globally(scores: Sequence[Tensor], k: int) -> Tensor:
    """One set for the model, ascending: the best by any head, of the tokens that a head has among its own: (k,)."""
    every = torch.cat([*scores])  # (all heads, n)
    is_known = ~every.isnan()
    every = every.where(is_known, -torch.inf)
    marked = torch.zeros_like(is_known).scatter_(-1, top_stable_ref(every, k), True).logical_and_(is_known).any(0)
    return top_stable_ref(every.amax(0).masked_fill(~marked, -torch.inf), k).sort().values


def per_layer_head(scores: Tensor, h_kv: int, reduce: str) -> Tensor:
    """A token's score for each KV head of one layer, (h, n) -> (h_kv, n)."""
    return with_all(of_groups(scores, h_kv, reduce), scores)


class TriAttention(NeedsCalibration, CuttingMethod):
    calibration = "queries"
    title = "TriAttention"

    @dataclass(frozen=True)
    class Params:
        interval: Count
        mode: Literal["per_head", "global", "per_layer_head"]
        normalize: bool
        aggregate: Literal["mean", "max"]
        reduce: Literal["max", "mean"]
        n_offsets: Count
        trigger: Literal["slack", "gated"]
        count_prompt: bool
        protect_prompt: bool
        calibrate: Literal["missing", "never"]
        calibration_file: Path | None

        def __post_init__(self) -> None:
            if self.reduce == "mean" and self.mode != "per_layer_head":
                raise ConfigError(
                    f"method.reduce=mean with method.mode={self.mode} is not allowed; use "
                    "method.mode=per_layer_head with it"
                )

    params: Params

    @classmethod
    def check_model(cls, params: Params, model: Checkpoint) -> None:
        if model.n_rotary != model.shape.d_h and not model.is_drawn:
            raise unpaired(model.shape)
        super().check_model(params, model)

    @classmethod
    def beside_prompt(cls, params: Params) -> tuple[int, str, dict[str, Any]] | None:
        n = params.interval
        return (n, f"method.interval={n}", {"protect_prompt": False}) if params.protect_prompt else None

    @classmethod
    def schedule(cls, params: Params, target: int) -> Schedule:
        return Schedule(target, params.interval, params.trigger, at_prefill=False, count_prompt=params.count_prompt)

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        mode = [] if params.mode == "per_head" else [params.mode.replace("_", " ")]
        return [*mode, "prompt protected"] if params.protect_prompt else mode

    @classmethod
    def observations(cls, params: Params, plan: Schedule) -> tuple[Observation, ...]:
        return (statistics(params),)

    @property
    def n_fixed(self) -> int:
        """Tokens at the front that never leave."""
        return self.trace.s_prompt if self.params.protect_prompt else 0

    def scores(self, layer: int, keys: Tensor) -> Tensor:
        """Scores of the tokens after the fixed ones for each query head: (h, n) float32."""
        known, params = self.trace.observed(statistics(self.params), layer), self.params
        n_seen = self.store[layer].n_seen
        found = key_scores(known, keys[:, :, self.n_fixed :], n_seen, params.n_offsets, params.aggregate)
        return standardised(found) if params.normalize else found

    def order(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Slots that stay in a layer that is judged by itself."""
        return self.chosen([self.scores(layer, keys)], positions)

    def cuts(self, layers: Sequence[int]) -> Sequence[tuple[int, Tensor]]:
        if self.params.mode == "per_layer_head":
            return super().cuts(layers)
        trace = self.trace
        scores = trace.gathered(self.scores(layer, self.store[layer].keys()) for layer in layers)
        (positions,) = trace.gathered([self.store[layers[0]].positions()])
        slots = self.chosen(scores, positions)
        return [(layer, slots.to(trace.device_of(layer))) for layer in layers]

    def chosen(self, scores: Sequence[Tensor], positions: Tensor) -> Tensor:
        """Slots that stay, (1, h_kv, target), by the scores (h, n) of all layers, or of the one that decides alone."""
        h_kv, n_free = self.trace.shape.h_kv, self.plan.target - self.n_fixed
        if self.params.mode == "global":
            best = chosen_globally(scores, n_free).expand(h_kv, -1)
        elif self.params.mode == "per_head":
            best = best_by_position(per_head(scores, h_kv), positions[0, :, self.n_fixed :], n_free)
        else:
            of_heads = per_layer_head(scores[0], h_kv, self.params.reduce)
            best = best_by_position(of_heads, positions[0, :, self.n_fixed :], n_free)
        fixed = torch.arange(self.n_fixed, device=best.device).expand(h_kv, -1)
        return torch.cat([fixed, best + self.n_fixed], -1).unsqueeze(0)

    def token_bytes(self, layer: int) -> int:
        """Bytes of the positions: of all sets in the first layer, where layers share them."""
        if self.params.mode != "per_layer_head" and layer != self.trace.shape.attention_layers[0]:
            return 0
        return POSITION_BYTES * (1 if self.params.mode == "global" else self.trace.shape.h_kv)

    def protected(self, layer: int) -> list[int]:
        return [*range(self.n_fixed), *self.latest(0)]

    def report(self) -> dict[str, Any]:
        shape = self.trace.shape
        n_bytes = len(shape.attention_layers) * shape.h * 3 * (shape.d_h // 2) * 4
        return self.origin() | {"constant_bytes": n_bytes}


def statistics(params: TriAttention.Params) -> Calibrated:
    """The calibration that the method needs."""
    return Calibrated("queries", "statistics", params.calibration_file, params.calibrate == "missing")
