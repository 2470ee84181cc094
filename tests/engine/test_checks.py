from dataclasses import dataclass

import pytest

from kvbench.engine.checks import each_one_of, whole_number, whole_numbers
from kvbench.engine.errors import ConfigError


@dataclass(frozen=True)
class Params:
    agg: str = "mean"
    m: int | str | None = "auto"
    page_len: int = 16


def test_the_first_choice_that_is_not_allowed_is_named() -> None:
    each_one_of("method", Params(), agg=("mean", "max"), page_len=(8, 16))
    with pytest.raises(ConfigError, match=r"method\.page_len=16 is not allowed; use 1 or 2"):
        each_one_of("method", Params(), agg=("mean", "max"), page_len=(1, 2))


def test_a_number_below_the_lowest_is_named_and_words_are_left_to_others() -> None:
    whole_numbers("method", Params(), m=1, page_len=16)
    whole_numbers("method", Params(m=None), m=1)
    with pytest.raises(ConfigError, match=r"prefill\.page_len=16 is out of range; it is a whole number from 17"):
        whole_numbers("prefill", Params(), m=1, page_len=17)
    with pytest.raises(ConfigError, match=r"method\.m=0 is out of range; it is a whole number from 1"):
        whole_number("method.m", 0, 1)
