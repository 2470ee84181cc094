"""What clusters of keys lose, by the metric that made them: why a metric finds more or fewer of the true top tokens.

A cluster is ranked by its mean key c, and all of its tokens with it. What that loses of a key k is k - c; what it loses
of a logit is q·(k - c). Both are printed as shares of what there is without clusters, the variance over the prompt
(a constant in all logits changes nothing), beside how much the keys' lengths vary, over the prompt and within a
cluster, and how much of the keys' variance lies in their two largest channels.

Queries are the prompt's last 32, of all heads of a group. Clusters as `methods/retrieving/clusterkv.py` makes them.
Figures are means over KV heads and layers but the first two.

Not here: recall itself (`python run.py task=fidelity`).
"""

import argparse

import torch
from torch import Tensor

from kvbench.engine.checkpoints.load import load
from kvbench.engine.observe import LastQueries
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.sampling.draws import seeded
from kvbench.kernels.kmeans import draw_points, kmeans
from kvbench.methods.calibration.prose import embedded_prose

N_SINK, N_QUERIES, ROUNDS, FIRST_LAYER = 16, 32, 20, 2
METRICS = ("cosine", "l2", "dot")


def share_lost(x: Tensor, rest: Tensor) -> Tensor:
    """Variance of the rest relative to that of x, both over tokens (…, s)."""
    return rest.pow(2).mean(-1) / x.var(-1, correction=0)


def figures(trace: Trace, layer: int, metric: str, seed: int) -> dict[str, float]:
    """Of one layer, means over KV heads."""
    keys = trace.keys(layer)[0, :, N_SINK:].float()  # (h_kv, s, d_h)
    h_kv, _, d_h = keys.shape
    start = draw_points(keys, trace.s_prompt // 80, seeded(seed, layer, 0))
    made = kmeans(keys, start, ROUNDS, metric)
    labels = made.labels.unsqueeze(-1).expand(-1, -1, d_h)
    counts = made.sizes.clamp(min=1).unsqueeze(-1)
    means = torch.zeros_like(made.centroids).scatter_add_(1, labels, keys) / counts
    rest = keys - means.gather(1, labels)  # (h_kv, s, d_h)
    q = trace.observed(LastQueries(N_QUERIES), layer)[0].float().reshape(h_kv, -1, d_h)
    lengths = keys.norm(dim=-1)
    mean_lengths = torch.zeros(made.sizes.shape).scatter_add_(1, made.labels, lengths)
    spread = lengths - (mean_lengths / counts.squeeze(-1)).gather(1, made.labels)
    variances = keys.var(1)  # (h_kv, d_h)
    return {
        "keys lost": share_lost(keys.mT, rest.mT).mul(variances).sum(-1).div(variances.sum(-1)).mean().item(),
        "logits lost": share_lost(q @ keys.mT, q @ rest.mT).mean().item(),
        "lengths vary": (lengths.std(-1) / lengths.mean(-1)).mean().item(),
        "within a cluster": (spread.pow(2).mean(-1).sqrt() / lengths.mean(-1)).mean().item(),
        "top two channels": (variances.topk(2).values.sum(-1) / variances.sum(-1)).mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = load("smollm2-135m", "embedded", dtype="float32", device="cpu")
    ids = model.tokenizer.encode(embedded_prose())[: options.tokens]
    with model.hooked():
        trace = prefill(model, ids, [LastQueries(N_QUERIES)])
    layers = [layer for layer in trace.shape.attention_layers if layer >= FIRST_LAYER]
    for i, metric in enumerate(METRICS):
        found = [figures(trace, layer, metric, options.seed) for layer in layers]
        if not i:
            print("| metric | " + " | ".join(found[0]) + " |")
            print("|---|" + "---|" * len(found[0]))
        means = [sum(each[name] for each in found) / len(found) for name in found[0]]
        print(f"| {metric} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")


if __name__ == "__main__":
    main()
