from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels import kmeans as module
from kvbench.kernels.choices import METRICS
from kvbench.kernels.jit import SHARED, triton
from kvbench.kernels.kmeans import (
    as_product,
    cluster_means,
    cluster_means_ref,
    cluster_means_triton,
    count_labels,
    draw_points,
    kmeans,
    kmeans_native,
    kmeans_ref,
    kmeans_torch,
    meeting,
    native,
    nearest,
    nearest_ref,
    nearest_triton,
)


def problems(p: int = 3, n: int = 300, d: int = 16, seed: int = 0) -> Tensor:
    """Points with one channel that is far larger than the others, as keys have."""
    points = torch.randn(p, n, d, generator=torch.Generator().manual_seed(seed))
    points[..., 3] += 10
    return points


def initial(points: Tensor, c: int, seed: int = 1) -> Tensor:
    return draw_points(points, c, torch.Generator().manual_seed(seed))


def similarity(points: Tensor, centroids: Tensor, metric: str) -> Tensor:
    """In float64, higher is nearer: (p, n, c)."""
    points, centroids = points.double(), centroids.double()
    if metric == "l2":
        return -torch.cdist(points, centroids)
    if metric == "cosine":
        return torch.nn.functional.cosine_similarity(points.unsqueeze(2), centroids.unsqueeze(1), dim=-1)
    return points @ centroids.mT


GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
with_triton = pytest.mark.skipif(triton is None, reason="Triton is not installed")


def means_in_triton(points: Tensor, labels: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    means, sizes = cluster_means_triton(points.to(GPU), labels.to(GPU), centroids.to(GPU))
    return means.cpu(), sizes.cpu()


in_triton = pytest.param(means_in_triton, marks=with_triton)


@with_triton
@pytest.mark.parametrize("metric", METRICS)
def test_a_gpu_finds_the_nearest_centroids(metric: str) -> None:
    """Each centroid is there twice, of which the first is taken: numbers are short, so that no product is rounded."""
    points = (8 * problems(2, 90, 150)).round() / 8
    weights = (1024 * as_product(initial(points, 20), metric)[0]).round() / 1024
    labels = nearest_triton(points.to(GPU), torch.cat([weights] * 2, 1).to(GPU), metric == "l2").cpu()
    scores = points.double() @ weights.double().mT
    if metric == "l2":
        scores -= 0.5 * weights.double().square().sum(-1).unsqueeze(1)
    assert torch.equal(labels, scores.argmax(-1))


@with_triton
def test_a_gpu_with_less_shared_memory_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    points = problems(1, 70, 576)  # the latents of DeepSeek-V3
    centroids = initial(points, 20)
    found = []
    for arch in (90, 80, 86):
        monkeypatch.setattr(module, "shared_memory", lambda device, arch=arch: SHARED[arch])
        found.append(nearest_triton(points.to(GPU), centroids.to(GPU), False).cpu())
    assert all(torch.equal(labels, nearest_ref(points, centroids, "dot")) for labels in found)


@pytest.mark.parametrize("shared", sorted({*SHARED.values()}))
def test_tiles_fit_into_shared_memory(shared: int) -> None:
    for d in (1, 64, 128, 160, 256, 288, 512, 576):
        points, columns, width, parts = meeting(d, 100, shared)
        assert width * parts >= d and 4 * parts * width * (points + columns) <= shared
        assert points >= 16, "a product has 16 rows at least"
    assert meeting(576, 100, SHARED[80])[0] < meeting(576, 100, SHARED[90])[0] == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("p", "n", "d", "c"), [(1, 1, 1, 1), (2, 37, 5, 7), (3, 700, 64, 33)])
def test_every_point_goes_to_a_nearest_centroid(
    p: int, n: int, d: int, c: int, metric: str, dtype: torch.dtype
) -> None:
    points = torch.randn(p, n, d, generator=torch.Generator().manual_seed(0)).to(dtype)
    centroids = torch.randn(p, c, d, generator=torch.Generator().manual_seed(1))
    exact = similarity(points, centroids, metric)
    for assign in (nearest, nearest_ref):
        got = exact.gather(-1, assign(points, centroids, metric).unsqueeze(-1)).squeeze(-1)
        assert (exact.amax(-1) - got).max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("metric", METRICS)
def test_labels_from_before_change_nothing_but_the_time(metric: str) -> None:
    points = problems(3, 900, 32)
    centroids = initial(points, 40)
    expected = nearest(points, centroids, metric)
    mixed = expected.clone()
    mixed[:, ::3] = torch.randint(0, 40, (3, 300), generator=torch.Generator().manual_seed(4))
    for before in (expected, mixed, torch.zeros_like(expected), torch.full_like(expected, 39)):
        kept = before.clone()
        assert torch.equal(nearest(points, centroids, metric, before), expected)
        assert torch.equal(before, kept), "labels from before were written to"


def test_a_point_between_equal_centroids_stays_where_it_was() -> None:
    points, centroids = torch.ones(1, 2, 4), torch.ones(1, 3, 4)
    assert nearest(points, centroids, "cosine").tolist() == [[0, 0]]
    assert nearest(points, centroids, "cosine", torch.tensor([[2, 1]])).tolist() == [[2, 1]]


@pytest.mark.parametrize("metric", METRICS)
def test_chunks_do_not_change_labels(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = problems(5, 301)
    centroids = initial(points, 9)
    whole = nearest(points, centroids, metric)
    monkeypatch.setattr(module, "CHUNK_ROWS", 8)
    for n_bytes in (1, 4 * 16 * 7, 4 * 16 * 20, 4 * 16 * 64):
        monkeypatch.setattr(module, "CPU_CHUNK_BYTES", n_bytes)
        assert torch.equal(nearest(points, centroids, metric), whole)


def test_similarities_stay_within_their_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    product = torch.bmm

    def watched(a: Tensor, b: Tensor) -> Tensor:
        out = product(a, b)
        sizes.append(out.nbytes)
        return out

    monkeypatch.setattr(torch, "bmm", watched)
    points = torch.randn(7, 5000, 4)
    nearest(points, points[:, :300], "cosine")
    assert max(sizes) <= module.CPU_CHUNK_BYTES
    assert sum(sizes) == 7 * 5000 * 304 * 4  # 300 centroids, in full vectors


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("c", [2, 5, 7, 9, 15, 17, 100])
@pytest.mark.parametrize("d", [16, 64])
def test_the_first_of_equal_centroids_is_nearest(c: int, d: int, metric: str) -> None:
    points = problems(3, 500, d)
    centroids = initial(points, c)
    centroids[:, -1] = centroids[:, 0]
    centroids[:, c // 2] = centroids[:, 0]
    labels = nearest(points, centroids, metric)
    assert (labels == 0).any()
    assert not ((labels == c - 1) | (labels == c // 2) & (labels > 0)).any()


def test_points_that_lie_apart_in_memory_are_read_in_order() -> None:
    keys = problems(2, 80).transpose(0, 1).contiguous().transpose(0, 1)[:, 16:]
    assert not keys.is_contiguous()
    ours, theirs = (run(keys, initial(keys, 5), 4) for run in (kmeans, kmeans_ref))
    assert torch.equal(ours.labels, theirs.labels)


@pytest.mark.parametrize("path", [cluster_means, cluster_means_ref, in_triton])
@pytest.mark.parametrize("rows", [1, 1000])
def test_means_are_of_raw_points_and_empty_clusters_keep_their_centroid(
    path: object, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 12 * 6 * 2 * rows)
    points, centroids = problems(2, 50), torch.randn(2, 6, 16)
    labels = torch.randint(0, 5, (2, 50), generator=torch.Generator().manual_seed(2))
    labels[1] = 4
    means, sizes = path(points, labels, centroids)  # type: ignore[operator]
    for problem in range(2):
        for cluster in range(6):
            mine = points[problem][labels[problem] == cluster]
            assert sizes[problem, cluster] == len(mine)
            expected = mine.double().mean(0) if len(mine) else centroids[problem, cluster]
            torch.testing.assert_close(means[problem, cluster], expected.float())


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("n_rounds", [0, 1, 3, 20])
def test_the_fast_path_ends_where_the_reference_ends(metric: str, n_rounds: int) -> None:
    points = problems(4, 250)
    ours, theirs = (run(points, initial(points, 11), n_rounds, metric) for run in (kmeans, kmeans_ref))
    assert torch.equal(ours.labels, theirs.labels)
    assert torch.equal(ours.sizes, theirs.sizes)
    torch.testing.assert_close(ours.centroids, theirs.centroids)
    assert (ours.rounds <= n_rounds).all()


def test_problems_that_converge_early_are_the_same_as_alone() -> None:
    easy = torch.eye(16).repeat(20, 1)[:300] + 0.01 * problems(1, 300)[0]
    points = torch.stack([easy, problems(1, 300, seed=5)[0], easy.flip(0)])
    start = initial(points, 8)
    together = kmeans(points, start, 30)
    assert len(set(together.rounds.tolist())) > 1, "all problems took the same number of rounds"
    assert (together.rounds < 30).any()
    for i in range(3):
        alone = kmeans(points[i : i + 1], start[i : i + 1], 30)
        assert torch.equal(together.labels[i], alone.labels[0])
        torch.testing.assert_close(together.centroids[i], alone.centroids[0])
        assert together.rounds[i] == alone.rounds[0]


def test_it_stops_when_no_label_changes() -> None:
    points = problems(1, 200)
    done = kmeans(points, initial(points, 6), 100)
    n = int(done.rounds)
    assert 1 < n < 100
    before = kmeans(points, initial(points, 6), n - 1)
    earlier = kmeans(points, initial(points, 6), n - 2)
    assert torch.equal(before.labels, done.labels), "the last round changed labels"
    assert not torch.equal(earlier.labels, before.labels), "it could have stopped a round earlier"


@given(n=st.integers(1, 60), c=st.integers(1, 60), seed=st.integers(0, 5))
def test_labels_sizes_and_centroids_belong_together(n: int, c: int, seed: int) -> None:
    c = min(n, c)
    points = problems(2, n, 4, seed)
    done = kmeans(points, initial(points, c, seed), 5)
    assert done.sizes.sum(-1).tolist() == [n, n]
    assert torch.equal(done.sizes, count_labels(done.labels, c))
    assert torch.equal(done.labels, nearest(points, done.centroids, "cosine"))
    assert done.centroids.isfinite().all()


def test_every_round_lowers_the_distance_to_the_centroids() -> None:
    points = problems(2, 400)
    start = initial(points, 12)
    costs = []
    for n_rounds in range(6):
        done = kmeans(points, start, n_rounds, "l2")
        costs.append((points.double() - done.centroids.double().gather(
            1, done.labels.unsqueeze(-1).expand(-1, -1, 16))).square().sum((1, 2)))  # fmt: skip
    for before, after in pairwise(costs):
        assert (after <= before * (1 + 1e-6)).all()
    assert (costs[-1] < 0.9 * costs[0]).all()


def test_a_cluster_that_loses_its_points_stays_where_it_was() -> None:
    points = torch.tensor([[[1.0, 0.0], [2.0, 0.1], [3.0, -0.1]]])
    start = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [0.0, -5.0]]])
    for run in (kmeans, kmeans_ref):
        done = run(points, start, 5)
        assert done.sizes.tolist() == [[3, 0, 0]]
        torch.testing.assert_close(done.centroids[0, 0], torch.tensor([2.0, 0.0]))
        assert torch.equal(done.centroids[0, 1:], start[0, 1:])


@pytest.mark.parametrize("n_rounds", [1, 4, 9])
def test_means_scaled_to_length_1_and_empty_clusters_as_they_were(n_rounds: int) -> None:
    points = problems(2, 150)
    start = torch.cat([initial(points, 7), torch.full((2, 1, 16), 1e-3)], 1)
    ours, torchs, theirs = (
        run(points, start, n_rounds, "dot", unit=True) for run in (kmeans, kmeans_torch, kmeans_ref)
    )
    for found in (ours, torchs):
        assert torch.equal(found.labels, theirs.labels)
        torch.testing.assert_close(found.centroids, theirs.centroids)
    had_points = kmeans(points, start, n_rounds - 1, "dot", unit=True).sizes > 0
    lengths = ours.centroids.norm(dim=-1)[had_points]
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
    assert torch.equal(theirs.centroids[:, 7], start[:, 7])


def test_a_point_at_zero_and_a_centroid_at_zero_are_no_error() -> None:
    points = torch.zeros(1, 4, 3)
    points[0, 1:] = torch.eye(3)
    done = kmeans(points, points[:, :2], 5)
    assert done.centroids.isfinite().all()
    assert done.sizes.sum() == 4


def test_initial_points_are_drawn_once_each_and_by_the_generator_alone() -> None:
    points = torch.arange(40.0).view(1, 40, 1).repeat(3, 1, 1)
    drawn = initial(points, 40).squeeze(-1)
    assert torch.equal(drawn.sort(-1).values, points.squeeze(-1))
    assert not torch.equal(drawn[0], drawn[1]), "problems share a draw"
    torch.manual_seed(7)
    again = initial(points, 12)
    torch.manual_seed(8)
    assert torch.equal(initial(points, 12), again)
    assert not torch.equal(initial(points, 12, seed=2), again)


def test_cosine_ignores_length_and_inner_product_does_not() -> None:
    points = torch.tensor([[[2.0, 1.0]]])
    centroids = torch.tensor([[[0.2, 0.1], [5.0, 0.0], [1.5, 1.5]]])
    assert {m: nearest(points, centroids, m).item() for m in METRICS} == {"cosine": 0, "l2": 2, "dot": 1}


@pytest.mark.skipif(native() is None, reason="no C++ compiler")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("p", "n", "d", "c"), [(1, 1, 1, 1), (2, 37, 5, 7), (3, 700, 64, 33), (2, 5000, 36, 120)])
def test_the_native_path_ends_where_the_others_end(p: int, n: int, d: int, c: int, metric: str) -> None:
    points = problems(p, n, max(d, 4))
    start = initial(points, min(c, n))
    ours, theirs = (run(points, start, 6, metric) for run in (kmeans_native, kmeans_torch))
    assert torch.equal(ours.labels, theirs.labels) and torch.equal(ours.sizes, theirs.sizes)
    assert torch.equal(ours.rounds, theirs.rounds)
    torch.testing.assert_close(ours.centroids, theirs.centroids, rtol=1e-5, atol=1e-4)


def test_the_rules_hold_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "native", lambda: None)
    test_the_fast_path_ends_where_the_reference_ends("cosine", 5)
    test_it_stops_when_no_label_changes()
    test_a_cluster_that_loses_its_points_stays_where_it_was()
