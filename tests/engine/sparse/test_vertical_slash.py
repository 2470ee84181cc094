"""MInference's columns and diagonals against their definition, written out with dense masks in float64."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.engine.causal import causal
from kvbench.engine.observe import ColumnSums, LastQueries
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse import vertical_slash
from kvbench.engine.sparse.vertical_slash import VerticalSlash, diagonal_sums, n_pairs, votes
from kvbench.kernels import attend_kept
from kvbench.tests.tiny import prompt, tiny

SIZES = [(50, 4, 2, 8), (97, 6, 2, 16), (64, 2, 2, 64), (130, 3, 1, 32), (20, 2, 1, 64), (33, 1, 1, 1)]


def pattern(n_vertical: Any = 7, n_slash: Any = 9, **changes: Any) -> VerticalSlash:
    counts: dict[str, Any] = {"n_last": 12, "n_first": 3, "n_near": 4, "block": 8, "dense_last": 0} | changes
    shares = {"n_vertical": Fraction(str(n_vertical)), "n_slash": Fraction(str(n_slash))}
    return VerticalSlash(density=None, layers=None, observe="kept", **shares, **counts)


def draw(s: int, h: int, h_kv: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    seed = torch.Generator().manual_seed(s)
    return [(2 * torch.randn(1, n, s, 16, generator=seed)).to(dtype) for n in (h, h_kv, h_kv)]


def exact_weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Causal softmax weights (h, s, s) float64."""
    s = q.shape[2]
    logits = q[0].double() @ k[0].double().repeat_interleave(q.shape[1] // k.shape[1], 0).mT * scale
    return logits.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def voted(weights: Tensor, n_last: int) -> tuple[Tensor, Tensor]:
    """Sums over columns and by distance of one head's last rows, entry by entry."""
    s = len(weights)
    vertical, slash = torch.zeros(s).double(), torch.zeros(s).double()
    for i in range(max(0, s - n_last), s):
        for j in range(i + 1):
            vertical[j] += weights[i, j]
            slash[i - j] += weights[i, j]
    return vertical, slash


def kept(scores: Tensor, n: int, n_always: int) -> set[int]:
    order = sorted(range(len(scores)), key=lambda i: (i >= n_always, -scores[i].item()))
    return set(order[: max(n, n_always)])


def allowed(q: Tensor, k: Tensor, scale: float, rule: VerticalSlash) -> Tensor:
    """(h, s, s) bool: which query sees which key, each pair by the definition."""
    s, masks = q.shape[2], []
    for weights in exact_weights(q, k, scale):
        vertical, slash = voted(weights, rule.n_last)
        columns = kept(vertical, int(rule.n_vertical), rule.n_first)
        diagonals = kept(slash, int(rule.n_slash), rule.n_near)
        mask = torch.zeros(s, s, dtype=torch.bool)
        for i in range(s):
            first = i - i % rule.block
            met = {first - d + at for d in diagonals for at in range(rule.block)}
            for j in (columns | met) & set(range(i + 1)):
                mask[i, j] = True
        masks.append(mask)
    return torch.stack(masks)


def masked(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Attention over a dense mask, in the dtype that it is given."""
    g = q.shape[1] // k.shape[1]
    k, v = (x[0].repeat_interleave(g, 0) for x in (k, v))
    logits = (q[0] @ k.mT * scale).masked_fill(~mask, -torch.inf)
    return (logits.softmax(-1) @ v).unsqueeze(0)


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 25])
@pytest.mark.parametrize(("s", "h", "h_kv", "block"), SIZES)
def test_it_is_attention_over_the_mask_that_the_definition_gives(
    s: int, h: int, h_kv: int, block: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend_kept, "CHUNK_BYTES", chunk_bytes)
    q, k, v = draw(s, h, h_kv)
    rule = pattern(block=block)
    out, _, share, _ = rule.attend(q, k, v, Softmax(0.25))
    mask = allowed(q, k, 0.25, rule)
    expected = masked(q.double(), k.double(), v.double(), 0.25, mask)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert share == pytest.approx(mask.sum().item() / (h * s * (s + 1) / 2))
    if s > 2 * block:
        assert share < 0.9


def test_in_half_precision_it_errs_no_more_than_plain_attention_over_the_mask() -> None:
    q, k, v = draw(97, 6, 2, torch.bfloat16)
    rule = pattern(block=16)
    out = rule.attend(q, k, v, Softmax(0.25)).out
    mask = allowed(q, k, 0.25, rule)
    truth = masked(q.double(), k.double(), v.double(), 0.25, mask)
    plain = masked(q, k, v, 0.25, mask)
    assert out.dtype == torch.bfloat16
    assert (out - truth).abs().max() <= 2 * (plain - truth).abs().max() + 1e-3


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 25])
def test_votes_are_sums_over_the_last_queries(n: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vertical_slash, "CHUNK_BYTES", chunk_bytes)
    q, k, _ = draw(40, 6, 2)
    found = votes(q[:, :, -n:], k, Softmax(0.25))
    for head, weights in enumerate(exact_weights(q, k, 0.25)):
        for ours, expected in zip(found, voted(weights, n), strict=True):
            torch.testing.assert_close(ours[head].double(), expected, atol=1e-5, rtol=1e-5)


def test_each_distance_has_a_sum_of_its_own() -> None:
    s, n = 6, 3
    rows = torch.zeros(1, n, s)
    for at, i in enumerate(range(s - n, s)):
        for j in range(i + 1):
            rows[0, at, j] = 10.0 ** (i - j)
    counts = [min(n, s - d) for d in range(s)]
    assert diagonal_sums(rows).tolist() == [[c * 10.0**d for d, c in enumerate(counts)]]


def test_shares_and_numbers_are_counted_and_the_forced_ones_are_the_least() -> None:
    assert pattern(7, 9).counts(100) == (7, 9)
    assert pattern(0.1, "1/5").counts(99) == (9, 19)
    assert pattern(0, 0).counts(100) == (3, 4)
    assert pattern(500, 600).counts(100) == (100, 100)
    assert not pattern(0.99, 99).keeps_all(100)
    assert pattern(3, 100).keeps_all(100) and pattern(100, 4).keeps_all(100)


@pytest.mark.parametrize(("n_vertical", "n_slash"), [(97, 4), (3, 97)])
def test_with_everything_kept_it_is_exact_attention(n_vertical: int, n_slash: int) -> None:
    q, k, v = draw(97, 6, 2)
    out, _, share, _ = pattern(n_vertical, n_slash, block=16).attend(q, k, v, Softmax(0.25))
    torch.testing.assert_close(out, causal(q, k, v, Softmax(0.25))[0], atol=1e-5, rtol=1e-5)
    assert share == 1.0


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that anything made."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.n = max(self.n, x.numel())
        return out


def test_no_tensor_grows_with_the_square_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_kept, "CHUNK_BYTES", 1 << 18)
    monkeypatch.setattr(vertical_slash, "CHUNK_BYTES", 1 << 18)
    sizes = []
    for s in (1024, 2048):
        q, k, v = draw(s, 2, 1)
        with Largest() as largest:
            pattern(20, 20).attend(q, k, v, Softmax(0.25))
        sizes.append(largest.n)
    assert sizes[1] <= 2.1 * sizes[0] < 2.1 * 1024 * 1024 / 16


@pytest.mark.parametrize("dense_last", [0, 13])
@pytest.mark.parametrize(("s", "h", "h_kv", "block"), SIZES)
def test_pairs_are_counted_without_making_them(s: int, h: int, h_kv: int, block: int, dense_last: int) -> None:
    q, k, _ = draw(s, h, h_kv)
    kept = pattern(block=block, dense_last=min(s, dense_last)).choose(q, k, Softmax(0.25), 0)
    assert n_pairs(kept).tolist() == kept.seen().sum((1, 2)).tolist()


# In the pass over a prompt.


def read(model: Any, rule: VerticalSlash | None, s: int = 90) -> Trace:
    with model.hooked():
        return prefill(model, prompt(s), [LastQueries(4), ColumnSums()], sparsity=rule)


def test_layers_with_a_sliding_window_stay_exact() -> None:
    model = tiny("gemma3")
    rough = read(model, pattern(4, 5))
    assert len(rough.shares) == 1


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_it_is_on_a_cpu() -> None:
    q, k, v = draw(300, 6, 2)
    rule = pattern(20, 30, block=16)
    here, _, share, _ = rule.attend(q, k, v, Softmax(0.25))
    there, _, again, _ = rule.attend(q.cuda(), k.cuda(), v.cuda(), Softmax(0.25))
    torch.testing.assert_close(there.cpu(), here, atol=1e-3, rtol=1e-3)
    assert again == share
