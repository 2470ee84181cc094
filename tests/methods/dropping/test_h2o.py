from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.budget import resolve
from kvbench.engine.causal import causal
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import ColumnSums
from kvbench.engine.passes.trace import Trace
from kvbench.methods.dropping.h2o import H2O
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.methods.evicting import weakest
from kvbench.methods.full import Full
from kvbench.tests.vectors import Check, at, differs, first, load, request, row_of, step, trace_of

PARAMS = H2O.Params(0, Fraction(1, 2), "sum", "inside", "fair")
ROOT = Path(__file__).parents[2] / "golden"
GOLDEN = sorted((ROOT / "h2o").glob("*.npz"))
PQCACHE = sorted((ROOT / "pqcache").glob("h2o_*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """Column sums, and what the authors, KVCache-Factory and PQCache's authors keep by them."""
    meta, x = load(path)
    kind = path.stem.partition("_")[0]
    s, h = meta["T"], meta.get("Hq", meta.get("H"))
    q, k, v = (torch.from_numpy(x[name]) for name in ("q", "k", "v"))
    if kind == "colsum":
        return [(path.stem, check_colsum(q, k, v, x))]
    # Where the case has a score per query head, K and V were repeated to all of them.
    g = max(1, x["prefill_score"].shape[1] // k.shape[1])
    trace = watched(q, k.repeat_interleave(g, 1), v.repeat_interleave(g, 1), s)
    params = replace(PARAMS, reduce="max") if meta.get("agg") == "max" else PARAMS
    if kind == "static":
        params = replace(params, generated="on_top")
        plan = H2O.Plan(0, meta["capacity"] - meta["recent"], meta["recent"])
    elif kind == "realdrop":
        plan = H2O.Plan(0, meta["heavy"], meta["recent"])
    else:
        plan = H2O.Plan(meta["sink"], meta["heavy_budget"], meta["recent_budget"])
    row = row_of(H2O, params, trace, request(tokens=1), plan)
    problem = check_sums(trace, x["prefill_score"], h // x["prefill_score"].shape[1], meta)
    check = {"static": check_static, "realdrop": check_realdrop, "sinks": check_sinks}[kind]
    return [(path.stem, problem or plan_differs(meta, plan) or check(row, x, s))]


def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: int) -> Trace:
    """A trace of the first `s` tokens, its column sums observed."""
    trace = trace_of(k, v, q.shape[1], s)
    trace.observe(0, ColumnSums(), q[:, :, :s], k[:, :, :s], trace.softmax[0])
    return trace


def check_colsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: dict[str, np.ndarray]) -> str | None:
    """The sums by themselves, and from the log-sum-exps that a prefill leaves on a CPU."""
    trace = watched(q, k, v, q.shape[2])
    alone = check_sums(trace, x["col_sum_f64"], 1)
    out, lse = causal(q, k, v, trace.softmax[0])
    trace.observe(0, ColumnSums(), q, k, trace.softmax[0], lse)
    return first(
        alone,
        differs("attention output", out, x["out_f64"], 1e-5),
        differs("log-sum-exps", lse, x["lse_f64"], 1e-5),
        check_sums(trace, x["col_sum_f64"], 1),
    )


def plan_differs(meta: dict[str, Any], plan: H2O.Plan) -> str | None:
    """PQCache's integers, where their two shares make up the whole, as ours do."""
    if "ratio" not in meta or meta["heavy_share"] + meta.get("recent_share", 0.5) != 1:
        return None
    s = meta["T"] if "T" in meta else meta["s"]
    share = Fraction(str(meta["heavy_share"]))
    params = H2O.Params(plan.n_sink, share, "sum", "inside", "official")
    ours = H2O.plan_for(params, resolve(request(ratio=str(meta["ratio"])), s, True), ANY_SHAPE)
    return None if ours == plan else f"plan: {ours}, expected {plan}"


def check_sums(trace: Trace, expected: np.ndarray, g: int, meta: dict[str, Any] | None = None) -> str | None:
    grouped = trace.observed(ColumnSums(), 0).unflatten(1, (-1, g))
    is_max = meta is not None and meta.get("agg") == "max"
    sums = (grouped.amax(2) if is_max else grouped.sum(2)).numpy()
    if meta is not None and meta.get("agg") == "mean":
        sums = sums / g
    worst = np.abs(sums / expected - 1).max()
    rtol = 1e-5 if expected.dtype == np.float64 else 1e-4
    return None if worst <= rtol else f"column sums: off by {worst:.1e} of their size"


def kept_now(row: H2O) -> tuple[np.ndarray, np.ndarray]:
    """Positions in ascending order and their scores, each (h_kv, n)."""
    positions, order = row.store[0].positions().sort(-1)
    return positions[0].numpy(), row.sums[0].gather(-1, order)[0].numpy()


def check_static(row: H2O, x: dict[str, np.ndarray], s: int) -> str | None:
    return differs("kept", kept_now(row)[0], np.sort(x["kept_idx"][0], -1))


def check_realdrop(row: H2O, x: dict[str, np.ndarray], s: int) -> str | None:
    def kept(t: int) -> str | None:
        positions, scores = kept_now(row)
        n = positions.shape[1]
        theirs = x["kept_pos"][t]
        real = theirs >= 0
        if (real.sum(-1) != n).any():
            return f"kept after {t} steps: {n}, expected {real.sum(-1)}"
        expected = x["kept_score"][t][real].reshape(-1, n)
        return first(
            differs(f"kept after {t} steps", positions, theirs[real].reshape(-1, n)),
            differs(f"scores after {t} steps", scores / expected, np.ones_like(expected), 1e-4),
        )

    problem = kept(0)
    for t in range(len(x["decode_out"])):
        out = step(row, at(x["q"], s + t), at(x["k"], s + t), at(x["v"], s + t), t + 1)
        theirs = x["attended_pos"][t]
        expected = np.zeros((len(theirs), s + t + 1), dtype=bool)
        for head, positions in enumerate(theirs):
            expected[head, positions[positions >= 0]] = True
        problem = problem or first(
            differs(f"attended at step {t}", row.store.attended(0), expected),
            differs(f"output of step {t}", out[0, :, 0], x["decode_out"][t], 1e-5),
            kept(t + 1),
        )
    return problem


def check_sinks(row: H2O, x: dict[str, np.ndarray], s: int) -> str | None:
    problem = differs_masked(row, x["score_after"][0])
    for t in range(len(x["decode_out"])):
        out = step(row, at(x["q"], s + t), at(x["k"], s + t), at(x["v"], s + t), t + 1)
        attended = row.store.attended(0)[:: row.trace.shape.g]
        problem = problem or first(
            differs(f"attended at step {t}", attended, x["attended_mask"][t][:, : s + t + 1]),
            differs(f"output of step {t}", out[0, :, 0], x["decode_out"][t], 1e-5),
            differs_masked(row, x["score_after"][t + 1]),
        )
    return problem


def differs_masked(row: H2O, expected: np.ndarray) -> str | None:
    """Scores where hidden tokens are at 0."""
    ours = np.zeros_like(expected)
    np.put_along_axis(ours, *kept_now(row), axis=1)
    return first(
        differs("kept", ours > 0, expected > 0),
        differs("scores", ours[ours > 0] / expected[ours > 0], np.ones((ours > 0).sum()), 1e-4),
    )


def run_weight_vectors(path: Path) -> list[Check]:
    """PQCache's H2O given by prefill scores and decode logits, which take the place of q and k."""
    meta, x = load(path)
    s, h, h_kv = meta["s"], meta["H"], meta["Hk"]
    g, nothing = h // h_kv, torch.zeros(1, h_kv, s, 8)
    trace = trace_of(nothing, nothing, h)
    scores = torch.from_numpy(x["prefill_score"]).float()
    shared = (scores / g).repeat_interleave(g, 0)
    trace._observed[ColumnSums(), 0] = shared.unsqueeze(0)
    plan = H2O.Plan(meta["sinks"], meta["heavy"], meta["recent"])
    row = row_of(H2O, PARAMS, trace, request(tokens=1), plan)
    problem = plan_differs(meta, plan) or differs_masked(row, x["accumulated_after"][0])
    for t, logits in enumerate(torch.from_numpy(x["decode_logits_scaled"]).float()):
        row.store[0].append(nothing[:, :, :1], nothing[:, :, :1])
        slots = row.store[0].positions()[0].repeat_interleave(g, 0)  # (h, n)
        weights = logits.gather(-1, slots).softmax(-1)
        row.store.change(0, row.behind(0, weights.unsqueeze(0)))
        n, in_order = s + t + 1, torch.zeros(h, s + t + 1)
        attended = row.store.attended(0)[::g]
        problem = problem or first(
            differs(f"attended at step {t}", attended, x["attended_mask"][t][:, :n].astype(bool)),
            differs("weights", in_order.scatter(-1, slots, weights), x["weights"][t][:, :n], 1e-5),
            differs_masked(row, x["accumulated_after"][t + 1]),
        )
        row.store.close(0)
    return [(path.stem, problem)]


def tokens(n: int, h: int = 4, h_kv: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, 16, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


ANY_SHAPE = trace_of(*tokens(4)[1:], 4).shape


def take(row: Any, t: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    n = row.trace.s_prompt + t
    return step(row, q[:, :, n : n + 1], k[:, :, n : n + 1], v[:, :, n : n + 1], t + 1)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_h2o_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


@pytest.mark.parametrize("path", PQCACHE, ids=lambda path: path.stem)
def test_h2o_agrees_with_the_baseline_of_pqcache(path: Path) -> None:
    assert [problem for _, problem in run_weight_vectors(path)] == [None]


def test_the_maximum_of_a_group_ranks_unlike_its_sum() -> None:
    q, k, v = tokens(60)
    by_sum, by_max = (
        row_of(H2O, replace(PARAMS, reduce=reduce), watched(q, k, v, 60), request(tokens=20))
        for reduce in ("sum", "max")
    )
    sums = watched(q, k, v, 60).observed(ColumnSums(), 0).unflatten(1, (2, 2))
    expected = sums.amax(2)[..., :50].topk(10).indices.sort().values[0].numpy()
    assert np.array_equal(kept_now(by_max)[0][:, :10], expected)
    assert not np.array_equal(kept_now(by_max)[0], kept_now(by_sum)[0])


@pytest.mark.parametrize("generated", ["inside", "on_top"])
def test_a_cache_for_prompt_and_answer_is_full_attention(generated: str) -> None:
    q, k, v = tokens(60)
    params = replace(PARAMS, generated=generated)
    row = row_of(H2O, params, watched(q, k, v, 50), request(tokens=1), H2O.Plan(0, 40, 20))
    full = row_of(Full, Full.Params(), trace_of(k, v, 4, 50), request(ratio="1"))
    for t in range(10):
        torch.testing.assert_close(take(row, t, q, k, v), take(full, t, q, k, v))
        assert row.store.attended(0).all()


def test_the_whole_budget_evicts_nothing_and_keeps_no_scores() -> None:
    q, k, v = tokens(60)
    row = row_of(H2O, PARAMS, watched(q, k, v, 50), request(ratio="1"))
    for t in range(10):
        take(row, t, q, k, v)
        assert row.store.attended(0).all()
    assert {entry.resident_meta_bytes for entry in row.store.ledger.entries} == {0}


def test_without_heavy_tokens_it_is_a_rolling_streamingllm() -> None:
    q, k, v = tokens(80)
    params = replace(PARAMS, n_sink=4, heavy_share=Fraction(0))
    row = row_of(H2O, params, watched(q, k, v, 50), request(tokens=20))
    rolling = StreamingLLM.Params(4, "inside", "original")
    streaming = row_of(StreamingLLM, rolling, trace_of(k, v, 4, 50), request(tokens=20))
    for t in range(30):
        torch.testing.assert_close(take(row, t, q, k, v), take(streaming, t, q, k, v))
        assert torch.equal(row.store.attended(0), streaming.store.attended(0))


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 20])
def test_the_kept_count_is_constant_once_the_cache_is_full(n_tokens: int) -> None:
    q, k, v = tokens(70)
    row = row_of(H2O, PARAMS, watched(q, k, v, 50), request(tokens=n_tokens))
    for t in range(20):
        take(row, t, q, k, v)
        assert row.store[0].positions().shape == (1, 2, n_tokens)
        assert row.store.attended(0).sum(-1).tolist() == [n_tokens + 1] * 4
    for entry in row.store.ledger.entries:
        assert entry.attended == (n_tokens + 1) * 4
        assert entry.resident_kv_bytes == (n_tokens + 1) * 2 * 16 * 2 * 2
        assert entry.resident_meta_bytes == (n_tokens + 1) * 2 * 4
        assert entry.moved_kv_bytes == entry.moved_meta_bytes == 0


def test_generated_tokens_on_top_evict_nothing() -> None:
    q, k, v = tokens(60)
    params = replace(PARAMS, generated="on_top")
    row = row_of(H2O, params, watched(q, k, v, 50), request(tokens=20))
    prompt = row.store[0].positions()
    for t in range(10):
        take(row, t, q, k, v)
        assert torch.equal(row.store[0].positions()[..., :20], prompt)
    assert [entry.attended // 4 for entry in row.store.ledger.entries] == list(range(21, 31))


def test_a_choice_per_query_head_is_that_of_duplicated_kv_heads() -> None:
    """Same sets and same outputs; what is held differs: here the union, there g times the tokens."""
    q, k, v = tokens(60)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    params = replace(PARAMS, generated="on_top")
    per_head = replace(params, reduce="query_head")
    ours = row_of(H2O, per_head, watched(q, k, v, 50), request(tokens=20))
    theirs = row_of(H2O, params, watched(q, keys, values, 50), request(tokens=20))
    for t in range(3):
        torch.testing.assert_close(take(ours, t, q, k, v), take(theirs, t, q, keys, values))
        attended = ours.store.attended(0)
        assert torch.equal(attended, theirs.store.attended(0))
        assert not torch.equal(attended[0], attended[1])
        mine, other = (row.store.ledger.entries[-1] for row in (ours, theirs))
        assert mine.attended == other.attended == 4 * (21 + t)
        union = int(attended.view(2, 2, -1).any(1).sum())
        assert mine.resident_kv_bytes == union * ours.store[0].meter.token_bytes < other.resident_kv_bytes


def test_scores_travel_with_their_tokens() -> None:
    """Against sums by position, added up apart from the cache and its slots."""
    q, k, v = tokens(80, seed=3)
    row = row_of(H2O, replace(PARAMS, n_sink=2), watched(q, k, v, 50), request(tokens=12))
    sums = torch.zeros(2, 80, dtype=torch.float64)
    sums[:, :50] = row.trace.observed(ColumnSums(), 0)[0].view(2, 2, 50).sum(1)
    moved = 0
    for t in range(30):
        before = row.store[0].positions()
        take(row, t, q, k, v)
        n = 51 + t
        keys = k[0, :, :n].double().repeat_interleave(2, 0)
        logits = (q[0, :, n - 1 : n].double() @ keys.mT)[:, 0] * row.trace.softmax[0].scale
        weights = logits.masked_fill(~row.store.attended(0), -torch.inf).softmax(-1)
        sums[:, :n] += weights.view(2, 2, n).sum(1)
        positions = row.store[0].positions()
        expected = sums.gather(1, positions[0]).float()
        torch.testing.assert_close(row.sums[0][0], expected, atol=1e-5, rtol=1e-5)
        moved += int((before != positions).sum())
        assert {0, 1, *range(n - 5, n)} <= set(positions[0, 0].tolist())
    assert moved >= 30 * 2


def test_of_equal_scores_the_higher_position_goes() -> None:
    positions = torch.tensor([[[0, 9, 3, 7, 8]]])
    scores = torch.tensor([[[0.0, 1.0, 2.0, 2.0, 5.0]]])
    assert weakest(scores, positions, 1, 9).item() == 3
    assert weakest(scores, positions, 0, 10).item() == 0


@pytest.mark.parametrize(
    ("n_tokens", "n_sink", "share", "expected"),
    [
        (2039, 32, "1/2", H2O.Plan(32, 1004, 1003)),
        (2000, 0, "1/2", H2O.Plan(0, 1000, 1000)),
        (8, 32, "1/2", H2O.Plan(2, 3, 3)),
        (1, 0, "1/2", H2O.Plan(0, 1, 0)),
        (10, 0, "1", H2O.Plan(0, 10, 0)),
    ],
)
def test_the_budget_is_divided_into_sinks_heavy_and_recent(
    n_tokens: int, n_sink: int, share: str, expected: H2O.Plan
) -> None:
    params = replace(PARAMS, n_sink=n_sink, heavy_share=Fraction(share))
    budget = resolve(request(tokens=n_tokens), 10_000, True)
    assert H2O.plan_for(params, budget, ANY_SHAPE) == expected


@pytest.mark.parametrize(("comm", "half"), [("0", 996), ("1/128", 1016)])
def test_the_official_rule_puts_sinks_on_top_of_the_ratio(comm: str, half: int) -> None:
    params = replace(PARAMS, n_sink=32, budget_rule="official")
    budget = resolve(request(ratio="1/5", comm=comm), 10_000, True)
    assert H2O.plan_for(params, budget, ANY_SHAPE) == H2O.Plan(32, half, half)


def test_query_heads_do_not_evict_while_decoding() -> None:
    with pytest.raises(ConfigError, match=r"use it with method\.generated=on_top"):
        replace(PARAMS, reduce="query_head")


def test_an_official_share_of_no_token_is_refused() -> None:
    params = replace(PARAMS, budget_rule="official")
    budget = resolve(request(ratio="1/40"), 60, True)
    with pytest.raises(ConfigError, match="keeps no token"):
        H2O.plan_for(params, budget, ANY_SHAPE)
