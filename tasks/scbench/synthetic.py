"""Rows in the shape of SCBench's, of any length and without data: contexts with five questions each.

A context is made of units (records, strings, lines, numbers, paragraphs, functions), and `row` fills it with as many as
it is given. Values are drawn, so that no answer can be guessed; the same seed gives the same row.

kv             records; the values of five keys, from five parts of the context
prefix_suffix  random strings; the one with a given beginning and end, which no other has
vt             assignments among noise; the names in one of five chains
mf             numbers; the largest, smallest, second largest, second smallest, median
mixed          passkeys in a text, and what it is about; functions of Python's own modules, and records

Not here: how a row is asked (`prompts.py`), what an answer is worth (`scores.py`).
"""

import ast
import itertools
import random
import statistics
import string
import textwrap
import uuid
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from kvbench.tasks.longbench.embedded import paragraphs, sentences, sources

N_TURNS = 5
N_HOPS = 3  # of a chain of assignments: four names
NOISE = "The boats lie in the harbour and wait for the tide. Nothing moves on the water."
Row = dict[str, Any]


def row(task: str, units: int, number: int, seed: int) -> Row:
    """Row `number` of a task with so many units of context."""
    rng = random.Random(f"{seed} {task} {number}")
    return {"id": number, **GENERATORS[task](rng, max(units, fewest(task)))}


def fewest(task: str) -> int:
    """Units that a context needs for its questions."""
    return 40 if task == "scbench_mf" else 3 * N_TURNS


def spread(n: int, rng: random.Random) -> list[int]:
    """A place from each fifth of n, in no order."""
    edges = [n * i // N_TURNS for i in range(N_TURNS + 1)]
    return rng.sample([rng.randrange(a, b) for a, b in itertools.pairwise(edges)], N_TURNS)


def drawn_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def kv(rng: random.Random, units: int) -> Row:
    pairs = [(drawn_uuid(rng), drawn_uuid(rng)) for _ in range(units)]
    turns = [{"input": f'Key: "{key}"\nValue of this key:', "answer": value} for key, value in chosen(pairs, rng)]
    return {"context": records(pairs), "multi_turns": turns}


def records(pairs: Sequence[tuple[str, str]]) -> str:
    return "{" + ",\n".join(f'"{key}": "{value}"' for key, value in pairs) + "}"


def chosen(things: Sequence[Any], rng: random.Random) -> list[Any]:
    return [things[i] for i in spread(len(things), rng)]


def prefix_suffix(rng: random.Random, units: int) -> Row:
    words = ["".join(rng.choices(string.ascii_lowercase, k=24)) for _ in range(units)]
    ends = [(word[:5], word[-5:]) for word in words]
    asked = [words[i] for i in spread(len(words), rng) if ends.count(ends[i]) == 1]
    turns = [
        {"input": f"The string that begins with {word[:5]} and ends with {word[-5:]} is:", "answer": word}
        for word in asked
    ]
    return {"context": "A list of strings:\n\n" + "\n".join(words), "multi_turns": turns}


def vt(rng: random.Random, units: int) -> Row:
    names = [
        "".join(letters) for letters in zip(*(rng.choices(string.ascii_uppercase, k=60) for _ in range(5)), strict=True)
    ]
    names = list(dict.fromkeys(names))
    values = rng.sample(range(10_000, 100_000), N_TURNS)
    lines, turns = [NOISE] * units, []
    for i, value in enumerate(values):
        chain = names[i * (N_HOPS + 1) : (i + 1) * (N_HOPS + 1)]
        steps = [f"VAR {chain[0]} = {value}"]
        steps += [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(chain)]
        for step, place in zip(steps, sorted(rng.sample(range(units), len(steps))), strict=True):
            lines[place] = f"{lines[place]}\n{step}"
        turns.append({"input": f"All variables that have the value {value}:", "answer": chain})
    return {"context": "Some lines assign variables to each other.\n\n" + "\n".join(lines), "multi_turns": turns}


def mf(rng: random.Random, units: int) -> Row:
    numbers = rng.sample(range(1, max(10_000, 20 * units)), units)
    if units % 2 == 0:
        numbers = numbers[:-1]  # so that the median is one of them
    ranked = sorted(numbers)
    asked = {
        "largest": ranked[-1], "smallest": ranked[0], "second largest": ranked[-2], "second smallest": ranked[1],
        "median": int(statistics.median(ranked)),
    }  # fmt: skip
    turns = [{"input": f"The {name} number is", "answer": number} for name, number in asked.items()]
    return {"context": ", ".join(map(str, numbers)), "multi_turns": rng.sample(turns, len(turns))}


def summary_with_needles(rng: random.Random, units: int) -> Row:
    """A text whose first sentence is what the summary is held against; passkeys stand in its other paragraphs."""
    start = rng.randrange(len(paragraphs()))
    turned = paragraphs()[start:] + paragraphs()[:start]
    # A paragraph of one sentence would say the summary itself.
    start = next(i for i, paragraph in enumerate(turned) if len(sentences(paragraph)) > 1)
    text = [*turned[start:], *turned[:start]][:units]
    first, *others = sentences(text[0])
    text[0] = " ".join(others)
    turns: list[Row] = []
    for place in spread(len(text), rng)[: N_TURNS - 1]:
        name, key = rng.choice(string.ascii_uppercase) + str(len(turns) + 1), rng.randrange(10_000, 100_000)
        text[place] += f" The passkey of gate {name} is {key}."
        turns.append({"input": f"The passkey of gate {name} is", "answer": str(key), "task": "scbench_passkey"})
    turns.insert(2, {"input": "What the text is about, in one sentence:", "answer": first, "task": "scbench_summary"})
    return {"context": "\n\n".join(text), "multi_turns": turns}


@lru_cache(maxsize=1)
def functions() -> tuple[tuple[str, str, str], ...]:
    """Names, first lines of docstrings, and sources without them, of short functions in Python's modules."""
    found: dict[str, tuple[str, str, str]] = {}
    for _, text in sources():
        for node in ast.parse(text).body:
            said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if not isinstance(node, ast.FunctionDef) or not said or not 4 <= len(said.splitlines()[0].split()) <= 20:
                continue
            body = node.body[1:]
            node.body = body or node.body
            code = ast.unparse(node) if body else ""
            if 80 <= len(code) <= 700 and node.name not in found:
                found[node.name] = node.name, said.splitlines()[0], textwrap.dedent(code)
    return tuple(found.values())


def repoqa_and_kv(rng: random.Random, units: int) -> Row:
    """Functions without their docstrings, which describe them, and records between them."""
    pool = rng.sample(functions(), min(len(functions()), max(N_TURNS, units // 2)))
    pairs = [(drawn_uuid(rng), drawn_uuid(rng)) for _ in range(units)]
    asked, keys = chosen(pool, rng), chosen(pairs, rng)
    turns: list[Row] = [
        {
            "input": f"Function: {said}\nRepeat it in a code block:",
            "answer": code,
            "name": name,
            "task": "scbench_repoqa",
        }
        for name, said, code in asked[:3]
    ]
    turns[1:1] = [
        {"input": f'Key: "{key}"\nValue of this key:', "answer": value, "task": "scbench_kv"} for key, value in keys[:2]
    ]
    return {
        "context": "\n\n\n".join(code for _, _, code in pool) + "\n\n" + records(pairs),
        "multi_turns": turns,
        "lang": "python",
        "functions": [[name, code] for name, _, code in pool],
    }


GENERATORS: dict[str, Callable[[random.Random, int], Row]] = {
    "scbench_kv": kv,
    "scbench_prefix_suffix": prefix_suffix,
    "scbench_vt": vt,
    "scbench_mf": mf,
    "scbench_summary_with_needles": summary_with_needles,
    "scbench_repoqa_and_kv": repoqa_and_kv,
}
