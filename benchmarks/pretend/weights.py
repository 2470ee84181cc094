"""How many kernels an operator of torch launches on CUDA: one, but for those that are made of others there.

Counted in the sources of torch 2.13: `TensorTopK.cu`, `Sort.cpp`, `SortStable.cu`, `ScanKernels.cpp`. A sort of cub is
a kernel for the histograms of all digits, one for their sums, and one for each digit of eight bits.

Not here: what counts as a launch at all (`benchmarks/pretend/tensors.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

SMALL_SORT = 4096  # numbers of a slice that one block sorts where they lie
# Slices up to so many are the work of several blocks each from so many numbers on.
SEVERAL_BLOCKS = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (1 << 62, 400))


def kernels_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Of a call of the operator `aten::name`."""
    if name in WEIGHTS:
        return WEIGHTS[name](args, kwargs)
    return 2 if name in COPIED else 1


def topk(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    x, k, dim, _, is_sorted = [*args, *[-1, True, True][len(args) - 2 :]]
    dim, is_sorted = kwargs.get("dim", dim), kwargs.get("sorted", is_sorted)
    n = x.shape[dim] if x.dim() else 1
    n_slices = x.numel() // max(1, n)
    least = next(size for most, size in SEVERAL_BLOCKS if n_slices <= most)
    # Three kernels a digit; counts of what to find and of the sums are set before, and behind the last digit the
    # border's keys are counted, two sums taken of two kernels each, and the keys written.
    select = 3 * x.element_size() + 10 if n >= least else 1
    if not is_sorted or k * n_slices <= 1:
        return select
    # In place; or a sort, whose indices look up the others, and two copies.
    return select + (1 if k <= SMALL_SORT else sort_of(k, x.element_size()) + 3)


def sort(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    x = args[0]
    dim = kwargs.get("dim", next((a for a in args[1:] if type(a) is int), -1))
    return sort_of(x.shape[dim] if x.dim() else 1, x.element_size())


def sort_of(n: int, size: int) -> int:
    """Kernels for slices of n numbers of so many bytes."""
    if n <= SMALL_SORT:
        return 4  # indices, their copy, a copy of the numbers, the sort
    # Numbers of all slices, then their slices; in front indices and slices are made, behind both are taken apart.
    return 1 + (2 + size) + (2 + 1) + 1


def scan(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    x: Tensor = args[0]
    return 2 if x.numel() == x.shape[args[1]] else 1  # cub's over a whole tensor prepares its tiles


WEIGHTS: dict[str, Callable[[Sequence[Any], dict[str, Any]], int]] = {
    "topk": topk,
    "sort": sort,
    "cumsum": scan,
    "cumprod": scan,
    "logsumexp": lambda args, kwargs: 9,  # greatest ones, of which infinite ones are 0; difference, exp, sum, log, sum
    "nonzero": lambda args, kwargs: 4,
    "bincount": lambda args, kwargs: 4,
}
COPIED = {  # and then worked on in place
    *("scatter", "scatter_add", "scatter_reduce", "index_put", "index_add", "index_copy", "index_fill"),
    *("masked_fill", "masked_scatter"),
}
