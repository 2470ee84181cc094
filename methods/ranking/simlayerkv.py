"""SimLayerKV (Zhang et al., 2024): lazy layers keep the first and the latest tokens, all others keep every token.

A layer is lazy if its latest query gives nearly all of its weight to the first and the most recent tokens. Only whole
layers know what stands between.

Paper     arXiv:2410.13846, 2024; Zhang, Xuan; SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction
Symbols   paper or kvpress delta, lazy_threshold; n_initial, n_recent, n_last = `threshold`; `n_sink`, `n_recent`,
          `n_last`; a layer's share = `lazy_share`.
Budget    tokens per layer in the mean: lazy layers keep half of it or 1,028, as many layers as then fit stay whole,
          those with the lowest share first, and what is left goes to the recent tokens of the lazy ones. With a
          `threshold` there is no budget: what stays follows from each prompt, and results say what it was.
Per step  moved: nothing; resident: h_kv * (n_sink + n_recent) tokens in a lazy layer, all in the others, and generated
          ones.
Differs   - the query is the prompt's last one. The authors' code judges by the first token that is decoded, which still
            attends to everything, and cuts after it; the paper averages the last queries, which `n_last` does.
          - `own_columns: cut` is kvpress' rule: columns of the last `n_last` tokens are cut off before the sum, so that
            the recent range begins that much earlier, and one recent token fewer is kept for each.
          - the authors' thresholds are for 1,024 recent tokens; a table of them per model is in no file of theirs.
          - layers are judged by rank where the paper has a threshold: a threshold knows no budget.
Fails     where layers that look lazy at the prompt's end hold what a later question asks for. Where the budget leaves
          no layer whole (`whole_layers` of the report is 0) it is StreamingLLM.
Figures   drop by place or chance: #8E5BA2, pillar, :
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from torch import Tensor

from kvbench.engine.budget import Budget, BudgetRequest
from kvbench.engine.declared import Count, Is, Tokens, Window
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import MeanWeights, Observation
from kvbench.engine.placement import Kept, Placement, Whole
from kvbench.engine.shapes import ModelShape
from kvbench.kernels.scratch import finer
from kvbench.methods.base import SelectiveAttention
from kvbench.methods.dropping.allocators import whole_layers
from kvbench.methods.traits import Traits

USUAL_RECENT = 1024  # of the authors


def lazy_share(weights: Tensor, n_sink: int, n_recent: int, n_cut: int) -> float:
    """Share of the weights (n, s), mean over queries, on the first tokens and the latest before the last `n_cut`."""
    mean = finer(weights[:, : weights.shape[1] - n_cut]).mean(0)
    return float(mean[:n_sink].sum() + mean[len(mean) - n_recent :].sum())


class SimLayerKV(SelectiveAttention):
    title = "SimLayerKV"
    uneven = "SimLayerKV keeps other numbers of tokens in each layer"
    no_growth = "divides layers by what they attend to in the context"
    drops = True

    @dataclass(frozen=True)
    class Params:
        n_sink: Tokens
        n_recent: Window | None
        threshold: Annotated[float, Ge(0), Le(1), Is("a share from 0 to 1")] | None
        n_last: Count
        own_columns: Literal["counted", "cut"]

        def __post_init__(self) -> None:
            if self.threshold is not None and self.n_recent is None:
                raise ConfigError(
                    f"method.threshold={self.threshold:g} knows no budget that could say how much is kept; give "
                    f"method.n_recent={USUAL_RECENT} with it"
                )
            if self.own_columns == "cut" and (self.n_recent or USUAL_RECENT) <= self.n_last:
                raise ConfigError(
                    f"method.n_recent={self.n_recent} leaves no recent token beside the method.n_last={self.n_last} "
                    "that method.own_columns=cut takes away; give more"
                )

    @dataclass(frozen=True)
    class Plan:
        """How many tokens a lazy layer keeps."""

        n_sink: int
        n_recent: int  # of whose weights its share is made

    params: Params
    plan: Plan

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        return replace(super().traits_of(params), adapts=params.threshold is not None)

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        if params.n_recent is not None and params.threshold is not None:
            return SimLayerKV.Plan(params.n_sink, params.n_recent)
        most = budget.tokens if params.n_recent else max(1, budget.tokens // 2)
        few = min(params.n_sink + (params.n_recent or USUAL_RECENT), most)
        n_sink = min(params.n_sink, few // 4)
        return SimLayerKV.Plan(n_sink, few - n_sink)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        if params.threshold is None:
            return super().label(params, request)
        return f"{cls.title} (above {params.threshold:g}{', as kvpress' * (params.own_columns == 'cut')})"

    @classmethod
    def observations(cls, params: Params, plan: Plan) -> tuple[Observation, ...]:
        return (MeanWeights(params.n_last),)

    def setup(self) -> None:
        self.shares: dict[int, float] = {}

    @property
    def n_cut(self) -> int:
        return self.params.n_last if self.params.own_columns == "cut" else 0

    @property
    def few(self) -> int:
        """Tokens of a lazy layer, before any rest of the budget."""
        return self.plan.n_sink + self.plan.n_recent - self.n_cut

    def cut(self, n: int) -> Placement:
        """A layer with `n` tokens."""
        if n >= self.trace.s_prompt:
            return Whole()
        return Kept(self.plan.n_sink, n - self.plan.n_sink)

    def arrange(self, layer: int) -> Placement | None:
        plan, s, threshold = self.plan, self.trace.s_prompt, self.params.threshold
        weights = self.trace.observed(MeanWeights(self.params.n_last), layer)
        is_short = s <= plan.n_sink + plan.n_recent + self.n_cut
        self.shares[layer] = 0.0 if is_short else lazy_share(weights, plan.n_sink, plan.n_recent, self.n_cut)
        if threshold is None:
            return None
        is_lazy = not is_short and threshold < 1 and self.shares[layer] > threshold
        return self.cut(self.few if is_lazy else s)

    def arrange_rest(self) -> Mapping[int, Placement]:
        if self.params.threshold is not None:
            return {}
        counts = whole_layers([*self.shares.values()], self.few, self.budget.tokens, self.trace.s_prompt)
        return {layer: self.cut(n) for layer, n in zip(self.shares, counts, strict=True)}

    def protected(self, layer: int) -> Sequence[int]:
        n, s = self.store[layer].n_seen, self.trace.s_prompt
        return [*range(min(self.plan.n_sink, s)), *range(max(0, s - self.few + self.plan.n_sink), n)]

    def report(self) -> dict[str, Any]:
        kept = [self.store[layer].kept_counts() for layer in self.shares]
        whole = sum(min(counts) >= self.trace.s_prompt for counts in kept)
        return {"whole_layers": whole, "lazy_shares": [round(share, 6) for share in self.shares.values()]}
