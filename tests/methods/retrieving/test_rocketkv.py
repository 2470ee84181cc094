from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import find_bytes
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries
from kvbench.engine.search import Units, best_tokens
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.methods.full import Full
from kvbench.methods.retrieving.oracle import token_scores
from kvbench.methods.retrieving.rocketkv import RocketKV, chunk_and_channels, chunk_scores, top_tokens, voted_scores
from kvbench.methods.retrieving.sparq import top_components
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_for, row_of, step, trace_of

PARAMS = RocketKV.Params(8, 7, "device", "harness", 0)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "rocketkv").glob("*.npz"))


# --- Reference vectors ------------------------------------------------------------------------


def run_vectors(path: Path) -> list[Check]:
    """Authors' attention functions: both stages of one turn with their scores, or two turns."""
    meta, x = load(path)
    if meta["method"] == "rocketkv_mt":
        return [(f"{path.stem}/{turn}", check_turn(meta, x, turn)) for turn in (0, 1)]
    return [(path.stem, check_steps(meta, x))]


def vector_row(
    meta: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, s: int, window: int, kind: type[RocketKV] = RocketKV
) -> Any:
    """The method with the integers of a vector on the first `s` tokens, whose last `window` queries are `q`'s first."""
    chunk, channels = chunk_and_channels(meta["compression_ratio"], k.shape[-1])
    trace = trace_of(k, v, q.shape[1], s)
    trace.observe(0, LastQueries(window), q[:, :, :window], trace.keys(0), trace.softmax[0])
    plan = RocketKV.Plan(meta["prompt_budget"], window, chunk, channels, meta["topk"], grows=False)
    params = replace(PARAMS, window=window, kernel=meta["kernel"])
    return row_of(kind, params, trace, request(tokens=s - 1, comm="1"), plan)


def keeping(positions: np.ndarray) -> type[RocketKV]:
    """The method with a first stage that is given: among equal scores theirs takes any, the rest follows."""
    chosen = torch.from_numpy(positions).long().unsqueeze(0)
    return type("RocketKV", (RocketKV,), {"kept": lambda self, layer: chosen})


def allowed_set(name: str, chosen: Tensor, must: np.ndarray, may: np.ndarray) -> str | None:
    """Whether sets of positions (heads, k) have all that they must, and of the rest only what they may."""
    marks = torch.zeros(must.shape, dtype=torch.bool).scatter_(-1, chosen, True).numpy()
    wrong = int((must & ~marks).sum() + (marks & ~must & ~may).sum())
    return f"{name}: {wrong} tokens are missing or too many" if wrong else None


def check_stage_1(row: Any, must: np.ndarray, may: np.ndarray, expected: np.ndarray, n_kept: int) -> str | None:
    kept = row.store[0].host.positions[0]
    if kept.shape[-1] != n_kept:
        return f"{kept.shape[-1]} tokens are kept, expected {n_kept}"
    window = row.plan.window
    past, last = kept[:, : n_kept - window], kept[:, n_kept - window :]
    return first(
        allowed_set("kept", past, must, may),
        differs("window", last, expected[:, n_kept - window :]),
        None if bool((kept.diff(dim=-1) > 0).all()) else "kept positions do not ascend",
    )


def over(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
    """Attention of q (h, d_h) over each KV head's positions (h_kv, n), in float64."""
    g = len(q) // len(chosen)
    keys, values = (x[0].double().repeat_interleave(g, 0) for x in (k, v))
    idx = chosen.repeat_interleave(g, 0).unsqueeze(-1).expand(-1, -1, k.shape[-1])
    logits = (keys.gather(1, idx) @ q.double().unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
    return (logits.softmax(-1).unsqueeze(1) @ values.gather(1, idx))[:, 0]


def check_steps(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    q, k, v = (torch.from_numpy(x[name]).unsqueeze(0) for name in ("q", "k", "v"))
    s, window = meta["S"], min(meta["window"], meta["S"])
    row, d_h = vector_row(meta, q, k, v, s, window), k.shape[-1]
    problem = None
    if (row.plan.chunk, row.plan.r) != (meta["chunk"], meta["channels"]):
        problem = f"chunk and channels {row.plan.chunk}, {row.plan.r}, expected {meta['chunk']}, {meta['channels']}"
    if "pooled_score_f64" in x:
        pooled = voted_scores(row.trace, row.params, window, 0)[0]
        raw = voted_scores(row.trace, replace(row.params, kernel=1), window, 0)[0]
        problem = first(
            problem,
            differs("raw scores", raw, x["raw_score_f64"], 1e-5),
            differs("pooled scores", pooled, x["pooled_score_f64"], 1e-5),
            check_stage_1(row, x["must_keep"], x["may_keep"], x["kept_idx"], meta["prompt_budget"]),
        )
    if "must_keep" in x:
        row = vector_row(meta, q, k, v, s, window, keeping(x["kept_idx"]))
    for t in range(meta["steps"]):
        now = q[:, :, window + t : window + t + 1]
        out = step(row, now, k[:, :, s + t : s + t + 1], v[:, :, s + t : s + t + 1], t + 1)
        n, chunk = row.store[0].n_host, row.plan.chunk
        channels = top_components(now, k.shape[1], row.plan.r)[0]
        sizes = torch.tensor([float(min(chunk, n - at)) for at in range(0, n, chunk)])
        scores = chunk_scores(now, row.index[0], row.plan.r, sizes, Softmax(d_h**-0.5)).repeat_interleave(chunk, -1)[
            :, :n
        ]
        chosen, fetched = row.store[0].fetches[0][0], row.store[0].fetched()[0][0]
        same = torch.equal(chosen.sort(-1).values, torch.from_numpy(x["selected"][:, t]).long().sort(-1).values)
        problem = first(
            problem,
            differs(f"channels {t}", channels.sort(-1).values, x["channels"][:, t]),
            differs(f"scores {t}", scores, x["score_f64"][:, t, :n], 1e-6),
            allowed_set(f"selected {t}", chosen, x["must_select"][:, t], x["may_select"][:, t]),
            differs(f"attention {t}", out[0, :, 0], over(now[0, :, 0], k, v, fetched), 1e-5),
            differs(f"output {t}", out[0, :, 0], x["out"][:, t], 1e-5) if same else None,
        )
    return problem


def check_turn(meta: dict[str, Any], x: dict[str, np.ndarray], turn: int) -> str | None:
    """A turn is a prompt of its own: the first one, or the first one and the question without the first answer."""
    q, k, v = (torch.from_numpy(x[name]).unsqueeze(0) for name in ("q", "k", "v"))
    s, question = meta["S"], meta["S"] + meta["T1"]
    prompt = [*range(s), *(range(question, question + meta["n2"]) if turn else ())]
    begin, length = (question + meta["n2"], meta["T2"]) if turn else (s, meta["T1"])
    order = torch.tensor([*prompt, *range(begin, begin + length)])
    window = min(meta["window"], meta["n2"] if turn else s)
    now, keys, values = (x[:, :, order] for x in (q, k, v))
    n = len(prompt)
    row = vector_row(meta, now[:, :, n - window :], keys, values, n, window)
    kept = x[f"kept_idx_{turn}"]
    # Theirs are numbered with the first answer among them.
    where = {position: i for i, position in enumerate(order.tolist())}
    expected = np.vectorize(where.__getitem__)(kept)
    problem = check_stage_1(row, x[f"must_keep_{turn}"], x[f"may_keep_{turn}"], expected, meta["prompt_budget"])
    row = vector_row(meta, now[:, :, n - window :], keys, values, n, window, keeping(expected))
    for t in range(length):
        at = slice(n + t, n + t + 1)
        out = step(row, now[:, :, at], keys[:, :, at], values[:, :, at], t + 1)
        chosen, fetched = row.store[0].fetches[0][0], row.store[0].fetched()[0][0]
        theirs = torch.from_numpy(x[f"selected_{turn}"][:, t]).long()
        same = torch.equal(chosen.sort(-1).values, theirs.sort(-1).values)
        problem = first(
            problem,
            None if same else differs_only_in_ties(row, now[:, :, at], chosen, theirs),
            differs(f"attention {t}", out[0, :, 0], over(now[0, :, n + t], keys, values, fetched), 1e-5),
            differs(f"output {t}", out[0, :, 0], x[f"out_{turn}"][:, t], 1e-5) if same else None,
        )
    return problem


def differs_only_in_ties(row: Any, q: Tensor, ours: Tensor, theirs: Tensor) -> str | None:
    """Both selections have the same scores, which is all that two may differ in."""
    n, chunk = row.store[0].n_host, row.plan.chunk
    sizes = torch.tensor([float(min(chunk, n - at)) for at in range(0, n, chunk)])
    scores = chunk_scores(q, row.index[0], row.plan.r, sizes, Softmax(q.shape[-1] ** -0.5)).repeat_interleave(chunk, -1)
    mine, right = (scores.gather(-1, each).sort(-1).values for each in (ours, theirs))
    return differs("selected scores", mine, right, 1e-7)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_rocketkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path) if problem] == []


# --- Against the definition -------------------------------------------------------------------


def random_tokens(h: int, h_kv: int, n: int, d_h: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, d_h, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


def made(tokens: int, comm: str, q: Tensor, k: Tensor, v: Tensor, s: int, **changed: Any) -> Any:
    """A row on the first `s` tokens."""
    trace, params = trace_of(k, v, q.shape[1], s), replace(PARAMS, **changed)
    window = LastQueries(params.window)
    trace.observe(0, window, q[:, :, :s], trace.keys(0), trace.softmax[0])
    return row_of(RocketKV, params, trace, request(tokens=tokens, comm=comm))


def run(row: Any, q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
    """Output and attended tokens of every step."""
    steps = []
    for t in range(start, stop):
        tq, tk, tv = (x[:, :, t : t + 1] for x in (q, k, v))
        steps.append((step(row, tq, tk, tv, t - start + 1), row.store.attended(0)))
    return steps


def by_definition(q: Tensor, k: Tensor, held: list[int], chunk: int, r: int, k_tokens: int) -> set[int]:
    """The positions that a group with queries q (g, d_h) selects of those that a KV head holds, in float64."""
    q, keys = q.double(), k[held].double()
    (_, d_h), n = q.shape, len(held)
    sign = torch.where(q.sum(0) > 0, 1.0, -1.0).double()
    channels = q.abs().mean(0).argsort(descending=True, stable=True)[:r]
    total = torch.zeros(n).double()
    for one in q:
        logits = torch.zeros(n).double()
        for begin in range(0, n, chunk):
            bound = (keys[begin : begin + chunk] * sign).amax(0)
            logits[begin : begin + chunk] = (one * sign)[channels] @ bound[channels]
        total += (logits / (d_h * one[channels].abs().sum() / one.abs().sum()).sqrt()).softmax(0)
    # Tokens of a chunk are equal; their sums, added up in one order, too.
    best = total.argsort(descending=True, stable=True)[:k_tokens]
    return {held[i] for i in best.tolist()}


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(("tokens", "comm"), [(12, "1/16"), (30, "1/4"), (5, "1/32"), (12, "1")])
def test_every_step_is_the_definition(tokens: int, comm: str, tier: str) -> None:
    q, k, v = random_tokens(6, 2, 120)
    row = made(tokens, comm, q, k, v, 100, tier=tier)
    held = row.store[0].host.positions[0].tolist()
    for t in range(20):
        ((out, attended),) = run(row, q, k, v, 100 + t, 101 + t)
        n = row.plan.n_kept + t + 1
        r = row.plan.channels(ceil(n / row.plan.chunk))
        for head in range(2):
            group = q[0, 3 * head : 3 * head + 3, 100 + t]
            mine = [*held[head], *range(100, 101 + t)]
            expected = by_definition(group, k[0, head], mine, row.plan.chunk, r, tokens + t + 1)
            assert set(attended[3 * head].nonzero().flatten().tolist()) == expected, t
        fetched = row.store[0].fetched()[0][0]
        torch.testing.assert_close(out[0, :, 0].double(), over(q[0, :, 100 + t], k, v, fetched), atol=1e-5, rtol=0)


def test_without_compression_in_the_second_stage_it_is_the_oracle_over_what_was_kept() -> None:
    q, k, v = random_tokens(6, 2, 100)
    row = made(20, "1", q, k, v, 90)
    assert (row.plan.chunk, row.plan.r) == (1, 16)
    kept = row.store[0].host.positions[0]
    own = kept.unsqueeze(-1).expand(-1, -1, 16)
    kept_k, kept_v = (x[0].gather(1, own).unsqueeze(0) for x in (k, v))
    alone = trace_of(kept_k, kept_v, 6)
    now, newest = q[:, :, 90:91], k[:, :, 90:91]
    step(row, now, newest, v[:, :, 90:91])
    logits = torch.cat([alone.keys(0), newest], 2)
    scores = token_scores((now.reshape(1, 2, 3, 16) @ logits.mT) / 4, "group_sum", Softmax(1.0))
    expected = best_tokens(scores, Units(21, scores.shape[-1]))
    assert expected is not None
    assert torch.equal(row.store[0].fetches[0].sort(-1).values, expected.sort(-1).values)


def test_the_whole_budget_is_full_attention() -> None:
    q, k, v = random_tokens(6, 2, 60)
    row = made(50, "1/16", q, k, v, 50)
    full = built(row_for(Full, Full.Params(), request("1"), trace_of(k, v, 6, 50), 64))
    for (out, _), (expected, _) in zip(run(row, q, k, v, 50, 60), run(full, q, k, v, 50, 60), strict=True):
        assert torch.equal(out, expected)


def test_the_window_is_kept_and_the_first_stage_takes_the_root_of_the_ratio() -> None:
    q, k, v = random_tokens(6, 2, 101)
    row = made(25, "1/8", q, k, v, 100)
    kept = row.store[0].host.positions[0]
    assert kept.shape == (2, 50)
    assert kept[:, -8:].tolist() == [[*range(92, 100)]] * 2
    assert row.report() == {"kept": 50, "kept_ratio": 0.5, "chunk": row.plan.chunk, "n_channels": row.plan.r}


def test_of_equal_chunks_the_first_tokens_are_selected() -> None:
    scores = torch.tensor([[0.1, 0.3, 0.3, 0.2], [0.2, 0.2, 0.1, 0.4]])
    assert top_tokens(scores, 3, 10, 5).tolist() == [[3, 4, 5, 6, 7], [9, 0, 1, 2, 3]]
    assert top_tokens(scores, 3, 10, 99).sort(-1).values.tolist() == [[*range(10)]] * 2


# --- Books and budget -------------------------------------------------------------------------


@pytest.mark.parametrize("comm", ["1/64", "1/16", "1/8", "1"])
@pytest.mark.parametrize("ratio", ["0.02", "0.1", "0.37", "0.9"])
def test_the_ledger_is_within_every_budget(ratio: str, comm: str) -> None:
    q, k, v = random_tokens(4, 2, 530, d_h=64)
    row = made(int(500 * float(ratio)), comm, q, k, v, 500)
    run(row, q, k, v, 500, 530)
    shape, entries = row.trace.shape, row.store.ledger.entries
    assert row.store.ledger.within(row.budget, shape)
    assert [e.attended for e in entries] == [4 * (row.budget.tokens + t) for t in range(1, 31)]
    n = row.plan.n_kept + 30
    assert entries[-1].resident_kv_bytes == 2 * n * 64 * 4
    assert entries[-1].resident_meta_bytes == 2 * 2 * ceil(n / row.plan.chunk) * 64 * 2
    assert entries[-1].moved_kv_bytes == entries[-1].resident_host_bytes == 0
    # Rounding to whole chunks and channels leaves little of what comm pays for.
    assert entries[0].moved_meta_bytes >= 0.6 * find_bytes(shape, row.budget) or row.plan.r == 64


def test_kept_tokens_on_the_host_move_when_they_are_selected() -> None:
    q, k, v = random_tokens(6, 2, 64)
    row = made(15, "1/8", q, k, v, 60, tier="host")
    device = made(15, "1/8", q, k, v, 60)
    ours, theirs = (run(each, q, k, v, 60, 64) for each in (row, device))
    for (out, attended), (expected, same) in zip(ours, theirs, strict=True):
        assert torch.equal(attended, same)
        assert torch.equal(out, expected)
    entry = row.store.ledger.entries[-1]
    assert entry.moved_kv_bytes == entry.moved_kv_heads_bytes == 2 * 19 * 64
    assert entry.resident_kv_bytes == 0
    assert entry.resident_host_bytes == 2 * (row.plan.n_kept + 4) * 64
    assert entry.released_bytes == 2 * 64


def test_the_official_budget_attends_to_half_of_its_tokens() -> None:
    shape = ModelShape("any", 1, 4, 2, 128, 1 << 20, (0,))
    params = replace(PARAMS, window=32, budget_rule="official", longest_answer=128)
    plan = RocketKV.variant_for(params, request(tokens=256), shape, 8064).plan
    # L = 8,192, cr = 32, a = 0.5, M = 1,448, c2 = 5.66.
    assert plan == RocketKV.Plan(1320, 32, 3, 67, 128, grows=False)
    assert RocketKV.label(params, request(tokens=256)) == "RocketKV (official)"


def test_wrong_parameters_and_budgets_are_refused_in_a_sentence() -> None:
    shape = ModelShape("any", 1, 4, 2, 16, 1 << 20, (0,))
    with pytest.raises(ConfigError, match="comm=0 pays for no channel"):
        RocketKV.check(PARAMS, request("0.2", comm="0"), shape)
    with pytest.raises(ConfigError, match=r"no room for method.window=32; use ratio=0.103 or more"):
        RocketKV.variant_for(replace(PARAMS, window=32), request("0.05", comm="1/8"), shape, 100)
    assert RocketKV.variant_for(replace(PARAMS, window=32), request("0.103", comm="1/8"), shape, 100)
    with pytest.raises(ConfigError, match=r"comm=1/4096 pays for no channel .* use comm=(\S+) or more") as refused:
        RocketKV.variant_for(PARAMS, request("0.2", comm="1/4096"), shape, 2000)
    least = str(refused.value).split("use comm=")[1].split()[0]
    assert RocketKV.variant_for(PARAMS, request("0.2", comm=least), shape, 2000).plan.r >= 1
    less = str(float(least) * 0.9)
    with pytest.raises(ConfigError, match="pays for no channel"):
        RocketKV.variant_for(PARAMS, request("0.2", comm=less), shape, 2000)
    with pytest.raises(ConfigError, match=r"less than method.window=8"):
        RocketKV.variant_for(replace(PARAMS, budget_rule="official"), request(tokens=1), shape, 100)
