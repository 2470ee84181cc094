"""How a dropping method's budget may be divided over layers and heads: names, refusals and labels.

`allocator=NAME` replaces the division that a method has by itself. `Allocator` says which of two divisions it is made
of: one over layers, one over the heads of a layer, or both at once (`global`).

Not here: the integers (`methods/dropping/allocators.py`).
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from annotated_types import Ge, Le

from kvbench.engine.budget import show
from kvbench.engine.declared import Is, Named

ALLOCATORS = {  # name: how layers share the budget, how the heads of a layer share its part
    "uniform": ("uniform", "uniform"),
    "pyramid": ("pyramid", "uniform"),
    "by_need": ("by_need", "uniform"),
    "whole_layers": ("whole_layers", "uniform"),
    "head_mix": ("uniform", "head_mix"),
    "head_protect": ("uniform", "head_protect"),
    "pyramid_head_mix": ("pyramid", "head_mix"),
    "by_need_head_mix": ("by_need", "head_mix"),
    "global": ("global", "global"),
}

Alpha = Annotated[Fraction, Ge(0), Le(1), Is("a share from 0 (heads share all) to 1 (all heads alike)")]
Beta = Annotated[int, Ge(1), Is("1 for equal layers, more for a steeper pyramid")]


@dataclass(frozen=True)
class Allocator:
    """A division of the budget; the keys of conf/allocator."""

    name: Annotated[str, Named((*ALLOCATORS,))]
    alpha: Alpha = Fraction(1, 5)  # of heads: the share of a layer's part that is divided equally
    beta: Beta = 20  # of a pyramid: the last layer keeps 1/beta of the mean
    force: bool = False  # pool scores that do not compare, all the same

    def label(self) -> str:
        """The allocator's name, with what is not as usual."""
        usual = Allocator(self.name)
        words = [f"alpha {show(self.alpha)}"] if self.alpha != usual.alpha else []
        words += [f"beta {self.beta}"] if self.beta != usual.beta else []
        return self.name + (f" ({', '.join(words)})" if words else "")

    @property
    def of_layers(self) -> str:
        return ALLOCATORS[self.name][0]

    @property
    def of_heads(self) -> str:
        return ALLOCATORS[self.name][1]

    @property
    def pools(self) -> bool:
        """Scores of several heads or layers are put into one order."""
        return self.of_layers in ("by_need", "whole_layers", "global") or self.of_heads != "uniform"

    @property
    def needs_all_layers(self) -> bool:
        """No layer's part is known before the last layer's scores are."""
        return self.of_layers in ("by_need", "whole_layers", "global")


UNIFORM = Allocator("uniform")
