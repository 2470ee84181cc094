"""Whether calls are those that a BFCL row wants: names, types and values, by the leaderboard's rules.

A wanted call has, for each argument, a list of values that are right; an empty text in it says that the argument may
be left out. A signature is what the rules need of a tool's description. They have habits that a reader would not guess:

    texts      are compared without case, blanks and `,./-_*^`, and with ' for "; inside of lists and objects, too
    float      takes a whole number; integer takes no float; true is no number, but equals 1 inside of a list or object
    other type a value of the type that the first right value has is taken whatever the signature says, and must equal
               one of them as it stands
    array      elements have the declared type or that of a right value's first element, one level deep; where the
               argument may be left out, any type, and an empty list is right, too
    dict       each key has its own list of right values, which are compared as they stand but for texts
    parallel   each wanted call, in order, takes the first of the given ones that fits it

Where the official checker raises, an answer is wrong here: a whole number that is too large for a float, an element
that is no object in a list of objects, and what rows of one's own may hold (a right value that is no list, an argument
that its tool does not describe).

Not here: calls over turns (`world.py`), how calls are read (`tasks/calls`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

Call = Mapping[str, Any]  # `name` and `arguments`
Signature = Mapping[str, Any]
TYPES = {
    **{"string": str, "any": str, "integer": int, "float": float, "boolean": bool, "dict": dict},
    **{"array": list, "tuple": list},
}
LISTS = ("array", "tuple")
IGNORED = str.maketrans("'", '"', " ,./-_*^")


def signature(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's name, which arguments it must have, and the type of each: its own, and that of a list's elements."""
    parameters = function["parameters"]
    types = {
        name: [one["type"], one["items"]["type"] if one["type"] in LISTS else None]
        for name, one in parameters["properties"].items()
    }
    return {"name": function["name"], "required": list(parameters["required"]), "types": types}


def are_right(calls: Sequence[Call], wanted: Sequence[Mapping[str, Any]], tools: Sequence[Signature]) -> bool:
    """Whether the calls are those wanted, each an object of one tool's name and the right values of its arguments."""
    if len(calls) != len(wanted):
        return False
    left = list(calls)
    for each in wanted:
        name, values = next(iter(each.items()))
        tool = next((one for one in tools if one["name"] == name), None)
        found = next((i for i, call in enumerate(left) if tool and is_right(call, values, tool)), None)
        if found is None:
            return False
        del left[found]
    return True


def is_right(call: Call, values: Mapping[str, Any], tool: Signature) -> bool:
    """Whether one call is the wanted one."""
    arguments, types = call["arguments"], tool["types"]
    return (
        call["name"] == tool["name"]
        and all(name in arguments for name in tool["required"])
        and all(name in types and name in values for name in arguments)
        and all(name in arguments or "" in values[name] for name in values)
        and all(fits(value, types[name], values[name]) for name, value in arguments.items())
    )


def fits(value: Any, declared: Sequence[str | None], right: Sequence[Any]) -> bool:
    """Whether a value of an argument has a type that is taken, and is one of those that are right."""
    outer, inner = declared
    expected = TYPES[str(outer)]
    if outer == "float" and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            return False
    usual = first_type(right)
    if type(value) is not expected:
        return type(value) is usual and value in right
    if inner is not None and not elements_fit(value, TYPES[inner], right):
        return False
    if usual not in (None, expected):
        return value in right
    if expected is dict:
        return object_fits(value, right)
    if expected is list and inner == "dict":
        return any(
            isinstance(one, list | str)
            and len(one) == len(value)
            and all(object_fits(found, [wanted]) for found, wanted in zip(value, one, strict=True))
            for one in right
        )
    if expected is list:
        return plain_list(value) in [plain_list(one) for one in right if isinstance(one, list | str)]
    if expected is str:
        return plain(value) in [plain(one) for one in right if isinstance(one, str)]
    return value in right


def first_type(right: Sequence[Any]) -> type | None:
    """The type of the first value that is more than the mark of what may be left out."""
    return next((type(one) for one in right if one != ""), None)


def elements_fit(value: Sequence[Any], expected: type, right: Sequence[Any]) -> bool:
    """Whether all elements have the declared type, or that of some right list's first one."""
    return any(
        not isinstance(one, list) or all(type(each) in (expected, first_type(one)) for each in value) for one in right
    )


def object_fits(value: Any, right: Sequence[Any]) -> bool:
    """Whether an object has keys and values of one of the right ones, each key with its own list of right values."""
    return isinstance(value, dict) and any(
        isinstance(one, dict)
        and all(key in one and plain(found) in plain_list(one[key]) for key, found in value.items())
        and all(key in value or (isinstance(each, list | str) and "" in each) for key, each in one.items())
        for one in right
    )


def plain(value: Any) -> Any:
    """A text as it is compared; any other value as it is."""
    return value.translate(IGNORED).lower() if isinstance(value, str) else value


def plain_list(values: Any) -> list[Any]:
    return [plain(one) for one in values] if isinstance(values, list | str) else []
