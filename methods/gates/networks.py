"""What gates compute: from the attention's input x (s, D) of a layer a number for each KV head and token, float32.

`kvzap` is linear or has one hidden layer; its number is the logarithm of a score. `fastkvzip` is the weight of
a token's own small key in a softmax over itself and learned keys, asked by its own small query, whatever came before.

Not here: files (`methods/gates/files.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvbench.engine.observe import Observation
from kvbench.engine.softmax import Softmax
from kvbench.methods.gates.files import AUTO, DRAWN, read

if TYPE_CHECKING:
    from kvbench.engine.passes.trace import Trace

Weights = Mapping[str, Tensor]  # of a layer, by the names of the file
RMS_EPS = 1e-6
DRAWN_WIDTH, DRAWN_KEYS = 8, 4


def kvzap(x: Tensor, own: Weights) -> Tensor:
    """(h_kv, s)."""
    if "weight" in own:
        return torch.nn.functional.linear(x, own["weight"], own["bias"]).mT
    hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x, own["0.weight"], own["0.bias"]))
    return torch.nn.functional.linear(hidden, own["2.weight"], own["2.bias"]).mT


def fastkvzip(x: Tensor, own: Weights) -> Tensor:
    """(h_kv, s), above 0 and below 1."""
    b, base = own["b"], own["k_base"]  # (h_kv, 1, g), (h_kv, 1, m, e)
    (h_kv, _, g), e = b.shape, base.shape[-1]
    q = torch.nn.functional.linear(x, own["q_proj.weight"], own["q_proj.bias"]).view(-1, h_kv, g, e)
    k = torch.nn.functional.linear(x, own["k_proj.weight"]).view(-1, h_kv, 1, e)
    q, k = rms(q) * own["q_norm.weight"], rms(k) * own["k_norm.weight"]
    own_logit = (q * k).sum(-1) / e**0.5 + b.view(h_kv, g)  # (s, h_kv, g)
    others = torch.einsum("sage,ame->sagm", q, base[:, 0]) / e**0.5
    return (own_logit - others.logsumexp(-1)).sigmoid().mean(-1).mT


def rms(y: Tensor) -> Tensor:
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + RMS_EPS)


NETWORKS = {"kvzap": kvzap, "fastkvzip": fastkvzip}


@dataclass(frozen=True)
class GateScores(Observation):
    """A gate's scores of a layer's tokens, (1, h_kv, s) float32; `gate` is a file, a hub name, `auto` or `drawn`."""

    of_input: ClassVar[bool] = True
    of_tokens: ClassVar[bool] = True
    kind: str
    gate: str
    digest: str | None = None  # of the file, so that another one of the same name is another observation

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        raise AssertionError("a gate reads the attention's input")

    def grown(self, before: Tensor | None, now: Tensor) -> Tensor:
        return now if before is None else torch.cat([before, now], -1)

    def observe_layer(
        self, trace: "Trace", layer: int, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None
    ) -> Tensor:
        return self.of(trace.inputs[layer].x, layer, trace)

    def of(self, x: Tensor, layer: int, trace: "Trace") -> Tensor:
        """Numbers of tokens with the attention inputs x (n, s, D): (n, h_kv, s)."""
        own = self.weights(layer, x.shape[-1], trace)
        found = [NETWORKS[self.kind](row.float(), own) for row in x]
        return torch.stack(found)

    def is_drawn(self, trace: "Trace") -> bool:
        return self.gate == DRAWN or (self.gate == AUTO and not trace.digests)

    def file(self, trace: "Trace") -> tuple[str, dict[int, Weights]]:
        return loaded(self.kind, self.gate, self.digest, tuple(trace.digests))

    def named(self, trace: "Trace") -> str:
        """The digest of the file."""
        return DRAWN if self.is_drawn(trace) else self.file(trace)[0]

    def weights(self, layer: int, d_model: int, trace: "Trace") -> Weights:
        if self.is_drawn(trace):
            own = drawn(self.kind, layer, d_model, trace.shape.h_kv, trace.shape.g)
        else:
            own = self.file(trace)[1][layer]
        device = trace.device_of(layer)
        return trace.once(("gate", self, layer), lambda: {name: x.to(device) for name, x in own.items()})


@lru_cache(maxsize=4)
def loaded(kind: str, gate: str, digest: str | None, digests: tuple[str, ...]) -> tuple[str, dict[int, Weights]]:
    found = read(gate, kind, digests)
    layers = found.layers.items()
    return found.digest, {layer: {name: torch.from_numpy(x) for name, x in own.items()} for layer, own in layers}


def drawn(kind: str, layer: int, d_model: int, h_kv: int, g: int) -> Weights:
    """Weights of nobody, for models that mean nothing: the same at every call."""
    draw = torch.Generator().manual_seed(layer)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=draw)

    if kind == "kvzap":
        return {"weight": numbers(h_kv, d_model) / d_model**0.5, "bias": numbers(h_kv)}
    e, m = DRAWN_WIDTH, DRAWN_KEYS
    return {
        "q_proj.weight": numbers(h_kv * g * e, d_model), "q_proj.bias": numbers(h_kv * g * e),
        "k_proj.weight": numbers(h_kv * e, d_model), "q_norm.weight": 1 + numbers(e) / 4,
        "k_norm.weight": 1 + numbers(e) / 4, "k_base": numbers(h_kv, 1, m, e), "b": numbers(h_kv, 1, g),
    }  # fmt: skip
