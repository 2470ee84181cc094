"""Declared fields: what is read, what is refused, and in which words."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt

from kvbench.engine.budget import Bytes
from kvbench.engine.declared import (
    Count,
    Filled,
    Is,
    Kernel,
    Matches,
    Named,
    Once,
    Part,
    Share,
    Some,
    Window,
    build,
    check,
    reader,
    words,
)
from kvbench.engine.errors import ConfigError

NAMES = ("qasper", "hotpotqa", "gov_report")


@dataclass(frozen=True)
class Params:
    window: Window
    agg: Literal["mean", "max"]
    m: Count | Literal["auto"]


def refused(hint: Any, value: Any) -> str:
    with pytest.raises(ConfigError) as info:
        reader(hint)(value, "method.x")
    return str(info.value)


@pytest.mark.parametrize(
    ("hint", "value", "found"),
    [
        (Count, 3, 3),
        (Count, 3.0, 3),
        (Count | None, None, None),
        (Count | Literal["auto"], "auto", "auto"),
        (Share, "1/64", Fraction(1, 64)),
        (Share, 0.2, Fraction(1, 5)),
        (float, 1, 1.0),
        (str, 12, "12"),
        (Path, "a/b", Path("a/b")),
        (Bytes | Part, "4GB", Bytes(4 * 10**9)),
        (Bytes | Part, "1/4", Fraction(1, 4)),
        (tuple[Count, ...], [1, 2], (1, 2)),
        (tuple[int, int] | None, [1, 2], (1, 2)),
        (Annotated[tuple[str, ...] | str, Some(NAMES, ("all",))], "all", "all"),
        (Annotated[tuple[Count, ...], Once()], [4, 2], (4, 2)),
        (Literal["a", None], None, None),
    ],
)
def test_a_value_is_read_as_its_type(hint: Any, value: Any, found: Any) -> None:
    read = reader(hint)(value, "method.x")
    assert read == found and type(read) is type(found)


@pytest.mark.parametrize(
    ("hint", "value", "sentence"),
    [
        (Count, 0, "method.x=0 is out of range; it is a whole number from 1"),
        (Count, True, "method.x=true is not a whole number"),
        (Count, 2.5, "method.x=2.5 is not a whole number"),
        (Count, 10**19, f"method.x={10**19} is out of range; it is at most {2**63 - 1}"),
        (Window, 0, "method.x=0 is out of range; it is a number of tokens, at least 1"),
        (Kernel, 4, "method.x=4 has no middle; use an odd number of tokens, 1 for no pooling"),
        (Share, "3/2", "method.x=3/2 is out of range; it is a share from 0 to 1"),
        (Part, 0, "method.x=0 is out of range; it is a share above 0 and at most 1"),
        (Annotated[float, Gt(0)], 0, "method.x=0 is out of range; it is a number above 0"),
        (Annotated[float, Ge(0), Lt(1)], 1, "method.x=1 is out of range; it is a number from 0 to below 1"),
        (Annotated[int, Le(8)], 9, "method.x=9 is out of range; it is a whole number of at most 8"),
        (float, float("inf"), "method.x=inf is not a finite number; give one"),
        (Count | Literal["auto"], 0, "method.x=0 is out of range; it is a whole number from 1, or auto"),
        (Count | Literal["auto"], "all", "method.x=all is not a number; use a whole number from 1, or auto"),
        (Count | None, 0, "method.x=0 is out of range; it is a whole number from 1"),
        (Literal["mean", "max", "sum"], "man", "method.x=man is not allowed; use mean, max or sum"),
        (Literal[1, 2], True, "method.x=true is not allowed; use 1 or 2"),
        (str | None, " ", "method.x is empty; give a value, or leave method.x out"),
        (Annotated[str, Filled("a file")], " ", "method.x is empty; give a file"),
        (Annotated[str, Matches(r"\d+k", "4k")], "4", "method.x=4 is not allowed; use 4k"),
        (tuple[int, int], [1], "method.x=[1] has 1 elements; give 2"),
        (tuple[int, ...], 1, "method.x=1 is not a list; write method.x=[1]"),
        (tuple[Count, ...], [1, 0], "method.x=0 is out of range; it is a whole number from 1"),
        (Annotated[tuple[int, ...], Once()], [1, 1], "method.x=[1,1] has something twice; give one or more, each once"),
        (Annotated[tuple[str, ...], Some(("a", "b"))], [], "method.x=[] is empty; give some of a or b, each once"),
        (Annotated[float, Ge(0), Is("a cosine")], -1, "method.x=-1 is out of range; it is a cosine"),
        (Path, "~nobody-here/x", "method.x=~nobody-here/x begins with the home folder of nobody; write the whole path"),
        (Path, "x" * 300, f"method.x={'x' * 300} is too long; names have at most 255 bytes"),
    ],
)
def test_a_refusal_says_key_value_and_what_is_allowed(hint: Any, value: Any, sentence: str) -> None:
    assert refused(hint, value) == sentence


def test_a_misspelt_name_has_near_misses() -> None:
    for hint in (Annotated[str, Named(NAMES)], Annotated[tuple[str, ...] | str, Some(NAMES)]):
        assert "did you mean 'hotpotqa'" in refused(hint, "hotpot_qa")


def test_bytes_or_a_share_are_both_named() -> None:
    assert refused(Bytes | Part, "much") == (
        "method.x=much is not a number; use bytes, like 4GB, or a share above 0 and at most 1"
    )


def test_a_type_that_nothing_can_be_read_as_is_named() -> None:
    assert "is declared as" in refused(complex, 1)


def test_json_is_not_converted() -> None:
    assert reader(float, exact=True)(1, "x") == 1
    assert reader(dict[str, float | None], exact=True)({"a": None}, "x") == {"a": None}
    for hint, value in ((int, 3.0), (str, 3), (list[int], (1,)), (dict[str, int], {1: 1}), (Any, float("nan"))):
        with pytest.raises(ConfigError):
            reader(hint, exact=True)(value, "x")


def test_a_dataclass_has_all_its_keys_and_no_others() -> None:
    whole = {"window": 16, "agg": "mean", "m": "auto"}
    assert build(Params, whole, "method") == Params(16, "mean", "auto")
    for tree, sentence in (
        ({"window": 16, "agg": "mean"}, "method.m is missing; give method.m=… or restore its default in conf/"),
        (whole | {"windw": 1}, "no method key 'windw'; did you mean 'window'? (all: agg, m, window)"),
        (whole | {"m": -1}, "method.m=-1 is out of range; it is a whole number from 1, or auto"),
        (3, "method=3 is a group of keys; set them like method.key=value"),
    ):
        with pytest.raises(ConfigError) as info:
            build(Params, tree, "method")
        assert str(info.value) == sentence


def test_what_is_made_already_is_checked_by_the_same_fields() -> None:
    assert check(Params(16, "mean", 2), "method").m == 2
    with pytest.raises(ConfigError, match=r"method\.window=0 is out of range"):
        check(Params(0, "mean", 2), "method")


def test_what_a_field_takes_can_be_said_in_a_list() -> None:
    number: Any = Annotated[int, Ge(1)]
    said = [words(hint) for hint in (number, Literal["a", "b"], Share, tuple[Count, ...], bool)]
    assert said == [
        "a whole number from 1", "a or b", "a share from 0 to 1", "a list, each a whole number from 1", "true or false",
    ]  # fmt: skip
