"""What a method holds on the device right after the prompt, in bytes, and the largest plan that fits a byte budget.

Counted like the ledger counts: K and V in whatever form, scales and zero points, codes, centroids, bounds, and the
buffer for fetched tokens, of which one serves all layers. What could ship with the model is a constant and not here.

Not here: any method's numbers (`methods`), the check at every step (`engine/books/ledger.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

from kvbench.engine.budget import Budget, at_least, show, token_bytes
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape

DIGITS = 10_000  # a smallest share is named in so many parts, rounded up
SIMPLE = 64  # parts of a share that can be named as it is


@dataclass(frozen=True)
class Footprint:
    """Bytes of a layer that the method compresses, and how many layers it leaves whole."""

    kv_bytes: int  # exact tokens and codes, with their scales
    index_bytes: int = 0  # whatever tokens are found with
    buffer_bytes: int = 0  # K and V that a step fetches into a layer at most
    n_whole: int = 0  # layers that keep every token
    uncounted_bytes: int = 0  # that an accelerator keeps although they are counted as the host's

    def total(self, shape: ModelShape, s_prompt: int) -> int:
        """Bytes over all layers."""
        n_layers = len(shape.attention_layers)
        whole = self.n_whole * s_prompt * token_bytes(shape)
        return whole + (n_layers - self.n_whole) * (self.kv_bytes + self.index_bytes) + self.buffer_bytes

    def fits(self, budget: Budget, shape: ModelShape) -> bool:
        """Whether the mean over layers is at most what the budget has."""
        return self.total(shape, budget.s_prompt) <= self.room(budget, shape)

    def spare(self, budget: Budget, shape: ModelShape) -> int:
        """Bytes that are left for each layer that is compressed."""
        n_layers = len(shape.attention_layers) - self.n_whole
        return (self.room(budget, shape) - self.total(shape, budget.s_prompt)) // max(1, n_layers)

    def share(self, shape: ModelShape, s_prompt: int) -> Fraction:
        """The least share of the full cache that is enough: a budget's bytes of a layer are rounded down."""
        of_layer = ceil(Fraction(self.total(shape, s_prompt), len(shape.attention_layers)))
        return Fraction(of_layer, s_prompt * token_bytes(shape))

    @staticmethod
    def room(budget: Budget, shape: ModelShape) -> int:
        return len(shape.attention_layers) * budget.device_bytes(shape)


def held(
    budget: Budget, shape: ModelShape, tokens: int, index_bytes: int = 0, fetched: int = 0, n_whole: int = 0,
    cached: int = 0,
) -> Footprint:  # fmt: skip
    """Footprint of a retrieving method: exact `tokens` of a KV head, an index, and as many `fetched` at most.

    So many tokens stay `cached` as they came from the host; what is fetched is made exact.
    """
    of_token, s = token_bytes(shape), budget.s_prompt
    kv_bytes = min(tokens, s) * of_token + min(cached, s - min(tokens, s)) * far_bytes(budget, shape)
    kv_bytes += 0 if budget.host_code is None else budget.host_code.shared_bytes(shape.h_kv)
    return Footprint(kv_bytes, index_bytes, min(fetched, s) * of_token, n_whole)


def far_bytes(budget: Budget, shape: ModelShape) -> int:
    """Bytes of K and V of a token in one layer, as they lie on the host."""
    return (
        token_bytes(shape)
        if budget.host_code is None
        else shape.h_kv * budget.host_code.token_bytes(shape.d_h, shape.d_v)
    )


class TooSmall(ConfigError):
    """No plan fits the bytes."""

    def __init__(self, words: str, smallest: Fraction) -> None:
        super().__init__(words)
        self.smallest = smallest  # share of the full cache that is enough


def too_small(
    budget: Budget, title: str, smallest: Fraction, instead: str = "", holds_always: bool = False
) -> TooSmall:  # fmt: skip
    """The error where no plan fits: it names the smallest share that does, as a fraction where it `holds_always`."""
    assert budget.memory is not None
    named = Fraction(ceil(smallest * DIGITS), DIGITS)
    if budget.given is not None:
        least: Any = at_least(budget.given, budget.memory, smallest)
    else:
        least = show(smallest) if holds_always and smallest.denominator <= SIMPLE else float(named)
    use = f"use memory={least} or more" if named < 1 else "use memory=1, which is full attention"
    return TooSmall(
        f"memory={show(budget.given or budget.memory)} of a prompt of {budget.s_prompt} tokens is less than {title} "
        f"needs; {use}{instead}",
        named,
    )


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from `low` to `high` that fits, where all below one that fits do; `low - 1` without any."""
    while low <= high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(middle) else (low, middle - 1)
    return high
