from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.engine.search import select_rows
from kvbench.engine.selection import selection
from kvbench.engine.shapes import ModelShape
from kvbench.methods.retrieving.retroinfer import (
    RetroInfer,
    append_index,
    at_most,
    build_index,
    clusters,
    cost,
    fitting,
    initial_centroids,
    paid_clusters,
)
from kvbench.tests.vectors import Check, differs, first, load, request, row_of, step, trace_of

PARAMS = RetroInfer.Params("auto", None, 0.232, "expected", 4, 64, 8192, 10, 1024)
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "retroinfer").glob("*.npz"))
D = 16


# --- Reference vectors ------------------------------------------------------------------------


def run_vectors(path: Path) -> list[Check]:
    """Authors' index and decode steps, with their numbers of clusters."""
    return [(path.stem, check_steps(*load(path)))]


def sorted_ids(ids: Tensor, sizes: Tensor) -> list[list[int]]:
    """Clusters (h_kv, n) of each KV head that have tokens, ascending."""
    return [sorted(i for i in mine.tolist() if i >= 0 and sizes[a, i]) for a, mine in enumerate(ids)]


def check_steps(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    q, k, v = (torch.from_numpy(x[name]).unsqueeze(0) for name in ("q", "k", "v"))
    s, n_sink, window, c = (meta[name] for name in ("S", "n_sink", "window", "n_clusters"))
    params = replace(PARAMS, n_sink=n_sink, window=window, iterations=meta["iters"])
    plan = RetroInfer.Plan(n_sink, window, 0, c, meta["n_segments"], meta["nprobe"], meta["n_estimated"], 8)
    row = row_of(RetroInfer, params, trace_of(k, v, q.shape[1], s), request(tokens=s - 1, comm="1"), plan)
    index, n_kv = row.index(0), k.shape[1]
    labels = torch.empty_like(index.tokens)
    ids = torch.arange(c).expand(n_kv, -1)
    for a in range(n_kv):
        labels[a, index.tokens[a]] = ids[a].repeat_interleave(index.sizes[a])
    sums = index.values * index.sizes.unsqueeze(-1)
    problem = first(
        differs("labels", labels, x["labels"]),
        differs("sizes", index.sizes, x["cluster_size"]),
        differs("centroids", index.centroids, x["centroids"], 1e-5),
        differs("sums of values", sums, x["value_sum"], 1e-4),
    )
    chosen, choose = [], row.choose
    row.choose = lambda *asked: chosen.append(choose(*asked)) or chosen[-1]
    for t in range(meta["steps"]):
        at = slice(s + t, s + t + 1)
        out = step(row, q[:, :, t : t + 1], k[:, :, at], v[:, :, at], t + 1)
        fetched = row.store[0].fetched()[0][0]
        retrieved = [sorted({int(labels[a, i - n_sink]) for i in mine if i >= 0}) for a, mine in enumerate(fetched)]
        expected = sorted_ids(torch.from_numpy(x["retrieved"][:, t]), index.sizes)
        parts = chosen[-1].stand_ins
        estimated = parts[0].idx[0] if parts else torch.empty(n_kv, 0, dtype=torch.int64)
        supposed = sorted_ids(torch.from_numpy(x["estimated"][:, t]), index.sizes)
        attended = row.store.attended(0).sum(-1).view(n_kv, -1)[:, 0]
        problem = first(
            problem,
            None if retrieved == expected else f"retrieved {t}: {retrieved}, expected {expected}",
            None if sorted_ids(estimated, index.sizes) == supposed else f"estimated {t}: expected {supposed}",
            differs(f"attended {t}", attended, x["attended"][:, t]),
            differs(f"output {t}", out[0, :, 0], x["out"][:, t], 1e-5),
        )
    return problem


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_retroinfer_agrees_with_reference_vectors(path: Path) -> None:
    assert run_vectors(path) == [(path.stem, None)]


# --- What a right one shows -------------------------------------------------------------------


def random_tokens(n: int, h: int = 4, h_kv: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, D, generator=draw) for heads in (h, h_kv, h_kv))
    return 2 * q, k, v


def made(
    k: Tensor, v: Tensor, s: int, h: int = 4, tokens: int = 0, comm: str = "1/8", n_new: int = 64, **how: Any
) -> Any:
    """A row on the first `s` tokens; `plan` changes its integers."""
    changes = how.pop("plan", {})
    params = replace(PARAMS, **({"n_sink": 4, "window": 8} | how))
    variant = RetroInfer.variant_for(params, request(tokens=tokens or s // 2, comm=comm), SHAPE, s)
    plan = replace(variant.plan, **changes)
    return row_of(RetroInfer, params, trace_of(k, v, h, s), request(tokens=tokens or s // 2, comm=comm), plan, n_new)


SHAPE = ModelShape("vectors", 1, 4, 2, D, 1 << 20, (0,))


def one_step(row: Any, q: Tensor, k: Tensor, v: Tensor, s: int, t: int = 1) -> Tensor:
    at = slice(s + t - 1, s + t)
    return step(row, q[:, :, at], k[:, :, at], v[:, :, at], t)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Of one query (1, h, 1, d) over all keys, or those that each query head has `seen` (h, n)."""
    g = q.shape[1] // k.shape[1]
    mask = None if seen is None else seen[None, :, None]
    keys, values = (x.repeat_interleave(g, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def test_with_every_cluster_retrieved_it_is_full_attention() -> None:
    s, (q, k, v) = 150, random_tokens(151)
    row = made(k, v, s, plan={"n_retrieved": 8, "n_clusters": 8, "n_estimated": 0})
    torch.testing.assert_close(one_step(row, q, k, v, s), attention(q[:, :, s:], k, v), atol=1e-5, rtol=0)
    assert row.store.ledger.entries[0].attended == 4 * (s + 1)


def test_where_the_keys_of_a_cluster_are_the_same_estimation_is_exact() -> None:
    s, (q, k, v) = 140, random_tokens(141)
    kinds = torch.randn(1, 2, 8, D, generator=torch.Generator().manual_seed(3))
    k[:, :, 4 : s - 8] = kinds[:, :, torch.arange(s - 12) % 8]
    plan = {"n_retrieved": 2, "n_clusters": 16, "n_estimated": 14}
    row = made(k, v, s, plan=plan)
    assert int((row.index(0).sizes > 0).sum(-1).max()) <= 8  # the others are empty, and weigh nothing
    torch.testing.assert_close(one_step(row, q, k, v, s), attention(q[:, :, s:], k, v), atol=1e-5, rtol=0)


def test_where_each_token_is_a_cluster_estimation_is_exact() -> None:
    s, (q, k, v) = 44, random_tokens(45)
    directions = torch.nn.functional.normalize(torch.randn(32, D, generator=torch.Generator().manual_seed(5)), dim=-1)
    k[:, :, 4:36] = 10 * directions
    row = made(k, v, s, tokens=30, plan={"n_retrieved": 1, "n_clusters": 32, "n_estimated": 31})
    assert torch.equal(row.index(0).sizes, torch.ones(2, 32, dtype=torch.int64))
    torch.testing.assert_close(one_step(row, q, k, v, s), attention(q[:, :, s:], k, v), atol=1e-5, rtol=0)
    assert row.store.ledger.entries[0].attended == 4 * (4 + 8 + 1 + 1)


def test_an_estimated_cluster_weighs_at_most_what_its_tokens_do() -> None:
    """Jensen: its mean key with its size is a lower bound of its tokens' exponentials."""
    _, k, v = random_tokens(120)
    index = build_index(k[0], v[0], 8, 1, 10)
    q = torch.randn(2, D, generator=torch.Generator().manual_seed(9))
    for a in range(2):
        for c in range(8):
            members = index.tokens[a, index.ends[a, c] - index.sizes[a, c] : index.ends[a, c]]
            of_tokens = (k[0, a, members] @ q[a]).exp().sum()
            assert index.sizes[a, c] * (index.centroids[a, c] @ q[a]).exp() <= of_tokens * (1 + 1e-5)


@pytest.mark.parametrize(("n", "c", "n_segments"), [(120, 8, 1), (131, 16, 2), (74, 15, 3)])
def test_every_token_is_in_one_cluster_and_values_are_their_means(n: int, c: int, n_segments: int) -> None:
    _, k, v = random_tokens(n)
    index = build_index(k[0], v[0], c, n_segments, 10)
    assert index.sizes.sum(-1).tolist() == [n, n]
    assert torch.equal(index.tokens.sort(-1).values, torch.arange(n).expand(2, n))
    assert torch.equal(index.ends, index.sizes.cumsum(-1))
    for a in range(2):
        for i in range(c):
            members = index.tokens[a, index.ends[a, i] - index.sizes[a, i] : index.ends[a, i]]
            if len(members):
                torch.testing.assert_close(index.values[a, i], v[0, a, members].mean(0))
                torch.testing.assert_close(index.centroids[a, i], k[0, a, members].mean(0))


def test_a_shift_of_all_keys_changes_no_cluster() -> None:
    _, k, v = random_tokens(128)
    shift = 5 * torch.randn(2, 1, D, generator=torch.Generator().manual_seed(4))
    plain, shifted = (build_index(keys, v[0], 8, 1, 10) for keys in (k[0], k[0] + shift))
    assert torch.equal(plain.tokens, shifted.tokens)
    torch.testing.assert_close(plain.centroids + shift, shifted.centroids)


def test_initial_centroids_are_keys_at_even_distances() -> None:
    x = torch.arange(20.0).view(1, 20, 1)
    assert initial_centroids(x, 8).flatten().tolist() == [1, 3, 6, 8, 11, 13, 16, 18]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_a_larger_estimation_zone_retrieves_the_same_tokens(share: float) -> None:
    s, (q, k, v) = 300, random_tokens(301)
    rows = [made(k, v, s, comm="1/4", tokens=80, estimated_share=f, tokens_per_cluster=16) for f in (0.0, share)]
    outs = [one_step(row, q, k, v, s) for row in rows]
    seen = [row.store.attended(0) for row in rows]
    assert torch.equal(*seen)
    torch.testing.assert_close(outs[0], attention(q[:, :, s:], k, v, seen[0]), atol=1e-5, rtol=0)
    exact = attention(q[:, :, s:], k, v)
    if share == 1.0:  # random keys: what is estimated is nearer to full attention than what is left out
        assert (outs[1] - exact).norm() < (outs[0] - exact).norm()


def test_the_heads_of_a_group_retrieve_together_by_mass_per_token() -> None:
    s, (q, k, v) = 300, random_tokens(301)
    row = made(k, v, s, tokens=60)
    one_step(row, q, k, v, s)
    seen, index = row.store.attended(0), row.index(0)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3])
    for a in range(2):
        weights = [(index.centroids[a] @ q[0, h, s] / D**0.5).softmax(0) for h in (2 * a, 2 * a + 1)]
        best = (weights[0] + weights[1]).argsort(descending=True)[: row.plan.n_retrieved]
        tokens = torch.cat([index.tokens[a, index.ends[a, c] - index.sizes[a, c] : index.ends[a, c]] for c in best])
        steady = {*range(4), *range(s - 8, s + 1)}
        assert set(seen[2 * a].nonzero().flatten().tolist()) == {*(tokens + 4).tolist()} | steady


# --- Books, budget, growth --------------------------------------------------------------------


def test_the_books_of_a_step() -> None:
    s, (q, k, v) = 300, random_tokens(301)
    row = made(k, v, s, tokens=100)
    one_step(row, q, k, v, s)
    entry, plan = row.store.ledger.entries[0], row.plan
    c, ne = plan.n_clusters, plan.n_estimated
    retrieved = entry.attended // 2 - 2 * (4 + 8 + 1)  # tokens of both KV heads
    assert (c, plan.n_retrieved, ne) == (16, 4, 4)
    assert entry.pseudo_tokens == 4 * ne
    assert entry.moved_meta_bytes == 2 * (c * 2 * D + ne * (2 * D + 4))
    assert entry.moved_kv_bytes == retrieved * 4 * D
    assert entry.resident_meta_bytes == 2 * c * (4 * D + 8)
    assert entry.resident_kv_bytes == 2 * (4 + 8 + 1) * 4 * D
    assert entry.resident_host_bytes == 2 * (s - 12) * (4 * D + 4)
    summary = row.store.ledger.summary(row.budget, SHAPE, in_mean=True)
    assert summary["pseudo_tokens_mean"] == ne
    assert summary["tokens_attended_mean"] == entry.attended / 4


@pytest.mark.parametrize("comm", ["1/64", "1/16", "1/8"])
@pytest.mark.parametrize("fill", ["expected", "exact"])
def test_the_budget_holds(fill: str, comm: str) -> None:
    s, (q, k, v) = 1000, random_tokens(1012)
    for tokens in (220, 400):
        row = made(k, v, s, tokens=tokens, comm=comm, fill=fill, window=32)
        for t in range(1, 13):
            one_step(row, q, k, v, s, t)
        assert row.store.ledger.within(row.budget, SHAPE, in_mean=fill == "expected")


def test_clusters_are_taken_while_they_fit() -> None:
    order, sizes = torch.tensor([[[2, 0, 1]]]), torch.tensor([[5, 0, 3]])
    for k, expected in ((2, (0, 0)), (3, (1, 3)), (7, (1, 3)), (8, (3, 8)), (20, (3, 8))):
        assert tuple(int(x) for x in fitting(order, sizes, k)) == expected


def test_generated_tokens_become_clusters_of_their_own() -> None:
    s, n_new, update = 300, 40, 32
    q, k, v = random_tokens(s + n_new)
    row = made(k, v, s, tokens=100, comm="1", n_new=n_new, update=update)
    before, plan = row.index(0), row.plan
    for t in range(1, n_new + 1):
        one_step(row, q, k, v, s, t)
        zones, entry = row.zones[0], row.store.ledger.entries[-1]
        if t <= update:
            assert row.store[0].n_window == 8 + t
            assert entry.resident_kv_bytes == 2 * (4 + 8 + t) * 4 * D
        else:
            assert row.store[0].n_window == 8 + t - update
            assert zones.n_retrieved == plan.n_retrieved + 2
            assert zones.n_estimated == plan.n_estimated + 2
            assert entry.pseudo_tokens == 4 * zones.n_estimated
        if t == update:
            assert row.index(0).n_clusters == plan.n_clusters + 8
    after = row.index(0)
    assert row.report()["updates"] == 1
    late = build_index(k[0, :, s - 8 : s - 8 + update], v[0, :, s - 8 : s - 8 + update], 8, 1, 10)
    expected = append_index(before, late)
    assert torch.equal(after.tokens, expected.tokens)
    torch.testing.assert_close(after.centroids, expected.centroids)
    assert after.sizes.sum(-1).tolist() == [s - 12 + update] * 2
    assert row.store.ledger.within(row.budget, SHAPE, in_mean=True)
    # A query at a token that left finds it again.
    at = s + 3
    target = 8 * k[:, :, at : at + 1].repeat_interleave(2, 1)
    step(row, target, k[:, :, :1], v[:, :, :1], n_new + 1)
    assert row.store.attended(0)[:, at].all()


def test_generated_tokens_stay_where_comm_pays_for_no_more_clusters() -> None:
    s, n_new = 300, 24
    q, k, v = random_tokens(s + n_new)
    row = made(k, v, s, tokens=100, comm="1/14", n_new=n_new, update=8)
    assert row.plan.n_updates == 0
    for t in range(1, n_new + 1):
        one_step(row, q, k, v, s, t)
    assert row.store[0].n_window == 8 + n_new
    assert "updates" not in row.report()
    assert row.store.ledger.within(row.budget, SHAPE, in_mean=True)


def test_rows_with_other_budgets_are_searched_together() -> None:
    s, (q, k, v) = 300, random_tokens(301)
    trace = trace_of(k, v, 4, s)
    params = replace(PARAMS, window=8)
    rows = [row_of(RetroInfer, params, trace, request(tokens=n, comm="1/8")) for n in (60, 100, 150)]
    assert rows[0].index(0) is rows[2].index(0)
    for row in rows:
        row.store[0].append(k[:, :, s:], v[:, :, s:])
    together = select_rows(RetroInfer, rows, 0, q[:, :, s:].expand(3, -1, -1, -1))
    for row, found in zip(rows, map(selection, together), strict=True):
        alone = selection(select_rows(RetroInfer, [row], 0, q[:, :, s:])[0])
        assert found.idx is not None and alone.idx is not None and torch.equal(found.idx, alone.idx)


# --- Integers and refusals --------------------------------------------------------------------


def test_the_number_of_clusters_is_a_multiple_of_eight_and_of_the_segments() -> None:
    assert clusters(1000, 16, 8192) == (64, 1)  # 62.5
    assert clusters(192, 16, 8192) == (8, 1)  # 12, a tie
    assert clusters(20, 16, 8192) == (8, 1)
    assert clusters(32_768, 16, 8192) == (2048, 4)
    assert clusters(24_576, 16, 8192) == (1536, 3)
    assert clusters(131_072, 16, 8192) == (8192, 16)
    assert at_most(64, 1, 63) == (63, 1)
    assert at_most(1536, 3, 1535) == (1533, 3)
    assert at_most(48, 3, 2) == (2, 1)


def test_comm_pays_for_as_many_clusters_as_it_can() -> None:
    for share in (0.0, 0.232, 1.0):
        for n_bytes in (150, 2000, 77_777):
            c = paid_clusters(n_bytes, share, SHAPE)
            assert 2 * cost(c, share, SHAPE) <= n_bytes < 2 * cost(c + 1, share, SHAPE)


def test_a_smaller_comm_makes_larger_clusters_and_says_so() -> None:
    llama = ModelShape("llama", 1, 32, 8, 128, 1 << 20, (0,))
    plan = RetroInfer.variant_for(PARAMS, request("0.1", comm="1/64"), llama, 32_768).plan
    assert 32_768 / plan.n_clusters == pytest.approx(79, rel=0.03)
    assert RetroInfer.label(PARAMS, request("0.1", comm="1/64")) == (
        "RetroInfer (budget in the mean, 79 tokens a cluster)"
    )
    usual = RetroInfer.variant_for(PARAMS, request(tokens=1024, comm="1/8"), llama, 32_768).plan
    assert (usual.n_clusters, usual.n_retrieved, usual.n_estimated, usual.n_update) == (2048, 59, 475, 64)
    assert RetroInfer.label(replace(PARAMS, fill="exact"), request("0.1", comm="1/8")) == "RetroInfer"
    paper = replace(PARAMS, tokens_per_cluster=16, retrieved_share=0.018)
    published = RetroInfer.variant_for(paper, request("0.1", comm="1/64"), llama, 131_072).plan
    assert (published.n_clusters, published.n_retrieved, published.n_estimated) == (8192, 147, 1901)


def test_wrong_parameters_and_budgets_are_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"retrieved_share=0\.1 gives a number of clusters"):
        replace(PARAMS, retrieved_share=0.1, fill="exact")
    with pytest.raises(ConfigError, match="comm=0 pays for no cluster"):
        RetroInfer.check(PARAMS, request("0.2", comm="0"), SHAPE)
    with pytest.raises(ConfigError, match=r"comm=1/512 does not pay for 2 clusters .* use comm=(\S+) or more") as told:
        RetroInfer.variant_for(PARAMS, request(tokens=900, comm="1/512"), SHAPE, 1000)
    least = str(told.value).split("use comm=")[1].split(" ")[0]
    assert RetroInfer.variant_for(PARAMS, request(tokens=900, comm=least), SHAPE, 1000).plan.n_clusters == 2
    with pytest.raises(
        ConfigError, match=r"no room for a cluster of 16 .* use budget=39 or ratio=(\S+) or more"
    ) as told:
        RetroInfer.variant_for(PARAMS, request("0.03", comm="1/8"), SHAPE, 1000)
    ratio = str(told.value).split("or ratio=")[1].split(" ")[0]
    assert RetroInfer.variant_for(PARAMS, request(ratio, comm="1/8"), SHAPE, 1000).plan.n_retrieved == 1
