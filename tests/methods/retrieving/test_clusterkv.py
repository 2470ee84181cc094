import json
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvbench.engine.budget import resolve
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.sampling.draws import seeded
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import step_rows
from kvbench.kernels.clusters import cluster_order, cluster_tokens
from kvbench.kernels.kmeans import draw_points, kmeans, nearest
from kvbench.methods.base import reported
from kvbench.methods.full import Full
from kvbench.methods.indexed import merged
from kvbench.methods.retrieving import clusterkv
from kvbench.methods.retrieving.clusterkv import (
    ClusterKV,
    Clusters,
    append_clusters,
    cluster_keys,
    hit_rates,
    touched,
)
from kvbench.methods.retrieving.oracle import Oracle
from kvbench.tests.vectors import Check, built, differs, first, request, row_for, row_of, step, trace_of

PARAMS = ClusterKV.Params(
    comm_mode="native", num_clusters=None, metric="cosine", max_rounds=20, n_sink=4, agg="query_head",
    decode_period=320, decode_clusters=None, full_layers=0, cache_steps=1, overlap=True, seed=0,
)  # fmt: skip
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "clusterkv").glob("*.npz"))
NO_CACHE = BlockCacheSpec(0, 128, 32, "lfu")


# --- Reference vectors ------------------------------------------------------------------------


def run_vectors(path: Path) -> list[Check]:
    """Authors' code: selection and attention, k-means with appended clusters, recall, cache hits."""
    with np.load(path) as file:
        x = {name: file[name] for name in file.files}
    # Parameters are scalars among the arrays, and may stand in `meta`.
    meta = json.loads(str(x.pop("meta"))) if "meta" in x else {}
    meta |= {name: value.item() for name, value in x.items() if value.ndim == 0}
    kind = path.stem.split("_")[0]
    check = {
        "select": check_select,
        "kmeans": check_kmeans,
        "recall": check_recall,
        "cachehit": check_hits,
    }[kind]
    return [(path.stem, check(meta, x))]


def check_select(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    q, k, v, centroids = (torch.from_numpy(x[name]).unsqueeze(0) for name in ("q", "k", "v", "centroids"))
    s, n_sink, n = meta["prompt_len"], meta["sink"], k.shape[2]
    agg = {"group_mean": "group_mean", "avg": "group_mean"}.get(str(meta.get("gqa")), "query_head")
    clusters = clusters_of(nearest(k[0, :, n_sink:s], centroids[0], meta.get("metric", "cosine")), centroids[0])
    labels = torch.zeros_like(clusters.tokens)
    for c, (start, stop) in enumerate(zip((clusters.ends - clusters.sizes).T, clusters.ends.T, strict=True)):
        for head in range(len(labels)):
            labels[head, clusters.tokens[head, start[head] : stop[head]]] = c
    tokens = min(s, meta["budget"])
    scores = q[0].view(len(centroids[0]), -1, q.shape[2]) @ centroids[0].mT  # (h_kv, g, c)
    order = cluster_order(merged(scores.unsqueeze(0), agg))
    sizes = clusters.sizes.repeat_interleave(order.shape[1] // len(clusters.sizes), 0)
    needed = touched(order[0], sizes, tokens - n_sink).gather(-1, order[0])
    last = torch.arange(1, needed.shape[-1] + 1).mul(needed).amax(-1)  # empty clusters between are touched too
    selected = cluster_tokens(order, clusters.sizes, clusters.ends, clusters.tokens, tokens - n_sink)[0] + n_sink
    problem = first(
        differs("labels", labels, x["labels"]), differs("sizes", clusters.sizes, x["cluster_sizes"]),
        differs("ends", clusters.ends, x["cluster_sizes_cumsum"]),
        differs("tokens", clusters.tokens, x["sorted_indices"]),
        differs("order", order[0], x["cluster_order"]), differs("needed", last, x["num_needed"]),
        differs("budget", tokens, meta.get("effective_budget", tokens)),
        differs("selected", selected, x["selected"]),
    )  # fmt: skip
    params = replace(PARAMS, n_sink=n_sink, agg=agg, decode_clusters=0)
    plan = ClusterKV.Plan(n_sink, tokens - n_sink, centroids.shape[2], 0)
    row = row_of(
        ClusterKV, params, trace_of(k, v, q.shape[1], s), request(tokens=meta["budget"]), plan,
        n_new=max(64, n - s),
    )  # fmt: skip
    row.index[0] = clusters
    for i in range(s, n - 1):
        row.store[0].append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        row.store.close(0)
    out = step(row, q.unsqueeze(2), k[:, :, n - 1 :], v[:, :, n - 1 :], n - s)
    expected = np.zeros((q.shape[1], n), dtype=bool)
    np.put_along_axis(expected, x["selected"].astype(np.int64), True, 1)
    expected[:, :n_sink] = expected[:, s:] = True
    return problem or first(
        differs("attended", row.store.attended(0), expected),
        differs("output", out[0, :, 0], x["attn_out"], 1e-5),
    )


def check_kmeans(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    def run(keys: np.ndarray, init: np.ndarray) -> tuple[Tensor, Clusters]:
        points = torch.from_numpy(keys)
        start = points[:, torch.from_numpy(init).long()]
        done = kmeans(points, start, meta["niter"], meta.get("metric", "cosine"))
        return done.labels, clusters_of(done.labels, done.centroids)

    labels, ours = run(x["keys"], x["init_idx"])
    problem = differs("labels", labels, x["labels"]) or compare(ours, x, "")
    if "keys_append" in x:
        labels, late = run(x["keys_append"], x["init_idx_append"])
        problem = problem or differs("appended labels", labels, x["labels_append"])
        problem = problem or compare(append_clusters(ours, late), x, "_after")
    return problem


def compare(ours: Clusters, x: dict[str, np.ndarray], which: str) -> str | None:
    return first(
        differs(f"centroids{which}", ours.centroids, x[f"centroids{which}"], 1e-4),
        differs(f"sizes{which}", ours.sizes, x[f"sizes{which}"]),
        differs(f"ends{which}", ours.ends, x[f"sizes_cumsum{which}"]),
        differs(f"tokens{which}", ours.tokens, x[f"sorted_indices{which}"]),
    )


def check_recall(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    ours = recall(*(torch.from_numpy(x[name]) for name in ("q", "k", "selected")))
    return differs("recall", ours, x["recall_mean_over_heads"], 1e-6)


def check_hits(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    selected = torch.from_numpy(x["selected_clusters"]).long()
    c = int(selected.max()) + 1
    flags = torch.zeros(*selected.shape[:2], c + 1, dtype=torch.bool)
    flags.scatter_(-1, selected % (c + 1), True)  # padding lands in the last column
    ours = hit_rates(flags[..., :c], meta["R"])
    return first(
        differs("hit rate", ours, x["hit_rate_per_step"], 1e-6),
        differs("mean hit rate", ours.mean(), x["hit_rate_mean"], 1e-6),
    )


def recall(q: Tensor, keys: Tensor, selected: Tensor) -> float:
    """Share of the true top-k, by q·k of keys (h, s, d_h), that is among `selected` (h, k); mean over heads."""
    logits = (keys @ q.unsqueeze(-1)).squeeze(-1)
    best = torch.zeros_like(logits).scatter(1, logits.topk(selected.shape[1]).indices, 1.0)
    return best.gather(1, selected.long()).mean().item()


def clusters_of(labels: Tensor, centroids: Tensor) -> Clusters:
    c = centroids.shape[1]
    sizes = torch.stack([torch.bincount(mine, minlength=c) for mine in labels])
    return Clusters(centroids, sizes, sizes.cumsum(-1), labels.sort(dim=-1, stable=True).indices)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_clusterkv_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def test_every_kind_of_vector_is_there() -> None:
    assert {path.stem.split("_")[0] for path in GOLDEN} == {
        "select",
        "kmeans",
        "recall",
        "cachehit",
    }


# --- Rows on random tokens --------------------------------------------------------------------

H, H_KV, D, S = 4, 2, 16, 200


def tokens(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)  # always 400: the first n are the same whatever n is
    q, k, v = (torch.randn(1, heads, 400, D, generator=draw)[:, :, :n] for heads in (H, H_KV, H_KV))
    k[..., 2] += 8  # a channel that is far larger than the others, as keys have
    return q, k, v


def walk(row: Any, n_steps: int, seed: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Steps over generated tokens: their number and the layer's output."""
    q, k, v = tokens(row.trace.s_prompt + n_steps, seed)
    for t in range(1, n_steps + 1):
        now = slice(row.trace.s_prompt + t - 1, row.trace.s_prompt + t)
        yield t, step(row, q[:, :, now], k[:, :, now], v[:, :, now], t)


def trace(n: int = 400, s: int = S, seed: int = 0) -> Trace:
    _, k, v = tokens(n, seed)
    return trace_of(k, v, H, s)


def row(tokens: int = 40, n_new: int = 64, on: Trace | None = None, comm: str = "0", **changes: Any) -> Any:
    on = trace() if on is None else on
    return row_of(ClusterKV, replace(PARAMS, **changes), on, request(tokens=tokens, comm=comm), n_new=n_new)


def fetched(row: Any) -> Tensor:
    return row.store[0].fetches[-1][0]


def by_hand(row: Any, q: Tensor) -> list[list[int]]:
    """Selected positions per query head, by loops over ranked clusters and their tokens."""
    clusters, g, chosen = row.index[0], H // H_KV, []
    for head in range(H):
        kv = head // g
        scores = q[0, head, 0] @ clusters.centroids[kv].T
        members: list[int] = []
        for c in scores.argsort(descending=True).tolist():
            end, size = int(clusters.ends[kv, c]), int(clusters.sizes[kv, c])
            members += sorted(clusters.tokens[kv, end - size : end].tolist())
        chosen.append([token + row.plan.n_sink for token in members[: row.plan.k]])
    return chosen


@pytest.mark.parametrize("num_clusters", [1, 7, 100, 196])
def test_whole_clusters_come_in_order_of_their_inner_product(num_clusters: int) -> None:
    q, k, v = tokens(S + 1)
    mine = row(num_clusters=num_clusters)
    step(mine, q[:, :, S:], k[:, :, S:], v[:, :, S:])
    assert mine.index[0].centroids.shape[1] == num_clusters
    assert fetched(mine).tolist() == by_hand(mine, q[:, :, S:])


def test_a_cluster_per_token_is_the_exact_top_of_every_query_head() -> None:
    q, k, v = tokens(S + 1)
    mine = row(num_clusters=S, max_rounds=1)
    assert mine.plan.n_clusters == S - 4
    oracle = Oracle.Params("query_head", 4, Fraction(0), "inside", "fair", "renormalise")
    best = row_of(Oracle, oracle, trace(), request(tokens=40))
    now = (q[:, :, S:], k[:, :, S:], v[:, :, S:])
    torch.testing.assert_close(step(mine, *now), step(best, *now))
    assert torch.equal(mine.store.attended(0), best.store.attended(0))


def test_one_cluster_gives_the_first_tokens() -> None:
    mine = row(num_clusters=1)
    for t, _ in walk(mine, 3):
        attended = mine.store.attended(0)
        assert attended[:, :40].all()
        assert attended.sum(-1).tolist() == [40 + t] * H


@pytest.mark.parametrize("agg", ["query_head", "group_mean"])
@pytest.mark.parametrize("n_tokens", [1, 2, 9, 40, 199])
def test_every_query_head_attends_to_exactly_its_budget(agg: str, n_tokens: int) -> None:
    mine = row(n_tokens, agg=agg)
    for t, _ in walk(mine, 5):
        assert mine.store.attended(0).sum(-1).tolist() == [n_tokens + t] * H
        assert mine.store.ledger.entries[-1].attended == (n_tokens + t) * H
    assert mine.store.ledger.within(mine.budget, mine.trace.shape)


def test_query_heads_of_a_group_choose_for_themselves_or_as_one() -> None:
    each, mean = row(num_clusters=10), row(num_clusters=10, agg="group_mean")
    for (_, _), (_, _) in zip(walk(each, 1), walk(mean, 1), strict=True):
        assert fetched(each).shape == (H, 36)
        assert fetched(mean).shape == (H_KV, 36)
        assert not torch.equal(fetched(each)[0], fetched(each)[1])
    q = tokens(S + 1)[0][:, :, S:]
    scores = torch.einsum("khd,kcd->khc", q[0].view(H_KV, 2, D), mean.index[0].centroids).mean(1)
    order = cluster_order(ClusterKV.scored([mean], 0, q)[0][0])[0]
    assert torch.equal(order, scores.argsort(-1, descending=True))


def test_without_groups_both_are_the_same() -> None:
    _, k, v = tokens(400)
    q = tokens(400, seed=5)[0][:, :2]
    outs = []
    for agg in ("query_head", "group_mean"):
        mine = row(on=trace_of(k, v, 2, S), agg=agg)
        outs.append(step(mine, q[:, :, S : S + 1], k[:, :, S : S + 1], v[:, :, S : S + 1]))
    assert torch.equal(*outs)


def test_the_prompts_last_tokens_have_no_privilege() -> None:
    mine = row(12, num_clusters=1)
    for t, _ in walk(mine, 3):
        attended = mine.store.attended(0)
        assert not attended[:, 12:S].any()
        assert attended[:, S : S + t].all()


@pytest.mark.parametrize("n_tokens", [S, S + 50])
def test_a_prompt_within_the_budget_is_dense_and_needs_no_clusters(n_tokens: int) -> None:
    mine = row(n_tokens)
    full = row_of(Full, Full.Params(), trace(), request(ratio="1"))
    for (_, ours), (_, theirs) in zip(walk(mine, 4), walk(full, 4), strict=True):
        assert torch.equal(ours, theirs)
        assert mine.store.attended(0).all()
    assert (mine.index, mine.pending, reported(mine)) == ({}, {}, {})


# --- Clusters of generated tokens -------------------------------------------------------------


def test_generated_tokens_become_clusters_every_period_and_leave_the_device() -> None:
    mine = row(60, decode_period=6, decode_clusters=2, num_clusters=5)
    late_fetched = 0
    for t, _ in walk(mine, 20):
        n_window = (t - 1) % 6 + 1
        n_clustered = t - n_window
        assert mine.store[0].n_window == n_window
        assert mine.store.attended(0).sum(-1).tolist() == [60 + n_window] * H
        assert int(fetched(mine).max()) < S + n_clustered, "a resident token was fetched"
        assert mine.protected(0) == [0, 1, 2, 3, *range(S + n_clustered, S + t)]
        late_fetched += int((fetched(mine) >= S).sum())
        entry = mine.store.ledger.entries[-1]
        c = 5 + 2 * (n_clustered // 6)
        assert entry.resident_meta_bytes == H_KV * (c * (2 * D + 8) + 4 * (S - 4 + n_clustered))
        assert entry.released_bytes == (6 * H_KV * D * 4 if n_window == 6 else 0)
        assert entry.resident_host_bytes == (S - 4 + n_clustered) * H_KV * D * 4
        assert mine.store[0].n_seen == S + t
    assert late_fetched > 0, "no generated token was ever recalled"
    assert mine.index[0].sizes.shape == (H_KV, 5 + 3 * 2)
    assert mine.store.ledger.within(mine.budget, mine.trace.shape)


def test_late_clusters_are_those_of_the_generated_keys_alone() -> None:
    mine = row(60, decode_period=8, decode_clusters=3, num_clusters=5)
    before = mine.pending[0].result()
    for _ in walk(mine, 17):
        pass
    _, k, _ = tokens(S + 17)
    expected = before
    for batch in (1, 2):
        keys = k[0, :, S + 8 * (batch - 1) : S + 8 * batch]
        late = cluster_keys(keys, 3, "cosine", 20, seeded(0, 0, batch))
        expected = append_clusters(expected, late)
    for name in ("centroids", "sizes", "ends", "tokens"):
        assert torch.equal(getattr(mine.index[0], name), getattr(expected, name)), name
    for head in range(H_KV):
        assert sorted(expected.tokens[head].tolist()) == list(range(S - 4 + 16))


def test_late_tokens_are_recalled_with_their_own_keys_and_values() -> None:
    """With all but one token selected, the output is that of attention without it."""
    mine = row(S - 1, decode_period=5, decode_clusters=5, num_clusters=S, n_new=24)
    q, k, v = tokens(S + 12)
    for t, out in walk(mine, 12):
        n = S + t
        kept = mine.store.attended(0)
        logits = (q[:, :, n - 1 : n] @ k[:, :, :n].repeat_interleave(2, 1).mT)[0, :, 0] * D**-0.5
        weights = logits.masked_fill(~kept, -torch.inf).softmax(-1).unsqueeze(1)
        expected = weights @ v[0, :, :n].repeat_interleave(2, 0)
        torch.testing.assert_close(out[0], expected, atol=1e-5, rtol=1e-5)


def test_without_late_clusters_all_generated_tokens_stay() -> None:
    mine = row(40, decode_period=6, decode_clusters=0)
    for t, _ in walk(mine, 20):
        assert mine.store[0].n_window == t
    assert sum(entry.released_bytes for entry in mine.store.ledger.entries) == 0
    assert mine.index[0].tokens.shape[1] == S - 4


@pytest.mark.parametrize("n_new", [5, 6, 7])
def test_an_answer_as_long_as_the_period_fits(n_new: int) -> None:
    mine = row(40, n_new=n_new, decode_period=6, decode_clusters=2)
    for t, _ in walk(mine, n_new):
        assert mine.store[0].n_window == (t - 1) % 6 + 1


# --- Building ---------------------------------------------------------------------------------


def test_clusters_are_built_beside_the_prefill_and_awaited_at_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, threads = Event(), []
    build = clusterkv.cluster_keys

    def slow(*arguments: Any) -> Clusters:
        threads.append(current_thread())
        assert go.wait(30)
        return build(*arguments)

    monkeypatch.setattr(clusterkv, "cluster_keys", slow)
    mine = row()
    assert not mine.pending[0].done()
    assert mine.index == {}
    go.set()
    for _ in walk(mine, 2):
        pass
    assert len(threads) == 1
    assert threads[0] is not main_thread()
    assert mine.index[0].seconds > 0


def test_waiting_at_once_gives_the_same_tokens() -> None:
    beside, waiting = row(overlap=True), row(overlap=False)
    assert waiting.pending[0].done()
    for (_, ours), (_, theirs) in zip(walk(beside, 5), walk(waiting, 5), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(fetched(beside), fetched(waiting))


def test_variants_share_what_is_the_same_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    build = clusterkv.cluster_keys

    def counted(*arguments: Any) -> Clusters:
        calls.append(arguments)
        return build(*arguments)

    monkeypatch.setattr(clusterkv, "cluster_keys", counted)
    on = trace()
    same = [row(n, on=on, agg=agg, overlap=o) for n, agg, o in ((20, "query_head", True), (80, "group_mean", False))]
    others = [
        row(on=on, seed=1),
        row(on=on, metric="l2"),
        row(on=on, num_clusters=9),
        row(on=on, n_sink=2),
    ]
    for mine in (*same, *others):
        mine.ready(0)
    assert len(calls) == 5
    assert same[0].index[0] is same[1].index[0]
    assert len({id(mine.index[0]) for mine in others}) == 4


def test_a_failure_on_the_thread_reaches_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Clusters:
        raise MemoryError("no room for clusters")

    monkeypatch.setattr(clusterkv, "cluster_keys", fails)
    mine = row()
    with pytest.raises(MemoryError, match="no room"):
        next(walk(mine, 1))


def test_draws_depend_on_seed_layer_and_batch_alone() -> None:
    draws = {
        key: torch.rand(4, generator=seeded(*key)).tolist()
        for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (2**40, 0, 0))
    }
    assert len({tuple(draw) for draw in draws.values()}) == len(draws)
    torch.manual_seed(3)
    assert torch.rand(4, generator=seeded(0, 0, 0)).tolist() == draws[0, 0, 0]


def test_rows_in_one_batch_select_what_they_select_alone() -> None:
    on, (q, k, v) = trace(), tokens(S + 1)
    settings: list[dict[str, Any]] = [
        {"tokens": 20}, {"tokens": 60}, {"tokens": 30, "agg": "group_mean"}, {"tokens": 40, "num_clusters": 9},
    ]  # fmt: skip
    together = [row(on=on, **setting) for setting in settings]
    queries = torch.cat([q[:, :, S:].roll(i, -1) for i in range(4)])
    news = [x[:, :, S:].expand(4, -1, -1, -1) for x in (k, v)]
    kind: Any = ClusterKV
    step_rows(kind, together, 0, queries, *news)
    for i, setting in enumerate(settings):
        alone = row(on=trace(), **setting)
        step(alone, queries[i : i + 1], k[:, :, S:], v[:, :, S:])
        assert torch.equal(fetched(together[i]), fetched(alone))


def test_centroids_are_rounded_to_the_models_dtype() -> None:
    keys = tokens(S)[1][0].bfloat16()
    clusters = cluster_keys(keys, 5, "cosine", 3, seeded(0, 0, 0))
    assert torch.equal(clusters.centroids, clusters.centroids.bfloat16().float())
    exact = kmeans(keys, draw_points(keys, 5, seeded(0, 0, 0)), 3)
    torch.testing.assert_close(clusters.centroids, exact.centroids, atol=0, rtol=2**-8)


# --- The cache of recent selections -----------------------------------------------------------


@pytest.mark.parametrize("agg", ["query_head", "group_mean"])
@pytest.mark.parametrize("n_steps", [0, 1, 2, 4])
def test_only_tokens_that_recent_steps_did_not_bring_move(n_steps: int, agg: str) -> None:
    mine = row(60, num_clusters=8, cache_steps=n_steps, agg=agg, decode_period=7, decode_clusters=2)
    history: list[list[set[int]]] = []
    bytes_of = D * 4
    hits_seen = 0
    for t, _ in walk(mine, 18):
        idx = fetched(mine).view(H_KV, -1, 56)
        asked = [set(heads.flatten().tolist()) for heads in idx]
        recent = history[-n_steps:] if n_steps else []
        held = [set().union(*(past[kv] for past in recent)) for kv in range(H_KV)]
        hits = sum(len(a & b) for a, b in zip(asked, held, strict=True))
        distinct = sum(len(a) for a in asked)
        misses_of_heads = sum(len(set(head.tolist()) - held[kv]) for kv in range(H_KV) for head in idx[kv])
        history.append(asked)
        kept = history[-n_steps:] if n_steps else []
        on_device = sum(len(set().union(*(past[kv] for past in kept))) for kv in range(H_KV))
        entry = mine.store.ledger.entries[-1]
        assert entry.moved_kv_bytes == (distinct - hits) * bytes_of
        assert entry.moved_kv_heads_bytes == misses_of_heads * bytes_of
        assert (entry.cache_hits, entry.cache_lookups) == ((hits, distinct) if n_steps else (0, 0))
        n_window = (t - 1) % 7 + 1
        assert entry.resident_kv_bytes == ((4 + n_window) * H_KV + on_device) * bytes_of
        assert entry.filled_bytes == entry.moved_meta_bytes == entry.searched_bytes == 0
        hits_seen += hits
    assert (hits_seen > 0) == (n_steps > 0)


@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_the_cluster_hit_rate_is_that_of_each_heads_own_list(n_steps: int) -> None:
    """Over more steps than are counted at once, and across clusters that are appended."""
    mine = row(60, num_clusters=12, cache_steps=n_steps, decode_period=15, decode_clusters=3)
    lists: list[list[set[int]]] = []
    for _ in walk(mine, 40):
        clusters = mine.index[0]
        if mine.store[0].n_window == 15:  # appended behind this step
            label = torch.cat([labels_of(clusters)[:, :-15], torch.full((H_KV, 15), -1)], 1)
        else:
            label = labels_of(clusters)
        idx = fetched(mine) - 4
        lists.append([set(label[head // 2, idx[head]].tolist()) for head in range(H)])
    rates = []
    for t in range(n_steps, len(lists)):
        recent = [set().union(*(past[h] for past in lists[t - n_steps : t])) for h in range(H)]
        rates += [np.mean([len(lists[t][h] & recent[h]) / len(lists[t][h]) for h in range(H)])]
    assert mine.report()["cluster_hit_rate"] == pytest.approx(np.mean(rates), abs=1e-9)
    assert 0 < np.mean(rates) < 1
    assert mine.report() == mine.report(), "reporting counts twice"


def labels_of(clusters: Clusters) -> Tensor:
    label = torch.empty_like(clusters.tokens)
    ids = torch.arange(clusters.sizes.shape[1])
    for head in range(len(label)):
        label[head, clusters.tokens[head]] = ids.repeat_interleave(clusters.sizes[head])
    return label


def test_an_answer_of_one_token_has_no_hit_rate() -> None:
    mine = row()
    assert "cluster_hit_rate" not in mine.report()
    next(walk(mine, 1))
    assert "cluster_hit_rate" not in mine.report()
    assert mine.report()["clustering_s"] > 0


@given(st.integers(1, 5), st.integers(0, 8), st.integers(0, 99))
def test_hit_rates_by_sets(n_steps: int, steps: int, seed: int) -> None:
    flags = torch.rand(steps, 3, 7, generator=torch.Generator().manual_seed(seed)) < 0.4
    flags[..., 0] = True
    expected = []
    for t in range(n_steps, steps):
        recent = flags[t - n_steps : t].any(0)
        expected.append(((flags[t] & recent).sum(-1) / flags[t].sum(-1)).mean().item())
    assert hit_rates(flags, n_steps).tolist() == pytest.approx(expected)


def test_two_caches_for_the_same_tokens_are_refused() -> None:
    blocks = replace(NO_CACHE, tokens=256)
    with pytest.raises(ConfigError, match=r"cache\.tokens=256 and method\.cache_steps=1"):
        ClusterKV.check_cache(PARAMS, blocks)
    with pytest.raises(ConfigError, match="two caches"):
        row_of(ClusterKV, PARAMS, trace(), request(tokens=40), cache=blocks)
    ClusterKV.check_cache(PARAMS, NO_CACHE)
    no_steps = replace(PARAMS, cache_steps=0)
    ClusterKV.check_cache(no_steps, blocks)
    mine = row_of(ClusterKV, no_steps, trace(), request(tokens=40), cache=blocks)
    for _ in walk(mine, 3):
        pass
    assert mine.store.ledger.entries[-1].cache_lookups > 0
    assert mine.store.ledger.entries[-1].filled_bytes >= 0


# --- Budgets ----------------------------------------------------------------------------------

ANY_SHAPE = ModelShape("any", 6, H, H_KV, D, 1 << 17, tuple(range(6)))


@pytest.mark.parametrize(
    ("s", "n_tokens", "changes", "expected"),
    [
        (32000, 1024, {"n_sink": 16}, ClusterKV.Plan(16, 1008, 400, 4)),
        (32768, 1024, {"n_sink": 16}, ClusterKV.Plan(16, 1008, 409, 4)),
        (8000, 800, {"n_sink": 16, "decode_clusters": 8}, ClusterKV.Plan(16, 784, 100, 8)),
        (8000, 800, {"comm_mode": "matched"}, ClusterKV.Plan(4, 796, 62, 2)),
        (8000, 800, {"num_clusters": 200, "decode_clusters": 0}, ClusterKV.Plan(4, 796, 200, 0)),
        (79, 20, {"n_sink": 16}, ClusterKV.Plan(10, 10, 1, 4)),
        (79, 1, {}, ClusterKV.Plan(0, 1, 1, 4)),
        (79, 3, {"decode_period": 50}, ClusterKV.Plan(1, 2, 1, 1)),
        (79, 70, {"num_clusters": 1000}, ClusterKV.Plan(4, 66, 75, 4)),
    ],
)
def test_a_budget_is_sinks_and_selection_and_clusters_follow_the_prompt(
    s: int, n_tokens: int, changes: dict[str, Any], expected: ClusterKV.Plan
) -> None:
    budget = resolve(request(tokens=n_tokens, comm="1/128"), s, False)
    assert ClusterKV.plan_for(replace(PARAMS, **changes), budget, ANY_SHAPE) == expected


@pytest.mark.parametrize(
    ("comm", "n_clusters", "n_late"),
    [("0", 1, 1), ("1/128", 2, 2), ("1/64", 3, 5), ("1/16", 12, 20), ("1", 196, 320)],
)
def test_matched_makes_as_many_clusters_as_comm_says(comm: str, n_clusters: int, n_late: int) -> None:
    mine = row(comm=comm, comm_mode="matched")
    assert (mine.plan.n_clusters, mine.plan.n_decode_clusters) == (n_clusters, n_late)
    assert mine.ready(0).centroids.shape == (H_KV, n_clusters, D)
    assert ClusterKV.label(mine.params, request(tokens=1)) == "ClusterKV (matched)"
    assert ClusterKV.label(PARAMS, request(tokens=1)) == "ClusterKV"
    assert mine.report()["comm_mode"] == "matched"


@pytest.mark.parametrize("comm", ["1/128", "1/64", "1/16"])
@pytest.mark.parametrize("ratio", ["0.05", "0.1", "0.2", "0.5"])
@pytest.mark.parametrize("comm_mode", ["native", "matched"])
def test_every_budget_is_kept(ratio: str, comm: str, comm_mode: str) -> None:
    params = replace(PARAMS, comm_mode=comm_mode, n_sink=16, decode_period=7)
    mine = row_of(ClusterKV, params, trace(), request(ratio=ratio, comm=comm))
    for _ in walk(mine, 10):
        pass
    assert mine.store.ledger.within(mine.budget, mine.trace.shape)
    n_tokens = int(Fraction(ratio) * S)
    assert [entry.attended // H for entry in mine.store.ledger.entries] == [
        n_tokens + (t - 1) % 7 + 1 for t in range(1, 11)
    ]
    assert all(entry.moved_meta_bytes == 0 for entry in mine.store.ledger.entries)


def layered(n_layers: int, full_layers: tuple[int, ...]) -> Trace:
    shape = ModelShape("layers", n_layers, H, H_KV, D, 1 << 20, full_layers)
    on = Trace(shape, S, torch.device("cpu"))
    for layer in full_layers:
        _, k, v = tokens(S, seed=layer)
        on.add(layer, k, v, Softmax(D**-0.5))
    return on


def test_the_first_layers_stay_whole_and_the_overall_share_says_so() -> None:
    on = layered(5, (0, 1, 2, 4))
    mine = built(row_for(ClusterKV, replace(PARAMS, full_layers=2), request(ratio="0.2"), on, 8))
    q, k, v = tokens(S + 1)
    for layer in on.shape.attention_layers:
        step(mine, q[:, :, S:], k[:, :, S:], v[:, :, S:], layer=layer)
    counts = {layer: int(mine.store.attended(layer).sum(-1)[0]) for layer in on.shape.attention_layers}
    assert counts == {0: 201, 1: 201, 2: 41, 4: 41}
    assert mine.skipped == [0, 1]
    assert [*mine.protected(0)] == list(range(201))
    assert mine.protected(4) == [0, 1, 2, 3, 200]
    assert mine.report()["overall_ratio"] == pytest.approx((2 + 2 * 0.2) / 4)
    assert mine.store.ledger.within(mine.budget, on.shape, mine.skipped)
    assert not mine.store.ledger.within(mine.budget, on.shape)


def test_layers_draw_apart() -> None:
    shape = ModelShape("layers", 2, H, H_KV, D, 1 << 20, (0, 1))
    on = Trace(shape, S, torch.device("cpu"))
    _, k, v = tokens(S)
    for layer in (0, 1):
        on.add(layer, k, v, Softmax(D**-0.5))
    mine = built(row_for(ClusterKV, replace(PARAMS, num_clusters=20), request(ratio="0.2"), on, 8))
    assert not torch.equal(mine.ready(0).centroids, mine.ready(1).centroids)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"decode_clusters": 321}, "more than the method.decode_period=320"),
        ({"comm_mode": "matched", "num_clusters": 9}, "leave method.num_clusters"),
        ({"comm_mode": "matched", "decode_clusters": 9}, "leave method.num_clusters"),
    ],
)
def test_parameters_out_of_range_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(PARAMS, **changes)
