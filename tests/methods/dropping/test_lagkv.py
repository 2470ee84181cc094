from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvbench.engine.budget import resolve
from kvbench.engine.errors import ConfigError
from kvbench.methods.allocator import Allocator
from kvbench.methods.combinations import ALLOCATION, COMMAND, Case, refuse
from kvbench.methods.dropping.lagkv import LagKV, lag_scores, ranks, spread
from kvbench.methods.full import Full
from kvbench.tests.vectors import Check, at, differs, first, load, request, row_of, step, trace_of

PARAMS = LagKV.Params(4, 8, 1.0, "quota", "prompt", "fair")
OFFICIAL = replace(PARAMS, evict="always", budget_rule="official")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "lagkv").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """The authors' cache over several steps, and kvpress' scores and choice."""
    meta, x = load(path)
    k, v = (torch.from_numpy(x[name]) for name in ("k", "v"))
    trace, sizes = trace_of(k, v, k.shape[1], meta["S"]), {"n_sink": meta["sink"], "lag": meta["lag"]}
    if "must_keep" in x:
        selection = "scores" if meta["cross_scoring"] else "ranks"
        params = replace(PARAMS, selection=selection, budget_rule="official", **sizes)
        return [(path.stem, check_best(row_of(LagKV, params, trace, request(tokens=meta["n_kept"])), x))]
    params = replace(OFFICIAL, value_weight=meta["score_v_ratio"], **sizes)
    row = row_of(LagKV, params, trace, request(ratio=str(meta["ratio"])))
    problem = first(check_kept(row, x, 0), differs("prompt", [meta["S"]], x["attended"][:1]))
    if "partition_score" in x:
        ours = row.scores(0).unflatten(2, (-1, meta["lag"]))
        problem = problem or differs("scores", ours, x["partition_score"], 1e-6)
    nothing = torch.zeros(1, k.shape[1], 1, k.shape[3])
    for t in range(meta["steps"]):
        step(row, nothing, at(x["k"], meta["S"] + t), at(x["v"], meta["S"] + t), t + 1)
        problem = problem or first(
            differs(f"attended at step {t}", row.store.attended(0).sum(-1).unique(), x["attended"][t + 1 : t + 2]),
            check_kept(row, x, t + 1),
        )
    return [(path.stem, problem)]


def check_kept(row: LagKV, x: dict[str, np.ndarray], t: int) -> str | None:
    theirs = x["kept_idx"][t]
    return first(
        differs(f"kept after {t} steps", positions(row), theirs[:, theirs[0] >= 0]),
        differs(f"compressed after {t} steps", [row.base[0]], x["compressed_len"][t : t + 1]),
    )


def check_best(row: LagKV, x: dict[str, np.ndarray]) -> str | None:
    """kvpress' scores where they are no constant, and a choice between those that must stay and those that may."""
    chosen = np.zeros(x["must_keep"].shape[1:], dtype=bool)
    np.put_along_axis(chosen, positions(row).numpy(), True, axis=1)
    (n_first, n_last), s = row.ends(), row.trace.s_prompt
    theirs = x["score"][:, :, n_first : s - n_last]
    return first(
        differs("scores", row.scores(0), theirs, 1e-6) if row.plan.n_parts else None,
        differs("tokens that must stay", chosen | x["must_keep"][0], chosen),
        differs("tokens that may stay", chosen & (x["must_keep"] | x["may_keep"])[0], chosen),
        differs("kept", chosen.sum(-1), [row.budget.tokens] * len(chosen)),
    )


def positions(row: LagKV) -> Tensor:
    return row.store[0].positions()[0].sort(-1).values


def tokens(n: int, h: int = 4, h_kv: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, 16, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


def take(row: LagKV, t: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = row.trace.s_prompt + t
    return step(row, q[:, :, n : n + 1], k[:, :, n : n + 1], v[:, :, n : n + 1], t + 1)


ANY_SHAPE = trace_of(*tokens(4)[1:], 4).shape


def plan(params: LagKV.Params, s: int, **asked: Any) -> LagKV.Plan:
    return LagKV.plan_for(params, resolve(request(**asked), s, True), ANY_SHAPE)


def held(one: LagKV.Plan) -> int:
    """Tokens that it keeps of the prompt."""
    return one.n_sink + one.n_between + one.n_last


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_lagkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def test_the_published_integers() -> None:
    """16 sinks, 6 of 7 partitions compressed to a quarter of 128, a whole one, a remainder of 88."""
    params = replace(OFFICIAL, n_sink=16, lag=128)
    assert plan(params, 1000, ratio="1/4") == LagKV.Plan(16, 128, 6, 6 * 32, 128 + 88, 32)
    assert held(plan(params, 1000, ratio="1/4")) == 424


@given(s=st.integers(100, 400), n_sink=st.integers(0, 20), lag=st.integers(2, 40), ratio=st.integers(1, 99))
def test_a_published_share_is_that_of_each_partition(s: int, n_sink: int, lag: int, ratio: int) -> None:
    params, m = replace(OFFICIAL, n_sink=n_sink, lag=lag), int(ratio / 100 * lag)
    if m < 1:
        with pytest.raises(ConfigError, match=r"raise ratio or method\.lag"):
            plan(params, s, ratio=f"{ratio}/100")
        return
    expected = s
    if s >= n_sink + 2 * lag:
        expected = n_sink + ((s - n_sink) // lag - 1) * m + lag + (s - n_sink) % lag
    assert held(plan(params, s, ratio=f"{ratio}/100")) == expected


@given(s=st.integers(20, 3000), share=st.fractions(Fraction(1, 20), 1), n_sink=st.integers(0, 40))
def test_a_fair_budget_is_kept_to_the_token_and_no_partition_goes_empty(s: int, share: Fraction, n_sink: int) -> None:
    params, n = replace(PARAMS, n_sink=n_sink, lag=128), int(share * s)
    if not 1 <= n < s:
        return
    try:
        found = plan(params, s, tokens=n)
    except ConfigError as error:
        assert "leaves a partition of LagKV without a token" in str(error)
        for lag in (8, 16, 32, 64, 128):
            for sinks in range(min(n_sink, s) + 1):
                n_parts, n_last = (s - sinks) // lag - 1, lag + (s - sinks) % lag
                assert n - sinks - n_last < max(1, n_parts) or n_parts < 1
        return
    assert held(found) == n
    assert found.n_sink + (found.n_parts + 1) * found.lag + (found.n_last - found.lag) == s
    assert 1 <= found.m <= found.lag and 0 <= found.n_between - found.m * found.n_parts < found.n_parts
    assert found.n_sink <= n_sink and found.lag in (8, 16, 32, 64, 128)


@pytest.mark.parametrize(
    ("s", "n", "expected"),
    [
        (4000, 400, LagKV.Plan(16, 128, 30, 240, 144, 8)),  # as asked for
        (240, 113, LagKV.Plan(16, 32, 6, 65, 32, 10)),  # shorter partitions: of 64 one token is left for two
        (240, 31, LagKV.Plan(0, 16, 14, 15, 16, 1)),  # and fewer sinks
    ],
)
def test_a_small_budget_gets_shorter_partitions_then_fewer_sinks(s: int, n: int, expected: LagKV.Plan) -> None:
    assert plan(replace(PARAMS, n_sink=16, lag=128), s, tokens=n) == expected


def test_what_was_shortened_is_reported() -> None:
    _, k, v = tokens(240)
    row = row_of(LagKV, replace(PARAMS, n_sink=16, lag=128), trace_of(k, v, 4), request(tokens=31))
    assert row.report() == {"n_sink": 0, "lag": 16}
    row = row_of(LagKV, PARAMS, trace_of(k, v, 4), request(tokens=100))
    assert row.report() == {}


def test_sinks_last_partition_and_remainder_stay_and_every_partition_keeps_its_best() -> None:
    _, k, v = tokens(107)
    row = row_of(LagKV, PARAMS, trace_of(k, v, 4), request(tokens=52))
    one = row.plan
    assert (one.n_parts, one.n_last, one.n_between, one.m) == (11, 8 + 7, 33, 3)
    row = row_of(LagKV, PARAMS, trace_of(k, v, 4), request(tokens=54))
    assert (row.plan.m, row.plan.n_between) == (3, 35)
    for head, found in enumerate(positions(row).tolist()):
        assert found[:4] == [0, 1, 2, 3] and found[-15:] == list(range(92, 107)) and len(found) == 54
        for part in range(11):
            start = 4 + 8 * part
            x, reference = slice(start, start + 8), slice(start + 8, start + 16)
            scores, _ = lag_scores(k[0, head, x], v[0, head, x], k[0, head, reference], v[0, head, reference], 1.0)
            best = scores.topk(4 if part < 2 else 3).indices + start
            assert [i for i in found if start <= i < start + 8] == sorted(best.tolist())


def test_the_reference_is_the_partition_behind_and_deviations_are_over_channels() -> None:
    _, k, _ = tokens(16)
    x, reference = k[0, 0, :8].double().numpy(), k[0, 0, 8:].double().numpy()
    scaled = (x - reference.min(0)) / (reference.max(0) - reference.min(0))
    np.testing.assert_allclose(spread(k[0, 0, :8], k[0, 0, 8:])[0], scaled.std(1, ddof=1), rtol=1e-5)


def test_stretching_and_moving_a_channel_changes_nothing() -> None:
    _, k, v = tokens(64)
    draw = torch.Generator().manual_seed(5)
    factor, shift = torch.rand(16, generator=draw) * 4 + 0.1, torch.randn(16, generator=draw)
    one, other = (row_of(LagKV, PARAMS, trace_of(keys, v, 4), request(tokens=30)) for keys in (k, k * factor + shift))
    torch.testing.assert_close(one.scores(0), other.scores(0), atol=1e-5, rtol=0)
    assert torch.equal(positions(one), positions(other))


@pytest.mark.parametrize("n_varying", [0, 1, 2, 5])
def test_channels_without_a_range_are_left_out_and_counted(n_varying: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x, reference = torch.randn(8, 16, generator=draw), torch.randn(8, 16, generator=draw)
    reference[:, n_varying:] = 3.0
    found, n_flat = spread(x, reference)
    assert n_flat == 16 - n_varying
    if n_varying < 2:
        assert found.tolist() == [0] * 8
    else:
        torch.testing.assert_close(found, spread(x[:, :n_varying], reference[:, :n_varying])[0])


def test_channels_that_hardly_vary_give_numbers() -> None:
    x, reference = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 16)
    reference[0] = 1e-38
    assert spread(x, reference)[0].isfinite().all()


def test_flat_channels_of_a_run_are_reported() -> None:
    _, k, v = tokens(64)
    k[..., 3] = 1.0
    row = row_of(LagKV, PARAMS, trace_of(k, v, 4), request(tokens=30))
    assert row.report() == {"flat_channels": row.plan.n_parts * 2}
    assert row.scores(0).isfinite().all()


@pytest.mark.parametrize("params", [OFFICIAL, replace(PARAMS, evict="always")])
def test_while_decoding_a_partition_is_compressed_once_its_reference_is_complete(params: LagKV.Params) -> None:
    """Against lists of positions, kept apart from the cache and its slots."""
    q, k, v = tokens(120, seed=4)
    row = row_of(LagKV, params, trace_of(k, v, 4, 50), request(tokens=28))
    sets, base, most = positions(row).tolist(), row.plan.base, 0
    for t in range(60):
        take(row, t, q, k, v)
        sets = [[*head, 50 + t] for head in sets]
        n = len(sets[0])
        most = max(most, n)
        assert row.store.attended(0).sum(-1).tolist() == [n] * 4
        if n == base + 16:
            for head, one in enumerate(sets):
                x, reference = one[base : base + 8], one[base + 8 :]
                keys, values = k[0, head], v[0, head]
                scores, _ = lag_scores(keys[x], values[x], keys[reference], values[reference], 1.0)
                best = scores.topk(row.plan.m).indices.sort().values
                sets[head] = [*one[:base], *(x[i] for i in best), *reference]
            base += row.plan.m
        assert positions(row).tolist() == sets
    assert row.report()["attended_max"] == most == row.plan.peak(held(row.plan), 60)
    assert base - row.plan.base >= 6 * row.plan.m, "several partitions were compressed"


def test_room_is_taken_for_the_most_that_is_held() -> None:
    _, k, v = tokens(120)
    variant = LagKV.variant_for(OFFICIAL, request(ratio="1/4"), ANY_SHAPE, 100)
    row = variant.row(trace_of(k, v, 4, 100), 20)
    row.build(0)
    assert row.store[0].k.shape[2] == row.plan.peak(held(row.plan), 20) < held(row.plan) + 20


@pytest.mark.parametrize("evict", ["prompt", "always"])
@pytest.mark.parametrize("rule", ["fair", "official"])
def test_the_whole_budget_is_full_attention_while_decoding_too(rule: str, evict: str) -> None:
    q, k, v = tokens(80)
    params = replace(PARAMS, evict=evict, budget_rule=rule)
    row = row_of(LagKV, params, trace_of(k, v, 4, 50), request(ratio="1"))
    full = row_of(Full, Full.Params(), trace_of(k, v, 4, 50), request(ratio="1"))
    for t in range(30):
        assert torch.equal(take(row, t, q, k, v), take(full, t, q, k, v))


def test_ranks_are_shares_below_one_and_ties_go_to_the_lower_position() -> None:
    assert ranks(torch.tensor([[0.1, 0.4, 0.4, 0.2]])).tolist() == [[0.0, 0.75, 0.5, 0.25]]


@pytest.mark.parametrize("selection", ["ranks", "scores"])
def test_the_best_of_all_partitions_are_no_quota(selection: str) -> None:
    _, k, v = tokens(107)
    k[:, :, :50] *= 4  # far beyond the range of what follows
    row = row_of(LagKV, replace(PARAMS, selection=selection), trace_of(k, v, 4), request(tokens=52))
    assert positions(row).shape == (2, 52)
    n_of = [[((head >= a) & (head < a + 8)).sum().item() for a in range(4, 92, 8)] for head in positions(row)]
    assert all(sum(head) == 33 and max(head) - min(head) <= (1 if selection == "ranks" else 8) for head in n_of)


def test_without_room_for_partitions_kvpress_keeps_sinks_and_the_latest() -> None:
    params = replace(PARAMS, n_sink=4, lag=16, selection="ranks", budget_rule="official")
    for n, s in ((12, 30), (3, 30), (12, 36)):
        row = row_of(LagKV, params, trace_of(*tokens(s)[1:], 4), request(tokens=n))
        n_first = min(n, 4)
        assert positions(row).tolist() == [[*range(n_first), *range(s - (n - n_first), s)]] * 2


def test_what_its_scores_may_be_compared_over_depends_on_the_selection() -> None:
    found = {name: LagKV.traits_of(replace(PARAMS, selection=name)).comparable for name in ("quota", "ranks", "scores")}
    assert found == {"quota": "none", "ranks": "none", "scores": "heads"}
    refuse(ALLOCATION, Case(LagKV, replace(PARAMS, selection="scores"), allocator=Allocator("global")), COMMAND)
    for name in ("quota", "ranks"):
        with pytest.raises(ConfigError, match="those of LagKV do not compare"):
            refuse(ALLOCATION, Case(LagKV, replace(PARAMS, selection=name), allocator=Allocator("global")), COMMAND)
    with pytest.raises(ConfigError, match=r"LagKV goes on while it decodes; use method\.evict=prompt with it"):
        refuse(ALLOCATION, Case(LagKV, OFFICIAL, allocator=Allocator("pyramid")), COMMAND)
    asked = request(ratio="1/5", comm="1/64")
    assert LagKV.label(PARAMS, asked) == "LagKV (C)"
    assert LagKV.label(replace(PARAMS, selection="ranks"), asked) == "LagKV (ranks) (C)"


def test_partitions_are_what_is_compressed_while_decoding() -> None:
    with pytest.raises(ConfigError, match=r"selection=ranks evicts nothing while decoding; use it with method\.evict="):
        replace(PARAMS, selection="ranks", evict="always")


def test_budgets_and_prompts_that_leave_nothing_to_choose_are_refused() -> None:
    params = replace(PARAMS, n_sink=16, lag=128)
    with pytest.raises(ConfigError, match=r"use ratio=0\.125 or more \(budget=30\)"):
        plan(params, 240, tokens=20)
    with pytest.raises(ConfigError, match="so does every other budget; use a longer prompt"):
        plan(params, 12, tokens=8)
    with pytest.raises(ConfigError, match=r"nothing would be dropped; lower method\.lag, or use method\.budget_rule="):
        plan(replace(OFFICIAL, n_sink=16, lag=128, evict="prompt"), 240, ratio="1/2")
    with pytest.raises(ConfigError, match=r"keeps no token of a partition of method\.lag=8"):
        plan(OFFICIAL, 240, ratio="1/10")
