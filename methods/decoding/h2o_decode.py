"""H2O while decoding: what has received the most attention so far, and the latest tokens, cut every few steps.

Every step adds the weights that it gave to each token, summed over the query heads of a KV head; a newcomer begins with
its own, and the prompt with its column sums. A cut keeps the latest half of the target, and of the others those with
the largest sums.

Paper     arXiv:2306.14048, 2023; Zhang, Zhenyu; H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
          Language Models
Symbols   B = `target`, rc = `n_recent`, hh = the rest.
Per step  moved: nothing; resident: h_kv * (target + interval) tokens at most, and a sum of 4 bytes for each. Weights
          must leave the attention at every step, which costs time.
Differs   - with `interval=1` it is H2O as published (`methods/dropping/h2o.py`), without sinks.
          - R-KV's class of this name looks at the last query alone and stops at its first cut: it is no reference.
          - of equal sums the lower position stays.
Fails     on long answers: sums of the prompt, which all later tokens looked at, outgrow those of any newer token.
Figures   drop while decoding: #D34794, bowtie, --
"""

from torch import Tensor

from kvbench.engine.observe import ColumnSums, Observation
from kvbench.engine.placement import Placement
from kvbench.methods.decoding.cutting import CuttingMethod, best_first, in_place, with_last
from kvbench.methods.decoding.schedule import Schedule, WhenToCut
from kvbench.methods.evicting import Evicting, Eviction
from kvbench.methods.scorers import reduce_group


class H2ODecode(Evicting, CuttingMethod):
    title = "H2O while decoding"
    version = 2
    wants_weights = True

    Params = WhenToCut
    params: WhenToCut

    @classmethod
    def least(cls, params: WhenToCut) -> tuple[int, str]:
        return 2, "half of it is for heavy hitters and half for recent tokens"

    @classmethod
    def observations(cls, params: WhenToCut, plan: Schedule) -> tuple[Observation, ...]:
        return (ColumnSums(),)

    @property
    def n_recent(self) -> int:
        return self.plan.target // 2

    def arrange(self, layer: int) -> Placement:
        self.sums[layer] = self.received(layer)
        return super().arrange(layer)

    def received(self, layer: int) -> Tensor:
        """Attention that every token of the prompt received, (1, h_kv, s)."""
        return reduce_group(self.trace.observed(ColumnSums(), layer), self.trace.shape.h_kv, "sum")

    def order(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        # Slots are in the order of positions, so that the lower slot is the lower position.
        n, n_recent = keys.shape[2], self.n_recent
        best = best_first(self.sums[layer][..., : n - n_recent], self.plan.target - n_recent)
        return with_last(in_place(best), n, n_recent)

    def reorder(self, layer: int, slots: Tensor) -> None:
        self.sums[layer] = self.sums[layer].gather(-1, slots)

    def eviction(self) -> Eviction:
        """Sums of what each token got; who leaves is said by the schedule."""
        return Eviction("sum")

    def protected(self, layer: int) -> range:
        return self.latest(self.n_recent)
