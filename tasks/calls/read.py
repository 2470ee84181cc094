"""Calls that an answer makes, read out of the frames that models write them in.

`<tool_call>` blocks, one for each call; else a JSON object or a list of them that is the whole answer, bare, fenced or
behind Llama's tag, or one on each line. What stands before `</think>` does not count. JSON inside of prose is no call.

Not here: whether calls are right (each task), what is wrong with others (`damage.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.engine.foreign import NoJson, parse_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAG = "<|python_tag|>"
FENCE = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)
BEGINS = re.compile(r"""(?:```\w*\s*)?\[?\s*\{\s*["']?(?:name|type|function)\b""")  # of what was to become a call


@dataclass(frozen=True)
class Answer:
    """The calls of an answer, and whether something of it was to become one that cannot be read."""

    calls: Sequence[dict[str, Any]]  # each with `name` and `arguments`
    is_broken: bool


def read_calls(prediction: str) -> Answer:
    text = said(prediction)
    found: Sequence[dict[str, Any] | None] = bare_calls(bare(text))
    if OPEN in text and not found:
        found = [call_of(block.partition(CLOSE)[0]) for block in text.split(OPEN)[1:]]
    calls = [call for call in found if call is not None]
    return Answer(calls, len(calls) < len(found) or (not found and bool(BEGINS.match(text.removeprefix(TAG)))))


def said(prediction: str) -> str:
    """What an answer says after it has thought."""
    return prediction.rpartition("</think>")[2].strip()


def bare(text: str) -> str:
    """What stands in a fence or behind a tag, where that is the whole answer."""
    fenced = FENCE.fullmatch(text)
    return fenced[1] if fenced else text.removeprefix(TAG)


def bare_calls(text: str) -> list[dict[str, Any]]:
    """The calls of a text that is nothing else; none where one of its parts is no call."""
    whole = parsed(text)
    parts = whole if isinstance(whole, list) else [whole] if whole is not None else map(parsed, text.splitlines())
    found = [as_call(part) for part in parts]
    return [call for call in found if call is not None] if None not in found else []


def call_of(text: str) -> dict[str, Any] | None:
    """The call that a JSON object says, under either name of its arguments, which may be JSON in a text."""
    return as_call(parsed(text))


def as_call(found: Any) -> dict[str, Any] | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    arguments = parsed(arguments) if isinstance(arguments, str) else arguments
    return {"name": found["name"], "arguments": arguments} if isinstance(arguments, dict) else None


def parsed(text: str) -> Any:
    try:
        return parse_json(text.strip())
    except NoJson:
        return None
