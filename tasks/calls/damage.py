"""What is wrong with an answer that should call tools: the first of these that is true of it.

right               what was wanted
no_call             nothing in it is a call
broken_json         a call was begun, and cannot be read
unknown_tool        a tool that there is not
other_calls         tools that there are, but others, fewer or more than were wanted; any where none was
missing_arguments   an argument that must be there is missing or empty
wrong_value         all that must be there is there, and something of it is wrong, or there is more

Not here: how calls are read (`read.py`), which are right (each task).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.tasks.calls.read import Answer

KINDS = ("right", "no_call", "broken_json", "unknown_tool", "other_calls", "missing_arguments", "wrong_value")


@dataclass(frozen=True)
class Wanted:
    """A call that is wanted, and which of its arguments must be there with something in them."""

    name: str
    needs: Collection[str]

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> "Wanted":
        """A recorded call, whose arguments are all wanted that are not empty."""
        return cls(call["name"], [key for key, value in call["arguments"].items() if not is_empty(value)])


def damage(answer: Answer, wanted: Sequence[Wanted], tools: Collection[str], *, is_right: bool) -> str:
    """The kind of damage of an answer among `tools`."""
    names = [call["name"] for call in answer.calls]
    if is_right:
        return "right"
    if answer.is_broken:
        return "broken_json"
    if wanted and not names:
        return "no_call"
    if any(name not in tools for name in names):
        return "unknown_tool"
    if sorted(names) != sorted(one.name for one in wanted):
        return "other_calls"
    given = sorted(answer.calls, key=lambda call: call["name"])
    pairs = zip(given, sorted(wanted, key=lambda one: one.name), strict=True)
    lacks = any(is_empty(call["arguments"].get(key)) for call, one in pairs for key in one.needs)
    return "missing_arguments" if lacks else "wrong_value"


def is_empty(value: Any) -> bool:
    """Whether an argument has nothing in it; 0 and false are something."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def shares(kind: str | None) -> dict[str, float | None]:
    """The measures of one answer: a run's means are the shares of each kind. None: no call was wanted of it."""
    return {} if kind is None else {name: float(name == kind) for name in KINDS}
