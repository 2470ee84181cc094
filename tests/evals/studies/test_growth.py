"""Which methods grow with a conversation: the table has every method, and what it says of a setting is true."""

from kvbench.evals.studies.growth import growth, table
from kvbench.evals.studies.hardware import method_of
from kvbench.results.names import own_methods


def test_the_table_has_every_method_and_why_it_is_refused() -> None:
    rows = table()
    assert all(f"| {name} | " in rows for name in own_methods()) and "refused: " in rows


def test_a_sentence_that_names_a_setting_is_true_of_it() -> None:
    for name, setting in (
        ("quest", "method.page_generated=true"), ("loki", "method.generated=compete"),
        ("double_sparsity", "method.generated=compete"),
    ):  # fmt: skip
        (rules, params), (_, changed) = method_of(name), method_of(name, [setting])
        assert setting in growth(name)[1] and not rules.traits_of(params).grows and rules.traits_of(changed).grows
