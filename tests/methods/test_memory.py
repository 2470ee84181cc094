"""`memory`: what every method makes of a byte budget, for every file in conf/method that is a method's own."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from math import floor
from typing import Any

import pytest

from kvbench.engine.books.footprint import Footprint
from kvbench.engine.budget import Budget, BudgetRequest, Bytes, cache_bytes, parse_bytes, token_bytes
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals.every import own_class
from kvbench.methods.base import Variant
from kvbench.methods.rules import planned
from kvbench.results.names import known
from kvbench.tests.conformance import FITTED_COMM, METHODS, S, Subject, answers, model, ours, wide_enough
from kvbench.tests.conformance import subject as made_of


def has_bytes(name: str) -> bool:
    one = ours(name)
    return not one.kind.traits.of_answers and not one.kind.traits_of(one.params).adapts


# Those whose budget is of prompt and answer together refuse `memory` (tests/evals/test_draws.py).
# What adapts to its prompt has no budget at all.
OWN = [name for name in METHODS if known(name) == name and name != "full" and has_bytes(name)]
LLAMA = ModelShape("llama", 32, 32, 8, 128, 1 << 20, tuple(range(32)), 4096)


def asked(memory: str, ratio: str | None = None, comm: str | None = "1/16") -> BudgetRequest:
    """With `comm` None nothing limits what is read to find tokens."""
    exact = None if ratio is None else Fraction(ratio)
    return BudgetRequest(exact, None, None if comm is None else Fraction(comm), memory=Fraction(memory))


def variant(one: Subject, request: BudgetRequest) -> Variant:
    one.kind.check(one.params, request, model().shape)
    return one.kind.variant_for(one.params, request, model().shape, S)


@pytest.fixture(autouse=True)
def heads(request: pytest.FixtureRequest) -> Iterator[None]:
    """The model has heads that the method of the test can pack."""
    called = getattr(request.node, "callspec", None)
    with wide_enough(ours(called.params["name"])) if called and "name" in called.params else nullcontext():
        yield


@pytest.mark.parametrize("name", OWN)
def test_the_whole_memory_is_full_attention(name: str) -> None:
    full = variant(ours("full"), BudgetRequest(Fraction(1), None, Fraction(0)))
    one = variant(ours(name), asked("1", comm="0"))
    assert one.is_full
    said, reference = answers([one, full])
    assert said.ids == reference.ids
    assert [step.n_read for step in said.steps] == [step.n_read for step in reference.steps]


@pytest.mark.parametrize("memory", ["1/2", "3/8"])
@pytest.mark.parametrize(
    ("name", "comm"),
    [(x, FITTED_COMM.get(x, "1/16")) for x in OWN] + [(x, None) for x in OWN if not own_class(x).traits.drops],
)
def test_every_step_stays_within_the_bytes(name: str, memory: str, comm: str | None) -> None:
    subject = ours(name)
    try:
        one = variant(subject, asked(memory, comm=comm))
    except ConfigError as error:  # with so short a prompt: then at the smallest share that it names
        least = re.search(r"use memory=(0\.\d+) or more", str(error))
        if least is None:
            pytest.skip(f"{name} holds no share of so short a prompt: {error}")
        one = variant(subject, asked(least[1], comm=comm))
    (said,) = answers([one])
    ledger, shape, budget, kind = said.row.store.ledger, model().shape, one.budget, subject.kind
    in_mean = kind.traits.keeps_budget_in == "mean"
    assert ledger.within_memory(budget, shape, with_index=not kind.traits.drops, in_mean=in_mean)
    measured = ledger.held(with_index=not kind.traits.drops)[0] - len(shape.attention_layers) * token_bytes(shape)
    expected = kind.footprint(one.params, one.plan, budget, shape).total(shape, S)
    assert measured <= expected or in_mean
    summary = ledger.summary(budget, shape, said.row.skipped, in_mean, not kind.traits.drops)
    assert summary["within_budget"]


@pytest.mark.parametrize("name", [name for name in OWN if own_class(name).traits.drops])
def test_a_dropping_method_keeps_as_many_tokens_as_at_that_ratio(name: str) -> None:
    subject = ours(name)
    kind, params = subject.kind, subject.params
    if kind.whole_layers(params, model().shape) or kind.traits_of(params).is_query_wide:
        pytest.skip("layers that stay whole, and copies for query heads, count as bytes")
    try:
        in_bytes = variant(subject, asked("2/5"))
    except ConfigError as error:
        pytest.skip(f"{name} refuses 2/5 of so short a prompt: {error}")
    if subject.kind.footprint(in_bytes.params, in_bytes.plan, in_bytes.budget, model().shape) != Footprint(
        in_bytes.budget.tokens * token_bytes(model().shape)
    ):
        pytest.skip("what lies beside K and V counts as bytes")
    in_tokens = variant(subject, BudgetRequest(Fraction(2, 5), None, Fraction(1, 16), compensate=False))
    assert (in_bytes.plan, in_bytes.budget.tokens) == (in_tokens.plan, in_tokens.budget.tokens)
    a, b = answers([in_bytes])[0], answers([in_tokens])[0]
    assert a.ids == b.ids


@pytest.mark.parametrize("comm", ["1/8", None])
@pytest.mark.parametrize("name", OWN)
def test_more_memory_never_gives_fewer_tokens(name: str, comm: str | None) -> None:
    subject, found = ours(name), list[int]()
    if subject.kind.traits.changes:  # what fits the small model's heads does not fit these
        subject = made_of([f"method={name}"])
    for percent in range(2, 100, 3):
        try:
            budget, _, _ = planned(subject.kind, subject.params, asked(f"{percent}/100", comm=comm), LLAMA, 4000)
        except ConfigError:
            assert not found, f"{percent} % is refused, and less was not"
            continue
        found.append(budget.tokens)
    assert found == sorted(found) and len(found) > 10


@pytest.mark.parametrize("comm", ["1/8", None])
@pytest.mark.parametrize("name", ["pqcache", "infllm", "quest"])
def test_the_error_names_the_smallest_share_that_works(name: str, comm: str | None) -> None:
    subject = ours(name)
    with pytest.raises(ConfigError, match=r"use memory=0\.\d+ or more$") as caught:
        planned(subject.kind, subject.params, asked("1/2000", comm=comm), LLAMA, 4000)
    least = str(caught.value).rpartition("memory=")[2].split()[0]
    planned(subject.kind, subject.params, asked(least, comm=comm), LLAMA, 4000)
    with pytest.raises(ConfigError):
        planned(subject.kind, subject.params, asked(str(Fraction(least) - Fraction(2, 10_000)), comm=comm), LLAMA, 4000)


PUBLISHED = {  # of heads of 128, a prompt of 32,000 tokens and a quarter of the bytes
    "quest": {"page_len": 16},
    "sparq": {"r": 32},
    "loki": {"r": 32},
    "pqcache": {"m": 4, "b": 8},
    "infllm": {"n_repr": 4},
    "infinigen": {"n_channels": 25},
    "double_sparsity": {"n_labels": 8, "per_head": True},
    "retroinfer": {"n_clusters": 2000, "n_updates": None},
    "shadowkv": {"chunk": 8, "rank": 160},
    "clusterkv": {"n_clusters": 400},
}


def indexed(name: str, memory: str, s: int, shape: ModelShape = LLAMA) -> tuple[Budget, Any]:
    """Budget and plan of a method at its defaults where `comm` is off."""
    subject = made_of([f"method={name}"])
    return planned(subject.kind, subject.params, asked(memory, comm=None), shape, s)[:2]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_method_has_its_published_index_where_comm_is_off(name: str) -> None:
    budget, plan = indexed(name, "1/4", 32_000)
    assert {key: getattr(plan, key) for key in PUBLISHED[name]} == PUBLISHED[name]
    assert budget.index_share == 1 and budget.finds_freely


SMALL = ModelShape("small", 30, 9, 3, 64, 8192, tuple(range(30)), 576)


@pytest.mark.parametrize(
    ("name", "memory", "index"),
    [("quest", "1/8", {"page_len": 21}), ("loki", "1/16", {"r": 7}), ("pqcache", "1/8", {"m": 2, "b": 6})],
)
def test_an_index_is_made_smaller_before_a_token_is_left_out(name: str, memory: str, index: dict[str, int]) -> None:
    budget, plan = indexed(name, memory, 838, SMALL)
    assert {key: getattr(plan, key) for key in index} == index
    assert budget.tokens == floor(838 * Fraction(memory))
    assert (budget.index_share == 1) is (name == "pqcache")  # 2x6 is published too


def test_only_the_ledger_of_a_budget_with_comm_limits_what_is_read_to_find_tokens() -> None:
    """SparQ reads a quarter of the keys' bytes where `comm` is off, and no row is marked for it."""
    subject = ours("sparq")
    one = variant(subject, asked("1/2", comm=None))
    (said,) = answers([one])
    summary = said.row.store.ledger.summary(one.budget, model().shape)
    assert summary["within_budget"] and summary["bytes_comm_per_step"] is None
    least = variant(subject, asked("1/2", comm=subject.comm))
    assert least.budget.comm < one.budget.comm
    assert not said.row.store.ledger.within(least.budget, model().shape)


def test_both_are_the_smaller_of_the_two() -> None:
    snapkv, oracle = ours("snapkv"), ours("oracle")
    few = planned(snapkv.kind, snapkv.params, asked("1/4", "1/10"), LLAMA, 4000)[0]
    assert few.tokens == 400
    less = planned(snapkv.kind, snapkv.params, asked("1/10", "1/4"), LLAMA, 4000)[0]
    assert less.tokens == 400
    reaching = planned(oracle.kind, oracle.params, asked("1/4", "2/5"), LLAMA, 4000)[0]
    assert reaching.tokens == 1600  # of which half are fetched


def test_the_block_cache_gets_what_is_left() -> None:
    pqcache, spec = ours("pqcache"), BlockCacheSpec(4096, 128, 32, "lfu")
    budget, plan, cache = planned(pqcache.kind, pqcache.params, asked("1/4", "1/10"), LLAMA, 8000, spec)
    assert cache is not None
    held = pqcache.kind.footprint(pqcache.params, plan, budget, LLAMA)
    n_blocks = (2000 - -(-held.total(LLAMA, 8000) // (32 * token_bytes(LLAMA)))) // 128
    assert cache == replace(spec, tokens=128 * n_blocks)


# --- in bytes ------------------------------------------------------------------------------------


def in_bytes(n: int, ratio: str | None = None) -> BudgetRequest:
    return replace(asked("1", ratio, None), ratio=None if ratio is None else Fraction(ratio), memory=Bytes(n))


@pytest.mark.parametrize("name", OWN)
def test_bytes_are_the_share_of_the_prompts_cache_that_they_amount_to(name: str) -> None:
    subject, shape = ours(name), model().shape
    whole, said = cache_bytes(shape, S), ""
    for sixteenths in (8, 12, 14, 15):
        share, n = Fraction(sixteenths, 16), whole * sixteenths // 16
        try:
            one = variant(subject, asked(str(share), comm=None))
        except ConfigError as error:
            with pytest.raises(ConfigError) as caught:
                variant(subject, in_bytes(n))
            said = re.sub(r"memory=[\d.]+([KMG]i?B)?", "", str(caught.value))
            assert said == re.sub(r"memory=[\d./]+", "", str(error)).replace("memory=1", "")
            continue
        other = variant(subject, in_bytes(n))
        assert (other.plan, other.cache) == (one.plan, one.cache)
        assert replace(other.budget, given=None) == one.budget
        assert answers([other])[0].ids == answers([one])[0].ids
        return
    assert "full attention" in said  # no share of so short a prompt has room for its codes


def test_prompts_of_two_lengths_get_two_shares_of_the_same_bytes() -> None:
    snapkv, shape = ours("snapkv"), LLAMA
    n = cache_bytes(shape, 1000)
    budgets = [planned(snapkv.kind, snapkv.params, in_bytes(n), shape, s)[0] for s in (2000, 8000)]
    assert [budget.memory for budget in budgets] == [Fraction(1, 2), Fraction(1, 8)]
    assert [budget.tokens for budget in budgets] == [1000, 1000]
    assert all(budget.device_bytes(shape) * len(shape.attention_layers) == n for budget in budgets)


@pytest.mark.parametrize("name", ["snapkv", "pqcache", "kivi", "think"])
@pytest.mark.parametrize("more", [0, 1])
def test_a_cache_that_fits_is_full_attention(name: str, more: int) -> None:
    subject = ours(name)
    one = variant(subject, in_bytes(cache_bytes(model().shape, S) + more))
    assert one.is_full and one.budget.memory == 1
    assert answers([one])[0].ids == answers([variant(ours("full"), BudgetRequest(Fraction(1), None, None))])[0].ids


def test_a_ratio_beside_bytes_still_bounds_the_tokens() -> None:
    snapkv, n = ours("snapkv"), cache_bytes(LLAMA, 1000)
    budget = planned(snapkv.kind, snapkv.params, in_bytes(n, "1/10"), LLAMA, 4000)[0]
    assert (budget.tokens, budget.memory, budget.memory_alone) == (400, Fraction(1, 4), False)
    assert planned(snapkv.kind, snapkv.params, in_bytes(n, "1/2"), LLAMA, 4000)[0].tokens == 1000


@pytest.mark.parametrize(("name", "n"), [("pqcache", 200_000), ("snapkv", 100_000), ("kivi", 100_000)])
def test_too_few_bytes_are_refused_with_enough_of_them(name: str, n: int) -> None:
    subject = made_of([f"method={name}"])
    with pytest.raises(ConfigError, match=rf"^memory={n // 1000}KB (of|leaves no)") as caught:
        planned(subject.kind, subject.params, in_bytes(n), LLAMA, 4000)
    least = re.search(r"(?:use memory=|memory for it is )([\d.]+[KMG]i?B)", str(caught.value))
    assert least, caught.value
    n = parse_bytes(least[1], "memory").n
    planned(subject.kind, subject.params, in_bytes(n), LLAMA, 4000)
    with pytest.raises(ConfigError):
        planned(subject.kind, subject.params, in_bytes(n * 9 // 10), LLAMA, 4000)
