"""Tokens and bytes from (`ratio` or `budget`, `comm`) and a prompt's length, the same way for every method.

The rules are in docs/fair-budgets.md, and in docs/byte-budget.md where `memory` is given. Ratios are rationals, because
floor(0.29 * 100) is 28 in floating point. Bytes are always counted at 16 bits an element, whatever dtype a run computes
in; allocated bytes are a column of their own.

Not here: what one method makes of `comm` (dimensions, representatives, codes). That is in its own file and calls this.
"""

import re
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, floor
from typing import Any

from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape

ELEMENT_BYTES = 2  # accounting only: 16-bit elements
COUNTS = ("target", "mean", "peak")  # what a budget of prompt and answer is: left by a cut, held on average, at most
UNITS = {"GB": 10**9, "MB": 10**6, "KB": 10**3, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}  # bytes
SIZE = re.compile(r"([-+]?\d+(?:\.\d+)?) ?([KMG]i?B)", re.IGNORECASE)


def parse_fraction(text: str | int | float | Fraction, key: str) -> Fraction:
    """`1/64`, `0.2`, `3` or `1e-2` as an exact rational; floats by their shortest decimal form."""
    try:
        if re.search(r"e[+-]?\d{4}|\d{400}", str(text), re.IGNORECASE):
            raise ValueError  # an exact number of so many digits would take for ever
        return Fraction(str(text).strip())
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{key}={text} is not a number; write it as 0.2 or 1/64") from None


@dataclass(frozen=True, order=True)
class Bytes:
    """A number of bytes as people give it: `4GB`, `512MiB`."""

    n: int

    def pieces(self) -> tuple[str, str]:
        """Number and unit, exact and as short as they can be: of 1,500,000,000 bytes 1.5 and GB."""
        every = ((decimals(Fraction(self.n, size)), unit) for unit, size in UNITS.items())
        return min(every, key=lambda pieces: (len(pieces[0] + pieces[1]), pieces[0].startswith("0.")))

    def __str__(self) -> str:
        return "".join(self.pieces())

    @property
    def words(self) -> str:
        """The request in words for a sentence."""
        return " ".join(self.pieces())


def decimals(value: Fraction) -> str:
    """The exact number, where its decimals end."""
    places = 0
    while (value * 10**places).denominator > 1:
        places += 1
    digits = f"{int(value * 10**places):0{places + 1}}"
    return f"{digits[:-places]}.{digits[-places:]}" if places else digits


def parse_bytes(text: Any, key: str) -> Bytes:
    """`4GB`, `1.5gb` or `512MiB`; what is less than a byte is left out."""
    found = SIZE.fullmatch(str(text).strip())
    if found is None:
        raise ConfigError(f"{key}={text} is neither a share of the full cache's bytes, like 1/8, nor bytes, like 4GB")
    number, unit = found.groups()
    sizes = {name.upper(): size for name, size in UNITS.items()}
    n = floor(parse_fraction(number, key) * sizes[unit.upper()])
    if n < 1:
        raise ConfigError(f"{key}={text} is out of range; it is at least one byte, like 4GB or 512MiB")
    return Bytes(n)


def parse_memory(text: str | int | float | Fraction, key: str) -> "Fraction | Bytes":
    """A share of the full cache's bytes, or bytes."""
    return parse_bytes(text, key) if str(text).strip().upper().endswith("B") else parse_fraction(text, key)


@dataclass(frozen=True)
class BudgetRequest:
    """What the user asked for, before any prompt is known; ranges are those of the keys (`evals/settings.py`)."""

    ratio: Fraction | None  # share of the prompt's tokens that take part in attention at a decode step
    tokens: int | None  # the same as an absolute number; exactly one of the two is given
    comm: Fraction | None  # bytes moved per step to find tokens, relative to those of the prompt's keys; None: no limit
    compensate: bool = True  # dropping methods get what `comm` would have moved, as tokens
    # Share of the full cache's bytes that may lie on the device after the prompt, or the bytes, of which each prompt
    # makes a share.
    memory: Fraction | Bytes | None = None
    memory_alone: bool = field(init=False, default=False)  # `ratio` was not given, and is that of `memory`
    counts: str | None = None  # of COUNTS: what `tokens` count for methods that compress while they generate
    key_share: Fraction = Fraction(1, 2)  # of a token's bytes those of its key
    given: Bytes | None = None  # what a prompt made the share `memory` of

    def __post_init__(self) -> None:
        if self.memory is not None and self.ratio is None and self.tokens is None:
            object.__setattr__(self, "ratio", None if isinstance(self.memory, Bytes) else self.memory)
            object.__setattr__(self, "memory_alone", True)
        if self.ratio is not None and self.tokens is not None:
            raise ConfigError(f"ratio={show(self.ratio)} and budget={self.tokens} are both given; give one of the two")
        if self.ratio is None and self.tokens is None and not self.memory_alone:
            raise ConfigError("neither ratio, budget nor memory is given; give one of them, for example ratio=0.2")

    @property
    def compensates(self) -> bool:
        """Whether dropping methods get tokens for `comm`: not where they are counted in bytes."""
        return self.compensate and self.memory is None

    def label(self) -> str:
        of = "" if self.counts in (None, "target") else f" ({self.counts})"
        attended = f"budget={self.tokens}{of}" if self.ratio is None else f"ratio={show(self.ratio)}"
        words = [] if self.memory_alone else [attended]
        words += [] if self.memory is None else [f"memory={show(self.given or self.memory)}"]
        return " ".join(words)

    def on(self, shape: ModelShape, s_prompt: int) -> "BudgetRequest":
        """The request for prompts of one length: bytes are the share of their full cache that they are there."""
        if not isinstance(self.memory, Bytes):
            return self
        whole = cache_bytes(shape, s_prompt)
        share = Fraction(self.memory.n, whole) if whole > self.memory.n else Fraction(1)
        return replace(self, memory=share, given=self.memory)


EVERYTHING = BudgetRequest(ratio=Fraction(1), tokens=None, comm=Fraction(0))  # of a method that has no budget


@dataclass(frozen=True)
class Frame:
    """Where in a prompt the chat template's words are, and the question."""

    n_prefix: int = 0  # its first tokens: BOS, template, system line
    n_suffix: int = 0  # its last tokens, from the end of the user's words on
    postfix_ids: tuple[int, ...] = ()  # what stands between a user's words and the answer to them
    n_question: int | None = None  # its last tokens, from the question on; 0: it has none; None: nobody says


NO_FRAME = Frame()


@dataclass(frozen=True)
class Budget:
    """What one prompt gets: tokens that a query head may attend to, per layer.

    They are tokens of the prompt, and generated tokens come on top. A budget with `n_answer` is one of prompt and
    answer together; only the current token is free. So is one with `counts`, of methods that cut every few steps.
    """

    s_prompt: int
    nominal_tokens: int  # from ratio or budget alone
    tokens: int  # with compensation, and never more than prompt and counted answer have
    comm: Fraction  # what the index is made for: what is allowed, or with `finds_freely` what it costs
    ratio: Fraction  # the share that was asked for, before any rounding
    n_answer: int | None = None  # longest answer, where its tokens count too; None: they come on top
    frame: Frame = NO_FRAME  # of the prompt
    memory: Fraction | None = None  # share of the full cache's bytes on the device, where that is limited
    memory_alone: bool = False  # nothing else was given
    given: Bytes | None = None  # what `memory` is the share of, where it was asked for in bytes
    counts: str | None = None  # of COUNTS, where tokens of an answer of any length count too
    host_code: TokenCode | None = None  # how tokens of the host are packed; None: not at all
    finds_freely: bool = False  # `comm` is off: the index is the published one, or the largest whose bytes fit
    index_share: Fraction = Fraction(1)  # of the published index, where it has to be smaller
    most: int | None = None  # with `counts`: tokens that a step may attend to, or with "mean" that steps do on average

    def device_bytes(self, shape: ModelShape, t: int = 0) -> int:
        """Bytes per layer, in the mean, that may lie on the device after the prompt and `t` generated tokens."""
        assert self.memory is not None, "the budget has no bytes"
        return floor(self.memory * self.s_prompt * token_bytes(shape)) + t * token_bytes(shape)

    @property
    def attends_all(self) -> bool:
        """The budget pays for every token of the prompt."""
        return self.tokens >= self.s_prompt

    @property
    def never_evicts(self) -> bool:
        """The budget pays for every token there will be, so that none has to go while the answer grows."""
        return self.counts is None and self.tokens >= self.s_prompt + (self.n_answer or 0)

    def allowance(self, t: int) -> int:
        """Tokens a query head may attend to at decode step `t` (1 for the first), the current one included."""
        return self.most or self.tokens + (t if self.n_answer is None else 1)


@dataclass(frozen=True)
class Split:
    """The common division of a budget into sinks, local window and selected tokens."""

    n_sink: int
    n_local: int  # past tokens of the window; the current token comes on top
    k: int


def resolve(request: BudgetRequest, s_prompt: int, drops: bool) -> Budget:
    """Tokens for this prompt; `drops` says that the method moves nothing to find tokens and may be compensated."""
    # Tokens before they are rounded down; one of the two is given.
    share = Fraction(request.tokens or 0) if request.ratio is None else request.ratio * s_prompt
    assert not isinstance(request.memory, Bytes), "of bytes `BudgetRequest.on` makes the prompt's share"
    if drops and request.memory is not None:
        share = min(share, request.memory * s_prompt)
    comm = request.comm or Fraction(0)
    extra = comm * s_prompt * request.key_share if drops and request.compensates else Fraction(0)
    nominal = min(floor(share), s_prompt)
    if nominal < 1:
        smallest = f"ratio for it is 1/{s_prompt}"
        if request.given and request.memory:
            smallest = f"memory for it is {at_least(request.given, request.memory, Fraction(1, s_prompt))}"
        raise ConfigError(f"{request.label()} leaves no token of a prompt of {s_prompt}; the smallest {smallest}")
    return Budget(
        s_prompt,
        nominal,
        min(floor(share + extra), s_prompt),
        comm,
        min(share / s_prompt, Fraction(1)),
        memory=request.memory,
        memory_alone=request.memory_alone,
        given=request.given,
        finds_freely=request.comm is None,
    )


def split(tokens: int, n_sink: int = 32, local_share: Fraction = Fraction(1, 2)) -> Split:
    """Sinks, local window and selected tokens that add up to `tokens`; short budgets get fewer sinks."""
    n_sink = min(n_sink, tokens // 4)
    n_local = floor((tokens - n_sink) * local_share)
    return Split(n_sink, n_local, tokens - n_sink - n_local)


def key_bytes(shape: ModelShape, s: int) -> int:
    """Bytes of the keys of `s` tokens in one layer: what `comm` is relative to."""
    return shape.h_kv * s * shape.d_h * ELEMENT_BYTES


def value_bytes(shape: ModelShape, s: int) -> int:
    """Bytes that `s` tokens have in one layer besides their keys: of values, none where these lie in the keys."""
    return shape.h_kv * s * (shape.width - shape.d_h) * ELEMENT_BYTES


def token_bytes(shape: ModelShape) -> int:
    """Bytes of K and V of one token in one layer."""
    return shape.h_kv * shape.width * ELEMENT_BYTES


def cache_bytes(shape: ModelShape, s: int) -> int:
    """Bytes of K and V of `s` tokens in all layers that methods compress."""
    return len(shape.attention_layers) * s * token_bytes(shape)


def at_least(given: Bytes, share: Fraction, smallest: Fraction) -> Bytes:
    """A budget that is `smallest` of a prompt's cache, where `given` is `share` of it; in few digits, rounded up."""
    n = given.n * smallest / share
    digit = 10 ** max(0, len(str(floor(n))) - 4)
    return Bytes(ceil(n / digit) * digit)


def find_bytes(shape: ModelShape, budget: Budget) -> int:
    """Bytes that `budget.comm` pays for per layer and step, in order to find tokens."""
    return floor(budget.comm * key_bytes(shape, budget.s_prompt))


def show(value: Fraction | Bytes) -> str:
    """A share as people give it: 1/8 and 1/64, else as `exact` has it. Runs are not named by it."""
    if isinstance(value, Bytes):
        return str(value)
    is_power = value.numerator == 1 and value.denominator >= 8 and value.denominator.bit_count() == 1
    return f"1/{value.denominator}" if is_power else exact(value)


def gigabytes(n_bytes: float) -> str:
    """Bytes in GB, rounded for a sentence."""
    return f"{n_bytes / 1e9:,.0f} GB" if n_bytes >= 1e10 else f"{n_bytes / 1e9:.3g} GB"


def exact(value: Fraction | Bytes) -> str:
    """The one spelling of a share, of which a run's name is made: decimals where they are short and exact, else p/q.

    Bytes have one too, the shortest.
    """
    if isinstance(value, Bytes):
        return str(value)
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    if denominator == 1 and len(repr(float(value))) <= 6:
        return repr(float(value)).removesuffix(".0")
    return f"{value.numerator}/{value.denominator}"
