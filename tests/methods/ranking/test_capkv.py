"""CapKV against kvpress' press, and its parts against their definitions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.engine.errors import ConfigError
from kvbench.methods.ranking import capkv
from kvbench.methods.ranking.capkv import CapKV, leverages, relevance
from kvbench.tests.methods.dropping.test_expected_attention import rotation, seen_trace
from kvbench.tests.tiny import tiny
from kvbench.tests.vectors import Check, differs, first, load, request, row_of, trace_of

PARAMS = CapKV.Params(5.0, 512, 4, 0.0, "model")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "capkv").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """kvpress' anchor, its scores behind the sinks, and what they keep."""
    meta, x = load(path)
    params = CapKV.Params(meta["tau"], meta["n_future"], meta["n_sink"], meta["eps"], "model")
    q, k, v = (torch.from_numpy(x[name]) for name in ("q_pre", "k", "v"))
    trace, turn = trace_of(k, v, meta["H"]), rotation(meta["theta"])
    trace.turn = {0: turn}
    for what in CapKV.observations(params, CapKV.Plan(params.n_sink)):
        trace.observe(0, what, turn(q, torch.arange(q.shape[2])[None]), k, trace.softmax[0])
    row = row_of(CapKV, params, trace, request(tokens=meta["n_kept"]))
    theirs = x["score"][..., meta["n_sink"] :]
    problem = first(
        differs("scores", row.scores(0).numpy() / theirs, theirs / theirs, 1e-4),
        differs("kept", row.store[0].positions().sort(-1).values, x["kept_idx"]),
    )
    return [(path.stem, problem)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_capkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def test_a_leverage_is_what_the_log_determinant_gains_to_first_order(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    values, weights = torch.randn(2, 30, 8, generator=draw), torch.rand(4, 30, generator=draw)
    found = leverages(values, weights, 0.0)
    for head in range(4):
        at = weights[head].double().requires_grad_()
        v = values[head // 2].double()
        torch.logdet(torch.eye(8, dtype=torch.float64) + (at.unsqueeze(-1) * v).mT @ v).backward()
        torch.testing.assert_close(found[head].double(), at.grad, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(capkv, "CHUNK", 7)
    torch.testing.assert_close(leverages(values, weights, 0.0), found)


def test_a_value_that_others_have_too_is_worth_less_than_one_of_its_own() -> None:
    values = torch.zeros(1, 11, 4)
    values[0, :10, 0] = values[0, 10, 1] = 2.0
    found = leverages(values, torch.ones(1, 11), 0.0)[0]
    assert (found[10] > 5 * found[:10]).all()


def test_relevance_is_a_matter_of_direction_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    anchor, keys = torch.randn(4, 8, generator=draw), torch.randn(2, 30, 8, generator=draw)
    found = relevance(anchor, keys, 5.0)
    assert found.amax(-1).tolist() == [1.0] * 4
    lengths = torch.rand(2, 30, 1, generator=draw) + 0.5
    torch.testing.assert_close(relevance(3 * anchor, keys * lengths, 5.0), found)
    assert (relevance(anchor, keys, 0.0) == 1).all()


@pytest.mark.parametrize(("cap", "n_sink"), [(60, 4), (20, 4), (5, 4), (4, 1), (1, 0)])
def test_every_head_keeps_the_budget_and_the_sinks(cap: int, n_sink: int) -> None:
    row = row_of(CapKV, PARAMS, seen_trace(n_sink=n_sink), request(tokens=cap))
    assert row.plan == CapKV.Plan(n_sink)
    for layer in range(3):
        kept = row.store[layer].attended()
        assert kept.sum() == 6 * cap and kept[:, :n_sink].all()


def test_a_model_without_rotary_positions_is_asked_for_openly() -> None:
    with pytest.raises(ConfigError, match=r"no rotary positions.*use method\.rotary=none"):
        CapKV.check_model(PARAMS, tiny("opt").checkpoint)
    CapKV.check_model(replace(PARAMS, rotary="none"), tiny("opt").checkpoint)
    row = row_of(CapKV, replace(PARAMS, rotary="none"), seen_trace(kind="opt"), request(tokens=20))
    assert row.store[0].attended().sum() == 6 * 20
