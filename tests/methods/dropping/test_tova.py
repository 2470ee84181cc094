from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.methods.allocator import Allocator
from kvbench.methods.combinations import ALLOCATION, COMMAND, Case, refuse
from kvbench.methods.dropping.tova import LAST_QUERY, TOVA
from kvbench.methods.full import Full
from kvbench.methods.scorers import lowest_slot, lowest_slots
from kvbench.tests.vectors import Check, at, differs, first, load, request, row_of, step, trace_of

ALWAYS, ONE_SHOT = TOVA.Params("always"), TOVA.Params("prompt")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "tova").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """The authors' cache over several steps, and kvpress' form on weights that are given."""
    meta, x = load(path)
    if "last_row" in x:
        return [(path.stem, check_one_shot(meta["Hk"], meta["n_kept"], x))]
    s = meta["S"]
    q, k, v = (torch.from_numpy(x[name]) for name in ("q", "k", "v"))
    row = row_of(TOVA, ALWAYS, watched(q, k, v, s), request(tokens=1), TOVA.Plan(meta["cache_size"], 0))
    problem = first(
        differs("scores of the prompt", row.scores(0)[0, 0], x["prompt_score"], 1e-6), kept(row, x["kept_idx"], 0)
    )
    for t in range(meta["steps"]):
        before = set(row.store[0].positions()[0, 0].tolist()) | {s + t}
        out = step(row, at(x["q"], 1 + t), at(x["k"], s + t), at(x["v"], s + t), t + 1)
        gone = before - set(row.store[0].positions()[0, 0].tolist())
        problem = problem or first(
            differs(f"attended at step {t}", row.store.attended(0).sum(-1).unique(), x["attended"][t : t + 1]),
            differs(f"output of step {t}", out[0, :, 0], x["out"][t], 1e-5),
            differs(f"evicted at step {t}", [*gone] or [-1], x["evicted"][t : t + 1]),
            kept(row, x["kept_idx"], t + 1),
        )
    return [(path.stem, problem)]


def watched(q: Tensor, k: Tensor, v: Tensor, s: int) -> Trace:
    """A trace of the first `s` tokens; the first of q is the query of their last."""
    trace = trace_of(k, v, q.shape[1], s)
    queries = torch.cat([torch.zeros_like(q[:, :, :1]).expand(-1, -1, s - 1, -1), q[:, :, :1]], 2)
    trace.observe(0, LAST_QUERY, queries, k[:, :, :s], trace.softmax[0])
    return trace


def kept(row: TOVA, expected: np.ndarray, t: int) -> str | None:
    theirs = expected[t][expected[t] >= 0]
    ours = row.store[0].positions()[0].sort(-1).values
    return differs(f"kept after {t} steps", ours, np.tile(theirs, (len(ours), 1)))


def check_one_shot(h_kv: int, n_kept: int, x: dict[str, np.ndarray]) -> str | None:
    weights = torch.from_numpy(x["last_row"])
    nothing = torch.zeros(1, h_kv, weights.shape[-1], 8)
    trace = trace_of(nothing, nothing, weights.shape[1])
    trace._observed[LAST_QUERY, 0] = weights.mean(1)
    row = row_of(TOVA, ONE_SHOT, trace, request(tokens=n_kept))
    return first(
        differs("scores", row.scores(0)[0], x["score"][:, :-1], 1e-6),
        differs("kept", row.store[0].positions()[0], np.tile(x["kept_idx"], (h_kv, 1))),
    )


def tokens(n: int, h: int = 4, h_kv: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, 16, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k, v


def take(row: TOVA, t: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = row.trace.s_prompt + t
    return step(row, q[:, :, n : n + 1], k[:, :, n : n + 1], v[:, :, n : n + 1], t + 1)


def row_on(q: Tensor, k: Tensor, v: Tensor, s: int, n_tokens: int, params: TOVA.Params = ALWAYS) -> TOVA:
    return row_of(TOVA, params, watched(q[:, :, s - 1 :], k, v, s), request(tokens=n_tokens))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_tova_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 20])
def test_the_cache_has_one_size_and_a_step_sees_one_token_more(n_tokens: int) -> None:
    q, k, v = tokens(70)
    row = row_on(q, k, v, 50, n_tokens)
    for t in range(20):
        assert row.store[0].positions().shape == (1, 2, n_tokens)
        take(row, t, q, k, v)
        assert row.store.attended(0).sum(-1).tolist() == [n_tokens + 1] * 4
    for entry in row.store.ledger.entries:
        assert entry.attended == (n_tokens + 1) * 4
        assert entry.resident_kv_bytes == (n_tokens + 1) * 2 * 16 * 2 * 2
        assert entry.resident_meta_bytes == entry.moved_kv_bytes == entry.moved_meta_bytes == 0


def test_every_step_drops_what_it_looked_at_least_by_the_mean_of_all_query_heads() -> None:
    """Against sets of positions, kept apart from the cache and its slots."""
    q, k, v = tokens(80, h=6, seed=2)
    row = row_on(q, k, v, 50, 12)
    trace_scale = row.trace.softmax[0].scale

    def weights(held: list[int], n: int) -> Tensor:
        keys = k[0, :, held].double().repeat_interleave(3, 0)
        return ((q[0, :, n - 1 : n].double() @ keys.mT)[:, 0] * trace_scale).softmax(-1).mean(0)

    held = sorted(weights(list(range(50)), 50).topk(12).indices.tolist())
    newest_left = 0
    for t in range(30):
        assert [sorted(head) for head in row.store[0].positions()[0].tolist()] == [held, held]
        take(row, t, q, k, v)
        held.append(50 + t)
        gone = held[int(weights(held, 51 + t).argmin())]
        newest_left += gone == 50 + t
        held.remove(gone)
    assert newest_left, "the current token competes like any other"


@pytest.mark.parametrize("params", [ALWAYS, ONE_SHOT])
def test_a_cache_for_prompt_and_answer_is_full_attention(params: TOVA.Params) -> None:
    q, k, v = tokens(60)
    plan = TOVA.Plan(60, TOVA.plan_for(params, row_on(q, k, v, 50, 9, params).budget, ANY_SHAPE).n_last)
    row = row_of(TOVA, params, watched(q[:, :, 49:], k, v, 50), request(tokens=1), plan)
    full = row_of(Full, Full.Params(), trace_of(k, v, 4, 50), request(ratio="1"))
    for t in range(10):
        torch.testing.assert_close(take(row, t, q, k, v), take(full, t, q, k, v))
        assert row.store.attended(0).all()


ANY_SHAPE = trace_of(*tokens(4)[1:], 4).shape


def test_the_whole_budget_evicts_nothing_while_decoding_and_asks_for_no_weights() -> None:
    q, k, v = tokens(60)
    row = row_of(TOVA, ALWAYS, watched(q[:, :, 49:], k, v, 50), request(ratio="1"))
    full = row_of(Full, Full.Params(), trace_of(k, v, 4, 50), request(ratio="1"))
    assert not row.wants_weights
    for t in range(10):
        assert torch.equal(take(row, t, q, k, v), take(full, t, q, k, v))
        assert row.store.attended(0).all()


def test_once_at_the_prompts_end_the_last_token_stays_and_the_answer_comes_on_top() -> None:
    q, k, v = tokens(60)
    q[:, 1::2, 49] = q[:, ::2, 49]
    k[:, :, 49] = -10 * q[:, ::2, 49]  # the last query looks away from its own key
    row, always = row_on(q, k, v, 50, 8, ONE_SHOT), row_on(q, k, v, 50, 8)
    assert not row.wants_weights
    assert 49 in row.store[0].positions()[0, 0] and 49 not in always.store[0].positions()[0, 0]
    prompt = row.store[0].positions()
    for t in range(10):
        take(row, t, q, k, v)
        assert torch.equal(row.store[0].positions()[..., :8], prompt)
        assert row.store.attended(0).sum(-1).tolist() == [9 + t] * 4


def test_of_equal_weights_the_newest_token_goes() -> None:
    q, k, v = tokens(60)
    k[:] = k[:, :, :1]
    row = row_on(q, k, v, 50, 5)
    for t in range(5):
        take(row, t, q, k, v)
        assert row.store[0].positions()[0].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_the_lowest_scores_are_those_of_the_highest_positions_among_equals() -> None:
    positions = torch.tensor([[[0, 9, 3, 7, 8]]])
    scores = torch.tensor([[[2.0, 1.0, 2.0, 1.0, 1.0]]])
    assert lowest_slot(scores, positions).tolist() == [[[1]]]
    assert [sorted(lowest_slots(scores, positions, k)[0, 0].tolist()) for k in (1, 2, 3, 4)] == [
        [1], [1, 4], [1, 3, 4], [1, 2, 3, 4],
    ]  # fmt: skip


def test_what_it_is_called_and_what_it_refuses() -> None:
    asked = request(ratio="1/5", comm="1/64")
    assert TOVA.label(ALWAYS, asked) == "TOVA (C)" and TOVA.label(ONE_SHOT, asked) == "TOVA (one-shot) (C)"
    assert TOVA.traits.comparable == "set"
    with pytest.raises(ConfigError, match="the smallest ratio for it is 1/50"):
        row_of(TOVA, ALWAYS, trace_of(*tokens(50)[1:], 4), request(ratio="1/51"))


def test_layers_may_share_a_budget_unequally_and_heads_may_not() -> None:
    refuse(ALLOCATION, Case(TOVA, ONE_SHOT, allocator=Allocator("pyramid")), COMMAND)
    with pytest.raises(ConfigError, match="TOVA keeps one set for all of them; use uniform, pyramid or by_need"):
        refuse(ALLOCATION, Case(TOVA, ONE_SHOT, allocator=Allocator("head_mix")), COMMAND)
    with pytest.raises(ConfigError, match=r"TOVA evicts while it decodes; use method\.evict=prompt with it"):
        refuse(ALLOCATION, Case(TOVA, ALWAYS, allocator=Allocator("pyramid")), COMMAND)
