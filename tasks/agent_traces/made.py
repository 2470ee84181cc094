"""Work that an agent might have done on records, and questions on what it has seen; truths by replaying it.

An event is a tool, its arguments and its output. Records change behind the agent's back, too, so that what it has seen
and what is there differ: questions are on the former.

Not here: how events become messages (`render.py`).
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]
Question = Mapping[str, Any]
GROUPS = {
    **dict.fromkeys(("current", "last_read"), "fresh"),
    **dict.fromkeys(("first", "before_last", "restore"), "stale"),
    **dict.fromkeys(("n_calls", "n_changes", "step_argument", "reread"), "count"),
}
KINDS = tuple(GROUPS)
CALLS = ("restore", "reread")  # whose answers are calls
FIELDS: dict[str, tuple[Any, ...]] = {
    "status": ("queued", "packed", "shipped", "returned", "held"),
    "priority": (1, 2, 3, 4, 5),
    "owner": ("Mara", "Bo", "Tariq", "Ines", "Olek"),
    "paid": (True, False),
}
WEIGHT = "weight_g"  # the fifth field, a number
TOOLS = (
    ("get_record", "Read a record.", {"id": "string"}),
    ("set_field", "Change a field of a record.", {"id": "string", "field": "string", "value": "any"}),
    ("list_records", "List the ids of all records.", {"order_by": "string"}),
)
POLICY = """\
You keep the records of a small depot with the tools below. Each step is one call of a tool, and its output follows. \
Records can change without you. From time to time you are asked what you have seen so far; reply with the value alone, \
or with the call alone where a call is asked for."""
GO_ON = "Thank you. Nothing was called for that; go on."
WORDING = {
    "current": "What is the value of {field} of record {id}, as you last read it or wrote it with success?",
    "first": "What was the first value of {field} of record {id} that you saw or wrote with success?",
    "before_last": "What was the value of {field} of record {id} before the one that you know now?",
    "last_read": "Which value of {field} of record {id} did get_record give last, whatever you wrote since?",
    "n_calls": "How many times have you called {tool}?",
    "n_changes": "How many times have you changed {field} of record {id} with success?",
    "step_argument": "Which id did your call number {step} have, counted from 1?",
    "restore": "Which call puts {field} of record {id} back to the first value that you saw or wrote? Give the call.",
    "reread": "Your last refused change was of which record? Give the call that reads this record.",
}


# --- what is right -----------------------------------------------------------------------------


@dataclass
class Seen:
    """What the agent knows of one field of one record."""

    values: list[Any] = field(default_factory=list[Any])  # read, or written with success
    read: list[Any] = field(default_factory=list[Any])
    at: list[int] = field(default_factory=list[int])  # the event of each of `values`
    read_at: list[int] = field(default_factory=list[int])


def seen_of(events: Sequence[Event]) -> dict[tuple[str, str], Seen]:
    found: dict[tuple[str, str], Seen] = {}
    for i, event in enumerate(events):
        arguments, output = event["arguments"], event["output"]
        if event["tool"] == "get_record":
            for name, value in output.get("fields", {}).items():
                one = found.setdefault((arguments["id"], name), Seen())
                one.values.append(value)
                one.at.append(i)
                one.read.append(value)
                one.read_at.append(i)
        elif event["tool"] == "set_field" and output.get("ok"):
            one = found.setdefault((arguments["id"], arguments["field"]), Seen())
            one.values.append(arguments["value"])
            one.at.append(i)
    return found


def same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def answer(events: Sequence[Event], question: Question) -> Any:
    """The right value or call; None where there is none."""
    return answer_at(events, question)[0]


def answer_at(events: Sequence[Event], question: Question) -> tuple[Any, int | None]:
    """The right value or call, and the oldest event that it needs."""
    kind = question["kind"]
    if kind == "n_calls":
        calls = [i for i, event in enumerate(events) if event["tool"] == question["tool"]]
        return len(calls), min(calls, default=None)
    if kind == "step_argument":
        at = question["step"] - 1
        return events[at]["arguments"].get("id"), at
    if kind == "reread":
        refused = [
            i for i, event in enumerate(events) if event["tool"] == "set_field" and not event["output"].get("ok")
        ]
        if not refused:
            return None, None
        return {"name": "get_record", "arguments": {"id": events[refused[-1]]["arguments"]["id"]}}, refused[-1]
    where = {"id": question["id"], "field": question["field"]}
    if kind == "n_changes":
        changes = [
            i for i, event in enumerate(events)
            if event["tool"] == "set_field" and event["output"].get("ok")
            and all(event["arguments"][key] == value for key, value in where.items())
        ]  # fmt: skip
        return len(changes), min(changes, default=None)
    known = seen_of(events).get((question["id"], question["field"]), Seen())
    if not known.values or (kind == "last_read" and not known.read):
        return None, None
    if kind == "last_read":
        return known.read[-1], known.read_at[-1]
    if kind == "current":
        return known.values[-1], known.at[-1]
    if kind == "restore":
        return {"name": "set_field", "arguments": {**where, "value": known.values[0]}}, known.at[0]
    if kind == "first":
        return known.values[0], known.at[0]
    unlike = [i for i, value in enumerate(known.values) if not same(value, known.values[-1])]
    return (known.values[unlike[-1]], known.at[unlike[-1]]) if unlike else (None, None)


def superseded(events: Sequence[Event], question: Question) -> list[Any]:
    """Values that were right before: an answer to what is `current` may hold none of them."""
    if question["kind"] != "current":
        return []
    known = seen_of(events)[question["id"], question["field"]].values
    return [value for i, value in enumerate(known) if not same(value, known[-1]) and value not in known[:i]]


def score(prediction: str, value: Any, outdated: Sequence[Any]) -> float:
    """1 where the first line with something in it holds the value as a word, and no outdated one."""
    lines = prediction.rpartition("</think>")[2].strip().split("\n")
    return float(stands_in(value, lines[0]) and not any(stands_in(one, lines[0]) for one in outdated))


def stands_in(value: Any, line: str) -> bool:
    """Whether a value is there by itself, not as part of a word, a number or an id."""
    text = value if isinstance(value, str) else json.dumps(value)
    return bool(re.search(rf"(?<![\w.\-])(?<!\d,){re.escape(text)}(?!\w)(?![.,]\d)", line, re.IGNORECASE))


# --- draws -------------------------------------------------------------------------------------


def draw_events(rng: random.Random, n: int, n_records: int) -> list[Event]:
    """The first `n` steps of work: more of them begin as fewer do."""
    world: dict[str, dict[str, Any]] = {}
    while len(world) < n_records:
        record = {name: rng.choice(values) for name, values in FIELDS.items()} | {WEIGHT: rng.randint(100, 9999)}
        world[f"{rng.choice('ABCDEF')}{rng.randint(1000, 9999)}"] = record
    events, ids = list[Event](), list(world)
    for _ in range(n):
        id = rng.choice(ids)
        if rng.random() < 0.12:  # somebody else
            name = rng.choice((*FIELDS, WEIGHT))
            world[id][name] = another(rng, name, world[id][name])
        chance = rng.random()
        if chance < 0.6:
            output = {"id": id, "fields": dict(world[id])}
            events.append({"tool": "get_record", "arguments": {"id": id}, "output": output})
        elif chance < 0.9:
            name = rng.choice((*FIELDS, WEIGHT))
            value = another(rng, name, world[id][name])
            is_refused = rng.random() < 0.2
            if not is_refused:
                world[id][name] = value
            output = {"ok": False, "error": "locked"} if is_refused else {"ok": True}
            events.append(
                {"tool": "set_field", "arguments": {"id": id, "field": name, "value": value}, "output": output}
            )
        else:
            order = rng.choice((*FIELDS, WEIGHT))
            listed = sorted(world, key=lambda id: (str(world[id][order]), id))
            events.append({"tool": "list_records", "arguments": {"order_by": order}, "output": {"ids": listed}})
    return events


def another(rng: random.Random, name: str, value: Any) -> Any:
    known = FIELDS.get(name) or tuple(rng.randint(100, 9999) for _ in range(3))
    return rng.choice([one for one in known if not same(one, value)])


def draw_question(rng: random.Random, events: Sequence[Event], kind: str) -> Question | None:
    """A question of this kind to which no outdated value is right; None where there is none."""
    known = seen_of(events)
    if kind == "n_calls":
        return {"kind": kind, "tool": rng.choice(TOOLS)[0]}
    if kind == "step_argument":
        steps = [i for i, event in enumerate(events, start=1) if "id" in event["arguments"]]
        return {"kind": kind, "step": rng.choice(steps)} if steps else None
    if kind == "reread":
        return {"kind": kind} if answer(events, {"kind": kind}) else None
    fits = [where for where, seen in known.items() if is_telling(kind, seen)]
    if not fits:
        return None
    id, name = rng.choice(fits)
    return {"kind": kind, "id": id, "field": name}


def is_telling(kind: str, seen: Seen) -> bool:
    """Whether a stale value, or the newest one, is wrong here."""
    has_changed = any(not same(value, seen.values[-1]) for value in seen.values)
    if kind == "last_read":
        return bool(seen.read) and not same(seen.read[-1], seen.values[-1])
    if kind in ("first", "restore"):
        return not same(seen.values[0], seen.values[-1])
    return has_changed


def draw_some(rng: random.Random, events: Sequence[Event], kinds: Sequence[str]) -> Question | None:
    """A question of the first of these kinds that there is one of."""
    return next((found for kind in kinds if (found := draw_question(rng, events, kind))), None)


def asks(question: Question) -> str:
    return WORDING[question["kind"]].format(**question)
