from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.budget import (
    Budget,
    BudgetRequest,
    exact,
    find_bytes,
    key_bytes,
    parse_fraction,
    resolve,
    show,
    split,
    token_bytes,
)
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.methods.dropping.h2o import H2O
from kvbench.methods.retrieving.oracle import Oracle
from kvbench.tests.vectors import Check, differs, first, load

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "pqcache").glob("budget_*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """The integers of the budget rules, row by row; columns of methods that are not here are theirs to check."""
    _, x = load(path)
    names = [str(name) for name in x["columns"]]
    return [
        (f"{path.stem}/{i}", check_row(dict(zip(names, map(int, row), strict=True))))
        for i, row in enumerate(x["table"])
    ]


def check_row(row: dict[str, int]) -> str | None:
    shape = ModelShape("vectors", 1, row["Hk"], row["Hk"], row["d_h"], 1 << 20, (0,))
    asked = BudgetRequest(
        Fraction(row["ratio_num"], row["ratio_den"]), None, Fraction(row["comm_num"], row["comm_den"])
    )
    budget, compensated = (resolve(asked, row["s"], drops=False), resolve(asked, row["s"], drops=True))
    parts = split(budget.tokens, row["sinks"])
    oracle = Oracle.Params("group_sum", row["sinks"], Fraction(1, 2), "inside", "official", "renormalise")
    official = Oracle.plan_for(oracle, budget, shape)
    h2o = H2O.Params(row["sinks"], Fraction(1, 2), "sum", "inside", "official")
    shares = H2O.plan_for(h2o, budget, shape)
    ours = {
        "B": budget.tokens, "n_sink": parts.n_sink, "local": parts.n_local, "k": parts.k, "B_C": compensated.tokens,
        "key_bytes": key_bytes(shape, row["s"]), "kv_bytes_per_token": token_bytes(shape),
        "extra_bytes": find_bytes(shape, budget), "off_oracle_topk": official.k, "off_oracle_local": official.n_window,
        "off_oracle_attended": official.n_sink + official.k + official.n_window, "off_h2o_heavy": shares.n_heavy,
        "off_h2o_recent": shares.n_recent, "off_h2o_attended": shares.tokens + 1,
    }  # fmt: skip
    return first(*(differs(name, value, row[name]) for name, value in ours.items()))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_budgets_agree_with_the_table(path: Path) -> None:
    cases = run_vectors(path)
    assert cases
    assert [problem for _, problem in cases] == [None] * len(cases)


def ask(ratio: str | None, tokens: int | None = None, comm: str = "1/64", compensate: bool = True) -> BudgetRequest:
    return BudgetRequest(None if ratio is None else Fraction(ratio), tokens, Fraction(comm), compensate)


def test_ratios_are_exact() -> None:
    assert resolve(ask("0.29"), 100, False).tokens == 29  # floor(0.29 * 100) is 28 in floating point


def test_a_number_of_tokens_never_exceeds_the_prompt() -> None:
    assert resolve(ask(None, 500), 100, False) == Budget(100, 100, 100, Fraction(1, 64), Fraction(1))


@given(
    st.fractions(Fraction(1, 100), 1, max_denominator=1000), st.fractions(0, 1, max_denominator=256),
    st.integers(100, 200_000), st.integers(1, 128), st.integers(1, 16),
)  # fmt: skip
def test_compensation_never_costs_more_than_it_replaces(
    ratio: Fraction, comm: Fraction, s: int, d_h: int, h_kv: int
) -> None:
    """Bytes of the extra tokens stay within the bytes of finding, by less than one token and the floor of the ratio."""
    shape = ModelShape("any", 1, h_kv, h_kv, d_h, 1 << 20, (0,))
    request = BudgetRequest(ratio, None, comm)
    plain, more = resolve(request, s, drops=False), resolve(request, s, drops=True)
    extra = (more.tokens - plain.tokens) * token_bytes(shape)
    assert extra <= comm * key_bytes(shape, s) + token_bytes(shape)
    if more.tokens < s:
        assert extra > comm * key_bytes(shape, s) - 2 * token_bytes(shape)


@given(st.integers(1, 10_000), st.integers(0, 64), st.fractions(0, 1, max_denominator=64))
def test_a_split_adds_up_to_its_budget(tokens: int, n_sink: int, share: Fraction) -> None:
    parts = split(tokens, n_sink, share)
    assert parts.n_sink + parts.n_local + parts.k == tokens
    assert min(parts.n_sink, parts.n_local, parts.k) >= 0


@given(st.fractions(Fraction(1, 200), 1), st.fractions(Fraction(1, 200), 1), st.integers(200, 5000), st.booleans())
def test_more_budget_never_keeps_less(a: Fraction, b: Fraction, s: int, drops: bool) -> None:
    small, large = sorted((a, b))
    request = [BudgetRequest(ratio, None, Fraction(1, 64)) for ratio in (small, large)]
    assert resolve(request[0], s, drops).tokens <= resolve(request[1], s, drops).tokens


def test_only_dropping_methods_that_want_it_are_compensated() -> None:
    assert resolve(ask("0.1"), 1280, drops=False).tokens == 128
    assert resolve(ask("0.1"), 1280, drops=True).tokens == 138
    assert resolve(ask("0.1", compensate=False), 1280, drops=True).tokens == 128


def test_the_whole_prompt_is_full_attention() -> None:
    assert resolve(ask("1"), 77, drops=False).attends_all
    assert not resolve(ask("0.99"), 77, drops=False).attends_all


@pytest.mark.parametrize(
    ("ratio", "tokens", "comm", "key"), [("0.2", 9, "0", "both given"), (None, None, "0", "neither")]
)
def test_impossible_budgets_name_their_key(ratio: str | None, tokens: int | None, comm: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        ask(ratio, tokens, comm)


def test_a_ratio_that_leaves_no_token_is_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(ConfigError, match="the smallest ratio for it is 1/10"):
        resolve(ask("0.05"), 10, False)


@pytest.mark.parametrize(
    ("text", "value"), [("1/64", Fraction(1, 64)), ("0.2", Fraction(1, 5)), (0.1, Fraction(1, 10)), (1, Fraction(1))]
)
def test_fractions_are_read_as_written(text: str | float, value: Fraction) -> None:
    assert parse_fraction(text, "comm") == value


@pytest.mark.parametrize("text", ["abc", "1/0", "", "nan"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a number"):
        parse_fraction(text, "comm")


@given(st.fractions(0, 1))
def test_shown_fractions_can_be_read_back(value: Fraction) -> None:
    assert parse_fraction(show(value), "ratio") == value == parse_fraction(exact(value), "ratio")


@pytest.mark.parametrize(("given", "shown"), [("1/8", "1/8"), ("1/16", "1/16"), ("0.2", "0.2"), ("1/3", "1/3")])
def test_a_budget_is_said_as_it_was_given_and_runs_are_named_as_before(given: str, shown: str) -> None:
    request = BudgetRequest(parse_fraction(given, "ratio"), None, Fraction(1, 64))
    assert request.label() == f"ratio={shown}"
    assert [exact(Fraction(n)) for n in ("1/8", "1/16", "0.2", "1/3", "1/64")] == [
        *("0.125", "0.0625", "0.2", "1/3", "1/64")
    ]


def test_a_budget_of_prompt_and_answer_may_attend_to_all_of_the_prompt_and_still_evict() -> None:
    of_prompt = resolve(ask("1"), 77, drops=True)
    assert of_prompt.attends_all and of_prompt.never_evicts
    together = replace(of_prompt, n_answer=40)
    assert together.attends_all and not together.never_evicts
    assert replace(together, tokens=77 + 40).never_evicts


def test_only_the_current_token_is_free_where_the_answer_counts() -> None:
    of_prompt = resolve(ask("0.5"), 100, drops=False)
    assert [of_prompt.allowance(t) for t in (1, 2, 30)] == [51, 52, 80]
    assert [replace(of_prompt, n_answer=40).allowance(t) for t in (1, 2, 30)] == [51, 51, 51]
