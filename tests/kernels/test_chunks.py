import pytest
import torch

from kvbench.engine.softmax import Softmax
from kvbench.kernels.jit import triton
from kvbench.kernels.rows.chunks import Chunked, chunk_keys, table_of
from kvbench.kernels.topk import best_keys
from kvbench.methods.retrieving.rocketkv import chunk_bounds, chunk_scores, take_in, top_tokens
from kvbench.tests.kernels.clocks import aged
from kvbench.tests.kernels.test_capped import KINDS

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cap", "about"), KINDS)
@pytest.mark.parametrize("age", [0, 3])
def test_rows_with_chunks_of_their_own_are_searched_as_on_a_cpu(
    dtype: torch.dtype, cap: float, about: float | None, age: int
) -> None:
    draw = torch.Generator().manual_seed(4)
    h, h_kv, d_h, scale = 6, 2, 20, 20**-0.5
    # Tokens, length of a chunk, channels and tokens to select: a chunk that begins, one that goes on, blocks of chunks.
    sizes = [(61, 4, 7, 20), (60, 1, 20, 60), (290, 2, 3, 33), (50, 7, 1, 5)]
    q = torch.randn(len(sizes), h, 1, d_h, generator=draw).to(dtype)
    keys = [torch.randn(1, h_kv, n, d_h, generator=draw).to(dtype) for n, *_ in sizes]
    rows, expected, bounds = [], [], []
    softmax = Softmax(scale, cap, None if about is None else torch.randn(h, generator=draw) + about)
    there = None if softmax.sink is None else softmax.sink.to(GPU)
    for i, (n, chunk, r, k) in enumerate(sizes):
        room = -(-n // chunk) + 3
        mine = chunk_bounds(keys[i][:, :, :-1], chunk, room)
        rows.append(Chunked(mine.to(GPU, dtype), n, chunk, r))
        take_in(mine, keys[i][0, :, -1], n - 1, chunk)
        bounds.append(mine)
        lengths = torch.tensor([float(min(chunk, n - at)) for at in range(0, n, chunk)])
        scores = chunk_scores(q[i : i + 1], mine, r, lengths, softmax)
        expected.append(top_tokens(scores, chunk, n, k).sort(-1).values)
    newest = torch.cat([each[:, :, -1:] for each in keys])
    told = table_of([row._replace(n=row.n - age) for row in rows], torch.device(GPU), age + 2)
    found = chunk_keys(q.to(GPU), newest.to(GPU), told, scale, cap, there, aged(age, GPU))
    for i, (n, _, _, k) in enumerate(sizes):
        assert torch.equal(rows[i].bounds.cpu().float(), bounds[i])
        chosen = best_keys(found[i], k).int().long().cpu()
        assert torch.equal(chosen.sort(-1).values, expected[i]), sizes[i]
        assert (found[i, :, n:] == torch.iinfo(torch.int64).max).all()
