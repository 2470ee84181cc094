from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvbench.kernels.jit import triton
from kvbench.kernels.rows.union import (
    TILE,
    Ask,
    Far,
    FetchLaunch,
    fetch_rows_ref,
    fetch_rows_triton,
    union_rows_ref,
    union_rows_triton,
)  # fmt: skip
from kvbench.tests.kernels.clocks import aged

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
H, H_KV, S, N_LATE, D, ROOM = 4, 2, 60, 10, 16, 40


class Row:
    """What one row keeps between its selections."""

    def __init__(self, ages: int, device: str, d_v: int) -> None:
        numbers = {"dtype": torch.int32, "device": device}
        self.ages, self.epoch = ages, ages
        self.stamps, self.slots = (torch.zeros(H_KV, S + N_LATE, **numbers) for _ in range(2))
        self.tokens, self.sources = (torch.zeros(H_KV, ROOM, **numbers) for _ in range(2))
        self.k = torch.zeros(1, H_KV, (ages + 1) * ROOM, D, device=device)
        self.v = value_of(self.k, d_v, torch.zeros)

    def ask(self, idx: Tensor) -> Ask:
        self.epoch += 1
        return self.asked(idx)

    def asked(self, idx: Tensor) -> Ask:
        idx = idx.to(self.k.device)
        return Ask(idx, self.stamps, self.slots, self.tokens, self.sources, self.epoch, self.ages + 1)


def value_of(k: Tensor, d_v: int, make: Callable[..., Tensor]) -> Tensor:
    """Values for these keys, of `d_v` numbers; below 0 they lie within the keys."""
    return k[..., :-d_v] if d_v < 0 else make(*k.shape[:3], d_v, device=k.device)


def selections(t: int) -> list[Tensor]:
    """Of three rows, the second of which selects per KV head; the third has gaps, and numbers above its positions."""
    draw = torch.Generator().manual_seed(t)
    per_head = [torch.rand(1, heads, S + N_LATE, generator=draw).topk(20).indices for heads in (H, H_KV, H)]
    per_head[2] += 5 << 32
    per_head[2][0, 1, 3:7] = -1
    return per_head


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("ages", [0, 1, 2])
@pytest.mark.parametrize("d_v", [D, 7, 24, -8])
def test_triton_counts_and_brings_what_sets_do(ages: int, d_v: int) -> None:
    draw = torch.Generator().manual_seed(0)
    k, k_late = (torch.randn(1, H_KV, n, D, generator=draw) for n in (S, N_LATE))
    v, late = value_of(k, d_v, torch.randn), (k_late, value_of(k_late, d_v, torch.randn))
    ours, theirs = [Row(ages, GPU, d_v) for _ in range(3)], [Row(ages, "cpu", d_v) for _ in range(3)]
    whole = [torch.cat([a, b], 2) for a, b in zip((k, v), late, strict=True)]
    for t in range(4):
        asked = selections(t)
        counts = []
        for rows, union, bring in (
            (theirs, union_rows_ref, fetch_rows_ref),
            (ours, union_rows_triton, fetch_rows_triton),
        ):
            asks = [row.ask(idx) for row, idx in zip(rows, asked, strict=True)]
            here = [
                (x := k.to(rows[0].k.device), x[..., :-d_v] if d_v < 0 else v.to(x.device)) for k, v in ((k, v), late)
            ]
            counts.append(union(asks, H_KV, ages))
            bring(asks, [Far(*here[0], here[1], row.k, row.v) for row in rows], counts[-1])
        assert torch.equal(counts[0], counts[1].cpu())
        for row, idx in zip(ours, asked, strict=True):
            for head, tokens in enumerate(idx[0].int().view(H_KV, -1)):
                real = tokens[tokens >= 0].long()
                slots = row.slots[head].cpu()[real].long()
                assert torch.equal(row.k[0, head].cpu()[slots], whole[0][0, head, real])
                assert torch.equal(row.v[0, head].cpu()[slots], whole[1][0, head, real])
    assert bool(counts[0][:, :, 3:].any()) == bool(ages)


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("ages", [0, 2])
def test_rows_ask_later_from_where_they_asked(ages: int) -> None:
    draw = torch.Generator().manual_seed(1)
    k, v = (torch.randn(1, H_KV, S + N_LATE, D, generator=draw) for _ in range(2))
    ours, theirs = (Row(ages, device, D) for device in (GPU, "cpu"))
    there, n_steps = selections(0)[0].to(GPU), 2 * ages + 4
    epochs = 1 if ages else 3  # where copies last for a step, layers ask with epochs of their own
    ours.epoch += 1
    far = Far(k.to(GPU), v.to(GPU), None, ours.k, ours.v)
    told = FetchLaunch([ours.asked(there)], [far], ages, epochs, n_steps)
    for t in range(n_steps):
        idx = selections(t)[0]
        asked = theirs.ask(idx)
        expected = union_rows_ref([asked], H_KV, ages)
        fetch_rows_ref([asked], [Far(k, v, None, theirs.k, theirs.v)], expected)
        there.copy_(idx)
        told.take(aged(t, GPU))
        assert torch.equal(told.counts[t].cpu(), expected) and not told.counts[t + 1 :].any()
        for head, tokens in enumerate(idx[0].view(H_KV, -1)):
            slots = ours.slots[head].cpu()[tokens].long()
            assert torch.equal(ours.k[0, head].cpu()[slots], k[0, head, tokens])
            assert torch.equal(ours.v[0, head].cpu()[slots], v[0, head, tokens])


@pytest.mark.skipif(triton is None, reason="triton is not installed")
def test_programs_share_what_the_heads_of_one_kv_head_ask_for() -> None:
    """A fifth of 8,192 tokens, as four query heads of each KV head ask: several tiles, which have tokens in common."""
    h_kv, g, s, k, ages = 2, 4, 8192, 1638, 1
    assert g * k > 3 * TILE
    draw = torch.Generator().manual_seed(0)
    both = []
    for device, union in ((GPU, union_rows_triton), ("cpu", union_rows_ref)):
        draw.manual_seed(0)
        stamps, slots, tokens, sources = (
            torch.zeros(h_kv, n, dtype=torch.int32, device=device) for n in (s, s, g * k, g * k)
        )
        slots += torch.arange(s, dtype=torch.int32, device=device)
        for epoch in (2, 3, 5):
            idx = torch.rand(1, h_kv * g, s, generator=draw).topk(k).indices
            idx[0, 1, -epoch:] = -1
            counts = union([Ask(idx.to(device), stamps, slots, tokens, sources, epoch)], h_kv, ages)[0].cpu()
            lists = [
                sorted(zip(tokens[i, :n].tolist(), sources[i, :n].tolist(), strict=True))
                for i, n in enumerate(counts[:, 1].tolist())
            ]
            both.append((epoch, counts.tolist(), lists, stamps.tolist()))
    ours, theirs = both[:3], both[3:]
    assert ours == theirs
    assert [any(source >= 0 for _, source in lists[0]) for *_, lists, _ in ours] == [False, True, False]
