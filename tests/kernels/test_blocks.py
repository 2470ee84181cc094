from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvbench.engine.caches.blocks import BlockCache, BlockCacheSpec
from kvbench.engine.caches.held import HeldBlocks
from kvbench.engine.caches.recent import distinct_tokens
from kvbench.kernels.jit import triton
from kvbench.kernels.rows.blocks import BLOCK, fill_rows_triton, look_up_rows_triton
from kvbench.kernels.rows.union import Ask, Far, fetch_rows_triton, union_rows_triton

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
H, H_KV, S, N_LATE, N_AHEAD, ROOM = 4, 2, 60, 20, 3, 40
N = S + N_LATE


class Row:
    """A row's cache on the device, and the same in the books."""

    def __init__(self, spec: BlockCacheSpec, d_h: int, d_v: int, dtype: torch.dtype) -> None:
        numbers = {"dtype": torch.int32, "device": GPU}
        self.books = BlockCache(spec)
        self.k = torch.zeros(1, H_KV, ROOM, d_h, dtype=dtype, device=GPU)
        self.v = self.k[..., :-d_v] if d_v < 0 else torch.zeros(1, H_KV, ROOM, d_v, dtype=dtype, device=GPU)
        self.held = HeldBlocks(self.books, (self.k, self.v), N, N_AHEAD)
        self.stamps, self.slots = (torch.zeros(H_KV, N, **numbers) for _ in range(2))
        self.tokens, self.sources = (torch.zeros(H_KV, ROOM, **numbers) for _ in range(2))
        self.epoch = 0

    def ask(self, idx: Tensor) -> Ask:
        self.epoch += 1
        return Ask(idx.to(GPU), self.stamps, self.slots, self.tokens, self.sources, self.epoch)

    def counted(self, idx: Tensor, n_complete: int) -> list[int]:
        """What the books say of a selection: hits, hits of heads, blocks that came."""
        tokens = idx.int().long()
        of_heads = self.books.count_hits(self.books.count_blocks(tokens[tokens >= 0] - N_AHEAD))
        hits, came = self.books.access(distinct_tokens(tokens, H_KV, N) - N_AHEAD, n_complete)
        return [hits, of_heads, came]


def selection(t: int, heads: int, n_seen: int) -> Tensor:
    """Near each other, so that blocks are wanted again; the upper halves are no positions, and there are gaps."""
    draw = torch.Generator().manual_seed(t)
    favoured = (torch.arange(n_seen - N_AHEAD) // 7 % 3 == t % 2) * 0.7
    rank = torch.rand(1, heads, n_seen - N_AHEAD, generator=draw) + favoured
    idx = rank.topk(14).indices + N_AHEAD + (9 << 32)
    idx[0, 0, 2:4] = -1
    return idx


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("policy", "d_h", "d_v", "dtype"),
    [
        ("lfu", 16, 16, torch.float32),
        ("lru", 16, 16, torch.float32),
        ("lfu", 16, 7, torch.float32),
        ("lfu", 16, -8, torch.float32),  # below 0: within the key
        ("lfu", 72, 40, torch.bfloat16),
        ("lfu", 60, 60, torch.bfloat16),  # 60 numbers are no whole loads of 16 bytes
        ("lfu", 80, 96, torch.float32),
    ],
)
def test_it_holds_and_counts_what_the_books_say(policy: str, d_h: int, d_v: int, dtype: torch.dtype) -> None:
    """A cache for many blocks, one for fewer than a step takes in, and one of a single block."""
    draw = torch.Generator().manual_seed(0)

    def normal(n: int, d: int) -> Tensor:
        return torch.randn(1, H_KV, n, d, generator=draw).to(dtype)

    k, k_late = normal(S, d_h), normal(N_LATE, d_h)
    v, v_late = (x[..., :-d_v] if d_v < 0 else normal(x.shape[2], d_v) for x in (k, k_late))
    late = k_late, v_late
    whole = [torch.cat([a, b], 2) for a, b in zip((k, v), late, strict=True)]
    here = [x.to(GPU) for x in (k, v, *late)]
    specs = [
        BlockCacheSpec(tokens, length, most, cast(Any, policy))
        for tokens, length, most in ((30, 5, 4), (12, 6, 5), (7, 7, 1))
    ]
    rows, n_came, n_hits = [Row(spec, d_h, d_v, dtype) for spec in specs], 0, 0
    for t in range(12):
        n_seen = S + t
        asked = [selection(3 * t + i, heads, n_seen) for i, heads in enumerate((H, H_KV, H))]
        asks = [row.ask(idx) for row, idx in zip(rows, asked, strict=True)]
        far = [Far(here[0], here[1], (here[2], here[3]), row.k, row.v, (row.held.k, row.held.v)) for row in rows]
        cached = [row.held.cached(ask, n_seen - N_AHEAD) for row, ask in zip(rows, asks, strict=True)]
        counts = union_rows_triton(asks, H_KV, 0)
        found = look_up_rows_triton(cached[1:], counts, [1, 2])
        found = torch.cat([look_up_rows_triton(cached[:1], counts, [0]), found])
        fetch_rows_triton(asks, far, counts)
        fill_rows_triton(cached, far)
        expected = [
            row.counted(idx, (n_seen - N_AHEAD) // row.held.spec.block_len)
            for row, idx in zip(rows, asked, strict=True)
        ]
        assert found.tolist() == expected
        n_hits, n_came = n_hits + sum(x[0] for x in expected), n_came + sum(x[2] for x in expected)
        for row, idx in zip(rows, asked, strict=True):
            where = row.held.blocks[BLOCK.index("where")].cpu()
            assert {i for i, slot in enumerate(where.tolist()) if slot >= 0} == {*row.books.frequency}
            assert not row.held.blocks[BLOCK.index("wanted")].any()
            for held, source in zip((row.held.k, row.held.v), whole, strict=True):
                for block in row.books.frequency:
                    length = row.held.spec.block_len
                    first, slot = N_AHEAD + block * length, int(where[block]) * length
                    assert torch.equal(held[:, :, slot : slot + length].cpu(), source[:, :, first : first + length])
            for head, tokens in enumerate(idx[0].int().view(H_KV, -1)):
                real = tokens[tokens >= 0].long()
                slots = row.slots[head].cpu()[real].long()
                assert torch.equal(row.k[0, head].cpu()[slots], whole[0][0, head, real])
                assert torch.equal(row.v[0, head].cpu()[slots], whole[1][0, head, real])
    assert n_hits > 50 and n_came > 20
