"""Rows of a model's own cache: copied for several, and chosen among.

Only the layers that nobody compresses hold tensors. They follow by transformers' `reorder_cache`, which does so for
layers of every kind; `batch_repeat_interleave` leaves states out. States that a cache holds in addition to its layers
follow like those within.

Not here: which layers there are (`engine/caches/through.py`).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def beside_layers(cache: Any, choose: Callable[[Tensor], Tensor]) -> None:
    """Choose rows of the states in lists of the cache's own."""
    for name, states in vars(cache).items():
        if name != "layers" and isinstance(states, list):
            states[:] = [choose(state) if isinstance(state, Tensor) else state for state in states]


def fork(cache: Any, n: int) -> Any:
    """A copy for `n` rows."""
    forked = copy.deepcopy(cache)
    if n > 1:
        chosen = torch.zeros(n, dtype=torch.long)
        for layer in forked.layers:
            layer.reorder_cache(chosen)  # pyright: ignore[reportArgumentType]
        beside_layers(forked, lambda state: state.repeat_interleave(n, 0))
    return forked


def select_rows(cache: Any, rows: list[int]) -> None:
    """Keep only these rows."""
    chosen: dict[torch.device | None, Tensor] = {}
    for layer in cache.layers:
        device = getattr(layer, "device", None)
        if device not in chosen:
            chosen[device] = torch.tensor(rows, dtype=torch.long, device=device)
        layer.reorder_cache(chosen[device])
    beside_layers(cache, lambda state: state[rows])
