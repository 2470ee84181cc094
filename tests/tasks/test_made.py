"""Generated samples of the newer tasks: a script that reads the prompt scores 1.0, a wrong one chance; and the rest
that is asked of every generator.

A solver here is the second implementation of what is right: it knows the prompt alone.
"""

import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml

from kvbench.engine.declared import build_params
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals.settings import choice, load_class
from kvbench.tasks.base import Sample
from kvbench.tasks.calls.damage import KINDS as DAMAGE
from kvbench.tasks.forced import ForcedContinuation
from kvbench.tasks.oolong.made import KINDS
from kvbench.tasks.prompt import encode
from kvbench.tasks.turns.encode import prompt_of
from kvbench.tasks.turns.questions import one_question
from kvbench.tests.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer

REPO = Path(__file__).resolve().parents[2]
SHAPE = ModelShape("tiny", 2, 4, 2, 8, 32768, (0, 1))
TOKENIZER = tiny_tokenizer(CHATML_TEMPLATE, adds_bos=False)
Solver = Callable[[str, random.Random], str]


KNOWN: dict[str, tuple[Any, list[Sample]]] = {}


def made(name: str, tmp_path: Path, seed: int = 0, **given: Any) -> tuple[Any, list[Sample]]:
    """A task's generated samples, which are made once and read by many tests."""
    key = repr((name, seed, given))
    if key not in KNOWN:
        KNOWN[key] = made_anew(name, tmp_path, seed, **given)
    return KNOWN[key]


def made_anew(name: str, tmp_path: Path, seed: int = 0, **given: Any) -> tuple[Any, list[Sample]]:
    tree = yaml.safe_load((REPO / "conf" / "task" / f"{name}.yaml").read_text())
    kind: Any = load_class(choice("task", name, tree))
    values = {key: value for key, value in tree.items() if key != "_target_"} | given
    values |= {"source": "embedded"} if "source" in values and "source" not in given else {}
    task = kind(build_params(kind, values, "task"), str(tmp_path), seed)
    task.check(SHAPE)
    samples = task.samples(TOKENIZER)
    return task, [samples[i] for i in range(len(samples))]


# --- babilong: the facts one behind the other, by another reading of them than the generator's ---------------------

PLACE, PERSON = "bathroom|bedroom|garden|hallway|kitchen|office", "Daniel|John|Mary|Sandra"
FACT = re.compile(rf"(?:(?:{PERSON})|The (?:{PLACE})) [a-z]+[^.]*\.")


def babilong(prompt: str, rng: random.Random) -> str:
    """Ask each state of the world behind each fact, from the last one back."""
    context, _, question = prompt.partition("<context>\n")[2].partition("\n</context>\n\nQuestion: ")
    question = re.split(r"\?", question)[0] + "?"
    facts = FACT.findall(context)
    names = re.findall(rf"\b(?:{PERSON})\b", question)
    places = re.findall(rf"\b(?:{PLACE})\b", question)
    things = re.findall(r"\b(?:apple|football|milk)\b", question)
    if way := re.search(r"north|south|east|west", question):
        flips = dict(zip("north south east west".split(), "south north west east".split(), strict=True))
        for fact in facts:
            first, direction, second = re.findall(rf"{PLACE}|north|south|east|west", fact)
            for a, by, b in ((first, direction, second), (second, flips[direction], first)):
                if (question.endswith("of?") and (a, by) == (places[0], way[0])) or (
                    not question.endswith("of?") and (by, b) == (way[0], places[0])
                ):
                    return b if question.endswith("of?") else a
    if question.startswith("Is "):
        mine = [fact for fact in facts if fact.startswith(names[0])]
        last = mine[-1] if mine else ""
        if "either" in last:
            return "maybe" if places[0] in last else "no"
        return "yes" if last.rstrip(".").endswith(places[0]) and " not " not in last and "longer" not in last else "no"
    gifts = [fact for fact in facts if " to " in fact and re.search("apple|football|milk", fact)]
    if "gave" in question or "give" in question or "received" in question:
        fits = [
            fact for fact in gifts if all(thing in fact for thing in things) and all(name in fact for name in names)
        ]
        if "gave" in question and names:
            fits = [fact for fact in fits if fact.rstrip(".").endswith(names[0])]
        if "did" in question:
            fits = [fact for fact in fits if fact.startswith(names[0])]
        giver, thing, taker = re.findall(rf"{PERSON}|apple|football|milk", fits[-1])
        return {"Who gave": giver, "Who rece": taker, "Who did ": taker}.get(question[:8], thing)
    where, holder, places_of, hands = dict[str, str](), dict[str, str](), dict[str, list[str]](), list[str]()
    for fact in facts:
        who, *rest = re.findall(rf"{PERSON}|{PLACE}|apple|football|milk", fact)
        if rest[0] not in PLACE.split("|"):
            taken = rest[1] if len(rest) == 2 else who
            is_drop = re.search("discarded|dropped|left|put down", fact)
            holder.pop(rest[0], None)
            hands = [one for one in hands if one != rest[0]]
            if not is_drop:
                holder[rest[0]] = taken
                hands.append(rest[0])
        elif "longer" not in fact and "not" not in fact:
            where[who] = rest[0]
        for thing, by in holder.items():
            seen = places_of.setdefault(thing, [])
            if by in where and seen[-1:] != [where[by]]:
                seen.append(where[by])
    if "carrying" in question:
        mine = [thing for thing in hands if holder.get(thing) == names[0]]
        if question.startswith("How"):
            return ["none", "one", "two", "three"][len(mine)]
        return ", ".join(mine) or "nothing"
    if "before" in question:
        seen = places_of[things[0]]
        return seen[len(seen) - seen[::-1].index(places[0]) - 2]
    return where[names[0]] if names else places_of[things[0]][-1]


def babilong_wrong(prompt: str, rng: random.Random) -> str:
    return rng.choice(PLACE.split("|"))


# --- mrcr: the i-th message of this kind -------------------------------------------------------------------------


def pieces_asked(prompt: str) -> tuple[str, list[str], int]:
    """The ten characters, all pieces of the asked kind, and which of them is wanted."""
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    found = re.search(r"Prepend (\w+) to the (\d+)\w\w \(1 indexed\) (.+) about (\w+)\. Do not", turns[-1][1])
    assert found
    asks = rf"write an? {found[3]} about {found[4]}"
    alike = [text for (_, ask), (_, text) in itertools.pairwise(turns) if re.fullmatch(asks, ask)]
    return found[1], alike, int(found[2])


def mrcr(prompt: str, rng: random.Random) -> str:
    start, alike, wanted = pieces_asked(prompt)
    return start + alike[wanted - 1]


def mrcr_wrong(prompt: str, rng: random.Random) -> str:
    """Another one of those that are alike."""
    start, alike, wanted = pieces_asked(prompt)
    return start + alike[wanted % len(alike)]


# --- graphwalks: all ways from the start, of which the shortest one counts ---------------------------------------


def distances(prompt: str) -> tuple[dict[str, int], list[tuple[str, str]], str, int | None]:
    text, _, asked = prompt.rpartition("Operation:")
    lines = text.rpartition("edges:\n")[2].split("\n")
    edges = [(line.split(" -> ")[0], line.split(" -> ")[1]) for line in lines if " -> " in line]
    node = re.findall(r"node (\w+)", asked)[0]
    depth = re.findall(r"depth (\d+)", asked)
    far = {node: 0}
    for _ in edges:
        far_now = {b: far[a] + 1 for a, b in edges if a in far}
        shorter = {b: n for b, n in far_now.items() if n < far.get(b, len(edges) + 1)}
        shorter |= {b: min(far[a] + 1 for a, c in edges if c == b and a in far) for b in shorter}
        if not shorter:
            break
        far |= shorter
    return far, edges, node, int(depth[0]) if depth else None


def graphwalks(prompt: str, rng: random.Random) -> str:
    far, edges, node, depth = distances(prompt)
    found = {a for a, b in edges if b == node and a != node}
    if depth is not None:
        found = {b for b, n in far.items() if n == depth}
    return f"Looking at all edges.\nFinal Answer: [{', '.join(sorted(found))}]\n"


def graphwalks_wrong(prompt: str, rng: random.Random) -> str:
    """Some nodes."""
    nodes = sorted({node for edge in distances(prompt)[1] for node in edge})
    return f"Final Answer: [{', '.join(rng.sample(nodes, 3))}]"


# --- agent_traces: the work once more, from what the prompt shows --------------------------------------------------

ASKED = {
    "as you last read": "current", "What was the first value": "first", "before the one that you know": "before_last",
    "did get_record give last": "last_read", "How many times have you called": "n_calls",
    "How many times have you changed": "n_changes", "Which id did": "step_argument", "back to the first": "restore",
    "last refused change": "reread",
}  # fmt: skip


def history(prompt: str) -> tuple[list[tuple[dict[str, Any], dict[str, Any]]], str]:
    """Calls with their outputs, and the last question."""
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    steps = list[tuple[dict[str, Any], dict[str, Any]]]()
    for (_, text), (_, reply) in itertools.pairwise(turns):
        if text.startswith("<tool_call>") and reply.startswith("<tool_response>"):
            steps.append((json.loads(text.split("\n")[1]), json.loads(reply.split("\n")[1])))
    return steps, turns[-1][1]


def agent(prompt: str, rng: random.Random) -> str:
    steps, question = history(prompt)
    kind = next(kind for words, kind in ASKED.items() if words in question)
    id = ([*re.findall(r"record (\w+)", question), ""])[0]
    name = ([*re.findall(r" (?:of|changed) (\w+) of", question), ""])[0]
    if "puts" in question:
        name = re.findall(r"puts (\w+) of", question)[0]
    known: list[tuple[str, Any]] = []  # how it was learnt, and what
    for call, output in steps:
        asked = call["arguments"]
        if call["name"] == "get_record" and asked["id"] == id and name:
            known.append(("read", output["fields"][name]))
        if call["name"] == "set_field" and (asked["id"], asked["field"]) == (id, name) and output["ok"]:
            known.append(("write", asked["value"]))
    said = [value for _, value in known]
    if kind == "n_calls":
        return str(sum(f"called {call['name']}?" in question for call, _ in steps))
    if kind == "n_changes":
        return str(sum(how == "write" for how, _ in known))
    if kind == "step_argument":
        return steps[int(re.findall(r"number (\d+)", question)[0]) - 1][0]["arguments"]["id"]
    if kind == "reread":
        refused = [call for call, output in steps if output.get("ok") is False]
        return json.dumps({"name": "get_record", "arguments": {"id": refused[-1]["arguments"]["id"]}})
    if kind == "restore":
        arguments = {"id": id, "field": name, "value": said[0]}
        return f"<tool_call>{json.dumps({'name': 'set_field', 'arguments': arguments})}</tool_call>"
    picked = {
        "current": said[-1:], "first": said[:1], "last_read": [value for how, value in known if how == "read"][-1:],
        "before_last": [value for value in said if value != said[-1]][-1:],
    }[kind]  # fmt: skip
    return picked[0] if isinstance(picked[0], str) else json.dumps(picked[0])


def agent_wrong(prompt: str, rng: random.Random) -> str:
    """A value of any record, or the last call again."""
    steps, question = history(prompt)
    if "Give the call" in question:
        return json.dumps(steps[-1][0])
    read = [value for _, output in steps for value in output.get("fields", {}).values()]
    value = rng.choice(read)
    return value if isinstance(value, str) else json.dumps(value)


# --- tool_calls: records found by the words of the request ---------------------------------------------------------


def caller(prompt: str, rng: random.Random) -> str:
    steps, request = history(prompt)
    records = {output["owner"]: output for call, output in steps if call["name"] == "look_up"}
    noun = re.findall(r"the (invoice|machine|parcel|room|tank)", request)[0]
    tool = next(one for one in re.findall(r'"name": "(\w+)"', prompt) if one.endswith(noun))
    own = re.findall(r" of ([A-Z]\w+ [A-Z]\w+(?: [A-Z]\.)?)", request)
    code = records[own[0]][f"{noun}_id"] if own else re.findall(r"[A-Z]-\d{4}", request)[0]
    number = re.findall(r"euros|minutes|grams|seats|litres", request)[0]
    (n,) = re.findall(rf"{number} (\d+)", request) or [records[own[len(own) > 1]][number]]
    call = {"name": tool, "arguments": {f"{noun}_id": code, number: int(n)}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def caller_wrong(prompt: str, rng: random.Random) -> str:
    """A right answer with the values of any record."""
    steps, _ = history(prompt)
    right = json.loads(caller(prompt, rng).split("\n")[1])
    record = rng.choice([output for _, output in steps if {*right["arguments"]} <= {*output}])
    return json.dumps(right | {"arguments": {key: record[key] for key in right["arguments"]}})


# --- oolong: lines counted once more -------------------------------------------------------------------------------


def oolong(prompt: str, rng: random.Random) -> str:
    text, _, question = prompt.rpartition("Among the lines")
    lines = [line.split(" || ") for line in text.splitlines() if line.startswith("Date: ")]
    rows = [(d[6:], u[6:], label[7:].removesuffix("<|im_end|>")) for d, u, _, label in lines]
    asks, _, form = question.partition(" Give your final answer in the form '")
    scope, _, asks = asks.partition(", ")
    if user := re.findall(r"of user (\d+)", scope):
        rows = [row for row in rows if row[1] == user[0]]
    if day := re.findall(r"before (\S+)", scope):
        rows = [row for row in rows if row[0] < day[0]]
    if day := re.findall(r"from (\S+)", scope):
        rows = [row for row in rows if not row[0] < day[0]]
    labels = [label for _, _, label in rows]
    known = "abbreviation|description|entity|human being|location|numeric value"
    named = re.findall(known, asks)

    def often(of: list[str], among: list[str]) -> str:
        return max(among, key=of.count)

    if "least frequent" in asks:
        right = min(named, key=labels.count)
    elif "more common than" in asks:
        a, b = (labels.count(one) for one in named)
        right = "same frequency" if a == b else ("less common", "more common")[a > b]
    elif "most frequent" in asks:
        right = often(labels, labels)
    elif "how many have" in asks:
        right = str(labels.count(named[0]))
    elif "how many labels" in asks:
        least = int(re.findall(r"at least (\d+)", asks)[0])
        right = str(sum(labels.count(one) >= least for one in known.split("|")))
    elif "which user" in asks:
        users = [user for _, user, label in rows if label == named[0]]
        right = often(users, users)
    else:
        days = [day for day, _, _ in rows]
        right = often(days, days)
    return f"Counted all.\n{form.partition(':')[0]}: {right}"


def oolong_wrong(prompt: str, rng: random.Random) -> str:
    return rng.choice(["Label: other", "Answer: 500", "User: 7", "Date: 1999-01-01"])


# --- helmet: the demonstration with most words in common, or the key's line ---------------------------------------


def helmet(prompt: str, rng: random.Random) -> str:
    if "JSON object" in prompt:
        key = prompt.rpartition("Key: ")[2].split("\n")[0]
        return re.findall(rf'"{key}": "([^"]+)"', prompt)[0]
    parts = prompt.split("\n\n")
    query = {*parts[-1].split("\n")[0].split()}
    shown = [part.split("\nlabel: ") for part in parts if "\nlabel: " in part]
    seen: dict[str, set[str]] = {}
    for text, label in shown:
        seen.setdefault(label, set()).update(text.split())
    own = {label: words - {w for other in seen if other != label for w in seen[other]} for label, words in seen.items()}
    return max(own, key=lambda label: len(own[label] & query))


def helmet_wrong(prompt: str, rng: random.Random) -> str:
    return str(rng.randrange(6))


# --- longmemeval: what the user said, session by session ----------------------------------------------------------


def told(prompt: str) -> tuple[str, str, list[tuple[date, str]]]:
    """The question, its subject, and the messages of all sessions with their dates."""
    before, _, question = prompt.rpartition("\nToday is ")
    found = [
        (date(*map(int, day.split("/"))), text)
        for day, session in re.findall(r"Conversation of (\S+) \(\w+\)\n(.*?)(?=\n\n)", f"{before}\n\n", re.DOTALL)
        for text in session.split("\n")
    ]
    subject = re.search(r"What is my (.+)\?|that I bought a (.+)\?|between the day I (.+)\?", question)
    assert subject is not None, question
    return question, next(filter(None, subject.groups())), found


def longmemeval(prompt: str, rng: random.Random) -> str:
    question, subject, messages = told(prompt)
    if "How many times" in question:
        return str(sum(f" I bought a {subject} today." in text for _, text in messages))
    if "How many days" in question:
        days = [day for one in subject.split(" and the day I ") for day, text in messages if f"today I {one}." in text]
        return f"{(days[1] - days[0]).days} days"
    pattern = rf"way, my {re.escape(subject)} (?:is|has changed: now it is) (.+)\."
    values = [match[1] for _, text in messages if (match := re.search(pattern, text))]
    return values[-1] if values else "You did not tell me."


def longmemeval_wrong(prompt: str, rng: random.Random) -> str:
    """One of the values that were told of anybody, or a number."""
    question, subject, messages = told(prompt)
    if "How many" in question:
        return str(rng.randint(2, 5 if "times" in question else 21))
    pattern = rf"{re.escape(subject)} (?:is|has changed: now it is) (.+)\."
    return rng.choice([match[1] for _, text in messages if (match := re.search(pattern, text))])


# --- all of them -------------------------------------------------------------------------------------------------

# By task: what is asked, its solver, a wrong one, and the most that the wrong one may score.
TASKS: dict[str, tuple[dict[str, Any], Solver, Solver, float]] = {
    "babilong": (
        {"datasets": "made", "lengths": ["1k"], "rows": 12, "scoring": "words"}, babilong, babilong_wrong, 0.2,
    ),
    "babilong ": (
        {"datasets": [f"qa{i}" for i in (1, 2, 3, 4, 5, 6, 8, 9, 10)], "lengths": ["1k"], "rows": 12},
        babilong, babilong_wrong, 0.2,
    ),
    "mrcr": ({"needles": [2, 4], "lengths": [8000], "rows": 4}, mrcr, mrcr_wrong, 0.4),
    "mrcr ": (
        {"needles": [2], "lengths": [3000], "words": [10, 30], "questions": 5, "mode": "query_aware", "rows": 3},
        mrcr, mrcr_wrong, 0.5,
    ),
    "graphwalks": ({"lengths": [3000], "rows": 8}, graphwalks, graphwalks_wrong, 0.2),
    "agent_traces": (
        {"lengths": [9000], "rows": 3, "turns": 6, "output_tokens": 60, "mode": "query_aware"}, agent, agent_wrong, 0.3,
    ),
    "tool_calls": (
        {"lengths": [16000], "rows": 3, "turns": 9, "levels": [1, 2, 3, 4], "mode": "query_aware"},
        caller, caller_wrong, 0.2,
    ),
    "oolong": ({"lengths": [6000], "rows": 4, "questions": 7, "mode": "query_aware"}, oolong, oolong_wrong, 0.1),
    "helmet": ({"datasets": "drawn", "lengths": [4000], "rows": 8}, helmet, helmet_wrong, 0.25),
    "longmemeval": (
        {"lengths": [5000], "rows": 8, "mode": "query_aware"}, longmemeval, longmemeval_wrong, 0.3,
    ),
}  # fmt: skip
LENGTHS: dict[str, dict[str, Any]] = {
    "mrcr": {"needles": [2], "lengths": [2000, 6000]},
    "mrcr ": {"needles": [1], "lengths": [2500], "words": [10, 20], "questions": 6},
    "graphwalks": {"lengths": [2000, 5000]},
    "agent_traces": {"lengths": [7000], "output_tokens": 60, "turns": 3},
    "tool_calls": {"lengths": [8000], "turns": 3},
    "oolong": {"lengths": [12000]},
    "helmet": {"datasets": ["icl"], "lengths": [5000]},
    "longmemeval": {"lengths": [7000]},
}


def text_of(sample: Sample) -> str:
    return sample.context + sample.question + sample.answer_prefix


@pytest.mark.parametrize("name", TASKS)
def test_a_script_that_reads_the_prompt_is_right_and_a_wrong_one_is_at_chance(name: str, tmp_path: Path) -> None:
    given, solve, guess, most = TASKS[name]
    task, samples = made(name.strip(), tmp_path, **given)
    rng = random.Random(0)
    scores = [task.score(sample, solve(text_of(sample), rng)) for sample in samples]
    assert scores == [1.0] * len(samples), [s.id for s, score in zip(samples, scores, strict=True) if score != 1]
    wrong = [task.score(sample, guess(text_of(sample), rng)) for sample in samples]
    assert fmean(wrong) <= most
    assert all(task.score(sample, "") <= most for sample in samples if sample.references != ("",))


NASTY = (
    *("", " ", "\n\n", ":", "::", ",", "[]", "[[]]", "{", "\0", "\ud83d", "\u0130\u0131 \u00df", "%s {0} {context}"),
    *("<tool_call>", "<tool_call></tool_call>", "</think>", "```\n```", '{"name": 1, "arguments": {}}'),
    *('{"name": "x", "arguments": "{}"}', '{"name": "x", "arguments": ' + "[" * 3000 + "}"),
    *("Final Answer: []", "Final Answer: [" + "[" * 3000, "label:", "Ranking: 1 > 1 > >", "\\boxed{"),
    *("9" * 5000, "-" * 5000, "a" * 20000, "Answer: 1e999", "Date: 0000-00-00"),
)  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_no_answer_breaks_a_scorer_or_leaves_0_to_1(name: str, tmp_path: Path) -> None:
    task, samples = made(name.strip(), tmp_path, **TASKS[name][0] | {"rows": 1})
    for sample in samples:
        cut = [sample.references[0][:n] for n in (1, 5, 50)]
        for answer in (*NASTY, *cut, " ".join(sample.references) * 3):
            assert 0 <= task.score(sample, answer) <= 1, (sample.id, answer[:40])


def test_of_qa7_the_official_scoring_takes_every_right_answer_but_none(tmp_path: Path) -> None:
    task, samples = made("babilong", tmp_path, datasets=["qa7"], lengths=["1k"], rows=30)
    scores = {True: list[float](), False: list[float]()}
    for sample in samples:
        answer = babilong(text_of(sample), random.Random(0))
        assert answer == sample.references[0]
        scores[answer == "none"].append(task.score(sample, answer))
    assert {*scores[True]} == {0.0} and {*scores[False]} == {1.0}


def test_in_a_dialogue_the_models_own_call_stays_in_place_of_the_right_one(tmp_path: Path) -> None:
    given: dict[str, Any] = {"lengths": [8000], "rows": 1, "turns": 4}
    (fixed, own) = (
        made("tool_calls", tmp_path, **given, mode=mode)[1][0].conversation for mode in ("golden", "dialogue")
    )
    assert fixed and own and fixed.turns[0] == own.turns[0]
    for before, golden, turn in zip(fixed.turns, fixed.turns[1:], own.turns[1:], strict=False):
        assert golden.question == before.references[0] + turn.question and turn.question.startswith("<|im_end|>")


def test_the_last_turn_asks_for_the_first_call_again(tmp_path: Path) -> None:
    task, (sample,) = made("tool_calls", tmp_path, lengths=[8000], rows=1, turns=4)
    first, *later, again = [one_question(sample, i) for i in range(4)]
    assert [one.fields["group"] for one in (first, *later, again)] == ["first", "later", "later", "again"]
    assert first.references == again.references and "once more" in again.question
    score, measures = task.verdict(again, "It is done.")
    assert score == 0 and measures["again"] == 0 and measures["no_call"] == 1 and "first" not in measures


@pytest.mark.parametrize("part", ["icl", "json_kv"])
def test_each_drawn_part_of_helmet_can_be_solved_and_not_guessed(part: str, tmp_path: Path) -> None:
    task, samples = made("helmet", tmp_path, datasets=[part], lengths=[3000], rows=20, classes=4)
    rng = random.Random(1)
    assert fmean(task.score(one, helmet(text_of(one), rng)) for one in samples) == 1.0
    guessed = fmean(task.score(one, str(rng.randrange(4))) for one in samples)
    assert 0.05 <= guessed <= 0.5 if part == "icl" else guessed == 0.0


@pytest.mark.parametrize("problem", ["parents", "bfs"])
def test_each_problem_of_graphwalks_can_be_solved_under_either_reading_but_for_the_first_node(
    problem: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"problems": [problem], "lengths": [2000], "rows": 20}
    task, samples = made("graphwalks", tmp_path, **given)
    card, _ = made("graphwalks", tmp_path, **given, extraction="card")
    for one in samples:
        answer = graphwalks(text_of(one), random.Random(0))
        n = len(one.references)
        assert task.score(one, answer) == 1.0
        assert card.score(one, answer) == pytest.approx((n - 1) / n if n else 0.0)  # a node that is none, in its place


@pytest.mark.parametrize(("length", "rows"), [(2200, 20), (6000, 4)])
def test_each_kind_of_question_of_oolong_can_be_solved_on_short_lists_too(
    length: int, rows: int, tmp_path: Path
) -> None:
    """Short lists have kinds with ties alone, which another one takes the place of."""
    task, samples = made("oolong", tmp_path, lengths=[length], rows=rows, questions=7, mode="query_aware")
    assert len(samples) == 7 * rows
    for one in samples:
        assert task.score(one, oolong(text_of(one), random.Random(0))) == 1.0
    kinds = Counter(one.fields["kind"] for one in samples)
    assert {*kinds} == {*KINDS} and (min(kinds.values()) == rows or length < 3000)


@pytest.mark.parametrize("name", TASKS)
def test_another_seed_makes_other_samples(name: str, tmp_path: Path) -> None:
    few: dict[str, Any] = {**TASKS[name][0], "rows": 1}
    one, other = (made_anew(name.strip(), tmp_path, seed, **few)[1] for seed in (0, 1))
    assert [text_of(sample) for sample in one] != [text_of(sample) for sample in other]


@pytest.mark.parametrize("name", LENGTHS)
def test_a_length_is_filled_to_two_per_cent(name: str, tmp_path: Path) -> None:
    _, samples = made(name.strip(), tmp_path, **LENGTHS[name] | {"rows": 2})
    for sample in samples:
        talk = sample.conversation
        if talk is not None and talk.asking.mode == "independent":  # one question at a time
            room = name.strip() == "mrcr"
            used = max(
                len(TOKENIZER.encode(sample.context + turn.question)) + room * turn.max_new_tokens
                for turn in talk.turns
            )
        else:
            prompt = prompt_of(TOKENIZER, sample, chat="auto", system_prompt="", scope="full_prompt")
            used = len(prompt) + (talk.turns[-1].max_new_tokens if talk else 0)
            used += sample.max_new_tokens if name in ("mrcr", "helmet") else 0
        assert 0.98 * sample.fields["length"] < used <= sample.fields["length"], (sample.id, used)


@pytest.mark.parametrize("name", TASKS)
def test_what_is_compressed_is_the_same_text_under_both_scopes(name: str, tmp_path: Path) -> None:
    _, samples = made(name.strip(), tmp_path, **TASKS[name][0] | {"rows": 1})
    for sample in samples:
        by = {"chat": "auto", "system_prompt": ""}
        whole = encode(TOKENIZER, sample, scope="full_prompt", **by)
        cut = encode(TOKENIZER, sample, scope="context_only", **by)
        ids = [*cut.context_ids, *cut.question_ids]
        assert TOKENIZER.decode(whole.context_ids) == TOKENIZER.decode(ids)
        assert cut.question_ids and not any(one and one in sample.question for one in sample.evidence)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("agent_traces", {}, "agent_traces/airline.jsonl is missing"),
        ("agent_traces", {"mode": "dialogue"}, "task.mode=dialogue is not allowed; use golden, independent or query_"),
        ("agent_traces", {"source": "embedded", "lengths": [33768]}, "more than the 32768 tokens"),
        ("tool_calls", {"lengths": [33768]}, "more than the 32768 tokens"),
        ("tool_calls", {"levels": [5]}, "task.levels"),
        ("tool_calls", {"turns": 1}, "task.again=true needs two turns"),
        ("babilong", {}, "babilong/4k/qa1.json is missing"),
        ("babilong", {"lengths": ["4kb"]}, "task.lengths=4kb is not allowed; use a length like 4k or 1M"),
        ("babilong", {"source": "embedded", "datasets": ["qa11"]}, "and qa10 only, not qa11"),
        ("babilong", {"source": "embedded", "lengths": ["64k"]}, "do not fit the 32768 tokens"),
        ("graphwalks", {}, "graphwalks/short.jsonl is missing"),
        ("graphwalks", {"problems": ["dfs"]}, "no task.problems 'dfs'"),
        ("graphwalks", {"source": "embedded", "lengths": [33768]}, "answers of 512 tokens leave"),
        ("graphwalks", {"source": "embedded", "lengths": [31768], "thinking": True}, "answers of 8192 tokens leave"),
        ("longmemeval", {}, "longmemeval_s_cleaned.json is missing"),
        ("mrcr", {}, "2needle_0.jsonl is missing"),
        ("mrcr", {"needles": [3]}, "no task.needles '3'"),
        ("mrcr", {"lengths": [10]}, "task.lengths=10 is out of range; it is a whole number from 500"),
        ("mrcr", {"needles": [1]}, "task.needles of drawn dialogues"),
        ("mrcr", {"questions": 4}, "task.questions of drawn dialogues"),
        ("mrcr", {"source": "embedded", "questions": 4, "mode": "golden"}, "use independent or query_aware"),
        ("mrcr", {"source": "embedded", "questions": 40}, "a whole number from 1 to 32"),
        ("mrcr", {"source": "embedded", "words": [40, 20]}, "is no range"),
        ("oolong", {}, "oolong/synth.jsonl is missing"),
        ("oolong", {"source": "embedded", "lengths": [33768]}, "do not fit the 32768 tokens"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(
    name: str, given: dict[str, Any], says: str, tmp_path: Path
) -> None:
    source: dict[str, Any] = {} if name == "tool_calls" else {"source": "local"}
    with pytest.raises(ConfigError) as caught:
        made(name, tmp_path, **source | given)
    assert says in str(caught.value)


# --- right answers that are fed -----------------------------------------------------------------------------------

FORCED: dict[str, dict[str, Any]] = {
    "agent_forced": TASKS["agent_traces"][0] | {"rows": 1},
    "graphwalks_forced": TASKS["graphwalks"][0] | {"rows": 3},
    "mrcr_forced": TASKS["mrcr "][0] | {"rows": 1},
}
OF = {"agent_forced": "agent_traces", "graphwalks_forced": "graphwalks", "mrcr_forced": "mrcr"}


def test_the_first_wrong_token_of_a_call_says_what_kind_of_damage_it_is(tmp_path: Path) -> None:
    task, samples = made("agent_forced", tmp_path, **FORCED["agent_forced"] | {"turns": 9})
    sample = next(one for one in samples if one.fields["kind"] == "restore")
    assert sample.forced is not None
    continuation, (right,) = ForcedContinuation(task, sample, sample.forced), sample.references
    kinds: dict[str, str] = dict.fromkeys(DAMAGE, "")
    for wrong in range(1, len(sample.forced)):
        watch = task.watch(sample, continuation, [None])
        for i, token in enumerate(sample.forced[1:], 1):
            logits = torch.zeros(1, len(TOKENIZER))
            logits[0, token - (i == wrong)] = 1.0
            watch.predicted([0], logits)
        (kind,) = [name for name, share in watch.outcomes()[0].fields["measures"].items() if name in DAMAGE and share]
        kinds[kind] += TOKENIZER.decode([sample.forced[wrong]])
    assert right.startswith(kinds["no_call"]) and "<tool_call>" in kinds["no_call"]
    assert kinds["other_calls"] == '"set_field"' and kinds["missing_arguments"] == '"id""field""value"'
    assert kinds["right"] == kinds["unknown_tool"] == "" and kinds["broken_json"].endswith(TOKENIZER.eos_token)
    assert all(str(value) in kinds["wrong_value"] for value in sample.fields["action"]["arguments"].values())


def test_short_values_and_names_of_keys_are_told_apart(tmp_path: Path) -> None:
    task, (sample, *_) = made("agent_forced", tmp_path, **FORCED["agent_forced"] | {"turns": 9})
    call = '<tool_call>\n{"name": "f", "arguments": {"n": 3, "is": true, "to": "n", "no": null}}\n</tool_call>'
    kinds = dict[str, str]()
    for token, kind in zip(TOKENIZER.encode(call), task.partings(TOKENIZER, sample, call), strict=False):
        kinds[kind] = kinds.get(kind, "") + TOKENIZER.decode([token]).strip()
    assert kinds["wrong_value"] == '3true"n"null' and kinds["missing_arguments"] == '"n""is""to""no"'
    assert kinds["other_calls"] == '"f"' and kinds["no_call"] == "<tool_call>"


@pytest.mark.parametrize("name", FORCED)
def test_a_model_that_knows_the_answer_scores_1_and_one_that_knows_nothing_chance(name: str, tmp_path: Path) -> None:
    task, samples = made(name, tmp_path, **FORCED[name])
    _, asked = made(OF[name], tmp_path, **FORCED[name])
    n_words = len(TOKENIZER)
    for sample, one in zip(samples, asked, strict=True):
        assert sample.ids is not None and sample.forced is not None
        prompt, (first, *answer) = text_of(one), sample.forced
        assert TOKENIZER.decode([*sample.ids, first]) == TOKENIZER.decode(TOKENIZER.encode(prompt))
        (right,) = sample.references
        assert all(node in right for node in one.references)
        assert TOKENIZER.decode(answer).removesuffix(TOKENIZER.eos_token) == TOKENIZER.decode(TOKENIZER.encode(right))
        continuation = ForcedContinuation(task, sample, sample.forced)
        watch = task.watch(sample, continuation, [None, None])
        for token in answer:
            knows, guesses = torch.full((2, n_words), -50.0), torch.zeros(n_words)
            knows[0, token], knows[1] = 50.0, guesses.index_fill(0, torch.tensor([(token + 1) % n_words]), 1e-6)
            watch.predicted([0, 1], knows)
        good, bad = watch.outcomes()
        assert good.score == 1.0 and good.fields["measures"]["nll"] < 1e-6
        assert bad.score == 0.0 and bad.fields["measures"]["nll"] == pytest.approx(math.log(n_words), abs=1e-3)
        assert good.fields["n_targets"] == len(answer)
