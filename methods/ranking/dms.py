"""Delayed eviction by a threshold (Łańcucki et al., 2025): a token whose score is too low goes once others are newer.

Every KV head judges a token when it is read, in the prompt and in the answer, and drops it as soon as `window` newer
ones are there. Nothing is ranked, so that how many stay depends on the text, and heads grow apart.

Paper     arXiv:2506.05345, 2025; Łańcucki, Adrian; Inference-Time Hyper-Scaling with KV Cache Compression
Symbols   paper, code tau, W = `threshold`, `window`; the scorer's numbers are those of method.scorer.
Budget    none: what it attended to is measured, and tables have it there. `threshold` is in the scorer's own units, so
          logarithms for kvzap; one that was chosen on a task's own samples has seen them.
Per step  moved: nothing; resident: the tokens of all heads that are there, 4 * d_h bytes each, offsets and a bit for
          each generated token of a head. Memory for generated tokens is taken at once.
Differs   - the paper trains its model to say which tokens may go; here any scorer does. With method=dms_kvzap it is
          KVzap's gate, which is the published use of that.
          - the prefill is exact, and drops take effect after it; KVzap's paper reads sparsely.
          - kvpress puts fake keys in the place of dropped ones and keeps the memory.
          - `decode: true` wants a scorer that knows a new token by itself: a gate, or a norm of keys.
Fails     where the threshold was chosen for other texts: nothing holds the number of tokens.
Figures   drop by keys and values: #D25FD0, thin diamond, -.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.declared import Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import Change, Delayed, Judged, Placement, Ragged
from kvbench.methods.named import Scorer
from kvbench.methods.over import OverScorer, refuse_query_heads
from kvbench.methods.traits import Traits


class DMS(OverScorer):
    title = "Delayed eviction"
    eager = "judges each new token before it is kept"
    adapts = True
    takes = ()  # it runs at what comes out
    is_scorer = False
    reads_inputs = True

    @dataclass(frozen=True)
    class Params:
        scorer: Scorer
        threshold: float
        window: Tokens
        decode: bool
        match_published: ClassVar[bool] = False  # nothing is ranked

        def __post_init__(self) -> None:
            refuse_query_heads(self.scorer, DMS.title)
            if self.decode and not self.scorer.rules.traits.judges:
                raise ConfigError(
                    f"{self.scorer.rules.title} has no score for a token that is generated; use "
                    "method.decode=false, or a scorer such as knorm or kvzap"
                )

    params: Params

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        scorer, unreadable = params.scorer.rules, ""
        if not scorer.traits.judges or getattr(params.scorer.params, "n_sink", 0):
            unreadable = (
                f"{scorer.title} judges a token by others, or by its place; use a scorer such as knorm or kvzap"
            )
        goes_on = "Delayed eviction goes on while it decodes; use method.decode=false with it" if params.decode else ""
        return replace(super().traits_of(params), evicts=goes_on, unreadable=unreadable)

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        scorer = params.scorer.rules.label(params.scorer.params, request)
        return f"{cls.title} ({scorer}, {params.threshold:g}{'' if params.decode else ', prompt only'})"

    def setup(self) -> None:
        super().setup()
        self.delay = self.params.window
        self.wants_input = self.params.decode and self.params.scorer.rules.traits.judges == "input"

    @property
    def needs_all_layers(self) -> bool:
        return False

    def arrange(self, layer: int) -> Placement:
        s, stays = self.trace.s_prompt, ~self.goes(layer)
        n_window = min(self.params.window, s)
        before, latest = stays.split([s - n_window, n_window], 1)
        chosen = [head.nonzero().squeeze(1) for head in before]
        if self.params.decode:
            return Delayed(chosen, stays=latest, delay=self.params.window)
        late = torch.arange(s - n_window, s, device=stays.device)
        return Ragged([torch.cat([positions, late]) for positions in chosen])

    def goes(self, layer: int) -> Tensor:
        """Which of the prompt's tokens leave each KV head once they are old enough, (h_kv, s) bool."""
        low = torch.nn.functional.pad(self.is_low(self.inner.shared_scores(layer)[0]), self.inner.ends())
        slots = self.trace.slots.get(layer)
        return low.expand(self.trace.shape.h_kv, -1) if slots is None else low | (slots[0] < 0)

    def is_low(self, scores: Tensor) -> Tensor:
        """NaN is below nothing."""
        return scores < self.params.threshold

    def judge(self) -> Hashable:
        """Rows where it is equal score new tokens alike."""
        return self.params.scorer

    @classmethod
    def after_rows(
        cls, rows: Sequence[Any], layer: int, out: Tensor, weights: Sequence[Tensor | None]
    ) -> Sequence[Change | None]:
        """The current tokens of all rows with one scorer are scored at once."""
        found: list[Change | None] = [None] * len(rows)
        alike: dict[Hashable, list[int]] = {}
        for i, row in enumerate(rows):
            if row.params.decode:
                alike.setdefault(row.judge(), []).append(i)
        for places in alike.values():
            some = [rows[i] for i in places]
            keys = together([row.store[layer].newest[0] for row in some])
            inputs = together([row.x_now for row in some]) if some[0].wants_input else None
            scores = some[0].inner.scores_of(layer, keys, inputs)  # (n, h_kv)
            for i, row, own in zip(places, some, scores, strict=True):
                found[i] = Judged(row.is_low(own))
        return found

    def protected(self, layer: int) -> Sequence[int]:
        n = self.store[layer].n_seen
        end = n - 1 if self.params.decode else self.trace.s_prompt
        return range(max(0, end - self.params.window), n)


def together(x: Sequence[Tensor]) -> Tensor:
    return x[0] if len(x) == 1 else torch.cat([*x])
