"""VaSE: the authors' choices with given numbers, the law of its draws, and what they hang on."""

import json
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries
from kvbench.evals.settings import from_words
from kvbench.methods.decoding.vase import N_SINK, RANK, VaSE, chances, large_and_best, magnitudes, projected, raced
from kvbench.methods.ranking.random import numbers_at
from kvbench.tests.methods.decoding.traces import OfEntries, held, on, read_trace, replay, start, take
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_for, trace_of

PARAMS = VaSE.Params(
    8, "position", True, 6, Fraction(1, 4), "range", 5, 1.0, "drawn", "attention", "code", 0
)  # fmt: skip
FOLDER = Path(__file__).parents[2] / "golden" / "vase"
GOLDEN = sorted(FOLDER.glob("*.npz"))
N_DRAWS, FEW = 400_000, 20_000


def run_vectors(path: Path) -> list[Check]:
    """A cut, or a prompt and several cuts, with the numbers of the file."""
    meta, x = load(path)
    check = {"select": check_cut, "trace": check_trace, "dkv": check_projection}[meta["case"]]
    return [(path.stem, check(meta, x))]


def params_of(meta: dict[str, Any]) -> VaSE.Params:
    share = Fraction(meta["n_large"], meta["B"])
    kernel = 5 if meta["smooth"] else 1
    how, temperature = meta["magnitude"], meta["temperature"]
    return replace(
        PARAMS, interval=meta["R"], window=meta["R"], large=share, magnitude=how, kernel=kernel, temperature=temperature
    )


def check_cut(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    q, k, v, u = (torch.from_numpy(x[name]).unsqueeze(0) for name in ("q_window", "k", "v", "u"))

    class Given(VaSE):
        def numbers(self, layer: int, positions: Tensor) -> Tensor:
            return u

    params = params_of(meta)
    trace = trace_of(k, v, q.shape[1])
    trace._observed[LastQueries(meta["R"]), 0] = q
    past = slice(k.shape[2] - meta["R"])
    large = magnitudes(v[:, :, past], params.magnitude)
    weights = chances(q, k[:, :, past], trace.softmax[0], params.kernel, params.temperature)
    kept = held(on(trace, Given, params, meta["B"]))
    n = meta["n_large"]
    return first(
        differs("magnitude", large[0, :, N_SINK:], x["magnitude"][:, N_SINK:], 1e-5),
        differs("attention", weights[0], x["attention"], 1e-5),
        differs("large", as_set(kept[:, :n]), as_set(x["large_idx"])),
        differs("drawn", kept[:, n : meta["B"] - meta["R"]], x["sampled_idx"]),
        differs("kept", as_set(kept), as_set(x["kept_idx"])),
    )


def as_set(slots: np.ndarray) -> np.ndarray:
    """The sinks are equal, and so in any order."""
    return np.concatenate([np.sort(slots[:, :N_SINK]), slots[:, N_SINK:]], 1)


def check_projection(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    k, v, g = (torch.from_numpy(x[name]) for name in ("k", "v", "G"))

    class Given(VaSE):
        def matrix(self, layer: int, keys: Tensor) -> Tensor:
            return g

    past = slice(meta["n"] - meta["R"])
    params = replace(PARAMS, window=meta["R"], score="dkv")
    kept = held(on(trace_of(k.unsqueeze(0), v.unsqueeze(0), 2), Given, params, meta["B"]))
    n = x["kept_idx"].shape[1]
    return first(
        differs("score", projected(k[None, :, past], v[None, :, past], g)[0], x["score"], 1e-5),
        differs("kept", as_set(kept[:, :n]), as_set(x["kept_idx"])),
    )


def check_trace(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    class Given(VaSE):
        def numbers(self, layer: int, positions: Tensor) -> Tensor:
            u = torch.from_numpy(x["u"][self.n_cuts[layer]])
            return u.gather(-1, positions[0]).unsqueeze(0)

    q, k, v = (torch.from_numpy(x[name]).unsqueeze(0) for name in ("q", "k", "v"))
    plan = OfEntries(meta["B"], meta["R"], at_prefill=False)
    row = start(Given, replace(params_of(meta), at_prefill=False), q, k, v, meta["S"], meta["B"], plan)
    return replay(row, x)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_vase_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def run_inclusion(path: Path) -> list[Check]:
    """How often each of a few tokens is among the method's own draws."""
    return [(path.stem, inclusion(json.loads(path.read_text()), N_DRAWS))]


def inclusion(case: dict[str, Any], n_draws: int) -> str | None:
    weights = torch.tensor(case["weights"])
    k = torch.zeros(1, 1, 1, 1)
    positions = torch.arange(len(weights)).expand(1, n_draws, -1)
    u = numbers_at(trace_of(k, k, 1), positions, 3, 0, range(n_draws))
    none = torch.empty(1, n_draws, 0, dtype=torch.int64)
    drawn = large_and_best(none, raced(weights, u), case["K"])
    found = torch.bincount(drawn.flatten(), minlength=len(weights)) / n_draws
    p = torch.tensor(case["inclusion"])
    apart = (found - p).abs() / (4 * (p * (1 - p) / n_draws).sqrt())
    return differs("beyond four standard errors", int((apart > 1).sum()), 0)


def test_draws_have_the_law_of_draws_without_replacement() -> None:
    assert inclusion(json.loads((FOLDER / "inclusion.json").read_text()), FEW) is None


def drawn(n: int = 120, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, heads, n, 16, generator=draw) for heads in (4, 2, 2))  # type: ignore[return-value]


def caches(row: VaSE, s: int = 15, n: int = 120) -> Iterator[np.ndarray]:
    q, k, v = drawn(n)
    for p in range(s, n):
        take(row, p, q, k, v)
        yield held(row)


@pytest.mark.parametrize("changed", [{}, {"score": "dkv"}, {"rest": "best", "order": "position"}], ids=str)
@pytest.mark.parametrize("s", [15, 40])
def test_sinks_and_the_last_tokens_stay_and_the_query_ring_is_counted(s: int, changed: dict[str, Any]) -> None:
    row = start(VaSE, replace(PARAMS, **changed), *drawn(), s, 32)
    for p, positions in enumerate(caches(row, s), s):
        for head in positions.tolist():
            assert {*range(4), *range(p - 5, p + 1)} <= {*head} and len({*head}) == len(head)
        assert row.store[0].attended()[:, row.protected(0)].all()
        assert row.store[0].attended().sum(-1).max() <= 40
        queries = 0 if "score" in changed else 6 * 4 * 16 * 2
        assert row.store.ledger.entries[-1].resident_meta_bytes == queries
    assert len(positions[0]) == 39


def test_only_large_values_are_the_top_by_magnitude_and_only_sinks_leave_attention() -> None:
    q, k, v = drawn(48)
    row = start(VaSE, replace(PARAMS, window=8, large=Fraction(23, 32), rest="best"), q, k, v, 48, 32)
    wide = magnitudes(v[:, :, :40], "range")
    for mine, head in zip(held(row), wide[0], strict=True):
        assert mine[4:23].tolist() == head.argsort(descending=True)[4:23].tolist()
    row = start(VaSE, replace(PARAMS, window=8, large=Fraction(1, 8), rest="best", kernel=1), q, k, v, 48, 32)
    weights = chances(q[:, :, -8:], k[:, :, :40], row.trace.softmax[0], 1, 1.0)
    weights[..., :4] = torch.inf
    for mine, head in zip(held(row), weights[0], strict=True):
        assert {*mine[:24].tolist()} == {*head.topk(24).indices.tolist()}


def at_the_end(params: VaSE.Params, draw: int = 0, s: int = 40) -> list[list[int]]:
    trace = read_trace(*drawn(), s, VaSE.n_queries(params))
    row: Any = row_for(VaSE, params, request(tokens=32), trace, 120 - s)
    row.draw = draw
    *_, last = caches(built(row), s)
    return last.tolist()


@pytest.mark.parametrize("score", ["attention", "dkv"])
def test_what_is_drawn_hangs_on_the_seed_and_the_draw_alone(score: str) -> None:
    params = replace(PARAMS, score=score)
    usual = at_the_end(params)
    assert usual == at_the_end(params) != at_the_end(params, draw=1)
    assert usual != at_the_end(replace(params, seed=1))


def test_a_matrix_is_drawn_anew_at_each_cut_or_stays_for_the_answer() -> None:
    for score, stays in (("dkv", False), ("dkv_fixed", True)):
        row = on(trace_of(*drawn(4)[1:], 4), VaSE, replace(PARAMS, score=score), 32)
        x = drawn(4)[1]
        before = row.matrix(0, x)
        assert before.shape == (16, RANK) and before.isfinite().all() and 0.8 < before.std() < 1.2
        row.reorder(0, x)
        assert torch.equal(row.matrix(0, x), before) == stays
        assert not torch.equal(row.matrix(1, x), before), "another layer"


def from_file(*words: str) -> VaSE.Params:
    return build_params(VaSE, from_words([f"method={words[0]}", *words[1:]]).method.params, "method")


def test_presets_have_the_settings_of_the_scripts() -> None:
    usual = from_file("vase")
    assert usual == replace(PARAMS, interval=128, window=64)
    assert from_file("vase_paper") == replace(usual, interval=64, schedule="slack", at_prefill=False)
    assert from_file("vase_dkv") == replace(usual, score="dkv")
    said = [VaSE.label(one, request(tokens=96)) for one in (usual, from_file("vase_dkv"))]
    assert said == ["VaSE", "VaSE (dkv)"]
    other = replace(usual, score="dkv_fixed", order="position")
    assert VaSE.label(other, request(tokens=96)) == "VaSE (dkv, fixed, by position)"


@pytest.mark.parametrize(
    ("changed", "tokens", "says"),
    [
        ({}, 15, "method.large=1/4 are at least the first 4.* use budget=16"),
        ({"window": 24}, 32, "the last method.window=24 tokens stay.* use budget=33"),
        ({"score": "dkv"}, 10, "the first 4 and the last method.window=6 .* use budget=11"),
    ],
)
def test_what_no_budget_can_be(changed: dict[str, Any], tokens: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        VaSE.check(replace(PARAMS, **changed), request(tokens=tokens), trace_of(*drawn(4)[1:], 4).shape)


@pytest.mark.parametrize("share", ["0", "1"])
def test_no_share_of_large_values_is_none_or_all(share: str) -> None:
    with pytest.raises(ConfigError, match=rf"method.large={share}"):
        from_file("vase", f"method.large={share}")
