from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.methods.gates.networks import GateScores, fastkvzip
from kvbench.methods.ranking.fastkvzip import FastKVzip
from kvbench.tests.conformance import answers, ours
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.vectors import Check, built, differs, first, load, request

PARAMS = FastKVzip.Params("drawn", 4, Fraction(1, 50), "kvpress")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "fastkvzip").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """Scores of the gates, and the pairs that stay: of all layers together, or of each."""
    meta, x = load(path)
    n_layers, h_kv, s = meta["layers"], meta["Hk"], meta["S"]
    scores = [fastkvzip(torch.from_numpy(x["x"][layer]), weights(x, layer)) for layer in range(n_layers)]
    groups = [[layer] for layer in range(n_layers)] if meta["layerwise"] else [[*range(n_layers)]]
    keep = np.zeros_like(x["keep"])
    for layers in groups:
        shape = ModelShape("v", len(layers), h_kv * meta["G"], h_kv, 4, 1 << 20, tuple(range(len(layers))))
        trace = Trace(shape, s, torch.device("cpu"))
        for i, layer in enumerate(layers):
            trace.add(i, torch.zeros(1, h_kv, s, 4), torch.zeros(1, h_kv, s, 4), Softmax(1.0))
            trace._observed[GateScores("fastkvzip", "drawn"), i] = scores[layer].unsqueeze(0)
        variant = FastKVzip.variant_for(PARAMS, request(str(1 - Fraction(str(meta["compression_ratio"])))), shape, s)
        plan = FastKVzip.Plan(meta["n_sink"], meta["window"], len(layers) * h_kv * s - meta["n_pruned"])
        assert meta["layerwise"] or variant.plan.n_pairs == plan.n_pairs
        row = built(replace(variant, plan=plan).row(trace, 4))
        for i, layer in enumerate(layers):
            for head, positions in enumerate(row.store[i].positions()[0]):
                keep[layer, head, positions[positions >= 0]] = True
    ours = np.stack([each.numpy() for each in scores]) / x["score"]
    problem = first(differs("scores", ours, np.ones_like(x["score"]), 1e-4), differs("kept", keep, x["keep"]))
    return [(path.stem, problem)]


def weights(x: dict[str, np.ndarray], layer: int) -> dict[str, torch.Tensor]:
    names = {
        "q_proj.weight": "q_proj_weight", "q_proj.bias": "q_proj_bias", "k_proj.weight": "k_proj_weight",
        "q_norm.weight": "q_norm_weight", "k_norm.weight": "k_norm_weight", "k_base": "k_base", "b": "b",
    }  # fmt: skip
    return {name: torch.from_numpy(x[f"gate{layer}_{key}"]) for name, key in names.items()}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_fast_kvzip_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


@pytest.mark.parametrize("match", ["budget", "kvpress", "paper"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "glm"])
def test_a_gate_reads_what_the_layers_queries_are_made_of(kind: str, match: str) -> None:
    model = tiny(kind)
    variant = FastKVzip.variant_for(replace(PARAMS, match=match), request("0.3"), model.shape, 120)
    with model.hooked():
        trace = prefill(model, prompt(120), variant.observations)
    assert not trace.inputs
    row = built(variant.row(trace, 4))
    counts = [count for layer in row.store.layers.values() for count in layer.kept_counts()]
    n_pairs = len(counts) * int(120 * Fraction("0.3"))
    assert sum(counts) <= n_pairs + (match == "kvpress") * len(counts) and min(counts) >= 4 + 2
    assert match != "budget" or sum(counts) == n_pairs


def test_beside_others_it_says_what_it_says_alone() -> None:
    one, other = (ours(name) for name in ("fastkvzip", "kvzap"))
    made = [each.kind.variant_for(each.params, request("0.3"), tiny().shape, 240) for each in (one, other)]
    assert answers(made[:1])[0].ids == answers(made)[0].ids


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"leaves nothing beside method.n_sink=4 and the last 1"):
        FastKVzip.variant_for(PARAMS, request(tokens=5), tiny().shape, 120)
