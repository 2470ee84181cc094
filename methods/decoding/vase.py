"""VaSE (Chang et al., 2026): while reasoning, keep tokens whose values are large, and draw the rest by attention.

At each cut a part of the budget goes to the tokens with the widest values, since dropping those hurts most. The others
are drawn without replacement, with chances proportional to what the last queries give them, and the last tokens stay.

Paper     arXiv:2606.03928, 2026; Chang, Ting-Yun; Value-Aware Stochastic KV Cache Eviction for Reasoning Models
Symbols   B, R, K, m = `target`, `window`, `target` - `window`, `large` of the target; the authors' code BUDGET, W = B,
          R; its modes range_rand, range_attn = `rest: drawn`, `best`; cur_resample_gauss = `score: dkv`.
Per step  moved: nothing; resident: h_kv * (target + interval) tokens at most, and the last `window` queries, 2 * window
          * h * d_h bytes: with window 64 and four query heads to a KV head as much as 128 tokens of each. A cut reads
          keys and values once and takes 4 * g * window * (target + interval) bytes, one KV head after the other.
Differs   - draws are a race over numbers that follow from the seed, the prompt, the answer's number among its draws,
            layer, KV head, cut and position: the authors' torch.multinomial runs the same race on numbers without a
            seed. What is computed is float32, where theirs is bfloat16 and has ties.
          - `interval` is a number of its own; the authors' is the window, and cuts fall on numbers of entries that it
            divides (`vase_paper`, where a cut never comes before the first step). A budget may be any number.
          - `order: code` leaves large values first, then draws as they came, so that pooling smooths over neighbours
            that are none in the text. `order: position` sorts, as Random Attention's port of it does.
          - `dkv_fixed` projects by one matrix for each layer of an answer, `dkv` as the authors do by a new one at each
            cut. Neither has large values, draws or queries.
Fails     on budgets so small that a few draws decide an answer. The first four tokens stay whatever they hold, as their
          values are small, and much attention goes to them.
Figures   drop by place or chance: #9A3EEA, kite, -
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from kvbench.engine.declared import Index, Kernel, Window
from kvbench.engine.softmax import Softmax
from kvbench.methods.decoding.cutting import DrawingMethod, best_first, in_place, with_last
from kvbench.methods.decoding.schedule import WhenToCut
from kvbench.methods.scorers import pool_scores
from kvbench.methods.traits import Traits

N_SINK = 4  # first slots, which count as the largest values
RANK = 20  # columns of the matrix that `dkv` projects by
OF_MATRIX = -2  # stands for a KV head where the matrix is drawn


def magnitudes(values: Tensor, how: str) -> Tensor:
    """How large values (1, h_kv, n, d_v) are, (1, h_kv, n) float32; the sinks are infinitely large."""
    x = values.float()
    if how == "range":
        found = x.amax(-1) - x.amin(-1)
    else:
        found = x.var(-1) if how == "var" else x.norm(dim=-1)
    found[..., :N_SINK] = torch.inf
    return found


def chances(q: Tensor, keys: Tensor, softmax: Softmax, kernel: int, temperature: float) -> Tensor:
    """Weights of queries (1, h, w, d_h), pooled over neighbouring keys (1, h_kv, n, d_h): (1, h_kv, n) float32.

    They are means over the queries, and after pooling over the query heads of a group.
    """
    found, g = [], q.shape[1] // keys.shape[1]
    for i, (queries, head) in enumerate(zip(q[0].unflatten(0, (-1, g)), keys[0], strict=True)):
        logits = softmax.bent(queries.float() @ head.float().mT) / temperature  # (g, w, n)
        weights = softmax.of(slice(i * g, (i + 1) * g)).weights(logits, (-1, 1)).mean(1)
        found.append(pool_scores(weights, kernel, "avg").mean(0))
    return torch.stack(found).unsqueeze(0)


def raced(weights: Tensor, u: Tensor) -> Tensor:
    """The higher, the earlier a token is drawn, without replacement and with chances by weight; u from 0 to 1."""
    return weights / -u.log()


def large_and_best(large: Tensor, others: Tensor, n: int) -> Tensor:
    """Slots of `large` (1, h_kv, m), and after them the best of `others` (1, h_kv, slots) besides: (1, h_kv, n)."""
    return torch.cat([large, best_first(others.scatter(-1, large, -1), n - large.shape[-1])], -1)


def projected(keys: Tensor, values: Tensor, g: Tensor) -> Tensor:
    """Shares of keys and values (1, h_kv, n, d) in what a matrix g (d, r) makes of both, of sinks 1: (1, h_kv, n)."""
    sizes = [(x.float() @ (g * g.shape[1] ** -0.5)).square().sum(-1) for x in (keys, values)]
    found = sizes[0] * sizes[1]
    found /= found.sum(-1, keepdim=True)
    found[..., :N_SINK] = 1
    return found


class VaSE(DrawingMethod):
    title = "VaSE"
    no_latents = "weighs values apart from keys: here a value is part of its key"

    @dataclass(frozen=True)
    class Params(WhenToCut):
        schedule: Literal["position", "steps", "slack"]  # pyright: ignore[reportIncompatibleVariableOverride]
        window: Window
        large: Annotated[Fraction, Gt(0), Lt(1)]
        magnitude: Literal["range", "var", "l2"]
        kernel: Kernel
        temperature: Annotated[float, Gt(0)]
        rest: Literal["drawn", "best"]
        score: Literal["attention", "dkv", "dkv_fixed"]
        order: Literal["code", "position"]
        seed: Index

    params: Params

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        no_widths = "projects both by one matrix; method.score=attention does not" * (params.score != "attention")
        return replace(super().traits_of(params), no_widths=no_widths)

    @classmethod
    def least(cls, params: Params) -> tuple[int, str]:
        w, share = params.window, params.large
        last = f"the last method.window={w} tokens stay"
        if params.score != "attention":
            return w + N_SINK + 1, f"the first {N_SINK} and {last}, and one between them"
        least = max(ceil(N_SINK / share), floor(w / (1 - share)) + 1)
        return least, f"{last}, method.large={share} are at least the first {N_SINK}, and one more is for the rest"

    @classmethod
    def n_queries(cls, params: Params) -> int:
        return params.window if params.score == "attention" else 0

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        notes = [] if params.score == "attention" else [params.score.replace("_", ", ")]
        notes += ["best by attention"] * (params.rest == "best") + ["by position"] * (params.order == "position")
        return notes + super().notes(params)

    def order(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        params, w, n = self.params, self.params.window, keys.shape[2]
        past, n_best = slice(n - w), self.plan.target - w
        best = self.best(layer, keys[:, :, past], self.values(layer)[:, :, past], positions[..., past], n_best)
        return with_last(best if params.order == "code" else in_place(best), n, w)

    def best(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor, n: int) -> Tensor:
        """Slots of the `n` tokens before the window that stay, best first: (1, h_kv, n)."""
        params = self.params
        if params.score != "attention":
            return best_first(projected(keys, values, self.matrix(layer, keys)), n)
        softmax = self.trace.softmax[layer]
        others = chances(self.queries(layer), keys, softmax, params.kernel, params.temperature)
        if params.rest == "drawn":
            others = raced(others, self.numbers(layer, positions))
        large = best_first(magnitudes(values, params.magnitude), floor(params.large * self.plan.target))
        return large_and_best(large, others, n)

    def numbers(self, layer: int, positions: Tensor) -> Tensor:
        """A number from 0 to 1 for each of these tokens, (1, h_kv, n) float32."""
        return self.drawn(layer, positions, range(positions.shape[1]))

    def matrix(self, layer: int, keys: Tensor) -> Tensor:
        """Standard normal numbers, (d_h, r) float32 on the device of the keys."""
        every = torch.arange(keys.shape[-1] * RANK).view(1, 1, -1)
        u = self.drawn(layer, every, [OF_MATRIX], self.params.score == "dkv")
        return torch.special.ndtri(u.double() + 2.0**-25).view(-1, RANK).float().to(keys.device)

    def values(self, layer: int) -> Tensor:
        """Values of all slots."""
        placed = layer in self.store.layers
        return self.store[layer].tokens()[1] if placed else self.trace.values(layer)

    def protected(self, layer: int) -> list[int]:
        return sorted({*range(min(N_SINK, self.n_seen())), *self.latest(self.params.window)})
