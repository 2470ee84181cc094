import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from kvbench.engine.budget import resolve
from kvbench.engine.declared import hints_of
from kvbench.engine.search import Units, best_tokens
from kvbench.engine.softmax import Softmax
from kvbench.methods.retrieving.oracle import Oracle, token_scores
from kvbench.tests.vectors import Check, at, differs, first, load, request, row_of, step, trace_of

PARAMS = Oracle.Params("group_sum", 4, Fraction(1, 2), "inside", "fair", "renormalise")
AGGREGATES: tuple[Any, ...] = get_args(hints_of(Oracle.Params)["agg"])
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "oracle").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """The published oracles and the float64 reference of the other aggregates."""
    meta, x = load(path)
    if path.stem.startswith("group_sum"):
        return [(path.stem, run_steps(meta, x))]
    queries = x["q_last"]
    agg, n_local = meta.get("agg", "group_sum"), meta["local"]
    spread = "spread" if meta.get("reallocate_uniformly") else "renormalise"
    params = replace(PARAMS, agg=agg, lost_mass=spread)
    last = meta["T"] - 1
    trace = trace_of(torch.from_numpy(x["k"]), torch.from_numpy(x["v"]), meta["Hq"], last)
    row = row_of(Oracle, params, trace, request(tokens=1), Oracle.Plan(meta["sinks"], n_local, meta["topk"]))
    out = step(row, torch.from_numpy(queries), at(x["k"], last), at(x["v"], last))
    per_kv_head = x["attended"].shape[0] != meta["Hq"]
    attended = row.store.attended(0)[:: meta["Hq"] // meta["Hkv"] if per_kv_head else 1]
    expected = x["out_f64"] if "out_f64" in x else x["out"]
    return [(path.stem, first(
        differs("attended", attended, x["attended"]), differs("output", out[0, :, 0], expected, 1e-5),
        differs("kept mass", kept_mass(row, torch.from_numpy(queries), x["k"]), x["kept_mass_f64"], 1e-5)
        if "kept_mass_f64" in x else None,
    ))]  # fmt: skip


def run_steps(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    s, steps = meta["T"], meta["steps"]
    trace = trace_of(torch.from_numpy(x["k"]), torch.from_numpy(x["v"]), meta["Hq"], s)
    share = Fraction(str(meta["topk_share"]))
    params = replace(PARAMS, n_sink=meta["sinks"], local_share=1 - share, budget_rule="official")
    row = row_of(Oracle, params, trace, request(ratio=str(meta["ratio"])))
    expected = Oracle.Plan(meta["sinks"], meta["local"], meta["topk"])
    if row.plan != expected:
        return f"plan: {row.plan}, expected {expected}"
    for t in range(steps):
        out = step(row, at(x["q"], s + t), at(x["k"], s + t), at(x["v"], s + t), t + 1)
        attended = np.zeros_like(x["attended"][t])
        attended[:, : s + t + 1] = row.store.attended(0)[:: trace.shape.g]
        problem = first(
            differs(f"attended at step {t}", attended, x["attended"][t]),
            differs(f"output of step {t}", out[0, :, 0], x["decode_out"][t], 1e-5),
        )
        if problem:
            return problem
    return None


def run_weight_vectors(path: Path) -> list[Check]:
    """PQCache's oracle given by its logits: the selection, and the weights over it."""
    meta, x = load(path)
    a, k, c, g = meta["sinks"], meta["topk"], meta["local_incl_current"], meta["H"] // meta["Hk"]
    for t, row in enumerate(x["decode_logits_scaled"]):
        n = meta["s"] + t + 1
        logits = torch.from_numpy(row[:, :n].astype(np.float32))
        scores = token_scores(logits.view(1, meta["Hk"], g, n), "group_sum", Softmax(1.0))
        attended = torch.zeros(meta["Hk"], n, dtype=torch.bool)
        attended[:, :a] = attended[:, n - c :] = True
        if (found := best_tokens(scores, Units(k, n - c, a))) is not None:
            attended.scatter_(1, found[0], True)
        per_head = attended.repeat_interleave(g, 0)
        weights = logits.masked_fill(~per_head, -torch.inf).softmax(-1)
        problem = first(
            differs(f"attended at step {t}", per_head, x["attended_mask"][t][:, :n].astype(bool)),
            differs(f"weights of step {t}", weights, x["weights"][t][:, :n], 1e-5),
        )
        if problem:
            return [(path.stem, problem)]
    return [(path.stem, None)]


def kept_mass(row: Any, q: torch.Tensor, k: np.ndarray) -> torch.Tensor:
    """Share of the true attention mass on the attended tokens, per query head."""
    keys = torch.from_numpy(k).double().repeat_interleave(row.trace.shape.g, 1)
    weights = (q.double() @ keys.mT * row.trace.softmax[0].scale).softmax(-1)[0, :, 0]
    return (weights * row.store.attended(0)).sum(-1)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_oracle_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def random_tokens(h: int, h_kv: int, n: int, d_h: int = 16, seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, heads, n, d_h, generator=draw) for heads in (h, h_kv, h_kv))


@pytest.mark.parametrize("seed", range(4))
def test_group_sum_keeps_more_mass_than_any_other_shared_selection(seed: int) -> None:
    q, k, v = random_tokens(6, 2, 80, seed=seed)
    trace = trace_of(k, v, 6, 79)
    row = row_of(Oracle, PARAMS, trace, request(tokens=24))
    step(row, q[:, :, 79:], k[:, :, 79:], v[:, :, 79:])
    best = kept_mass(row, q[:, :, 79:], k.numpy()).view(2, 3).sum(-1)
    logits = q[:, :, 79:].double() @ k.double().repeat_interleave(3, 1).mT * trace.softmax[0].scale
    weights = logits.softmax(-1)[0, :, 0]
    fixed = torch.zeros(80, dtype=torch.bool)
    fixed[[*row.protected(0)]] = True
    draw = torch.Generator().manual_seed(seed)
    for _ in range(50):
        other = fixed.clone()
        free = (~fixed).nonzero().flatten()
        other[free[torch.randperm(len(free), generator=draw)[: row.plan.k]]] = True
        assert ((weights * other).sum(-1).view(2, 3).sum(-1) <= best + 1e-12).all()


def test_each_query_head_keeps_at_least_the_mass_of_a_shared_selection() -> None:
    q, k, v = random_tokens(6, 2, 80)
    masses = {}
    for agg in AGGREGATES:
        row = row_of(Oracle, replace(PARAMS, agg=agg), trace_of(k, v, 6, 79), request(tokens=24))
        step(row, q[:, :, 79:], k[:, :, 79:], v[:, :, 79:])
        masses[agg] = kept_mass(row, q[:, :, 79:], k.numpy())
    for agg in AGGREGATES:
        assert (masses["query_head"] >= masses[agg] - 1e-12).all(), agg


def test_all_aggregates_agree_without_groups() -> None:
    q, k, v = random_tokens(3, 3, 60)
    sets = []
    for agg in (agg for agg in AGGREGATES if not agg.startswith("layer_")):  # which have one set for all heads
        row = row_of(Oracle, replace(PARAMS, agg=agg), trace_of(k, v, 3, 59), request(tokens=20))
        step(row, q[:, :, 59:], k[:, :, 59:], v[:, :, 59:])
        sets.append(row.store.attended(0))
    assert all(torch.equal(sets[0], other) for other in sets[1:])


def test_aggregates_differ_where_heads_of_a_group_differ_in_sharpness() -> None:
    # One head has a sharp peak on token 2, the other two prefer token 1 a little.
    logits = torch.tensor([[[[0.0, 1.0, 9.0, 0.0], [0.0, 5.0, 0.0, 4.9], [0.0, 5.0, 0.0, 4.9]]]])
    best = {
        agg: token_scores(logits, agg, Softmax(1.0))[0, 0].argmax().item()
        for agg in ("group_sum", "group_max", "group_logit_mean")
    }
    assert best == {"group_sum": 1, "group_max": 2, "group_logit_mean": 1}


def test_without_selected_tokens_it_is_streamingllm() -> None:
    from kvbench.methods.dropping.streamingllm import StreamingLLM

    q, k, v = random_tokens(4, 2, 60)
    params = StreamingLLM.Params(4, "inside", "original")
    oracle = row_of(Oracle, PARAMS, trace_of(k, v, 4, 50), request(tokens=20), Oracle.Plan(4, 13, 0))
    streaming = row_of(StreamingLLM, params, trace_of(k, v, 4, 50), request(tokens=16), StreamingLLM.Plan(4, 13))
    for t in range(10):
        tq, tk, tv = (x[:, :, 50 + t : 51 + t] for x in (q, k, v))
        torch.testing.assert_close(
            step(oracle, tq, tk, tv, t + 1), step(streaming, tq, tk, tv, t + 1), atol=1e-6, rtol=0
        )
        assert torch.equal(oracle.store.attended(0), streaming.store.attended(0))


def test_spreading_the_lost_mass_gives_dropped_tokens_their_mean() -> None:
    q, k, v = random_tokens(2, 1, 40)
    row = row_of(Oracle, replace(PARAMS, lost_mass="spread"), trace_of(k, v, 2, 39), request(tokens=12))
    out = step(row, q[:, :, 39:], k[:, :, 39:], v[:, :, 39:])
    weights = (q[:, :, 39:] @ k.repeat_interleave(2, 1).mT * 0.25).softmax(-1)[0, :, 0]  # (h, n)
    kept = row.store.attended(0)
    lost = (weights * ~kept).sum(-1, keepdim=True)
    expected = torch.where(kept, weights, lost / (~kept).sum(-1, keepdim=True)) @ v[0, 0]
    torch.testing.assert_close(out[0, :, 0], expected, atol=1e-6, rtol=0)


@pytest.mark.gpu
def test_lost_mass_is_spread_over_a_host_tier_too() -> None:
    q, k, v = random_tokens(2, 1, 41)
    params, outs = replace(PARAMS, lost_mass="spread"), []
    for device in ("cpu", "cuda"):
        trace = trace_of(k.to(device), v.to(device), 2, 38)
        row = row_of(Oracle, params, trace, request(tokens=12))
        trace.settle()
        for n in range(38, 41):
            q_new, k_new, v_new = (x[:, :, n : n + 1].to(device) for x in (q, k, v))
            outs.append(step(row, q_new, k_new, v_new, n - 37).cpu())
    torch.testing.assert_close(outs[3:], outs[:3], atol=1e-5, rtol=0)


def test_the_official_integers_are_cut_off_in_double_precision() -> None:
    """As by PQCache's authors, to whom 0.29 of 100 tokens are 28."""
    params = replace(PARAMS, n_sink=0, budget_rule="official")
    budget = resolve(request(ratio="0.29"), 100, drops=False)
    _, k, v = random_tokens(4, 2, 8)
    assert Oracle.plan_for(params, budget, trace_of(k, v, 4).shape) == Oracle.Plan(0, 14, 14)


def test_its_search_is_counted_apart_from_what_a_budget_prices() -> None:
    q, k, v = random_tokens(6, 2, 80)
    row = row_of(Oracle, PARAMS, trace_of(k, v, 6, 79), request(tokens=24))
    step(row, q[:, :, 79:], k[:, :, 79:], v[:, :, 79:])
    entry = row.store.ledger.entries[0]
    assert entry.moved_meta_bytes == 0
    assert entry.searched_bytes == 2 * 80 * 16 * 2  # KV heads x tokens x dimensions x 2 bytes
    assert entry.moved_kv_bytes == 2 * row.plan.k * 2 * 16 * 2


def test_vector_parameters_are_readable() -> None:
    assert GOLDEN, "tests/golden/oracle is part of the repository"
    for path in GOLDEN:
        with np.load(path) as file:
            assert json.loads(str(file["meta"]))["source"]
