"""Every scorer with every allocator, and what holds whatever the scores are."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.evals.cells import ask
from kvbench.evals.every import own_class
from kvbench.evals.settings import from_words
from kvbench.methods.allocator import ALLOCATORS, Allocator
from kvbench.methods.combinations import ALLOCATION, COMMAND, Case, refuse
from kvbench.methods.dropping.allocators import (
    best_of,
    globally_best,
    head_mix,
    head_protect,
    n_safe,
    pyramid_within,
    uniform,
)
from kvbench.methods.scoring import ScoringMethod
from kvbench.results.names import known
from kvbench.tests.conformance import (
    METHODS,
    Refused,
    Subject,
    answers,
    chosen_once,
    ours,
    protected_attended,
    same_again,
    source_unaltered,
    variant,
    watched,
    whole_budget,
    within_budget,
)

FREED = {"h2o": {"generated": "on_top"}, "tova": {"evict": "prompt"}, "keydiff": {"evict": "prompt"}}
SCORERS = [name for name in METHODS if known(name) == name and own_class(name).traits.is_scorer]
PAIRS = [(name, allocator) for name in SCORERS for allocator in ALLOCATORS]


def pair(scorer: str, allocator: str) -> Subject:
    """The pair, with parameters with which the scorer drops nothing while it decodes."""
    one = ours(scorer)
    changed = {key: value for key, value in FREED.get(scorer, {}).items() if hasattr(one.params, key)}
    params = replace(one.params, **changed)
    chosen = Allocator(allocator)
    try:
        refuse(ALLOCATION, Case(one.kind, params, allocator=chosen), COMMAND)
    except ConfigError as error:
        assert one.kind.traits.comparable in ("none", "set"), error
        pytest.skip(f"refused: {error}")
    return replace(one, params=params, allocator=chosen)


@pytest.mark.parametrize(("scorer", "allocator"), PAIRS)
def test_every_pair_holds_what_every_method_must(scorer: str, allocator: str) -> None:
    one = pair(scorer, allocator)
    try:
        for check in (chosen_once, within_budget, protected_attended):
            check(one, "0.3")
    except Refused as error:
        pytest.skip(f"{scorer} cannot meet this ratio on the test model: {error}")


@pytest.mark.parametrize("scorer", SCORERS)
def test_the_division_that_needs_all_layers_holds_the_rest_too(scorer: str) -> None:
    one = pair(scorer, "pyramid" if ours(scorer).kind.traits.comparable in ("none", "set") else "global")
    whole_budget(one)
    same_again(one, "0.3")
    source_unaltered(one)


@pytest.mark.parametrize("scorer", SCORERS)
def test_pairs_of_a_scorer_share_its_scores(scorer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = pair(scorer, "uniform")
    subjects = [usual, replace(usual, allocator=Allocator("global", force=True))]
    if usual.kind.traits.comparable == "set":
        subjects[1] = replace(usual, allocator=Allocator("pyramid"))
    kind, made = usual.kind, []
    assert issubclass(kind, ScoringMethod)
    monkeypatch.setattr(kind, "scores", counted(kind.scores, made))
    answers([variant(one, "0.5") for one in subjects])
    assert len(made) == len(set(made)) > 0


def counted(scores, made: list[int]):  # type: ignore[no-untyped-def]
    def of_layer(self: ScoringMethod, layer: int) -> Tensor:
        made.append(layer)
        return scores(self, layer)

    return of_layer


@pytest.mark.parametrize("name", [name for name in ALLOCATORS if name != "uniform"])
def test_a_budget_is_used_to_the_last_token(name: str) -> None:
    """Sums over heads and layers equal the budget, unless layers are a pyramid, whose floors may leave a few."""
    one = replace(ours("snapkv"), allocator=Allocator(name))
    row = watched(one, "0.3").row
    kept = sum(sum(layer.kept_counts()) for layer in row.store.layers.values())
    shape = row.trace.shape
    whole = row.budget.tokens * shape.h_kv * len(shape.attention_layers)
    assert kept <= whole
    if "pyramid" not in name:
        assert kept == whole


# --- free functions, whatever the scores ---


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Tensor], int]:
    """Scores of some layers (heads, n), with or without ties, and tokens per head."""
    layers, heads, n = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 12))
    size, ties = layers * heads * n, draw(st.booleans())
    numbers = (
        draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)) if ties else draw(st.permutations(range(size)))
    )
    table = torch.tensor(numbers, dtype=torch.float32).view(layers, heads, n)
    return list(table), draw(st.integers(0, n))


def mass(scores: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> float:
    """What the best of each head hold, as many as it keeps."""
    rows = zip(torch.cat([*scores]), [n for layer in counts for n in layer], strict=True)
    return float(sum(row.sort(descending=True).values[:n].sum() for row, n in rows))


ALPHAS = st.fractions(0, 1, max_denominator=20)


@given(tables(), ALPHAS)
@settings(max_examples=150)
def test_sums_are_the_budget_and_pooling_keeps_most(table: tuple[list[Tensor], int], alpha: Fraction) -> None:
    scores, c = table
    heads, n = scores[0].shape
    alike = [[c] * heads for _ in scores]
    pooled = [head_mix(layer, c, Fraction(0)) for layer in scores]
    over_all = globally_best(scores, c)
    mixed = [head_mix(layer, c, alpha) for layer in scores]
    safe = [head_protect(layer, c, n_safe(c, 0, alpha)) for layer in scores]
    assert mass(scores, over_all) >= mass(scores, pooled) >= mass(scores, alike)
    for counts in (pooled, mixed, safe):
        assert [sum(layer) for layer in counts] == [heads * c] * len(scores)
    assert sum(sum(layer) for layer in over_all) == heads * c * len(scores)
    assert all(0 <= count <= n for layer in [*mixed, *safe, *over_all] for count in layer)
    floor = n_safe(c, 0, alpha)
    assert all(count >= floor for layer in safe for count in layer)


@given(tables())
@settings(max_examples=60)
def test_what_equals_uniform(table: tuple[list[Tensor], int]) -> None:
    scores, c = table
    heads = scores[0].shape[0]
    for layer in scores:
        assert head_mix(layer, c, Fraction(1)) == [c] * heads
        assert head_protect(layer, c, n_safe(c, 0, Fraction(1))) == [c] * heads
        assert head_mix(layer[:1], c, Fraction(0)) == [c]
    n = scores[0].shape[1]
    assert pyramid_within(n, c, 0, 1, len(scores)) == uniform(c, len(scores))
    distinct = torch.arange(float(n)).expand(heads, n)
    assert all(abs(count - c) <= 1 for count in head_mix(distinct, c, Fraction(0)))


@given(tables(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_heads_carry_their_counts_with_them(table: tuple[list[Tensor], int], chance) -> None:  # type: ignore[no-untyped-def]
    """Without ties, and whatever positive number all scores are multiplied with."""
    (layer, *_), c = table
    layer = layer + torch.arange(float(layer.numel())).view(layer.shape) / 1000
    order = list(range(len(layer)))
    chance.shuffle(order)
    counts = head_mix(layer, c, Fraction(0))
    assert head_mix(layer[order], c, Fraction(0)) == [counts[i] for i in order]
    assert head_mix(layer * 7.5, c, Fraction(0)) == counts


def test_ties_go_to_the_lower_row() -> None:
    assert best_of(torch.ones(3, 4), 5) == [4, 1, 0]
    assert globally_best([torch.ones(2, 2), torch.ones(2, 2)], 1) == [[2, 2], [0, 0]]


def test_protected_tokens_are_safe_first() -> None:
    assert n_safe(c=6, n_protected=4, alpha=Fraction(1, 2)) == 1  # 5 of 10, and 4 of them are protected
    assert n_safe(c=6, n_protected=4, alpha=Fraction(1, 5)) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("method=quest allocator=head_mix", "keeps every token"),
        ("method=pyramidkv allocator=global", "use it with a scorer"),
        ("method=h2o allocator=head_mix", "method.generated=on_top"),
        ("method=snapkv allocator=head_mix allocator.alpha=2", "allocator.alpha=2"),
        ("method=snapkv allocator=pyramid allocator.beta=0", "allocator.beta=0"),
        ("method=snapkv allocator=heads", "head_mix"),
        ("method=snapkv allocator=global allocator.alpha=0.1", "no allocator key 'alpha'"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_a_sentence(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        ask([from_words(words.split())])
    assert "\n" not in str(refused.value)
