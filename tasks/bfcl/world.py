"""BFCL's calls over turns: the package's simulated tools, on which calls are executed, and when a turn is right.

A world is made anew from a row's scenario, and calls are looked up among the public methods of its classes: nothing of
an answer is evaluated. A turn is right by the leaderboard's rules:

    calls were recorded   it makes some; all that its tools remember is then as the recorded ones leave it; the
                          recorded ones' outputs are among those of all calls so far, each as often as it was recorded
    none was recorded     it makes none (upstream has this rule, and its runner of 2026 leaves it out)

Two things are otherwise than upstream. Its scenarios share some records of the long forms (cards, bookings) between
all worlds, so that what one answer buys changes the next one's; here each world has its own. And it writes the names of
its objects into calls, texts included, where they look like one of a tool (`sort (by name)`); here texts stay.

Precision, places and exponents beyond `MOST`, calls beyond `MOST_CALLS`, and products of anything but numbers are
refused: one of them would fill the memory.

Not here: single calls (`checker.py`), what a turn looks like in a prompt (`plans.py`).
"""

import ast
import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import localcontext
from importlib import import_module
from typing import Any

Call = Mapping[str, Any]  # `name` and `arguments`
SOURCE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
CLASSES = {  # that a row may involve, and the module of each
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
STATELESS = "MathAPI"
BOUNDED = ("precision", "decimal_places", "exponent")
MOST = 1000
MOST_CALLS = 64  # of an answer; 34 were recorded in one turn


class World:
    """A row's classes as its scenario sets them up, and the calls that were made of them."""

    def __init__(self, classes: Sequence[str], scenario: Mapping[str, Any], is_long: bool) -> None:
        self.objects: dict[str, Any] = {}
        self.tools: dict[str, Callable[..., Any]] = {}
        for name in classes:
            made = getattr(import_module(f"{SOURCE}.{CLASSES[name]}"), name)()
            if name != STATELESS:
                made._load_scenario(copy.deepcopy(scenario.get(name, {})), long_context=is_long)
            self.objects[name] = copy.deepcopy(made)  # what all scenarios share is this world's own from here on
            methods = inspect.getmembers(self.objects[name], inspect.ismethod)
            self.tools |= {key: method for key, method in methods if not key.startswith("_")}

    def run(self, calls: Sequence[Call]) -> list[str]:
        """The output of each call, as a text."""
        with unchanged_precision():
            return [self.output(call["name"], call["arguments"]) for call in calls]

    def output(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            if name not in self.tools:
                raise NameError(f"name {name!r} is not defined")
            refuse_what_never_ends(name, arguments)
            found = self.tools[name](**copy.deepcopy(dict(arguments)))  # some keep what they are given, and change it
            return found if isinstance(found, str) else written(found)
        except Exception as error:  # a model's arguments may be anything, and its tools say what Python says
            return f"Error during execution: {error}"

    def named(self, text: str) -> dict[str, Any]:
        """A recorded call, which is a line of Python with values as arguments; `ValueError` for any other."""
        try:
            line: Any = ast.parse(text, mode="eval").body
            positional = [ast.literal_eval(one) for one in line.args]
            named = {one.arg: ast.literal_eval(one.value) for one in line.keywords}
            bound = inspect.signature(self.tools[line.func.id]).bind(*positional, **named)
        except (AttributeError, KeyError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            raise ValueError(f"{text!r:.60} is no call of its tools") from None
        return {"name": line.func.id, "arguments": dict(bound.arguments)}


def refuse_what_never_ends(name: str, arguments: Mapping[str, Any]) -> None:
    numbers = [arguments[key] for key in BOUNDED if isinstance(arguments.get(key), int | float)]
    if any(abs(one) > MOST for one in numbers):
        raise ValueError(f"{', '.join(BOUNDED)} beyond {MOST}")
    if name == "multiply" and not all(isinstance(one, int | float) for one in arguments.values()):
        raise TypeError("Both inputs must be numbers")


def written(found: Any) -> str:
    """What a tool returned, as upstream writes it: objects as JSON where that can be, else as Python."""
    if isinstance(found, dict):
        try:
            return json.dumps(found)
        except (TypeError, ValueError):
            pass
    return str(found)


@contextmanager
def unchanged_precision() -> Iterator[None]:
    """Roots and logarithms set the precision of the whole process."""
    import mpmath

    before = mpmath.mp.dps
    try:
        with localcontext():
            yield
    finally:
        mpmath.mp.dps = before


def turn_is_right(
    classes: Sequence[str],
    scenario: Mapping[str, Any],
    is_long: bool,
    before: Sequence[Call],
    recorded: Sequence[Call],
    calls: Sequence[Call],
) -> bool:
    """Whether the calls of a turn do what the recorded ones do, behind those that were recorded `before`."""
    if not recorded or not calls:
        return not recorded and not calls
    theirs, ours = World(classes, scenario, is_long), World(classes, scenario, is_long)
    theirs.run(before)
    outputs = [*ours.run(before), *ours.run(calls[:MOST_CALLS])]
    for output in theirs.run(recorded):
        if output not in outputs:
            return False
        outputs.remove(output)
    return all(alike(ours.objects[name], theirs.objects[name]) for name in classes)


def alike(one: Any, other: Any) -> bool:
    """Whether two objects of a class remember the same; what a class keeps to itself begins with an underscore."""
    theirs = {key: value for key, value in vars(other).items() if not key.startswith("_")}
    try:
        return all(key in vars(one) and vars(one)[key] == value for key, value in theirs.items())
    except RecursionError:  # a folder in itself
        return False
