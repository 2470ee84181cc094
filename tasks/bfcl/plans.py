"""What of a BFCL row is said to the model, message by message, and where it is asked.

Tools are said as chat templates take them: a JSON schema with dict as object, float as number, tuple as array and any
as string, each under its own name, dots included (upstream writes `_` for a dot where a vendor takes none, and tells
local models the types as they stand in its files). What a tool returns is left out.

A turn's calls are asked for in one answer, and stand with their outputs in front of the next turn. A turn is not asked
where a value of its calls stands in an output of the same turn and nowhere before: nobody could know it yet. Tools that
a row holds back are said in the user's words when they come.

Not here: when calls are right (`checker.py`, `world.py`), templates (`tasks/agent_traces/render.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.tasks.agent_traces.actions import text_of, values
from kvbench.tasks.agent_traces.render import Message, spoken
from kvbench.tasks.bfcl.checker import signature
from kvbench.tasks.bfcl.world import World

SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
POLICY = """\
Answer the user with the tools below. Write all calls that the request needs into one answer, in their order, and \
nothing else. Where no tool can do it, or a value that a tool must have is not known, say so without a call."""
NO_TOOL, NO_VALUE = "I have no tool that can do that.", "Something that I need for that is missing. Please tell me."
MORE_TOOLS = "These tools are there from now on:\n{tools}\nPlease do it with them."
DONE = "Done."
NO_CALL = "No tool can do that."  # a right answer where none is wanted


@dataclass(frozen=True)
class Asked:
    """A place where the model is asked."""

    index: int  # of the message that it is to write
    right: str  # an answer that is right
    fields: Mapping[str, Any]
    is_wanted: bool = True  # whether an answer that calls nothing is wrong


@dataclass(frozen=True)
class Plan:
    """A row as messages."""

    policy: str
    tools: Sequence[Mapping[str, Any]]
    messages: Sequence[Message]
    asked: Sequence[Asked]
    fields: Mapping[str, Any]
    n_unknown: int = 0  # turns that are not asked


def tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat templates take it."""
    said = {"name": function["name"], "description": function.get("description", "")}
    return {"type": "function", "function": said | {"parameters": schema(function["parameters"])}}


def schema(declared: Mapping[str, Any]) -> dict[str, Any]:
    """A type of BFCL's as a JSON schema."""
    made = dict(declared)
    if isinstance(kind := declared.get("type"), str):
        made["type"] = SCHEMA_TYPES.get(kind, kind)
    if isinstance(inner := declared.get("properties"), dict):
        made["properties"] = {key: schema(one) if isinstance(one, dict) else one for key, one in inner.items()}
    if isinstance(items := declared.get("items"), dict):
        made["items"] = schema(items)
    return made


def calling(calls: Sequence[Mapping[str, Any]]) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": call} for call in calls]}


# --- one question ------------------------------------------------------------------------------


def of_question(row: Mapping[str, Any], wanted: Sequence[Mapping[str, Any]] | None) -> Plan:
    """A row with one question; `wanted` None: any call is right."""
    messages = [one for one in row["question"][0] if one["role"] != "system"]
    policy = "\n\n".join([POLICY, *(one["content"] for one in row["question"][0] if one["role"] == "system")])
    names = [one["name"] for one in row["function"]]
    tools = {one["name"]: one for one in reversed(row["function"])}  # of two with one name the first
    called = {name for each in wanted or () for name in each}
    fields = {"wanted": wanted, "tools": names, "signatures": [signature(tools[name]) for name in sorted(called)]}
    calls = [{"name": names[0], "arguments": {}}] if wanted is None else [usual_call(one, tools) for one in wanted]
    asked = Asked(len(messages), spoken(calling(calls)) if calls else NO_CALL, {}, bool(calls))
    return Plan(policy, [tool(one) for one in row["function"]], messages, [asked], fields)


def usual_call(wanted: Mapping[str, Mapping[str, Sequence[Any]]], tools: Mapping[str, Any]) -> dict[str, Any]:
    """The wanted call with the first right value of each argument that its tool has."""
    (name, right), *_ = wanted.items()
    parameters = tools[name]["parameters"]
    known = {key: each for key, each in right.items() if key in parameters["properties"] or "" not in each}
    needed = {key: "" for key in parameters["required"] if right.get(key) == [""]}
    return {"name": name, "arguments": needed | {key: usual_value(one) for key, one in firsts(known).items()}}


def firsts(right: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The first right value of each key; what can only be left out is left out."""
    return {key: found for key, each in right.items() if (found := next((one for one in each if one != ""), "")) != ""}


def usual_value(one: Any) -> Any:
    """A right value of an argument, whose objects have a list of right values for each key."""
    if isinstance(one, list):
        return [firsts(each) if isinstance(each, dict) else each for each in one]
    return firsts(one) if isinstance(one, dict) else one


# --- several turns -----------------------------------------------------------------------------


def of_turns(
    row: Mapping[str, Any], recorded: Sequence[Sequence[str]], functions: Sequence[Mapping[str, Any]], is_long: bool
) -> Plan:
    """A row with a user's turns; `functions` are the descriptions of all tools of its classes."""
    world = World(row["involved_classes"], row["initial_config"], is_long)
    turns = [[world.named(call) for call in turn] for turn in recorded]
    later: Mapping[str, Sequence[str]] = row.get("missed_function", {})
    hidden = {name for names in later.values() for name in names}
    by_name = {one["name"]: tool(one) for one in functions}
    messages, asked, names = list[Message](), list[Asked](), [name for name in by_name if name not in hidden]
    n_unknown = 0
    for at, (said, calls) in enumerate(zip(row["question"], turns, strict=True)):
        came = [name for name in later.get(str(at), ()) if name in by_name]
        names = [*names, *came]
        known = [*said] if said else [user(came, by_name)]
        messages += known
        outputs = world.run(calls)
        if is_known(calls, outputs, [text_of(one) for one in messages]):
            right = spoken(calling(calls)) if calls else NO_TOOL if hidden else NO_VALUE
            asked.append(Asked(len(messages), right, {"at": at, "tools": names}, bool(calls)))
        else:
            n_unknown += 1
        if calls:
            messages.append(calling(calls))
            messages += [
                {"role": "tool", "name": call["name"], "content": output}
                for call, output in zip(calls, outputs, strict=True)
            ]
            messages.append({"role": "assistant", "content": DONE})
        else:
            messages.append({"role": "assistant", "content": NO_TOOL if hidden else NO_VALUE})
    fields = {
        "classes": row["involved_classes"], "scenario": row["initial_config"], "is_long": is_long, "recorded": turns,
    }  # fmt: skip
    return Plan(POLICY, [by_name[name] for name in by_name if name not in hidden], messages, asked, fields, n_unknown)


def user(came: Sequence[str], by_name: Mapping[str, Any]) -> Message:
    tools = "\n".join(json.dumps(by_name[name], ensure_ascii=False) for name in came)
    return {"role": "user", "content": MORE_TOOLS.format(tools=tools)}


def is_known(calls: Sequence[Mapping[str, Any]], outputs: Sequence[str], before: Sequence[str]) -> bool:
    """Whether no value of the calls stands in an output of this turn alone."""
    for i, call in enumerate(calls):
        for value in values(call["arguments"]):
            if any(value in output for output in outputs[:i]) and not any(value in text for text in before):
                return False
    return True
