from typing import Any

from evals.lines import own_columns
from evals.prepare import SHOWN, shortened
from tasks.base import Sample
from tasks.prompt import Prompt


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
