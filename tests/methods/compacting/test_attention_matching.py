from dataclasses import replace
from fractions import Fraction
from math import exp, floor, log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.engine.attend import attend
from kvbench.engine.budget import BudgetRequest, Frame
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import SpacedQueries, spaced
from kvbench.engine.passes.trace import Trace
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.methods.compacting.attention_matching import AttentionMatching
from kvbench.methods.compacting.matching import (
    BiasRule,
    Pursuit,
    System,
    Target,
    fit_values,
    fit_weights,
    plain,
    products,
    pursue,
    ridged,
    weights_of,
)
from kvbench.methods.full import Full
from kvbench.methods.rules import planned
from kvbench.tests.vectors import Check, differs, first, load, request, row_of, step, trace_of

PARAMS = AttentionMatching.Params(
    select="highest", score="rms", biases="fitted", values="fitted", ridge=0, drop_below=-7, queries="prompt",
    n_queries=None, chunk=4096, bias_steps=None, frame="keep", first_ids=None,
)  # fmt: skip
PLAIN = replace(PARAMS, biases="none", values="kept")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "attention_matching").glob("*.npz"))


def params_of(given: dict[str, Any]) -> AttentionMatching.Params:
    """Ours, from the arguments of the authors' constructors."""
    select = "highest" if "score_method" in given else ("omp_fast" if given.get("k_choice", 1) > 1 else "omp")
    ridge = next((float(value) for key, value in given.items() if "ridge" in key and not isinstance(value, str)), 0.0)
    return replace(
        PARAMS,
        select=select,
        score=given.get("score_method", "rms"),
        biases="none" if given.get("beta_method") == "zero" else "fitted",
        values="kept" if given["c2_method"] == "direct" else "fitted",
        ridge=ridge,
        drop_below=given.get("drop_key_beta_cutoff", -7),
    )


def as_given(given: dict[str, Any], starts: Tensor) -> type[AttentionMatching]:
    """The method with the authors' bounds and steps, and with the vectors that their power iterations began with."""

    class Params(AttentionMatching.Params):
        @property
        def bounds(self) -> tuple[float, float]:
            return given.get("nnls_lower_bound") or 1e-12, given.get("nnls_upper_bound") or exp(7)

        @property
        def n_steps(self) -> int:
            return given.get("nnls_iters", 0)

    class Given(AttentionMatching):
        remaining = iter(starts)

        def setup(self) -> None:
            super().setup()
            fields = {name: getattr(self.params, name) for name in AttentionMatching.Params.__dataclass_fields__}
            self.params = Params(**fields)

        def power_start(self, t: int, device: torch.device) -> Tensor:
            return next(self.remaining)

    return Given


def compacted(
    kind: type[AttentionMatching], params: AttentionMatching.Params, k: Tensor, v: Tensor, q: Tensor, t: int
) -> AttentionMatching:
    """A row whose prompt k, v (1, h_kv, s, d_h) was compacted by reference queries (1, h, n, d_h)."""
    trace = trace_of(k, v, q.shape[1])
    plan = AttentionMatching.Plan(Frame(), ((0, k.shape[2], t),), q.shape[2])
    trace._observed[SpacedQueries(q.shape[2]), 0] = q
    return row_of(kind, params, trace, request(tokens=1), plan)


def run_vectors(path: Path) -> list[Check]:
    """The authors' algorithms for one head, all KV heads of a layer: keys in order, biases, values, output."""
    meta, x = load(path)
    given = {name: torch.from_numpy(array) for name, array in x.items()}
    kind, params = as_given(meta["params"], given["power_start"]), params_of(meta["params"])
    k, v, q = (given[name].unsqueeze(0) for name in ("k", "v", "q_train"))
    row = compacted(kind, params, k, v, q, meta["t"])
    made = row.store[0].resident()
    bias = torch.zeros_like(given["beta"]) if made[0].bias is None else made[0].bias[0]
    values, theirs = made[0].v[0, :, : meta["t"]], x["c2"]
    out = torch.cat([attend(q, made, Softmax(meta["d"] ** -0.5)) for q in given["q_test"].unsqueeze(0).split(1, 2)], 2)
    problem = first(
        differs("keys", row.store[0].positions()[0], x["indices"]),
        differs("biases", bias, x["beta"], 1e-4),
        differs("values", values, theirs, 1e-3 * float(abs(theirs).max())),
        differs("output", out[0], x["out_compact"], 1e-4),
    )
    return [(path.stem, problem)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_attention_matching_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


# --- What follows from the page ---------------------------------------------------------------

LLAMA = ModelShape("llama", 32, 32, 8, 128, 1 << 20, tuple(range(32)))


def drawn(
    s: int, h: int = 4, h_kv: int = 2, d_h: int = 16, n_new: int = 4, seed: int = 0
) -> tuple[Trace, Tensor, Tensor]:
    """A trace with its queries observed, and queries and tokens of steps to come."""
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(1, h_kv, s + n_new, d_h, generator=draw) for _ in range(2))
    q = torch.randn(1, h, s + n_new, d_h, generator=draw)
    trace = trace_of(k, v, h, s)
    trace.queries = q[:, :, :s]  # type: ignore[attr-defined]
    return trace, q[:, :, s:], torch.stack([k[:, :, s:], v[:, :, s:]])


def row_on(trace: Trace, asked: BudgetRequest, params: AttentionMatching.Params = PARAMS) -> AttentionMatching:
    """A row whose reference queries were observed."""
    plan = AttentionMatching.variant_for(params, asked, trace.shape, trace.s_prompt).plan
    (what,) = AttentionMatching.observations(params, plan)
    trace.observe(0, what, trace.queries, trace.keys(0), trace.softmax[0])  # type: ignore[attr-defined]
    return row_of(AttentionMatching, params, trace, asked)


def answers(row: Any, q: Tensor, new: Tensor) -> Tensor:
    k, v = new
    queries, keys, values = (x.split(1, 2) for x in (q, k, v))
    return torch.cat([step(row, *each, t + 1) for t, each in enumerate(zip(queries, keys, values, strict=True))], 2)


@pytest.mark.parametrize(("h", "h_kv"), [(8, 2), (9, 3)])
def test_the_ledger_is_the_formula_to_the_byte(h: int, h_kv: int) -> None:
    """Over lengths from 1 to 3,000, and a budget in tokens or in bytes."""
    d, n_checked = 8, 0
    for s in [*range(1, 130, 16), 255, 1000, 3000]:
        trace, q, new = drawn(s, h, h_kv, d, n_new=2)
        for asked in (
            request(ratio="1/10"),
            BudgetRequest(None, None, request(ratio="1").comm, memory=request(ratio="1/4").ratio),
        ):
            try:
                row = row_on(trace, asked, replace(PARAMS, n_queries=4 * max(1, s // 4)))
            except ConfigError:
                continue
            share = asked.ratio
            if isinstance(asked.memory, Fraction):
                share = asked.memory * 4 * d / (4 * d + 2)
            assert share is not None
            t = floor(share * s)
            answers(row, q, new)
            for i, entry in enumerate(row.store.ledger.entries):
                assert entry.resident_kv_bytes == h_kv * (t * (4 * d + 2) + (i + 1) * 4 * d), (s, asked)
                assert entry.attended == h * (t + i + 1)
                assert entry.resident_meta_bytes == entry.moved_kv_bytes == entry.moved_meta_bytes == 0
                assert entry.resident_host_bytes == 0
            n_checked += 1
    assert n_checked > 15


def test_a_tenth_of_the_memory_pays_for_996_keys_of_10000() -> None:
    asked = BudgetRequest(None, None, request(ratio="1").comm, memory=request(ratio="1/10").ratio)
    budget, plan, _ = planned(AttentionMatching, PARAMS, asked, LLAMA, 10_000)
    assert budget.tokens == 996
    assert sum(t for _, _, t in plan.chunks) == 996 and plan.chunks[0][0] == 0 and plan.chunks[-1][1] == 10_000
    assert planned(AttentionMatching, replace(PARAMS, biases="none"), asked, LLAMA, 10_000)[0].tokens == 1000


def test_all_keys_with_their_own_values_are_full_attention() -> None:
    trace, q, new = drawn(60)
    row = compacted(AttentionMatching, PLAIN, trace.keys(0), trace.values(0), torch.randn(1, 4, 5, 16), 60)
    full = row_of(Full, Full.Params(), trace, request(ratio="1"))
    torch.testing.assert_close(answers(row, q, new), answers(full, q, new))


def test_biases_and_values_come_closer_than_the_same_keys_as_they_are() -> None:
    trace, q, new = drawn(200)
    full = answers(row_of(Full, Full.Params(), trace, request(ratio="1")), q, new)
    errors = [
        float((answers(row_on(drawn(200)[0], request(tokens=20), params), q, new) - full).norm() / full.norm())
        for params in (PARAMS, PLAIN)
    ]
    assert errors[0] < errors[1] / 2, errors


def test_generated_tokens_have_no_bias_and_the_compacted_prompt_its_whole_mass() -> None:
    """With all keys alike each of the few stands for as many as there are to one of them."""
    trace = drawn(100)[0]
    trace.keys(0)[:] = trace.keys(0)[:, :, :1]
    trace.values(0)[:] = 1.0
    row = row_on(trace, request(tokens=50))
    kept, window = row.store[0].resident()
    assert kept.bias is not None and window.bias is None
    torch.testing.assert_close(kept.bias.exp().sum(-1), torch.full((1, 2), 100.0), atol=0.5, rtol=0)


def test_keys_that_no_weight_is_left_for_make_room_and_stay_away() -> None:
    draw = torch.Generator().manual_seed(0)
    exps = torch.rand(60, 12, generator=draw)
    mass = exps[:, :3] @ torch.tensor([2.0, 3.0, 1.0])
    goal = Target(exps, mass)
    rule = BiasRule(1e-12, exp(7), 0)
    chosen, weights = pursue(goal, 4, Pursuit(1, 1, log(1e-3)), rule)
    assert {0, 1, 2} <= set(chosen.tolist())
    torch.testing.assert_close(exps[:, chosen] @ weights, mass, atol=1e-3, rtol=0)
    few, _ = pursue(Target(exps[:, :3], mass), 8, Pursuit(4, 2, -7), rule)
    assert sorted(few.tolist()) == [0, 1, 2], "there are no more"


def test_fewer_keys_than_paid_for_are_counted_as_they_are() -> None:
    trace, q, new = drawn(80)

    class Short(AttentionMatching):
        def matched(self, layer: int, q: Tensor) -> list[Any]:
            one, two = super().matched(layer, q)
            return [replace(one, idx=one.idx[:5], bias=one.bias[:5], values=one.values[:5]), two]

    what = AttentionMatching.observations(
        PARAMS, AttentionMatching.variant_for(PARAMS, request(tokens=8), trace.shape, 80).plan
    )
    trace.observe(0, what[0], trace.queries, trace.keys(0), Softmax(0.25))  # type: ignore[attr-defined]
    row = row_of(Short, PARAMS, trace, request(tokens=8))
    out = answers(row, q[:, :, :1], new[:, :, :, :1])
    (entry,) = row.store.ledger.entries
    assert entry.attended == 2 * (5 + 1) + 2 * (8 + 1)
    assert entry.resident_kv_bytes == (5 + 8) * (4 * 16 + 2) + 2 * 4 * 16
    assert row.store.attended(0).sum(-1).tolist() == [6, 6, 9, 9]
    assert row.report()["kept_heads"] == {"min": 5, "mean": 6.5, "max": 8}
    assert out.isfinite().all()


def test_values_that_16_bits_cannot_hold_are_fitted_again() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(40, 6, generator=draw)
    x[:, 5] *= 1e-12
    wanted = torch.randn(40, 4, generator=draw)
    found, is_ridged = fit_values(x, wanted, 0.0, 1.0)
    assert is_ridged and float(found.abs().max()) < 100
    found, is_ridged = fit_values(x[:, :5], wanted, 0.0, 1.0)
    assert not is_ridged
    torch.testing.assert_close(found, torch.linalg.lstsq(x[:, :5], wanted).solution, atol=1e-4, rtol=0)


def column_like(n: int, t: int, alike: float) -> Tensor:
    """Columns (n, t) of positive numbers, as weights are, the last of which differs from the first by this share."""
    x = torch.rand(n, t, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, t)
    x[:, -1] = x[:, 0] * (1 + alike * torch.rand(n, generator=torch.Generator().manual_seed(1)))
    return x


@pytest.mark.parametrize("alike", [1.0, 0.1, 0.01])
def test_a_solution_by_products_is_as_close_as_one_by_a_qr_decomposition(alike: float) -> None:
    x = column_like(900, 300, alike)
    wanted = torch.randn(900, 5, generator=torch.Generator().manual_seed(2))
    exact = torch.linalg.lstsq(x.double(), wanted.double()).solution
    found, by_qr = System(x).solved(wanted), torch.linalg.lstsq(x, wanted).solution
    assert found is not None
    assert float((found - exact).norm()) <= 2 * float((by_qr - exact).norm()) + 1e-6 * float(exact.norm())


def test_columns_that_are_nearly_alike_are_left_to_a_qr_decomposition() -> None:
    x = column_like(900, 300, 1e-4)
    wanted = torch.randn(900, 5, generator=torch.Generator().manual_seed(2))
    assert System(x).solved(wanted) is None
    assert torch.equal(plain(System(x), wanted), torch.linalg.lstsq(x, wanted, driver="gels").solution)


def test_a_ridge_gives_what_float64_gives_and_is_a_share_of_the_largest_singular_value() -> None:
    x = column_like(900, 300, 1e-4)
    wanted = torch.randn(900, 5, generator=torch.Generator().manual_seed(2))
    system = System(x)
    torch.testing.assert_close(system.gram, x.mT @ x)
    assert torch.equal(system.gram, system.gram.mT) and torch.equal(products(x), system.gram)
    penalty = system.share(1e-6)
    assert penalty == pytest.approx(1e-6 * float(torch.linalg.svdvals(x.double())[0]) ** 2, rel=1e-5)
    wide = x.double()
    exact = torch.linalg.solve(wide.mT @ wide + penalty * torch.eye(300), wide.mT @ wanted.double())
    found = ridged(system, wanted, penalty)
    assert float((found - exact).norm()) <= 1e-4 * float(exact.norm())


def test_weights_are_those_of_the_logits_and_none_where_no_kept_key_had_any() -> None:
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    bias = torch.tensor([0.0, 1, -3, 2, 0.5])
    torch.testing.assert_close(weights_of((logits - 4).exp(), bias), (logits + bias).softmax(1))
    assert not weights_of(torch.zeros(2, 5), bias).any()


def test_more_steps_bring_the_sums_of_exponentials_closer() -> None:
    """Where one weight is at its bound, the others make up for some of what it lacks."""
    columns = torch.rand(40, 6, generator=torch.Generator().manual_seed(0))
    mass = columns @ torch.tensor([50.0, 1, 1, 1, 1, 1])
    found = [fit_weights(columns, mass, BiasRule(exp(-3), exp(3), n), torch.ones(6)) for n in (0, 2, 99)]
    off = [float((columns @ weights - mass).norm()) for weights in found]
    assert off[0] > 1.5 * off[2] and off[0] > off[1] > off[2], off
    assert all(bool((weights <= exp(3) + 1e-4).all()) for weights in found)


def test_the_templates_tokens_stay_as_they_are() -> None:
    trace = drawn(90)[0]
    plan = AttentionMatching.Plan(Frame(3, 2), ((3, 88, 10),), 64)
    trace._observed[SpacedQueries(64, 3, 2), 0] = trace.queries[:, :, :64]  # type: ignore[attr-defined]
    row = row_of(AttentionMatching, PARAMS, trace, request(tokens=15), plan)
    kept = row.store[0].resident()[0]
    positions = row.store[0].positions()[0]
    assert positions[:, 10:].tolist() == [[0, 1, 2, 88, 89]] * 2
    assert bool(((positions[:, :10] >= 3) & (positions[:, :10] < 88)).all())
    assert kept.bias is not None and not kept.bias[..., 10:].any()
    assert torch.equal(kept.v[0, :, 10:], trace.values(0)[0][:, [0, 1, 2, 88, 89]])
    assert row.protected(0) == [0, 1, 2, 88, 89]


def test_queries_stand_at_even_distances_and_the_last_one_is_the_prompts() -> None:
    assert spaced(4, 0, 10) == [1, 4, 6, 9]
    assert spaced(9, 2, 8) == range(2, 8)
    assert spaced(3, 5, 11) == [6, 8, 10]
    q = torch.arange(10.0).view(1, 1, 10, 1)
    assert SpacedQueries(4).observe(q, q, Softmax(1.0)).flatten().tolist() == [1, 4, 6, 9]


def test_moved_queries_are_turned_to_the_position_behind_the_prompt() -> None:
    trace = drawn(10)[0]
    turned = []
    trace.turn = {0: lambda q, by: (turned.append(by), q)[1]}
    SpacedQueries(4, moved=True).observe_layer(trace, 0, torch.zeros(1, 1, 10, 16), trace.keys(0), Softmax(1.0), None)
    assert turned[0].tolist() == [[9, 6, 4, 1]]
    with pytest.raises(ConfigError, match="moved needs a model with rotary positions"):
        AttentionMatching.check_model(replace(PARAMS, queries="moved"), Checkpoint(LLAMA, ("a",), 0))
    AttentionMatching.check_model(PARAMS, Checkpoint(LLAMA, ("a",), 0))


def test_long_prompts_are_compacted_in_parts() -> None:
    plan = AttentionMatching.variant_for(PARAMS, request(tokens=1000), LLAMA, 10_000).plan
    assert [(end - start, t) for start, end, t in plan.chunks] == [(3333, 333), (3333, 334), (3334, 333)]
    assert plan.n_queries == 1336 // 4
    row = row_on(drawn(100)[0], request(tokens=9), replace(PARAMS, chunk=40))
    kept = row.store[0].positions()[0, 0].tolist()
    assert [sum(start <= p < end for p in kept) for start, end, _ in row.plan.chunks] == [3, 3, 3]


def test_what_it_is_called_and_what_it_refuses() -> None:
    asked = request(ratio="1/5", comm="1/64")
    assert AttentionMatching.label(PARAMS, asked) == "Attention Matching (prompt queries) (C)"
    omp = replace(PARAMS, select="omp_fast", queries="repeat")
    assert AttentionMatching.label(omp, request(ratio="1/5")) == "Attention Matching (OMP fast, repeat queries)"
    assert PARAMS.bounds == (exp(-3), exp(3)) and omp.bounds == (1e-12, exp(7))
    assert (PARAMS.n_steps, omp.n_steps, replace(omp, bias_steps=9).n_steps) == (2, 0, 9)
    alone = ModelShape("mha", 1, 4, 4, 16, 1 << 20, (0,))
    with pytest.raises(ConfigError, match="60 keys of a part need 120 reference queries or more, and there are 100"):
        AttentionMatching.variant_for(PARAMS, request(tokens=60), alone, 100)
    with pytest.raises(ConfigError, match=r"use a smaller ratio, or more method\.n_queries"):
        AttentionMatching.variant_for(replace(PARAMS, n_queries=8), request(tokens=60), LLAMA, 100)
    with pytest.raises(ConfigError, match=r"use ratio=0\.001 or more, or method\.frame=compact"):
        AttentionMatching.variant_for(replace(PARAMS, chunk=4000), request(tokens=2), LLAMA, 10_000)
    with pytest.raises(ConfigError, match="takes up to 20032 positions, more than the 8192"):
        AttentionMatching.variant_for(omp, request(tokens=100), replace(LLAMA, window=8192), 10_000)
