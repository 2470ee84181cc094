"""Bounds of pages of keys and their scores against torch. Parity comes first.

Not here: choosing pages, attention over them (`bench_select_attend.py`).
"""

import argparse
from collections.abc import Callable
from time import perf_counter

import torch

from kvbench.benchmarks.paired import measure, record
from kvbench.kernels.pages import (
    page_bounds,
    page_bounds_ref,
    page_scores,
    page_scores_ref,
    page_scores_torch,
)

CALLS = 20  # that are timed together
PAGE_LEN = 16
SHAPES = [(9, 3, 64, 8000), (32, 8, 128, 32768)]  # h, h_kv, d_h, s


def timed(call: Callable[[], object], n: int = CALLS) -> Callable[[], float]:
    """Mean seconds of some calls."""

    def run() -> float:
        start = perf_counter()
        for _ in range(n):
            call()
        return (perf_counter() - start) / n

    return run


def bench(h: int, h_kv: int, d_h: int, s: int, dtype: torch.dtype, pairs: int) -> None:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, h, 1, d_h, generator=draw).to(dtype)
    keys = torch.randn(1, h_kv, s, d_h, generator=draw).to(dtype)
    kmin, kmax = page_bounds(keys, PAGE_LEN)
    assert torch.equal(kmin, page_bounds_ref(keys, PAGE_LEN)[0]), "the bounds are wrong"
    exact = page_scores_ref(q, kmin, kmax)
    error = (page_scores(q, kmin, kmax) - exact).abs().max()
    assert error <= 1e-5 * exact.abs().max(), "the scores are wrong"
    shape = f"pages of {PAGE_LEN} of {s} tokens, {h}/{h_kv} heads of {d_h}"
    name = str(dtype).removeprefix("torch.")
    pair = (
        timed(lambda: page_bounds_ref(keys, PAGE_LEN), 3),
        timed(lambda: page_bounds(keys, PAGE_LEN), 3),
    )
    record("page_bounds", shape, name, measure(*pair, pairs))
    pair = (
        timed(lambda: page_scores_torch(q, kmin, kmax)),
        timed(lambda: page_scores(q, kmin, kmax)),
    )
    record("page_scores", shape, name, measure(*pair, pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21)
    options = parser.parse_args()
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            bench(*shape, dtype, options.pairs)


if __name__ == "__main__":
    main()
