from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.methods.allocator import Allocator
from kvbench.methods.combinations import ALLOCATION, COMMAND, Case, refuse
from kvbench.methods.dropping.keydiff import KeyDiff, anchor, survivors, unlikeness
from kvbench.methods.full import Full
from kvbench.tests.vectors import Check, built, differs, first, load, request, row_of, step, trace_of

BLOCKS = KeyDiff.Params("simulated", 128, "prompt")
ONE_SHOT = replace(BLOCKS, blocks="none")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "keydiff").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """kvpress' press, by itself and in blocks."""
    meta, x = load(path)
    k = torch.from_numpy(x["k"])
    params = ONE_SHOT if meta["block"] is None else replace(BLOCKS, block_len=meta["block"])
    row = row_of(KeyDiff, params, trace_of(k, k, k.shape[1]), request(tokens=meta["n_kept"]))
    problem = first(
        differs("anchor", anchor(k), x["anchor"], 1e-6) if "anchor" in x else None,
        differs("scores", row.scores(0), x["score"], 1e-6) if "score" in x else None,
        differs("kept", row.store[0].positions().sort(-1).values, x["kept_idx"]),
    )
    return [(path.stem, problem)]


def tokens(n: int, h: int = 4, h_kv: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, 16, generator=draw) for heads in (h, h_kv, h_kv))
    return q, k + 0.5, v  # with a common direction


def kept(row: KeyDiff) -> list[list[int]]:
    return row.store[0].positions()[0].sort(-1).values.tolist()


def row_on(k: Tensor, v: Tensor, n_tokens: int, params: KeyDiff.Params = ONE_SHOT, s: int | None = None) -> KeyDiff:
    return row_of(KeyDiff, params, trace_of(k, v, 4, s), request(tokens=n_tokens))


def take(row: KeyDiff, t: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = row.trace.s_prompt + t
    return step(row, q[:, :, n : n + 1], k[:, :, n : n + 1], v[:, :, n : n + 1], t + 1)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_keydiff_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


@pytest.mark.parametrize("params", [ONE_SHOT, replace(BLOCKS, block_len=7)])
@pytest.mark.parametrize("odd", [0, 20, 39])
def test_of_equal_keys_and_an_odd_one_that_one_stays_first(odd: int, params: KeyDiff.Params) -> None:
    k = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(1)).repeat(1, 1, 40, 1)
    k[:, :, odd] = torch.randn(16, generator=torch.Generator().manual_seed(2))
    assert kept(row_on(k, k, 1, params)) == [[odd]] * 2
    lower = [i for i in range(5) if i != odd][:3]
    assert kept(row_on(k, k, 4, params)) == [sorted([odd, *lower])] * 2, "of equal ones the lower positions"


@pytest.mark.parametrize("params", [ONE_SHOT, replace(BLOCKS, block_len=16)])
def test_the_lengths_of_keys_change_nothing(params: KeyDiff.Params) -> None:
    _, k, v = tokens(100)
    longer = k * torch.logspace(-2, 3, 100).unsqueeze(-1)[torch.randperm(100, generator=torch.Generator())]
    assert kept(row_on(longer, v, 30, params)) == kept(row_on(k, v, 30, params))


def test_the_anchor_is_the_mean_of_directions_and_not_of_keys() -> None:
    _, k, _ = tokens(100)
    k[:, :, 7] *= 1000
    directions = k / k.norm(dim=-1, keepdim=True)
    expected = -torch.nn.functional.cosine_similarity(k, directions.mean(2, keepdim=True), dim=-1)
    torch.testing.assert_close(unlikeness(k), expected)
    others = -torch.nn.functional.cosine_similarity(k, k.mean(2, keepdim=True), dim=-1)
    assert not torch.allclose(others, expected, atol=0.1)


def test_scores_are_float32_whatever_the_dtype_and_finite_where_a_key_is_zero() -> None:
    _, k, _ = tokens(30)
    k[:, :, 3] = 0
    scores = unlikeness(k.bfloat16())
    assert scores.dtype == torch.float32 and scores[0, :, 3].tolist() == [0, 0]
    assert unlikeness(torch.zeros(1, 2, 5, 16)).tolist() == torch.zeros(1, 2, 5).tolist()


def test_blocks_of_one_that_leave_out_one_token_drop_the_loser_of_all() -> None:
    _, k, v = tokens(60)
    one_by_one = row_on(k, v, 59, replace(BLOCKS, block_len=1))
    assert kept(one_by_one) == kept(row_on(k, v, 59))
    losers = unlikeness(k).argmin(-1)[0].tolist()
    assert [set(range(60)) - set(head) for head in kept(one_by_one)] == [{i} for i in losers]


@pytest.mark.parametrize("block_len", [41, 60, 1000])
def test_one_block_for_all_the_rest_is_the_one_shot_form(block_len: int) -> None:
    _, k, v = tokens(60)
    assert kept(row_on(k, v, 19, replace(BLOCKS, block_len=block_len))) == kept(row_on(k, v, 19))


def test_a_round_looks_at_what_survived_and_its_block_alone() -> None:
    """Token by token with sets; in blocks other tokens stay than in one go."""
    _, k, _ = tokens(60)
    for head in range(2):
        held = list(range(20))
        for start in range(20, 60, 7):
            held += range(start, min(start + 7, 60))
            scores = unlikeness(k[0, head, held].double())
            held = sorted(held[i] for i in scores.topk(20).indices)
        assert survivors(k, 20, 7)[0, head].tolist() == held
    assert survivors(k, 20, 7).tolist() != survivors(k, 20, 40).tolist()


def test_behind_every_step_the_key_that_is_most_like_the_others_goes() -> None:
    q, k, v = tokens(80, seed=3)
    row = row_on(k, v, 12, replace(ONE_SHOT, evict="always"), 50)
    held = kept(row)
    for t in range(30):
        take(row, t, q, k, v)
        assert row.store.attended(0).sum(-1).tolist() == [13] * 4
        for head in range(2):
            held[head].append(50 + t)
            del held[head][int(unlikeness(k[0, head, held[head]].double()).argmin())]
        assert kept(row) == held
    assert {entry.resident_kv_bytes for entry in row.store.ledger.entries} == {13 * 2 * 16 * 2 * 2}


def test_by_default_nothing_is_evicted_while_decoding() -> None:
    q, k, v = tokens(60)
    row = row_on(k, v, 20, BLOCKS, 50)
    for t in range(10):
        take(row, t, q, k, v)
        assert row.store.attended(0).sum(-1).tolist() == [21 + t] * 4
    assert {entry.resident_meta_bytes + entry.moved_kv_bytes for entry in row.store.ledger.entries} == {0}


@pytest.mark.parametrize("evict", ["prompt", "always"])
@pytest.mark.parametrize("blocks", ["none", "simulated"])
def test_the_whole_budget_is_full_attention_while_decoding_too(blocks: str, evict: str) -> None:
    q, k, v = tokens(60)
    row = row_of(KeyDiff, replace(BLOCKS, blocks=blocks, evict=evict), trace_of(k, v, 4, 50), request(ratio="1"))
    full = row_of(Full, Full.Params(), trace_of(k, v, 4, 50), request(ratio="1"))
    for t in range(10):
        assert torch.equal(take(row, t, q, k, v), take(full, t, q, k, v))


def test_the_label_says_how_the_prompt_was_read() -> None:
    asked = request(ratio="1/5", comm="1/64")
    assert KeyDiff.label(BLOCKS, asked) == "KeyDiff (simulated blocks) (C)"
    assert KeyDiff.label(ONE_SHOT, asked) == "KeyDiff (one-shot) (C)"


@pytest.mark.parametrize("params", [ONE_SHOT, replace(BLOCKS, block_len=16)])
def test_heads_may_share_a_budget_and_each_survives_its_blocks_with_its_own(params: KeyDiff.Params) -> None:
    _, k, v = tokens(100)
    k[:, 1] += 3  # all keys of a head point one way: it starves
    trace, pooled = trace_of(k, v, 4), Allocator("head_mix", Fraction(1, 3))
    refuse(ALLOCATION, Case(KeyDiff, params, allocator=pooled), COMMAND)
    variant = KeyDiff.variant_for(params, request(tokens=30), trace.shape, 100, allocator=pooled)
    row = built(variant.row(trace, 4))
    counts = row.store[0].kept_counts()
    assert sum(counts) == 60 and counts[0] > 2 * counts[1]
    for head, n in enumerate(counts):
        found = row.store[0].positions()[0, head]
        assert found[found >= 0].tolist() == kept(row_on(k, v, n, params))[head]
    with pytest.raises(ConfigError, match=r"KeyDiff evicts while it decodes; use method\.evict=prompt with it"):
        refuse(ALLOCATION, Case(KeyDiff, replace(params, evict="always"), allocator=pooled), COMMAND)
