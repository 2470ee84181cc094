"""ShadowKV's step for several rows at once in Triton, against torch row by row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvbench.engine.softmax import Softmax
from kvbench.kernels.jit import triton
from kvbench.kernels.rows.landmarks import Chunks, KeyMaking
from kvbench.kernels.rows.rotation import rotation_of
from kvbench.kernels.topk import top_stable
from kvbench.methods.retrieving.shadowkv import Factors, Landmarks, most_likely, tokens_of
from kvbench.tests.kernels.test_capped import KINDS

GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton runs; on a CPU its interpreter does
H, H_KV, D = 6, 2, 20
SIZES = [(8, 90, 5, 3, 24), (4, 40, 0, 7, 40)]  # chunk, chunks, outliers, selected, rank of wider keys
pytestmark = pytest.mark.skipif(triton is None, reason="triton is not installed")


def halves(x: Tensor, by: Tensor) -> Tensor:
    """Rotation of numbers and those half a head behind them, the last four left as they are."""
    d = x.shape[-1] - 4
    angles = by.unsqueeze(-1) * 0.7 ** torch.arange(d // 2, device=x.device)  # (n or 1, s, d / 2)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    a, b, rest = x.split([d // 2, d // 2, 4], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def neighbours(x: Tensor, by: Tensor) -> Tensor:
    """Rotation of neighbouring numbers."""
    angles = by.unsqueeze(-1) * 0.7 ** torch.arange(x.shape[-1] // 2, device=x.device)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


@pytest.mark.parametrize("turn", [halves, neighbours])
def test_tables_say_what_a_rotation_does(turn: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, where = torch.randn(1, 2, 9, D, generator=torch.Generator().manual_seed(0)).to(GPU), torch.arange(9, device=GPU)
    rotation = rotation_of(turn, 9, D, torch.device(GPU))
    assert rotation is not None
    ours = x * rotation.own + x[..., rotation.partners] * rotation.other
    torch.testing.assert_close(ours, turn(x, where.unsqueeze(0)), rtol=1e-5, atol=1e-6)


def test_what_mixes_more_than_pairs_has_no_tables() -> None:
    mixing = torch.randn(D, D, generator=torch.Generator().manual_seed(0)).to(GPU)
    assert rotation_of(lambda x, by: x @ mixing, 9, D, torch.device(GPU)) is None
    shift = torch.eye(D, device=GPU).roll(1, 0)
    assert rotation_of(lambda x, by: x @ shift, 9, D, torch.device(GPU)) is None  # no two are each other's partners


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("turn", "kind"), [(halves, KINDS[0]), *((None, kind) for kind in KINDS)])
@pytest.mark.parametrize("d", [D, 40])
def test_rows_find_their_chunks_and_make_their_keys(
    d: int,
    dtype: torch.dtype,
    turn: Callable[..., Tensor] | None,
    kind: tuple[float, float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys are made in several parts; those of 40 numbers and their ranks can be read 8 numbers at once."""
    monkeypatch.setattr("kvbench.kernels.rows.landmarks.CHANNELS", {2: 16, 4: 16})
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw).to(GPU, dtype)

    rows, q, s, scale = list[Chunks](), normal(2, H, 1, d), 8 * 90, d**-0.5
    for chunk, n, n_outliers, n_selected, of_wide in SIZES:
        rank = of_wide if d == 40 else of_wide - 1
        outliers = torch.stack([torch.randperm(n, generator=draw)[:n_outliers].sort().values for _ in range(H_KV)])
        means, factors, basis = normal(H_KV, n - n_outliers, d), normal(s, rank), normal(H_KV, rank, d)
        rows.append(Chunks(means, outliers.to(GPU), factors, basis, chunk, n_selected))
    rotation = None if turn is None else rotation_of(turn, s, d, torch.device(GPU))
    cap, about = kind
    softmax = Softmax(scale, cap, None if about is None else torch.randn(H, generator=draw).to(GPU) + about)
    making = KeyMaking(rows, H, rotation, scale, cap, softmax.sink)
    making.take(q)
    for i, ((idx, keys), row) in enumerate(zip(zip(making.idx, making.keys, strict=True), rows, strict=True)):
        logits = q[i : i + 1].float().view(1, H_KV, -1, d) @ row.means.float().mT
        scores = most_likely(softmax.bent(logits), softmax)[0]
        landmarks = Landmarks(row.means, row.outliers)
        expected = tokens_of(landmarks.numbers(top_stable(scores, row.n_selected)), row.chunk)
        assert torch.equal(idx.sort(-1).values, expected.sort(-1).values)
        made = Factors(row.factors.float(), row.basis.float()).keys(idx[0])
        if turn is not None:
            made = turn(made.unsqueeze(1), idx[0]).squeeze(1)
        exact = 2 * torch.finfo(dtype).eps * float(made.abs().max())
        torch.testing.assert_close(keys[0].float(), made, rtol=0, atol=max(exact, 1e-4))
