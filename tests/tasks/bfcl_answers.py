"""Answers to BFCL's rows by seeded changes of what is right, for comparisons with the official checkers.

Not here: the comparisons (`test_bfcl_official.py`).
"""

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Calls = list[dict[str, Any]]
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -3, 2.5, 10**400, "", "x", "1", "True", [], {}, [[]], [None], [1, "a"], [{}]),
    *([[1], [2]], {"a": 1}, {"a": [1]}, [{"a": 1}], {"x": {"y": "z"}}, [5], ["", ""]),
)  # fmt: skip


def right_value(rng: random.Random, right: Any) -> Any:
    """One of the right values, with one for each key of an object."""
    if isinstance(right, dict):
        return right_object(rng, right)
    return (
        [right_object(rng, one) if isinstance(one, dict) else one for one in right]
        if isinstance(right, list)
        else right
    )


def right_object(rng: random.Random, right: Mapping[str, Any]) -> dict[str, Any]:
    made = {}
    for key, each in right.items():
        values = each if isinstance(each, list) else [each]
        if values and not ("" in values and rng.random() < 0.5):
            made[key] = right_value(rng, rng.choice([one for one in values if one != ""] or [""]))
    return made


def right_calls(rng: random.Random, wanted: Sequence[Mapping[str, Any]]) -> Calls:
    return [{"name": name, "arguments": right_object(rng, args)} for call in wanted for name, args in call.items()]


# --- changes -----------------------------------------------------------------------------------


def some(rng: random.Random, calls: Calls) -> tuple[dict[str, Any], str] | None:
    """The arguments of a call, and the name of one."""
    with_some = [call["arguments"] for call in calls if call["arguments"]]
    return (arguments := rng.choice(with_some), rng.choice([*arguments])) if with_some else None


def of_value(change: Callable[[random.Random, Any], Any]) -> Callable[[random.Random, Calls, Any], None]:
    def changed(rng: random.Random, calls: Calls, tools: Any) -> None:
        if found := some(rng, calls):
            arguments, key = found
            arguments[key] = deeply(rng, arguments[key], change)

    return changed


def deeply(rng: random.Random, value: Any, change: Callable[[random.Random, Any], Any]) -> Any:
    """The change of a value, or of something inside of it."""
    if isinstance(value, dict) and value and rng.random() < 0.7:
        key = rng.choice([*value])
        return value | {key: deeply(rng, value[key], change)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], deeply(rng, value[at], change), *value[at + 1 :]]
    return change(rng, value)


def other_number(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return rng.choice([float(value % 10**300), str(value % 10**300), value + 1])
    if isinstance(value, float):
        return rng.choice([int(value), str(value), value + 0.5])
    return value


def other_spelling(rng: random.Random, value: Any) -> Any:
    if not isinstance(value, str) or not value:
        return value
    at = rng.randrange(len(value) + 1)
    changes = (value.upper(), value.lower(), f" {value} ", value[:at] + rng.choice(" ,./-_*^'\"!") + value[at:])
    return rng.choice([*changes, value.replace(" ", "_"), value.replace("'", '"'), value[::-1], value.replace(",", "")])


def other_shape(rng: random.Random, value: Any) -> Any:
    shapes = [[value], {"a": value}, str(value), json.dumps(value)]
    if isinstance(value, list):
        shapes += [value[::-1], [*value, *value[:1]], value[:-1], []]
    if isinstance(value, dict):
        shapes += [{**value, "more": 1}, dict([*value.items()][1:]), {key.upper(): one for key, one in value.items()}]
    return rng.choice(shapes)


def drop(rng: random.Random, calls: Calls, tools: Any) -> None:
    if found := some(rng, calls):
        del found[0][found[1]]


def more(rng: random.Random, calls: Calls, tools: Any) -> None:
    if calls:
        known = [key for tool in tools for key in tool["parameters"]["properties"]]
        rng.choice(calls)["arguments"][rng.choice([*known, "more"])] = rng.choice(ODD)


def another_tool(rng: random.Random, calls: Calls, tools: Any) -> None:
    if calls:
        names = [tool["name"] for tool in tools]
        rng.choice(calls)["name"] = rng.choice([*names, "other", rng.choice(names).replace(".", "_"), ""])


def another_order(rng: random.Random, calls: Calls, tools: Any) -> None:
    rng.shuffle(calls)


def twice(rng: random.Random, calls: Calls, tools: Any) -> None:
    if calls:
        calls.insert(rng.randrange(len(calls) + 1), copy.deepcopy(rng.choice(calls)))


def fewer(rng: random.Random, calls: Calls, tools: Any) -> None:
    if calls:
        del calls[rng.randrange(len(calls))]


def repeated(rng: random.Random, calls: Calls, tools: Any) -> None:
    """One call in another's place."""
    if calls:
        calls[rng.randrange(len(calls))] = copy.deepcopy(rng.choice(calls))


CHANGES = (
    of_value(other_number), of_value(other_spelling), of_value(other_spelling), of_value(other_shape),
    of_value(lambda rng, value: rng.choice(ODD)), drop, more, another_tool, another_order, twice, fewer, repeated,
)  # fmt: skip


def changed_calls(rng: random.Random, calls: Calls, tools: Any) -> Calls:
    """Right calls after none to two changes."""
    calls = copy.deepcopy(calls)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        rng.choice(CHANGES)(rng, calls, tools)
    return calls
