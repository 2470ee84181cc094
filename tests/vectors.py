"""Run reference vectors through the code that runs use: a trace made of arrays, steps through
`kvbench.engine.step`."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.passes.trace import Trace
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import attend_group
from kvbench.methods.base import SelectiveAttention

Check = tuple[str, str | None]  # a case's name, and what differs (None: nothing)


def load(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A vector file's parameters and arrays."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return json.loads(str(arrays.pop("meta"))), arrays


def trace_of(k: Tensor, v: Tensor, h: int, s_prompt: int | None = None) -> Trace:
    """A one-layer trace of the first `s_prompt` tokens of k and v, (1, h_kv, s, d_h)."""
    s_prompt = k.shape[2] if s_prompt is None else s_prompt
    shape = ModelShape("vectors", 1, h, k.shape[1], k.shape[3], 1 << 20, (0,))
    trace = Trace(shape, s_prompt, k.device)
    trace.add(0, k[:, :, :s_prompt], v[:, :, :s_prompt], Softmax(k.shape[3] ** -0.5))
    return trace


def request(
    ratio: str | None = None, tokens: int | None = None, comm: str = "0", compensate: bool = True
) -> BudgetRequest:
    return BudgetRequest(None if ratio is None else Fraction(ratio), tokens, Fraction(comm), compensate)


def row_of(
    kind: type[SelectiveAttention], params: Any, trace: Trace, budget: BudgetRequest, plan: Any = None,
    n_new: int = 64, cache: BlockCacheSpec | None = None,
) -> Any:  # fmt: skip
    """One variant, built; `plan` replaces the method's own integers where a vector fixes them."""
    variant = kind.variant_for(params, budget, trace.shape, trace.s_prompt, cache)
    if plan is not None:
        variant = replace(variant, plan=plan)
    return built(variant.row(trace, n_new))


def row_for(kind: type[SelectiveAttention], params: Any, budget: BudgetRequest, trace: Trace, n_new: int) -> Any:
    """One variant on a trace, not built yet."""
    return kind.variant_for(params, budget, trace.shape, trace.s_prompt).row(trace, n_new)


def built(row: SelectiveAttention) -> Any:
    """The variant, after it took over all layers of its trace."""
    for layer in row.trace.shape.attention_layers:
        row.build(layer)
    row.complete()
    return row


def step(row: SelectiveAttention, q: Tensor, k: Tensor, v: Tensor, t: int = 1, layer: int = 0) -> Tensor:
    """One decode step of one layer, (1, h, 1, d_h)."""
    return attend_group(type(row), [row], layer, q, k, v, row.trace.softmax[layer])[0]


def at(x: np.ndarray, position: int) -> Tensor:
    """The token at `position` of an array (1, heads, s, d_h)."""
    return torch.from_numpy(x[:, :, position : position + 1])


def differs(name: str, ours: Any, theirs: Any, atol: float = 0.0) -> str | None:
    """One line on how far two arrays are apart, None where they agree."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if ours.shape != theirs.shape:
        return f"{name}: shape {ours.shape}, expected {theirs.shape}"
    if atol == 0.0:
        wrong = int((ours != theirs).sum())
        return f"{name}: {wrong} of {theirs.size} differ" if wrong else None
    worst = float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max(initial=0.0))
    return None if worst <= atol else f"{name}: off by {worst:.2e}, allowed {atol:.0e}"


def first(*problems: str | None) -> str | None:
    """The first problem, None where there is none."""
    return next((problem for problem in problems if problem is not None), None)
