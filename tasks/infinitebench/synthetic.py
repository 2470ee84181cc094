"""InfiniteBench's synthetic tasks, generated at any size: rows with the fields of the published files.

A size is a number of units: noise lines, records, numbers or functions. `PUBLISHED` holds those of the 128k files,
which the tests compare with what is known of them. How many units fill a length is tried out
(`tasks/lazy.py`). Sentences come from the data folder's synthetic_strings.json, or are our own.

Differs     from the authors' scripts: every row has a generator of its own, so that a row does not depend on the
            others; code is printed with the ids that their public script draws, not the wider ones of the file.
"""

import random
import re
import statistics
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Strings = Mapping[str, Any]

NOISE = "The river runs slowly. The boats wait. The wind turns. Nothing else moves. So the day goes by.\n"
OWN_STRINGS: Strings = {  # the keys of synthetic_strings.json
    "passkey": {
        "noise": NOISE,
        "ans": "The access code is {key}. Keep it in mind. {key} is the access code.\n",
        "question": "What is the access code?",
    },
    "number_string": {
        "noise": NOISE,
        "ans": "The row of digits is {key}. Keep it in mind. {key} is the row of digits.\n",
        "question": "What is the row of digits?",
    },
    "kv_retrieval": {
        "context_head": "Records:\n{",
        "pair": '"{key}": "{value}"',
        "pair_separator": ", ",
        "context_tail": "}",
        "input": '\nKey: "{key}"\nValue of this key: ',
    },
    "math": {
        "inputs": {
            quantity: f"Answer with one number. The {quantity} of the list is: "
            for quantity in (
                *("largest number", "second largest number", "third largest number"),
                *("smallest number", "second smallest number", "third smallest number", "median"),
            )
        },
        "find_prefix": "Look for {quantity} of this list.",
    },
    "code_run": {
        "context_head": "\nThe file functions_module.py:\n\n",
        "function": "def func_{id}(x):\n    return {body}\n\n",
        "input": "What does func_{id}({x}) return?",
    },
}

QUANTITIES = (
    *("largest number", "second largest number", "third largest number"),
    *("smallest number", "second smallest number", "third smallest number", "median"),
)
DEPTHS = (2, 4, 6, 8, 10)  # calls from a first function to a last one
STEPS = {326: 6, 652: 12, 1305: 22, 2610: 45, 5220: 90, 10440: 180}  # noise lines: published step
REPEATS = 10  # keys per position in the published files
POOL = 1.2  # records that are drawn for each one that a row keeps
HIGHEST = 99  # of numbers in math_find and math_calc


@dataclass(frozen=True)
class Place:
    """A row's place among all, and where its randomness comes from."""

    row: int
    n_rows: int
    seed: str

    def rng(self) -> random.Random:
        return random.Random(f"infinitebench {self.seed} {self.row}")

    def of(self, kinds: tuple[Any, ...]) -> Any:
        """The kind of this row when all rows are shared out in equal runs."""
        return kinds[self.row * len(kinds) // self.n_rows]


@dataclass(frozen=True)
class Generator:
    make: Callable[[Strings, Place, int], dict[str, Any]]
    n_units: int  # of the published 128k file
    n_rows: int
    fewest: int  # units that a row needs


def key_position(place: Place, n_noise: int) -> int:
    """Noise lines before the key line: even steps through the file, several keys at each one."""
    step = STEPS.get(n_noise, max(1, round(n_noise / 58)))
    positions = range(0, n_noise + 1, step)
    if place.n_rows == len(positions) * REPEATS:
        return positions[place.row // REPEATS]
    return place.row * n_noise // max(1, place.n_rows - 1)


def hidden_key(words: Mapping[str, Any], place: Place, n_noise: int, key: str) -> dict[str, Any]:
    """Noise lines with one line that says the key twice."""
    before = key_position(place, n_noise)
    line = words["ans"].replace("{key}", key)
    context = words["noise"] * before + line + words["noise"] * (n_noise - before)
    return {"context": context, "input": words["question"], "answer": key, "position": before}


def digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def passkey(strings: Strings, place: Place, n_noise: int) -> dict[str, Any]:
    return hidden_key(strings["passkey"], place, n_noise, digits(place.rng(), 5))


def number_string(strings: Strings, place: Place, n_noise: int) -> dict[str, Any]:
    rng = place.rng()
    key = digits(rng, 5)
    for _ in range(5):
        i = rng.randrange(len(key))
        key = key[:i] + key[i] + key[i:]
    return hidden_key(strings["number_string"], place, n_noise, key)


def records(seed: str, count: int) -> list[tuple[str, str]]:
    """The keys and values of a file, of which every row shows most."""
    rng = random.Random(f"infinitebench {seed} records")
    return [(random_uuid(rng), random_uuid(rng)) for _ in range(count)]


def random_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def kv_retrieval(strings: Strings, place: Place, n_records: int) -> dict[str, Any]:
    words = strings["kv_retrieval"]
    pool = records(place.seed, round(POOL * n_records))
    place.rng().shuffle(pool)
    asked = place.row * n_records // place.n_rows
    pairs = (words["pair"].replace("{key}", key).replace("{value}", value) for key, value in pool[:n_records])
    body = words["pair_separator"].join(pairs)
    key, value = pool[asked]
    return {
        "context": words["context_head"] + body + words["context_tail"],
        "input": words["input"].replace("{key}", key),
        "answer": value,
        "position": asked,
    }


def math_find(strings: Strings, place: Place, n_numbers: int) -> dict[str, Any]:
    rng, quantity = place.rng(), place.of(QUANTITIES)
    lowest, highest = 0, HIGHEST
    side = rng.choice(("largest", "smallest")) if quantity == "median" else quantity
    if "largest" in side:  # otherwise the answer would be 99 nearly always
        highest = rng.randint(int(0.8 * HIGHEST), HIGHEST)
    else:
        lowest = rng.randint(0, int(0.2 * HIGHEST))
    numbers = [rng.randint(lowest, highest) for _ in range(n_numbers)]
    return {
        "context": str(numbers),
        "input": strings["math"]["inputs"][quantity],
        "answer": quantity_of(numbers, quantity),
        "quantity": quantity,
    }


def quantity_of(numbers: list[int], quantity: str) -> int | float:
    """The answer; the median of an even count is a float, as the scorer expects it."""
    if quantity == "median":
        return statistics.median(numbers)
    distinct = sorted(set(numbers), reverse="largest" in quantity)
    return distinct[{"second": 1, "third": 2}.get(quantity.split()[0], 0)]


def math_calc(strings: Strings, place: Place, n_numbers: int) -> dict[str, Any]:
    rng = place.rng()
    value = rng.randint(0, HIGHEST)
    terms, values = [str(value)], []
    for _ in range(n_numbers - 1):
        x, is_plus = rng.randint(0, HIGHEST), rng.random() < 0.5
        if is_plus and value + x > HIGHEST:
            x = rng.randint(0, HIGHEST - value)
        if not is_plus and value < x:
            x = rng.randint(0, value)
        value += x if is_plus else -x
        terms.append(f"{'+' if is_plus else '-'} {x}")
        values.append(value)
    return {"context": " ".join(terms), "input": "", "answer": values}


def code_run(strings: Strings, place: Place, n_functions: int) -> dict[str, Any]:
    rng, depth, words = place.rng(), place.of(DEPTHS), strings["code_run"]
    width = n_functions // depth
    ids = rng.sample(range(1, 2 * n_functions + 1), depth * width)
    layers = [ids[i * width : (i + 1) * width] for i in range(depth)]
    calls: dict[int, tuple[int | None, int]] = {}  # a function: whom it calls, what it adds
    for i, layer in enumerate(layers):
        for function in layer:
            callee = rng.choice(layers[i + 1]) if i + 1 < depth else None
            calls[function] = callee, rng.randint(-12, 17)
    first, x = rng.choice(layers[0]), rng.randint(-10, 10)
    texts = (
        words["function"].replace("{id}", str(function)).replace("{body}", body(*calls[function]))
        for function in sorted(calls)
    )
    return {
        "context": words["context_head"] + "".join(texts),
        "input": words["input"].replace("{id}", str(first)).replace("{x}", str(x)),
        "answer": x + total(calls, first),
        "call_depth": depth,
    }


def body(callee: int | None, constant: int) -> str:
    """What a function returns: its argument or a call, and a constant."""
    inner = "x" if callee is None else f"func_{callee}(x)"
    return inner if constant == 0 else f"{inner} {'+' if constant > 0 else '-'} {abs(constant)}"


def total(calls: Mapping[int, tuple[int | None, int]], function: int | None) -> int:
    """The sum of the constants along a chain of calls."""
    result = 0
    while function is not None:
        function, constant = calls[function]
        result += constant
    return result


GENERATORS = {
    "passkey": Generator(passkey, 5220, 590, 1),
    "number_string": Generator(number_string, 5220, 590, 1),
    "kv_retrieval": Generator(kv_retrieval, 2500, 500, 1),
    "math_find": Generator(math_find, 60_000, 350, 20),
    "math_calc": Generator(math_calc, 30_000, 50, 3),
    "code_run": Generator(code_run, 550, 400, max(DEPTHS)),
}


def func_call(text: str) -> str:
    """The first call `func_12(-3)` in a question."""
    match = re.search(r"func_\d+\(-?\d+\)", text)
    return match.group() if match else ""
