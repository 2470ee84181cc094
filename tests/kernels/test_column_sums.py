import pytest
import torch

from kvbench.kernels.column_sums import (
    column_maxima,
    column_maxima_torch,
    column_sums,
    column_sums_native,
    column_sums_ref,
    column_sums_torch,
    column_sums_triton,
    native,
)
from kvbench.kernels.jit import triton

needs_triton = pytest.mark.skipif(triton is None, reason="no triton")
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
needs_native = pytest.mark.skipif(native() is None, reason="no C++ compiler")
# h, h_kv, s, r, d_h: more than a task's keys, fewer queries than keys, widths of no whole vector or pair, hardly any
# token.
CASES = [(9, 3, 700, 700, 64), (4, 2, 333, 45, 36), (8, 2, 130, 130, 128), (2, 1, 5, 5, 64), (2, 1, 60, 60, 35)]


def make(case: tuple[int, ...], dtype: torch.dtype):
    h, h_kv, s, r, d_h = case
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, h, r, d_h, generator=draw).to(dtype)
    k = torch.randn(1, h_kv, s, d_h, generator=draw).to(dtype)
    return q, k, torch.rand(r, generator=draw)


def row_lse(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    (_, h, r, _), (_, h_kv, s, _) = q.shape, k.shape
    logits = q.double() @ k.double().repeat_interleave(h // h_kv, 1).mT * scale
    future = torch.ones(r, s, dtype=torch.bool).triu(s - r + 1)
    return logits.masked_fill(future, -torch.inf).logsumexp(-1).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
@needs_native
def test_native_sums_equal_those_of_the_whole_matrix(case, dtype) -> None:
    q, k, row_weights = make(case, dtype)
    found = column_sums_native(q, k, 0.125, row_weights, row_lse(q, k, 0.125))
    torch.testing.assert_close(found, column_sums_ref(q, k, 0.125, row_weights), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("s", [97, 101, 107, 108, 679])
@needs_native
def test_logits_of_hundreds_and_a_last_chunk_of_any_length_make_no_nan(s: int, dtype: torch.dtype) -> None:
    """As in the first layers of Qwen2.5, whose keys have biases of a hundred and more."""
    q, k, _ = make((4, 2, s, s, 64), dtype)
    q, k, ones = (q * 40).to(dtype), k + 20, torch.ones(s)
    found = column_sums_native(q, k, 0.125, ones, row_lse(q, k, 0.125))
    torch.testing.assert_close(found, column_sums_ref(q, k, 0.125, ones), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_torch_sums_equal_those_of_the_whole_matrix(case, with_lse) -> None:
    q, k, row_weights = make(case, torch.float32)
    lse = row_lse(q, k, 0.125) if with_lse else None
    found = column_sums_torch(q, k, 0.125, row_weights, lse)
    torch.testing.assert_close(found, column_sums_ref(q, k, 0.125, row_weights), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_largest_weights_equal_those_of_the_whole_matrix(case, dtype) -> None:
    """Where every query sees every key, more of them than keys or fewer."""
    h, h_kv, s, r, d_h = case
    for n_queries in (r, s + 40):
        q, k, _ = make((h, h_kv, s, n_queries, d_h), dtype)
        logits = q[0].double() @ k[0].double().repeat_interleave(h // h_kv, 0).mT * 0.125
        lse = logits.logsumexp(-1)
        expected = (logits - lse.unsqueeze(-1)).unflatten(0, (h_kv, -1)).amax((1, 2)).float()
        for found in (column_maxima(q, k, 0.125, lse[None].float()), column_maxima_torch(q, k, 0.125, lse[None])):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=3e-6)


@needs_native
def test_threads_change_nothing() -> None:
    q, k, row_weights = make(CASES[0], torch.float32)
    lse, before = row_lse(q, k, 0.125), torch.get_num_threads()
    found = []
    for n in (1, 2):
        torch.set_num_threads(n)
        found.append(column_sums_native(q, k, 0.125, row_weights, lse))
    torch.set_num_threads(before)
    assert torch.equal(*found)


@needs_native
def test_layout_changes_nothing() -> None:
    q, k, row_weights = make(CASES[0], torch.bfloat16)
    lse = row_lse(q, k, 0.125)
    found = column_sums(q.mT.contiguous().mT, k.mT.contiguous().mT, 0.125, row_weights, lse)
    assert torch.equal(found, column_sums_native(q, k, 0.125, row_weights, lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [*CASES, (2, 1, 90, 60, 264)])
@needs_triton
def test_triton_sums_equal_those_of_the_whole_matrix(case, dtype) -> None:
    q, k, row_weights = make(case, dtype)
    given = [x.to(GPU) for x in (q, k, row_weights, row_lse(q, k, 0.125))]
    found = column_sums_triton(given[0], given[1], 0.125, given[2], given[3]).cpu()
    torch.testing.assert_close(found, column_sums_ref(q, k, 0.125, row_weights), rtol=1e-5, atol=1e-7)


def band(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, window: int) -> torch.Tensor:
    """The plain sums (h, s) of weights of the queries less than `window` behind a key, itself included."""
    s = k.shape[2]
    logits = q[0].double() @ k[0].double().repeat_interleave(q.shape[1] // k.shape[1], 0).mT * 0.125
    behind = torch.arange(s).unsqueeze(1) - torch.arange(s)
    weights = (logits - lse[0].double().unsqueeze(-1)).exp().masked_fill((behind < 0) | (behind >= window), 0)
    return weights.sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 12, 31, 32, 100, 129, 699, 700, 1000])
@needs_native
def test_native_sums_of_a_band_leave_out_queries_behind_it(window: int, dtype: torch.dtype) -> None:
    q, k, _ = make((4, 2, 700, 700, 64), dtype)
    lse = row_lse(q, k, 0.125)
    found = column_sums_native(q, k, 0.125, torch.ones(700), lse, window)
    torch.testing.assert_close(found.flatten(0, 1), band(q, k, lse, window), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("window", [1, 64, 100, 129, 1000])
@needs_triton
def test_triton_sums_of_a_band_leave_out_queries_behind_it(window: int) -> None:
    q, k, _ = make((4, 2, 333, 333, 36), torch.float32)
    lse = row_lse(q, k, 0.125)
    found = column_sums_triton(q.to(GPU), k.to(GPU), 0.125, None, lse.to(GPU), window).cpu()
    torch.testing.assert_close(found.flatten(0, 1), band(q, k, lse, window), rtol=1e-5, atol=1e-7)
