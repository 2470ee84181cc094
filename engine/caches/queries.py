"""The latest queries of a layer, for methods that ask them once more when they compress: no copy, and nothing waits.

A step's queries are one tensor for all rows, and every row's ring refers to it. They are gathered at a compression
alone. What they occupy is counted for each row as if it held its own.

Not here: what is asked (`methods/decoding`).
"""

from collections import deque

import torch
from torch import Tensor

from kvbench.engine.budget import ELEMENT_BYTES
from kvbench.engine.shapes import ModelShape


class QueryRing:
    """The last `w` queries of one layer of one row, those of the prompt included, after rotary embedding."""

    def __init__(self, w: int, of_prompt: Tensor) -> None:
        """`of_prompt` (1, h, n, d_h) are the prompt's last ones, as many as there are or `w`."""
        assert w >= 1 and of_prompt.shape[2] >= 1, (w, of_prompt.shape)
        self.w, self.of_prompt = w, of_prompt
        self.steps: deque[tuple[Tensor, int]] = deque(maxlen=w)

    def push(self, q: Tensor, row: int) -> None:
        """Take in a step's query: that of `row` in q (n, h, 1, d_h)."""
        self.steps.append((q, row))

    def __len__(self) -> int:
        return min(self.w, len(self.steps) + self.of_prompt.shape[2])

    def latest(self) -> Tensor:
        """Oldest first, (1, h, n, d_h) with n up to `w`."""
        steps = [q[row : row + 1] for q, row in self.steps]
        n_before = self.w - len(steps)
        if n_before:
            steps.insert(0, self.of_prompt[:, :, -n_before:])
        return torch.cat(steps, 2)

    def n_bytes(self, shape: ModelShape) -> int:
        """Bytes of its queries."""
        return len(self) * shape.h * shape.d_h * ELEMENT_BYTES
