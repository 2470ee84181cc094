"""Every path of attention over what is kept, and of its sums, against dense masks in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.kernels import attend_kept as kernel
from kvbench.kernels.attend_kept import Kept, met_by
from kvbench.kernels.jit import triton

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
PATHS = ["torch", "native", pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="no triton"))]
# h, h_kv, s, d_h, d_v, block, block_k, dense queries: the last block is short, widths and blocks are no powers of two,
# one block, more keys than are listed at a time, wide heads.
CASES = [
    (4, 2, 150, 16, 16, 64, 32, 0), (3, 1, 75, 20, 12, 24, 8, 17), (2, 2, 9, 16, 16, 64, 64, 0),
    (2, 1, 300, 16, 16, 128, 1, 3), (4, 2, 100, 32, 32, 16, 32, 100),
    (2, 1, 50, 264, 12, 32, 8, 7),
]  # fmt: skip
FORMS = ["blocks", "columns", "near"]


def kept_of(form: str, case: tuple[int, ...], draw: torch.Generator, device: str = "cpu") -> Kept:
    """What is kept, at random; every query sees its own token."""
    h, _, s, _, _, block, block_k, n_dense = case
    if form == "columns":
        vertical, slash = (torch.rand(h, s, generator=draw) < 0.1 for _ in range(2))
        slash[:, 0] = True
        return Kept(s, block, s - n_dense, vertical=vertical.to(device), met=met_by(slash, block).to(device))
    n_q, n_k = -(-s // block), -(-s // block_k)
    blocks = torch.rand(h, n_q, n_k, generator=draw) < 0.3
    query, key = torch.arange(n_q).unsqueeze(-1) * block, torch.arange(n_k) * block_k
    blocks |= (key < query + block) & (key + block_k > query)
    limits: dict[str, Any] = {"n_init": 3, "n_local": 21} if form == "near" else {}
    return Kept(s, block, s - n_dense, blocks.to(device), block_k, **limits)


def drawn(case: tuple[int, ...], draw: torch.Generator) -> list[Tensor]:
    h, h_kv, s, d_h, d_v = case[:5]
    return [torch.randn(1, n, s, d, generator=draw) for n, d in ((h, d_h), (h_kv, d_h), (h_kv, d_v))]


def by_definition(q: Tensor, k: Tensor, v: Tensor, kept: Kept, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exps and weights, float64, of a mask of all pairs."""
    g = q.shape[1] // k.shape[1]
    k, v = (x[0].double().repeat_interleave(g, 0) for x in (k, v))
    logits = q[0].double() @ k.mT * 0.25
    logits = cap * (logits / cap).tanh() if cap else logits
    logits = logits.masked_fill(~kept.seen(), -torch.inf)
    return (logits.softmax(-1) @ v).unsqueeze(0), logits.logsumexp(-1).unsqueeze(0), logits.softmax(-1)


@pytest.fixture(autouse=True)
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LISTED", 128)
    monkeypatch.setattr(kernel, "HELD", 512)  # so that blocks of more than 32 queries are worked on in parts


def on(path: str, name: str) -> Any:
    return getattr(kernel, f"{name}_{path}")


@pytest.mark.parametrize(("form", "dtype"), [*((form, torch.float32) for form in FORMS), ("near", torch.bfloat16)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", PATHS)
def test_it_attends_to_what_is_kept_and_counts_it(
    path: str, case: tuple[int, ...], form: str, dtype: torch.dtype
) -> None:
    draw, device = torch.Generator().manual_seed(0), GPU if path == "triton" else "cpu"
    kept, cap = kept_of(form, case, draw, device), 2.0 if case[2] == 75 else 0.0
    q, k, v = (x.to(dtype) for x in drawn(case, draw))
    expected, lses, _ = by_definition(q, k, v, kept_of(form, case, torch.Generator().manual_seed(0)), cap)
    out, lse, pairs = on(path, "attend_kept")(*(x.to(device) for x in (q, k, v)), 0.25, kept, cap)
    assert out.dtype == dtype
    exact = 2e-6 * max(1, case[3] / 64)  # logits of wide heads are sums of more products
    atol, rtol = (exact, 2e-5) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(out.cpu().double(), expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(lse.cpu().double(), lses, atol=1e-5, rtol=1e-5)
    assert pairs.tolist() == kept.seen().sum((1, 2)).tolist()


@pytest.mark.parametrize("window", [None, 19])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", PATHS)
def test_what_a_token_gets_is_of_the_pairs_that_are_kept(
    path: str, case: tuple[int, ...], form: str, window: int | None
) -> None:
    draw, device = torch.Generator().manual_seed(0), GPU if path == "triton" else "cpu"
    kept, cap = kept_of(form, case, draw, device), 2.0 if case[2] == 75 else 0.0
    q, k, v = drawn(case, draw)
    _, lse, weights = by_definition(q, k, v, kept_of(form, case, torch.Generator().manual_seed(0)), cap)
    sums = on(path, "kept_sums")(q.to(device), k.to(device), 0.25, kept, lse.float().to(device), window, cap)
    if window is not None:
        weights = weights.triu(0) + weights.tril(-1).triu(1 - window)
    torch.testing.assert_close(sums.cpu().double(), weights.sum(1), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(triton is None, reason="no triton")
def test_programs_that_are_fewer_than_items_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    case = (4, 2, 90, 16, 16, 16, 16, 20)
    draw = torch.Generator().manual_seed(1)
    kept, given = kept_of("blocks", case, draw, GPU), [x.to(GPU) for x in drawn(case, draw)]
    found = kernel.attend_kept_triton(given[0], given[1], given[2], 0.25, kept)
    monkeypatch.setattr(kernel, "PROGRAMS", 5)
    again = kernel.attend_kept_triton(given[0], given[1], given[2], 0.25, kept)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
