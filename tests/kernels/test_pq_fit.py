from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.kernels.jit import triton
from kvbench.kernels.kmeans import cluster_means_triton, nearest_triton
from kvbench.kernels.pq_fit import Fit, distances, native, pq_fit, pq_fit_native, pq_fit_ref, pq_fit_torch
from kvbench.tests.vectors import load

GOLDEN = Path(__file__).parents[1] / "golden" / "pqcache"
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
needs_native = pytest.mark.skipif(native() is None, reason="no C++ compiler")
PATHS = [
    "ref",
    "torch",
    pytest.param("native", marks=needs_native),
    pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="no triton")),
]
# p, n, d_m, c: several chunks, one tile, less than a tile, odd widths, two-byte codes.
CASES = [(1, 2100, 16, 16), (3, 100, 8, 32), (1, 7, 5, 3), (2, 333, 20, 13), (1, 400, 4, 300)]


def in_triton(points: Tensor, init_idx: Tensor, n_rounds: int, **options) -> Fit:
    kernels: Any = {"assign": partial(nearest_triton, is_l2=True), "means": cluster_means_triton}
    found = pq_fit_torch(points.to(GPU), init_idx.to(GPU), n_rounds, **options, **kernels)
    return Fit(*(x.cpu() for x in found))


FITS: dict[str, Callable[..., Fit]] = {
    "ref": pq_fit_ref,
    "torch": pq_fit_torch,
    "native": pq_fit_native,
    "triton": in_triton,
}


def problems(p: int, n: int, d: int, seed: int = 0) -> Tensor:
    """Points with one channel that lies far from zero, as keys have."""
    points = torch.randn(p, n, d, generator=torch.Generator().manual_seed(seed))
    points[..., 1] += 20
    return points


def drawn(n: int, c: int, seed: int = 1) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:c]


def far_from_own(points: Tensor, fit: Fit) -> Tensor:
    """By how much a point's centroid is farther than the nearest, (p, n)."""
    far = torch.stack([distances(x.double(), c.double()) for x, c in zip(points, fit.centroids, strict=True)])
    return far.gather(-1, fit.codes.long().unsqueeze(-1)).squeeze(-1) - far.amin(-1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["kmeans_b4_T3", "kmeans_b4_empty_T5"])
def test_scikit_learn_ends_with_the_same(path: str, name: str) -> None:
    meta, arrays = load(GOLDEN / f"{name}.npz")
    points = torch.from_numpy(arrays["x"])[None]
    fit = FITS[path](points, torch.from_numpy(arrays["init_idx"]), meta["max_iter"])
    right = torch.from_numpy(arrays["centroids"]).float()
    torch.testing.assert_close(fit.centroids[0], right, rtol=0, atol=1e-4)
    assert fit.codes[0].tolist() == arrays["codes"].tolist()
    assert fit.n_iter.tolist() == [int(arrays["n_iter"])]
    assert fit.inertia[0].item() == pytest.approx(float(arrays["inertia"]), rel=1e-5)
    for n, inertia in zip((1, 2, 3, 5, 10), arrays["inertia_after_1_2_3_5_10"], strict=True):
        fit = FITS[path](points, torch.from_numpy(arrays["init_idx"]), n)
        assert fit.inertia[0].item() == pytest.approx(inertia, rel=1e-5)


@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize("case", CASES)
def test_paths_end_where_float64_does(path: str, case: tuple[int, ...]) -> None:
    p, n, d, c = case
    points, init_idx = problems(p, n, d), drawn(n, c)
    right, fit = pq_fit_ref(points, init_idx, 4), FITS[path](points, init_idx, 4)
    assert fit.centroids.dtype == torch.float32
    assert fit.codes.dtype == right.codes.dtype == (torch.uint8 if c <= 256 else torch.int16)
    assert torch.equal(fit.n_iter, right.n_iter)
    torch.testing.assert_close(fit.inertia, right.inertia, rtol=1e-4, atol=1e-6)
    assert far_from_own(points, fit).max() <= 1e-4
    assert (fit.codes != right.codes).float().mean() <= 0.002  # near ties


@pytest.mark.parametrize("path", PATHS)
def test_a_problem_ends_when_its_labels_repeat(path: str) -> None:
    centres = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    noise = torch.randn(2, 300, 2, generator=torch.Generator().manual_seed(0))
    points = centres.repeat(100, 1) + noise
    points[1] = noise[1]  # takes longer
    fit = FITS[path](points, torch.tensor([0, 1, 2]), 40, tol=0.0)
    assert fit.n_iter[0] == 2
    assert 2 < fit.n_iter[1] <= 40
    assert torch.equal(fit.codes[0], torch.arange(3).repeat(100).to(torch.uint8))


@pytest.mark.parametrize("path", PATHS)
def test_a_problem_ends_when_its_centroids_rest(path: str) -> None:
    points, init_idx = problems(2, 200, 8), drawn(200, 8)
    loose = FITS[path](points, init_idx, 12, tol=0.05)
    assert loose.n_iter.sum() < FITS[path](points, init_idx, 12, tol=0.0).n_iter.sum()
    assert torch.equal(loose.n_iter, pq_fit_ref(points, init_idx, 12, tol=0.05).n_iter)
    assert far_from_own(points, loose).max() <= 1e-4


@pytest.mark.parametrize("path", PATHS)
def test_empty_clusters_take_the_farthest_points_or_stay(path: str) -> None:
    points = torch.zeros(1, 60, 3)
    points[0, 30:, 0] = 1.0
    points[0, 58], points[0, 59] = torch.tensor([0.0, 9.0, 0.0]), torch.tensor([0.0, 0.0, 30.0])
    init_idx = torch.tensor([0, 1, 31, 2])  # clusters 1 and 3 are empty
    fit = FITS[path](points, init_idx, 1, tol=0.0)
    assert torch.allclose(fit.centroids[0, 1], points[0, 59], atol=1e-5)  # farthest first
    assert torch.allclose(fit.centroids[0, 3], points[0, 58], atol=1e-5)
    kept = FITS[path](points, init_idx, 1, tol=0.0, empty="keep")
    assert torch.allclose(kept.centroids[0, [1, 3]], torch.zeros(2, 3), atol=1e-5)
    assert set(kept.codes[0].tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize("path", PATHS)
def test_equal_points_are_no_trouble(path: str) -> None:
    fit = FITS[path](torch.full((2, 70, 4), 3.0), drawn(70, 8), 5)
    assert torch.allclose(fit.centroids, torch.full((2, 8, 4), 3.0))
    assert fit.codes.eq(0).all()
    assert fit.inertia.eq(0).all()


@pytest.mark.parametrize("path", PATHS)
def test_a_warm_start_goes_on(path: str) -> None:
    points, init_idx = problems(2, 200, 8), drawn(200, 16).expand(2, -1)
    some = FITS[path](points, init_idx, 3, tol=0.0)
    rest = FITS[path](points, init_idx, 4, tol=0.0, start=some.centroids)
    whole = FITS[path](points, init_idx, 7, tol=0.0)
    torch.testing.assert_close(rest.centroids, whole.centroids, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rest.inertia, whole.inertia, rtol=1e-5, atol=0)


@pytest.mark.parametrize("path", PATHS)
def test_no_round_raises_the_objective(path: str) -> None:
    points, init_idx = problems(2, 200, 6), drawn(200, 8)
    found = [FITS[path](points, init_idx, n, tol=0.0).inertia for n in (0, 1, 2, 5)]
    for before, after in pairwise(found):
        assert (after <= before * (1 + 1e-6)).all()


@needs_native
def test_neither_threads_nor_how_they_share_problems_change_anything() -> None:
    points, init_idx = problems(3, 5000, 8), drawn(5000, 32)
    found = [pq_fit_native(points, init_idx, 5, n_threads=n) for n in (1, 2, 3)]  # 2: in chunks
    for fit in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(fit, found[0], strict=True))


def test_worker_threads_get_the_same() -> None:
    points, init_idx = [problems(2, 1000, 8, seed) for seed in range(4)], drawn(1000, 16)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda x: pq_fit(x, init_idx, 5), points))
    for x, fit in zip(points, found, strict=True):
        assert torch.equal(fit.codes, pq_fit(x, init_idx, 5).codes)


def test_layout_and_dtype_change_nothing() -> None:
    points, init_idx = problems(2, 300, 8).bfloat16(), drawn(300, 16)
    fit = pq_fit(points.mT.contiguous().mT, init_idx, 3)
    assert torch.equal(fit.centroids, pq_fit(points.float(), init_idx, 3).centroids)
