"""Clusters in order of their scores and the first tokens of them against torch. Parity comes first.

Not here: making clusters (`kernels/kmeans.py`), attention over their tokens (`bench_select_attend.py`).
"""

import argparse

import torch

from kvbench.benchmarks.bench_pages import timed
from kvbench.benchmarks.paired import measure, record
from kvbench.kernels.clusters import (
    cluster_order,
    cluster_order_torch,
    cluster_tokens,
    cluster_tokens_torch,
)

SHAPES = [(9, 3, 100, 8000, 400), (32, 8, 409, 32768, 1024)]  # h, h_kv, clusters, tokens, chosen


def bench(h: int, h_kv: int, c: int, s: int, k: int, pairs: int) -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, c, (h_kv, s), generator=draw)
    sizes = torch.stack([torch.bincount(mine, minlength=c) for mine in labels])
    ends, tokens = sizes.cumsum(-1), labels.sort(dim=-1, stable=True).indices
    scores = torch.randn(1, h, c, generator=draw)
    order = cluster_order(scores)
    assert torch.equal(order, cluster_order_torch(scores)), "the order is wrong"
    expected = cluster_tokens_torch(order, sizes, ends, tokens, k)
    assert torch.equal(cluster_tokens(order, sizes, ends, tokens, k), expected), "wrong tokens"
    shape = f"{k} of {s} tokens in {c} clusters, {h}/{h_kv} heads"
    pair = timed(lambda: cluster_order_torch(scores)), timed(lambda: cluster_order(scores))
    record("cluster_order", shape, "float32", measure(*pair, pairs))
    pair = (
        timed(lambda: cluster_tokens_torch(order, sizes, ends, tokens, k)),
        timed(lambda: cluster_tokens(order, sizes, ends, tokens, k)),
    )
    record("cluster_tokens", shape, "int64", measure(*pair, pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21)
    options = parser.parse_args()
    for shape in SHAPES:
        bench(*shape, options.pairs)


if __name__ == "__main__":
    main()
