"""Actions of an agent: how one is read out of an answer, when two agree, and what of the past a call needs.

A call is `{"kind": "call", "name": …, "arguments": {…}}`. Other answers are of kind `text`, but for those that are no
action: blank ones and those whose first `<tool_call>` holds no call that can be read are `invalid`.

Not here: how a call is read (`tasks/calls/read.py`), traces (`render.py`), made ones (`made.py`).
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.engine.foreign import parse_json
from kvbench.tasks.calls.read import CLOSE, OPEN, bare, call_of, said

Action = Mapping[str, Any]
SHORTEST = 3  # characters of a value that is looked for in the past


def action_of(prediction: str) -> dict[str, Any]:
    """What an answer does: its first call, or text, or nothing."""
    text = said(prediction)
    call = call_of(text.partition(OPEN)[2].partition(CLOSE)[0]) if OPEN in text else None
    if call := call or call_of(bare(text)):
        return {"kind": "call", **call}
    return {"kind": "invalid" if not text or OPEN in text else "text"}


def agree(one: Any, other: Any) -> bool:
    """Numbers by value, texts without blanks around them, lists in order, objects by key; true and 1 differ."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, str) and isinstance(other, str):
        return unicodedata.normalize("NFC", one).strip() == unicodedata.normalize("NFC", other).strip()
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(agree, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(agree(one[key], other[key]) for key in one)
    if isinstance(one, str) or isinstance(other, str):
        return False
    return one == other


@dataclass(frozen=True)
class Agreement:
    action: float  # kind, name and all arguments agree
    name: float
    arguments: float | None  # share of keys with one value; None where no call was recorded


def agreement(found: Action, recorded: Action) -> Agreement:
    if recorded["kind"] != "call":
        is_same = float(found["kind"] == recorded["kind"])
        return Agreement(is_same, is_same, None)
    if found["kind"] != "call" or found["name"] != recorded["name"]:
        return Agreement(0.0, 0.0, 0.0)
    ours, theirs = found["arguments"], recorded["arguments"]
    keys = {*ours, *theirs}
    n = sum(key in ours and key in theirs and agree(ours[key], theirs[key]) for key in keys)
    return Agreement(float(n == len(keys)), 1.0, n / len(keys) if keys else 1.0)


# --- what a recorded action needs ---------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A decision of the recorded agent."""

    index: int  # of its message
    action: Action  # with name and arguments for a call
    n_values: int  # of the call's arguments
    n_grounded: int  # that stand in an earlier message
    oldest: int | None  # the smallest, over values, of the last message where the value stands

    @property
    def is_grounded(self) -> bool:
        return self.n_values > 0 and self.n_grounded == self.n_values


def points_of(messages: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Every assistant message."""
    texts = [text_of(message) for message in messages]
    return [point(messages, texts, i) for i, message in enumerate(messages) if message["role"] == "assistant"]


def point(messages: Sequence[Mapping[str, Any]], texts: Sequence[str], index: int) -> Point:
    action = recorded(messages[index])
    found = list(values(action["arguments"])) if action["kind"] == "call" else []
    last = [max((i for i in range(index) if value in texts[i]), default=None) for value in found]
    grounded = [i for i in last if i is not None]
    return Point(index, action, len(found), len(grounded), min(grounded, default=None))


def recorded(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a message of the trace does."""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
        return {"kind": "call", "name": function["name"], "arguments": arguments}
    return {"kind": "text"}


def text_of(message: Mapping[str, Any]) -> str:
    """All that a message says: content and calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    parts = [message.get("content") or ""]
    for call in calls:
        arguments = call["arguments"]
        parts += [call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)]
    return "\n".join(parts)


def values(arguments: Any) -> Iterator[str]:
    """The leaves of a call's arguments as texts; those too short to be found, true, false and null are left out."""
    if isinstance(arguments, dict | list):
        for one in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from values(one)
    elif arguments is not None and not isinstance(arguments, bool):
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        if len(text) >= SHORTEST:
            yield text
