"""Attention over chosen tokens where they lie, against copying them first, and against attention over the whole cache.

Each call gets other tokens, so that none of them are in the cache from the call before. Parity comes first.

Not here: how tokens are chosen; whole decode steps (`bench_decode.py`).
"""

import argparse
from collections.abc import Callable
from itertools import cycle
from time import perf_counter

import torch
from torch import Tensor

from kvbench.benchmarks.paired import measure, record
from kvbench.kernels.gather import gather_tokens
from kvbench.kernels.select_attend import Tokens, attend_parts_native, attend_parts_ref

N_SETS = 16  # sets of tokens, in turns
CALLS = 20  # that are timed together
SHAPES = [  # h, h_kv, d_h, s, n_chosen
    (9, 3, 64, 8000, 400),
    (32, 8, 128, 32768, 1024),
]


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """What torch has for a query over keys and values that lie together."""
    grouped = q.view(1, k.shape[1], -1, k.shape[3])
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(grouped, k, v, scale=scale)[0]


def timed(call: Callable[[Tensor], object], sets: list[Tensor]) -> Callable[[], float]:
    """Mean seconds of some calls."""
    turns = cycle(sets)

    def run() -> float:
        chosen = [next(turns) for _ in range(CALLS)]
        start = perf_counter()
        for idx in chosen:
            call(idx)
        return (perf_counter() - start) / CALLS

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21)
    options = parser.parse_args()
    for h, h_kv, d_h, s, n in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            bench(h, h_kv, d_h, s, n, dtype, options.pairs)


def bench(h: int, h_kv: int, d_h: int, s: int, n: int, dtype: torch.dtype, pairs: int) -> None:
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, h, 1, d_h, generator=draw).to(dtype)
    k, v = (torch.randn(1, h_kv, s, d_h, generator=draw).to(dtype) for _ in range(2))
    scale, name = d_h**-0.5, str(dtype).removeprefix("torch.")
    for heads in (h_kv, h):
        sets = [torch.rand(1, heads, s, generator=draw).topk(n).indices for _ in range(N_SETS)]
        exact = attend_parts_ref(q.double(), [Tokens(k.double(), v.double(), sets[0])], scale)[0]
        got = attend_parts_native(q, [Tokens(k, v, sets[0])], scale)[0]
        rounding = (exact.to(dtype) - exact).abs().max()
        assert (got - exact).abs().max() <= 2 * rounding + 1e-6, "the result is wrong"

        ours = timed(lambda idx: attend_parts_native(q, [Tokens(k, v, idx)], scale), sets)
        copying = timed(lambda idx: flash(q, gather_tokens(k, idx), gather_tokens(v, idx), scale), sets)
        whole = timed(lambda idx: flash(q, k, v, scale), sets)
        shape = f"{n} of {s} tokens per {'query' if heads == h else 'KV'} head, {h}/{h_kv} heads of {d_h}"
        record("select_attend against gather", shape, name, measure(copying, ours, pairs))
        record("select_attend against the whole cache", shape, name, measure(whole, ours, pairs))


if __name__ == "__main__":
    main()
