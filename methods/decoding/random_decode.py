"""Random Attention (Wang et al., 2026): the prompt, the last tokens and, of the others, some by lot, anew at every cut.

It reads no key, no value and no query, and is the floor of every table of methods that cut while they answer. A number
follows from the seed, the prompt, the answer's number among its draws, layer, KV head, cut and position alone, so that
it is the same on every device and in any company.

Paper     arXiv:2609.03430, 2026; Wang, Heng; Random Attention: Rethinking KV Cache Eviction for Efficient Reasoning
Symbols   B = `target`, N = `interval`, w = `window`, P = `n_protected`; the authors' mode random_pp and, with
          `per: layer`, their control random_unified.
Per step  moved: nothing; resident: h_kv * (target + interval) tokens at most; no metadata, and a cut reads nothing.
Differs   - `draws: fresh` is the authors': survivors are drawn for again, and a token stays for a cuts with rho**a,
            rho = (B - w - P) / (B + N - w - P). With `once` a token has one number for life, and all that were ever
            generated stay with the same chance, which suits tables of methods without a bias to the recent.
          - their numbers come from an unseeded generator, or in vLLM from one seeded by the tokens seen.
          - their cuts are those of `schedule: slack` and never come before the first step (`random_decode_paper`).
          - a budget that does not hold a protected prompt is refused. They keep its first B - w - 1 tokens without a
            word; `long_prompt: cut` does so, and such answers say `n_protected` in their `method_report`.
Fails     as it should, on what was said many cuts ago, though of 8 heads one or another has it still. It is the floor
          of methods that protect as much: of R-KV and SnapKV it is `random_decode_unprotected`.
Figures   drop by place or chance: #7B82A1, bar, -.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.engine.declared import Index, Tokens
from kvbench.kernels.topk import top_stable
from kvbench.methods.decoding.cutting import DrawingMethod, in_place, with_last
from kvbench.methods.decoding.schedule import WhenToCut

N_SINK = 4  # of `protect: sinks`


def kept(u: Tensor, n_protected: int, target: int, w: int) -> Tensor:
    """Slots that stay, ascending, (…, target): the first ones, the last `w`, and between them the highest of `u`."""
    n = u.shape[-1]
    numbers = u[..., : n - w].clone()
    numbers[..., :n_protected] = torch.inf
    return with_last(in_place(top_stable(numbers, target - w)), n, w)


class RandomDecode(DrawingMethod):
    title = "Random while decoding"

    @dataclass(frozen=True)
    class Params(WhenToCut):
        schedule: Literal["position", "steps", "slack"]  # pyright: ignore[reportIncompatibleVariableOverride]
        window: Tokens
        protect: Literal["prompt", "sinks", "none"]
        long_prompt: Literal["refuse", "cut"]
        draws: Literal["fresh", "once"]
        per: Literal["head", "layer"]
        seed: Index

    params: Params

    @classmethod
    def least(cls, params: Params) -> tuple[int, str]:
        n_sink = N_SINK * (params.protect == "sinks")
        first = f"the first {n_sink} and " * bool(n_sink)
        return n_sink + params.window + 1, f"{first}the last method.window={params.window} tokens stay, and one by lot"

    @classmethod
    def beside_prompt(cls, params: Params) -> tuple[int, str, dict[str, Any]] | None:
        if params.protect != "prompt" or params.long_prompt == "cut":
            return None
        return params.window + 1, f"method.window={params.window} and one", {"protect": "none"}

    @classmethod
    def notes(cls, params: Params) -> list[str]:
        notes = [] if params.protect == "none" else [f"{params.protect} protected"]
        notes += ["one draw"] * (params.draws == "once") + ["one set per layer"] * (params.per == "layer")
        return notes + super().notes(params)

    @property
    def n_protected(self) -> int:
        """Tokens at the front that never leave."""
        first = {"prompt": self.trace.s_prompt, "sinks": N_SINK, "none": 0}[self.params.protect]
        return min(first, self.plan.target - self.params.window - 1)

    def order(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        # Slots are in the order of positions: the prompt's are, and a cut leaves them so.
        return kept(self.numbers(layer, positions), self.n_protected, self.plan.target, self.params.window)

    def numbers(self, layer: int, positions: Tensor) -> Tensor:
        """A number from 0 to 1 for each of these tokens, (1, h_kv, n) float32."""
        h_kv, is_fresh = positions.shape[1], self.params.draws == "fresh"
        return self.drawn(layer, positions, range(h_kv) if self.params.per == "head" else [-1] * h_kv, is_fresh)

    def protected(self, layer: int) -> list[int]:
        first = range(min(self.n_protected, self.n_seen()))
        return sorted({*first, *self.latest(self.params.window)})

    def report(self) -> dict[str, Any]:
        is_cut = self.params.protect == "prompt" and self.n_protected < self.trace.s_prompt and bool(self.n_cuts)
        return {"n_protected": self.n_protected} if is_cut else {}
