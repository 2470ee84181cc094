"""Attention where KV heads have different numbers of tokens, against float64 head by head."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbench.engine.attend import Part, attend, attend_weights
from kvbench.engine.softmax import Softmax
from kvbench.kernels.jit import triton
from kvbench.kernels.select_attend import (
    Spans,
    Tokens,
    attend_parts_native,
    attend_parts_ref,
    attend_rows_triton,
    native,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GPU = "cuda" if torch.cuda.is_available() else "cpu"
# counts of the KV heads, query heads of each, d_h
CASES = [((5, 0, 700), 3, 64), ((1,), 4, 7), ((300, 256, 257, 1), 1, 20), ((0, 3), 2, 128), ((40, 40), 2, 16)]


def problem(counts: tuple[int, ...], g: int, d_h: int, dtype: torch.dtype, window: int) -> tuple[Tensor, list[Tokens]]:
    """A query, heads behind each other with some rows between them that nobody has, and a window with spans of it."""
    draws = torch.Generator().manual_seed(sum(counts) + window)

    def rows(heads: int, n: int) -> tuple[Tensor, Tensor]:
        k, v = (torch.randn(1, heads, n, d_h, generator=draws).to(dtype) for _ in "kv")
        return k, v

    gaps = [2 * head + 1 for head in range(len(counts))]
    starts = [sum(counts[:head]) + sum(gaps[: head + 1]) for head in range(len(counts))]
    flat = Spans(torch.tensor(starts), torch.tensor(counts), max(counts))
    first = torch.arange(len(counts)) % window
    behind = Spans(first, window - first, window)
    q = torch.randn(1, g * len(counts), 1, d_h, generator=draws).to(dtype)
    return q, [Tokens(*rows(1, sum(counts) + sum(gaps)), spans=flat), Tokens(*rows(len(counts), window), spans=behind)]


def exact(q: Tensor, parts: list[Tokens], scale: float, g: int) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for head in range(q.shape[1]):
        keys, values = [], []
        for part in parts:
            assert part.spans is not None
            owner, (starts, counts, *_) = head // g, part.spans
            at = slice(int(starts[owner]), int(starts[owner] + counts[owner]))
            of = owner if part.k.shape[1] > 1 else 0
            keys.append(part.k[0, of, at].double())
            values.append(part.v[0, of, at].double())
        logits = torch.cat(keys) @ q[0, head, 0].double() * scale
        outs.append(logits.softmax(0) @ torch.cat(values))
        lses.append(logits.logsumexp(0))
    return torch.stack(outs).view(q.shape), torch.stack(lses).view(1, -1, 1)


def allowed(q: Tensor, parts: list[Tokens], scale: float, right: Tensor) -> float:
    """Twice the error of plain torch in the same dtype, plus a floor."""
    return float(2 * (attend_parts_ref(q, parts, scale)[0] - right).abs().max() + 4e-7)


@pytest.mark.skipif(native() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpp_and_reference_agree_with_float64(case: tuple[tuple[int, ...], int, int], dtype: torch.dtype) -> None:
    counts, g, d_h = case
    for window in (1, 9):
        q, parts = problem(counts, g, d_h, dtype, window)
        right, right_lse = exact(q, parts, 0.3, g)
        for run in (attend_parts_native, attend_parts_ref):
            out, lse = run(q, parts, 0.3)
            assert (out - right).abs().max() <= allowed(q, parts, 0.3, right), run
            torch.testing.assert_close(lse.double(), right_lse, rtol=1e-6, atol=4e-6 if dtype is DTYPES[0] else 1e-5)


@pytest.mark.skipif(native() is None, reason="no C++ compiler")
def test_cpp_gives_the_same_bits_whatever_the_longest_head() -> None:
    """Places for chunks that a head does not fill change nothing."""
    q, parts = problem((300, 12), 2, 16, torch.float32, 3)
    spans = parts[0].spans
    assert spans is not None
    wider = [replace(parts[0], spans=spans._replace(longest=5000)), parts[1]]
    assert torch.equal(attend_parts_native(q, parts, 0.3)[0], attend_parts_native(q, wider, 0.3)[0])


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_launch_attends_for_ragged_rows_beside_others(dtype: torch.dtype) -> None:
    q, parts = problem((90, 0, 301), 2, 16, dtype, 4)
    plain = [Tokens(torch.randn(1, 3, 20, 16).to(dtype), torch.randn(1, 3, 20, 16).to(dtype))]
    rows = [
        [
            Tokens(
                part.k.to(GPU),
                part.v.to(GPU),
                spans=part.spans and Spans(part.spans.starts.to(GPU), part.spans.counts.to(GPU), part.spans.longest),
            )
            for part in row
        ]
        for row in (parts, plain)
    ]
    both = torch.cat([q, q]).to(GPU)
    out, lse = attend_rows_triton(both, rows, 0.3)
    right, right_lse = exact(q, parts, 0.3, 2)
    assert (out[:1].cpu() - right).abs().max() <= allowed(q, parts, 0.3, right)
    torch.testing.assert_close(lse[:1].cpu().double(), right_lse, rtol=1e-6, atol=1e-5)
    expected, _ = attend_parts_ref(q.float(), [Tokens(plain[0].k.float(), plain[0].v.float())], 0.3)
    torch.testing.assert_close(out[1:].cpu().float(), expected, rtol=2e-2, atol=2e-2 if dtype != DTYPES[0] else 1e-6)


def test_parts_with_spans_are_attended_to_like_their_copies() -> None:
    q, tokens = problem((50, 7), 3, 16, torch.float32, 5)
    parts = [Part(each.k, each.v, spans=each.spans) for each in tokens]
    right, _ = exact(q, tokens, 0.3, 3)
    torch.testing.assert_close(attend(q, parts, Softmax(0.3)).double(), right, rtol=0, atol=1e-6)
    out, weights = attend_weights(q, parts, Softmax(0.3))
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-6)
    hidden = torch.cat([~each.is_real() for each in tokens if each.is_real() is not None], -1)  # type: ignore[operator]
    assert (weights[hidden.repeat_interleave(3, 1)] == 0).all()


@pytest.mark.skipif(native() is None, reason="no C++ compiler")
def test_a_copy_is_read_where_its_own_numbers_lie() -> None:
    """Tokens that were attended to remember where they lie; a copy, as of a row that is forked, lies elsewhere."""
    q, parts = problem((5, 0, 700), 3, 64, torch.float32, 2)
    attend_parts_native(q, parts, 0.1)
    copies = deepcopy(parts)
    for part in copies:
        part.v.zero_()
    assert not attend_parts_native(q, copies, 0.1)[0].any()
    assert attend_parts_native(q, parts, 0.1)[0].any()
