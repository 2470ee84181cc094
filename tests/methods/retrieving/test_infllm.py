from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import resolve
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import BandLogits, BandSums
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import prefill
from kvbench.methods.base import reported
from kvbench.methods.full import Full
from kvbench.methods.retrieving.infllm import InfLLM, representatives
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.vectors import (
    Check,
    at,
    built,
    differs,
    first,
    load,
    request,
    row_for,
    row_of,
    step,
    trace_of,
)

PARAMS = InfLLM.Params(16, 4, "prob", "query_head", False, True, True, "fair")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "infllm").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """The harness's form in float64, and the authors' streaming runs from their scores on."""
    meta, x = load(path)
    check = check_harness if "token_score_f64" in x else check_streaming
    return [(path.stem, check(meta, x))]


def params_of(meta: dict[str, Any]) -> InfLLM.Params:
    return replace(
        PARAMS,
        block_len=meta["block_size"],
        n_sink=meta["n_init"],
        repr_score=meta.get("repr_score", "prob"),
        repr_granularity=meta.get("repr_granularity", "query_head"),
        per_head=meta.get("perhead", meta.get("per_head", False)),
        position=meta.get("position", True),
        grow_blocks=meta.get("grow_blocks", False),
    )


def layout_of(meta: dict[str, Any]) -> InfLLM.Plan:
    return InfLLM.Plan(meta["n_init"], meta["n_local"], meta["block_size"], meta["topk"], meta["repr_topk"])


def planned(layout: InfLLM.Plan, *kinds: type) -> type[InfLLM]:
    """The method with integers that a vector fixes."""

    def plan_for(cls: type, params: Any, budget: Any, shape: Any) -> InfLLM.Plan:
        return layout

    return type("Planned", (*kinds, InfLLM), {"plan_for": classmethod(plan_for)})


def watched(q: Tensor, k: Tensor, v: Tensor, s: int, *what: Any) -> Trace:
    """A trace of the first `s` tokens that was observed."""
    trace = trace_of(k, v, q.shape[1], s)
    for one in what:
        trace.observe(0, one, q[:, :, :s], k[:, :, :s], trace.softmax[0])
    return trace


def check_harness(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    s, layout, params = meta["T"], layout_of(meta), params_of(meta)
    q, k, v = (torch.from_numpy(x[name]) for name in ("q", "k", "v"))
    sums, logits = BandSums(layout.n_local), BandLogits(layout.n_local)
    trace = watched(q, k, v, s, sums, logits)
    counts = torch.arange(s - 1, -1, -1).clamp(1, layout.n_local)
    means = trace.observed(logits, 0)[0] / counts
    ratios = trace.observed(sums, 0)[0].numpy() / x["token_score_f64"]
    problem = first(
        differs("sums", ratios, np.ones_like(ratios), 1e-4),
        differs("mean logits", means, x["token_logit_mean_f64"], 1e-4) if "token_logit_mean_f64" in x else None,
    )
    n_new = max(64, meta["steps"])
    row = row_of(planned(layout), params, trace, request(tokens=1), n_new=n_new)
    scores = trace.observed(row.observations(params, layout)[0], 0)[0]
    heads = meta["Hkv"] if params.repr_granularity == "kv_head" else meta["Hq"]
    problem = problem or check_representatives(
        row, scores, x["repr_token"].reshape(heads, -1, layout.n_repr),
        x["block_repr_mean"].reshape(heads, -1, meta["D"]).swapaxes(0, 1),
    )  # fmt: skip
    for t in range(meta["steps"]):
        out = step(row, at(x["q"], s + t), at(x["k"], s + t), at(x["v"], s + t), t + 1)
        expected = np.broadcast_to(x["attended"][t], (meta["Hq"], x["attended"].shape[-1]))
        problem = problem or first(
            differs_blocks(row, t, x["decode_blocks"][t]),
            differs(f"attended at step {t}", row.store.attended(0), expected[:, : s + t + 1]),
            differs(f"output of step {t}", out[0, :, 0], x["decode_out_f64"][t], 1e-5),
        )
    return problem


def check_representatives(row: InfLLM, scores: Tensor, tokens: np.ndarray, means: np.ndarray) -> str | None:
    """Of the prompt's blocks: `tokens` (heads, n_blocks, n_repr), `means` (n_blocks, heads, d_h)."""
    plan, n_blocks = row.plan, row.n_blocks[0]
    middle = scores[:, plan.n_sink : plan.n_sink + n_blocks * plan.block_len]
    if row.params.repr_granularity == "kv_head":
        middle = middle.unflatten(0, (row.trace.shape.h_kv, -1)).sum(1)
    _, at = representatives(middle, row.trace.keys(0), 0, plan.block_len, plan.n_repr)
    return first(
        differs("representatives", at.sort(-1).values % plan.block_len, tokens[:, :n_blocks]),
        differs("means", row.index[0][:n_blocks], means[:n_blocks], 1e-5),
    )


def differs_blocks(row: InfLLM, t: int, expected: np.ndarray) -> str | None:
    """Fetched blocks against (units, k) or (k,), -1 where there is none."""
    plan, ours = row.plan, [[]]
    if row.store[0].fetches:
        idx = row.store[0].fetches[-1][0]
        units = len(idx) if len(idx) == row.trace.shape.h and row.params.per_head else 1
        blocks = (idx[:units] - plan.n_sink) // plan.block_len
        ours = [sorted(set(unit)) for unit in blocks.tolist()]
    theirs = [sorted(b for b in unit if b >= 0) for unit in np.atleast_2d(expected).tolist()]
    if len(ours) == 1:
        ours = ours * len(theirs)
    return None if ours == theirs else f"blocks of step {t}: {ours}, expected {theirs}"


def rotated(x: Tensor, by: int | Tensor, base: float) -> Tensor:
    """Tokens (n, heads, s, d_h) moved by so many positions, (n or 1, s) of them or one for all."""
    half = x.shape[-1] // 2
    where = torch.as_tensor(by).reshape(1, -1) if isinstance(by, int) else by
    angles = where.double().unsqueeze(-1) * base ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)  # (n or 1, 1, s, half)
    a, b = x.double().split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Replayed:
    """Blocks that form while decoding are scored as the authors' run scored them."""

    theirs: Tensor  # (n_blocks, h, block_len)
    own: dict[int, Tensor]

    def form_block(self: Any, layer: int) -> None:
        block, n = self.n_blocks[layer], self.plan.block_len
        if block < len(self.theirs):  # blocks past the run's last step are not recorded
            self.own[block] = self.scores[layer][:, :n].clone()
            self.scores[layer][:, :n] = self.theirs[block]
        return super().form_block(layer)  # type: ignore[misc]


def check_streaming(meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    """Everything behind the authors' approximate pass: scores to tokens, means, blocks, outputs of decode steps."""
    s, h, layout, base = meta["T"], meta["Hq"], layout_of(meta), meta["rope_base"]
    params = replace(params_of(meta), position="fixed", grow_blocks=True)
    where = torch.arange(x["q"].shape[2]).unsqueeze(0)
    q, k = (rotated(torch.from_numpy(x[name]), where, base) for name in ("q", "k"))
    v = torch.from_numpy(x["v"])
    theirs = torch.from_numpy(x["repr_score"]).reshape(-1, h, layout.block_len)
    n_blocks = layout.n_blocks(s)
    if n_blocks != meta["blocks_after_prefill"]:
        return f"{n_blocks} blocks after the prompt, expected {meta['blocks_after_prefill']}"
    trace = trace_of(k, v, h, s)
    trace.turn = {0: lambda x, by: rotated(x, by, base)}
    scores = torch.zeros(h, s)
    middle = slice(layout.n_sink, layout.n_sink + n_blocks * layout.block_len)
    scores[:, middle] = theirs[:n_blocks].transpose(0, 1).flatten(1)
    trace._observed[BandSums(layout.n_local), 0] = scores.unsqueeze(0)
    kind = planned(layout, Replayed)
    kind.theirs, kind.own = theirs, {}  # type: ignore[attr-defined]
    n_new = max(64, meta["steps"])
    row = row_of(kind, params, trace, request(tokens=1), n_new=n_new)
    means = x["block_repr_mean"].reshape(meta["units"], -1, h // meta["units"], meta["D"])
    means = means.swapaxes(0, 1).reshape(-1, h, meta["D"])
    tokens = np.sort(x["repr_token"].reshape(-1, h, layout.n_repr).swapaxes(0, 1), -1)
    problem = check_representatives(row, scores, tokens, means)
    for t in range(meta["steps"]):
        n = slice(s + t, s + t + 1)
        out = step(row, q[:, :, n], k[:, :, n], v[:, :, n], t + 1)
        problem = problem or first(
            differs_blocks(row, t, x["decode_blocks"][t]),
            differs(f"output of step {t}", out[0, :, 0], x["decode_out"][t], 1e-5),
        )
    for block, ours in kind.own.items():  # type: ignore[attr-defined]
        n_seen = max(0, s - layout.n_sink - block * layout.block_len)  # generated: scored by us alone
        problem = problem or differs(f"scores of block {block}", ours[:, n_seen:], theirs[block][:, n_seen:], 1e-5)
        mean = row.index[0][block]
        problem = problem or differs(f"mean of block {block}", mean, means[block], 1e-5)
    return problem


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_infllm_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def tokens(n: int, h: int = 4, h_kv: int = 2, d_h: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, d_h, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


def take(row: Any, t: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = row.trace.s_prompt + t
    return step(row, q[:, :, n : n + 1], k[:, :, n : n + 1], v[:, :, n : n + 1], t + 1)


def plain_run(
    q: Tensor, k: Tensor, v: Tensor, s: int, layout: InfLLM.Plan, params: InfLLM.Params
) -> list[tuple[Tensor, Tensor]]:
    """All steps anew from what was attended to, in float64 and by positions: attended (h, n) and output (h, d_h)."""
    h, n_all, c, z, a = q.shape[1], q.shape[2], layout.n_local, layout.block_len, layout.n_sink
    g = h // k.shape[1]
    q64 = q[0].double()
    k64, v64 = (x[0].double().repeat_interleave(g, 0) for x in (k, v))
    logits = q64 @ k64.mT * q.shape[-1] ** -0.5
    behind = torch.arange(n_all).unsqueeze(1) - torch.arange(n_all)  # (query, key)
    weights = torch.zeros_like(logits)
    weights[:, :s] = logits.masked_fill(behind < 0, -torch.inf).softmax(-1)[:, :s]
    means, steps = [], []
    for n in range(s, n_all):
        while len(means) < layout.n_blocks(n):
            start = a + len(means) * z
            if params.repr_score == "prob":
                near = (behind >= 0) & (behind < c)
                scores = (weights * near)[:, :n, start : start + z].sum(1)
            else:
                near = (behind >= 1) & (behind <= c)
                scores = (logits * near)[:, :n, start : start + z].sum(1)
            if params.repr_granularity == "kv_head":
                scores = scores.view(-1, g, z).sum(1).repeat_interleave(g, 0)
            best = start + scores.topk(layout.n_repr).indices  # (h, n_repr)
            means.append(torch.stack([k64[i, best[i]].mean(0) for i in range(h)]))
        found = torch.zeros(h, len(means), dtype=torch.float64)
        for block, mean in enumerate(means):
            found[:, block] = (q64[:, n] * mean).sum(-1)
        if not params.per_head:
            found = found.sum(0, keepdim=True).expand(h, -1)
        attended = torch.ones(h, n + 1, dtype=torch.bool)
        attended[:, a : a + len(means) * z] = False
        for head, blocks in enumerate(found.topk(min(layout.k, len(means))).indices.tolist()):
            for block in blocks:
                attended[head, a + block * z : a + (block + 1) * z] = True
        row = logits[:, n, : n + 1].masked_fill(~attended, -torch.inf).softmax(-1)
        weights[:, n, : n + 1] = row
        steps.append((attended, (row.unsqueeze(1) @ v64[:, : n + 1])[:, 0]))
    return steps


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("score", ["prob", "logit"])
@pytest.mark.parametrize("s", [100, 12])
def test_steps_and_blocks_formed_on_the_way_are_those_of_a_plain_run(
    s: int, score: str, per_head: bool, granularity: str
) -> None:
    q, k, v = tokens(s + 60, h=6, h_kv=2, seed=1)
    layout = InfLLM.Plan(4, 21, 8, 3, 2)
    params = replace(PARAMS, block_len=8, repr_score=score, per_head=per_head, repr_granularity=granularity)
    trace = watched(q, k, v, s, BandSums(21), BandLogits(21))
    row = row_of(planned(layout), params, trace, request(tokens=1))
    for t, (attended, expected) in enumerate(plain_run(q, k, v, s, layout, params)):
        out = take(row, t, q, k, v)
        assert torch.equal(row.store.attended(0), attended), t
        torch.testing.assert_close(out[0, :, 0], expected.float(), atol=1e-5, rtol=0)
        first_local = row.store[0].positions()[0, 0, 4].item()
        assert first_local == 4 + 8 * layout.n_blocks(s + t)
    assert row.n_blocks[0] == layout.n_blocks(s + 60) > layout.n_blocks(s) + 4
    entries = row.store.ledger.entries
    heads = 2 if granularity == "kv_head" else 6
    assert [e.resident_meta_bytes for e in entries] == [layout.n_blocks(s + t) * heads * 16 * 2 for t in range(60)]
    assert {e.moved_meta_bytes for e in entries} == {0}
    released = (row.n_blocks[0] - layout.n_blocks(s)) * 8  # tokens
    assert sum(e.released_bytes for e in entries) == released * 2 * 16 * 2 * 2


def test_at_one_distance_a_prompt_that_is_all_local_is_full_until_its_first_far_token() -> None:
    q, k, v = tokens(60)
    trace = watched(q, k, v, 12, BandSums(21))
    trace.turn = {0: lambda x, by: rotated(x, by, 10_000.0)}
    row = row_of(planned(InfLLM.Plan(4, 21, 8, 3, 2)), replace(PARAMS, block_len=8, position="fixed"),
                 trace, request(tokens=1))  # fmt: skip
    full = row_of(Full, Full.Params(), trace_of(k, v, 4, 12), request(ratio="1"))
    apart = [(take(row, t, q, k, v) - take(full, t, q, k, v)).abs().max() for t in range(40)]
    assert max(apart[:9]) < 1e-5 < min(apart[9:])
    assert row.n_blocks[0] == 3


def test_without_growing_nothing_generated_leaves() -> None:
    q, k, v = tokens(160)
    layout = InfLLM.Plan(4, 21, 8, 3, 2)
    trace = watched(q, k, v, 100, BandSums(21))
    params = replace(PARAMS, block_len=8, grow_blocks=False)
    row = row_of(planned(layout), params, trace, request(tokens=1))
    assert not row.wants_weights
    for t in range(60):
        take(row, t, q, k, v)
        assert row.store.attended(0)[:, 4 + 8 * layout.n_blocks(100) :].all()
    attended = [e.attended // 4 for e in row.store.ledger.entries]
    assert attended == list(range(attended[0], attended[0] + 60))


@pytest.mark.parametrize(("n_new", "wants"), [(1, False), (5, False), (6, True)])
def test_weights_are_asked_for_only_where_a_block_can_form_in_time(n_new: int, wants: bool) -> None:
    # 100 - 4 - 21 = 9 * 8 + 3 tokens: the 10th block is there for the query behind 105 tokens.
    q, k, v = tokens(100)
    trace = watched(q, k, v, 100, BandSums(21), BandLogits(21))
    kind, params = planned(InfLLM.Plan(4, 21, 8, 3, 2)), replace(PARAMS, block_len=8)
    assert row_of(kind, params, trace, request(tokens=1), n_new=n_new).wants_weights == wants
    logit = replace(params, repr_score="logit")
    assert not row_of(kind, logit, trace, request(tokens=1), n_new=n_new).wants_weights


@pytest.mark.parametrize(
    ("changed", "n_new", "repeats", "is_stored"),
    [
        ({}, 5, True, True),
        ({}, 6, True, True),
        ({"repr_score": "logit"}, 6, False, False),
        ({"position": "fixed"}, 5, False, False),
    ],
    ids=["true positions", "a block from weights", "a block from logits", "one distance"],
)
def test_steps_repeat_but_for_turned_tokens_and_blocks_from_logits(
    changed: dict[str, Any], n_new: int, repeats: bool, is_stored: bool
) -> None:
    q, k, v = tokens(100)
    trace = watched(q, k, v, 100, BandSums(21), BandLogits(21))
    trace.turn = {0: lambda x, by: rotated(x, by, 10_000.0)}
    params = replace(PARAMS, block_len=8, **changed)
    row = row_of(planned(InfLLM.Plan(4, 21, 8, 3, 2)), params, trace, request(tokens=1), n_new=n_new)
    assert (row.repeats, row.is_stored) == (repeats, is_stored)


def test_of_equal_scores_the_earlier_token_and_block_are_chosen() -> None:
    q, k, v = tokens(101)
    _, positions = representatives(torch.zeros(4, 72), k, 4, 8, 2)
    firsts = [[4 + 8 * block, 5 + 8 * block] for block in range(9)]
    assert positions.sort(-1).values.tolist() == [firsts] * 4
    for per_head in (False, True):
        params = replace(PARAMS, block_len=8, per_head=per_head)
        trace = watched(q, k, v, 100, BandSums(21))
        row = row_of(planned(InfLLM.Plan(4, 21, 8, 3, 2)), params, trace, request(tokens=1))
        take(row, 0, torch.zeros_like(q), k, v)
        attended = row.store.attended(0)
        assert attended[:, :28].all()
        assert not attended[:, 28:76].any()


@pytest.mark.parametrize("grow", [True, False])
def test_with_all_blocks_it_is_full_attention(grow: bool) -> None:
    q, k, v = tokens(130)
    params = replace(PARAMS, block_len=8, grow_blocks=grow)
    trace = watched(q, k, v, 100, BandSums(21))
    row = row_of(planned(InfLLM.Plan(4, 21, 8, 13, 2)), params, trace, request(tokens=1))
    full = row_of(Full, Full.Params(), trace_of(k, v, 4, 100), request(ratio="1"))
    for t in range(30):
        torch.testing.assert_close(take(row, t, q, k, v), take(full, t, q, k, v), atol=1e-6, rtol=1e-5)
        assert row.store.attended(0).all()


@pytest.mark.parametrize("position", [True, "fixed"])
def test_the_whole_budget_observes_nothing_and_keeps_all(position: bool | str) -> None:
    q, k, v = tokens(60)
    params = replace(PARAMS, position=position)
    trace = trace_of(k, v, 4, 50)
    row = row_of(InfLLM, params, trace, request(ratio="1"))
    assert InfLLM.observations(params, row.plan) == ()
    for t in range(10):
        take(row, t, q, k, v)
        assert row.store.attended(0).all()
    assert reported(row) == {}


SHAPE = trace_of(*tokens(4)[1:], 4).shape


def fitted(params: InfLLM.Params, s: int, ratio: str, comm: str) -> tuple[Any, str]:
    """The plan at this ratio, or at the one that the error names."""
    budget = resolve(request(ratio=ratio, comm=comm), s, False)
    try:
        return InfLLM.plan_for(params, budget, SHAPE), ratio
    except ConfigError as error:
        smallest = str(error).partition("ratio=")[2].partition(" ")[0]
        tokens_needed = int(str(error).partition("budget=")[2].partition(")")[0])
        assert Fraction(smallest) > Fraction(ratio)
        assert resolve(request(ratio=smallest, comm=comm), s, False).tokens == tokens_needed
        below = resolve(request(tokens=tokens_needed - 1, comm=comm), s, False)
        with pytest.raises(ConfigError, match="has no room for a block"):
            InfLLM.plan_for(params, below, SHAPE)
        return fitted(params, s, smallest, comm)


@pytest.mark.parametrize("block_len", [128, 64, 32])
@pytest.mark.parametrize("comm", ["1/128", "1/64", "1/16"])
@pytest.mark.parametrize("ratio", ["0.05", "0.1", "0.2", "0.5"])
@pytest.mark.parametrize("s", [2000, 3001, 4096])
def test_every_budget_is_met_or_refused_with_one_that_is(s: int, ratio: str, comm: str, block_len: int) -> None:
    params = replace(PARAMS, block_len=block_len)
    if Fraction(comm) * block_len < 1:
        with pytest.raises(ConfigError, match=f"use comm=1/{block_len} or more"):
            InfLLM.check(params, request(ratio=ratio, comm=comm), SHAPE)
        with pytest.raises(ConfigError, match=f"use comm=1/{block_len} or more"):
            InfLLM.plan_for(params, resolve(request(ratio=ratio, comm=comm), s, False), SHAPE)
        return
    InfLLM.check(params, request(ratio=ratio, comm=comm), SHAPE)
    plan, ratio = fitted(params, s, ratio, comm)
    assert plan.n_repr == int(Fraction(comm) * block_len)
    q, k, v = tokens(s + 3, 2, 1, 4)
    trace = watched(q, k, v, s, *InfLLM.observations(params, plan))
    row = row_of(InfLLM, params, trace, request(ratio=ratio, comm=comm))
    for t in range(3):
        take(row, t, q, k, v)
    entry = row.store.ledger.entries[0]
    n_left_out = -((row.budget.tokens - s) // block_len)
    assert entry.attended == 2 * (s - n_left_out * block_len + 1)
    assert row.budget.tokens - block_len < entry.attended // 2 - 1 <= row.budget.tokens
    assert row.store.ledger.within(row.budget, trace.shape)
    assert entry.moved_kv_bytes == plan.k * block_len * 4 * 2 * 2
    report = row.report()
    assert report["repr_bytes"] == entry.resident_meta_bytes == report["n_blocks"] * 2 * 4 * 2
    assert report["repr_nominal_bytes"] <= Fraction(comm) * s * 4 * 2


def test_the_page_of_integers() -> None:
    budget = resolve(request(ratio="0.1", comm="1/128"), 4096, False)
    plan = InfLLM.plan_for(replace(PARAMS, block_len=128), budget, SHAPE)
    assert plan == InfLLM.Plan(4, 202, 128, 1, 1)
    assert plan.n_blocks(4096) == 30


def test_fewer_tokens_are_local_where_half_the_budget_leaves_no_block() -> None:
    # 8 blocks of 16 and 2 tokens cannot be attended to, a 9th block must: 200 - 4 - 9 * 16 = 52 > 34 are left.
    budget = resolve(request(tokens=26, comm="1/16"), 200, False)
    plan = InfLLM.plan_for(PARAMS, budget, SHAPE)
    assert plan == InfLLM.Plan(4, 4, 16, 1, 1)
    assert plan.n_blocks(200) == 12 == -((26 - 200) // 16) + 1


def test_prompts_without_two_blocks_are_refused_whatever_the_budget() -> None:
    budget = resolve(request(ratio="0.9", comm="1/16"), 200, False)
    with pytest.raises(ConfigError, match=r"use a smaller method.block_len or ratio=1"):
        InfLLM.plan_for(replace(PARAMS, block_len=128), budget, SHAPE)


def test_the_official_rule_rounds_blocks_up_and_has_sinks_on_top() -> None:
    params = replace(PARAMS, block_len=128, n_sink=32, budget_rule="official")
    budget = resolve(request(ratio="1/5", comm="1/128"), 10_000, False)
    assert InfLLM.plan_for(params, budget, SHAPE) == InfLLM.Plan(32, 996, 128, 8, 1)


@pytest.mark.parametrize("per_head", [False, True])
def test_blocks_on_the_device_are_not_moved_again(per_head: bool) -> None:
    q, k, v = tokens(110)
    cache = BlockCacheSpec(13 * 8, 8, 13, "lru")
    params = replace(PARAMS, block_len=8, per_head=per_head)
    trace = watched(q, k, v, 100, BandSums(21))
    row = row_of(planned(InfLLM.Plan(4, 21, 8, 3, 2)), params, trace, request(tokens=1), cache=cache)
    held: set[int] = set()
    for t in range(10):
        take(row, t, q, k, v)
        entry = row.store.ledger.entries[-1]
        asked = {(i - 4) // 8 for i in row.store[0].fetches[-1].flatten().tolist()}
        if not per_head:
            assert entry.moved_kv_bytes == len(asked - held) * 8 * 2 * 2 * 16 * 2
        held |= asked
    assert sum(e.cache_hits for e in row.store.ledger.entries) > 0


def test_fixed_positions_need_a_rotary_model() -> None:
    params = replace(PARAMS, position="fixed")
    with pytest.raises(ConfigError, match="rotary"):
        InfLLM.check_model(params, tiny("opt").checkpoint)
    InfLLM.check_model(params, tiny().checkpoint)
    InfLLM.check_model(PARAMS, tiny("opt").checkpoint)


@pytest.mark.parametrize("kind", ["llama", "llama-yarn", "glm"])
def test_keys_turned_back_by_their_own_positions_forget_them(kind: str) -> None:
    """In the first layer a key follows from its token and its position alone."""
    model, ids = tiny(kind), prompt(20) * 3
    with model.hooked():
        trace = prefill(model, ids)
    assert trace.turn is not None
    keys = trace.turn[0](trace.keys(0), -torch.arange(60).unsqueeze(0))
    torch.testing.assert_close(keys[:, :, :20], keys[:, :, 40:], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(trace.keys(0)[:, :, :20], trace.keys(0)[:, :, 40:], atol=1e-2)
    one = trace.turn[0](trace.keys(0)[:, :, 7:8], -7)
    torch.testing.assert_close(keys[:, :, 7:8], one, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("position", [True, "fixed"])
def test_variants_with_other_windows_share_a_prefill(position: bool | str) -> None:
    """Each says what it says alone; the pass that keeps its log-sum-exps is the same pass, bit for bit."""
    model, ids = tiny("llama"), prompt(300)
    params = replace(PARAMS, block_len=8, position=position)
    asks = [request(ratio=ratio, comm="1/8") for ratio in ("0.1", "0.3")]
    plans = [InfLLM.plan_for(params, resolve(ask, 300, False), model.shape) for ask in asks]
    wanted = [InfLLM.observations(params, plan) for plan in plans]
    assert wanted[0] != wanted[1]

    def say(observations: Any, *which: Any) -> list[list[int]]:
        with model.hooked():
            trace = prefill(model, ids, observations)
            rows = [built(row_for(InfLLM, params, ask, trace, 40)) for ask in which]
            return [a.ids for a in decode(model, trace, rows, max_new_tokens=40).answers]

    alone = [say(w, ask)[0] for w, ask in zip(wanted, asks, strict=True)]
    assert say([*wanted[0], *wanted[1]], *asks) == alone
    with model.hooked():
        plain, kept = prefill(model, ids), prefill(model, ids, wanted[0])
    assert torch.equal(plain.keys(2), kept.keys(2))
