"""`Growing`: what steps that only take in tokens do to a layer's memory.

Not here: who takes such steps (`engine/layouts/launch_plan.py`).
"""

from typing import NamedTuple

from torch import Tensor

from kvbench.kernels.rows.append import Ring


class Growing(NamedTuple):
    """How the steps to come change a layer's memory."""

    more: tuple[int, ...]  # tokens that each part of `resident` has more at every step
    places: tuple[tuple[Tensor, Tensor, int, Ring], ...]  # of the current token, and the slots that take turns there
    n_steps: int  # for so many
