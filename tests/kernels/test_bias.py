"""Weighted tokens: a number per token that is added to its scaled logit, on every path against float64."""

from collections.abc import Callable
from dataclasses import fields, replace

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

H, H_KV, D = 6, 2, 20
SCALE = D**-0.5
GPU = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATHS = [
    "ref",
    pytest.param("native", marks=pytest.mark.skipif(native() is None, reason="no C++ compiler")),
    pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="triton is not installed")),
    "engine",
    "weights",
]


def parts_of(dtype: torch.dtype) -> tuple[Tensor, list[Tokens]]:
    """A query, tokens that nobody weighs, and weighted ones: by query heads, by KV heads, a whole stretch, in spans."""
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    def weights(*shape: int) -> Tensor:
        return 3 * torch.randn(*shape, generator=draw) - 2

    k, v, late = normal(1, H_KV, 300, D), normal(1, H_KV, 300, D), (normal(1, H_KV, 9, D), normal(1, H_KV, 9, D))
    own = torch.rand(1, H, 309, generator=draw).topk(270).indices
    own[0, 1, 3:9] = own[0, 5, -2:] = -1
    shared = torch.rand(1, H_KV, 300, generator=draw).topk(40).indices
    spans = Spans(torch.tensor([0, 31]), torch.tensor([31, 12]), 31)
    return normal(1, H, 1, D), [
        Tokens(k[:, :, :17], v[:, :, :17]),
        Tokens(k, v, own, late, bias=weights(1, H, 400)[..., :270]),
        Tokens(k, v, shared, bias=weights(1, H_KV, 40)),
        Tokens(k[:, :, 50:60], v[:, :, 50:60], bias=weights(1, H_KV, 10)),
        Tokens(normal(1, 1, 43, D), normal(1, 1, 43, D), spans=spans, bias=weights(1, H_KV, 31)),
    ]


def exact(q: Tensor, parts: list[Tokens]) -> Tensor:
    """Head by head and token by token in float64."""
    outs = []
    for head in range(H):
        logits, values = [], []
        for part in parts:
            k, v = (x.double() for x in part.gathered())
            owner, real, bias = head * k.shape[1] // H, part.is_real(), part.bias
            x = k[0, owner] @ q[0, head, 0].double() * SCALE
            if bias is not None:
                x = x + bias[0, head * bias.shape[1] // H].double()
            keep = torch.ones(len(x), dtype=torch.bool) if real is None else real[0, head * real.shape[1] // H]
            logits.append(x[keep])
            values.append(v[0, owner][keep])
        outs.append(torch.cat(logits).softmax(0) @ torch.cat(values))
    return torch.stack(outs).view(1, H, 1, D)


def moved(part: Tokens) -> Tokens:
    spans = part.spans and Spans(part.spans.starts.to(GPU), part.spans.counts.to(GPU), part.spans.longest)
    late = part.late and (part.late[0].to(GPU), part.late[1].to(GPU))
    own = {spec.name: getattr(part, spec.name) for spec in fields(part) if spec.init}
    rest = {name: x.to(GPU) for name, x in own.items() if isinstance(x, Tensor)}
    return replace(part, **rest, late=late, spans=spans)


def as_part(part: Tokens) -> Part:
    mask = None if part.idx is None else part.idx >= 0
    return Part(part.k, part.v, mask, None, part.idx, part.late, None, part.spans, part.bias)


RUNS: dict[str, Callable[[Tensor, list[Tokens]], Tensor]] = {
    "ref": lambda q, parts: attend_parts_ref(q, parts, SCALE)[0],
    "native": lambda q, parts: attend_parts_native(q, parts, SCALE)[0],
    "triton": lambda q, parts: attend_rows_triton(q.to(GPU), [[moved(part) for part in parts]], SCALE)[0].cpu(),
    "engine": lambda q, parts: attend(q, [as_part(part) for part in parts], Softmax(SCALE)),
    "weights": lambda q, parts: attend_weights(q, [as_part(part) for part in parts], Softmax(SCALE))[0],
}


@pytest.mark.parametrize("which", [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5), slice(0, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_weighted_tokens_count_as_often_as_they_weigh(path: str, dtype: torch.dtype, which: slice) -> None:
    """Error at most twice that of rounding the exact output, and that of values' products in the same dtype."""
    q, parts = parts_of(dtype)
    parts = parts[which]
    right, out = exact(q, parts), RUNS[path](q, parts)
    assert out.dtype == dtype
    assert (out - right).abs().max() <= 2 * torch.finfo(dtype).eps * right.abs().max() + 1e-6


@pytest.mark.parametrize("path", PATHS)
def test_a_token_of_weight_three_is_three_tokens(path: str) -> None:
    q, (whole, *_) = parts_of(torch.float32)
    thrice = Tokens(whole.k.repeat(1, 1, 3, 1), whole.v.repeat(1, 1, 3, 1))
    one = torch.randn(1, H_KV, 1, D, generator=torch.Generator().manual_seed(1))
    weighted = replace(whole, bias=torch.full((1, H_KV, 17), 3.0).log())
    run = RUNS[path]
    torch.testing.assert_close(run(q, [weighted, Tokens(one, one)]), run(q, [thrice, Tokens(one, one)]))
