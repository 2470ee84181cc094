"""What tokens received, and who leaves: Triton for all rows at once, against torch row by row."""

import pytest
import torch
from torch import Tensor

from kernels.jit import triton
from kernels.rows.weights import BLOCK, REDUCTIONS, Held, Row, receive_rows, soften_rows
from methods.scorers import lowest_slot, reduce_group

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
H, H_KV, D = 4, 2, 12
pytestmark = pytest.mark.skipif(triton is None, reason="triton is not installed")


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(GPU)


def test_logits_become_weights_where_they_lie() -> None:
    logits = [draw(H, n, seed=n) for n in (5, BLOCK + 7)]
    logits[0][1, 2] = -1e30  # hidden from this head
    lse = torch.stack([torch.zeros(H, device=GPU), *(x.logsumexp(-1) for x in logits)]).unsqueeze(-1)
    expected = [x.softmax(-1) for x in logits]
    nothing, *found = soften_rows([None, *logits], lse)
    assert nothing is None
    for x, y in zip(found, expected, strict=True):
        assert x is not None
        torch.testing.assert_close(x[0], y, rtol=1e-5, atol=1e-7)


def weights_of(n: int, seed: int) -> Tensor:
    """With ties, of which there are many where a model's dtype is coarse."""
    return (draw(1, H, n, seed=seed) * 2).round().softmax(-1)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_what_tokens_receive_adds_up(reduce: str) -> None:
    lengths = [3, BLOCK + 1]
    weights = [weights_of(n, seed=n) for n in lengths]
    before = [None, draw(1, H_KV, lengths[1], seed=9).abs()[..., :-1]]  # sums that dropped one have rows further apart
    found = receive_rows([Row(w, b) for w, b in zip(weights, before, strict=True)], H_KV, reduce)
    for w, b, (sums, positions, evicted) in zip(weights, before, found, strict=True):
        expected = reduce_group(w, H_KV, reduce)
        if b is not None:
            expected[..., :-1] += b
        torch.testing.assert_close(sums, expected)
        assert positions is evicted is None


def held(n: int, n_kept: int, seed: int, dtype: torch.dtype, named: bool) -> Held:
    """Slots with room for one more, of which the first hold some tokens and the others the latest of 1,000."""
    k, v = (draw(1, H_KV, n + 1, D, seed=seed + i, dtype=dtype) for i in range(2))
    kept = torch.stack([torch.randperm(900, generator=torch.Generator().manual_seed(seed + i)) for i in range(H_KV)])
    return Held(k, v, kept[None, :, :n_kept].to(GPU) if named else None, n_kept, 1000 - n + n_kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("owners", [H_KV, 1])
def test_the_least_token_leaves_and_the_newest_takes_its_slot(owners: int, dtype: torch.dtype) -> None:
    shapes = [(7, 6, True), (40, 30, True), (2 * BLOCK + 3, 2 * BLOCK, False), (9, 8, True)]
    rows, stays = [], Row(weights_of(11, seed=3))  # which has no token to lose
    for seed, (n, n_kept, named) in enumerate(shapes):
        at = held(n, n_kept, 10 * seed, dtype, named)
        low, stop = (0, 1 << 31) if seed % 2 else (20, 1000 - 2)
        rows.append(Row(weights_of(n, seed), None, at, low, stop))
    rows[3] = rows[3]._replace(low=999, stop=1000)  # the newest itself leaves
    before = [(row.held.k.clone(), row.held.v.clone()) for row in rows if row.held is not None]
    found = receive_rows([*rows[:2], stays, *rows[2:]], owners, "mean")
    assert found.pop(2).positions is None
    for row, (old_k, old_v), (sums, left, evicted) in zip(rows, before, found, strict=True):
        n, at = row.weights.shape[2], row.held
        assert at is not None and left is not None and evicted is not None
        received = row.weights.unflatten(1, (owners, -1)).mean(2)
        kept = torch.arange(at.n_kept, device=GPU).expand(1, H_KV, -1) if at.kept is None else at.kept
        window = torch.arange(at.start, at.start + n - at.n_kept, device=GPU).expand(1, H_KV, -1)
        positions = torch.cat([kept, window], -1)
        own = positions[:, :owners]
        outside = (own < row.low) | (own >= row.stop)
        hole = lowest_slot(received.masked_fill(outside, torch.inf), own).expand(1, H_KV, 1)
        assert torch.equal(evicted, positions.gather(-1, hole))
        assert torch.equal(left, positions.scatter(-1, hole, positions[..., -1:])[..., :-1])
        moved = hole.unsqueeze(-1).expand(-1, -1, -1, D)
        for buffer, old in ((at.k, old_k), (at.v, old_v)):
            assert torch.equal(buffer, old.scatter(2, moved, old[:, :, n - 1 : n]))
        mine = hole[:, :owners]
        torch.testing.assert_close(sums[..., :-1], received.scatter(-1, mine, received[..., -1:])[..., :-1])
