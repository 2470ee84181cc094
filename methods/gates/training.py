"""Training of a linear gate: the least squares fit of the logarithm of KVzip's scores to the attention's inputs.

Texts are read as prompts of `N_PROMPT` tokens and repeated, as KVzip does. Products of inputs add up prompt by prompt,
so nothing is kept of one but its sums. The last prompts stay out of the fit, and the gate's order of their tokens is
compared with KVzip's.

Not here: KVzip's second pass (`engine/passes/repetition.py`), the file (`methods/gates/files.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvbench.engine.budget import NO_FRAME
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import Observation
from kvbench.engine.passes.repetition import Repetition
from kvbench.engine.passes.second_pass import run_second_passes
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax

if TYPE_CHECKING:
    from kvbench.engine.model import Model
    from kvbench.engine.passes.trace import Trace

N_TOKENS, N_PROMPT = 24_576, 1_024
HELD_OUT = 8  # of so many prompts one is
CHUNK, OVERLAP = 2000, 8  # KVzip's
SMALLEST = 1e-6  # of a score whose logarithm is taken
RIDGE = 1e-3  # of an input's variance


@dataclass(frozen=True)
class Inputs(Observation):
    """The attention's input itself, (s, D) float32."""

    of_input: ClassVar[bool] = True

    def observe(self, q: Tensor, k: Tensor, softmax: Softmax) -> Tensor:
        raise AssertionError("it is no function of queries and keys")

    def observe_layer(
        self, trace: "Trace", layer: int, q: Tensor, k: Tensor, softmax: Softmax, lse: Tensor | None
    ) -> Tensor:
        return trace.inputs[layer].x[0].float().clone()


class Fitted(NamedTuple):
    """A gate, and the mean over heads of the rank correlation with KVzip's scores of texts that it has not seen."""

    layers: dict[int, dict[str, np.ndarray]]
    correlation: float


def fit(model: "Model", ids: Sequence[int], say: Callable[[str], object] = lambda text: None) -> Fitted:
    """A linear gate for this model; inside `model.hooked()`."""
    prompts = [ids[start : start + N_PROMPT] for start in range(0, len(ids), N_PROMPT)]
    prompts = [each for each in prompts if len(each) == N_PROMPT]
    n_held = max(1, len(prompts) // HELD_OUT)
    if len(prompts) < 2:
        raise ConfigError(f"{len(ids)} tokens are too few for a gate; use tokens={2 * N_PROMPT} or more")
    if N_PROMPT * len(prompts[:-n_held]) <= model.shape.d_model:
        raise ConfigError(
            f"{len(ids)} tokens are too few for a gate of {model.shape.d_model} weights a head; use "
            f"tokens={HELD_OUT * model.shape.d_model} or more"
        )
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    for i, prompt in enumerate(prompts[:-n_held]):
        say(f"{i + 1} of {len(prompts)} prompts")
        for layer, x, target in looked_at(model, prompt):
            x, target = with_one(x.double()), target.double()
            products = x.mT @ x, x.mT @ target.mT
            before = sums.get(layer)
            sums[layer] = products if before is None else (before[0] + products[0], before[1] + products[1])
    gates = {layer: solved(*found) for layer, found in sums.items()}  # (D + 1, h_kv)
    found = [
        rank_correlation((with_one(x) @ gates[layer].float()).mT, target)
        for prompt in prompts[-n_held:]
        for layer, x, target in looked_at(model, prompt)
    ]
    layers = {layer: as_layer(w.float().cpu()) for layer, w in gates.items()}
    return Fitted(layers, torch.stack(found).mean().item())


def as_layer(w: Tensor) -> dict[str, np.ndarray]:
    """Weights (D + 1, h_kv), the bias last, as a file has them."""
    return {"weight": w[:-1].mT.contiguous().numpy(), "bias": w[-1].numpy()}


def looked_at(model: "Model", prompt: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each layer the attention's inputs (s, D) and the logarithms of KVzip's scores (h_kv, s)."""
    inputs, repeats = Inputs(), Repetition(CHUNK, OVERLAP, NO_FRAME)
    trace = prefill(model, prompt, (inputs,))
    run_second_passes(model, trace, (repeats,))
    for layer in model.shape.attention_layers:
        yield layer, trace.observed(inputs, layer), trace.of_second_pass(repeats, layer)[0].clamp(min=SMALLEST).log()


def with_one(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 1), value=1.0)


def solved(products: Tensor, with_target: Tensor) -> Tensor:
    """Weights (D + 1, h_kv) of the least squares, held small in units of each input's own size."""
    size = products.diagonal().clamp(min=1e-12)
    penalty = size * RIDGE
    penalty[-1] = 0  # of the bias
    return torch.linalg.solve(products + penalty.diag(), with_target)


def rank_correlation(one: Tensor, other: Tensor) -> Tensor:
    """Spearman's, of rows (h, n): (h,)."""
    ranks = [x.argsort(-1).argsort(-1).double() for x in (one, other)]
    ranks = [x - x.mean(-1, keepdim=True) for x in ranks]
    return (ranks[0] * ranks[1]).sum(-1) / (ranks[0].norm(dim=-1) * ranks[1].norm(dim=-1))
