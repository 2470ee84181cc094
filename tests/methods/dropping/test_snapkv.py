from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine import observe
from kvbench.engine.budget import resolve
from kvbench.engine.observe import LastQueries
from kvbench.methods import scorers
from kvbench.methods.base import reported
from kvbench.methods.dropping.snapkv import SnapKV, fit_window
from kvbench.methods.scorers import keep_top, pool_scores, reduce_group, window_votes
from kvbench.tests.vectors import Check, at, built, differs, first, load, request, row_for, row_of, step, trace_of

PARAMS = SnapKV.Params(8, 5, "max", "mean")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "snapkv").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """Scores and kept tokens of the authors' code and of KVCache-Factory's layout per KV head."""
    meta, x = load(path)
    problems = [check_sample({name: array[i : i + 1] for name, array in x.items()}, meta) for i in range(meta["B"])]
    return [(path.stem, first(*problems))]


def check_sample(x: dict[str, np.ndarray], meta: dict[str, Any]) -> str | None:
    row = snapkv_row(vector_heads(x, meta), vector_params(meta), meta["capacity"])
    votes = window_votes(row.trace, LastQueries(row.params.window), row.plan.window, 0)
    raw, pooled = reduce_group(votes, row.trace.shape.h_kv, row.params.reduce), row.scores(0)
    k_out, v_out = (expected_tokens(x, name) for name in ("k_out", "v_out"))
    kept = kept_positions(row)
    problem = first(
        differs("raw scores", raw, x["raw_score"], 1e-5),
        differs("pooled scores", pooled, x["pooled_score"], 1e-5),
        check_kept(kept[0], x["must_keep"][0], x["may_keep"][0], min(meta["capacity"], meta["T"])),
    )
    if problem:
        return problem
    for head, theirs in enumerate(x["kept_idx"][0]):
        ours = kept[0, head].nonzero()[0]
        if np.array_equal(ours, np.sort(theirs)):  # elsewhere a tie was broken in another way
            held_k, held_v = held_tokens(row, head)
            problem = first(
                differs(f"keys of head {head}", held_k, k_out[0, head]),
                differs(f"values of head {head}", held_v, v_out[0, head]),
            )
            if problem:
                return problem
    return None


def vector_heads(x: dict[str, np.ndarray], meta: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """q, k, v as the case sees them: in `query_head` mode K and V were repeated to all query heads."""
    g = meta["Hq"] // meta["Hkv"] if meta["mode"] == "query_head" else 1
    q, k, v = (torch.from_numpy(x[name]) for name in ("q", "k", "v"))
    return q, k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)


def vector_params(meta: dict[str, Any]) -> SnapKV.Params:
    pooling = meta["pooling"].removesuffix("pool")
    return SnapKV.Params(meta["window"], meta["kernel"], pooling, meta["agg"] or "mean")


def kept_positions(row: SnapKV, layer: int = 0) -> np.ndarray:
    """Which tokens of the prompt are on the device before the first step: (1, h_kv, s_prompt) bool."""
    attended = row.store.attended(layer)[:: row.trace.shape.g, : row.trace.s_prompt]
    return attended.unsqueeze(0).numpy()


def held_tokens(row: SnapKV, head: int) -> list[torch.Tensor]:
    """K and V on the device in the order of positions, before the first step."""
    parts = row.store[0].resident()
    return [torch.cat([getattr(part, name)[0, head] for part in parts]) for name in ("k", "v")]


def expected_tokens(x: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The official cache in the order of positions."""
    order = np.argsort(x["kept_idx"], axis=-1)
    return np.take_along_axis(x[name], order[..., None], axis=2)


def check_kept(kept: np.ndarray, must: np.ndarray, may: np.ndarray, total: int) -> str | None:
    """SnapKV.Plan tokens (heads, s) against what has to be and what may be among those before the window."""
    n_past = must.shape[-1]
    past = kept[:, :n_past]
    if not kept[:, n_past:].all():
        return "a token of the window is gone"
    if (sizes := set(kept.sum(-1).tolist())) != {total}:
        return f"heads keep {sorted(sizes)} tokens, expected {total}"
    if missing := int((must & ~past).sum()):
        return f"{missing} tokens that must be kept are gone"
    wrong = int((past & ~(must | may)).sum())
    return f"{wrong} tokens are kept that may not be" if wrong else None


def snapkv_row(qkv: tuple[torch.Tensor, ...], params: SnapKV.Params, cap: int) -> SnapKV:
    """One variant on a prompt of all of q, k, v."""
    q, k, v = qkv
    trace = trace_of(k, v, q.shape[1])
    trace.observe(0, LastQueries(params.window), q, k, trace.softmax[0])
    return row_of(SnapKV, params, trace, request(tokens=cap))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_snapkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def tokens(s: int, h: int = 4, h_kv: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, s, 16, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


@pytest.mark.parametrize("cap", [1, 2, 7, 8, 9, 20, 59])
def test_snapkv_keeps_cap_distinct_tokens_per_head_and_the_window(cap: int) -> None:
    row = snapkv_row(tokens(60), PARAMS, cap)
    kept = kept_positions(row)
    assert (kept.sum(-1) == cap).all()
    assert kept[..., -row.plan.window :].all()
    assert row.store[0].n_kept + row.store[0].n_window == cap


def test_the_step_attends_to_what_was_kept_and_everything_generated() -> None:
    q, k, v = tokens(63)
    row = snapkv_row((q[:, :, :60], k[:, :, :60], v[:, :, :60]), PARAMS, 20)
    kept = kept_positions(row)[0].repeat(2, 0)
    for t in range(1, 4):
        n = 60 + t
        step(row, *(at(x.numpy(), n - 1) for x in (q, k, v)), t=t)
        attended = row.store.attended(0)
        assert attended[:, 60:].all()
        assert np.array_equal(attended[:, :60], kept)
        assert row.store.ledger.entries[-1].attended == 4 * (20 + t)


def test_a_window_as_large_as_the_budget_shrinks_to_half_of_it_and_is_reported() -> None:
    assert [fit_window(cap, 8) for cap in (1, 2, 7, 8, 9)] == [1, 1, 3, 4, 8]
    row = snapkv_row(tokens(60), PARAMS, 7)
    assert row.plan == SnapKV.Plan(7, 3)
    assert row.report() == {"window": 3}
    assert reported(snapkv_row(tokens(60), PARAMS, 9)) == {}


def test_a_prompt_shorter_than_the_window_is_halved_too() -> None:
    row = snapkv_row(tokens(6), PARAMS, 5)
    assert (kept_positions(row).sum(-1) == 5).all()


def test_a_choice_per_query_head_is_that_of_duplicated_kv_heads() -> None:
    """Same sets and same outputs; what is held differs: here the union, there g times the tokens."""
    q, k, v = tokens(63)
    prompt = q[:, :, :60], k[:, :, :60], v[:, :, :60]
    params = replace(PARAMS, reduce="query_head")
    ours = snapkv_row(prompt, params, 20)
    repeated = [x.repeat_interleave(2, 1) for x in (k, v)]
    theirs = snapkv_row((prompt[0], *(x[:, :, :60] for x in repeated)), PARAMS, 20)
    assert not np.array_equal(ours.store.attended(0)[0], ours.store.attended(0)[1])
    for t in range(3):
        out = step(ours, *(at(x.numpy(), 60 + t) for x in (q, k, v)), t=t + 1)
        expected = step(theirs, *(at(x.numpy(), 60 + t) for x in (q, *repeated)), t=t + 1)
        torch.testing.assert_close(out, expected)
        assert torch.equal(ours.store.attended(0), theirs.store.attended(0))
        mine, other = (row.store.ledger.entries[-1] for row in (ours, theirs))
        assert mine.attended == other.attended == 4 * (20 + t + 1)
        union = ours.store.attended(0).view(2, 2, -1).any(1).sum()
        assert mine.resident_kv_bytes == int(union) * ours.store[0].meter.token_bytes < other.resident_kv_bytes


def test_reduction_comes_before_pooling() -> None:
    """With max pooling the order matters: heads that look at different neighbours do not add up."""
    raw = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]])
    assert pool_scores(reduce_group(raw, 1, "mean"), 3, "max").tolist() == [[[0.5, 0.5, 0.5]]]
    assert reduce_group(raw, 1, "sum").tolist() == [[[1.0, 0.0, 1.0]]]
    assert reduce_group(raw, 1, "max").tolist() == [[[1.0, 0.0, 1.0]]]


def test_average_pooling_counts_zeros_beyond_the_ends_and_max_pooling_ignores_them() -> None:
    raw = torch.tensor([[[3.0, 6.0, 9.0]]])
    assert pool_scores(raw, 3, "avg").tolist() == [[[3.0, 6.0, 5.0]]]
    assert pool_scores(raw, 3, "max").tolist() == [[[6.0, 9.0, 9.0]]]
    assert pool_scores(raw - 10, 3, "max").tolist() == [[[-4.0, -1.0, -1.0]]]
    assert torch.equal(pool_scores(raw, 1, "avg"), raw)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=40).flatmap(
        lambda scores: st.tuples(st.just(scores), st.integers(0, len(scores)))
    )
)
def test_of_equal_scores_the_lower_position_is_kept(case: tuple[list[int], int]) -> None:
    scores, n = case
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    kept = keep_top(torch.tensor([[scores]], dtype=torch.float32), n)
    assert kept.tolist() == [[sorted(ranked[:n])]]


@pytest.mark.parametrize("params", [PARAMS, replace(PARAMS, pooling="avg", reduce="max")])
def test_more_budget_never_keeps_less(params: SnapKV.Params) -> None:
    kept = [kept_positions(snapkv_row(tokens(60), params, cap)) for cap in (12, 13, 30, 59)]
    for less, more in pairwise(kept):
        assert (more | ~less).all()


def test_variants_of_one_window_share_the_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return observe.window_scores(*arguments)

    monkeypatch.setattr(scorers, "window_scores", counted)
    q, k, v = tokens(200)
    trace = trace_of(k, v, 4)
    trace.observe(0, LastQueries(8), q, k, trace.softmax[0])
    for ratio in ("1/10", "1/5", "1/2"):
        for params in (PARAMS, replace(PARAMS, pooling="avg", reduce="max")):
            built(row_for(SnapKV, params, request(ratio=ratio), trace, 4))
    assert len(calls) == 1


def test_snapkv_is_compensated_with_half_of_comm_in_tokens() -> None:
    budget = resolve(request(ratio="1/5", comm="1/128"), 10_000, SnapKV.traits.drops)
    _, k, v = tokens(10)
    assert SnapKV.plan_for(PARAMS, budget, trace_of(k, v, 4).shape) == SnapKV.Plan(2039, 8)
    assert budget.ratio == Fraction(1, 5)
