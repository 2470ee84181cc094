import json
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import resolve
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.declared import hints_of
from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.engine.search import Units, best_tokens
from kvbench.engine.shapes import ModelShape
from kvbench.engine.softmax import Softmax
from kvbench.engine.step import attend_group
from kvbench.methods.base import SelectiveAttention, reported
from kvbench.methods.full import Full
from kvbench.methods.indexed import merged
from kvbench.methods.retrieving.quest import (
    Bounds,
    Quest,
    matched_page_len,
)
from kvbench.tests.vectors import Check, built, differs, first, request, row_for, row_of, step, trace_of

PARAMS = Quest.Params("matched", 16, "harness", False, "query_head", 0)
NATIVE = replace(PARAMS, comm_mode="native")
PAGED = replace(NATIVE, page_generated=True)
AGGREGATES: tuple[Any, ...] = get_args(hints_of(Quest.Params)["agg"])
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "quest").glob("*.npz"))


# --- Reference vectors ------------------------------------------------------------------------


def run_vectors(path: Path) -> list[Check]:
    """Authors' accuracy code, and a reference of their serving code: scores, bounds, pages, tokens, attention."""
    with np.load(path) as file:
        x = {name: file[name] for name in file.files}
    meta = json.loads(str(x.pop("meta"))) if "meta" in x else {}
    meta |= {name: value.item() for name, value in x.items() if value.ndim == 0}
    return [(path.stem, check_step(path.stem.partition("_")[0], meta, x))]


def check_step(variant: str, meta: dict[str, Any], x: dict[str, np.ndarray]) -> str | None:
    q, k, v = (torch.from_numpy(x[name]) for name in ("q", "k", "v"))
    (h, d_h), n, page_len = q.shape, k.shape[1], meta["page_size"]
    q, k, v = q.view(1, h, 1, d_h), k.unsqueeze(0), v.unsqueeze(0)
    params = replace(PAGED, page_len=page_len, variant=variant, agg=meta.get("agg", "query_head"))
    plan = Quest.Plan(page_len, meta["budget"])
    # A budget of the whole prompt would leave everything where it is; theirs still counts pages.
    row = row_of(Quest, params, trace_of(k, v, h, n - 1), request(tokens=1, comm="1"), plan)
    out = step(row, q, k[:, :, n - 1 :], v[:, :, n - 1 :])
    n_pages, bounds = ceil(n / page_len), row.index[0]
    scores = row.score(0, q, bounds.first(n_pages))[0].reshape(h, n_pages)
    attended = row.store.attended(0)
    pages = torch.nn.functional.pad(attended, (0, n_pages * page_len - n)).view(h, n_pages, -1).any(-1)
    problem = first(
        differs("page scores", scores, x["page_scores"], 1e-4),
        differs("attended", attended, x["token_mask"]),
        differs("output", out[0, :, 0], x["attn_out"], 1e-5),
    )
    if "num_pages_selected" in x:
        problem = problem or differs("pages", pages.sum(-1), x["num_pages_selected"])
    if "selected_pages" in x:
        chosen = pages.nonzero()[:, 1].view(h, -1)
        problem = problem or differs("pages", chosen, x["selected_pages"])
    for name, ours in (("page_min", bounds.kmin), ("page_max", bounds.kmax)):
        if name in x:
            problem = problem or differs(name, ours[0, :, :n_pages], x[name])
    return problem


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_quest_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def test_reference_vectors_are_here() -> None:
    assert {path.stem.partition("_")[0] for path in GOLDEN} == {"eval", "serving"}


# --- Against the definition -------------------------------------------------------------------


def random_tokens(h: int, h_kv: int, n: int, d_h: int = 16, seed: int = 0) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, heads, n, d_h, generator=draw) for heads in (h, h_kv, h_kv))


def run(row: Any, q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
    """Output and attended tokens of every step."""
    steps = []
    for t in range(start, stop):
        tq, tk, tv = (x[:, :, t : t + 1] for x in (q, k, v))
        out = step(row, tq, tk, tv, t - start + 1)
        steps.append((out, row.store.attended(0)))
    return steps


def by_definition(q: Tensor, k: Tensor, s: int, tokens: int, params: Quest.Params) -> Tensor:  # (h, n) bool
    """The tokens that each query head attends to, a page at a time in float64."""
    q, k = q[0, :, 0].double(), k[0].double()
    h, (h_kv, n, _), p = len(q), k.shape, params.page_len
    paged = n if params.page_generated else s
    pages = [range(start, min(start + p, paged)) for start in range(0, paged, p)]
    scores = torch.zeros(h, len(pages)).double()
    for head in range(h):
        for j, page in enumerate(pages):
            keys = k[head * h_kv // h, page.start : page.stop]
            corner = torch.maximum(q[head] * keys.amin(0), q[head] * keys.amax(0))
            scores[head, j] = corner.sum()
    shared = scores.view(h_kv, -1, len(pages))
    if params.agg != "query_head":
        shared = shared.mean(1) if params.agg == "group_mean" else shared.amax(1)
        scores = shared.repeat_interleave(h // h_kv, 0)
    k_pages = max(3 if params.variant == "eval" else 1, tokens // p)
    if params.page_generated and params.variant != "eval":
        scores[:, -1] = torch.inf
    attended = torch.zeros(h, n, dtype=torch.bool)
    for head in range(h):
        for j in scores[head].argsort(descending=True, stable=True)[:k_pages].tolist():
            attended[head, pages[j].start : pages[j].stop] = True
    attended[:, paged:] = True
    return attended


def exact(q: Tensor, k: Tensor, v: Tensor, attended: Tensor) -> Tensor:
    """Attention over the marked tokens (h, n): (h, d_h)."""
    g = q.shape[1] // k.shape[1]
    keys, values = (x[0].double().repeat_interleave(g, 0) for x in (k, v))
    logits = (keys @ q[0, :, 0].double().unsqueeze(-1)).squeeze(-1) * q.shape[-1] ** -0.5
    return (logits.masked_fill(~attended, -torch.inf).softmax(-1).unsqueeze(1) @ values)[:, 0]


@pytest.mark.parametrize("agg", AGGREGATES)
@pytest.mark.parametrize("page_generated", [False, True])
@pytest.mark.parametrize("variant", ["harness", "eval", "serving"])
@pytest.mark.parametrize("s", [60, 64, 71])
def test_every_step_is_the_definition(s: int, variant: str, page_generated: bool, agg: str) -> None:
    q, k, v = random_tokens(6, 2, s + 20)
    params = replace(NATIVE, page_len=8, variant=variant, page_generated=page_generated, agg=agg)
    for tokens in (8, 19, 40):
        row = row_of(Quest, params, trace_of(k, v, 6, s), request(tokens=tokens, comm="1"))
        for t, (out, attended) in enumerate(run(row, q, k, v, s, s + 20)):
            n = s + t + 1
            now = q[:, :, n - 1 : n]
            expected = by_definition(now, k[:, :, :n], s, tokens, params)
            assert torch.equal(attended, expected), (tokens, t)
            assert row.store.ledger.entries[t].attended == attended.sum()
            torch.testing.assert_close(
                out[0, :, 0].double(), exact(now, k[:, :, :n], v[:, :, :n], attended),
                atol=1e-5, rtol=0,
            )  # fmt: skip


@pytest.mark.parametrize("variant", ["harness", "serving"])
@pytest.mark.parametrize("page_generated", [False, True])
def test_with_all_pages_it_is_full_attention(page_generated: bool, variant: str) -> None:
    q, k, v = random_tokens(6, 2, 75)
    params = replace(NATIVE, page_len=8, variant=variant, page_generated=page_generated)
    asked = request(tokens=20, comm="1")
    row = row_of(Quest, params, trace_of(k, v, 6, 63), asked, Quest.Plan(8, 80))
    full = built(row_for(Full, Full.Params(), request("1"), trace_of(k, v, 6, 63), 64))
    for (out, attended), (expected, _) in zip(run(row, q, k, v, 63, 75), run(full, q, k, v, 63, 75), strict=True):
        assert attended.all()
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)


def test_the_accuracy_code_has_a_page_too_few_while_the_last_one_is_short() -> None:
    q, k, v = random_tokens(6, 2, 75)
    params = replace(PAGED, page_len=8, variant="eval")
    asked = request(tokens=20, comm="1")
    row = row_of(Quest, params, trace_of(k, v, 6, 63), asked, Quest.Plan(8, 80))
    for t, (_, attended) in enumerate(run(row, q, k, v, 63, 75)):
        assert attended.all() == ((64 + t) % 8 == 0)


def test_the_whole_budget_is_full_attention_though_it_is_no_multiple_of_a_page() -> None:
    q, k, v = random_tokens(6, 2, 75)
    for params in (PARAMS, NATIVE, PAGED, replace(PAGED, variant="eval")):
        row = row_of(Quest, params, trace_of(k, v, 6, 63), request("1", comm="0"))
        full = built(row_for(Full, Full.Params(), request("1"), trace_of(k, v, 6, 63), 64))
        for (out, _), (expected, _) in zip(run(row, q, k, v, 63, 75), run(full, q, k, v, 63, 75), strict=True):
            assert torch.equal(out, expected)
        assert reported(row) == {}


@pytest.mark.parametrize("seed", range(3))
def test_a_score_bounds_every_logit_of_its_page(seed: int) -> None:
    q, k, v = random_tokens(6, 2, 50, seed=seed)
    trace = trace_of(k, v, 6)
    row = row_of(Quest, replace(NATIVE, page_len=8), trace, request(tokens=16, comm="1"))
    scores = row.score(0, q[:, :, :1], row.seen(0))[0].flatten(0, 1)  # (h, n_pages)
    logits = (k[0].repeat_interleave(3, 0) @ q[0, :, :1].mT).squeeze(-1)  # (h, s), unscaled
    best = torch.nn.functional.pad(logits, (0, 6), value=-torch.inf).view(6, 7, 8).amax(-1)
    assert (scores >= best - 1e-5).all()


def test_padding_never_wins() -> None:
    # Keys are negative throughout, so that zeros in the short page's empty places would score highest.
    q, k, v = random_tokens(2, 1, 43)
    q, k = q.abs() + 0.1, -k.abs() - 0.1
    k[:, :, 40:42] *= 20  # the short page scores lowest
    for params in (NATIVE, replace(PAGED, variant="eval")):
        params = replace(params, page_len=8)
        row = row_of(Quest, params, trace_of(k, v, 2, 42), request(tokens=24, comm="1"))
        kmax = row.index[0].kmax[:, :, 5]
        assert torch.equal(kmax, k[:, :, 40:42].amax(2))
        k_last = k[:, :, 42:] * 20
        step(row, q[:, :, 42:], k_last, v[:, :, 42:])
        attended = row.store.attended(0)
        assert not attended[:, 40:42].any()
        assert attended[:, :40].sum(-1).tolist() == [24, 24]
        # Taken, the short page gives its real tokens and nothing else.
        every = row_of(Quest, params, trace_of(k, v, 2, 42), request(tokens=24, comm="1"), Quest.Plan(8, 48))
        out = step(every, q[:, :, 42:], k_last, v[:, :, 42:])
        keys = torch.cat([k[:, :, :42], k_last], 2)
        expected = exact(q[:, :, 42:], keys, v, torch.ones(2, 43, dtype=torch.bool))
        torch.testing.assert_close(out[0, :, 0].double(), expected, atol=1e-5, rtol=0)


def test_query_heads_of_a_group_choose_pages_of_their_own() -> None:
    q, k, v = random_tokens(6, 2, 161)
    attended = {}
    for agg in AGGREGATES:
        params = replace(NATIVE, page_len=8, agg=agg)
        row = row_of(Quest, params, trace_of(k, v, 6, 160), request(tokens=40, comm="1"))
        attended[agg] = run(row, q, k, v, 160, 161)[0][1].view(2, 3, -1)
        entry = row.store.ledger.entries[-1]
        union = attended[agg][..., :160].any(1).sum()
        assert entry.moved_kv_bytes == union * 64
        heads = 6 if agg == "query_head" else 2
        assert entry.moved_kv_heads_bytes == heads * 40 * 64
    own = attended["query_head"]
    assert not torch.equal(own[:, 0], own[:, 1])
    for agg in ("group_mean", "group_max"):
        assert torch.equal(attended[agg], attended[agg][:, :1].expand(-1, 3, -1))
    assert not torch.equal(attended["group_mean"], attended["group_max"])


def test_of_equal_scores_the_earlier_page_is_taken() -> None:
    scores = torch.tensor([[[[1.0, 2.0, 1.0, 1.0, 2.0], [0.0, -0.0, 0.0, 0.0, 0.0]]]])
    pages = Units(3, 5)
    for agg, expected in (("query_head", [[0, 1, 4], [0, 1, 2]]), ("group_max", [[0, 1, 4]])):
        found = best_tokens(merged(scores, agg), pages)
        assert found is not None and found.sort(-1).values.tolist() == [expected]
    q, k, v = random_tokens(4, 2, 42)
    q = torch.zeros_like(q)
    row = row_of(Quest, replace(NATIVE, page_len=8), trace_of(k, v, 4, 41), request(tokens=17, comm="1"))
    attended = run(row, q, k, v, 41, 42)[0][1]
    assert attended.nonzero()[:, 1].view(4, -1).tolist() == [[*range(16), 41]] * 4


def test_pages_are_runs_of_positions() -> None:
    scores = torch.tensor([[[2.0, 1.0, 3.0, 0.0], [0.0, 2.0, 1.0, 3.0]]])
    every, short = (best_tokens(scores, Units(2, stop, length=3)) for stop in (12, 10))
    assert every is not None and every.tolist() == [[[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]]
    assert short is not None and short.tolist() == [[[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, -1, -1]]]


# --- Generated tokens -------------------------------------------------------------------------


def test_the_current_page_may_lose_in_the_accuracy_code_and_never_elsewhere() -> None:
    q, k, v = random_tokens(2, 1, 61)
    k[:, :, 56:] = -q[:, :1, 60:61] * 3  # all that the current page holds points away from the queries
    q[:, 1] = q[:, 0]
    kept = {}
    for variant in ("harness", "eval", "serving"):
        params = replace(PAGED, page_len=8, variant=variant)
        row = row_of(Quest, params, trace_of(k, v, 2, 60), request(tokens=24, comm="1"))
        kept[variant] = run(row, q, k, v, 60, 61)[0][1][:, 56:]
        entry = row.store.ledger.entries[-1]
        assert entry.attended == row.store.attended(0).sum()
        assert not row.protected(0) or variant != "eval"
    assert kept["harness"].all()
    assert kept["serving"].all()
    assert not kept["eval"].any()


@pytest.mark.parametrize("s", [60, 64])
def test_bounds_of_paged_tokens_are_those_of_all_keys(s: int) -> None:
    q, k, v = random_tokens(4, 2, s + 20)
    for variant in ("harness", "eval"):
        params = replace(PAGED, page_len=8, variant=variant)
        trace = trace_of(k, v, 4, s)
        row, other = (row_of(Quest, params, trace, request(tokens=24, comm="1"), n_new=20) for _ in range(2))
        shared = trace.once(("Quest's bounds", 0, 8), lambda: pytest.fail("nothing is shared"))
        before = Bounds(shared.kmin.clone(), shared.kmax.clone())
        run(row, q, k, v, s, s + 20)
        for j in range(ceil((s + 20) / 8)):
            keys = k[:, :, 8 * j : min(8 * j + 8, s + 20)]
            assert torch.equal(row.index[0].kmin[:, :, j], keys.amin(2))
            assert torch.equal(row.index[0].kmax[:, :, j], keys.amax(2))
        for mine, theirs in ((shared, before), (other.index[0], before)):
            assert torch.equal(mine.kmin[:, :, : ceil(s / 8)], theirs.kmin)
            assert torch.equal(mine.kmax[:, :, : ceil(s / 8)], theirs.kmax)


def test_variants_of_a_sample_share_bounds_of_the_prompt() -> None:
    _, k, v = random_tokens(4, 2, 70)
    trace = trace_of(k, v, 4, 60)
    rows = [row_of(Quest, replace(NATIVE, agg=agg), trace, request(tokens=32, comm="1")) for agg in AGGREGATES]
    assert all(row.index[0] is rows[0].index[0] for row in rows)


def test_rows_together_are_as_alone_whatever_their_options() -> None:
    q, k, v = random_tokens(6, 2, 80)
    variants = [
        (replace(NATIVE, page_len=8), 20), (replace(NATIVE, page_len=8, agg="group_max"), 33),
        (replace(NATIVE, page_len=4), 20), (replace(PAGED, page_len=8), 20), (replace(NATIVE, page_len=8), 70),
        (replace(PAGED, page_len=8, variant="eval"), 30), (replace(NATIVE, page_len=8), 40),
    ]  # fmt: skip

    def make(trace: Trace) -> list[Any]:
        return [row_of(Quest, params, trace, request(tokens=n, comm="1")) for params, n in variants]

    trace, kind = trace_of(k, v, 6, 70), cast(type[SelectiveAttention], Quest)
    alone = [run(row, q, k, v, 70, 80) for row in make(trace)]
    rows = make(trace)
    for t in range(10):
        queries, keys, values = (x[:, :, 70 + t : 71 + t].expand(len(rows), -1, -1, -1) for x in (q, k, v))
        outs = attend_group(kind, rows, 0, queries, keys, values, trace.softmax[0])
        for i, out in enumerate(outs):
            assert torch.equal(rows[i].store.attended(0), alone[i][t][1])
            torch.testing.assert_close(out, alone[i][t][0], atol=1e-6, rtol=0)


def test_fetched_pages_go_through_the_block_cache() -> None:
    q, k, v = random_tokens(6, 2, 68)
    cache = BlockCacheSpec(64, 8, 8, "lfu")
    params = replace(NATIVE, page_len=8)
    asked = request(tokens=16, comm="1")
    row = row_of(Quest, params, trace_of(k, v, 6, 64), asked, None, 64, cache)
    for t in range(4):  # the same query again: what was fetched is cached by then
        step(row, q[:, :, 64:65], k[:, :, 64 + t : 65 + t], v[:, :, 64 + t : 65 + t], t + 1)
    entries = row.store.ledger.entries
    assert entries[0].cache_hits == 0
    assert entries[-1].cache_hits == entries[-1].cache_lookups > 0
    assert entries[-1].moved_kv_bytes == 0


# --- Budget -----------------------------------------------------------------------------------


def smallest_budget(message: str, s: int) -> int:
    """The tokens that an error recommends, which its ratio must come to as well."""
    share, tokens = (message.split(f"{key}=")[1].split()[0].strip("(),") for key in ("ratio", "budget"))
    assert int(tokens) <= int(Fraction(share) * s) <= int(tokens) + s // 1000 + 1
    return int(tokens)


@pytest.mark.parametrize(("h", "h_kv", "d_h"), [(9, 3, 64), (8, 2, 128)])
@pytest.mark.parametrize("comm", ["1/128", "1/64", "1/16"])
def test_the_ledger_is_within_every_budget_that_can_be_met(comm: str, h: int, h_kv: int, d_h: int) -> None:
    shape = ModelShape("any", 1, h, h_kv, d_h, 1 << 20, (0,))
    met = 0
    for s in (2000, 3970, 4000):
        q, k, v = random_tokens(h, h_kv, s + 20, d_h)
        for ratio in ("0.05", "0.1", "0.2", "0.5"):
            asked = request(ratio, comm=comm)
            Quest.check(PARAMS, asked, shape)
            try:
                Quest.plan_for(PARAMS, resolve(asked, s, False), shape)
            except ConfigError as error:
                least = smallest_budget(str(error), s)
                assert int(Fraction(ratio) * s) < least
                asked = request(tokens=least, comm=comm)  # what it recommends works
            else:
                met += 1
            row = row_of(Quest, PARAMS, trace_of(k, v, h, s), asked)
            run(row, q, k, v, s, s + 20)
            assert row.store.ledger.within(row.budget, shape), (s, ratio)
            entry = row.store.ledger.entries[-1]
            n_pages = ceil(s / row.plan.page_len)
            assert entry.moved_meta_bytes == entry.resident_meta_bytes == 4 * n_pages * d_h * h_kv
            spare = row.budget.allowance(20) - entry.attended / h
            assert spare <= 2 * row.plan.page_len  # one that does not fit, and what the last lacks
    assert met >= {"1/128": 5, "1/64": 8, "1/16": 12}[comm]


def test_paged_tokens_are_within_the_budget_too() -> None:
    q, k, v = random_tokens(6, 2, 1100)
    shape = ModelShape("any", 1, 6, 2, 16, 1 << 20, (0,))
    params = replace(PARAMS, page_generated=True)
    row = row_of(Quest, params, trace_of(k, v, 6, 1000), request("0.2", comm="1/32"), n_new=100)
    run(row, q, k, v, 1000, 1000 + row.plan.page_len)
    assert row.store.ledger.within(row.budget, shape)
    assert max(entry.attended for entry in row.store.ledger.entries) <= 6 * 200


@pytest.mark.parametrize(("comm", "page_len"), [("1/8", 16), ("1/16", 32), ("1/64", 128), ("1/128", 256)])
def test_comm_makes_pages_of_2_over_comm_tokens(comm: str, page_len: int) -> None:
    for s in (1024, 4096, 32768):  # whole pages
        assert matched_page_len(resolve(request("0.2", comm=comm), s, False)) == page_len
    for s in (1000, 4001, 9999):  # the short last one must be paid for
        longer = matched_page_len(resolve(request("0.2", comm=comm), s, False))
        assert longer >= page_len
        assert 2 * ceil(s / longer) <= Fraction(comm) * s < 2 * ceil(s / (longer - 1))


def test_pages_that_a_budget_has() -> None:
    assert [Quest.Plan(16, b).k(203, "harness") for b in (16, 64, 79, 203, 400)] == [1, 4, 4, 12, 13]
    assert [Quest.Plan(16, b).k(203, "eval") for b in (16, 33, 64, 203, 400)] == [3, 3, 4, 12, 12]
    assert [Quest.Plan(16, b).k(40, variant) for b in (33, 64) for variant in ("eval", "serving")] == [3, 2, 3, 3]


def test_native_pages_want_the_comm_that_they_cost() -> None:
    shape = ModelShape("any", 4, 4, 2, 64, 1 << 20, (0, 1, 2, 3))
    with pytest.raises(ConfigError, match=r"comm=1/16 .*page_len=16 .*comm=1/8 or more"):
        Quest.check(NATIVE, request("0.2", comm="1/16"), shape)
    Quest.check(NATIVE, request("0.2", comm="1/8"), shape)
    Quest.check(replace(NATIVE, variant="serving"), request("0.2", comm="1/64"), shape)
    assert Quest.plan_for(NATIVE, resolve(request("0.2", comm="1/8"), 320, False), shape).k(320, "harness") == 4
    with pytest.raises(ConfigError, match=r"21 pages .* prompt of 321; use comm=0\.131 or more"):
        Quest.plan_for(NATIVE, resolve(request("0.2", comm="1/8"), 321, False), shape)
    assert Quest.label(NATIVE, request("0.2")) == "Quest"
    assert Quest.label(PARAMS, request("0.2")) == "Quest (matched)"


def test_what_cannot_be_met_is_refused() -> None:
    shape = ModelShape("any", 4, 4, 2, 64, 1 << 20, (0, 1, 2, 3))
    with pytest.raises(ConfigError, match=r"comm=0 "):
        Quest.check(PARAMS, request("0.2", comm="0"), shape)
    with pytest.raises(ConfigError, match=r"comm=1/128 .* prompt of 100 tokens; use comm=2/100"):
        Quest.plan_for(PARAMS, resolve(request("0.2", comm="1/128"), 100, False), shape)


def test_the_first_layers_stay_whole_and_the_report_has_the_share_of_all() -> None:
    q, k, v = random_tokens(4, 2, 65)
    shape = ModelShape("any", 5, 4, 2, 16, 1 << 20, (0, 1, 2, 4))
    trace = Trace(shape, 64, torch.device("cpu"))
    for layer in shape.attention_layers:
        trace.add(layer, k[:, :, :64], v[:, :, :64], Softmax(0.25))
    row = row_of(Quest, replace(NATIVE, full_layers=2), trace, request("0.3", comm="1/8"))
    for layer in shape.attention_layers:
        step(row, q[:, :, 64:], k[:, :, 64:], v[:, :, 64:], layer=layer)
    assert list(row.skipped) == [0, 1]
    assert [row.store[layer].can_fetch for layer in shape.attention_layers] == [False, False, True, True]
    attended = [entry.attended / 4 for entry in row.store.ledger.entries]
    assert attended == [65, 65, 17, 17]
    assert row.store.ledger.within(row.budget, shape, row.skipped)
    assert not row.store.ledger.within(row.budget, shape)
    assert row.report() == {
        "comm_mode": "native", "page_len": 16, "n_pages": 4, "k_pages": 1, "achieved_ratio": 0.25,
        "overall_ratio": (2 + 2 * 0.25) / 4,
    }  # fmt: skip
