from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbench.engine.errors import ConfigError
from kvbench.engine.passes.trace import Trace
from kvbench.methods.allocator import Allocator
from kvbench.methods.combinations import ALLOCATION, COMMAND, Case, refuse
from kvbench.methods.ranking.random import BASE, FIRST, SECOND, STEP, Random, drawn, marks
from kvbench.tests.vectors import Check, differs, first, load, request, row_of, trace_of

PARAMS = Random.Params("head", 0, 0, 0, "counter")
GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "random").glob("*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """kvpress' numbers bit for bit, and what they keep."""
    meta, x = load(path)
    params = replace(PARAMS, seed=meta["seed"], draws="kvpress")
    trace = trace_of(torch.zeros(1, meta["Hk"], meta["S"], 4), torch.zeros(1, meta["Hk"], meta["S"], 4), meta["Hk"])
    row = row_of(Random, params, trace, request(tokens=meta["n_kept"]))
    problem = first(
        differs("numbers", row.numbers(0), x["score"]),
        differs("kept", row.store[0].positions().sort(-1).values, x["kept_idx"]),
    )
    return [(path.stem, problem)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_random_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None]


def a_trace(s: int = 60) -> Trace:
    return trace_of(torch.zeros(1, 2, s, 4), torch.zeros(1, 2, s, 4), 4)


def test_each_token_stays_as_often_as_the_budget_says_and_pairs_are_independent() -> None:
    n_seeds, s, n = 4000, 20, 5
    of_tokens = marks(range(s), s)
    kept = torch.zeros(n_seeds, s)
    for seed in range(n_seeds):
        kept[seed, drawn(of_tokens, seed, 0, 0).topk(n).indices] = 1
    share = n / s
    assert (kept.mean(0) - share).abs().max() < 4 * (share * (1 - share) / n_seeds) ** 0.5
    pairs = (kept.T @ kept / n_seeds)[~torch.eye(s, dtype=torch.bool)]
    both = share * (n - 1) / (s - 1)
    assert (pairs - both).abs().max() < 4.5 * (both * (1 - both) / n_seeds) ** 0.5


def test_numbers_are_even_from_0_to_1_and_hardly_ever_equal() -> None:
    numbers = drawn(marks(range(100_000), 100_000), 1, 2, 3)
    assert numbers.dtype == torch.float32 and 0 <= numbers.min() and numbers.max() < 1
    bins = numbers.mul(10).long().bincount(minlength=10)
    assert (bins - 10_000).abs().max() < 400 and len(numbers.unique()) > 99_500


def test_a_tokens_number_hangs_on_the_seed_and_the_prompt_up_to_it_on_layer_and_head_and_on_nothing_else() -> None:
    ids = [5, 6, 7, 5, 5, 9]
    one = drawn(marks(ids, 6), 0, 0, 0)
    assert torch.equal(one[:4], drawn(marks([*ids[:4], 1, 2, 3], 7), 0, 0, 0)[:4])
    others = [drawn(marks([4, *ids[1:]], 6), 0, 0, 0), *(drawn(marks(ids, 6), *at) for at in ((1, 0, 0), (0, 1, 0)))]
    for other in [*others, drawn(marks(ids, 6), 0, 0, 1)]:
        assert (one != other).all()


def test_numbers_are_those_of_whole_numbers_modulo_two_to_the_64() -> None:
    """As the page of the method says it, in Python's integers; so they are no matter of a device."""
    ids, size = [5, 0, 49151, 7], 2**64

    def mix(x: int) -> int:
        for shift, factor in ((30, FIRST), (27, SECOND)):
            x = (x ^ x >> shift) * factor % size
        return x ^ x >> 31

    found, running = [], 0
    for j, token in enumerate(ids, 1):
        running = (running + (token + 1) * BASE**j) % size
        mark = (j * STEP % size) ^ mix(running)
        found.append((mix(mark ^ mix((9 * STEP + 3 * FIRST + 1 * SECOND + BASE) % size)) >> 40) * 2.0**-24)
    assert drawn(marks(ids, 4), 9, 3, 1).tolist() == found


@pytest.mark.parametrize(("per", "n_sets"), [("head", 4), ("layer", 2), ("prompt", 1)])
def test_heads_and_layers_have_sets_of_their_own_or_share_them(per: str, n_sets: int) -> None:
    row = row_of(Random, replace(PARAMS, per=per), a_trace(), request(tokens=20))
    numbers = [row.numbers(layer).expand(1, 2, -1)[0] for layer in (0, 1)]
    assert len({tuple(head.tolist()) for layer in numbers for head in layer}) == n_sets
    assert len({tuple(sorted(head)) for head in row.store[0].positions()[0].tolist()}) == (2 if per == "head" else 1)


def test_the_ends_stay_inside_the_budget_and_shrink_where_it_is_small() -> None:
    params = replace(PARAMS, n_sink=4, window=8)
    for n, n_first, n_last in ((40, 4, 8), (8, 2, 2), (1, 0, 0)):
        row = row_of(Random, params, a_trace(), request(tokens=n))
        for head in row.store[0].positions()[0].tolist():
            assert len(set(head)) == n and {*range(n_first), *range(60 - n_last, 60)} <= set(head)


def test_kvpress_draws_for_every_head() -> None:
    with pytest.raises(ConfigError, match=r"use method\.per=head with it"):
        replace(PARAMS, draws="kvpress", per="prompt")


def test_random_numbers_are_not_pooled() -> None:
    with pytest.raises(ConfigError, match="those of Random tokens do not compare"):
        refuse(ALLOCATION, Case(Random, PARAMS, allocator=Allocator("head_mix")), COMMAND)
