from typing import Any

from evals.lines import SHOWN, lost_line, shortened
from evals.tasks.base import Sample
from evals.tasks.prompt import Prompt


class Words:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


def test_a_line_repeats_the_ends_of_what_was_asked() -> None:
    sample = Sample("one", "a" * 5000 + "the end", "What?", answer_prefix="Answer:", fields={"length": 9})
    short = shortened(sample, Prompt((1, 2), (3,)), Words())
    assert short.context == "… " + "a" * (SHOWN - 7) + "the end"
    fields = lost_line(short, Prompt((1, 2), (3,)), "oom", "no memory").fields
    assert fields == {"length": 9, "prompt_end": {"context": short.context, "question": "What?", "cue": "Answer:"}}


def test_a_prompt_that_is_given_as_tokens_is_read_back() -> None:
    sample = Sample("two", "", "", ids=(1, 2, 3))
    assert shortened(sample, Prompt((1, 2, 3), ()), Words()).context == "1 2 3"


def test_a_line_of_nothing_repeats_nothing() -> None:
    sample = shortened(Sample("three", "", ""), Prompt((), (3,)), Words())
    assert lost_line(sample, Prompt((), (3,)), "oom", "no memory").fields == {}
