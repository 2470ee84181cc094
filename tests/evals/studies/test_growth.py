"""Which methods grow with a conversation: what the docs say is what the code does."""

from pathlib import Path

from kvbench.evals.studies.growth import growth, table
from kvbench.evals.studies.hardware import method_of

REPO = Path(__file__).resolve().parents[3]


def test_the_docs_have_the_table_as_methods_have_it() -> None:
    assert table() in (REPO / "docs" / "turns.md").read_text(), (
        "python -m kvbench.evals.studies.growth was not run again"
    )


def test_a_sentence_that_names_a_setting_is_true_of_it() -> None:
    for name, setting in (
        ("quest", "method.page_generated=true"), ("loki", "method.generated=compete"),
        ("double_sparsity", "method.generated=compete"),
    ):  # fmt: skip
        (rules, params), (_, changed) = method_of(name), method_of(name, [setting])
        assert setting in growth(name)[1] and not rules.traits_of(params).grows and rules.traits_of(changed).grows
