import json
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.budget import resolve
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries, window_scores
from kvbench.engine.passes.trace import Trace
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.methods.base import reported
from kvbench.methods.dropping import xkv
from kvbench.methods.dropping.allocators import by_need, by_need_until, by_shares
from kvbench.methods.dropping.xkv import (
    XKV,
    average_shares,
    layer_vector,
    profile,
    retention_ratio,
    tokens_for,
)
from kvbench.methods.scorers import keep_top, pool_scores, reduce_group
from kvbench.tests.vectors import Check, built, differs, first, request, row_for, row_of, step, trace_of

PARAMS = XKV.Params(8, 7, "size", None, "exact", None, "kv_head", 0)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "xkv").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """The independent float64 reference: allocations, one layer's eviction, averaged lists."""
    with np.load(path) as file:
        x = {name: file[name] for name in file.files}
    kind = path.stem.split("_")[0]
    check = {"alloc": check_allocation, "evict": check_eviction, "sampled": check_shares}[kind]
    return [(path.stem, check(x))]


def check_allocation(x: dict[str, np.ndarray]) -> str | None:
    w, problems = torch.from_numpy(x["w"]), []
    for kind, given_by, allocate in (
        ("total", "total_sizes", lambda value: by_need(w, int(value))),
        ("target", "targets", lambda value: by_need_until(w, float(value))),
    ):
        if given_by in x:
            ours = [allocate(value) for value in x[given_by]]
            kept = [retention_ratio(w, counts).mean().item() for counts in ours]
            problems.append(differs(f"sizes by {kind}", ours, x[f"alloc_{kind}"]))
            problems.append(differs(f"retention by {kind}", kept, x[f"r_avg_{kind}"], 1e-12))
    return first(*problems)


def check_eviction(x: dict[str, np.ndarray]) -> str | None:
    q, k, v = (torch.from_numpy(x[name]).unsqueeze(0) for name in ("q", "k", "v"))
    ows, n, h_kv = int(x["ows"]), int(x["n_keep"]), k.shape[1]
    params = replace(PARAMS, ows=ows, kernel=int(x["pool_size"]))
    budget = request(tokens=n + ows)
    row = row_of(XKV, params, seen(trace_of(k, v, q.shape[1]), q, ows), budget)
    mass = window_scores(q[:, :, -ows:], k, Softmax(q.shape[3] ** -0.5)) / ows
    per_head = pool_scores(mass, params.kernel, "avg")
    problems = [
        differs("scores of query heads", per_head[0], x["w_query_head"], 1e-6),
        differs("scores of KV heads", reduce_group(per_head, h_kv, "mean")[0], x["w_kv_head"], 1e-6),
        differs("scores that a row has", row.scores(0)[0], x["w_kv_head"], 1e-6),
        differs("layer vector", row.weights[0], x["w_layer"], 1e-6),
        differs("tokens of query heads", keep_top(per_head, n)[0], x["index_query_head"]),
    ]
    for scope, heads in (("kv_head", h_kv), ("layer", h_kv), ("query_head", q.shape[1])):
        row = row_of(XKV, replace(params, index_scope=scope), row.trace, budget)
        kept = row.store.attended(0)[:: q.shape[1] // heads, : k.shape[2] - ows].numpy()
        expected = np.zeros_like(kept)
        index = np.broadcast_to(x[f"index_{scope}"], (heads, n)).astype(np.int64)
        np.put_along_axis(expected, index, True, axis=1)
        problems.append(differs(f"tokens of scope {scope}", kept, expected))
        if (name := f"kept_k_{scope}_scope") in x:
            keys = row.store[0].resident()[0].k[0]
            problems.append(differs(f"keys of scope {scope}", keys, x[name]))
    w, alone = torch.from_numpy(x["w_layer"]).unsqueeze(0), [n]
    problems.append(differs("retention", retention_ratio(w, alone)[0], x["retention_ratio"], 1e-9))
    return first(*problems)


def check_shares(x: dict[str, np.ndarray]) -> str | None:
    reports = [{"n": counts.tolist()} for counts in x["sampled_lists"]]
    shares = average_shares(reports, seed=0, share=Fraction(1))
    sizes = by_shares(shares, int(x["total"]), [int(x["cap"])] * len(shares))
    return first(
        differs("mean shares", shares, x["mean_share"], 1e-12),
        differs("final list", sizes, x["final_list"]),
    )


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_xkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def seen(trace: Trace, q: torch.Tensor, ows: int = 8) -> Trace:
    """The trace, with its last queries observed in every layer."""
    for layer in trace.shape.attention_layers:
        trace.observe(layer, LastQueries(ows), q, trace.keys(layer), trace.softmax[layer])
    return trace


def layers(n_layers: int = 3, s: int = 120, seed: int = 0) -> Trace:
    """A trace of layers whose attention is the more peaked, the higher they are."""
    draw = torch.Generator().manual_seed(seed)
    trace = Trace(
        ModelShape("layers", n_layers, 4, 2, 16, 1 << 20, tuple(range(n_layers))),
        s,
        torch.device("cpu"),
    )
    for layer in range(n_layers):
        q, k, v = (torch.randn(1, heads, s, 16, generator=draw) for heads in (4, 2, 2))
        trace.add(layer, k, v, Softmax(0.25 * (1 + layer)))
        trace.observe(layer, LastQueries(8), q, k, trace.softmax[layer])
    return trace


def greedy(weights: torch.Tensor, total: int) -> list[int]:
    """Algorithm 1 of the paper, corrected as the specification says: one token at a time, first maximum."""
    table = xkv.normalised(weights).sort(-1, descending=True).values.numpy()
    counts = [0] * len(table)
    for _ in range(total):
        waiting = [row[n] if n < len(row) else -np.inf for row, n in zip(table, counts, strict=True)]
        counts[int(np.argmax(waiting))] += 1
    return counts


def mean_retention(weights: torch.Tensor, counts: list[int]) -> float:
    return retention_ratio(weights, counts).mean().item()


@st.composite
def tables(draw: st.DrawFn) -> torch.Tensor:
    """Scores with many ties, zeros, and now and then a layer of nothing else."""
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    values = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, 4.0]), min_size=shape[1], max_size=shape[1])
    rows = draw(st.lists(values, min_size=shape[0], max_size=shape[0]))
    return torch.tensor(rows, dtype=torch.float64)


@given(tables(), st.floats(0, 1))
def test_the_greedy_loop_gives_the_same_list(weights: torch.Tensor, part: float) -> None:
    total = int(part * weights.numel())
    counts = by_need(weights, total)
    assert counts == greedy(weights, total)
    assert sum(counts) == total


def even(n_layers: int, n_past: int, total: int) -> list[int]:
    return by_shares([1.0] * n_layers, total, [n_past] * n_layers)


def pyramid(n_layers: int, n_past: int, total: int) -> list[int]:
    """Linearly less in higher layers, as PyramidKV has it."""
    return by_shares([float(n_layers - i) for i in range(n_layers)], total, [n_past] * n_layers)


@given(st.integers(1, 8), st.integers(1, 60), st.floats(0, 1), st.integers(0, 1000))
def test_it_retains_at_least_what_uniform_and_pyramid_sizes_do(
    n_layers: int, n_past: int, part: float, seed: int
) -> None:
    weights = torch.rand(n_layers, n_past, generator=torch.Generator().manual_seed(seed)) ** 4
    total = int(part * weights.numel())
    best = mean_retention(weights, by_need(weights, total))
    for schedule in (even, pyramid):
        assert best >= mean_retention(weights, schedule(n_layers, n_past, total)) - 1e-12


@given(tables(), st.floats(0.01, 1))
def test_a_target_is_reached_with_as_few_tokens_as_can_be(weights: torch.Tensor, r_avg: float) -> None:
    counts = by_need_until(weights, r_avg)
    assert mean_retention(weights, counts) >= r_avg - 1e-9
    if r_avg < 1 and sum(counts) > 0:
        fewer = by_need(weights, sum(counts) - 1)
        assert mean_retention(weights, fewer) < r_avg + 1e-9


def test_a_target_of_one_keeps_everything() -> None:
    weights = torch.rand(7, 333, generator=torch.Generator().manual_seed(0))
    assert by_need_until(weights, 1.0) == [333] * 7


def test_ties_go_to_the_lower_layer() -> None:
    weights = torch.tensor([[1.0, 1.0, 2.0], [2.0, 1.0, 1.0]])
    assert [by_need(weights, n) for n in range(5)] == [
        [0, 0],
        [1, 0],
        [1, 1],
        [2, 1],
        [3, 1],
    ]


def test_a_layer_without_scores_counts_as_uniform() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.0, 0.0], [5.0, 1.0, 1.0, 1.0]])
    assert retention_ratio(weights, [1, 4]).tolist() == [0.25, 1.0]
    assert by_need(weights, 5) == [4, 1]


def test_no_layer_wins_by_its_mass() -> None:
    weights = torch.rand(4, 50, generator=torch.Generator().manual_seed(1))
    scale = torch.tensor([[1.0], [64.0], [0.125], [8.0]])
    assert by_need(weights * scale, 60) == by_need(weights, 60)


def test_a_model_of_32_layers_and_128k_tokens_is_divided_within_a_second() -> None:
    weights = torch.rand(32, 131_072, generator=torch.Generator().manual_seed(0)) ** 8
    seconds = []
    for _ in range(3):  # the best of three: test machines stall
        start = perf_counter()
        counts = by_need(weights, 32 * 13_107)
        seconds.append(perf_counter() - start)
    assert sum(counts) == 32 * 13_107
    assert min(seconds) < 1


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40)), min_size=1, max_size=12),
    st.floats(0, 1),
)
def test_shared_out_tokens_sum_exactly_and_stay_below_the_caps(rows: list[tuple[float, int]], part: float) -> None:
    shares, caps = [share for share, _ in rows], [cap for _, cap in rows]
    total = int(part * sum(caps))
    sizes = by_shares(shares, total, caps)
    assert sum(sizes) == total
    assert all(0 <= size <= cap for size, cap in zip(sizes, caps, strict=True))


def test_what_a_cap_cuts_off_goes_to_the_others_by_their_shares() -> None:
    assert by_shares([0.6, 0.2, 0.1, 0.1], 100, [40, 99, 99, 99]) == [40, 30, 15, 15]
    assert by_shares([0.25] * 4, 6, [9] * 4) == [2, 2, 1, 1]
    assert by_shares([1.0, 0.0, 0.0], 10, [4, 9, 9]) == [4, 3, 3]


def test_the_averaged_tenth_is_drawn_by_its_seed() -> None:
    reports = [{"n": [i + 1, 29 - i]} for i in range(30)]
    draws = [average_shares(reports, seed) for seed in range(20)]
    assert draws == [average_shares(reports, seed) for seed in range(20)]
    assert len({shares[0] for shares in draws}) > 1
    for shares in draws:
        assert sum(shares) == pytest.approx(1)
        assert shares[0] * 30 * 3 == pytest.approx(round(shares[0] * 30 * 3)), "three of 30"
    with pytest.raises(ConfigError, match="no sample"):
        average_shares([], 0)


def test_equal_scores_go_to_the_lower_position() -> None:
    scores = torch.tensor([[[1.0, 3.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]])
    assert keep_top(scores, 2).tolist() == [[[0, 1], [0, 1]]]
    assert keep_top(scores, 0).shape == (1, 2, 0)
    assert keep_top(scores, 4).tolist() == [[[0, 1, 2, 3]] * 2]


def test_heads_may_be_averaged_before_or_after_the_pooling() -> None:
    scores = torch.rand(1, 6, 40, generator=torch.Generator().manual_seed(0))
    whole, grouped = pool_scores(scores, 7, "avg"), pool_scores(reduce_group(scores, 2, "mean"), 7, "avg")
    torch.testing.assert_close(reduce_group(whole, 2, "mean"), grouped)
    torch.testing.assert_close(layer_vector(whole), layer_vector(grouped), atol=1e-6, rtol=0)


def test_a_window_is_kept_and_counted_in_every_layer() -> None:
    trace = layers()
    row = row_of(XKV, PARAMS, trace, request(tokens=20))
    draw = torch.Generator().manual_seed(9)
    for layer, n in enumerate(row.counted):
        q, k, v = (torch.randn(1, heads, 1, 16, generator=draw) for heads in (4, 2, 2))
        step(row, q, k, v, 1, layer)
        attended = row.store.attended(layer)
        assert attended[:, -9:].all(), "the window and the current token"
        assert attended.sum(-1).tolist() == [n + 8 + 1] * 4
    assert len(set(row.counted)) > 1
    assert sum(row.counted) == 3 * (20 - 8)
    assert row.store.ledger.within(row.budget, trace.shape)


def test_a_choice_per_query_head_is_that_of_duplicated_kv_heads() -> None:
    """Same sets and same outputs; what is held differs: here the union, there g times the tokens."""
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 91, 16, generator=draw) for heads in (4, 2, 2))
    prompt, new = ([x[:, :, part] for x in (q, k, v)] for part in (slice(90), slice(90, 91)))
    params = replace(PARAMS, index_scope="query_head")
    rows, outs = [], []
    for g, some in ((1, params), (2, PARAMS)):
        keys, values = (x.repeat_interleave(g, 1) for x in prompt[1:])
        trace = seen(trace_of(keys, values, 4), prompt[0])
        row = row_of(XKV, some, trace, request(tokens=30))
        rows.append(row)
        k_new, v_new = (x.repeat_interleave(g, 1) for x in new[1:])
        outs.append(step(row, new[0], k_new, v_new))
    torch.testing.assert_close(*outs)
    ours, theirs = (row.store.attended(0) for row in rows)
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours[0], ours[1])
    mine, other = (row.store.ledger.entries[-1] for row in rows)
    assert mine.attended == other.attended == 4 * 31
    union = int(ours.view(2, 2, -1).any(1).sum())
    assert mine.resident_kv_bytes == union * rows[0].store[0].meter.token_bytes < other.resident_kv_bytes


@pytest.mark.parametrize("scope", ["kv_head", "layer", "query_head"])
def test_a_layer_may_be_left_with_its_window(scope: str) -> None:
    row = row_of(XKV, replace(PARAMS, index_scope=scope), layers(), request(tokens=1))
    assert row.counted == [0, 0, 0]
    q, k, v = (torch.ones(1, heads, 1, 16) for heads in (4, 2, 2))
    step(row, q, k, v)
    assert row.store.attended(0).sum(-1).tolist() == [2] * 4


def test_uniform_sizes_are_those_of_snapkv() -> None:
    row = row_of(XKV, replace(PARAMS, allocation="uniform"), layers(), request(tokens=20))
    assert row.counted == [12, 12, 12]


def test_shares_by_hand_divide_the_same_total() -> None:
    params = replace(PARAMS, allocation="sampled", shares=(3.0, 2.0, 1.0))
    assert row_of(XKV, params, layers(), request(tokens=20)).counted == [18, 12, 6]


def test_the_quality_mode_ends_at_its_target_whatever_the_budget() -> None:
    params = replace(PARAMS, mode="quality", r_avg=Fraction(3, 4))
    small, large = (row_of(XKV, params, layers(), request(tokens=n)) for n in (5, 90))
    assert small.counted == large.counted
    assert small.plan.ows == 8
    assert 0.75 <= small.report()["r_avg"] < 0.77
    assert XKV.label(params, request(tokens=5)) == "XKV (0.75 kept)"


@pytest.mark.parametrize(("tokens", "ows"), [(1, 1), (5, 2), (8, 4), (9, 8)])
def test_a_budget_no_larger_than_the_window_halves_it(tokens: int, ows: int) -> None:
    row = row_of(XKV, PARAMS, layers(), request(tokens=tokens))
    assert row.plan == XKV.Plan(ows, 3 * (tokens - ows))
    assert sum(row.counted) == 3 * (tokens - ows)


@given(st.integers(2, 5000), st.fractions(Fraction(1, 50), 1), st.sampled_from(["0", "1/64"]))
def test_sizes_fit_every_prompt(s: int, ratio: Fraction, comm: str) -> None:
    budget = resolve(request(ratio=str(max(ratio, Fraction(1, s))), comm=comm), s, drops=True)
    plan = XKV.plan_for(PARAMS, budget, ModelShape("x", 4, 4, 2, 16, 1 << 20, (0, 1, 2, 3)))
    assert plan.total + 4 * plan.ows == 4 * budget.tokens
    assert 0 <= plan.total <= 4 * (s - plan.ows)


def test_variants_share_the_scores_of_a_layer() -> None:
    trace = layers()
    one, other = (row_of(XKV, PARAMS, trace, request(tokens=n)) for n in (20, 50))
    assert one.weights is other.weights
    assert one.scores(2) is other.scores(2)


def test_its_report_is_json_and_says_what_was_kept() -> None:
    trace = layers()
    row = row_of(XKV, replace(PARAMS, profile_bins=16), trace, request(tokens=20))
    report = json.loads(json.dumps(row.report(), allow_nan=False))
    assert report["n"] == row.counted
    assert report["r_avg"] == pytest.approx(sum(report["retention"]) / 3)
    assert report["compression_ratio"] == pytest.approx(20 / 120)
    assert [len(line) for line in report["w"]] == [16] * 3
    assert [sum(line) for line in report["w"]] == pytest.approx([1.0] * 3)
    for share, counts in report["n_at_retention"].items():
        assert (retention_ratio(row.weights, counts) >= float(share) - 1e-9).all()
        fewer = [n - 1 for n in counts]
        assert (retention_ratio(row.weights, fewer) < float(share)).all()
    assert "w" not in row_of(XKV, PARAMS, trace, request(tokens=20)).report()


def test_a_whole_prompt_has_nothing_to_report() -> None:
    trace = layers()
    assert reported(built(row_for(XKV, PARAMS, request(ratio="1"), trace, 4))) == {}


def test_profiles_and_curves_of_a_uniform_layer_are_straight() -> None:
    weights = torch.zeros(1, 40)
    assert profile(weights, 4).tolist() == [pytest.approx([0.25] * 4)]
    assert profile(weights, 80).sum().item() == pytest.approx(1)
    assert tokens_for(weights, 0.499) == [ceil(0.499 * 40)]


def test_the_shares_of_a_run_are_printed_as_the_parameter_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"id": str(i), "method_report": {"n": [30, 10]}}) for i in range(4)]
    (tmp_path / "samples.jsonl").write_text("\n".join([*lines, '{"id": "oom"}']) + "\n")
    assert xkv.main([str(tmp_path), "7"]) == 0
    assert json.loads(capsys.readouterr().out) == [0.75, 0.25]
    (tmp_path / "samples.jsonl").write_text('{"id": "of another method"}\n')
    assert xkv.main([str(tmp_path)]) == 1
    assert xkv.main([]) == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mode": "quality"}, "needs a target"),
        ({"r_avg": Fraction(1, 2)}, "method.r_avg=0.5 has no effect"),
        ({"mode": "quality", "r_avg": Fraction(1, 2), "allocation": "uniform"}, "use method.all"),
        ({"allocation": "sampled"}, "needs method.shares"),
        ({"shares": (1.0,)}, "method.shares has no effect"),
        ({"allocation": "sampled", "shares": (0.0, 0.0)}, "no positive number"),
    ],
)
def test_a_wrong_parameter_is_answered_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        replace(PARAMS, **changes)


def test_shares_of_another_model_are_refused() -> None:
    params = replace(PARAMS, allocation="sampled", shares=(0.5, 0.5))
    with pytest.raises(ConfigError, match="2 numbers and the model 3 layers"):
        XKV.check(params, request(tokens=20), layers().shape)
