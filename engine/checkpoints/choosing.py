"""Which layers attend to what the model itself chooses, and what they keep of a token in order to choose.

Not here: how they attend (`engine/passes/chosen.py`).
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor

# That attend to tokens of their own choice, or to entries that they make of several tokens.
CHOOSING = (
    "indexed_attention",
    "minimax_m3_sparse",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
# By which a call of such a layer says what it chose; its mask says which tokens a query sees at all.
CHOICES = ("indices", "block_indices", "attention_mask")
INDEXES = ("indexer_keys", "idx_keys")  # what caches call an index of tokens
ENTRIES, OF_ENTRIES = "compressor", "indexer"  # entries made of several tokens, and their index, in `compressed_kv`


def is_choosing(kinds: Sequence[str]) -> bool:
    """Whether a model with layers of these kinds chooses by itself."""
    return any(kind in CHOOSING for kind in kinds)


def more_of_a_token(layer: Any, n: int) -> int:
    """Numbers that a cache layer with `n` tokens keeps of each besides K and V: an index, a part of an entry."""
    index = [getattr(layer, name, None) for name in INDEXES]
    found = sum(x.numel() for x in index if x is not None) // n
    made = getattr(layer, "compressed_kv", {})
    entry = (layer.keys.shape[-1] if ENTRIES in made else 0) + (
        layer.buffer_kv[OF_ENTRIES].shape[-1] // 2 if OF_ENTRIES in made else 0  # two rows of numbers become one
    )
    return found + (ceil(entry / layer.compress_rate) if made else 0)


def unhiding_mask(batch_size: int, q_length: int, kv_length: int, *, dtype: Any, device: Any, **others: Any) -> Tensor:
    """A mask's shape: transformers' own looks at numbers."""
    return torch.zeros(batch_size, 1, int(q_length), int(kv_length), dtype=dtype, device=device)
