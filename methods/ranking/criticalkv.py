"""CriticalKV (Feng et al., 2025): weigh what tokens get by what they add to the layer's output.

A token's second factor is the L1 norm of its value after the output projection. The better part of the budget goes to
the best tokens of any scorer, whatever their values; the rest by the product of both.

Paper     arXiv:2502.03805, 2025; Feng, Yuan; Identify Critical KV Cache in LLM Inference from an Output Perturbation
          Perspective
Symbols   paper alpha (of the budget), epsilon, W^O = `first_share`, `eps`, `OutputProjection`; kvpress' press,
          first_stage_ratio, alpha_safeguard = `scorer`, `first_share`, `alpha`.
Budget    its own tokens per KV head; with `alpha` below 1, or an allocator that divides heads, the mean over a layer:
          heads' parts follow from the scorer's numbers alone (the authors' CriticalAdaKV).
Per step  moved: nothing; resident: the budget's tokens and generated ones, 4 * d_h bytes each per KV head. The norms
          cost h * s * d_h * D products of a layer once, as much as its output projection of the prompt.
Differs   - tokens that the scorer protects stay whatever the norms say. `match_published` is kvpress' rule: they
            compete, at 1 above the layer's best.
          - the first stage's count includes protected tokens and is rounded down. kvpress rounds in floating point and
            takes at least 1.
          - sums over a window's queries are divided by their number, as `eps` is meant.
          - the norms know nothing of the sigmoid that some models put after attention.
          - a scorer that weighs by values' norms itself is refused; kvpress warns.
          - of latents all heads' values are weighed, and the mean over heads counts.
          The authors' code is kvpress' press: there is no other setting of the paper's.
Fails     where the scorer does: the norms move the lower half of its choice alone.
Figures   drop by keys and values: #A94991, square, --
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.engine.declared import Is, Share
from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.observe import ModelFact, Observation
from kvbench.engine.passes.trace import Known, Trace
from kvbench.engine.placement import Placement
from kvbench.engine.softmax import Softmax
from kvbench.kernels.scratch import at_once
from kvbench.kernels.topk import top_stable
from kvbench.methods.allocator import Allocator
from kvbench.methods.dropping.allocators import Counts, n_safe
from kvbench.methods.named import Scorer
from kvbench.methods.over import OverScorer, refuse_query_heads
from kvbench.methods.scorers import keep_top
from kvbench.methods.traits import Traits

BLOCK_BYTES = 4 << 20  # of projected values at a time


@dataclass(frozen=True)
class OutputProjection(ModelFact):
    """A layer's output projection: (D, h * d_v), the model's own weights."""

    def look_up(self, model: Model) -> Known:
        layers = model.shape.attention_layers
        return Known({layer: projection(model.attentions[layer], model, layer) for layer in layers})

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        raise AssertionError("a projection is as wide as values, which the trace has")

    def observe_layer(
        self, trace: Trace, layer: int, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None
    ) -> Tensor:
        """An identity where there is no model: heads' outputs stay as they are."""
        return torch.eye(trace.values(layer).shape[-1], device=q.device).repeat(1, q.shape[1])


def projection(attention: Any, model: Model, layer: int) -> Tensor:
    """The output projection of an attention module, which is the last of its parts that maps heads to the model."""
    h, width = model.shape.h, model.hf.get_input_embeddings().weight.shape[1]
    for part in reversed([*attention.children()]):
        weight = getattr(part, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            continue
        if type(part).__name__ == "Conv1D":
            weight = weight.mT
        if weight.shape[0] == width and weight.shape[1] % h == 0 and weight.is_floating_point():
            return weight
    raise ConfigError(
        f"layer {layer} of the model {model.shape.name!r} has no output projection that could be read, by which "
        "CriticalKV weighs values; use another method with it, such as snapkv"
    )


def output_norms(values: Tensor, projection: Tensor) -> Tensor:
    """L1 norms of values (1, heads, n, d_v) after a projection (h, d_v, D), the group's mean: (1, heads, n) float32.

    Some tokens of one query head at a time: all of them would be as many numbers as h prompts have.
    """
    _, heads, n, _ = values.shape
    h, _, width = projection.shape
    n_block = max(1, at_once(BLOCK_BYTES, values.device) // (4 * width))
    sums = torch.zeros(1, heads, n, device=values.device)
    for head in range(h):
        weights, at = projection[head].float(), head * heads // h
        for start in range(0, n, n_block):
            block = values[0, at, start : start + n_block].float() @ weights
            sums[0, at, start : start + n_block] += block.abs_().sum(-1)
    return sums / (h // heads)


class CriticalKV(OverScorer):
    title = "CriticalKV"
    no_growth = "ranks by its scorer's weights of the context, which a feed's tokens have none of"

    @dataclass(frozen=True)
    class Params:
        scorer: Scorer
        first_share: Share
        eps: Annotated[float, Ge(0), Is("added to scores, and 0 or more")]
        alpha: Share
        match_published: bool

        def __post_init__(self) -> None:
            refuse_query_heads(self.scorer, CriticalKV.title)
            if self.scorer.rules.traits_of(self.scorer.params).weighs_values:
                raise ConfigError(
                    f"{self.scorer.rules.title} weighs tokens by their values itself, and CriticalKV would do so "
                    "again; use method.scorer={name:expected_attention,value_norm:false}"
                )

    params: Params

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        division = None if params.alpha == 1 else Allocator("head_protect", params.alpha)
        return replace(super().traits_of(params), allocator=division)

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        return ["heads share"] * (params.alpha < 1) + super().notes(params)

    @classmethod
    def observations(cls, params: Params, plan: OverScorer.Plan) -> tuple[Observation, ...]:
        return *super().observations(params, plan), OutputProjection()

    def scores(self, layer: int) -> Tensor:
        return self.worths(layer)

    def norms(self, layer: int) -> Tensor:
        """Norms of all tokens' projected values, (1, h_kv, s)."""

        def make() -> Tensor:
            _, values = self.trace.of_heads(layer, self.trace.keys(layer), self.trace.values(layer))
            with torch.no_grad():  # the weights are the model's own
                weight = self.trace.observed(OutputProjection(), layer).clone()  # of one layer at a time
                found = output_norms(values, weight.unflatten(1, (self.trace.shape.h, -1)).permute(1, 2, 0))
            return found.mean(1, keepdim=True) if self.trace.shape.is_latent else found

        return self.trace.once(("output norms", layer), make)

    def product(self, layer: int) -> Tensor:
        """Scores that the second stage goes by, for the tokens between the ends: (1, h_kv, n)."""
        first, last = self.ends()
        return (self.shared_scores(layer) + self.params.eps) * self.norms(layer)[
            ..., first : self.trace.s_prompt - last
        ]

    def n_first(self, n: int) -> int:
        """How many of a head's `n` tokens, besides protected ones, its scores alone choose."""
        n_protected, allocator = sum(self.ends()), self.variant.allocator
        if self.params.match_published and allocator.of_heads == "uniform":
            of_kept = (1 - float(1 - self.budget.ratio)) * self.trace.s_prompt
            return min(n, max(1, int(of_kept * float(self.params.first_share)))) if self.params.first_share else 0
        count = max(0, int(self.params.first_share * (n + n_protected)) - n_protected)
        if allocator.of_heads == "head_protect":  # its safe tokens stay
            count = max(count, min(n, n_safe(self.n_free(), n_protected, allocator.alpha)))
        return count

    def keep_best(self, layer: int, n: Counts) -> Placement:
        counts = self.of_heads(layer, n) if isinstance(n, int) else n
        product, start = self.product(layer), self.ends()[0]
        x = self.shared_scores(layer).expand_as(product)
        if isinstance(counts, int) or len(set(counts)) == 1:
            counts = counts if isinstance(counts, int) else counts[0]
            best = keep_top(product.scatter(-1, top_stable(x, self.n_first(counts)), torch.inf), counts) + start
            return self.place(layer, best.expand(-1, self.trace.shape.h_kv, -1).contiguous())
        heads = zip(x[0], product[0], counts, strict=True)
        chosen = [(z.scatter(-1, top_stable(of, self.n_first(k)), torch.inf), k) for of, z, k in heads]
        return self.place_ragged(layer, [top_stable(z, k) for z, k in chosen])
