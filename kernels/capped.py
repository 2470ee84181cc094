"""Logits that are bent towards a cap: cap * tanh(x / cap).

Shapes    any; float32.
Paths     Torch, and a function for Triton's kernels, which the interpreter knows too; C++ has its own in soften.h.
Checks    tests/kernels/test_capped.py.

Not here: softmax, sinks.
"""

# pyright: reportInvalidTypeForm=false
# Triton may be missing, and then so are the names of its types.

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.jit import jit, tl


def capped(x: Tensor, cap: float) -> Tensor:
    """Logits x with a cap, in place where x may be written; 0 for no cap."""
    return x.div_(cap).tanh_().mul_(cap) if cap else x


def with_sink(lses: Tensor, sink: Tensor | None) -> Tensor:
    """Log-sum-exps (n, h, blocks) of blocks of tokens, and after them each head's sink (h,) as one block more."""
    return lses if sink is None else torch.cat([lses, sink.view(1, -1, 1).expand(len(lses), -1, -1)], -1)


@jit
def bend(x, cap):
    """`capped` of logits in registers, for a cap above 0."""
    return cap - 2.0 * cap / (tl.exp(x * (2.0 / cap)) + 1.0)
