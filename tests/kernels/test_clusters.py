import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels.clusters import (
    cluster_order,
    cluster_order_native,
    cluster_order_torch,
    cluster_tokens,
    cluster_tokens_native,
    cluster_tokens_ref,
    cluster_tokens_torch,
    cluster_tokens_triton,
    mass_keys_triton,
    mass_scores,
    native,
    stand_in_ref,
    stand_in_triton,
)
from kvbench.kernels.jit import triton

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
has_native = pytest.mark.skipif(native() is None, reason="no C++ compiler")


def problem(seed: int, n: int, h_kv: int, group: int, c: int, n_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clusters of random sizes, some of them empty: order, sizes, ends, tokens."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, c, (h_kv, n_tokens), generator=draws)
    labels[labels == c // 2] = 0
    sizes = torch.nn.functional.one_hot(labels, c).sum(1)
    order = torch.rand(n, h_kv * group, c, generator=draws).argsort(-1)
    return order, sizes, sizes.cumsum(-1), labels.sort(dim=-1, stable=True).indices


@given(
    seed=st.integers(0, 1000), n=st.integers(1, 2), h_kv=st.integers(1, 3), group=st.integers(1, 3),
    c=st.integers(1, 12), n_tokens=st.integers(1, 60), k=st.integers(0, 70),
)  # fmt: skip
def test_tokens_come_cluster_by_cluster(
    seed: int, n: int, h_kv: int, group: int, c: int, n_tokens: int, k: int
) -> None:
    clusters = problem(seed, n, h_kv, group, c, n_tokens)
    expected = cluster_tokens_ref(*clusters, k)
    assert torch.equal(cluster_tokens_torch(*clusters, k), expected)
    assert torch.equal(cluster_tokens(*clusters, k), expected)
    if native() is not None:
        assert torch.equal(cluster_tokens_native(*clusters, k), expected)


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize(("k", "c"), [(1, 11), (33, 11), (64, 11), (100, 11), (70, 300)])
def test_triton_fills_the_same_slots(k: int, c: int) -> None:
    clusters = problem(3, 2, 2, 3, c, 80)
    order, sizes, ends, tokens = (x.to(GPU) for x in clusters)
    found = cluster_tokens_triton(order, sizes, ends, tokens, k)
    assert torch.equal(found.cpu(), cluster_tokens_ref(*clusters, k))


@pytest.mark.parametrize("r", [1, 4, 9])
def test_an_order_may_name_some_clusters_only(r: int) -> None:
    order, sizes, ends, tokens = problem(5, 2, 2, 1, 9, 40)
    some = order[..., :r]
    expected = cluster_tokens_ref(some, sizes, ends, tokens, 40)
    assert torch.equal(cluster_tokens(some, sizes, ends, tokens, 40), expected)
    assert torch.equal(cluster_tokens_torch(some, sizes, ends, tokens, 40), expected)
    if triton is not None:
        found = cluster_tokens_triton(some.to(GPU), sizes.to(GPU), ends.to(GPU), tokens.to(GPU), 40)
        assert torch.equal(found.cpu(), expected)


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize(("h", "h_kv", "c", "d_h"), [(4, 2, 40, 16), (9, 3, 150, 24)])
def test_triton_ranks_by_mass_and_names_those_that_stand_in(h: int, h_kv: int, c: int, d_h: int) -> None:
    draw = torch.Generator().manual_seed(2)
    q, centroids = torch.randn(2, h, 1, d_h, generator=draw), torch.randn(h_kv, c, d_h, generator=draw)
    sizes = torch.randint(0, 4, (h_kv, c), generator=draw)
    scores = mass_scores(q, centroids, sizes, d_h**-0.5)
    keys = mass_keys_triton(q.to(GPU), centroids.to(GPU), sizes.to(GPU), d_h**-0.5).sort(-1).values
    ranked = scores.gather(-1, keys.cpu().int().long())
    assert torch.equal(keys.cpu().int().long().sort(-1).values, torch.arange(c).expand(2, h_kv, -1))
    torch.testing.assert_close(ranked, scores.gather(-1, cluster_order(scores)), atol=1e-6, rtol=0)
    expected_ids, expected_logs = stand_in_ref(keys.cpu()[..., 3:30], sizes)
    ids, logs = stand_in_triton(keys[..., 3:30], sizes.to(GPU))
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(logs.cpu(), expected_logs, atol=1e-6, rtol=0)


def test_mass_is_a_softmax_over_centroids_without_their_sizes() -> None:
    draw = torch.Generator().manual_seed(3)
    q, centroids = torch.randn(1, 4, 1, 8, generator=draw), torch.randn(2, 5, 8, generator=draw)
    sizes = torch.tensor([[3, 1, 0, 2, 9], [1, 1, 1, 1, 0]])
    scores = mass_scores(q, centroids, sizes, 0.5)
    for a in range(2):
        mine = sum((centroids[a] @ q[0, h, 0] * 0.5).softmax(0) for h in (2 * a, 2 * a + 1))
        torch.testing.assert_close(scores[0, a], torch.where(sizes[a] > 0, mine, -1.0))


def test_the_reference_trims_the_last_cluster_and_pads() -> None:
    sizes, tokens = torch.tensor([[2, 0, 3]]), torch.tensor([[4, 1, 0, 2, 3]])
    order = torch.tensor([[[2, 1, 0]]])
    assert cluster_tokens_ref(order, sizes, sizes.cumsum(-1), tokens, 4).tolist() == [[[0, 2, 3, 4]]]
    assert cluster_tokens_ref(order, sizes, sizes.cumsum(-1), tokens, 7).tolist() == [[[0, 2, 3, 4, 1, -1, -1]]]


@has_native
@pytest.mark.parametrize("c", [1, 2, 100, 409, 3000])
def test_order_is_that_of_a_stable_sort(c: int) -> None:
    scores = torch.randn(2, 5, c, generator=torch.Generator().manual_seed(1)) * 50
    scores[0] = scores[0].round()  # ties, and zeros of both signs
    scores[1, 0] = -scores[1, 0].abs()
    scores[1, 1, 0] = -torch.inf
    scores[1, 2] = 7
    assert torch.equal(cluster_order_native(scores), cluster_order_torch(scores))
    turned = scores.transpose(0, 1)
    assert torch.equal(cluster_order_native(turned), cluster_order_torch(turned))
