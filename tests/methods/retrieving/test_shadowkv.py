from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.methods.full import Full
from kvbench.methods.retrieving.shadowkv import Landmarks, ShadowKV, chunk_means, factored, most_likely
from kvbench.methods.rules import planned
from kvbench.tests.vectors import Check, differs, first, load, request, row_of, step, trace_of

PARAMS = ShadowKV.Params(
    chunk=8, rank_share=Fraction(160, 1024), outlier_chunks=48, local_chunks=4, native=False, budget_rule="harness"
)
NATIVE = replace(PARAMS, native=True)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "shadowkv").glob("*.npz"))
Turn = Callable[[Tensor, int | Tensor], Tensor]


def turner(cos: Tensor, sin: Tensor) -> Turn:
    """Rotation by tables (positions, d_h) of whole turns, backwards where a number is negative."""

    def turn(x: Tensor, by: int | Tensor) -> Tensor:
        where = torch.tensor([[by]]) if isinstance(by, int) else by
        near, far = cos[where.abs()].unsqueeze(1), (sin[where.abs()] * where.sign().unsqueeze(-1)).unsqueeze(1)
        left, right = x.chunk(2, -1)
        return x * near + torch.cat([-right, left], -1) * far

    return turn


def rotary(n: int, d_h: int) -> Turn:
    angles = torch.arange(n).unsqueeze(1) * 10000.0 ** (-torch.arange(0, d_h, 2) / d_h)
    angles = torch.cat([angles, angles], -1)
    return turner(angles.cos(), angles.sin())


def run_vectors(path: Path) -> list[Check]:
    """The authors' accuracy class: chunks, low-rank keys, and the output of several steps."""
    meta, x = load(path)
    given = {name: torch.from_numpy(array) for name, array in x.items()}
    trace = trace_of(given["k_rope"].unsqueeze(0), given["v"].unsqueeze(0), meta["Hq"])
    trace.turn = {0: turner(given["cos"], given["sin"])}
    chunk, n_chunks = meta["chunk"], meta["n_chunks"]
    plan = ShadowKV.Plan(chunk, meta["rank"], n_chunks, meta["outlier_chunks"], meta["budget"] // chunk)
    row = row_of(ShadowKV, NATIVE, trace, request(ratio="1/2"), plan)
    landmarks, every = row.index[0], torch.arange(n_chunks - plan.n_outliers).expand(meta["Hk"], -1)
    everything = torch.arange(meta["S"]).expand(meta["Hk"], -1)
    problem = first(
        differs("local tokens", [plan.n_local(meta["S"])], [meta["n_local"]]),
        differs("least cosines", chunk_means(given["k_rope"][:, : n_chunks * chunk], chunk)[1], x["min_cos"], 1e-5),
        differs("outliers", landmarks.outliers, x["outlier_chunks"]),
        differs("chunks with landmarks", landmarks.numbers(every), x["landmark_chunks"]),
        differs("landmarks", landmarks.means, x["landmarks"], 1e-6),
        differs("low-rank keys", row.factors[0].keys(everything), x["k_lowrank"], 2e-5),
    )
    for t in range(meta["n_steps"]):
        q, k, v = (given[name][t].view(1, -1, 1, meta["d"]) for name in ("q_step", "k_step", "v_step"))
        out = step(row, q, k, v, t + 1)
        chunks = row.store[0].fetched()[0][0, :, ::chunk].sort(-1).values // chunk
        problem = problem or first(
            differs(f"chunks of step {t}", chunks, x["selected_chunks"][t]),
            differs(f"output of step {t}", out[0, :, 0], x["out"][t], 2e-5),
        )
    return [(path.stem, problem)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_shadowkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


# --- What follows from the page ---------------------------------------------------------------


def drawn(
    s: int, h: int = 4, h_kv: int = 2, d_h: int = 16, n_new: int = 8, seed: int = 0
) -> tuple[Trace, Tensor, Tensor]:
    """A trace of rotated keys, and queries (1, h, n_new, d_h) and tokens (2, 1, h_kv, n_new, d_h) to follow."""
    draw = torch.Generator().manual_seed(seed)
    turn = rotary(s + n_new, d_h)
    k, v = (torch.randn(1, h_kv, s + n_new, d_h, generator=draw) for _ in range(2))
    k = turn(k + torch.randn(1, h_kv, 1, d_h, generator=draw), torch.arange(s + n_new).unsqueeze(0))
    trace = trace_of(k, v, h, s)
    trace.turn = {0: turn}
    return trace, torch.randn(1, h, n_new, d_h, generator=draw), torch.stack([k[:, :, s:], v[:, :, s:]])


def answers(row: ShadowKV, q: Tensor, new: Tensor) -> Tensor:
    k, v = new
    queries, keys, values = (x.split(1, 2) for x in (q, k, v))
    return torch.cat([step(row, *each, t + 1) for t, each in enumerate(zip(queries, keys, values, strict=True))], 2)


def exact(trace: Trace, q: Tensor, new: Tensor) -> Tensor:
    full = row_of(Full, Full.Params(), trace, request(ratio="1"))
    return answers(full, q, new)


def test_all_chunks_at_full_rank_are_full_attention() -> None:
    trace, q, new = drawn(150)
    plan = ShadowKV.Plan(8, 32, 14, 3, 11)
    row = row_of(ShadowKV, NATIVE, trace, request(ratio="1/2"), plan)
    torch.testing.assert_close(answers(row, q, new), exact(trace, q, new), atol=1e-5, rtol=0)


def test_half_the_rank_selects_the_same_chunks_and_answers_otherwise() -> None:
    trace, q, new = drawn(150)
    rows = [row_of(ShadowKV, NATIVE, trace, request(ratio="1/2"), ShadowKV.Plan(8, r, 14, 3, 4)) for r in (12, 6)]
    outs = [answers(row, q, new) for row in rows]
    assert torch.equal(rows[0].store[0].fetched()[0], rows[1].store[0].fetched()[0])
    assert not torch.allclose(outs[0], outs[1])
    whole = exact(trace, q, new)
    assert (outs[0] - whole).norm() < (outs[1] - whole).norm()


def test_other_order_of_kv_heads_gives_the_same_in_that_order() -> None:
    trace, q, new = drawn(150)
    other = trace_of(trace.keys(0).flip(1), trace.values(0).flip(1), 4)
    other.turn = trace.turn
    plan = ShadowKV.Plan(8, 12, 14, 3, 4)
    one, two = (row_of(ShadowKV, NATIVE, each, request(ratio="1/2"), plan) for each in (trace, other))
    turned = q.unflatten(1, (2, 2)).flip(1).flatten(1, 2)
    out = answers(two, turned, new.flip(2)).unflatten(1, (2, 2)).flip(1).flatten(1, 2)
    torch.testing.assert_close(answers(one, q, new), out, atol=1e-5, rtol=0)


def test_the_factors_are_the_truncated_decomposition() -> None:
    x = torch.randn(9000, 24, generator=torch.Generator().manual_seed(0)) @ torch.diag(0.7 ** torch.arange(24.0))
    u, sizes, w = torch.linalg.svd(x.double(), full_matrices=False)
    best = (u[:, :7] * sizes[:7]) @ w[:7]
    keys = factored(x, 7, 2, torch.float32).keys(torch.arange(9000).expand(2, -1))
    torch.testing.assert_close(keys.transpose(0, 1).flatten(1).double(), best, atol=2e-5, rtol=0)


def test_outliers_are_no_candidates_and_are_the_chunks_least_like_their_mean() -> None:
    keys = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(0)).abs()
    keys[0, 16:24:2] *= -1
    keys[1, 40:48:2] *= -1
    trace = trace_of(torch.cat([keys, keys[:, :8]], 1).unsqueeze(0), torch.zeros(1, 2, 72, 8), 2)
    row = row_of(ShadowKV, NATIVE, trace, request(ratio="9/10"), ShadowKV.Plan(8, 4, 8, 1, 7))
    assert row.index[0].outliers.tolist() == [[2], [5]]
    assert row.index[0].numbers(torch.arange(7).expand(2, -1)).tolist() == [
        [0, 1, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 6, 7],
    ]
    assert row.store[0].positions()[0, :, :8].tolist() == [[*range(16, 24)], [*range(40, 48)]]


def test_numbers_skip_outliers_side_by_side() -> None:
    landmarks = Landmarks(torch.zeros(1, 4, 1), torch.tensor([[0, 1, 4, 6]]))
    assert landmarks.numbers(torch.arange(4).unsqueeze(0)).tolist() == [[2, 3, 5, 7]]


def test_a_group_takes_the_largest_probability_and_not_the_largest_logit() -> None:
    means = torch.tensor([[[4.0, 0.0], [0.0, 1.0], [3.9, 0.0]]])
    q = torch.tensor([[[[2.0, 0.0]], [[0.0, 2.0]]]])  # logits 8, 0, 7.8 and 0, 2, 0
    best = most_likely(q.view(1, 1, 2, 2) @ means.mT, Softmax(1.0))[0, 0]
    assert best.argmax() == 1, "2 is the smaller logit and the larger part of its head's attention"


def test_a_cache_of_values_changes_what_moves_and_no_answer() -> None:
    trace, q, new = drawn(300)
    plain = row_of(ShadowKV, NATIVE, trace, request(ratio="1/2"), ShadowKV.Plan(8, 12, 33, 3, 6))
    cached = row_of(
        ShadowKV, NATIVE, trace, request(ratio="1/2"), ShadowKV.Plan(8, 12, 33, 3, 6),
        cache=BlockCacheSpec(64, 16, 2, "lru"),
    )  # fmt: skip
    assert torch.equal(answers(plain, q, new), answers(cached, q, new))
    moved = [sum(e.moved_kv_bytes for e in row.store.ledger.entries) for row in (plain, cached)]
    assert moved[1] < moved[0]
    extra = cached.store.ledger.entries[-1].resident_kv_bytes - plain.store.ledger.entries[-1].resident_kv_bytes
    assert extra == 64 * 2 * 16 * 2, "the cache holds values alone"


# --- Bytes ------------------------------------------------------------------------------------


def expected(s: int, h_kv: int, d: int, plan: ShadowKV.Plan, t: int) -> dict[str, int]:
    """The page's table, one layer."""
    n, c, no, ns, r = plan.n_chunks, plan.chunk, plan.n_outliers, plan.n_selected, plan.rank
    factors, landmarks = 2 * s * r + 2 * r * h_kv * d, 2 * (n - no) * h_kv * d
    return {
        "resident": factors + landmarks + 4 * h_kv * d * (s - n * c + no * c + ns * c + t),
        "read": landmarks,
        "host": 2 * h_kv * d * n * c,
        "moved": 2 * h_kv * d * ns * c,
    }


def counted(row: ShadowKV, step: int) -> dict[str, int]:
    ledger = row.store.ledger
    entry = ledger.entries[step]
    return {
        "resident": ledger.held()[step],
        "read": entry.moved_meta_bytes,
        "host": entry.resident_host_bytes,
        "moved": entry.moved_kv_bytes,
    }


@pytest.mark.parametrize(("h", "h_kv"), [(8, 2), (9, 3)])
def test_the_ledger_is_the_formula_to_the_byte(h: int, h_kv: int) -> None:
    """Over lengths from 1 to 3,000, wherever the method does not refuse."""
    n_checked = 0
    for s in [*range(1, 130, 7), 200, 511, 512, 513, 1000, 2999, 3000]:
        trace, q, new = drawn(s, h, h_kv, n_new=2)
        for ratio in ("1/10", "1/3", "7/8"):
            try:
                row = row_of(ShadowKV, PARAMS, trace, request(ratio=ratio, comm="1/8"))
            except ConfigError:
                continue
            answers(row, q, new)
            for t in (0, 1):
                assert counted(row, t) == expected(s, h_kv, 16, row.plan, t + 1), (s, ratio, t)
            n_checked += 1
    assert n_checked > 30


@pytest.mark.slow
def test_the_worked_table() -> None:
    trace, q, new = drawn(10_000, 32, 8, 128, n_new=1)
    row = row_of(ShadowKV, NATIVE, trace, request(ratio="1/20"), ShadowKV.Plan(8, 160, 1246, 24, 20))
    answers(row, q, new)
    found = counted(row, 0)
    assert found["resident"] - 4 * 8 * 128 == 7_603_200  # less the generated token
    assert round(7_603_200 / (4 * 8 * 128 * 10_000), 3) == 0.186
    assert (found["host"], found["moved"], found["read"]) == (20_414_464, 327_680, 2_502_656)


def test_what_a_budget_is_divided_into() -> None:
    shape = ModelShape("llama", 32, 32, 8, 128, 1 << 20, tuple(range(32)))
    plan = ShadowKV.variant_for(PARAMS, request(tokens=2048, comm="1/8"), shape, 10_000).plan
    assert plan == ShadowKV.Plan(8, 160, 1246, 32, (2048 - 32 - 256) // 8)
    official = replace(NATIVE, budget_rule="official")
    assert ShadowKV.variant_for(official, request(tokens=2048), shape, 10_000).plan == replace(
        plan, n_outliers=48, n_selected=256
    )
    small = ModelShape("smollm2", 30, 9, 3, 64, 8192, tuple(range(30)))
    assert ShadowKV.variant_for(PARAMS, request(ratio="1/5", comm="1/8"), small, 2000).plan.rank == 30
    assert ShadowKV.variant_for(PARAMS, request(ratio="1/5", comm="1/30"), small, 2000).plan.chunk == 30


def test_memory_takes_from_the_rank_first_and_lengthens_chunks_then() -> None:
    shape = ModelShape("llama", 32, 32, 8, 128, 1 << 20, tuple(range(32)))
    seen = []
    for percent in range(8, 40):
        asked = BudgetRequest(Fraction(1, 20), None, Fraction(1, 8), memory=Fraction(percent, 100))
        budget, plan, _ = planned(ShadowKV, PARAMS, asked, shape, 10_000)
        assert budget.tokens == 500
        assert ShadowKV.footprint(PARAMS, plan, budget, shape).fits(budget, shape)
        seen.append((-plan.chunk, plan.rank))
    assert seen == sorted(seen) and seen[-1] == (-8, 160) and seen[0][0] < -8 and seen[0][1] == 64
    assert any(chunk == -8 and 64 < rank < 160 for chunk, rank in seen)


def test_everything_is_attended_to_by_low_rank_keys_where_memory_is_less() -> None:
    trace, q, new = drawn(240)
    asked = BudgetRequest(Fraction(1), None, Fraction(1, 8), memory=Fraction(999, 1000))
    row = row_of(ShadowKV, replace(PARAMS, local_chunks=1), trace, asked, ShadowKV.Plan(8, 31, 29, 3, 26))
    assert not row.variant.is_full
    out = answers(row, q, new)
    assert row.store.attended(0).all()
    assert not torch.equal(out, exact(trace, q, new))
    torch.testing.assert_close(out, exact(trace, q, new), atol=0.1, rtol=0)
    bypass = row_of(ShadowKV, PARAMS, trace, replace(asked, memory=Fraction(1)))
    assert bypass.variant.is_full and torch.equal(answers(bypass, q, new), exact(trace, q, new))


def test_what_it_is_called_and_what_it_refuses() -> None:
    shape = ModelShape("llama", 32, 32, 8, 128, 1 << 20, tuple(range(32)))
    assert ShadowKV.label(PARAMS, request(ratio="1/5", comm="1/8")) == "ShadowKV"
    assert ShadowKV.label(PARAMS, request(ratio="1/5", comm="1/64")) == "ShadowKV (chunks of 64)"
    assert ShadowKV.label(NATIVE, request(ratio="1/5", comm="1/64")) == "ShadowKV (native)"
    with pytest.raises(ConfigError, match=r"comm=0 pays for no landmark; use comm=1/8"):
        ShadowKV.check(PARAMS, request(ratio="1/5"), shape)
    with pytest.raises(ConfigError, match=r"selects no chunk of 8 .* use ratio=0\.04 or more \(budget=40\)"):
        ShadowKV.variant_for(PARAMS, request(tokens=39, comm="1/8"), shape, 1000)
    assert ShadowKV.variant_for(PARAMS, request(ratio="0.04", comm="1/8"), shape, 1000).plan.n_selected == 1
    with pytest.raises(ConfigError, match=r"rank_share=5/32 makes a rank of 160 .* it is from 1 to 100"):
        ShadowKV.variant_for(PARAMS, request(ratio="1/2", comm="1/8"), shape, 100)
    with pytest.raises(ConfigError, match="has no chunk of 64 in front of"):
        ShadowKV.variant_for(PARAMS, request(ratio="1/2", comm="1/64"), shape, 319)
    with pytest.raises(ConfigError, match="48 and 100 selected chunks are more than the 121 chunks"):
        ShadowKV.variant_for(replace(NATIVE, budget_rule="official"), request(tokens=800), shape, 1000)
    asked = BudgetRequest(None, None, Fraction(1, 8), memory=Fraction(1, 50))
    with pytest.raises(ConfigError, match=r"use memory=(0\.\d+) or more") as caught:
        planned(ShadowKV, PARAMS, asked, shape, 10_000)
    least = Fraction(str(caught.value).rpartition("memory=")[2].split()[0])
    planned(ShadowKV, PARAMS, BudgetRequest(None, None, Fraction(1, 8), memory=least), shape, 10_000)
