from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.engine.budget import resolve
from kvbench.engine.errors import ConfigError
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.tests.tiny import tiny
from kvbench.tests.vectors import Check, at, differs, first, load, request, row_of, step, trace_of

PARAMS = StreamingLLM.Params(4, "inside", "original")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "streamingllm").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """KVCache-Factory's static cut, and the rolling form with true positions."""
    meta, x = load(path)
    static = path.stem.startswith("static")
    trace = trace_of(torch.from_numpy(x["k"]), torch.from_numpy(x["v"]), meta["Hq"], meta["T"])
    params = replace(PARAMS, n_sink=meta["sinks"], generated="on_top" if static else "inside")
    if static:
        row = row_of(StreamingLLM, params, trace, request(tokens=meta["capacity"]))
        problem = check_static(row, x)
    else:
        # One token, lest a short prompt be a whole budget; the case says what is kept.
        params = replace(params, n_sink=0)
        ends = StreamingLLM.Plan(meta["sinks"], meta["recent"])
        row = row_of(StreamingLLM, params, trace, request(tokens=1), ends)
        problem = check_rolling(row, x, meta["T"])
    return [(path.stem, problem)]


def check_static(row: StreamingLLM, x: dict[str, np.ndarray]) -> str | None:
    """What is on the device right after the prompt, in the order of positions."""
    s, kept = row.trace.s_prompt, x["kept_idx"].shape[-1]
    parts = row.store[0].resident()
    k, v = (torch.cat([getattr(part, name) for part in parts], 2)[:, :, :kept] for name in ("k", "v"))
    positions = row.store.attended(0)[:: row.trace.shape.g, :s]
    expected = np.zeros((x["kept_idx"].shape[1], s), dtype=bool)
    np.put_along_axis(expected, x["kept_idx"][0].astype(np.int64), True, axis=1)
    return first(
        differs("kept positions", positions, expected),
        differs("kept keys", k, x["k_out"]),
        differs("kept values", v, x["v_out"]),
    )


def check_rolling(row: StreamingLLM, x: dict[str, np.ndarray], s: int) -> str | None:
    for t in range(len(x["attended"])):
        out = step(row, at(x["q"], s + t), at(x["k"], s + t), at(x["v"], s + t), t + 1)
        attended = np.zeros(x["attended"].shape[1], dtype=bool)
        attended[: s + t + 1] = row.store.attended(0)[0]
        problem = first(
            differs(f"attended at step {t}", attended, x["attended"][t]),
            differs(f"output of step {t}", out[0, :, 0], x["decode_out_f64"][t], 1e-5),
        )
        if problem:
            return problem
    return None


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_streamingllm_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def tokens(n: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, heads, n, 16, generator=draw) for heads in (4, 2, 2))


@pytest.mark.parametrize(("generated", "expected"), [("inside", [21] * 8), ("on_top", list(range(21, 29)))])
def test_its_window_rolls_or_grows_from_the_same_first_step(generated: str, expected: list[int]) -> None:
    q, k, v = tokens(60)
    row = row_of(
        StreamingLLM,
        replace(PARAMS, generated=generated),
        trace_of(k, v, 4, 50),
        request(tokens=20),
    )
    counts = []
    for t in range(8):
        tq, tk, tv = (x[:, :, 50 + t : 51 + t] for x in (q, k, v))
        step(row, tq, tk, tv, t + 1)
        counts.append(int(row.store.attended(0)[0].sum()))
    assert counts == expected
    assert [entry.attended // 4 for entry in row.store.ledger.entries] == expected


def test_compensation_buys_half_of_comm_in_tokens() -> None:
    _, k, v = tokens(400)
    row = row_of(StreamingLLM, PARAMS, trace_of(k, v, 4), request(ratio="1/10", comm="1/64"))
    assert row.budget.nominal_tokens == 40
    assert row.plan == StreamingLLM.Plan(4, 40 + 3 - 4 + 1)  # 400/128 = 3.1 tokens more


def test_a_budget_of_sinks_alone_is_refused() -> None:
    _, k, v = tokens(60)
    with pytest.raises(ConfigError, match="leaves nothing beside"):
        StreamingLLM.plan_for(PARAMS, resolve(request(tokens=4), 60, True), trace_of(k, v, 4).shape)


def rotate(x: torch.Tensor, by: torch.Tensor | int) -> torch.Tensor:
    """Rotary embedding in the half-split form, by whole positions."""
    d_h = x.shape[-1]
    angle = torch.as_tensor(by).double().reshape(-1, 1) * 10_000 ** (-torch.arange(0, d_h, 2).double() / d_h)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    half = torch.cat([-x[..., d_h // 2 :], x[..., : d_h // 2]], -1)
    return (x * cos + half * sin).to(x.dtype)


def test_cache_positions_equal_keys_renumbered_by_their_slots() -> None:
    """The paper's rule done by brute force, against turning the query for the sinks alone."""
    raw_q, raw_k, v = (x.double() for x in tokens(60))
    positions = torch.arange(60)
    q, k = rotate(raw_q, positions), rotate(raw_k, positions)
    trace = trace_of(k, v, 4, 50)
    trace.turn = {0: rotate}
    row = row_of(StreamingLLM, replace(PARAMS, position="cache"), trace, request(tokens=20))
    for t in range(8):
        n = 51 + t
        out = step(row, q[:, :, n - 1 : n], k[:, :, n - 1 : n], v[:, :, n - 1 : n], t + 1)
        held = row.store.attended(0)[0].nonzero().flatten()
        slots = torch.arange(len(held))
        keys = rotate(raw_k[:, :, held], slots).repeat_interleave(2, 1)
        weights = (rotate(raw_q[:, :, n - 1 : n], len(held) - 1) @ keys.mT * 0.25).softmax(-1)
        torch.testing.assert_close(out, weights @ v[:, :, held].repeat_interleave(2, 1), atol=1e-6, rtol=0)


def test_cache_positions_need_a_rotary_model() -> None:
    with pytest.raises(ConfigError, match="rotary"):
        StreamingLLM.check_model(replace(PARAMS, position="cache"), tiny("opt").checkpoint)
    StreamingLLM.check_model(replace(PARAMS, position="cache"), tiny().checkpoint)
    StreamingLLM.check_model(PARAMS, tiny("opt").checkpoint)
