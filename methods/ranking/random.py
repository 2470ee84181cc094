"""Random tokens: the floor under every scorer, and a test of the harness. There is no paper.

Every token gets a number by lot, and the highest stay. A number follows from the seed, the prompt up to the token, the
layer and the KV head alone, so it is the same on every device and in every company, and does not change with what comes
after it in the prompt.

Paper     none: a reference of this harness
Per step  moved: nothing; resident: the budget's tokens and generated ones, 4 * d_h bytes each.
Differs   - kvpress' RandomPress makes its generator anew in each call: all layers keep the same tokens, and so do all
            prompts of one length. `draws: kvpress` is that, with torch's CPU generator and a seed; without a seed
            kvpress draws anew each time, which we do not offer.
          - numbers are float32. In bfloat16, as kvpress has them with such keys, thousands are equal.
Fails     as it should: at a tenth of a prompt nine heads in ten have lost its first token. With `n_sink` and `window`
          (`random_ends`) it is the floor for methods that protect them.
Figures   drop by place or chance: #84909C, plus, :
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Index, Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.jit import upload
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits

BITS = 64

STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of the generator SplitMix64

BASE = 0xD1342543DE82EF95  # odd, of the running hash of tokens


def wrapped(x: int) -> int:
    """A whole number modulo 2**64 as int64 has it."""
    x %= 1 << BITS
    return x - (1 << BITS) * (x >= 1 << (BITS - 1))


def shifted(x: Tensor, n: int) -> Tensor:
    """Bits of int64 moved right by `n`, with zeros shifted in."""
    return (x >> n) & ((1 << (BITS - n)) - 1)


def mixed(x: Tensor) -> Tensor:
    """Any int64 as one in which every bit hangs on all of its bits."""
    x = (x ^ shifted(x, 30)) * wrapped(FIRST)
    x = (x ^ shifted(x, 27)) * wrapped(SECOND)
    return x ^ shifted(x, 31)


def marks(ids: Sequence[int], s: int) -> Tensor:
    """A number for each of a prompt's `s` tokens, of its position and of all tokens up to it: (s,) int64."""
    places = torch.arange(1, s + 1)
    found = places * wrapped(STEP)
    if ids:
        powers = torch.full((s,), wrapped(BASE)).cumprod(0)
        found = found ^ mixed(((torch.tensor([*ids][:s]) + 1) * powers).cumsum(0))
    return found


def keys_of(seed: int, layer: int, heads: Iterable[int]) -> Tensor:
    """Keys that make one head's numbers differ from another's, (heads,) int64."""
    return mixed(torch.tensor([wrapped(seed * STEP + layer * FIRST + head * SECOND + BASE) for head in heads]))


def even(x: Tensor) -> Tensor:
    """Any int64 as a number from 0 to 1, float32."""
    return shifted(mixed(x), 40).float() * 2.0**-24


def drawn(of_tokens: Tensor, seed: int, layer: int, head: int) -> Tensor:
    """A number from 0 to 1 for each token, (s,) float32, by its mark."""
    return even(of_tokens ^ keys_of(seed, layer, [head]))


def numbers_at(
    trace: Trace, positions: Tensor, seed: int, layer: int, heads: Iterable[int], draw: int = 0, cut: int = 0
) -> Tensor:
    """A number from 0 to 1 for each token of (1, heads, n) by its position, prompt or answer: float32.

    It hangs on the prompt, the answer's number among its draws, and the number of the cut, where it is drawn anew.
    """
    prompt = trace.once(("marks of tokens",), lambda: marks(trace.ids, trace.s_prompt))[-1]
    of_cut = mixed(prompt + wrapped(draw * FIRST + cut * SECOND))
    of_heads = upload((keys_of(seed, layer, heads) ^ of_cut).tolist(), positions.device)
    return even((positions + 1) * wrapped(STEP) ^ of_heads.view(1, -1, 1))


class Random(ScoringMethod):
    title = "Random tokens"
    no_growth = "draws its tokens of the context once"
    comparable = "none"  # pooled, random numbers are random sizes of heads

    @dataclass(frozen=True)
    class Params:
        per: Literal["head", "layer", "prompt"]
        n_sink: Tokens
        window: Tokens
        seed: Index
        draws: Literal["counter", "kvpress"]

        def __post_init__(self) -> None:
            if self.draws == "kvpress" and self.per != "head":
                raise ConfigError(
                    f"method.per={self.per} with method.draws=kvpress is not allowed; kvpress draws for every KV head, "
                    "the same in all layers: use method.per=head with it"
                )

    @dataclass(frozen=True)
    class Plan:
        n_sink: int
        window: int

    params: Params
    plan: Plan

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        """Ends that would fill the budget shrink, so that half of it is left to the lot."""
        window = min(params.window, budget.tokens // 4)
        return Random.Plan(min(params.n_sink, budget.tokens // 4), window)

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        return replace(super().traits_of(params), judges="place" if params.draws == "counter" else "")

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        notes = [] if params.per == "head" else [f"one set per {params.per}"]
        notes += ["with ends"] * bool(params.n_sink or params.window) + ["kvpress"] * (params.draws == "kvpress")
        name = super().label(params, request)
        return name.replace(cls.title, f"{cls.title} ({', '.join(notes)})") if notes else name

    def scores(self, layer: int) -> Tensor:
        n_first, n_last = self.ends()
        return self.numbers(layer)[..., n_first : self.trace.s_prompt - n_last]

    def scores_at(self, layer: int, positions: Tensor, draw: int) -> Tensor:
        h_kv, per, seed = self.trace.shape.h_kv, self.params.per, self.params.seed
        heads = range(h_kv) if per == "head" else [-1] * h_kv
        return numbers_at(self.trace, positions.view(1, 1, -1), seed, -1 if per == "prompt" else layer, heads, draw)[0]

    def numbers(self, layer: int) -> Tensor:
        """Random numbers of all tokens: (1, h_kv, s) float32, (1, 1, s) where all heads agree."""
        s, h_kv, seed = self.trace.s_prompt, self.trace.shape.h_kv, self.params.seed
        device = self.trace.device_of(layer)
        if self.params.draws == "kvpress":
            return torch.rand(1, h_kv, s, generator=torch.Generator().manual_seed(seed)).to(device)
        of_tokens = self.trace.once(("marks of tokens",), lambda: marks(self.trace.ids, s))
        of_layer = -1 if self.params.per == "prompt" else layer
        heads = range(h_kv) if self.params.per == "head" else [-1]
        return torch.stack([drawn(of_tokens, seed, of_layer, head) for head in heads]).unsqueeze(0).to(device)
