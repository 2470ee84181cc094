"""How much each KV head needs the whole context: DuoAttention's table, made without training.

A text is read and repeated (`engine/passes/repetition.py`); a head's number is the largest weight that any of its
tokens gets from any query of the repetition, over all stretches of the text. KVzip's authors propose it in place of
trained gates, which take two passes and a backward one for each of thousands of steps.

Not here: how a budget is made of it (`methods/dropping/duo_attention.py`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvbench.engine.budget import NO_FRAME
from kvbench.engine.model import Model
from kvbench.engine.passes.repetition import Repetition, largest_weights
from kvbench.engine.passes.second_pass import run_second_passes
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.methods.calibration.base import Kind

OVERLAP = 8  # tokens, as KVzip has them; a stretch is one chunk, so that none is used


class Heads(Kind):
    name = "heads"
    n_tokens, n_block = 4000, 2000

    def measure(self, model: Model, ids: Sequence[int]) -> Mapping[str, Tensor]:
        n_block = min(self.n_block, model.shape.window // 3)  # the repetition comes on top
        stretches = [ids[start : start + n_block] for start in range(0, len(ids), n_block)]
        return {"heads": torch.stack([largest(model, stretch) for stretch in stretches]).amax(0)}

    def of_layer(self, q: Tensor, k: Tensor) -> Mapping[str, Tensor]:
        softmax = Softmax(q.shape[-1] ** -0.5)
        h_kv = k.shape[1]
        logits = (q.float().unflatten(1, (h_kv, -1)) @ k.float().unsqueeze(2).mT) * softmax.scale
        return {"heads": largest_weights(q, k, softmax, logits.logsumexp(-1).flatten(1, 2))[0].amax(-1)}


def largest(model: Model, ids: Sequence[int]) -> Tensor:
    """The largest weight that a token of each KV head gets in one stretch of text, (layers, h_kv) float32."""
    trace, what = prefill(model, ids), Repetition(len(ids), OVERLAP, NO_FRAME)
    run_second_passes(model, trace, [what])
    return torch.cat([trace.of_second_pass(what, layer).amax(-1) for layer in model.shape.attention_layers])
