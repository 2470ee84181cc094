"""Full attention: nothing is dropped, nothing is moved. What every method is compared with.

Per step  moved: nothing; resident: K and V of all tokens.
Differs   ratio, budget and comm have no meaning here and do not change anything.
Fails     never; it is what the others approximate.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from engine.blocks import BlockCacheSpec
from engine.budget import BudgetRequest
from engine.prefill import Trace
from methods.base import SelectiveAttention


class Full(SelectiveAttention):
    title = "Full"
    drops = False

    @dataclass(frozen=True)
    class Params:
        pass

    def __init__(
        self,
        params: Any,
        request: BudgetRequest,
        trace: Trace,
        n_new: int,
        cache: BlockCacheSpec | None = None,
    ) -> None:
        everything = BudgetRequest(ratio=Fraction(1), tokens=None, comm=Fraction(0))
        super().__init__(params, everything, trace, n_new, cache)

    def arrange(self, layer: int) -> None:
        self.store.keep_all(layer)
