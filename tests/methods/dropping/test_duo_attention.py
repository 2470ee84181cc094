import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.budget import resolve
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import Checkpoint, ModelShape
from kvbench.methods.dropping.duo_attention import DuoAttention, HeadTable, divide, half_up, ranked, read_table
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.tests.vectors import Check, at, built, differs, first, load, request, row_for, step, trace_of

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "duo_attention").glob("*.npz"))
PARAMS = DuoAttention.Params("auto", 4, 16, None, "always")


def run_vectors(path: Path) -> list[Check]:
    """The authors' outputs and windows behind a prompt that was read whole, and in chunks; their choice of heads."""
    meta, x = load(path)
    return [(path.stem, check_heads(x, meta) if "noise_f64" in x else check_steps(x, meta))]


def check_heads(x: dict[str, np.ndarray], meta: dict[str, Any]) -> str | None:
    """With their noise our order has their heads: those at or above a quantile."""
    scores = (x["head_score_f64"] + x["noise_f64"]).tolist()
    order = ranked(scores)
    problems = []
    for p in meta["sparsities"]:
        ours = np.zeros(x["head_score_f64"].shape, dtype=bool)
        for layer, head in order[: int(x[f"full_{p}"].sum())]:
            ours[layer, head] = True
        problems.append(differs(f"full heads at {p}", ours, x[f"full_{p}"]))
        count = half_up((1 - Fraction(str(p))) * len(order))
        problems.append(differs(f"number of full heads at {p}", [count], [round((1 - p) * len(order))]))
    return first(*problems)


def check_steps(x: dict[str, np.ndarray], meta: dict[str, Any]) -> str | None:
    """Single tokens are steps of ours; of a longer chunk each query sees what its formula says."""
    n_full, n_sink, n_recent, chunks = meta["n_full_kv_heads"], meta["sink"], meta["recent"], meta["chunks"]
    n_prompt = sum(n for n in chunks if n > 1)
    problem = first(
        *(
            differs(f"output at {i}", formula(x, i, start, n_full, meta), x["out"][i], 1e-5)
            for start, stop in spans_of(chunks)
            if stop <= n_prompt
            for i in range(start, stop)
        )
    )
    row = streaming_row(x, n_full, n_sink, n_recent, n_prompt, len(x["out"]) - n_prompt)
    lengths = x["streaming_len"][len([n for n in chunks if n > 1]) :]  # after each single token
    for t, i in enumerate(range(n_prompt, len(x["out"]))):
        q, k, v = (at(x[name][None], i) for name in "qkv")
        problem = problem or differs(f"output of step {t + 1}", step(row, q, k, v, t + 1)[0, :, 0], x["out"][i], 1e-5)
        n = int(row.store.attended(0)[-1].sum())  # of a streaming head, before its oldest token leaves
        problem = problem or differs(f"length after step {t + 1}", min(n, n_sink + n_recent), lengths[t])
    held = row.store.attended(0)[:: meta["H"] // meta["Hk"]][n_full:]
    for head, theirs in enumerate(x["streaming_idx"]):
        seen = held[head].nonzero().flatten().tolist()
        if len(seen) > n_sink + n_recent:
            del seen[n_sink]  # the oldest leaves behind the step
        problem = problem or differs(f"what streaming head {head} keeps", seen, np.sort(theirs))
    return problem


def spans_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = np.cumsum([0, *lengths]).tolist()
    return list(itertools.pairwise(ends))


def formula(x: dict[str, np.ndarray], i: int, start: int, n_full: int, meta: dict[str, Any]) -> torch.Tensor:
    """Output at position i of a chunk that begins at `start`: streaming heads see sinks, what was recent, the chunk."""
    g, outs = meta["H"] // meta["Hk"], []
    for head in range(meta["H"]):
        seen = list(range(i + 1))
        if head // g >= n_full and start > 0:
            seen = [*range(meta["sink"]), *range(max(meta["sink"], start - meta["recent"]), i + 1)]
        q, k, v = (torch.from_numpy(x[name]) for name in "qkv")
        weights = (k[head // g, seen] @ q[head, i] * q.shape[-1] ** -0.5).softmax(0)
        outs.append(weights @ v[head // g, seen])
    return torch.stack(outs)


def streaming_row(x: dict[str, np.ndarray], n_full: int, n_sink: int, n_recent: int, s: int, n_new: int) -> Any:
    k, v = (torch.from_numpy(x[name][None]) for name in "kv")
    trace = trace_of(k, v, x["q"].shape[0], s)
    h_kv = k.shape[1]
    table = HeadTable(Path("vectors.tsv"), (tuple(float(head < n_full) for head in range(h_kv)),), {})
    plan = DuoAttention.Plan(
        frozenset((0, head) for head in range(n_full)),
        n_sink,
        {(0, head): n_recent for head in range(n_full, h_kv)},
        table,
    )
    kind = planned(plan)
    return built(row_for(kind, PARAMS, request(tokens=s - 1), trace, n_new))


def planned(plan: DuoAttention.Plan) -> type[DuoAttention]:
    """The method with integers that a case fixes."""

    class Planned(DuoAttention):
        @classmethod
        def plan_for(cls, params: Any, budget: Any, shape: Any) -> DuoAttention.Plan:
            return plan

    return Planned


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_duo_attention_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def table_file(folder: Path, text: str) -> Path:
    path = folder / f"table{len(list(folder.iterdir()))}.tsv"
    path.write_text(text)
    return path


def random_trace(h: int = 4, s: int = 60) -> Any:
    draws = torch.Generator().manual_seed(0)
    return trace_of(torch.randn(1, h, s, 8, generator=draws), torch.randn(1, h, s, 8, generator=draws), h)


@given(st.integers(2, 400), st.integers(0, 200), st.integers(1, 300), st.integers(1, 64), st.data())
def test_the_budget_is_used_to_the_last_token(s: int, n_sink: int, n_recent: int, n_heads: int, data: Any) -> None:
    n_tokens = data.draw(st.integers(1, s - 1))
    n_sink = min(n_sink, s)
    n_recent = min(n_recent, max(0, s - n_sink))
    n_full, sinks, recent, left = divide(n_tokens, s, n_sink, n_recent, n_heads)
    assert n_full * s + (n_heads - n_full) * (sinks + recent) + left == n_tokens * n_heads
    assert 0 <= left and 0 <= sinks <= n_sink and 0 <= recent and 0 <= n_full < n_heads
    assert sinks + recent == n_tokens or (sinks, recent) == (n_sink, n_recent)


def test_a_plan_spends_the_budget_and_widens_windows_evenly(tmp_path: Path) -> None:
    path = table_file(tmp_path, "0.9\t0.1\t0.5\n0.5\t1.7\t-0.2\n")
    shape = ModelShape("m", 2, 6, 3, 8, 1000, (0, 1))
    params = replace(PARAMS, heads=str(path))
    plan = DuoAttention.plan_for(params, resolve(request(tokens=45), 100, True), shape)
    assert plan.full == {(1, 1)}  # (45 - 20) * 6 = 150 of 80 more each
    sizes = [plan.n_sink + n for n in plan.recent.values()]
    assert sum(sizes) + 100 == 45 * 6 and max(sizes) - min(sizes) <= 1


def test_ties_go_to_the_lower_layer_and_head() -> None:
    assert ranked([[1, 1], [1, 1]]) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_all_heads_streaming_is_streamingllm(tmp_path: Path) -> None:
    params = replace(PARAMS, heads=str(table_file(tmp_path, "0 0 0 0")), sparsity=Fraction(1))
    trace, draws = random_trace(), torch.Generator().manual_seed(1)
    ours = built(row_for(DuoAttention, params, request(tokens=20), trace, 12))
    other = built(row_for(StreamingLLM, StreamingLLM.Params(4, "inside", "original"), request(tokens=20), trace, 12))
    for t in range(1, 13):
        q, k, v = (torch.randn(1, 4, 1, 8, generator=draws) for _ in "qkv")
        torch.testing.assert_close(step(ours, q, k, v, t), step(other, q, k, v, t))
        assert torch.equal(ours.store.attended(0), other.store.attended(0))


@pytest.mark.parametrize("s", [3, 10])
def test_behind_a_short_prompt_published_windows_fill_up_before_they_roll(s: int, tmp_path: Path) -> None:
    """Fewer tokens than sinks and window, or than sinks alone: the answer's first tokens take the places."""
    params = replace(PARAMS, heads=str(table_file(tmp_path, "1 0 0 0")), sparsity=Fraction("3/4"))
    trace, draws = random_trace(s=s), torch.Generator().manual_seed(1)
    row = built(row_for(DuoAttention, params, request(tokens=s - 1), trace, 40))
    for t in range(1, 41):
        q, k, v = (torch.randn(1, 4, 1, 8, generator=draws) for _ in "qkv")
        step(row, q, k, v, t)
        newest = s + t - 1
        seen = {*range(min(4, newest)), *range(max(0, newest - 16), newest + 1)}
        assert [{*head.nonzero().flatten().tolist()} for head in row.store.attended(0)[1:]] == [seen] * 3
        assert row.store.attended(0)[0].all()


def test_no_head_streaming_keeps_everything(tmp_path: Path) -> None:
    params = replace(PARAMS, heads=str(table_file(tmp_path, "0 0 0 0")), sparsity=Fraction(0))
    row = built(row_for(DuoAttention, params, request(tokens=20), random_trace(), 2))
    assert row.store.attended(0).all() and row.report()["full_heads"] == 4


def test_generated_tokens_stay_where_only_the_prompt_is_cut(tmp_path: Path) -> None:
    params = replace(PARAMS, heads=str(table_file(tmp_path, "1 0 0 0")), evict="prompt")
    row = built(row_for(DuoAttention, params, request(tokens=30), random_trace(), 5))
    for t in range(1, 6):
        q, k, v = (torch.randn(1, 4, 1, 8) for _ in "qkv")
        step(row, q, k, v, t)
    assert row.store.attended(0)[:, -5:].all()
    assert row.store.attended(0)[1:].sum(-1).tolist()[0] < 60


@pytest.mark.parametrize(
    ("text", "says"),
    [("1 0\n0 1\n", "2 layers of 2"), ("1 x 0 0", "numbers"), ("", "no equal rows"), ("1 0 0 0\n1 0", "no equal rows")],
)
def test_a_table_of_another_kind_is_refused(text: str, says: str, tmp_path: Path) -> None:
    params = replace(PARAMS, heads=str(table_file(tmp_path, text)))
    with pytest.raises(ConfigError, match=says):
        DuoAttention.check(params, request(tokens=20), random_trace().shape)


def test_a_table_of_another_model_is_refused(tmp_path: Path) -> None:
    path = table_file(tmp_path, "# model: other\n# model_digest: abc\n1\t0\t0\t0\n")
    assert read_table(path).facts == {"model": "other", "model_digest": "abc"}
    params, shape = replace(PARAMS, heads=str(path)), random_trace().shape
    with pytest.raises(ConfigError, match="abc"):
        DuoAttention.check_model(params, Checkpoint(shape, ("def",), 0))
    DuoAttention.check_model(params, Checkpoint(shape, ("def", "abc"), 0))


def test_without_a_table_the_command_that_makes_one_is_named() -> None:
    with pytest.raises(ConfigError, match=r"kvbench calibrate heads"):
        DuoAttention.check(PARAMS, request(tokens=20), random_trace().shape)
