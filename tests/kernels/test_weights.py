"""What tokens received, and who leaves: Triton for all rows at once, against torch row by row."""

import pytest
import torch
from torch import Tensor

from kvbench.kernels.jit import triton
from kvbench.kernels.rows.weights import BLOCK, REDUCTIONS, Held, Receiving, Row, Softening, receive_rows, soften_rows
from kvbench.methods.scorers import lowest_slot, reduce_group
from kvbench.tests.kernels.clocks import aged

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
    by_torch = [x.clone().cpu() for x in logits]
    nothing, *right = soften_rows([None, *by_torch], lse.cpu())
    Softening([None, *logits]).take(lse)
    assert nothing is None
    for x, y in zip(logits, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
    for x, y in zip(right, [y.cpu() for y in expected], strict=True):
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
    found = receive_rows([Row(w, H_KV, reduce, b) for w, b in zip(weights, before, strict=True)])
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
    rows, stays = [], Row(weights_of(11, seed=3), H, "max")  # which has no token to lose
    for seed, (n, n_kept, named) in enumerate(shapes):
        at = held(n, n_kept, 10 * seed, dtype, named)
        low, stop = (0, 1 << 31) if seed % 2 else (20, 1000 - 2)
        rows.append(Row(weights_of(n, seed), owners, "mean", None, at, low, stop))
    rows[3] = rows[3]._replace(low=999, stop=1000)  # the newest itself leaves
    before = [(row.held.k.clone(), row.held.v.clone()) for row in rows if row.held is not None]
    found = receive_rows([*rows[:2], stays, *rows[2:]])
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


@pytest.mark.parametrize("owners", [H_KV, 1])
def test_rows_told_once_learn_what_rows_told_anew_learn(owners: int) -> None:
    """Three steps of a row that evicts at each, over its own sums and positions, and of one that has a token more."""
    n, n_grown, n_steps = 40, BLOCK - 1, 3  # so that the second row comes to need another block
    at = held(n, n - 1, 5, torch.float32, named=True)
    room = torch.zeros(1, H, n_grown + n_steps, device=GPU)
    rooms = [torch.zeros(1, H, n, device=GPU), room[..., :n_grown]]
    sums = [draw(1, owners, n, seed=1).abs(), draw(1, H, n_grown + n_steps, seed=2).abs()]
    assert at.kept is not None
    kept = at.kept.clone()
    mine = at._replace(k=at.k.clone(), v=at.v.clone(), kept=kept, left=kept)
    told = Receiving(
        [
            Row(rooms[0], owners, "sum", sums[0][..., : n - 1], mine, 30, 995, sums[0]),
            Row(rooms[1], H, "max", sums[1][..., : n_grown - 1], sums=sums[1]),
        ],
        [0, 1], n_steps,
    )  # fmt: skip
    before = [sums[0][..., : n - 1].clone(), sums[1][..., : n_grown - 1].clone()]
    for age in range(n_steps):
        weights = [weights_of(n, seed=age), weights_of(n_grown + age, seed=10 + age)]
        rooms[0].copy_(weights[0])
        room[..., : n_grown + age] = weights[1]
        k, v = draw(1, H_KV, 1, D, seed=20 + age), draw(1, H_KV, 1, D, seed=30 + age)
        for where in (at, mine):
            where.k[:, :, n - 1 : n], where.v[:, :, n - 1 : n] = k, v
        first, second = receive_rows(
            [
                Row(weights[0], owners, "sum", before[0], at._replace(start=at.start + age), 30, 995 + age),
                Row(weights[1], H, "max", before[1]),
            ]
        )
        assert first.positions is not None and first.evicted is not None
        found = told.take(aged(age, GPU))
        assert found[0].evicted is not None and torch.equal(found[0].evicted, first.evicted)
        assert found[0].positions is kept and torch.equal(kept, first.positions)
        assert torch.equal(mine.k, at.k) and torch.equal(mine.v, at.v)
        before = [first.sums[..., :-1], second.sums]
        assert torch.equal(sums[0][..., :-1], before[0])
        assert torch.equal(sums[1][..., : n_grown + age], before[1])
        at = at._replace(kept=first.positions)


def test_logits_of_a_row_that_grows_become_weights() -> None:
    n, n_steps = BLOCK - 1, 2
    room = torch.zeros(H, n + n_steps, device=GPU)
    told = Softening([None, room[:, :n]], [0, 1], n_steps)
    for age in range(n_steps + 1):
        x = draw(H, n + age, seed=age)
        room[:, : n + age] = x
        told.take(torch.stack([torch.zeros(H, device=GPU), x.logsumexp(-1)]).unsqueeze(-1), aged(age, GPU))
        torch.testing.assert_close(room[:, : n + age], x.softmax(-1), rtol=1e-5, atol=1e-7)
