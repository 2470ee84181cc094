from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvbench.evals.cells import cell_without_task
from kvbench.evals.lines import chosen_of, own_columns, variant_words
from kvbench.evals.prepare import SHOWN, shortened
from kvbench.evals.settings import from_words
from kvbench.results import SampleRow
from kvbench.tasks.base import Sample
from kvbench.tasks.prompt import Prompt


class Words:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


def test_a_line_repeats_the_ends_of_what_was_asked() -> None:
    sample = Sample("one", "a" * 5000 + "the end", "What?", answer_prefix="Answer:", fields={"length": 9})
    short = shortened(sample, Prompt((1, 2), (3,)), Words())
    assert short.context == "… " + "a" * (SHOWN - 7) + "the end"
    fields = own_columns(short)
    assert fields == {"length": 9, "prompt_end": {"context": short.context, "question": "What?", "cue": "Answer:"}}


def test_a_line_repeats_what_stands_around_a_needle_that_its_end_has_not() -> None:
    needle = "The phone number of the office in Rome is 4123082."
    context = f"{'Long ago. ' * 300}{needle} {'Much later. ' * 300}"
    short = shortened(
        Sample("one", context, "Which?", evidence=(f" {needle} ", "not there")), Prompt((1,), (3,)), Words()
    )
    end = own_columns(short)["prompt_end"]
    assert needle not in end["context"] and end["question"] == "Which?"
    assert end["evidence"].count(needle) == 1 and "\n" not in end["evidence"]
    before, behind = end["evidence"].split(needle)
    assert before.startswith("… ") and behind.endswith(" …") and abs(len(before) - len(behind)) < 6


def test_a_prompt_that_is_given_as_tokens_is_read_back() -> None:
    sample = Sample("two", "", "", ids=(1, 2, 3))
    assert shortened(sample, Prompt((1, 2, 3), ()), Words()).context == "1 2 3"


def test_a_line_of_nothing_repeats_nothing() -> None:
    sample = shortened(Sample("three", "", ""), Prompt((), (3,)), Words())
    assert own_columns(sample) == {}


@pytest.mark.parametrize(
    ("method", "reports", "words"),
    [
        ("kivi", [{"key_bits": 4, "value_bits": 4}, {"key_bits": 4, "value_bits": 2}], ["4 bit", "K4 V2 bit"]),
        ("turboquant", [{"preset": "3bit_nc"}], ["3 bit"]),
        ("hf_quantized_cache", [{"bits": 2}, {"bits": 2}], ["2 bit"]),
        ("think", [{"dropped_channels": 24, "thin_tokens": 9}], ["24 channels less"]),
        ("snapkv", [{"window": 16}], []),
    ],
)
def test_a_note_says_what_a_byte_budget_chose_where_the_label_cannot(
    method: str, reports: list[dict[str, Any]], words: list[str]
) -> None:
    """The label is made before any prompt is known, and says no bits then."""
    by_bytes, plain = (cell_without_task(from_words([f"method={method}", key])) for key in ("memory=1/4", "ratio=1"))
    for cell, expected in ((by_bytes, words), (plain, [])):
        names = [variant_words(cell, report) for report in reports]
        rows = [cast(SampleRow, SimpleNamespace(fields={"variant": name})) for name in names]
        assert chosen_of(cell, rows) == expected and all(name.startswith(cell.label) for name in names)
    assert "bit" not in by_bytes.label
