"""Append-only decoding: the rules of kvpress' filters with given keys, and what never leaves."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.engine.budget import EVERYTHING, BudgetRequest
from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import Judged
from kvbench.evals.cells import ask
from kvbench.evals.settings import from_words
from kvbench.methods.base import reported
from kvbench.methods.decoding.append_only import AppendOnly, in_pages
from kvbench.methods.decoding.append_only_budget import AppendBudget
from kvbench.methods.full import Full
from kvbench.tests.conformance import answers, model
from kvbench.tests.methods.decoding.traces import read_trace
from kvbench.tests.vectors import Check, built, differs, first, load, request, step

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "append_only").glob("*.npz"))


def params_of(*words: str) -> Any:
    part = from_words([f"method={words[0]}", *words[1:]]).method
    return build_params(AppendBudget if "budget" in words[0] else AppendOnly, part.params, "method")


KEYS = params_of("append_only")


def run_vectors(path: Path) -> list[Check]:
    """A prompt, and which heads keep each token that comes."""
    meta, x = load(path)
    share = Fraction(str(meta["share_removed"]))
    scorer = params_of("append_only", f"method.scorer={meta['scorer']}").scorer
    params = replace(
        KEYS, scorer=scorer, share=share, interval=meta["interval"], window=meta["window"], per=meta["per"]
    )
    if meta["threshold"] is not None:
        params = replace(params, decide="threshold", threshold=meta["threshold"])
    k, s, n = torch.from_numpy(x["k"]).unsqueeze(0), meta["S"], meta["T"]
    ranks: list[int] = []

    class Noting(AppendOnly):
        def limit(self, n: Tensor, p: int) -> int:
            ranks.append(super().limit(n, p))
            return ranks[-1]

    row = start(Noting, params, k, s)
    entries, targets = np.zeros((n - s, meta["Hk"]), int), np.full(n - s, -1)
    for p in range(s, n):
        ranks.clear()
        step(row, *(k[:, :, p : p + 1] for _ in "qkv"), t=p + 1 - s)
        entries[p - s] = row.store.attended(0).sum(1)
        targets[p - s] = ranks[0] if ranks else -1
    kept = row.store[0].judged().int()
    accepted = torch.nn.functional.pad(kept, (0, n - kept.shape[1]), value=-1)
    return [
        (
            path.stem,
            first(
                differs("accepted", accepted, x["accepted"]),
                differs("entries", entries, x["entries"]),
                differs("ranks", targets, x["target"]),
            ),
        )
    ]


def start(kind: Any, params: Any, k: Tensor, s: int, asked: BudgetRequest = EVERYTHING, q: Tensor | None = None) -> Any:
    """The method on the first `s` tokens, built, with keys as values."""
    n_queries = getattr(params.scorer.params, "window", 0)
    trace = read_trace(k if q is None else q, k, k, s, n_queries if params.window else 0)
    return built(kind.variant_for(params, asked, trace.shape, s).row(trace, k.shape[2] - s))


def go_on(row: Any, k: Tensor, s: int, q: Tensor | None = None) -> list[np.ndarray]:
    """What the step of each token of the answer attends to, (h, n) bool each."""
    seen, q = [], k if q is None else q
    for p in range(s, k.shape[2]):
        at = slice(p, p + 1)
        step(row, q[:, :, at], k[:, :, at], k[:, :, at], t=p + 1 - s)
        seen.append(row.store.attended(0).numpy())
    return seen


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_append_only_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def drawn(n: int, h: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(1, h, n, 8, generator=torch.Generator().manual_seed(seed))


WAYS = {
    "rank": (), "keys": ("method.scorer=keydiff",), "random": ("method.scorer=random",),
    "window": ("method.window=5",), "layer": ("method.per=layer",), "token": ("method.per=token", "method.window=1"),
    "queries": ("method.scorer=snapkv", "method.window=8"),
    "all": ("method.scorer=snapkv", "method.window=9", "method.per=token"),
    "threshold": ("method.decide=threshold", "method.threshold=-2.7"),
}  # fmt: skip


@pytest.mark.parametrize("words", WAYS.values(), ids=WAYS)
def test_what_is_kept_never_leaves_and_newer_ones_are_seen(words: tuple[str, ...]) -> None:
    params, k, s = params_of("append_only", *words), drawn(90), 20
    row = start(AppendOnly, params, k, s)
    seen = go_on(row, k, s)
    for p, (before, now) in enumerate(pairwise(seen), s + 1):
        decided = max(s, p - params.window)
        assert now[:, :s].all() and now[:, decided:].all(), "the prompt, and who is not judged yet"
        assert (now[:, : decided - 1] == before[:, : decided - 1]).all(), "who is judged stays as it was"
    lengths = {int(x) for x in seen[-1].sum(1)}
    assert max(lengths) < 85 and (len(lengths) == 1) == (params.per != "head")
    entry = row.store.ledger.entries[-1]
    assert entry.attended == int(seen[-1].sum()) and entry.resident_kv_bytes == entry.attended * 2 * 8 * 2


def test_a_layer_keeps_what_half_of_its_heads_would_and_every_third_token_is_tested() -> None:
    params, k, s = params_of("append_only", "method.per=layer", "method.interval=3", "method.share=0.7"), drawn(80), 20
    row = start(AppendOnly, params, k, s)
    go_on(row, k, s)
    norms, held = k[0].norm(dim=-1), [*range(s)]
    for p in range(s, 80):
        n = max(1, int((len(held) + 1) * (1 - 0.7)))
        votes = [(norms[head, held] < norms[head, p]).sum() < n for head in range(4)]
        if (p + 1 - s) % 3 or sum(map(int, votes)) >= 2:
            held.append(p)
    assert row.store[0].judged()[0].nonzero().squeeze(1).tolist() == held and 62 <= len(held) < 78


@pytest.mark.parametrize(
    "words", [("method.window=1",), ("method.window=3", "method.scorer=keydiff", "method.share=0.6")], ids=str
)
def test_all_layers_keep_the_same_tokens_where_they_judge_together(words: tuple[str, ...]) -> None:
    row = said(params_of("append_only", "method.per=token", *words)).row
    kept = [row.store[layer].judged() for layer in model().shape.attention_layers]
    assert all(torch.equal(each, kept[0][:1].expand_as(each)) for each in kept)
    assert 240 < int(kept[0][0].sum()) < kept[0].shape[1], "some stay and some do not"
    apart = said(params_of("append_only", "method.per=layer", *words)).row
    assert not torch.equal(apart.store[0].judged(), kept[0]), "a layer by itself keeps others"


def test_who_is_judged_is_not_judged_again() -> None:
    k, s = drawn(30), 20
    row = start(AppendOnly, KEYS, k, s)
    go_on(row, k, s)
    with pytest.raises(AssertionError, match="each is judged once"):
        row.store.change(0, Judged(torch.ones(4, dtype=torch.bool)))


def test_pages_are_counted_per_head_and_as_slots_that_all_heads_skip() -> None:
    k, s = drawn(420), 20
    row = start(AppendOnly, params_of("append_only_random"), k, s)
    go_on(row, k, s)
    held, said = row.store[0].judged(), reported(row)
    assert said["held"]["mean"] == held.sum(1).double().mean() and 190 < said["held"]["mean"] < 250
    assert said["pages"]["head"] == in_pages(held.sum(1)) < 256
    assert said["pages"]["layer"] == said["pages"]["table"] == in_pages(held.any(0).sum())
    assert 0.9 < (held.any(0).sum() - s) / 400 < 0.97, "of four heads that draw apart, a slot is free once in 16"
    assert said["flops_per_token"] == 0, "places say it"
    row = start(AppendOnly, params_of("append_only", "method.scorer=keydiff"), k[:, :, :22], s)
    go_on(row, k[:, :, :22], s)
    first_two = 4 * 21 + int(row.store[0].judged()[:, :21].sum()) + 4
    assert reported(row)["flops_per_token"] == 2 * 8 * first_two / 2
    assert row.store.ledger.rebuilt_bytes == 2 * 8 * first_two


def test_random_tokens_are_an_even_sample_of_the_answer_that_hangs_on_the_draw() -> None:
    k, s = drawn(420), 20
    found = []
    for draw in (0, 0, 1):
        row = start(AppendOnly, params_of("append_only_random"), k[:, :, :s], s)
        row.draw = draw
        found.append(row.inner.scores_at(0, torch.arange(s, 420), draw) >= 0.5)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    halves = found[0].float().view(4, 2, 200).mean(-1)
    assert (halves - 0.5).abs().max() < 0.12


def said(params: Any, asked: BudgetRequest = EVERYTHING, kind: Any = AppendOnly) -> Any:
    return answers([kind.variant_for(params, asked, model().shape, 240)])[0]


def test_with_nothing_to_skip_it_is_full_attention() -> None:
    full = answers([Full.variant_for(Full.Params(), EVERYTHING, model().shape, 240)])[0]
    for words in (("method.share=0",), ("method.decide=threshold", "method.threshold=-1e9")):
        assert said(params_of("append_only", *words)).ids == full.ids
    budget = params_of("append_only_budget", "method.expect=10")
    assert said(budget, request(tokens=250), AppendBudget).ids == full.ids
    above = said(params_of("append_only", "method.decide=threshold", "method.threshold=1e9", "method.window=3"))
    for one in above.steps:
        n = one.attended.shape[1]
        assert one.attended[:, :240].all() and one.attended[:, n - 4 :].all()
        assert not one.attended[:, 240 : n - 4].any()


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("expect", [20, 100, 400])
def test_a_budget_is_never_exceeded_and_spread_over_the_answer(expect: int, window: int) -> None:
    k, s, b = drawn(140), 20, 60
    params = replace(params_of("append_only_budget"), expect=expect, window=window)
    row = start(AppendBudget, params, k, s, request(tokens=b))
    seen = go_on(row, k, s)
    assert max(int(x.sum(1).max()) for x in seen) <= b + 1
    counts = row.store[0].judged().sum(1) + window
    if expect == 20:
        assert (counts == b).all(), "it is full, and nothing enters any more"
        assert row.store[0].judged()[:, s : s + 15].all()
    assert (expect == 400) == bool((counts < b - 10).all())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["method.scorer=snapkv"], "SnapKV scores a token by the queries.*use method.window=8 or more"),
        (["method.scorer=tova"], "TOVA has no score for a token that is generated"),
        (["method.scorer=h2o", "method.window=16"], "H2O has no score for a token"),
        (["method.decide=threshold", "method.scorer=keydiff"], "KeyDiff judges a token by others"),
        (["method.per=token"], "method.per=token wants the scores of all layers"),
        (
            ["method.per=token", "method.window=1", "method.decide=threshold"],
            "method.per=token takes the mean",
        ),
        (["method.decide=budget"], "use method=append_only_budget budget=N"),
        (["method.share=1"], "method.share=1 "),
        (["method.scorer={name:snapkv,reduce:query_head}", "method.window=8"], "each query head has scores of its own"),
    ],
)
def test_what_it_refuses(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ask([from_words(["task=needle", "method=append_only", *words])])


def test_a_prompt_above_the_budget_is_refused_and_a_ratio_too() -> None:
    params, shape = params_of("append_only_budget", "method.window=2"), model().shape
    with pytest.raises(ConfigError, match=r"does not hold a protected prompt of 240 .*use budget=242 or more$"):
        AppendBudget.variant_for(params, request(tokens=100), shape, 240)
    with pytest.raises(ConfigError, match=r"ratio=0\.2 is a share of a prompt"):
        AppendBudget.check(params, BudgetRequest(Fraction("0.2"), None, Fraction(0)), shape)


def test_tables_name_the_scorer_and_the_rule() -> None:
    names = {
        ("append_only",): "Append-only (Knorm, 0.5 skipped)",
        ("append_only_random",): "Append-only (Random tokens, from 0.5)",
        ("append_only", "method.scorer=snapkv", "method.window=8", "method.per=layer"):
            "Append-only (SnapKV, 0.5 skipped, one set per layer, window 8)",
    }  # fmt: skip
    assert [AppendOnly.label(params_of(*words), EVERYTHING) for words in names] == [*names.values()]
    budget = AppendBudget.label(params_of("append_only_budget"), request(tokens=90))
    assert budget == "Append-only (Knorm, 1024 expected)"
