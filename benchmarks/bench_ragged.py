"""A decode step of a layer whose KV heads keep different counts against one of equal counts with the same mean.

Two layers of random K and V in each of two shapes: one keeps the mean in every head, the other counts that are set by
hand, from mildly apart to one head with most of the budget. A step is appending the token, attention and the books.
The goal is 1.15.

Not here: which tokens a head keeps.
"""

import argparse
from collections.abc import Sequence
from time import perf_counter

import torch

from benchmarks.paired import measure, record
from engine.attend import attend
from engine.passes.trace import Trace
from engine.placement import Kept, Ragged
from engine.shapes import ModelShape
from engine.softmax import Softmax
from engine.store import Store

SHAPES = {  # h, h_kv, d_h, prompt, mean
    "llama-3.1-8b": (32, 8, 128, 16_384, 1024),
    "smollm2-135m": (9, 3, 64, 8_000, 800),
}
SPREADS = {  # how much of the budget the heads have, from the first to the last
    "mild": lambda i, heads: 1 + i / max(1, heads - 1),
    "steep": lambda i, heads: 2.0**i,
    "one head": lambda i, heads: 30.0 if i == 0 else 1.0,
}
STEPS = 64


def counts_of(spread: str, heads: int, mean: int) -> list[int]:
    weights = [SPREADS[spread](i, heads) for i in range(heads)]
    counts = [int(mean * heads * w / sum(weights)) for w in weights]
    counts[-1] += mean * heads - sum(counts)
    return counts


class Steps:
    """A layer that takes steps; each call takes `STEPS` of a fresh one."""

    def __init__(self, trace: Trace, counts: Sequence[int]) -> None:
        self.trace, self.counts = trace, counts
        shape = trace.shape
        draws = torch.Generator().manual_seed(1)
        self.chosen = [torch.randperm(trace.s_prompt, generator=draws)[:n].sort().values for n in counts]
        dtype = trace.keys(0).dtype
        self.q = torch.randn(1, shape.h, 1, shape.d_h, generator=draws).to(dtype)
        self.token = torch.randn(1, shape.h_kv, 1, shape.d_h, generator=draws).to(dtype)

    def __call__(self) -> float:
        store = Store(self.trace, STEPS)
        if len(set(self.counts)) == 1:
            store.place(0, Kept(torch.stack(self.chosen).unsqueeze(0)))
        else:
            store.place(0, Ragged(self.chosen))
        layer = store[0]
        start = perf_counter()
        for t in range(1, STEPS + 1):
            layer.append(self.token, self.token)
            attend(self.q, layer.resident(), Softmax(0.1))
            store.close(0, t)
        return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    for name, (h, h_kv, d_h, s, mean) in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            trace = Trace(ModelShape(name, 1, h, h_kv, d_h, 1 << 20, (0,)), s, torch.device("cpu"))
            draws = torch.Generator().manual_seed(0)
            k, v = (torch.randn(1, h_kv, s, d_h, generator=draws).to(dtype) for _ in "kv")
            trace.add(0, k, v, Softmax(0.1))
            even = Steps(trace, [mean] * h_kv)
            for spread in SPREADS:
                ragged = Steps(trace, counts_of(spread, h_kv, mean))
                shape = f"{name}, {mean} tokens per KV head, {spread}, {max(ragged.counts)} at most"
                record(
                    "ragged heads against equal ones",
                    shape,
                    str(dtype).removeprefix("torch."),
                    measure(even, ragged, pairs),
                )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
