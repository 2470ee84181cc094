"""A prefill whose parts that work token by token read a chunk of the prompt at a time: `in_chunks`.

Norms and MLPs know one token only, and an MLP's values are several times as wide as what goes on to the next layer. In
chunks the widest of them exist for a chunk alone, so that a longer prompt fits. Attention, observations and methods
still see a layer's tokens at once.

Not here: attention itself, which stores nothing of the size of all pairs (`engine/causal.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.model import Model


@contextmanager
def in_chunks(model: Model, n: int | None) -> Iterator[None]:
    """Inside, all parts of a layer but its attention read `n` tokens at a time; None: all at once, as outside."""
    if n is None:
        yield
        return
    attentions = {id(part) for part in model.attentions}
    parts = [part for layer in model.decoder_layers for part in layer.children() if id(part) not in attentions]
    before = [part.__dict__.get("forward") for part in parts]
    for part in parts:
        part.forward = partial(by_chunk, part.forward, n)
    try:
        yield
    finally:
        for part, forward in zip(parts, before, strict=True):
            del part.forward
            if forward is not None:  # somebody else's, such as one that moves inputs between devices
                part.forward = forward


def by_chunk(forward: Callable[..., Any], n: int, *args: Any, **kwargs: Any) -> Any:
    """What `forward` makes of tokens (1, s, D), `n` of them at a time; whatever else it is given, at once."""
    x = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] <= n:
        return forward(*args, **kwargs)
    out: Tensor | None = None
    for start in range(0, x.shape[1], n):
        made = forward(x[:, start : start + n])
        if not isinstance(made, Tensor) or made.ndim != 3:
            return forward(x)  # more than a value for each token: there is no telling how to join it
        if out is None:
            out = torch.empty(*x.shape[:2], made.shape[2], dtype=made.dtype, device=made.device)
        out[:, start : start + n] = made
    return out
