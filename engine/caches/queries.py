"""The latest queries of a layer, for methods that ask them once more when they compress: nothing waits.

A step's queries are one tensor for all rows, and every row's ring refers to it. Where steps are alike a kernel writes
them to memory of the ring instead, since the next step's come to lie where these did. They are gathered at a
compression alone. What they occupy is counted for each row as if it held its own.

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
        self.n_steps = 0  # that were taken in
        self.memory: Tensor | None = None  # (1, h, w, d_h)

    def push(self, q: Tensor, row: int) -> None:
        """Take in a step's query: that of `row` in q (n, h, 1, d_h)."""
        self.steps.append((q, row))
        self.n_steps += 1

    def place(self) -> tuple[Tensor, Tensor, int]:
        """Where a kernel writes the next step's query, as keys that have their values within; all slots take turns."""
        if self.memory is None:
            _, h, _, d_h = self.of_prompt.shape
            self.memory = self.of_prompt.new_empty(1, h, self.w, d_h)
        return self.memory, self.memory[..., :1], self.n_steps % self.w

    def take_in(self) -> None:
        """A kernel has written the next step's: the slot's last one was `w` steps before, and nobody refers to it."""
        memory, _, slot = self.place()
        self.push(memory[:, :, slot : slot + 1], 0)

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
