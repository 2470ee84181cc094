from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import key_bytes, resolve
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import attend_group
from kvbench.methods.base import reported
from kvbench.methods.full import Full
from kvbench.methods.retrieving.oracle import Oracle
from kvbench.methods.retrieving.sparq import (
    SparQ,
    columns_at,
    covered_mass,
    n_components,
    query_weights,
    top_components,
)
from kvbench.tests.vectors import Check, at, built, differs, first, load, request, row_for, row_of, step, trace_of

PARAMS = SparQ.Params(4, Fraction(1, 2), True, "columns", "on_top", "fair")
PUBLISHED = replace(PARAMS, n_sink=0, generated="inside")
ROOT = Path(__file__).parents[2] / "golden"
GOLDEN = sorted((ROOT / "sparq").glob("*.npz"))


# --- Reference vectors ------------------------------------------------------------------------


def run_vectors(path: Path) -> list[Check]:
    """Authors' code, one step with all its intermediate values; PQCache's authors' code, several steps with sinks."""
    meta, x = load(path)
    x = {name: array for name, array in x.items() if array.ndim}
    if "decode_out" in x:
        return [(path.stem, check_steps(meta, x))]
    if meta.get("B", 1) == 1:
        return [(path.stem, check_step(meta, x))]
    rows = [{name: array[[b]] for name, array in x.items()} for b in range(meta["B"])]
    for row in rows:
        row |= {name: array[0] for name, array in row.items() if name not in ("q", "k", "v")}
    return [(f"{path.stem}/{b}", check_step(meta, row)) for b, row in enumerate(rows)]


def regions(meta: dict[str, Any]) -> SparQ.Plan:
    """Theirs: k has the local tokens inside; current token and sinks come on top."""
    k = meta["k"] if "k" in meta else meta["budget"]
    local = meta["local_k"] if "local_k" in meta else meta["local"]
    return SparQ.Plan(meta.get("sinks", 0), local + 1, k - local, meta["r"])


def check_step(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    last, g = meta["T"] - 1, meta["Hq"] // meta["Hkv"]
    q, k, v = (torch.from_numpy(x[name]) for name in ("q", "k", "v"))
    params = replace(PUBLISHED, reallocate=meta["reallocate"])
    for layout in ("columns", "rows"):
        trace = trace_of(k, v, meta["Hq"], last)
        row = row_of(SparQ, replace(params, layout=layout), trace, request(tokens=1, comm="1"), regions(meta))
        out = step(row, q, k[:, :, last:], v[:, :, last:])
        components = top_components(q, meta["Hkv"], meta["r"])
        weights = query_weights(q, components, trace.softmax[0].scale)
        logits = SparQ.scored([row], 0, q)[0][1]
        attended = row.store.attended(0)[::g]
        selected = np.zeros(attended.shape, dtype=bool)
        np.put_along_axis(selected, x["selected"].astype(np.int64), True, 1)
        # Coverage is in the scale alone: |weights| = |q| * scale / sqrt(coverage).
        chosen = q.view(1, meta["Hkv"], g, -1).gather(-1, components.unsqueeze(2).expand(-1, -1, g, -1))
        coverage = (chosen.abs().sum(-1) * trace.softmax[0].scale / weights.abs().sum(-1)).square()
        alpha = torch.ones(meta["Hkv"], g) if row.covered is None else row.covered[0]
        problem = first(
            differs("components", components[0].sort(-1).values, np.sort(x["dims"], -1)),
            differs("coverage", coverage[0], x["coverage"], 1e-5),
            differs("approximate logits", logits[0], x["approx_logits"], 2e-5),
            differs("selected", attended, selected),
            differs("alpha", alpha, x["alpha"], 1e-5) if meta["reallocate"] else None,
            differs("mean of V", row.means[0][0, :, 0], x["mean_v"], 1e-5) if row.means else None,
            differs("output", out[0, :, 0], x["out"], 2e-5),
        )
        if problem:
            return f"{layout}: {problem}"
    return None


def check_steps(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    s = meta["T"]
    params = replace(PUBLISHED, n_sink=meta["sinks"], reallocate=meta["reallocate"])
    trace = trace_of(torch.from_numpy(x["k"]), torch.from_numpy(x["v"]), meta["Hq"], s)
    row = row_of(SparQ, params, trace, request(tokens=1, comm="1"), regions(meta), max(64, meta["steps"]))
    atol = 2e-3 if meta["reallocate"] else 2e-5  # their mean of V passes through float16
    for t in range(meta["steps"]):
        out = step(row, at(x["q"], s + t), at(x["k"], s + t), at(x["v"], s + t), t + 1)
        attended = np.zeros(x["attended"][t].shape, dtype=bool)
        attended[:, : s + t + 1] = row.store.attended(0)[:: trace.shape.g]
        problem = first(
            differs(f"attended at step {t}", attended, x["attended"][t]),
            differs(f"output of step {t}", out[0, :, 0], x["decode_out"][t], atol),
        )
        if problem:
            return problem
    return None


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_sparq_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def test_reference_vectors_are_here() -> None:
    assert GOLDEN, "tests/golden/sparq is part of the repository"


def test_budgets_agree_with_the_table() -> None:
    """`r` and the tokens that PQCache's authors attend to."""
    for path in sorted((ROOT / "pqcache").glob("budget_*.npz")):
        _, x = load(path)
        for line in x["table"]:
            row = dict(zip(map(str, x["columns"]), map(int, line), strict=True))
            shape = ModelShape("any", 1, row["Hk"], row["Hk"], row["d_h"], 1 << 20, (0,))
            asked = request(
                f"{row['ratio_num']}/{row['ratio_den']}",
                comm=f"{row['comm_num']}/{row['comm_den']}",
            )
            budget = resolve(asked, row["s"], SparQ.traits.drops)
            params = replace(PARAMS, n_sink=row["sinks"])
            fair = SparQ.plan_for(params, budget, shape)
            assert fair == SparQ.Plan(row["n_sink"], row["local"] + 1, row["k"], row["sparq_r"])
            theirs = SparQ.plan_for(replace(params, budget_rule="official"), budget, shape)
            total = theirs.n_sink + theirs.n_window + theirs.k
            assert total == row["off_sparq_total"]


# --- Against the definition -------------------------------------------------------------------


def random_tokens(h: int, h_kv: int, n: int, d_h: int = 16, seed: int = 0) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, heads, n, d_h, generator=draw) for heads in (h, h_kv, h_kv))


def run(row: Any, q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
    """Output and attended tokens of every step."""
    steps = []
    for t in range(start, stop):
        tq, tk, tv = (x[:, :, t : t + 1] for x in (q, k, v))
        out = step(row, tq, tk, tv, t - start + 1)
        steps.append((out, row.store.attended(0)))
    return steps


def by_definition(q: Tensor, k: Tensor, v: Tensor, plan: SparQ.Plan, n_window: int) -> tuple[Tensor, Tensor]:
    """One step in float64, a query head at a time: output (h, d_h) and what each KV head selects (h_kv, n)."""
    q, k, v = q[0, :, 0].double(), k[0].double(), v[0].double()
    (h, d_h), (h_kv, n, _) = q.shape, k.shape
    g = h // h_kv
    out, selected = torch.zeros(h, d_h).double(), torch.zeros(h_kv, n, dtype=torch.bool)
    for head in range(h_kv):
        group = q[head * g : (head + 1) * g]
        some = group.abs().sum(0).argsort(descending=True)[: plan.r]
        approx = []
        for one in group:
            share = one[some].abs().sum() / one.abs().sum()
            approx.append(k[head][:, some] @ one[some] / (d_h * share).sqrt())
        scores = torch.stack(approx).sum(0)
        scores[: plan.n_sink] = scores[n - n_window :] = torch.inf
        selected[head, scores.argsort(descending=True)[: plan.n_sink + n_window + plan.k]] = True
        for i, one in enumerate(group):
            covered = approx[i].softmax(0)[selected[head]].sum()
            weights = (k[head][selected[head]] @ one / d_h**0.5).softmax(0)
            exact = weights @ v[head][selected[head]]
            out[head * g + i] = covered * exact + (1 - covered) * v[head].mean(0)
    return out, selected


@pytest.mark.parametrize("layout", ["columns", "rows"])
@pytest.mark.parametrize("generated", ["on_top", "inside"])
@pytest.mark.parametrize("r", [1, 3, 16])
def test_every_step_is_the_definition(r: int, generated: str, layout: str) -> None:
    q, k, v = random_tokens(6, 2, 110)
    plan = SparQ.Plan(3, 8, 12, r)
    params = replace(PARAMS, layout=layout, generated=generated)
    row = row_of(SparQ, params, trace_of(k, v, 6, 90), request(tokens=22, comm="1"), plan)
    for t, (out, attended) in enumerate(run(row, q, k, v, 90, 110)):
        n, n_window = 91 + t, 8 + (t if generated == "on_top" else 0)
        expected, selected = by_definition(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], plan, n_window)
        assert torch.equal(attended[::3], selected)
        torch.testing.assert_close(out[0, :, 0].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("generated", ["on_top", "inside"])
def test_with_all_components_it_is_the_oracle_of_mean_logits(generated: Any) -> None:
    q, k, v = random_tokens(6, 2, 80)
    params = replace(PARAMS, local_share=Fraction(0), reallocate=False, generated=generated)
    oracle = Oracle.Params("group_logit_mean", 4, Fraction(0), generated, "fair", "renormalise")
    asked = request(tokens=24, comm="1")
    rows = [row_of(kind, p, trace_of(k, v, 6, 60), asked) for kind, p in ((SparQ, params), (Oracle, oracle))]
    ours, theirs = (run(row, q, k, v, 60, 80) for row in rows)
    for (out, attended), (oracle_out, oracle_attended) in zip(ours, theirs, strict=True):
        assert torch.equal(attended, oracle_attended)
        torch.testing.assert_close(out, oracle_out, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_everything_is_selected_it_is_full_attention(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in random_tokens(6, 2, 60))
    row = row_of(SparQ, PUBLISHED, trace_of(k, v, 6, 50), request(tokens=40, comm="1/16"), SparQ.Plan(0, 6, 200, 1))
    full = built(row_for(Full, Full.Params(), request("1"), trace_of(k, v, 6, 50), 64))
    for (out, attended), (expected, _) in zip(run(row, q, k, v, 50, 60), run(full, q, k, v, 50, 60), strict=True):
        assert attended.all()
        assert row.covered is None
        atol = 1e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(out, expected, atol=atol, rtol=0)


def test_the_whole_budget_is_full_attention_though_comm_pays_for_nothing() -> None:
    q, k, v = random_tokens(6, 2, 60)
    row = row_of(SparQ, PARAMS, trace_of(k, v, 6, 50), request("1", comm="0"))
    full = built(row_for(Full, Full.Params(), request("1"), trace_of(k, v, 6, 50), 64))
    for (out, _), (expected, _) in zip(run(row, q, k, v, 50, 60), run(full, q, k, v, 50, 60), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.parametrize("seed", range(5))
def test_outputs_lie_within_the_hull_of_v(seed: int) -> None:
    q, k, v = random_tokens(6, 2, 80, seed=seed)
    row = row_of(SparQ, PARAMS, trace_of(k, v, 6, 70), request(tokens=20, comm="1/8"))
    for t, (out, _) in enumerate(run(row, q, k, v, 70, 80)):
        per_head = v[0, :, : 71 + t].repeat_interleave(3, 0)  # (h, n, d_h)
        assert (out[0, :, 0] <= per_head.amax(1) + 1e-6).all()
        assert (out[0, :, 0] >= per_head.amin(1) - 1e-6).all()


def test_what_is_missing_goes_to_the_mean_of_v() -> None:
    # All logits are zero: k + 1 of n tokens have that share of the mass, and attention is their plain mean.
    q, k, v = random_tokens(2, 1, 40)
    q = torch.zeros_like(q)
    row = row_of(SparQ, PUBLISHED, trace_of(k, v, 2, 39), request(tokens=12, comm="1/8"), SparQ.Plan(0, 4, 9, 2))
    out, attended = run(row, q, k, v, 39, 40)[0]
    assert attended.sum(-1).tolist() == [13, 13]
    torch.testing.assert_close(row.covered, torch.full((1, 1, 2), 13 / 40))
    expected = 13 / 40 * v[0, 0][attended[0]].mean(0) + 27 / 40 * v[0, 0].mean(0)
    torch.testing.assert_close(out[0, 0, 0], expected, atol=1e-6, rtol=0)


def test_the_running_mean_is_the_mean_of_all_tokens_in_float32() -> None:
    q, k, v = (x.bfloat16() for x in random_tokens(2, 1, 400))
    row = row_of(SparQ, PARAMS, trace_of(k, v, 2, 300), request(tokens=40, comm="1/8"), n_new=100)
    run(row, q, k, v, 300, 400)
    assert row.means[0].dtype == torch.float32
    torch.testing.assert_close(row.means[0][0, :, 0], v[0].float().mean(1), atol=1e-6, rtol=0)


def test_a_group_sums_absolute_values_of_its_queries() -> None:
    # Component 0 cancels between the two heads, component 3 does not.
    q = torch.tensor([[5.0, 0.0, 0.0, 2.0], [-5.0, 0.0, 1.0, 2.0]]).view(1, 2, 1, 4)
    assert top_components(q, 1, 2).tolist() == [[[0, 3]]]
    assert top_components(q, 2, 1).tolist() == [[[0], [0]]]


def test_of_components_with_equal_sums_the_first_are_read() -> None:
    q = torch.ones(1, 2, 1, 64, dtype=torch.bfloat16)
    q[..., 40] = 3
    assert top_components(q, 1, 4).tolist() == [[[40, 0, 1, 2]]]


def test_the_scale_is_by_query_head_from_its_own_share() -> None:
    q = torch.tensor([[3.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 7.0], [0.0] * 4]).view(1, 3, 1, 4)
    weights = query_weights(q, torch.tensor([[[0]]]), 0.5)[0, 0, :, 0]
    # Three quarters of the first are covered, nothing of the others: no score, and no NaN.
    torch.testing.assert_close(weights, torch.tensor([3.0 / (4 * 0.75) ** 0.5, 0.0, 0.0]))


def test_covered_mass_counts_each_attended_token_once() -> None:
    logits = torch.randn(1, 2, 3, 30, generator=torch.Generator().manual_seed(0))
    idx = torch.tensor([[[5, 9, 20], [7, 6, 11]]])
    mass = covered_mass(logits, idx, 4, 25, Softmax(1.0))
    for head in range(2):
        attended = [*range(4), *idx[0, head].tolist(), *range(25, 30)]
        expected = logits[0, head].softmax(-1)[:, attended].sum(-1)
        torch.testing.assert_close(mass[0, head], expected)
    every = torch.arange(4, 25).expand(1, 2, -1)
    torch.testing.assert_close(covered_mass(logits, every, 4, 25, Softmax(1.0)), torch.ones(1, 2, 3))


def test_both_layouts_read_the_same_components() -> None:
    q, k, v = random_tokens(6, 2, 50)
    trace = trace_of(k, v, 6, 30)
    plans = [SparQ.Plan(2, 4, 6, 3)] * 3
    rows = [row_of(SparQ, PARAMS, trace, request(tokens=12, comm="1"), plan) for plan in plans]
    for t in range(20):
        tq, tk, tv = (x[:, :, 30 + t : 31 + t] for x in (q, k, v))
        for i, row in enumerate(rows):  # which generate different tokens
            step(row, tq, tk * (i + 1), tv, t + 1)
    draw = torch.Generator().manual_seed(0)
    components = torch.rand(3, 2, 16, generator=draw).argsort(-1)[..., :3]  # (n, h_kv, r)
    late = torch.cat([row.store[0].generated()[0] for row in rows]).mT
    by_columns, by_rows = (rows[0].seen(0), SparQ.generated(rows, 0)), (trace.keys(0).mT, late)
    ours, theirs = (torch.cat([columns_at(x, components) for x in each], -1) for each in (by_columns, by_rows))
    assert torch.equal(ours, theirs)
    for i in range(3):
        keys = torch.cat([k[0, :, :30], k[0, :, 30:] * (i + 1)], 1)
        expected = keys.mT.gather(1, components[i].unsqueeze(-1).expand(-1, -1, 50))
        assert torch.equal(ours[i], expected)


def test_variants_of_a_sample_share_one_copy_by_components() -> None:
    q, k, v = random_tokens(6, 2, 50)
    trace = trace_of(k, v, 6, 40)
    made: list[Any] = []
    once = trace.once
    trace.once = lambda key, make: once(key, lambda: made.append(key) or make())  # type: ignore[method-assign]
    for tokens in (12, 20, 30):
        row = row_of(SparQ, PARAMS, trace, request(tokens=tokens, comm="1/8"))
        run(row, q, k, v, 40, 45)
    assert sorted(made) == [("SPARQ's columns", 0), ("SPARQ's mean of V", 0)]


def test_rows_together_are_as_alone_whatever_their_options() -> None:
    q, k, v = random_tokens(6, 2, 60)
    variants = [
        (PARAMS, "20", "1/8"), (replace(PARAMS, reallocate=False), "20", "1/8"), (PARAMS, "30", "1/4"),
        (replace(PARAMS, layout="rows"), "20", "1/8"), (replace(PARAMS, generated="inside"), "12", "1/8"),
        (PARAMS, "50", "0"),
    ]  # fmt: skip

    def make(trace: Trace) -> list[Any]:
        return [row_of(SparQ, params, trace, request(tokens=int(n), comm=comm)) for params, n, comm in variants]

    trace = trace_of(k, v, 6, 50)
    alone = [[out for out, _ in run(row, q, k, v, 50, 60)] for row in make(trace)]
    rows = make(trace)
    for t in range(10):
        queries, keys, values = (x[:, :, 50 + t : 51 + t].expand(len(rows), -1, -1, -1) for x in (q, k, v))
        outs = attend_group(type(rows[0]), rows, 0, queries, keys, values, trace.softmax[0])
        for i, out in enumerate(outs):
            torch.testing.assert_close(out, alone[i][t], atol=1e-6, rtol=0)


# --- Books and budget -------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "h_kv", "d_h"), [(9, 3, 64), (8, 2, 128)])
@pytest.mark.parametrize("comm", ["1/128", "1/64", "1/16"])
def test_the_ledger_is_within_every_budget_that_can_be_met(comm: str, h: int, h_kv: int, d_h: int) -> None:
    for s in (2000, 3970):
        q, k, v = random_tokens(h, h_kv, s + 60, d_h)
        for ratio in ("0.05", "0.1", "0.2", "0.5"):
            shape = ModelShape("any", 1, h, h_kv, d_h, 1 << 20, (0,))
            if Fraction(comm) * d_h < 1:
                with pytest.raises(ConfigError, match=f"comm=1/{d_h} or more"):
                    SparQ.check(PARAMS, request(ratio, comm=comm), shape)
                continue
            SparQ.check(PARAMS, request(ratio, comm=comm), shape)
            trace = trace_of(k, v, h, s)
            row = row_of(SparQ, PARAMS, trace, request(ratio, comm=comm))
            run(row, q, k, v, s, s + 60)
            assert row.store.ledger.within(row.budget, shape), (s, ratio)
            last = row.store.ledger.entries[-1]
            assert last.attended == h * (row.budget.tokens + 60)  # nothing of it is left unused
            n_past = row.budget.s_prompt - row.plan.n_sink - (row.plan.n_window - 1)
            assert last.moved_meta_bytes == h_kv * int(Fraction(comm) * d_h) * n_past * 2


def test_a_sliding_window_keeps_the_number_of_attended_tokens() -> None:
    q, k, v = random_tokens(6, 2, 90)
    params = replace(PARAMS, generated="inside")
    row = row_of(SparQ, params, trace_of(k, v, 6, 60), request(tokens=20, comm="1/8"))
    run(row, q, k, v, 60, 90)
    assert {entry.attended for entry in row.store.ledger.entries} == {6 * 21}


def test_a_plain_cache_moves_whole_keys() -> None:
    q, k, v = random_tokens(6, 2, 61)
    entries = {}
    for layout in ("columns", "rows"):
        params = replace(PARAMS, layout=layout)
        row = row_of(SparQ, params, trace_of(k, v, 6, 60), request(tokens=20, comm="1/8"))
        run(row, q, k, v, 60, 61)
        entries[layout] = row.store.ledger.entries[0]
    candidates = 60 - 4 - 8
    assert entries["columns"].moved_meta_bytes == 2 * 2 * candidates * 2  # heads x r x tokens x bytes
    assert entries["rows"].moved_meta_bytes == 2 * 16 * candidates * 2
    assert entries["columns"].moved_kv_bytes == entries["rows"].moved_kv_bytes == 2 * 8 * 64


def test_fetched_tokens_go_through_the_block_cache() -> None:
    q, k, v = random_tokens(6, 2, 64)
    cache = BlockCacheSpec(32, 4, 8, "lfu")
    plan = SparQ.Plan(4, 9, 12, 2)
    row = row_of(SparQ, PARAMS, trace_of(k, v, 6, 60), request(tokens=24, comm="1/8"), plan, 64, cache)
    for t in range(4):  # the same query again: what was fetched is cached by then
        step(row, q[:, :, 60:61], k[:, :, 60 + t : 61 + t], v[:, :, 60 + t : 61 + t], t + 1)
    entries = row.store.ledger.entries
    assert entries[0].cache_hits == 0 < entries[-1].cache_hits <= entries[-1].cache_lookups == 24
    assert entries[-1].moved_kv_bytes == (24 - entries[-1].cache_hits) * 64


def test_the_report_says_what_the_second_copy_of_k_takes() -> None:
    _, k, v = random_tokens(6, 2, 60)
    reports = {
        layout: row_of(
            SparQ, replace(PARAMS, layout=layout), trace_of(k, v, 6), request(tokens=20, comm="1/8")
        ).report()
        for layout in ("columns", "rows")
    }
    trace = trace_of(k, v, 6)
    assert reports["columns"] == {"n_components": 2, "columns_host_bytes": key_bytes(trace.shape, 60 + 64)}
    assert reports["rows"]["columns_host_bytes"] == 0
    assert reported(row_of(SparQ, PARAMS, trace, request("1", comm="0"))) == {}


def test_too_little_comm_is_refused_before_a_model_is_loaded() -> None:
    shape = ModelShape("any", 1, 4, 2, 64, 1 << 20, (0,))
    with pytest.raises(ConfigError, match=r"comm=1/128 .* 64 components .* comm=1/64 or more"):
        SparQ.check(PARAMS, request("0.2", comm="1/128"), shape)
    with pytest.raises(ConfigError, match="comm=0 "):
        SparQ.check(PARAMS, request(tokens=100, comm="0"), shape)
    SparQ.check(PARAMS, request("1", comm="0"), shape)  # nothing has to be found
    assert [n_components(Fraction(c), 128) for c in ("1/128", "1/64", "1/32", "1")] == [
        1,
        2,
        4,
        128,
    ]
