from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvbench.kernels.jit import triton
from kvbench.kernels.kmeans import nearest_triton
from kvbench.kernels.pq_codes import (
    PackedCodes,
    native,
    pack,
    pq_codes,
    pq_codes_native,
    pq_codes_ref,
    pq_codes_torch,
    unpack,
)
from kvbench.tests.vectors import load

GOLDEN = Path(__file__).parents[1] / "golden" / "pqcache"
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
needs_native = pytest.mark.skipif(native() is None, reason="no C++ compiler")
PATHS = [
    "torch",
    pytest.param("native", marks=needs_native),
    pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="no triton")),
]


def in_triton(keys: Tensor, centroids: Tensor) -> Tensor:
    return pq_codes_torch(keys.to(GPU), centroids.to(GPU), partial(nearest_triton, is_l2=True)).cpu()


CODES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch": pq_codes_torch,
    "native": pq_codes_native,
    "triton": in_triton,
}


def draw(*shape: int, seed: int) -> Tensor:
    """Values around 20, which inner products would rank by length."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 20


@pytest.mark.parametrize("path", PATHS)
def test_codes_are_those_of_the_authors(path: str) -> None:
    _, arrays = load(GOLDEN / "assign_2kv_m2b6.npz")
    keys = torch.from_numpy(arrays["keys"]).transpose(0, 1)
    codes = CODES[path](keys, torch.from_numpy(arrays["centroids"]))
    assert codes.permute(2, 0, 1).tolist() == arrays["codes"].tolist()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("h_kv", "n", "m", "c", "d_m"),
    [(2, 600, 2, 64, 32), (3, 1, 2, 16, 32), (1, 9, 4, 256, 8), (2, 50, 1, 300, 20), (2, 40, 3, 5, 7)],
)
def test_every_part_goes_to_a_nearest_centroid(
    path: str, dtype: torch.dtype, h_kv: int, n: int, m: int, c: int, d_m: int
) -> None:
    keys = draw(h_kv, n + 3, m * d_m, seed=0).to(dtype)[:, 1 : n + 1]  # strides of another tensor
    centroids = draw(h_kv, m, c, d_m, seed=1)
    codes = CODES[path](keys, centroids)
    assert codes.shape == (h_kv, m, n)
    assert codes.dtype == pq_codes_ref(keys, centroids).dtype
    parts = keys.double().unflatten(-1, (m, d_m)).transpose(1, 2)
    far = (parts.unsqueeze(3) - centroids.double().unsqueeze(2)).square().sum(-1)
    mine = far.gather(-1, codes.long().unsqueeze(-1)).squeeze(-1)
    assert (mine - far.amin(-1)).max() <= 1e-4


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [2, 100])
def test_of_equal_centroids_the_first_is_taken(path: str, n: int) -> None:
    """Small whole numbers around zero, so that no order of adding rounds."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randint(-4, 5, (1, n, 12), generator=draw).float()
    half = torch.randint(-4, 5, (1, 2, 8, 6), generator=draw).float()
    centroids = torch.cat([half, -half], 2)
    right = pq_codes_ref(keys, centroids)
    assert torch.equal(CODES[path](keys, centroids), right)
    assert torch.equal(CODES[path](keys, centroids.repeat_interleave(3, 2)), 3 * right)


@needs_native
def test_threads_change_nothing() -> None:
    keys, centroids = draw(3, 2000, 32, seed=0), draw(3, 2, 64, 16, seed=1)
    before, found = torch.get_num_threads(), []
    for n in (1, 3):
        torch.set_num_threads(n)
        found.append(pq_codes(keys, centroids))
    torch.set_num_threads(before)
    assert torch.equal(*found)


@given(st.integers(1, 8), st.integers(0, 200), st.integers(0, 1 << 30))
def test_packed_codes_come_back(b: int, n: int, seed: int) -> None:
    codes = draw_codes(b, n, seed)
    packed = pack(codes, b)
    assert packed.dtype == torch.uint8
    assert packed.shape[-1] == -(-n // 64) * 8 * b
    assert torch.equal(unpack(packed, b, n), codes)


def draw_codes(b: int, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << b, (2, 3, n), generator=generator).to(torch.uint8)


@given(st.integers(1, 8), st.lists(st.integers(0, 150), max_size=5), st.booleans())
def test_codes_can_be_appended_in_any_pieces(b: int, pieces: list[int], in_torch: bool) -> None:
    n = sum(pieces)
    codes, held, start = draw_codes(b, n, seed=n), PackedCodes(2, 3, b, n + 5), 0
    for piece in pieces:
        some = codes[..., start : start + piece]
        if in_torch:
            held.extend_torch(some)
            held.n += piece
        else:
            held.extend(some)
        start += piece
    assert torch.equal(held.codes(), codes)
    assert torch.equal(held.codes(n // 3, n // 2), codes[..., n // 3 : n // 2])
    assert held.counted_bytes == -(-2 * 3 * n * b // 8)
    assert held.nbytes >= held.counted_bytes


def test_there_is_room_for_no_more_than_was_asked() -> None:
    held = PackedCodes(2, 3, 6, 10)
    with pytest.raises(AssertionError, match="11 tokens, room for 10"):
        held.extend(draw_codes(6, 11, seed=0))
