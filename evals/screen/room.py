"""Bytes and a model's cache: how many requests fit into them, and what one may take so that more do.

The words of `--check model=NAME` besides the model: `tokens=32k`, a prompt's length, and `memory=4GB` or `memory=1/4`.

Not here: which methods keep to it (`evals/screen/model.py`), what a machine has left (`evals/screen/fits.py`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from math import floor

from kvbench.engine.budget import BudgetRequest, Bytes, cache_bytes, show
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.evals.settings import read_key

PROMPT = 4096  # tokens, where no others are asked for
LENGTH = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([km]?)", re.IGNORECASE)
TIMES = {"": 1, "k": 1024, "m": 1024**2}  # as context lengths are written
SHARES = (Fraction(1, 4), Fraction(1, 8), Fraction(1, 16))
MOST = 4  # numbers of requests that are answered for
ANSWER = 1024  # tokens of one that is priced


@dataclass(frozen=True)
class Asked:
    """A prompt and what its cache may take, where they were given."""

    tokens: int | None = None
    memory: Fraction | Bytes | None = None

    def length(self, shape: ModelShape) -> int:
        """Tokens of the prompt, by default of one that leaves room for an answer."""
        if self.tokens is None:
            return min(PROMPT, shape.window // 2)
        if self.tokens > shape.window:
            raise ConfigError(
                f"tokens={self.tokens} is more than the window of {shape.name}, which is {shape.window:,} tokens; give "
                f"tokens={shape.window} or fewer"
            )
        return self.tokens

    def budgets(self, shape: ModelShape) -> dict[str, str]:
        """What methods are given, in a command's words; those that compress answers get the tokens that bytes hold."""
        assert self.memory is not None
        n = self.length(shape)
        held = BudgetRequest(None, None, None, memory=self.memory).on(shape, n).memory
        assert isinstance(held, Fraction)
        words = f"memory={show(self.memory)}"
        return {"ratio": words, "memory": words, "answer": f"budget={max(1, floor(held * n))}"}


def asked(words: Sequence[str]) -> tuple[Asked, list[str]]:
    """What a command line asks of a prompt, and its other words."""
    given = dict(word.split("=", 1) for word in words if word.startswith(("tokens=", "memory=")))
    others = [word for word in words if not word.startswith(("tokens=", "memory="))]
    if given and not any(word.startswith(("model=", "model.id=")) for word in others):
        key, value = next(iter(given.items()))
        raise ConfigError(f"{key}={value} is of a model's prompt; give --check with model=NAME beside it")
    tokens = parse_length(given["tokens"]) if "tokens" in given else None
    memory = read_key("memory", given.get("memory"))
    return Asked(tokens, memory), others


def parse_length(text: str) -> int:
    """`32k`, `1.5k`, `32768`."""
    found = LENGTH.fullmatch(text)
    n = Fraction(found[1]) * TIMES[found[2].lower()] if found else Fraction(0)
    if n < 1 or n.denominator > 1:
        raise ConfigError(f"tokens={text} is no number of tokens; write it as 32k, which is 32,768, or 32768")
    return int(n)


def facts(asked: Asked, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Lines of the screen, each of one request but for the counts."""
    if asked == Asked():
        return
    n, memory = asked.length(shape), asked.memory
    if shape.choosing_layers:
        if memory is not None:
            raise ConfigError(f"memory={show(memory)} is of what methods compress, and that is nothing of {shape.name}")
        return
    whole, left = cache_bytes(shape, n), shape.left_bytes(n)
    cache = f"its full cache is {size(whole)} at {n:,} tokens"
    if memory is None:
        yield "one request", f"{cache}; memory=4GB or memory=1/4 beside it says what fits"
    elif isinstance(memory, Fraction):
        n_fit = int((whole + left) / (whole * memory + left))
        fit = f"; {n_fit} such requests fit where one does at full attention" if n_fit > 1 else ""
        yield "one request", f"{cache}: memory={show(memory)} is {size(whole * memory)} of it{fit}"
    else:
        yield "one request", f"{cache}: {of_whole(memory, whole)}"
        yield f"in {memory.words}", counts(memory.n, whole, left)
        yield "for more", ", ".join(wanted(memory.n, whole, left))
    answer = f"an answer of {ANSWER:,} tokens takes {size(cache_bytes(shape, ANSWER))} more"
    yield "not counted", f"{answer}; while a prompt is read its full cache lies there, unless prefill.evict=true"
    if left:
        yield "and", f"{size(left)} of every request that no method changes, which the numbers of requests count"


def of_whole(memory: Bytes, whole: int) -> str:
    if memory.n >= whole:
        return f"{memory.words} is more than all of it, and every method is full attention there"
    return f"{memory.words} is {percent(Fraction(memory.n, whole))} of it"


def counts(n_bytes: int, whole: int, left: int) -> str:
    """How many requests fit at full attention, and at several shares of the bytes."""
    full = n_bytes // (whole + left)
    at = [f"{int(n_bytes / (share * whole + left))} at {share}" for share in SHARES]
    return f"{full or 'no'} request{'s' * (full > 1)} at full attention, {', '.join(at)} of the bytes"


def wanted(n_bytes: int, whole: int, left: int) -> Iterator[str]:
    """What one request may take so that a number of them fits, for numbers that do not at full attention."""
    full = n_bytes // (whole + left)
    every = (2**i for i in range(1, 30) if 2**i > full)
    for i, n in enumerate(islice(every, MOST)):
        each = n_bytes // n - left
        if each > 0:
            of, at_once = ("", "") if i else (" of its cache", " requests at once")
            yield f"memory={rounded(each)} ({percent(Fraction(each, whole))}{of}) for {n}{at_once}"


def rounded(n: int) -> Bytes:
    """Down to few digits, where it has many."""
    digit = 10 ** max(0, len(str(n)) - 4)
    return Bytes(n) if len(f"{Bytes(n)}") <= 7 else Bytes(n // digit * digit)


def percent(share: Fraction) -> str:
    return f"{100 * float(share):.3g} %"


def size(n: Fraction | int) -> str:
    return f"{float(n) / 1e9:,.2f} GB" if n >= 10**9 else f"{float(n) / 1e6:,.1f} MB"
