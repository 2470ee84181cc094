"""How well the tokens that one layer chooses serve another, head by head: Kascade's offline statistics.

A text is read in blocks. The last queries of each say which tenth of the block's tokens weighs most to a KV head of
layer a, and which share of what is possible these have in layer b: `sim[a, b, h2, h1]` for head h2 of b and h1 of a,
the least over a block's queries and the mean over blocks; 0 where b lies below a. `importance[b]` is 1 less the mean
cosine of a layer's input with what it is once the attention's output is added.

Not here: which layers become anchors (`methods/calibration/anchors.py`).
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.engine.model import Model
from kvbench.engine.softmax import Softmax
from kvbench.kernels.topk import top_stable
from kvbench.methods.calibration.base import Kind, Seen, watch

N_QUERIES = 32  # at the end of a block
SHARE = 10  # a choice is one of so many tokens


class Resemblance(Kind):
    name = "reuse"
    n_tokens, n_block = 16_384, 512

    def measure(self, model: Model, ids: Sequence[int]) -> Mapping[str, Tensor]:
        layers, blocks = model.shape.attention_layers, list[Tensor]()
        cosines: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        weights: dict[int, Tensor] = {}

        def look(layer: int, seen: Seen) -> None:
            weights[layer] = last_weights(seen.q, seen.k, model.shape.h_kv, model.softmaxes[layer]).to(model.device)
            if layer == layers[-1]:
                every = torch.stack([*weights.values()])
                blocks.append(resemblance(every, best_of(every)))

        n = len(ids) // self.n_block * self.n_block or len(ids)  # what is left over is no block
        with watching(model, cosines):
            watch(model, ids[:n], self.n_block, look)
        if not all(cosines.values()):
            raise ConfigError(
                f"layers of {model.shape.name} do not add their attention's output to what they are given, so that no "
                "calibration of kind reuse says what it matters; use reuse=every or reuse=given"
            )
        importance = torch.stack([1 - torch.cat(cosines[layer]).mean() for layer in layers])
        return {"sim": torch.stack(blocks).mean(0).cpu(), "importance": importance.cpu()}

    def of_layer(self, q: Tensor, k: Tensor) -> Mapping[str, Tensor]:
        raise ConfigError("a calibration of kind reuse compares layers of a model, and there is none of drawn weights")


def last_weights(q: Tensor, k: Tensor, h_kv: int, softmax: Softmax) -> Tensor:
    """Weights (h_kv, queries, n) that a block's last queries give to its tokens, summed over a group."""
    n = min(N_QUERIES, q.shape[2])
    logits = softmax.bent(q[0, :, -n:].unflatten(0, (h_kv, -1)) @ k[0].unsqueeze(1).mT)  # (h_kv, g, n, s)
    coming = torch.ones(n, k.shape[2], dtype=torch.bool, device=k.device).triu(k.shape[2] - n + 1)
    return softmax.weights(logits.masked_fill(coming, -torch.inf), (h_kv, -1, 1)).sum(1)


def best_of(weights: Tensor) -> Tensor:
    """A tenth of the tokens, those with most weight (..., n) of each query: (..., k)."""
    return top_stable(weights, max(1, weights.shape[-1] // SHARE))


def resemblance(weights: Tensor, top: Tensor) -> Tensor:
    """sim (layers a, layers b, h2, h1) by weights (layers, h_kv, queries, n) and each layer's choices (…, k)."""
    n_layers, h_kv, *_ = weights.shape
    most = weights.gather(-1, top).sum(-1)  # (b, h2, t)
    sim = weights.new_zeros(n_layers, n_layers, h_kv, h_kv)
    for a in range(n_layers):
        for h1 in range(h_kv):
            idx = top[a, h1].expand(n_layers - a, h_kv, -1, -1)
            sim[a, a:, :, h1] = (weights[a:].gather(-1, idx).sum(-1) / most[a:]).amin(-1)
    return sim


def watching(model: Model, cosines: dict[int, list[Tensor]]) -> ExitStack:
    """Inside, each block adds the cosines of the layers' inputs with themselves and the attention's output."""
    inputs: dict[int, Tensor] = {}
    stack = ExitStack()
    for layer, attention in zip(model.decoder_layers, model.attentions, strict=True):
        number = attention.layer_idx
        if number not in cosines:
            continue

        def enter(_: Any, args: Any, kwargs: dict[str, Any], number: int = number) -> None:
            inputs[number] = (args[0] if args else kwargs["hidden_states"]).float()

        def leave(_: Any, args: Any, out: Any, number: int = number) -> None:
            x, added = inputs[number], (out[0] if isinstance(out, tuple) else out).float()
            if x.shape == added.shape:  # else it was called to learn how it turns keys
                cosines[number].append(torch.cosine_similarity(x, x + added, dim=-1).flatten())

        for hook in (
            layer.register_forward_pre_hook(enter, with_kwargs=True), attention.register_forward_hook(leave)
        ):  # fmt: skip
            stack.callback(hook.remove)
    return stack
