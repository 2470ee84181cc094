from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.causal import causal
from kvbench.engine.errors import ConfigError
from kvbench.engine.observe import LastQueries
from kvbench.engine.shapes import ModelShape
from kvbench.evals.cells import ask, cell_without_task
from kvbench.evals.settings import from_words
from kvbench.methods.quantising.think import ThinK, ThinKCache, channel_scores, kept_channels
from kvbench.methods.rules import Quantizer, planned
from kvbench.tests.conformance import answers, model, ours
from kvbench.tests.vectors import Check, differs, first, load, request, row_of, step, trace_of

PARAMS = ThinK.Params(Fraction(2, 5), 32, 32, "kv_head")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "think").glob("*.npz"))


def row_with(k: Tensor, v: Tensor, q_window: Tensor, params: ThinK.Params = PARAMS) -> Any:
    trace = trace_of(k, v, q_window.shape[1])
    trace._observed[LastQueries(params.window), 0] = q_window
    return row_of(ThinK, params, trace, request("1"))


def run_vectors(path: Path) -> list[Check]:
    """kvpress' channels of a KV head; the authors' of a query head, and a step behind them."""
    meta, x = load(path)
    k, q = torch.from_numpy(x["k"]), torch.from_numpy(x["q_window"])
    v = torch.from_numpy(x["v"]) if "v" in x else torch.zeros_like(k)
    is_authors = "kept_channels" in x
    params = replace(
        PARAMS, share=Fraction(str(meta["ratio"])), window=meta["window"], recent=meta.get("recent", 0),
        per="query_head" if is_authors else "kv_head",
    )  # fmt: skip
    heads = meta["H"] if is_authors else meta["Hk"]
    scores = channel_scores(q, k, heads)
    kept = kept_channels(scores, meta["n_pruned"])
    theirs = torch.from_numpy(x["channel_score"])[0]
    problem = differs("scores", scores / theirs, torch.ones_like(theirs), 1e-5)
    if not is_authors:
        every = torch.ones(heads, meta["d"], dtype=torch.bool)
        pruned = every.scatter_(1, kept, False).nonzero()[:, 1].view(heads, -1)
        return [(path.stem, first(problem, differs("pruned", pruned, x["pruned_channels"][0])))]
    row = row_with(k, v, q, params)
    q_step, k_new, v_new = (torch.from_numpy(x[name]) for name in ("q_step", "k_new", "v_new"))
    out = step(row, q_step, k_new, v_new)
    return [
        (path.stem, first(problem, differs("kept", kept, x["kept_channels"][0]), differs("out", out, x["out"], 1e-5)))
    ]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_think_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def drawn(s: int = 90, h: int = 4, d: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, s, d, generator=draw) for _ in "kv")
    return k, v, torch.randn(1, h, 32, d, generator=draw)


def stepped(row: Any) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, 1, 16, generator=draw) for heads in (4, 2, 2))
    return step(row, q, k, v)


def test_nothing_dropped_and_nothing_old_enough_is_full_attention() -> None:
    k, v, q = drawn()
    draw = torch.Generator().manual_seed(1)
    asks, *new = torch.randn(1, 4, 1, 16, generator=draw), *(torch.randn(1, 2, 1, 16, generator=draw) for _ in "kv")
    whole_k, whole_v = (torch.cat(x, 2) for x in ((k, new[0]), (v, new[1])))
    full, _ = causal(asks, whole_k, whole_v, trace_of(k, v, 4).softmax[0])
    for params in (replace(PARAMS, share=Fraction(0)), replace(PARAMS, recent=90), replace(PARAMS, recent=200)):
        torch.testing.assert_close(stepped(row_with(k, v, q, params)), full)


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_a_channel_of_zeros_goes_first_and_changes_nothing(per: str) -> None:
    k, v, q = drawn()
    k[..., 5] = 0
    params = replace(PARAMS, share=Fraction(1, 16), per=per)
    row = row_with(k, v, q, params)
    assert row.store[0].quantized.width == 15 and 5 not in row.store[0].quantized.channels
    torch.testing.assert_close(stepped(row), stepped(row_with(k, v, q, replace(params, share=Fraction(0)))))


def test_a_factor_between_queries_and_keys_changes_no_set() -> None:
    k, v, q = drawn()
    factor = torch.linspace(0.2, 5, 16)
    one, other = row_with(k, v, q), row_with(k * factor, v, q / factor)
    assert torch.equal(one.store[0].quantized.channels, other.store[0].quantized.channels)


def test_of_equal_channels_the_lower_ones_go() -> None:
    assert kept_channels(torch.tensor([[1.0, 1, 1, 2], [0, 3, 3, 3]]), 2).tolist() == [[2, 3], [2, 3]]


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_what_it_holds_is_what_it_looks_at_and_what_is_counted(per: str) -> None:
    k, v, q = drawn()
    row = row_with(k, v, q, replace(PARAMS, per=per))
    quantized: ThinKCache = row.store[0].quantized
    rebuilt_k, rebuilt_v = quantized.rebuilt()
    assert torch.equal(rebuilt_v, v) and torch.equal(rebuilt_k[:, :, -32:], k[:, :, -32:])
    held = rebuilt_k[:, :, :58] != 0
    assert (
        torch.equal(rebuilt_k[:, :, :58][held], k[:, :, :58][held]) and held[0, 0, 0].sum() == quantized.width
    ) or per
    n_late, heads = 32, {"kv_head": 2, "query_head": 4}[per]
    assert quantized.counted_bytes() == 2 * 2 * (58 * (quantized.width + 16) + n_late * 32) + heads * 16 // 8
    stepped(row)
    assert row.store.ledger.entries[-1].resident_kv_bytes == quantized.counted_bytes()


def test_memory_says_how_many_channels_go() -> None:
    shape = ModelShape("m", 2, 8, 2, 64, 1 << 20, (0, 1))
    for memory in ("9/10", "3/4"):
        budget = BudgetRequest(None, None, Fraction(0), memory=Fraction(memory))
        given, plan, _ = planned(ThinK, PARAMS, budget, shape, 1000)
        less = ThinK.dropping(PARAMS, plan.n_dropped - 1)
        assert ThinK.footprint(PARAMS, plan, given, shape).fits(given, shape)
        assert not ThinK.footprint(PARAMS, less, given, shape).fits(given, shape)
    with pytest.raises(ConfigError, match="memory"):
        planned(ThinK, PARAMS, BudgetRequest(None, None, Fraction(0), memory=Fraction(1, 2)), shape, 1000)


@pytest.mark.parametrize("first", [False, True], ids=["drop_first", "quantise_first"])
@pytest.mark.parametrize("name", ["snapkv", "keydiff_kvpress"])
def test_behind_a_method_that_drops_it_answers_alone_as_beside_others(name: str, first: bool) -> None:
    one = ours(name)
    quantizer = Quantizer(ThinK, replace(PARAMS, recent=8), first)
    variant = one.kind.variant_for(
        one.params, BudgetRequest(Fraction(2, 5), None, Fraction(0)), model().shape, 240, quantizer=quantizer
    )
    other = one.kind.variant_for(one.params, BudgetRequest(Fraction(2, 5), None, Fraction(0)), model().shape, 240)
    alone, together = answers([variant]), answers([other, variant])
    assert alone[0].ids == together[1].ids
    layer = alone[0].row.store[0]
    assert layer.quantized.plan.n_dropped == 3 and layer.quantized.n_thin == 240 * 2 // 5 - 8
    assert alone[0].row.trace.exact.observed(LastQueries(32), 0).shape[2] == 32


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["method.share=1"], "method.share=1 is out of range"),
        (["method.share=0.01"], "of 64 channels is none"),
        (["method.window=0"], "method.window=0 is out of range"),
        (["method.recent=-1"], "method.recent=-1 is out of range"),
        (["method.per=layer"], "method.per=layer is not allowed"),
        (["ratio=0.2"], "ThinK attends to everything"),
        (["dropped=merged"], "ThinK drops no tokens"),
        (["allocator=head_mix"], "keeps every token"),
    ],
)
def test_what_it_refuses(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask([from_words(["method=think", "ratio=1", "task=needle", *words])])


def test_heads_with_other_counts_cannot_be_thinned() -> None:
    settings = from_words(["method=snapkv", "allocator=head_mix", "compose=think", "task=needle"])
    with pytest.raises(ConfigError, match="gives layers or heads other numbers of tokens"):
        cell_without_task(settings)


def test_tokens_that_are_fetched_one_by_one_cannot_be_thinned() -> None:
    settings = from_words(["method=pqcache", "compose=think", "task=needle"])
    with pytest.raises(ConfigError, match="ThinK makes no codes of single tokens"):
        cell_without_task(settings)
