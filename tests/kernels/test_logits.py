"""Keys to choose by, made by Triton for several rows at once, against torch row by row."""

from math import prod

import pytest
import torch
from torch import Tensor

from kvbench.engine.softmax import Softmax
from kvbench.kernels import pq_scores
from kvbench.kernels.clusters import cluster_keys_ref, cluster_keys_triton, cluster_tokens_ref, cluster_tokens_triton
from kvbench.kernels.jit import triton
from kvbench.kernels.pages import expand_keys_ref, expand_keys_triton, page_bounds_ref, page_keys_ref, page_keys_triton
from kvbench.kernels.pq_codes import PackedCodes, pq_codes_ref
from kvbench.kernels.pq_scores import Coded, pq_keys_ref, pq_keys_triton
from kvbench.kernels.rows import logits as searches
from kvbench.kernels.rows.columns import Columns, blend, component_keys, cover, find_components, table_of
from kvbench.kernels.rows.logits import (
    AGGREGATES,
    Searched,
    block_keys,
    blocks_of,
    channel_keys,
    token_logits,
    weigh_logits,
)
from kvbench.kernels.topk import best_keys, pack_keys_ref, top_stable_ref
from kvbench.methods.retrieving.oracle import token_scores
from kvbench.methods.retrieving.sparq import covered_mass, query_weights, top_components
from kvbench.tests.kernels.clocks import aged
from kvbench.tests.kernels.test_capped import KINDS
from kvbench.tests.kernels.test_topk import scores_of

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
N, H, H_KV, D = 2, 4, 2, 16
pytestmark = pytest.mark.skipif(triton is None, reason="triton is not installed")


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(GPU)


def same_order(ours: Tensor, theirs: Tensor) -> None:
    """The same positions are chosen, best first, and the scores are alike but for rounding."""
    k = ours.shape[-1] // 2
    assert torch.equal(best_keys(ours, k).int(), best_keys(theirs, k).int())
    torch.testing.assert_close(scores_of(ours), scores_of(theirs), rtol=1e-4, atol=1e-5)


def test_keys_are_ordered_as_scores_and_then_positions_are() -> None:
    scores = torch.tensor([[3.5, -2.0, 0.0, -0.0, 3.5, float("-inf"), 1e-40, float("inf")]])
    keys = pack_keys_ref(scores, torch.arange(8))
    assert best_keys(keys, 8).int().tolist() == top_stable_ref(scores, 8).tolist()
    assert scores_of(keys).tolist() == (scores + 0.0).tolist()
    assert torch.tensor(torch.iinfo(torch.int64).max).int() == -1


@pytest.mark.parametrize("agg", ["query_head", "group_mean", "group_max"])
def test_pages(agg: str) -> None:
    q, (low, high) = draw(N, H, 1, D, seed=0), page_bounds_ref(draw(1, H_KV, 61, D, seed=1), 8)
    ours = page_keys_triton(q, low, high, agg)
    same_order(ours, page_keys_ref(q, low, high, agg))
    best = best_keys(ours, 5)[:, :, :4]
    assert torch.equal(expand_keys_triton(best, 3, 8, 61), expand_keys_ref(best, 3, 8, 61))


@pytest.mark.parametrize("agg", ["query_head", "group_mean"])
def test_clusters(agg: str) -> None:
    q, centroids = draw(N, H, 1, D, seed=0), draw(H_KV, 19, D, seed=1)
    ours = cluster_keys_triton(q, centroids, agg)
    same_order(ours, cluster_keys_ref(q, centroids, agg))
    sizes = torch.arange(19).repeat(H_KV, 1).flip(0)
    tokens = torch.stack([torch.randperm(int(sizes[0].sum()), generator=torch.Generator().manual_seed(2))] * H_KV)
    order, owned = ours.sort(-1).values, (sizes, sizes.cumsum(-1), tokens)
    on_gpu = [x.to(GPU) for x in owned]
    found = cluster_tokens_triton(order, on_gpu[0], on_gpu[1], on_gpu[2], 30, 7)
    expected = cluster_tokens_ref(order.int().long().cpu(), owned[0], owned[1], owned[2], 30)
    assert torch.equal(found.cpu(), expected + 7)


@pytest.mark.parametrize("d", [D, 576])
@pytest.mark.parametrize("per_head", [False, True])
def test_blocks(per_head: bool, d: int) -> None:
    q, means = draw(N, H, 1, d, seed=0), [draw(40, H_KV, d, seed=i) for i in range(N)]
    ours = block_keys(q, blocks_of(means), 37, per_head)
    for i, mean in enumerate(means):
        scores = q[i].view(H_KV, -1, d) @ mean[:37].permute(1, 2, 0)  # (h_kv, g, blocks)
        scores = scores.flatten(0, 1) if per_head else scores.sum((0, 1)).unsqueeze(0)
        same_order(ours[i], pack_keys_ref(scores, torch.arange(37, device=GPU)))


@pytest.mark.parametrize(
    ("agg", "d", "c"),
    [
        ("query_head", D, 3),
        ("group_mean", D, 3),
        ("group_max", D, 12),  # 4 numbers at once
        ("group_mean", 264, 6),  # 2
        ("group_max", 512, 3),
    ],
)
def test_channels(agg: str, d: int, c: int) -> None:
    q, basis, keys = draw(N, H, 1, d, seed=0), draw(H_KV, d, c, seed=1), draw(H_KV, 90, c, seed=2)
    logits = q.view(N, H_KV, -1, d) @ basis @ keys.mT  # (n, h_kv, g, s)
    scores = {"query_head": logits.flatten(1, 2), "group_mean": logits.mean(2), "group_max": logits.amax(2)}[agg]
    same_order(channel_keys(q, basis, keys, agg), pack_keys_ref(scores, torch.arange(90, device=GPU)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("agg", AGGREGATES[:4])
@pytest.mark.parametrize(("cap", "about"), KINDS)
@pytest.mark.parametrize("age", [0, 3])
def test_all_tokens(agg: str, dtype: torch.dtype, cap: float, about: float | None, age: int) -> None:
    """The rows share a prompt and have generated as much, but not the same, and their windows are of two lengths.

    So many steps behind the one that was told: every row has as many tokens more, the second as many candidates.
    """
    q, prompt = draw(N, H, 1, D, seed=0, dtype=dtype), draw(1, H_KV, 130, D, seed=1, dtype=dtype)
    late = [draw(1, H_KV, 9, D, seed=2 + i, dtype=dtype) for i in range(N)]
    rows = [Searched(prompt, late[i], 136, 4, 100 + 20 * i) for i in range(N)]
    softmax = Softmax(0.3, cap, None if about is None else draw(H, seed=9) + about)
    earlier = [row._replace(n=row.n - age, stop=row.stop - age * i, grows=i > 0) for i, row in enumerate(rows)]
    told = searches.table_of(earlier, q.device, age + 2)
    since = aged(age, GPU)
    logits, lses = token_logits(q, told, 0.3, cap, softmax.sink, since)
    ours = weigh_logits(logits, lses, told, agg, since)
    for i, row in enumerate(rows):
        keys = torch.cat([prompt, late[i][:, :, :6]], 2).float()
        right = softmax.bent(q[i : i + 1].float().view(1, H_KV, -1, D) @ keys.mT)
        torch.testing.assert_close(logits[i, :, :136], right[0].flatten(0, 1), rtol=1e-5, atol=1e-5)
        assert logits.shape[2] == 138 and (logits[i, :, 136:] == -torch.inf).all()  # tokens that are still to come
        torch.testing.assert_close(lses[i].logsumexp(-1), softmax.lse(right[0].flatten(0, 1), (-1,)))
        scores = token_scores(right, agg, softmax)[0, :, row.start : row.stop]
        mine = ours[i, :, row.start : row.stop]
        same_order(mine, pack_keys_ref(scores, torch.arange(row.start, row.stop, device=GPU)))
        assert (ours[i].int() == -1).sum(-1).tolist() == [138 - (row.stop - row.start)] * len(mine)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("d", [40, 60, 72, 80, 96])
def test_keys_and_means_that_begin_anywhere(d: int, first: int) -> None:
    """What is read in loads of 16 bytes where they begin at a multiple of these is read one by one elsewhere."""

    def at_first(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
        return draw(prod(shape) + 3, seed=seed, dtype=dtype)[first : first + prod(shape)].view(shape)

    q, prompt = draw(N, H, 1, d, seed=0, dtype=torch.bfloat16), draw(1, H_KV, 33, d, seed=1, dtype=torch.bfloat16)
    late = [at_first(1, H_KV, 8, d, seed=2 + i, dtype=torch.bfloat16) for i in range(N)]
    logits, _ = token_logits(q, searches.table_of([Searched(prompt, x, 38, 0, 33) for x in late], q.device), 0.3)
    for i, x in enumerate(late):
        keys = torch.cat([prompt, x[:, :, :5]], 2).float()
        expected = 0.3 * q[i].float().view(H_KV, -1, d) @ keys[0].mT
        torch.testing.assert_close(logits[i], expected.flatten(0, 1), rtol=1e-5, atol=1e-5)
    means = [draw(40, H_KV, d, seed=4), at_first(40, H_KV, d, seed=5, dtype=torch.float32)]
    ours = block_keys(q.float(), blocks_of(means), 37, True)
    for i, mean in enumerate(means):
        scores = q[i].float().view(H_KV, -1, d) @ mean[:37].permute(1, 2, 0)
        same_order(ours[i], pack_keys_ref(scores.flatten(0, 1), torch.arange(37, device=GPU)))


@pytest.mark.parametrize(("m", "b", "n_held"), [(2, 3, 8192), (4, 6, 8192), (2, 8, 8192), (1, 8, 64)])
@pytest.mark.parametrize("age", [0, 3])
def test_codes_of_rows_and_of_their_newest_tokens(
    m: int, b: int, n_held: int, age: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All centroids at once, and 8 of 256. So many steps behind the one that was told the second row has as many
    candidates more."""
    monkeypatch.setattr(pq_scores, "TABLE", n_held)
    c, q, keys = 1 << b, draw(N, H, 1, D, seed=0), draw(N, H_KV, 1, D, seed=1)
    rows, expected = [], []
    for i in range(N):
        centroids, n = draw(H_KV, m, c, D // m, seed=2 + i), 90 + 600 * i
        codes = PackedCodes(H_KV, m, b, 740, GPU)
        ids = torch.randint(c, (H_KV, m, n), generator=torch.Generator().manual_seed(i)).to(torch.uint8).to(GPU)
        codes.extend(ids)
        expected.append(torch.cat([ids, pq_codes_ref(keys[i], centroids).to(ids)], -1))
        rows.append(Coded(centroids, codes, 3, 3 + n - 5 * i, n, grows=i > 0))
    right = pq_keys_ref(q, keys, rows, 0.25)
    earlier = [row._replace(stop=row.stop - age * row.grows, newest=row.newest - age) for row in rows]
    ours = pq_keys_triton(q, keys, pq_scores.table_of(earlier, q.device, age + 2), 0.25, since=aged(age, GPU))
    for i, row in enumerate(rows):
        k = (row.stop - row.start) // 2
        assert torch.equal(best_keys(ours[i], k).int(), best_keys(right[i][0], k).int())
        row.codes.n += 1
        assert torch.equal(row.codes.codes(), expected[i])


@pytest.mark.parametrize("layout", ["columns", "rows"])
@pytest.mark.parametrize(("cap", "about"), KINDS)
@pytest.mark.parametrize("age", [0, 3])
def test_components(layout: str, cap: float, about: float | None, age: int) -> None:
    """So many steps behind the one that was told: every row has as many tokens more, the second as many candidates."""
    softmax = Softmax(0.3, cap, None if about is None else draw(H, seed=10) + about)
    q, values = draw(N, H, 1, D, seed=0), draw(N, H_KV, 1, D, seed=1)
    prompt, s, n, r = draw(1, H_KV, 300, D, seed=2), 300, 305, 3
    late = [draw(1, H_KV, 8, D, seed=3 + i) for i in range(N)]
    means = [draw(1, H_KV, 1, D, seed=5 + i) for i in range(N)]
    taken = [mean + (values[i : i + 1] - mean) / n for i, mean in enumerate(means)]
    columns = prompt[0].mT.contiguous() if layout == "columns" else prompt[0].mT
    rows = [Columns(columns, late[i], means[i], n, 5, 200 + 40 * i, 60 - 20 * i) for i in range(N)]
    earlier = [row._replace(n=n - age, stop=row.stop - age * i, grows=i > 0) for i, row in enumerate(rows)]
    told = table_of(earlier, q.device, age + 2)
    since = aged(age, GPU)
    components, weights = find_components(q, values, told, r, 0.3, since)
    keys, logits, lses = component_keys(q, components, weights, told, cap, since)
    best = best_keys(keys, 60).contiguous()
    covered, out = cover(best, logits, lses, told, softmax.sink, since), draw(N, H, 1, D, seed=9)
    before = out.clone()
    blend(out, covered, told, H_KV)
    chosen = top_components(q, H_KV, r)
    assert torch.equal(components.long(), chosen)
    right = query_weights(q, chosen, 0.3)
    for i, row in enumerate(rows):
        torch.testing.assert_close(means[i], taken[i])
        whole = torch.cat([prompt, late[i][:, :, : n - s]], 2)[0].mT  # (h_kv, d_h, n)
        read = whole.gather(1, chosen[i].unsqueeze(-1).expand(-1, -1, n))
        own = softmax.capped(right[i] @ read)  # (h_kv, g, n)
        torch.testing.assert_close(logits[i, :, :n], own.flatten(0, 1), rtol=1e-4, atol=1e-5)
        assert logits.shape[2] == n + 2 and (logits[i, :, n:] == -torch.inf).all()
        scores = own.sum(1)[:, row.start : row.stop]
        idx = top_stable_ref(scores, row.k) + row.start
        assert torch.equal(best[i, :, : row.k].int().long(), idx)
        share = covered_mass(own.unsqueeze(0), idx.unsqueeze(0), row.start, row.stop, softmax)[0]  # (h_kv, g)
        torch.testing.assert_close(covered[i], share.flatten())
        mean = taken[i][0].repeat_interleave(H // H_KV, 0)
        torch.testing.assert_close(out[i], torch.lerp(mean, before[i], share.view(H, 1, 1)))
