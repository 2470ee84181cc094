"""What rows of BFCL's files must hold, so that they can be asked and scored.

Not here: reading of a file (`tasks/rows.py`), what is made of a row (`plans.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.tasks.bfcl.checker import LISTS, TYPES
from kvbench.tasks.bfcl.world import CLASSES
from kvbench.tasks.rows import BadRow, Fields, Id, Text, Texts

QUESTION: Fields = {"id": Id, "question": list[Any], "function": list[Any]}
TURNS: Fields = {"id": Id, "question": list[Any], "initial_config": dict[str, Any], "involved_classes": Texts}
ANSWER: Fields = {"id": Id, "ground_truth": list[Any]}
FUNCTION: Fields = {"name": Text, "description": str, "parameters": dict[str, Any]}


def check_question(row: Mapping[str, Any], wanted: Sequence[Any] | None) -> None:
    """Raise `BadRow` for a question that cannot be asked, or whose wanted calls (None: any) cannot be compared."""
    if len(row["question"]) != 1:
        raise BadRow(f"field 'question' has {len(row['question'])} turns, not one")
    check_said(row["question"][0], ("system", "user", "assistant"))
    if not row["question"][0] or row["question"][0][-1]["role"] != "user":
        raise BadRow("field 'question' does not end with the user's words")
    if not row["function"] and wanted != []:
        raise BadRow("field 'function' is empty")
    for function in row["function"]:
        check_function(function)
    names = [function["name"] for function in row["function"]]
    for call in wanted or ():
        if not isinstance(call, dict) or len(call) != 1 or next(iter(call)) not in names:
            raise BadRow("a right answer is no object with the name of one of the row's tools")
        (arguments,) = call.values()
        if not isinstance(arguments, dict) or not all(isinstance(one, list) for one in arguments.values()):
            raise BadRow("a right answer has no list of right values for each argument")
        for one in (value for right in arguments.values() for value in right):
            for each in one if isinstance(one, list) else [one]:
                if isinstance(each, dict) and not all(isinstance(right, list) for right in each.values()):
                    raise BadRow("an object of a right answer has no list of right values for each key")


def check_said(messages: Any, roles: Sequence[str]) -> None:
    if not isinstance(messages, list) or not all(
        isinstance(one, dict) and one.get("role") in roles and isinstance(one.get("content"), str) for one in messages
    ):
        raise BadRow(f"field 'question' has a message without a text or without a role of {', '.join(roles)}")


def check_function(function: Any) -> None:
    """A tool with a name and the type of each argument."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise BadRow("field 'function' has a tool without a name")
    name, parameters = function["name"], function.get("parameters")
    if not isinstance(function.get("description", ""), str) or not isinstance(parameters, dict):
        raise BadRow(f"tool {name!r:.60} has no description or no parameters")
    required, properties = parameters.get("required"), parameters.get("properties")
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise BadRow(f"tool {name!r:.60} has no list of required arguments")
    if not isinstance(properties, dict):
        raise BadRow(f"tool {name!r:.60} has no properties")
    for key, declared in properties.items():
        if kind_of(declared) not in TYPES or (
            kind_of(declared) in LISTS and kind_of(declared.get("items")) not in TYPES
        ):
            raise BadRow(f"argument {key!r:.60} of tool {name!r:.60} has no type of {', '.join(TYPES)}")


def kind_of(declared: Any) -> str | None:
    kind = declared.get("type") if isinstance(declared, dict) else None
    return kind if isinstance(kind, str) else None


def check_turns(row: Mapping[str, Any], turns: Sequence[Any]) -> None:
    """Raise `BadRow` for turns that do not belong together; calls and scenario are tried out afterwards."""
    if not turns or len(row["question"]) != len(turns):
        raise BadRow(f"field 'question' has {len(row['question'])} turns, and the right answers {len(turns)}")
    later = row.get("missed_function", {})
    if not isinstance(later, dict) or not all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in later.values()
    ):
        raise BadRow("field 'missed_function' has no list of names for each turn")
    for at, said in enumerate(row["question"]):
        check_said(said, ("user",))
        if not said and str(at) not in later:
            raise BadRow(f"turn {at} of field 'question' says nothing")
    if not all(isinstance(calls, list) and all(isinstance(call, str) for call in calls) for calls in turns):
        raise BadRow("a turn's right answer is no list of calls")
    if strange := next((name for name in row["involved_classes"] if name not in CLASSES), None):
        raise BadRow(f"field 'involved_classes' names {strange!r:.60}; there are {', '.join(CLASSES)}")
