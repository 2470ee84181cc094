from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvbench.kernels.jit import triton
from kvbench.kernels.pages import (
    native,
    page_bounds,
    page_bounds_native,
    page_bounds_ref,
    page_bounds_triton,
    page_keys_triton,
    page_scores,
    page_scores_native,
    page_scores_ref,
    page_scores_torch,
)
from kvbench.tests.kernels.test_topk import scores_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
SHAPES = [(2, 40, 16), (3, 100, 64), (1, 17, 20), (2, 1, 7), (2, 70, 128), (1, 9, 264)]  # h_kv, s, d_h
PATHS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(native() is None, reason="no C++ compiler")),
    pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="no triton")),
]


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_triton_bounds(keys: Tensor, page_len: int) -> tuple[Tensor, Tensor]:
    kmin, kmax = page_bounds_triton(keys.to(GPU), page_len)
    return kmin.cpu(), kmax.cpu()


def scores_in_triton(q: Tensor, kmin: Tensor, kmax: Tensor) -> Tensor:
    return scores_of(page_keys_triton(q.to(GPU), kmin.to(GPU), kmax.to(GPU), "query_head")).cpu()


BOUNDS: dict[str, Callable[[Tensor, int], tuple[Tensor, Tensor]]] = {
    "torch": page_bounds_ref,
    "native": page_bounds_native,
    "triton": in_triton_bounds,
}
SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch": page_scores_torch,
    "native": page_scores_native,
    "triton": scores_in_triton,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_len", [1, 5, 16])
def test_bounds_are_those_of_every_page(path: str, dtype: torch.dtype, page_len: int) -> None:
    for h_kv, s, d_h in SHAPES:
        room = draw(1, h_kv, s + 3, d_h, seed=1, dtype=dtype)
        keys = room[:, :, 2 : s + 2]  # strides of another tensor
        kmin, kmax = BOUNDS[path](keys, page_len)
        pages = keys.split(page_len, 2)
        assert torch.equal(kmin, torch.stack([page.amin(2) for page in pages], 2))
        assert torch.equal(kmax, torch.stack([page.amax(2) for page in pages], 2))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [1, 2, 3, 4, 7])
def test_scores_are_sums_of_the_larger_products(path: str, dtype: torch.dtype, g: int) -> None:
    """Error at most twice that of plain torch in the same dtype, both against float64, plus a floor."""
    for h_kv, s, d_h in SHAPES:
        keys = draw(1, h_kv, s, d_h, seed=1, dtype=dtype)
        q = draw(1, h_kv * g, 1, d_h, seed=2, dtype=dtype)
        kmin, kmax = page_bounds(keys, 4)
        low, high = (x.double().repeat_interleave(g, 1) for x in (kmin, kmax))
        right = torch.maximum(q.double() * low, q.double() * high).sum(-1)
        low, high = (x.repeat_interleave(g, 1) for x in (kmin, kmax))
        plain = torch.maximum(q * low, q * high).sum(-1)
        got = SCORES[path](q, kmin, kmax)
        assert got.dtype == torch.float32
        assert got.shape == right.shape
        allowed = 2 * (plain - right).abs().max() + 2e-6 * right.abs().max()
        assert (got - right).abs().max() <= allowed
        torch.testing.assert_close(page_scores_ref(q, kmin, kmax), right.float(), rtol=1e-5, atol=1e-4)


def test_no_key_of_a_page_scores_above_its_bound() -> None:
    keys, q = (draw(1, 2, 90, 16, seed=1, dtype=torch.float32), draw(1, 6, 1, 16, seed=2, dtype=torch.float32))
    scores = page_scores(q, *page_bounds(keys, 8))
    products = (q.view(1, 2, 3, 16) @ keys.mT).flatten(1, 2)  # (1, h, s)
    for page, exact in enumerate(products.split(8, -1)):
        assert (exact <= scores[..., page : page + 1] + 1e-5).all()


def test_a_longer_buffer_of_bounds_can_be_scored_in_part() -> None:
    keys, q = (draw(1, 2, 90, 16, seed=1, dtype=torch.float32), draw(1, 6, 1, 16, seed=2, dtype=torch.float32))
    kmin, kmax = page_bounds(keys, 8)
    part = page_scores(q, kmin[:, :, :5], kmax[:, :, :5])
    torch.testing.assert_close(part, page_scores(q, kmin, kmax)[..., :5])


def test_float64_and_turned_keys_take_the_torch_path() -> None:
    keys, q = (draw(1, 2, 90, 16, seed=1, dtype=torch.float64), draw(1, 6, 1, 16, seed=2, dtype=torch.float64))
    kmin, kmax = page_bounds(keys.mT.contiguous().mT, 8)
    assert torch.equal(kmin, page_bounds_ref(keys, 8)[0])
    assert torch.equal(kmax, page_bounds_ref(keys, 8)[1])
    torch.testing.assert_close(page_scores(q, kmin, kmax), page_scores_ref(q, kmin, kmax))
