from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.kernels.jit import triton
from kvbench.kernels.pq_codes import PackedCodes
from kvbench.kernels.pq_scores import (
    Coded,
    native,
    pq_keys_triton,
    pq_logits_ref,
    pq_tables,
    pq_top,
    pq_top_native,
    pq_top_ref,
    table_of,
)
from kvbench.kernels.topk import top_keys
from kvbench.tests.kernels.test_topk import scores_of
from kvbench.tests.vectors import load

GOLDEN = Path(__file__).parents[1] / "golden" / "pqcache"
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where Triton runs; on a CPU its interpreter does
needs_native = pytest.mark.skipif(native() is None, reason="no C++ compiler")
PATHS = [
    "ref",
    pytest.param("native", marks=needs_native),
    pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="no triton")),
]
# h, h_kv, d_h, n, m, b, k. Of joint values there are fewer than tokens (work per value) or more (work per token); query
# heads of a group fill vectors of 2, 4 and 8, or leave lanes empty, or take several.
CASES = [
    (32, 8, 64, 3000, 2, 6, 150), (9, 3, 64, 333, 2, 6, 45), (8, 2, 16, 203, 2, 4, 20), (4, 4, 32, 1000, 1, 8, 100),
    (6, 2, 32, 700, 4, 3, 100), (5, 1, 32, 701, 8, 2, 100), (12, 1, 48, 703, 3, 5, 100), (16, 2, 64, 2000, 2, 8, 400),
    (4, 2, 32, 5, 2, 6, 2), (32, 2, 32, 777, 4, 8, 3), (4, 2, 32, 77, 2, 6, 76), (3, 3, 64, 500, 16, 4, 50),
]  # fmt: skip
FORMS = ["packed", "bytes"]


class Case:
    """A query, centroids and codes; `spread` is the size of logits."""

    def __init__(self, case: tuple[int, ...], form: str, spread: float = 3.0, seed: int = 0) -> None:
        h, self.h_kv, d_h, self.n, m, b, self.k = case
        draw = torch.Generator().manual_seed(seed)
        self.q = torch.randn(h, d_h, generator=draw) * spread
        self.centroids = torch.randn(self.h_kv, m, 1 << b, d_h // m, generator=draw)
        codes = torch.randint(0, 1 << b, (self.h_kv, m, self.n + 9), generator=draw)
        self.codes = held(codes.to(torch.uint8), b, form)
        self.scale = d_h**-0.5

    @property
    def tables(self) -> Tensor:
        return pq_tables(self.q, self.centroids)


def held(codes: Tensor, b: int, form: str) -> PackedCodes | Tensor:
    return codes.contiguous() if form == "bytes" else packed(codes, b)


def packed(codes: Tensor, b: int) -> PackedCodes:
    h_kv, m, n = codes.shape
    room = PackedCodes(h_kv, m, b, n, codes.device)
    room.extend(codes)
    return room


def keys_in_triton(q: Tensor, centroids: Tensor, codes: PackedCodes | Tensor, n: int, scale: float) -> Tensor:
    """Of one row, (h_kv, n). Its codes are packed: those of 8 bits are bytes then."""
    h_kv, b = len(centroids), centroids.shape[2].bit_length() - 1
    ids = codes.codes() if isinstance(codes, PackedCodes) else codes
    there = packed(ids.to(GPU), b)
    newest, told = (
        torch.zeros(1, h_kv, 1, q.shape[1], device=GPU),
        table_of([Coded(centroids.to(GPU), there, 0, n)], GPU),
    )
    return pq_keys_triton(q.to(GPU)[None, :, None], newest, told, scale)[0]


def top_in_triton(q, centroids, codes, n, k, scale) -> Tensor:
    return top_keys(keys_in_triton(q, centroids, codes, n, scale).unsqueeze(0), [k])[0].int().long().cpu()


TOPS: dict[str, Callable[..., Tensor]] = {
    "ref": lambda q, centroids, *asked: pq_top_ref(pq_tables(q, centroids), *asked),
    "native": lambda q, centroids, *asked: pq_top_native(pq_tables(q, centroids), *asked),
    "triton": top_in_triton,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
def test_the_authors_select_the_same_tokens(path: str, form: str) -> None:
    meta, arrays = load(GOLDEN / "search_gqa_8q2kv_m2b4_t203.npz")
    q, centroids = torch.from_numpy(arrays["q"]), torch.from_numpy(arrays["centroids"])
    codes = held(torch.from_numpy(arrays["codes"]).permute(1, 2, 0).to(torch.uint8), meta["b"], form)
    n, scale = len(arrays["codes"]), meta["d"] ** -0.5
    logits = pq_logits_ref(q, centroids, codes, n) * scale
    right = torch.from_numpy(arrays["approx_logits_scaled"])
    torch.testing.assert_close(logits, right, rtol=2e-5, atol=2e-5)
    idx = TOPS[path](q, centroids, codes, n, meta["k"], scale)
    selected = torch.from_numpy(arrays["selected"]).long() - meta["sinks"]
    assert torch.equal(idx.sort(-1).values, selected)


@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
@needs_native
def test_native_selects_what_the_reference_does(case: tuple[int, ...], form: str, spread: float) -> None:
    for seed in range(3):
        x = Case(case, form, spread, seed)
        idx = pq_top_native(x.tables, x.codes, x.n, x.k, x.scale)
        right = pq_top_ref(x.tables, x.codes, x.n, x.k, x.scale)
        assert torch.equal(idx, right.sort(-1).values)


@pytest.mark.parametrize("case", CASES[1:7])
@pytest.mark.skipif(triton is None, reason="no triton")
def test_triton_selects_what_the_reference_does(case: tuple[int, ...]) -> None:
    x = Case(case, "packed")
    idx = top_in_triton(x.q, x.centroids, x.codes, x.n, x.k, x.scale)
    right = pq_top_ref(x.tables, x.codes, x.n, x.k, x.scale)
    assert torch.equal(idx.sort(-1).values, right.sort(-1).values)
    logits = pq_logits_ref(x.q, x.centroids, x.codes, x.n) * x.scale
    weights = logits.softmax(-1).unflatten(0, (x.h_kv, -1)).sum(1)
    scores = scores_of(keys_in_triton(x.q, x.centroids, x.codes, x.n, x.scale)).cpu()
    torch.testing.assert_close(scores, weights, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES[1:5])
def test_logits_are_sums_of_inner_products(form: str, case: tuple[int, ...]) -> None:
    x = Case(case, form)
    logits = pq_logits_ref(x.q, x.centroids, x.codes, x.n)
    codes = x.codes.codes() if isinstance(x.codes, PackedCodes) else x.codes
    rows = codes[..., : x.n].long().unsqueeze(-1).expand(-1, -1, -1, x.centroids.shape[-1])
    keys = x.centroids.gather(2, rows).transpose(1, 2).flatten(2).double()  # reconstructed
    right = (x.q.double().view(x.h_kv, -1, keys.shape[-1]) @ keys.mT).flatten(0, 1)
    torch.testing.assert_close(logits.double(), right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("m", "b"), [(2, 6), (4, 8)])  # per value, per token
def test_of_equal_tokens_the_first_are_selected(path: str, m: int, b: int) -> None:
    x = Case((4, 2, 32, 300, m, b, 40), "bytes")
    assert isinstance(x.codes, Tensor)
    n, k = 300, 40
    codes = x.codes[..., :1].repeat(1, 1, n)  # one code
    idx = TOPS[path](x.q, x.centroids, codes, n, k, x.scale)
    assert torch.equal(idx.sort(-1).values, torch.arange(k).expand(2, k))
    codes = x.codes[..., :3].repeat(1, 1, n // 3)  # three
    idx = TOPS[path](x.q, x.centroids, codes, n, n // 2, x.scale)
    right = pq_top_ref(x.tables, codes, n, n // 2, x.scale)
    assert torch.equal(idx.sort(-1).values, right.sort(-1).values)


@pytest.mark.parametrize("case", CASES[:8])
def test_numbers_that_float64_cannot_hold_are_left_to_the_reference(case: tuple[int, ...]) -> None:
    for seed in range(3):
        x = Case(case, "packed", 2000.0, seed)
        idx = pq_top(x.tables, x.codes, x.n, x.k, x.scale)
        right = pq_top_ref(x.tables, x.codes, x.n, x.k, x.scale)
        assert torch.equal(idx.sort(-1).values, right.sort(-1).values)
    x.q[0, 0] = torch.nan
    assert pq_top(x.tables, x.codes, x.n, x.k, x.scale).unique(dim=-1).shape[-1] == x.k


@pytest.mark.parametrize("path", PATHS[:2])  # a GPU is asked where there is a choice
def test_whatever_there_is_is_selected_if_more_is_asked(path: str) -> None:
    x = Case(CASES[2], "packed")
    for n in (0, 1, 20):
        idx = TOPS[path](x.q, x.centroids, x.codes, n, 20, x.scale)
        assert torch.equal(idx.sort(-1).values, torch.arange(n).expand(x.h_kv, n))
    assert TOPS[path](x.q, x.centroids, x.codes, 30, 0, x.scale).shape == (x.h_kv, 0)


def test_merges_are_what_they_are_called() -> None:
    x = Case(CASES[1], "packed")
    logits = pq_logits_ref(x.q, x.centroids, x.codes, x.n).double() * x.scale
    grouped = logits.unflatten(0, (x.h_kv, -1))
    scores = {
        "softmax_sum": grouped.softmax(-1).sum(1),
        "logit_sum": grouped.sum(1),
        "max": grouped.softmax(-1).amax(1),
        "per_query_head": logits,
    }
    found = {}
    for merge, score in scores.items():
        idx = pq_top(x.tables, x.codes, x.n, x.k, x.scale, merge).sort(-1).values
        lowest = score.gather(-1, idx).amin(-1)
        assert torch.equal((score > lowest.unsqueeze(-1) * (1 + 1e-6)).sum(-1) <= x.k, lowest == lowest)
        found[merge] = idx
    assert found["per_query_head"].shape == (len(x.q), x.k)
    assert not torch.equal(found["softmax_sum"], found["logit_sum"])


def test_any_layout_of_codes_will_do() -> None:
    x = Case(CASES[3], "bytes")
    assert isinstance(x.codes, Tensor)
    right = pq_top(x.tables, x.codes, x.n, x.k, x.scale).sort(-1).values
    for codes in (x.codes.mT.contiguous().mT, x.codes.long(), x.codes[..., : x.n]):
        idx = pq_top(x.tables, codes, x.n, x.k, x.scale)
        assert torch.equal(idx.sort(-1).values, right)


@needs_native
def test_threads_change_nothing() -> None:
    before, found = torch.get_num_threads(), []
    for case in (CASES[0], (32, 4, 64, 3000, 4, 8, 200)):
        x, found = Case(case, "packed"), []
        for n in (1, 3):
            torch.set_num_threads(n)
            found.append(pq_top(x.tables, x.codes, x.n, x.k, x.scale))
        torch.set_num_threads(before)
        assert torch.equal(*found)
