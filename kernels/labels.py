"""The best tokens by labels: a few numbers that stand for each key, times as many of each query.

Shapes    weights (n, heads, c) float32, labels (stored, s, c), where stored divides heads; of the first `n_tokens`
          tokens the k best of every head: (n, heads, k) int64, in no order, of equal scores the first.
Paths     C++ on a CPU where the labels of a channel lie together over tokens (`by_channel`): a channel whose weight is
          zero is not read. Sums are float32 whatever the labels' dtype. A GPU has keys of them
          (`kernels/rows/logits.py`).
Checks    tests/kernels/test_labels.py.

Not here: what a label is.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.build import dtypes, library, remembered
from kvbench.kernels.topk import top_stable


def by_channel(labels: Tensor) -> Tensor:
    """Labels (stored, s, c), unchanged, with those of a channel together over tokens in memory."""
    return labels.mT.contiguous().mT


def label_scores(weights: Tensor, labels: Tensor, n_tokens: int) -> Tensor:
    """Scores of the first tokens: (n, heads, n_tokens) float32."""
    stored = len(labels)
    grouped = weights.unflatten(1, (stored, -1)).transpose(0, 1).flatten(1, 2)  # (stored, n * g, c)
    scores = grouped @ labels[:, :n_tokens].mT.to(weights.dtype)
    return scores.unflatten(1, (len(weights), -1)).transpose(0, 1).flatten(1, 2)


def label_top(weights: Tensor, labels: Tensor, n_tokens: int, k: int) -> Tensor:
    """The k best tokens of every head: all, if k >= n_tokens."""
    if 0 < k < n_tokens and takes_native(labels):
        return label_top_native(weights, labels, n_tokens, k)
    return label_top_ref(weights, labels, n_tokens, k)


def label_top_ref(weights: Tensor, labels: Tensor, n_tokens: int, k: int) -> Tensor:
    return top_stable(label_scores(weights, labels, n_tokens), k)


def takes_native(labels: Tensor) -> bool:
    """Whether the C++ can read them."""
    is_known = labels.dtype in dtypes() and labels.device.type == "cpu"
    return is_known and labels.stride(1) == 1 and native() is not None


@remembered
def native() -> Any:
    """The C function, or None."""
    lib = library("labels")
    if lib is not None:
        size, pointer = ctypes.c_int64, ctypes.c_void_p
        lib.label_top.argtypes = [size, size, size, size, pointer, pointer, size, size, size, size, pointer, size]
        lib.label_top.restype = None
    return lib


def label_top_native(weights: Tensor, labels: Tensor, n_tokens: int, k: int) -> Tensor:
    """A head at a time. Ascending positions."""
    (n, heads, c), stored = weights.shape, len(labels)
    assert labels.shape[2] == c and heads % stored == 0 and n_tokens <= labels.shape[1], (weights.shape, labels.shape)
    idx, weights = torch.empty(n, heads, k, dtype=torch.int64), weights.contiguous()
    for row in range(n):
        native().label_top(
            dtypes()[labels.dtype], heads, stored, c, weights[row].data_ptr(), labels.data_ptr(), labels.stride(0),
            labels.stride(2), n_tokens, k, idx[row].data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
    return idx
