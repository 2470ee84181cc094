"""Each parameter of each method and prefill refuses what its field doesn't allow, in a sentence that says what is.

Not here: rules between two parameters (the tests of each method), how fields are read (`engine/test_declared.py`).
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt

from kvbench.engine.declared import Filled, Named, Odd, Whole, build, hints_of, listed, reader, word, words
from kvbench.engine.errors import ConfigError
from kvbench.evals.overrides import CONF, config_groups
from kvbench.evals.settings import Choice, load_class
from kvbench.tests.test_conf import composed

FREE = {"gate", "heads", "marker"}  # texts that name a file or stand in an answer
UNBOUNDED = {
    "layers",
    "dms.threshold",
    "append_only.threshold",
    "attention_matching.drop_below",
}  # a rule between two, logarithms


FILES = {
    (group, name): (CONF / group / f"{name}.yaml").read_text()
    for group in ("method", "prefill")
    for name in config_groups()[group]
}
OWN = [(group, name) for (group, name), text in FILES.items() if "_target_: kvbench." in text]  # those of no preset


def declared(group: str, name: str) -> tuple[type, dict[str, Any]]:
    """The dataclass of a file's parameters, and its defaults."""
    choice: Choice = getattr(composed(f"{group}={name}"), group)
    kind: Any = load_class(choice)
    return kind.Params if group == "method" else kind, dict(choice.params)


FIELDS = [(group, name, key) for group, name in OWN for key in declared(group, name)[1]]
every_field = pytest.mark.parametrize(("group", "name", "key"), FIELDS)


def parts(hint: Any) -> list[Any]:
    """The types of a union, or the type."""
    return [*get_args(hint)] if get_origin(hint) in (Union, UnionType) else [hint]


def wrong(hint: Any) -> Iterator[tuple[Any, str]]:
    """Values just beyond what a type allows, and words that the refusal must have."""
    for part in parts(hint):
        origin, args = get_origin(part), get_args(part)
        if origin is Literal:
            yield (max(args) + 1 if all(type(one) is int for one in args) else f"{args[0]}_"), listed(args)
        elif origin is tuple:
            yield from (([value], "") for value, _ in wrong(args[0]))
        elif origin is Annotated:
            yield from ((value, says) for one in args[1:] for value, says in beyond(one, part))
            yield from wrong(args[0])
        elif part in (int, bool):
            yield "some", ""
        elif part in (float, Fraction):
            yield "some", "number"


def beyond(said: Any, hint: Any) -> Iterator[tuple[Any, str]]:
    allowed = words(hint)
    bound: Any
    match said:
        case Ge(bound):
            yield bound - 1, allowed
        case Gt(bound) | Lt(bound):
            yield bound, allowed
        case Le(bound):
            yield bound + 1, allowed
        case Odd():
            yield 2, "odd"
        case Whole():
            yield "5/2", allowed
        case Named(names):
            yield from (("nonesuch", name) for name in names)
        case Filled(what):
            yield [] if get_origin(get_args(hint)[0]) is tuple else "", what
        case _:
            return


def takes(hint: Any, value: Any) -> bool:
    try:
        reader(hint)(value, "x")
    except ConfigError:
        return False
    return True


@every_field
def test_what_a_field_does_not_allow_is_refused_with_key_value_and_words(group: str, name: str, key: str) -> None:
    kind, params = declared(group, name)
    types = parts(hints_of(kind)[key])
    for value, says in wrong(hints_of(kind)[key]):
        if any(takes(one, value) for one in types):
            continue  # it is what another type of a union allows
        with pytest.raises(ConfigError) as info:
            build(kind, {**params, key: value}, group)
        said = str(info.value)
        (given,) = value if isinstance(value, list) and value else [value]
        assert f"{group}.{key}" in said and says in said and (not given or word(given) in said), said


@every_field
def test_every_number_has_a_range_and_every_text_its_choices(group: str, name: str, key: str) -> None:
    types = parts(hints_of(declared(group, name)[0])[key])
    if {key, f"{name}.{key}"}.isdisjoint(UNBOUNDED):
        assert {int, float, Fraction}.isdisjoint(types), f"{name}.{key} has no range"
    assert str not in types or key in FREE, f"{name}.{key} has no choices"


@every_field
def test_choices_stand_beside_the_default(group: str, name: str, key: str) -> None:
    line = "".join(re.findall(rf"^{key}: .*$", FILES[group, name], re.MULTILINE))  # none where another file has it
    for one in parts(hints_of(declared(group, name)[0])[key]):
        for choice in get_args(one) if get_origin(one) is Literal else ():
            assert not line or re.search(rf"\b{word(choice)}\b", line), f"{choice} is not said"
