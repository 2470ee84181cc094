from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.budget import resolve
from kvbench.engine.observe import LastQueries
from kvbench.engine.passes.trace import Trace
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.methods.dropping.pyramidkv import PyramidKV, fit_schedule, pyramid, schedule
from kvbench.methods.dropping.snapkv import SnapKV
from kvbench.tests.methods.dropping.test_snapkv import check_kept, kept_positions, vector_heads, vector_params
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_for

PARAMS = PyramidKV.Params(8, 7, "max", "mean", 20, match_published=False)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "pyramidkv").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """KVCache-Factory's integers, and its kept tokens of layers that all have the same q, k and v."""
    meta, x = load(path)
    return [(path.stem, check_table(x) if "config" in x else check_layers(x, meta))]


def check_table(x: dict[str, np.ndarray]) -> str | None:
    ours = np.full_like(x["kept_total"], -1)
    for line, (s, cap, w, beta, n_layers) in zip(ours, x["config"].tolist(), strict=True):
        line[:n_layers] = np.array(pyramid(s, cap, w, beta, n_layers)) + min(w, s)
    return differs("kept per layer", ours, x["kept_total"])


def check_layers(x: dict[str, np.ndarray], meta: dict[str, Any]) -> str | None:
    plain = vector_params(meta)
    params = PyramidKV.Params(
        plain.window, plain.kernel, plain.pooling, plain.reduce, meta["beta"], match_published=True
    )
    trace = layered(*vector_heads(x, meta), n_layers=meta["layers"], w=meta["window"])
    row = built(row_for(PyramidKV, params, request(tokens=meta["capacity"]), trace, 4))
    counts = [count + row.plan.window for count in row.plan.counts]
    return first(
        differs("kept per layer", counts, x["kept_total"]),
        differs("pooled scores", row.scores(0), x["pooled_score"], 1e-5),
        *(
            check_kept(kept_positions(row, layer)[0], must, may, total)
            for layer, (must, may, total) in enumerate(
                zip(x["must_keep"], x["may_keep"], x["kept_total"].tolist(), strict=True)
            )
        ),
    )


def layered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n_layers: int, w: int, skipped: int = 0) -> Trace:
    """A trace whose layers are all alike; the first `skipped` of the model are none of ours."""
    layers = tuple(range(skipped, skipped + n_layers))
    shape = ModelShape("vectors", skipped + n_layers, q.shape[1], k.shape[1], k.shape[3], 1 << 20, layers)
    trace = Trace(shape, k.shape[2], k.device)
    for layer in layers:
        trace.add(layer, k, v, Softmax(k.shape[3] ** -0.5))
        trace.observe(layer, LastQueries(w), q, k, trace.softmax[layer])
    return trace


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_pyramidkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


@pytest.mark.parametrize(
    ("s", "cap", "w", "n_layers", "first_total", "last_total", "mean"),
    [
        (8192, 2048, 8, 32, 3986, 111, 2048.5),
        (8192, 2048, 32, 32, 3964, 151, 2057.5),
        (8192, 128, 8, 32, 242, 25, 133.5),
        (4000, 2048, 8, 32, 2048, 2048, 2048),
        (4000, 1000, 32, 30, 1920, 93, 1006.5),
    ],
)
def test_the_schedule_has_the_worked_values(
    s: int, cap: int, w: int, n_layers: int, first_total: int, last_total: int, mean: float
) -> None:
    plan = schedule(s, cap, w, 20, n_layers)
    assert (plan.counts[0] + w, plan.counts[-1] + w) == (first_total, last_total)
    assert plan.total / n_layers == mean


def test_a_prompt_shorter_than_cap_is_kept_whole() -> None:
    assert pyramid(33, 40, 8, 20, 4) == [25] * 4


def test_a_single_layer_has_no_pyramid() -> None:
    assert pyramid(4000, 1000, 8, 20, 1) == [992]
    assert fit_schedule(4000, 1000, 8, 20, 1).cap == 1000


def test_a_short_prompt_flattens_the_slope_until_its_first_layer_keeps_everything() -> None:
    steep = pyramid(960, 496, 40, 20, 11)  # 2 * 456 - 22 = 890 of 920 tokens before the window
    assert (steep[0], steep[-1]) == (890, 22 + (890 - 22) % 10)
    flatter = pyramid(920, 496, 40, 20, 11)  # 890 of 880
    assert (flatter[0], flatter[-1]) == (880, 32 + (880 - 32) % 10)


PROMPTS = st.integers(2, 9000).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s - 1)))  # tokens, budget


@given(PROMPTS, st.integers(1, 64), st.integers(1, 40), st.integers(1, 80))
def test_the_mean_is_within_the_budget_and_counts_never_increase(
    prompt: tuple[int, int], window: int, beta: int, n_layers: int
) -> None:
    s, n_tokens = prompt
    plan = fit_schedule(s, n_tokens, window, beta, n_layers)
    assert plan.total <= n_tokens * n_layers
    assert all(0 <= count <= s - plan.window for count in plan.counts)
    assert list(plan.counts) == sorted(plan.counts, reverse=True)


@given(PROMPTS, st.integers(1, 64), st.integers(1, 40), st.integers(1, 80))
def test_no_larger_cap_would_fit(prompt: tuple[int, int], window: int, beta: int, n_layers: int) -> None:
    s, n_tokens = prompt
    plan = fit_schedule(s, n_tokens, window, beta, n_layers)
    for cap in range(plan.cap + 1, n_tokens + 1):
        assert schedule(s, cap, window, beta, n_layers).total > n_tokens * n_layers


@given(PROMPTS, st.integers(1, 64), st.integers(1, 80))
def test_beta_of_one_is_uniform(prompt: tuple[int, int], window: int, n_layers: int) -> None:
    s, n_tokens = prompt
    plan = fit_schedule(s, n_tokens, window, 1, n_layers)
    assert plan.cap == n_tokens
    assert set(plan.counts) == {n_tokens - plan.window}


def tokens(s: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, s, 16, generator=draw) for heads in (4, 2, 2))
    return q, k, v


@pytest.mark.parametrize("cap", [7, 20, 59])
def test_beta_of_one_equals_snapkv_with_the_same_cap(cap: int) -> None:
    trace = layered(*tokens(60), n_layers=4, w=8)
    ours = built(row_for(PyramidKV, replace(PARAMS, beta=1), request(tokens=cap), trace, 4))
    theirs = built(row_for(SnapKV, SnapKV.Params(8, 7, "max", "mean"), request(tokens=cap), trace, 4))
    for layer in range(4):
        assert np.array_equal(kept_positions(ours, layer), kept_positions(theirs, layer))


def test_layers_keep_their_own_counts_by_their_rank_among_the_compressed() -> None:
    trace = layered(*tokens(300), n_layers=5, w=8, skipped=2)
    row = built(row_for(PyramidKV, PARAMS, request(ratio="1/5"), trace, 4))
    assert len(set(row.plan.counts)) == 5
    kept = [count + 8 for count in row.plan.counts]
    for rank, layer in enumerate(trace.shape.attention_layers):
        positions = kept_positions(row, layer)
        assert (positions.sum(-1) == kept[rank]).all()
        assert positions[..., -8:].all()
    assert row.report() == {"kept_tokens": kept}


@pytest.mark.parametrize("ratio", ["0.1", "0.2"])
def test_layers_of_a_long_prompt_keep_different_counts(ratio: str) -> None:
    shape = ModelShape("smollm2-135m", 30, 9, 3, 64, 8192, tuple(range(30)))
    budget = resolve(request(ratio=ratio), 4000, PyramidKV.traits.drops)
    plan = PyramidKV.plan_for(PARAMS, budget, shape)
    assert len(set(plan.counts)) == 30
    assert plan.counts[0] > 10 * plan.counts[-1]
    assert budget.tokens - 15 <= plan.total / 30 <= budget.tokens


def test_published_integers_may_lie_above_the_budget() -> None:
    shape = ModelShape("llama", 32, 32, 8, 128, 8192, tuple(range(32)))
    budget = resolve(request(tokens=128), 8192, PyramidKV.traits.drops)
    published = PyramidKV.plan_for(replace(PARAMS, match_published=True), budget, shape)
    assert (published.cap, published.total / 32) == (128, 133.5)
    ours = PyramidKV.plan_for(PARAMS, budget, shape)
    assert ours.cap < 128
    assert ours.total <= 128 * 32


def test_the_whole_budget_keeps_everything_in_every_layer() -> None:
    trace = layered(*tokens(60), n_layers=3, w=8)
    row = built(row_for(PyramidKV, PARAMS, request(ratio="1"), trace, 4))
    assert all(kept_positions(row, layer).all() for layer in range(3))
    assert [count + row.plan.window for count in row.plan.counts] == [60] * 3
