"""What an answer costs in entries of a KV cache, summed over every query of prefill and decode.

An entry is a token that a KV head of a layer holds for a query, mean over heads and layers. Full attention takes the
whole causal triangle, T * (T + 1) / 2 for T tokens.

Not here: entries of one step (`engine/books/ledger.py`).
"""

from collections.abc import Sequence


def triangle(n: int) -> float:
    """Entries of full attention over `n` tokens."""
    return n * (n + 1) / 2


def footprint(s_prompt: int, steps: Sequence[float], of_prompt: float | None = None) -> float:
    """Entries of a prompt and of what is attended to at each step behind it; a dense prefill unless `of_prompt`."""
    return (triangle(s_prompt) if of_prompt is None else of_prompt) + sum(steps)


def share_of_full(entries: float, s_prompt: int, n_steps: int) -> float:
    """A footprint relative to full attention over the same tokens."""
    return entries / triangle(s_prompt + n_steps)
