import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import key_bytes, resolve
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.shapes import ModelShape
from kvbench.engine.turns.state import fork_of
from kvbench.kernels.pq_codes import PackedCodes, counted_bytes, pq_codes, pq_codes_ref
from kvbench.kernels.pq_fit import pq_fit
from kvbench.kernels.pq_scores import pq_logits_ref
from kvbench.methods.base import reported
from kvbench.methods.full import Full
from kvbench.methods.retrieving import pqcache
from kvbench.methods.retrieving.pqcache import PQCache, code_shape
from kvbench.methods.retrieving.pqcache_quantiser import Quantiser, first_centroids
from kvbench.methods.retrieving.pqcache_rounds import (
    Line,
    Parabola,
    clipped,
    fit_line,
    fit_parabola,
    rounds_by_line,
    rounds_by_two_lines,
)
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_for, row_of, step, trace_of

PARAMS = PQCache.Params(
    m="auto", b="auto", n_sink=32, local_share=Fraction(1, 2), budget_rule="fair", fit="all_but_sinks", iterations=10,
    tol=1e-4, empty="farthest", group_merge="softmax_sum", rebuild_every=0, overlap=True, cluster_on="auto",
    cache_includes_centroids=False, seed=0,
)  # fmt: skip
Tokens = tuple[Tensor, Tensor, Tensor]  # q, k and v of all tokens
GOLDEN_ROOT = Path(__file__).parents[2] / "golden" / "pqcache"
KINDS = ("search", "assign", "kmeans", "trace", "iters", "fit", "bytes")
GOLDEN = [path for kind in KINDS for path in sorted(GOLDEN_ROOT.glob(f"{kind}_*.npz"))]


# --- Reference vectors ------------------------------------------------------------------------


def run_vectors(path: Path) -> list[Check]:
    """Authors' search and coding, scikit-learn's k-means, float64 steps with eviction, the bound, bytes."""
    meta, x = load(path)
    kind = path.stem.partition("_")[0]
    check = {
        "search": check_search, "assign": check_assign, "kmeans": check_kmeans, "trace": check_trace,
        "iters": check_iters, "fit": check_fit, "bytes": check_bytes,
    }[kind]  # fmt: skip
    return [(path.stem, check(meta, x))]


def packed(codes: np.ndarray, b: int) -> PackedCodes:
    """Codes (n, h_kv, m) as the method keeps them."""
    turned = torch.from_numpy(codes.astype(np.uint8)).permute(1, 2, 0)
    h_kv, m, n = turned.shape
    made = PackedCodes(h_kv, m, b, n)
    made.extend(turned)
    return made


def row_with(meta: dict[str, Any], x: dict[str, np.ndarray], codes: np.ndarray, k: Tensor, v: Tensor) -> Any:
    """A variant that has the vector's sizes, centroids and codes."""
    sizes = PQCache.Plan(meta["sinks"], meta["local"], meta["k"], meta["m"], meta["b"])
    trace = trace_of(k, v, meta["H"], meta["s"])
    n_new = max(64, meta.get("steps", 1))
    row = row_of(PQCache, PARAMS, trace, request(tokens=1, comm="1"), sizes, n_new)
    row.pending[0].result()
    row.pending.clear()
    centroids = torch.from_numpy(x["centroids"])
    row.index[0] = Quantiser(centroids, centroids, packed(codes, meta["b"]), len(codes))
    return row


def check_search(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    k, v = (torch.from_numpy(x[name])[None] for name in ("k", "v"))
    row = row_with(meta, x, x["codes"], k, v)
    q, k_new, v_new = (torch.from_numpy(x[name])[None, :, None] for name in ("q", "k_new", "v_new"))
    out = step(row, q, k_new, v_new)
    quantiser, n = row.index[0], len(x["codes"])
    logits = pq_logits_ref(q[0, :, 0], quantiser.centroids, quantiser.codes, n) * row.trace.softmax[0].scale
    scores = logits.view(meta["Hk"], -1, n).softmax(-1).sum(1)
    return first(
        differs("approximate logits", logits, x["approx_logits_scaled"], 2e-5),
        differs("scores", scores, x["group_scores"], 2e-5),
        differs("selected", row.store[0].fetches[0][0].sort(-1).values, x["selected"]),
        differs("output", out[0, :, 0], x["attn_out"], 2e-5),
    )


def check_assign(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    keys = torch.from_numpy(x["keys"]).transpose(0, 1)
    codes = pq_codes(keys, torch.from_numpy(x["centroids"]))
    return differs("codes", codes.permute(2, 0, 1).numpy(), x["codes"])


def check_kmeans(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    points, rows = torch.from_numpy(x["x"]).float()[None], torch.from_numpy(x["init_idx"]).long()
    fit = pq_fit(points, rows, meta["max_iter"], tol=meta["tol"])
    far = ((x["x"][:, None] - x["centroids"]) ** 2).sum(-1)
    near = np.sort(far, -1)
    clear = near[:, 1] - near[:, 0] > 1e-4  # the others are nearly as close to two centroids
    later = [float(pq_fit(points, rows, n, tol=meta["tol"]).inertia[0]) for n in (1, 2, 3, 5, 10)]
    return first(
        differs("centroids", fit.centroids[0], x["centroids"], 1e-4),
        differs("codes", fit.codes[0].numpy()[clear], x["codes"][clear]),
        differs("rounds", int(fit.n_iter[0]), x["n_iter"]),
        differs("inertia", float(fit.inertia[0]) / x["inertia"], 1.0, 1e-5),
        differs("inertia by rounds", np.array(later) / x["inertia_after_1_2_3_5_10"], np.ones(5), 1e-5),
    )


def check_trace(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    k, v = (torch.from_numpy(x[f"{name}_all"])[None] for name in ("k", "v"))
    s, sinks = meta["s"], meta["sinks"]
    row = row_with(meta, x, x["codes_fit"], k, v)
    for t, q in enumerate(torch.from_numpy(x["q"])):
        now = slice(s + t, s + t + 1)
        out = step(row, q[None, :, None], k[:, :, now], v[:, :, now], t + 1)
        none = torch.empty(1, meta["Hk"], 0, dtype=torch.int64)  # where nothing is a candidate yet
        fetched = [*row.store[0].fetches, none][0][0].sort(-1).values.numpy()
        n = row.store[0].n_seen - sinks - row.store[0].n_window
        theirs = x["selected"][t]
        problem = first(
            differs(f"candidates of step {t}", n, x["n_candidates"][t]),
            differs(f"selected in step {t}", fetched, theirs[:, theirs[0] >= 0]),
            differs(f"output of step {t}", out[0, :, 0], x["attn_out"][t], 2e-5),
        )
        if problem:
            return problem
    n = len(x["codes_final"])  # those that have left the window by the end
    row.ready(0, n)
    codes = row.index[0].codes.codes(0, n).permute(2, 0, 1).numpy()
    return differs("codes at the end", codes, x["codes_final"])


def check_iters(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    number = {name: float(array) for name, array in x.items() if array.ndim == 0}
    layer = Parabola(number["alpha2"], number["beta2"], number["gamma2"])
    clustering = Line(number["alpha1"], number["beta1"])
    three, each = (Line(*x[f"{name}_slope_intercept"][::-1]) for name in ("base3", "per_iter"))
    lengths = [int(s) for s in x["s"]]
    raw = [rounds_by_line(s, layer.at(s), clustering) for s in lengths]
    two = [rounds_by_two_lines(s, layer.at(s), three, each) for s in lengths]
    bounds = (meta["lo"], meta["hi"])
    return first(
        differs("bound", raw, x["t_max_raw"], 1e-9),
        differs("rounds", [clipped(value, *bounds) for value in raw], x["t_max"]),
        differs("bound by two lines", two, x["t_max_two_line_raw"], 1e-9),
        differs("rounds by two lines", [clipped(value, *bounds) for value in two], x["t_max_two_line"]),
    )


def check_fit(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    work = (x["s"][:, None] * x["T"]).ravel().tolist()
    clustering = fit_line(work, x["time_cluster"].ravel().tolist())
    layer = fit_parabola(x["s"].tolist(), x["time_compute"].tolist())
    return first(
        differs("clustering", np.array(clustering) / x["alpha1_beta1"], np.ones(2), 1e-7),
        differs("layer", np.array(layer) / x["alpha2_beta2_gamma2"], np.ones(3), 1e-7),
    )


def check_bytes(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    for line, nominal in zip(x["table"], x["comm_nominal"], strict=True):
        row = dict(zip(map(str, x["columns"]), map(int, line), strict=True))
        shape = ModelShape("any", row["layers"], row["Hk"], row["Hk"], row["d_h"], 1 << 20, (0,))
        sizes = (row["Hk"], row["m"], row["b"], row["n_codes"])
        centroids = 2 * row["Hk"] * (1 << row["b"]) * row["d_h"]
        problem = first(
            differs("codes", counted_bytes(*sizes), row["code_bytes_packed_one_stream"]),
            differs("keys", key_bytes(shape, row["s"]), row["key_bytes"]),
            differs("centroids", centroids, row["centroid_bytes"]),
            differs("share", row["m"] * row["b"] / (16 * row["d_h"]), nominal),
        )
        if problem:
            return problem
    return None


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_pqcache_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def test_every_kind_of_vector_is_there() -> None:
    assert {path.stem.partition("_")[0] for path in GOLDEN} == set(KINDS)


def test_budgets_agree_with_the_table() -> None:
    """Bits that `comm` pays for, and the integers of both rules."""
    for path in sorted(GOLDEN_ROOT.glob("budget_*.npz")):
        _, x = load(path)
        for line in x["table"]:
            row = dict(zip(map(str, x["columns"]), map(int, line), strict=True))
            shape = ModelShape("any", 1, row["Hk"], row["Hk"], row["d_h"], 1 << 20, (0,))
            ratio, comm = (f"{row[f'{x}_num']}/{row[f'{x}_den']}" for x in ("ratio", "comm"))
            budget = resolve(request(ratio, comm=comm), row["s"], PQCache.traits.drops)
            params = replace(PARAMS, n_sink=row["sinks"])
            if budget.attends_all:
                continue
            m, b = code_shape(params, budget.comm, row["d_h"])
            assert m * b <= row["pq_bits"]
            fair = PQCache.plan_for(params, budget, shape)
            assert (fair.n_sink, fair.n_local, fair.k) == (row["n_sink"], row["local"], row["k"])
            theirs = PQCache.plan_for(replace(params, budget_rule="official"), budget, shape)
            assert (theirs.n_local, theirs.k) == (row["off_pq_local"], row["off_pq_k"])
            attended = theirs.n_sink + theirs.n_local + theirs.k + 1
            assert attended == row["off_pq_attended"]


# --- Against the definition -------------------------------------------------------------------


def random_tokens(n: int, h: int = 6, h_kv: int = 2, d_h: int = 16, seed: int = 0) -> Tokens:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, d_h, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


def variant(tokens: Tokens, s: int, sizes: PQCache.Plan | None = None, ask: Any = None, n_new: int = 64,
            cache: BlockCacheSpec | None = None, trace: Trace | None = None, **changes: Any) -> Any:  # fmt: skip
    q, k, v = tokens
    ask = ask or request(tokens=24, comm="1")
    trace = trace or trace_of(k, v, q.shape[1], s)
    return row_of(PQCache, replace(PARAMS, **changes), trace, ask, sizes, n_new, cache)


def run(row: Any, tokens: Tokens, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
    """Output and attended tokens of every step."""
    steps = []
    for at in range(start, stop):
        out = step(row, *token(tokens, at), at - start + 1)
        steps.append((out, row.store.attended(0)))
    return steps


def token(tokens: Tokens, at: int) -> Tokens:
    q, k, v = (x[:, :, at : at + 1] for x in tokens)
    return q, k, v


def by_definition(q: Tensor, k: Tensor, sizes: PQCache.Plan, centroids: Tensor, codes: Tensor, merge: str) -> Tensor:
    """What a step attends to, (h, n) bool: every head and token by itself in float64."""
    (h, d_h), (h_kv, n, _) = q[0, :, 0].shape, k[0].shape
    g, stop = h // h_kv, n - sizes.n_local - 1
    seen = torch.ones(h, n, dtype=torch.bool)
    seen[:, sizes.n_sink : stop] = False
    for kv in range(h_kv):
        scores = []
        for head in range(kv * g, (kv + 1) * g):
            logits = torch.zeros(stop - sizes.n_sink, dtype=torch.float64)
            for j, part in enumerate(q[0, head, 0].double().chunk(sizes.m)):
                table = centroids[kv, j].double() @ part
                logits += table[codes[kv, j, : len(logits)].long()]
            scores.append(logits / d_h**0.5)
        weights = torch.stack(scores)
        if merge == "per_query_head":
            for i, mine in enumerate(weights):
                seen[kv * g + i, best(mine, sizes.k) + sizes.n_sink] = True
            continue
        softmax = weights.softmax(-1)
        score = {"softmax_sum": softmax.sum(0), "max": softmax.amax(0), "logit_sum": weights.sum(0)}[merge]
        seen[kv * g : (kv + 1) * g, best(score, sizes.k) + sizes.n_sink] = True
    return seen


def exact_over(attended: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the token behind which nothing was seen yet, over attended tokens (h, n)."""
    n, g = attended.shape[1], q.shape[1] // k.shape[1]
    keys, values = (x[:, :, :n].repeat_interleave(g, 1) for x in (k, v))
    now, mask = q[:, :, n - 1 : n], attended[None, :, None]
    return torch.nn.functional.scaled_dot_product_attention(now, keys, values, attn_mask=mask)


def best(scores: Tensor, k: int) -> Tensor:
    return scores.sort(descending=True, stable=True).indices[:k]


@pytest.mark.parametrize("merge", ["softmax_sum", "logit_sum", "max", "per_query_head"])
@pytest.mark.parametrize(("m", "b", "fit"), [(2, 6, "all_but_sinks"), (4, 3, "middle"), (1, 8, "middle")])
def test_every_step_is_the_definition(m: int, b: int, fit: str, merge: str) -> None:
    tokens = random_tokens(340)
    s, sizes = 310, PQCache.Plan(4, 9, 12, m, b)
    row = variant(tokens, s, sizes, fit=fit, group_merge=merge)
    q, k, v = tokens
    for t, (out, attended) in enumerate(run(row, tokens, s, 340)):
        n = s + t + 1
        quantiser = row.index[0]
        # In float64, apart from the method: a token that was not clustered has its nearest centroids.
        codes = pq_codes_ref(k[0, :, 4:n], quantiser.centroids)
        assert torch.equal(quantiser.codes.codes(0, n - 14), codes[..., : n - 14])
        expected = by_definition(q[:, :, n - 1 : n], k[:, :, :n], sizes, quantiser.centroids, codes, merge)
        assert torch.equal(attended, expected)
        torch.testing.assert_close(out, exact_over(expected, q, k, v), atol=1e-5, rtol=0)
        entry = row.store.ledger.entries[t]
        assert entry.moved_meta_bytes == -(-2 * m * (n - 14) * b // 8)
        assert entry.resident_meta_bytes == 2 * 2 * 2**b * 16
        assert entry.attended == 6 * (4 + 12 + 10)
        if t > 0:
            late = t >= 10 if fit == "all_but_sinks" else True
            assert entry.released_bytes == 2 * 2 * 2 * 16 + late * -(-2 * m * b // 8)


def test_codes_of_the_prompt_are_nearest_centroids_of_its_own_clustering() -> None:
    tokens = random_tokens(200)
    row = variant(tokens, 200, PQCache.Plan(5, 9, 12, 2, 4))
    quantiser = row.ready(0, 1)
    assert quantiser.n_fit == quantiser.codes.n == 195
    keys = tokens[1][0, :, 5:]
    assert torch.equal(quantiser.codes.codes(), pq_codes_ref(keys, quantiser.centroids))
    points = keys.view(2, 195, 2, 8).transpose(1, 2).reshape(4, 195, 8)
    fit = pq_fit(points, first_centroids(0, 195, 16), 10)
    assert torch.equal(quantiser.centroids, fit.centroids.view(2, 2, 16, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_everything_is_selected_it_is_full_attention(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in random_tokens(90))
    row = variant((q, k, v), 60, PQCache.Plan(3, 4, 200, 2, 4))
    full = built(row_for(Full, Full.Params(), request("1"), trace_of(k, v, 6, 60), 64))
    for (out, attended), (expected, _) in zip(run(row, (q, k, v), 60, 90), run(full, (q, k, v), 60, 90), strict=True):
        assert attended.all()
        atol = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(out, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("fit", ["all_but_sinks", "middle"])
def test_fewer_tokens_than_centroids_are_scored_exactly(fit: str) -> None:
    tokens = random_tokens(60)
    q, k, _ = tokens
    sizes = PQCache.Plan(4, 9, 12, 2, 6)
    row = variant(tokens, 55, sizes, fit=fit)
    _, attended = run(row, tokens, 55, 56)[0]
    logits = (q[0, :, 55].view(2, 3, 16) @ k[0, :, 4:46].mT) / 4  # (h_kv, g, n)
    expected = best(logits.softmax(-1).sum(1), 42)[:, :12].sort(-1).values + 4
    assert torch.equal(row.store[0].fetches[0][0].sort(-1).values, expected)
    quantiser = row.index[0]
    assert quantiser.centroids.shape[2] == quantiser.n_fit == (51 if fit == "all_but_sinks" else 42)
    run(row, tokens, 56, 60)  # tokens that leave the window find centroids, too
    assert attended.sum(-1).tolist() == [4 + 12 + 10] * 6


def test_tokens_with_equal_codes_go_by_position() -> None:
    q, k, v = random_tokens(80)
    k[:, :, 4:70] = k[:, :, 4:5]
    _, attended = run(variant((q, k, v), 79, PQCache.Plan(4, 8, 12, 2, 4)), (q, k, v), 79, 80)[0]
    assert attended[0].nonzero().flatten().tolist() == [*range(16), *range(71, 80)]


def test_permuting_heads_permutes_the_result() -> None:
    tokens = random_tokens(120)
    q, k, v = (x.unflatten(1, (2, -1)).flip(1).flatten(1, 2) for x in tokens)
    turned = (q, k, v)
    plain, other = (run(variant(x, 110, PQCache.Plan(4, 9, 12, 2, 4)), x, 110, 120) for x in (tokens, turned))
    for (out, _), (out_turned, _) in zip(plain, other, strict=True):
        torch.testing.assert_close(out.unflatten(1, (2, 3)).flip(1).flatten(1, 2), out_turned)


def test_first_generated_token_is_recalled_with_its_own_key_and_value() -> None:
    q, k, v = random_tokens(130)
    k[:, :, 110] = 5 * q[:, ::3, 119]  # what one later query looks for
    row = variant((q, k, v), 110, PQCache.Plan(4, 6, 12, 2, 4))
    steps = run(row, (q, k, v), 110, 120)
    assert all(attended[:, 110].all() for _, attended in steps[:7])  # in the window
    out, attended = steps[9]
    assert (row.store[0].fetches[0] == 110).any(-1).all()
    torch.testing.assert_close(out, exact_over(attended, q, k, v), atol=1e-5, rtol=0)


def test_long_answers_stay_within_comm_and_budget() -> None:
    tokens = random_tokens(400, d_h=8)
    ask = request("1/10", comm="1/16")  # 2 x 4 bits: all that it pays for
    for rule in ("fair", "official"):
        row = variant(tokens, 240, ask=ask, n_new=160, n_sink=4, budget_rule=rule)
        run(row, tokens, 240, 400)
        assert row.store.ledger.within(row.budget, row.trace.shape) == (rule == "fair")
        last = row.store.ledger.entries[-1]
        if rule == "fair":
            assert last.moved_meta_bytes == key_bytes(row.trace.shape, 240) // 16
        assert row.report()["n_window"] == (156 if rule == "fair" else 12)


# --- The system -------------------------------------------------------------------------------


def outs(row: Any, tokens: Tokens, start: int, stop: int) -> Tensor:
    return torch.cat([out for out, _ in run(row, tokens, start, stop)])


def test_clustering_goes_on_beside_the_prefill_and_is_awaited_at_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, real = Event(), pqcache.quantise
    where = []

    def held(*args: Any) -> Quantiser:
        where.append(current_thread())
        assert go.wait(10)
        return real(*args)

    monkeypatch.setattr(pqcache, "quantise", held)
    tokens = random_tokens(120)
    row = variant(tokens, 110, PQCache.Plan(4, 9, 12, 2, 4))  # returns though nothing is clustered
    assert not row.pending[0].done()
    go.set()
    beside = outs(row, tokens, 110, 120)
    assert where[0] is not main_thread()
    inline = variant(tokens, 110, PQCache.Plan(4, 9, 12, 2, 4), overlap=False)
    assert inline.pending[0].done()
    assert where[1] is main_thread()
    assert torch.equal(beside, outs(inline, tokens, 110, 120))


def test_a_failure_on_the_thread_reaches_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Quantiser:
        raise RuntimeError("no centroids today")

    monkeypatch.setattr(pqcache, "quantise", fail)
    tokens = random_tokens(120)
    row = variant(tokens, 110, PQCache.Plan(4, 9, 12, 2, 4))
    with pytest.raises(RuntimeError, match="no centroids today"):
        run(row, tokens, 110, 111)


def test_variants_share_what_is_the_same_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], pqcache.quantise
    monkeypatch.setattr(pqcache, "quantise", lambda *args: made.append(args) or real(*args))
    tokens = random_tokens(140)
    trace = trace_of(tokens[1], tokens[2], 6, 110)
    rows = [variant(tokens, 110, PQCache.Plan(4, 9, k, 2, 4), trace=trace) for k in (12, 30)]
    rows.append(variant(tokens, 110, PQCache.Plan(4, 9, 12, 2, 4), trace=trace, overlap=False))
    assert len(made) == 1
    alone = [outs(variant(tokens, 110, PQCache.Plan(4, 9, k, 2, 4)), tokens, 110, 140) for k in (12, 30, 12)]
    made.clear()
    together: list[list[Tensor]] = [[] for _ in rows]
    for at in range(110, 140):  # step by step, long enough for generated tokens to be coded
        for row, mine in zip(rows, together, strict=True):
            mine.append(step(row, *token(tokens, at), at - 109))
    for mine, expected in zip(together, alone, strict=True):
        assert torch.equal(torch.cat(mine), expected)
    changes: list[dict[str, Any]]
    changes = [{"seed": 1}, {"iterations": 3}, {"tol": 0.0}, {"empty": "keep"}, {"fit": "middle"}]
    for change in changes:
        variant(tokens, 110, PQCache.Plan(4, 9, 12, 2, 4), trace=trace, **change)
    variant(tokens, 110, PQCache.Plan(5, 9, 12, 2, 4), trace=trace)
    variant(tokens, 110, PQCache.Plan(4, 9, 12, 2, 3), trace=trace)
    for future in [x for x in trace._shared.values() if hasattr(x, "result")]:
        future.result()
    assert len(made) == 7


def test_a_row_that_goes_back_has_codes_of_its_own() -> None:
    tokens = random_tokens(140)
    row = variant(tokens, 110, PQCache.Plan(4, 9, 12, 2, 4))
    run(row, tokens, 110, 122)
    codes, fork = row.index[0].codes, fork_of(row)
    forked, n = fork.index[0].codes, codes.n
    with torch.inference_mode():  # as copies are made
        goes_on, again = ([step(one, *token(tokens, at), at - 109) for at in range(122, 140)] for one in (row, fork))
    assert forked is not codes and n < codes.n == forked.n
    assert torch.equal(torch.cat(goes_on), torch.cat(again))
    assert torch.equal(forked.codes(), codes.codes())


def test_a_block_cache_changes_books_and_no_output() -> None:
    tokens = random_tokens(330)
    sizes, books = PQCache.Plan(4, 9, 30, 2, 4), {}
    for policy, n_tokens in (("lfu", 0), ("lfu", 64), ("lru", 64)):
        cache = BlockCacheSpec(n_tokens, 16, 4, cast(Any, policy))
        row = variant(tokens, 300, sizes, cache=cache)
        result = outs(row, tokens, 300, 330)
        books[policy, n_tokens] = (result, row.store.ledger.entries, row.report())
    plain, entries, said = books["lfu", 0]
    assert "cache_hit_rate_warm" not in said
    for policy in ("lfu", "lru"):
        result, cached, said = books[policy, 64]
        assert torch.equal(result, plain)
        assert cached[0].cache_hits == 0
        for with_cache, without in zip(cached, entries, strict=True):
            saved = without.moved_kv_bytes - with_cache.moved_kv_bytes
            assert saved == with_cache.cache_hits * 4 * 16
        hits = sum(entry.cache_hits for entry in cached)
        assert said["cache_hit_rate_warm"] == hits / (29 * 2 * 30) > 0


def test_centroids_may_take_their_room_out_of_the_cache() -> None:
    tokens = random_tokens(300)
    cache = BlockCacheSpec(4096, 128, 32, "lfu")
    for includes, left in ((False, 4096), (True, 4064)):  # 64 centroids: 32 tokens' keys and values
        ask = request(tokens=24, comm="1/16")
        changes: dict[str, Any] = {"cache_includes_centroids": includes}
        row = variant(tokens, 290, ask=ask, cache=cache, m=2, b=6, **changes)
        assert row.store.cache_spec.tokens == left
    with pytest.raises(ConfigError, match=r"cache.tokens=200 has no room .* use 256 or more"):
        PQCache.check_cache(replace(PARAMS, cache_includes_centroids=True), replace(cache, tokens=200))


@pytest.mark.parametrize("fit", ["all_but_sinks", "middle"])
@pytest.mark.parametrize("overlap", [True, False])
def test_rebuilding_swaps_centroids_and_codes_at_the_next_step(overlap: bool, fit: str) -> None:
    tokens = random_tokens(360, seed=3)
    k = tokens[1]
    k[:, :, 300:] += 4  # what is generated looks different
    sizes = PQCache.Plan(4, 9, 12, 2, 4)
    row = variant(tokens, 300, sizes, rebuild_every=20, overlap=overlap, fit=fit)
    run(row, tokens, 300, 320)
    old = row.index[0]
    assert 0 in row.pending
    run(row, tokens, 320, 321)
    new = row.index[0]
    n = 316 if fit == "all_but_sinks" else 306
    points = k[0, :, 4 : 4 + n].view(2, n, 2, 8).transpose(1, 2).reshape(4, n, 8)
    start = old.centroids.flatten(0, 1)
    fresh = pq_fit(points, first_centroids(0, n, 16), 10, start=start)
    assert torch.equal(new.centroids, fresh.centroids.view(2, 2, 16, 8))
    assert new.n_fit == n
    run(row, tokens, 321, 360)
    assert row.report()["n_rebuilds"] == 3
    latest = row.ready(0, 1)
    codes = pq_codes_ref(k[0, :, 4 : 4 + latest.codes.n], latest.centroids)
    assert torch.equal(latest.codes.codes(), codes)
    plain = outs(variant(tokens, 300, sizes), tokens, 300, 321)
    again = outs(variant(tokens, 300, sizes, rebuild_every=20), tokens, 300, 321)
    assert torch.equal(plain[:20], again[:20])


def test_a_short_prompt_is_rebuilt_from_new_centroids() -> None:
    tokens = random_tokens(90)
    row = variant(tokens, 50, PQCache.Plan(4, 6, 12, 2, 6), rebuild_every=30)
    run(row, tokens, 50, 90)
    assert row.index[0].centroids.shape == (2, 2, 64, 8)
    assert row.index[0].n_fit == 76


# --- Configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("d_h", "comm", "pair"),
    [(128, "1/64", (4, 8)), (128, "1/128", (2, 6)), (64, "1/64", (2, 6)), (64, "1/128", (2, 4)),
     (64, "1/32", (4, 8)), (64, "1/256", (2, 2)), (64, "3/256", (2, 6)), (8, "1/16", (2, 4))],
)  # fmt: skip
def test_bits_follow_from_comm(d_h: int, comm: str, pair: tuple[int, int]) -> None:
    assert code_shape(PARAMS, Fraction(comm), d_h) == pair


def test_one_of_the_two_may_be_given() -> None:
    assert code_shape(replace(PARAMS, m=8), Fraction("1/64"), 64) == (8, 2)
    assert code_shape(replace(PARAMS, m=1), Fraction("1/64"), 64) == (1, 8)
    assert code_shape(replace(PARAMS, b=2), Fraction("1/64"), 64) == (8, 2)
    assert code_shape(replace(PARAMS, b=6), Fraction("1/64"), 64) == (2, 6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"m": 2, "b": 6}, r"12 bits per key, of which comm=1/128 pays for 8 .* use comm=3/256 or more, or a .* 2x4"),
        ({"m": 7}, r"method.m=7 does not divide d_h=64; use 1, 2, 4, 8, 16, 32 or 64"),
        ({"m": 16}, r"method.m=16, method.b=1 are 16 bits"),
    ],
)
def test_what_cannot_be_met_is_refused(changes: dict[str, Any], says: str) -> None:
    shape = ModelShape("any", 1, 9, 3, 64, 8192, (0,))
    with pytest.raises(ConfigError, match=says):
        PQCache.check(replace(PARAMS, **changes), request("0.1", comm="1/128"), shape)


def test_a_comm_that_pays_for_no_code_is_refused_unless_nothing_is_left_out() -> None:
    shape = ModelShape("any", 1, 9, 3, 64, 8192, (0,))
    with pytest.raises(ConfigError, match=r"comm=0 pays for 0 .* use comm=1/256 or more"):
        PQCache.check(PARAMS, request("0.1", comm="0"), shape)
    PQCache.check(PARAMS, request("1", comm="0"), shape)


def test_labels_say_what_is_not_default() -> None:
    ask = request("0.1", comm="1/64")
    assert PQCache.label(PARAMS, ask) == "PQCache"
    assert PQCache.label(replace(PARAMS, m=2, b=6), ask) == "PQCache (2x6)"
    assert PQCache.label(replace(PARAMS, b=6), ask) == "PQCache (b=6)"
    assert PQCache.label(replace(PARAMS, budget_rule="official"), ask) == "PQCache (official)"


def test_the_report_says_which_quantiser_it_was() -> None:
    tokens = random_tokens(120)
    row = variant(tokens, 110, ask=request("0.2", comm="1/16"))
    run(row, tokens, 110, 112)
    said = row.report()
    assert (said["m"], said["b"], said["comm_nominal"]) == (2, 6, 12 / 256)
    assert said["iterations"] == [10]
    assert 0 < said["kmeans_rounds"] <= 10
    json.dumps(said)
    assert reported(variant(tokens, 110, ask=request("1"))) == {}
