"""TOVA while decoding: what the latest query looks at, one set for all heads of a layer, cut every few steps.

The weights of the step's own query, over all tokens that the layer holds and averaged over its query heads, say which
tokens stay. There is no window, there are no sinks, and no score outlives its step.

Paper     arXiv:2401.06104, 2024; Oren, Matanel; Transformers are Multi-State RNNs
Symbols   paper: multi-state size = `target`.
Per step  moved: nothing; resident: h_kv * (target + interval) tokens at most, and the query of the step. Its weights
          are made once more at a cut alone, so that attention need not write them down.
Differs   with `interval=1` it is TOVA as published (`methods/dropping/tova.py`). Of equal weights the lower position
          stays.
Fails     as TOVA does, and more with a longer interval: what is left hangs on one query of many.
Figures   drop while decoding: #EA5EA9, square, :
"""

from torch import Tensor

from kvbench.engine.softmax import Softmax
from kvbench.methods.decoding.cutting import CuttingMethod, best_first, in_place
from kvbench.methods.decoding.schedule import WhenToCut


def query_weights(q: Tensor, keys: Tensor, softmax: Softmax) -> Tensor:
    """Weights of one query per head (1, h, 1, d_h) on keys (1, h_kv, n, d_h), mean over heads: (n,) float32."""
    queries = q[0, :, 0].unflatten(0, (keys.shape[1], -1))  # (h_kv, g, d_h)
    return softmax.weights(softmax.logits(queries, keys[0]), (keys.shape[1], -1)).mean((0, 1))


class TOVADecode(CuttingMethod):
    title = "TOVA while decoding"

    Params = WhenToCut
    params: WhenToCut

    @classmethod
    def n_queries(cls, params: WhenToCut) -> int:
        return 1

    def order(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        weights = query_weights(self.queries(layer), keys, self.trace.softmax[layer])
        best = in_place(best_first(weights.view(1, 1, -1), self.plan.target))
        return best.expand(1, keys.shape[1], -1).contiguous()

    def protected(self, layer: int) -> range:
        return self.latest(0)
