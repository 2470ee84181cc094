"""Caps and sinks in every kernel that weighs tokens, against the plain formula in float64."""

import pytest
import torch
from torch import Tensor

from kvbench.engine.softmax import Softmax
from kvbench.kernels.attend_kept import Kept, attend_kept, attend_kept_triton, kept_sums, met_by
from kvbench.kernels.clusters import mass_keys_triton, mass_scores
from kvbench.kernels.column_sums import column_maxima, column_sums, column_sums_ref, column_sums_triton
from kvbench.kernels.jit import triton
from kvbench.kernels.packed.attend import Packed, attend_packed, attend_packed_ref
from kvbench.kernels.packed.codes import BY_CHANNEL, BY_TOKEN
from kvbench.kernels.pq_codes import PackedCodes
from kvbench.kernels.pq_scores import Coded, pq_keys_triton, pq_tables, pq_top, pq_top_ref, table_of
from kvbench.kernels.topk import best_keys, pack_keys_ref
from kvbench.tests.kernels.test_packed import as_float, side
from kvbench.tests.kernels.test_topk import scores_of

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
with_triton = pytest.mark.skipif(triton is None, reason="Triton is not installed")
KINDS = [(0.0, None), (3.0, None), (0.0, 1.5), (2.0, -0.5), (50.0, 8.0)]  # a cap, and where sinks are about


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sinks(h: int, about: float | None) -> Tensor | None:
    return None if about is None else draw(h, seed=99) + about


def bent(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap) if cap else logits


def probabilities(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Of logits (h, …, n) that compete with sinks (h,)."""
    if sink is None:
        return logits.softmax(-1)
    beside = sink.to(logits).view(-1, *[1] * (logits.ndim - 1)).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, beside], -1).softmax(-1)[..., :-1]


def causal_logits(q: Tensor, k: Tensor, scale: float, cap: float) -> Tensor:
    """(h, r, s) float64 of the last r queries of s tokens."""
    r, s = q.shape[2], k.shape[2]
    logits = bent(q[0].double() @ k[0].double().repeat_interleave(q.shape[1] // k.shape[1], 0).mT * scale, cap)
    return logits.masked_fill(torch.ones(r, s, dtype=torch.bool).triu(s - r + 1), -torch.inf)


@pytest.mark.parametrize(("cap", "about"), KINDS)
def test_column_sums(cap: float, about: float | None) -> None:
    q, k, sink = draw(1, 6, 37, 20, seed=1) * 3, draw(1, 2, 51, 20, seed=2), sinks(6, about)
    logits = causal_logits(q, k, 0.3, cap)
    weights = probabilities(logits, sink)
    right = weights.sum(1).view(2, 3, -1)
    torch.testing.assert_close(column_sums_ref(q, k, 0.3, cap=cap, sink=sink), right)
    lse = logits.logsumexp(-1)
    lse = (lse if sink is None else torch.logaddexp(lse, sink.double().view(-1, 1))).float().unsqueeze(0)
    torch.testing.assert_close(column_sums(q, k, 0.3, lse=lse, cap=cap), right, rtol=1e-4, atol=1e-5)
    past = q[:, :, :9]  # queries that see all keys
    full = bent(past[0].double() @ k[0].double().repeat_interleave(3, 0).mT * 0.3, cap)
    off = full.logsumexp(-1) + 0.5
    most = (full - off.unsqueeze(-1)).amax(1).view(2, 3, -1).amax(1)
    found = column_maxima(past, k, 0.3, off.float().unsqueeze(0), cap)
    torch.testing.assert_close(found, most.float(), rtol=1e-4, atol=1e-4)


@with_triton
@pytest.mark.parametrize(("cap", "about"), KINDS)
@pytest.mark.parametrize("window", [None, 7])
def test_column_sums_of_triton(cap: float, about: float | None, window: int | None) -> None:
    q, k, sink = draw(1, 4, 51, 16, seed=1) * 3, draw(1, 2, 51, 16, seed=2), sinks(4, about)
    logits = causal_logits(q, k, 0.3, cap)
    weights = probabilities(logits, sink)
    if window is not None:
        weights = weights * torch.ones(51, 51).triu(1 - window)
    lse = logits.logsumexp(-1)
    lse = lse if sink is None else torch.logaddexp(lse, sink.double().view(-1, 1))
    on_gpu = [x.to(GPU) for x in (q, k, lse.float().unsqueeze(0))]
    found = column_sums_triton(on_gpu[0], on_gpu[1], 0.3, None, on_gpu[2], window, cap)
    torch.testing.assert_close(found.cpu(), weights.sum(1).view(2, 2, -1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 37, 256, 300])
def test_packed_attention_with_a_cap(dtype: torch.dtype, n: int) -> None:
    n_coded = min(n, 256) // 32 * 32
    k, v = (side(kind, 4, 32, n_coded, n, 2, 64, dtype, i) for i, kind in enumerate((BY_CHANNEL, BY_TOKEN)))
    q, packed = draw(1, 6, 1, 64, seed=5).to(dtype) * 4, Packed(k, v, n)
    keys, values = (as_float(x, n).repeat_interleave(3, 1).double() for x in (k, v))
    logits = bent(q.double() @ keys.mT * 0.125, 3.0)
    right = logits.softmax(-1) @ values
    allowed = 2 * (attend_packed_ref(q, packed, 0.125, 3.0)[0] - right).abs().max() + 2e-6
    out, lse = attend_packed(q, packed, 0.125, 3.0)
    assert (out - right).abs().max() <= allowed
    torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=0, atol=1e-4)


def codes_of(h_kv: int, m: int, b: int, n: int, seed: int) -> PackedCodes:
    codes = PackedCodes(h_kv, m, b, n + 8, GPU)
    ids = torch.randint(1 << b, (h_kv, m, n), generator=torch.Generator().manual_seed(seed))
    codes.extend(ids.to(torch.uint8).to(GPU))
    return codes


def coded_weights(q: Tensor, centroids: Tensor, codes: PackedCodes, n: int, cap: float, sink: Tensor | None) -> Tensor:
    """(h_kv, n) float64, from keys made of codes."""
    h_kv, m, _, d_m = centroids.shape
    ids = codes.codes(0, n).long().cpu()  # (h_kv, m, n)
    keys = torch.cat([centroids[torch.arange(h_kv).unsqueeze(1), j, ids[:, j]] for j in range(m)], -1)
    logits = bent(q.view(h_kv, -1, m * d_m).double() @ keys.double().mT * 0.4, cap).flatten(0, 1)
    return probabilities(logits, sink).view(h_kv, -1, n).sum(1)


@pytest.mark.parametrize(("cap", "about"), KINDS)
def test_choices_by_codes(cap: float, about: float | None) -> None:
    q, centroids, sink = draw(6, 16, seed=1) * 3, draw(2, 4, 8, 4, seed=2), sinks(6, about)
    codes = codes_of(2, 4, 3, 130, 3)
    scores = coded_weights(q, centroids, codes, 130, cap, sink)
    right = scores.topk(17).values.sum(-1)
    on_gpu = (
        pq_tables(q, centroids).to(GPU),
        codes,
        130,
        17,
        0.4,
        "softmax_sum",
        cap,
        None if sink is None else sink.to(GPU),
    )
    for choose in (pq_top, pq_top_ref):
        idx = choose(*on_gpu).cpu()
        torch.testing.assert_close(scores.gather(-1, idx).sum(-1), right, rtol=1e-6, atol=1e-8)


@with_triton
@pytest.mark.parametrize(("cap", "about"), KINDS)
def test_weights_by_codes_in_triton(cap: float, about: float | None) -> None:
    q, centroids, sink = draw(2, 6, 1, 16, seed=1) * 3, draw(2, 4, 8, 4, seed=2), sinks(6, about)
    codes = [codes_of(2, 4, 3, n, n) for n in (300, 270)]
    there = None if sink is None else sink.to(GPU)
    told = table_of([Coded(centroids.to(GPU), each, 2, 2 + each.n) for each in codes], torch.device(GPU))
    keys = pq_keys_triton(q.to(GPU), draw(2, 2, 1, 16).to(GPU), told, 0.4, cap, there)
    for i, each in enumerate(codes):
        right = coded_weights(q[i, :, 0], centroids, each, each.n, cap, sink)
        found = scores_of(keys[i, :, 2 : 2 + each.n])
        torch.testing.assert_close(found.cpu().double(), right, rtol=1e-4, atol=1e-6)
        best = best_keys(keys[i], 20).int().long().cpu() - 2
        torch.testing.assert_close(right.gather(-1, best).sum(-1), right.topk(20).values.sum(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("cap", "about"), KINDS)
def test_masses_of_clusters(cap: float, about: float | None) -> None:
    q, centroids, sink = draw(2, 6, 1, 16, seed=1) * 3, draw(2, 41, 16, seed=2), sinks(6, about)
    sizes = torch.arange(82).view(2, 41) % 5
    logits = bent(q.view(2, 2, 3, 16).double() @ centroids.double().mT * 0.4, cap)  # (n, h_kv, g, c)
    each = torch.stack([probabilities(x.flatten(0, 1), sink) for x in logits]).view_as(logits).sum(2)
    right = each.masked_fill(sizes == 0, -1.0)
    torch.testing.assert_close(mass_scores(q, centroids, sizes, 0.4, cap, sink).double(), right, rtol=1e-5, atol=1e-7)
    if triton is not None:
        there = [x.to(GPU) for x in (q, centroids, sizes)]
        keys = mass_keys_triton(there[0], there[1], there[2], 0.4, cap, None if sink is None else sink.to(GPU))
        expected = pack_keys_ref(right.float(), torch.arange(41))
        best = best_keys(keys, 12).int().long().cpu()
        mine, theirs = (right.gather(-1, x).sum(-1) for x in (best, best_keys(expected, 12).int().long()))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@with_triton
@pytest.mark.parametrize(("cap", "about"), KINDS)
def test_a_sparse_prefill(cap: float, about: float | None) -> None:
    q, (k, v), sink = draw(1, 4, 75, 20) * 3, (draw(1, 2, 75, 20, seed=i) for i in (1, 2)), sinks(4, about)
    vertical, slash = (torch.rand(4, 75, generator=torch.Generator().manual_seed(i)) < 0.1 for i in (3, 4))
    slash[:, 0] = True
    kept = Kept(75, 24, 70, vertical=vertical, met=met_by(slash, 24))
    weights = probabilities(causal_logits(q, k, 0.25, cap).masked_fill(~kept.seen(), -torch.inf), sink)
    right = weights @ v[0].double().repeat_interleave(2, 0)
    there = Kept(75, 24, 70, vertical=vertical.to(GPU), met=met_by(slash, 24).to(GPU))
    on_gpu = [x.to(GPU) for x in (q, k, v)]
    for out, lse, _ in (
        attend_kept(q, k, v, 0.25, kept, cap),
        attend_kept_triton(on_gpu[0], on_gpu[1], on_gpu[2], 0.25, there, cap),
    ):
        out, lse = Softmax(0.25, cap, sink).finish(out.cpu(), lse.cpu())
        torch.testing.assert_close(out[0].double(), right, rtol=1e-5, atol=1e-5)
        sums = kept_sums(q, k, 0.25, kept, lse, cap=cap)
        torch.testing.assert_close(sums, weights.sum(1), rtol=1e-4, atol=1e-5)
