"""Replay the authors' traces: a prompt, then one token after the other, and what the cache holds at each step.

Not here: any method.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.engine.observe import ColumnSums, LastQueries
from kvbench.engine.passes.trace import Trace
from kvbench.engine.step import cut
from kvbench.methods.decoding.cutting import CuttingMethod
from kvbench.methods.decoding.schedule import Schedule
from kvbench.tests.vectors import built, differs, first, request, step, trace_of


class OfEntries(Schedule):
    """The rule of VaSE and of Random Attention, which we have where the interval divides the budget."""

    def is_due(self, n: int, n_seen: int, s_prompt: int) -> bool:
        return n > self.target and n % self.interval == 0

    def room(self, s_prompt: int) -> int:
        return 1 << 10


def read_trace(q: Tensor, k: Tensor, v: Tensor, s: int, n_queries: int) -> Trace:
    """A trace of the first `s` tokens of (1, heads, T, d_h), with what decode-time methods observe."""
    trace = trace_of(k, v, q.shape[1], s)
    asked = [ColumnSums(), *([LastQueries(n_queries)] if n_queries else [])]
    for what in asked:
        trace.observe(0, what, q[:, :, :s], k[:, :, :s], trace.softmax[0])
    return trace


def start(
    kind: type[CuttingMethod], params: Any, q: Tensor, k: Tensor, v: Tensor, s: int, tokens: int,
    plan: Schedule | None = None, counts: str | None = None,
) -> Any:  # fmt: skip
    """The method on the first `s` tokens, built; `plan` replaces its schedule."""
    trace = read_trace(q, k, v, s, kind.n_queries(params))
    return on(trace, kind, params, tokens, k.shape[2] - s, plan, counts)


def on(
    trace: Trace, kind: type[CuttingMethod], params: Any, tokens: int, n_new: int = 0,
    plan: Schedule | None = None, counts: str | None = None,
) -> Any:  # fmt: skip
    """The method on a trace, built."""
    s = trace.s_prompt
    asked = replace(request(tokens=tokens), counts=counts)
    variant = kind.variant_for(params, asked, trace.shape, s)
    variant = variant if plan is None else replace(variant, plan=plan)
    return built(variant.row(trace, n_new))


def take(row: Any, p: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The step of the token at position `p`, cut included: (1, h, 1, d_h)."""
    out = step(row, q[:, :, p : p + 1], k[:, :, p : p + 1], v[:, :, p : p + 1], p + 1 - row.trace.s_prompt)
    cut(row)
    return out


def held(row: Any, layer: int = 0) -> np.ndarray:
    """Positions that the cache holds, slot by slot: (h_kv, n)."""
    return row.store[layer].positions()[0].numpy()


def replay(row: Any, x: dict[str, np.ndarray], in_order: bool = True) -> str | None:
    """Go through an authors' trace: lengths, cuts, what they leave, and outputs where there are any."""
    q, k, v = (torch.from_numpy(x[name]).unsqueeze(0) for name in ("q", "k", "v" if "v" in x else "k"))
    s, lengths, cuts, problem = row.trace.s_prompt, [held(row).shape[1]], [], None
    theirs = dict(zip(x["compress_pos"].tolist(), x["kept_pos"], strict=True))
    if s - 1 in theirs:
        cuts.append(s - 1)
        problem = same(f"kept at {s - 1}", held(row), theirs[s - 1], in_order)
    for p in range(s, k.shape[2]):
        out = take(row, p, q, k, v)
        lengths.append(held(row).shape[1])
        if row.store[0].evictions is not None:
            cuts.append(p)
            if p in theirs:
                problem = problem or same(f"kept at {p}", held(row), theirs[p], in_order)
        if "out" in x:
            problem = problem or differs(f"output at {p}", out[0, :, 0], x["out"][p - s], 1e-5)
    return first(
        differs("positions of cuts", cuts, x["compress_pos"]),
        differs("lengths", lengths, x["cache_len"]),
        problem,
        same("kept at the end", held(row), x["final_pos"], in_order) if "final_pos" in x else None,
    )


def same(name: str, ours: np.ndarray, theirs: np.ndarray, in_order: bool) -> str | None:
    """Whether two caches (h_kv, n) hold the same positions; theirs may be padded with -1."""
    for head, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        other = other[other >= 0]
        pair = (mine, other) if in_order else (np.sort(mine), np.sort(other))
        if problem := differs(f"{name}, head {head}", *pair):
            return problem
    return None
