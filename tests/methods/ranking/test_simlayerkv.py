from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import MeanWeights
from kvbench.engine.passes.trace import Trace
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.methods.dropping.allocators import whole_layers
from kvbench.methods.ranking.simlayerkv import SimLayerKV, lazy_share
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_of, trace_of

PARAMS = SimLayerKV.Params(4, None, None, 1, "counted")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "simlayerkv").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """kvpress' and the authors' shares, and what a lazy layer keeps in both; just above its share it keeps all."""
    meta, x = load(path)
    k = torch.from_numpy(x["k"])
    q = torch.nn.functional.pad(torch.from_numpy(x["q_window"]), (0, 0, meta["S"] - x["q_window"].shape[2], 0))
    problems = []
    pairs: Any = (("cut", meta["n_last"], "kvpress"), ("counted", 1, "authors"))
    for own_columns, n_last, name in pairs:
        share = meta[f"share_{name}"]
        for threshold, wanted in ((share - 1e-4, x[f"kept_idx_{name}"]), (share + 1e-4, np.arange(meta["S"]))):
            trace = trace_of(k, k, meta["H"])
            trace.observe(0, MeanWeights(n_last), q, k, Softmax(k.shape[3] ** -0.5))
            params = SimLayerKV.Params(meta["n_initial"], meta["n_recent"], threshold, n_last, own_columns)
            row = row_of(SimLayerKV, params, trace, request(ratio="1"))
            kept = row.store.attended(0)[0, : meta["S"]].nonzero()[:, 0]
            problems += [differs(f"share {name}", row.shares[0], share, 1e-5), differs(f"kept {name}", kept, wanted)]
    return [(path.stem, first(*problems))]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_simlayerkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def row(n: int, n_layers: int = 5, s: int = 90, **changes: Any) -> Any:
    draw = torch.Generator().manual_seed(2)
    trace = Trace(ModelShape("layers", n_layers, 4, 2, 8, 1 << 20, tuple(range(n_layers))), s, torch.device("cpu"))
    for layer in range(n_layers):
        q, k = torch.randn(1, 4, s, 8, generator=draw), torch.randn(1, 2, s, 8, generator=draw)
        trace.add(layer, k, k, Softmax(8**-0.5))
        trace.observe(layer, MeanWeights(1), q, k, Softmax(8**-0.5))
    variant = SimLayerKV.variant_for(replace(PARAMS, **changes), request(tokens=n), trace.shape, s)
    return built(variant.row(trace, 8))


@pytest.mark.parametrize("n", [8, 20, 41, 60, 89])
def test_the_budget_is_used_to_the_last_token_and_whole_layers_are_the_least_lazy(n: int) -> None:
    made = row(n)
    counts = [made.store[layer].kept_counts()[0] for layer in range(5)]
    assert sum(counts) == 5 * n
    whole = [layer for layer in range(5) if counts[layer] == 90]
    assert len(whole) == made.report()["whole_layers"] == 5 * (n - n // 2) // (90 - n // 2)
    lazy = [made.shares[layer] for layer in range(5) if layer not in whole]
    assert max([made.shares[layer] for layer in whole], default=0) <= min(lazy, default=1)


def test_no_whole_layer_is_streaming_and_a_threshold_of_0_as_well() -> None:
    for made in (row(10), row(90, threshold=0.0, n_recent=12)):
        n_sink, n = made.plan.n_sink, made.store[0].kept_counts()[0]
        kept = made.store.attended(0)[0, :90].nonzero()[:, 0].tolist()
        assert made.report()["whole_layers"] == 0 and kept == [*range(n_sink), *range(90 - n + n_sink, 90)]


def test_a_prompt_that_a_lazy_layer_holds_whole_is_not_cut() -> None:
    made = row(90, threshold=0.0, n_recent=86)
    assert made.report()["whole_layers"] == 5 and set(made.shares.values()) == {0.0}


def test_layers_are_whole_by_share_and_lower_first_among_equals() -> None:
    assert whole_layers([0.5, 0.2, 0.5, 0.9], 10, 40, 70) == [70, 70, 10, 10]
    assert whole_layers([0.5, 0.5, 0.5], 10, 35, 70) == [70, 18, 17]
    assert whole_layers([0.5, 0.5], 70, 70, 70) == [70, 70]


def test_a_share_is_of_the_mean_query() -> None:
    weights = torch.tensor([[0.5, 0.1, 0.2, 0.2, 0.0], [0.1, 0.1, 0.2, 0.2, 0.4]])
    assert lazy_share(weights, 1, 1, 0) == pytest.approx(0.5)
    assert lazy_share(weights, 1, 1, 1) == pytest.approx(0.5)
    assert lazy_share(weights, 1, 2, 2) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"threshold": 0.5}, "give method.n_recent=1024 with it"),
        ({"n_recent": 2, "n_last": 2, "own_columns": "cut"}, "leaves no recent token"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(PARAMS, **changes)
