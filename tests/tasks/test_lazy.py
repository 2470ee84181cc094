"""Samples that are made when they are asked for: any order and any slice gives the same ones."""

from collections.abc import Callable

import pytest

from kvbench.engine.errors import ConfigError
from kvbench.tasks.base import Sample
from kvbench.tasks.lazy import Alike
from kvbench.tests.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(None, adds_bos=False)


class Words(Alike):
    """Row i of a dataset has words of i + 1 letters, so that later rows hold fewer of them."""

    def __init__(self, length: int = 200) -> None:
        super().__init__(None, TOKENIZER, {("a", length): 4, ("b", length): 2})

    def least(self, dataset: str) -> int:
        return 2

    def surplus(self, units: int, excess: int) -> int:
        return 0

    def draw(self, name: str, length: int, row: int, units: int) -> Sample:
        return Sample(f"{name}-{row}", f"{'x' * (row + 1)} " * units, "?", max_new_tokens=8)


def test_datasets_take_turns_and_shorter_ones_end_earlier() -> None:
    assert [sample.id for sample in Words()] == ["a-0", "b-0", "a-1", "b-1", "a-2", "a-3"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda samples: [samples[i] for i in range(len(samples))],
        lambda samples: [samples[i] for i in reversed(range(len(samples)))][::-1],
        lambda samples: [samples[i - len(samples)] for i in range(len(samples))],
        lambda samples: samples[::-1][::-1],
    ],
)
def test_a_sample_does_not_depend_on_which_was_asked_for_first(ask: Callable[[Words], list[Sample]]) -> None:
    """A worker that asks only some samples gets the ones that the others have."""
    assert ask(Words()) == list(Words())


def test_samples_are_as_full_as_the_length_allows() -> None:
    for i, sample in enumerate(samples := Words()):
        n_units = len(sample.context.split())
        n_tokens = len(TOKENIZER.encode(sample.context + sample.question)) + 8
        name, length, row = samples.places[i]
        one_more = samples.draw(name, length, row, n_units + 1)
        assert n_tokens <= 200
        if sample.id.endswith("-0"):
            assert len(TOKENIZER.encode(one_more.context + one_more.question)) + 8 > 200


def test_a_length_that_holds_no_sample_is_an_error_with_the_dataset() -> None:
    with pytest.raises(ConfigError, match=r"task\.length=9 is too short for a"):
        Words(9)[0]
    with pytest.raises(IndexError):
        Words()[6]
