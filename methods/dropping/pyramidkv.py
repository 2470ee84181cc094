"""PyramidKV (Cai et al., 2024): SnapKV with most tokens in the first layer and fewest in the last.

Attention is spread widely in low layers and narrows to a few tokens in high ones ("information funneling"), so the
budget falls linearly over the layers. Which tokens a layer keeps is SnapKV's business (`methods/dropping/snapkv.py`).

Symbols   paper alpha, beta = `window`, `beta`; its k^l, without the window, = `counts`; C = `cap - window`.
Per step  moved: nothing; resident: h_kv * (counts[layer] + window + t) tokens at step t, the current one included.
Differs   the authors round the slope down once, so their mean lies up to (n_layers - 2) / 2 tokens above `cap`: here
          `cap` is the largest whose mean is within the budget, and `match_published` gives their integers. Layers are
          counted over those that are compressed. The rest as in SnapKV.
Fails     as SnapKV; and where a high layer needs more than `window` + C / `beta` tokens. The first layer holds almost
          twice the mean, which is what memory has to be reserved for.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from engine.observe import LastQueries, Observation
from methods.dropping.snapkv import shrunk_window, voted_scores, voter
from methods.rules.dropping.pyramidkv import PyramidKVRules
from methods.scoring import ScoringMethod


class PyramidKV(PyramidKVRules, ScoringMethod):
    params: PyramidKVRules.Params
    plan: PyramidKVRules.Plan

    @classmethod
    def observations(cls, params: PyramidKVRules.Params, plan: PyramidKVRules.Plan) -> tuple[Observation, ...]:
        return (LastQueries(params.window),)

    def scores(self, layer: int) -> Tensor:
        return voted_scores(self.trace, self.params, self.plan.window, layer)

    def scorer(self) -> Hashable:
        return voter(self.params)

    def counts(self) -> Sequence[int]:
        return self.plan.counts

    def report(self) -> dict[str, Any]:
        if self.variant.is_full:
            return {}
        kept = [count + self.plan.window for count in self.plan.counts]
        return shrunk_window(self) | {"kept_tokens": kept}
