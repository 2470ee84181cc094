"""Scores of several answers to one prompt: pass@1 and pass@k.

Not here: how answers are drawn (the engine), intervals over prompts (`evals/results`).
"""

from collections.abc import Sequence
from math import comb, fsum


def pass_at_1(correct: Sequence[Sequence[bool]]) -> float:
    """Mean over prompts of the share of their draws that is correct."""
    return fsum(sum(draws) / len(draws) for draws in correct) / len(correct)


def first_draw(correct: Sequence[Sequence[bool]]) -> float:
    """Share of prompts whose first draw is correct: what R-KV's evaluator reports, however many draws there are."""
    return sum(bool(draws[0]) for draws in correct) / len(correct)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n draws, taken without replacement, hold one of the c correct ones."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} draws with {c} correct ones is not defined")
    # One division of integers, so that the last digit is right whatever n is.
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)


def mean_pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float:
    """Mean of pass@k over prompts."""
    return fsum(pass_at_k(len(draws), sum(map(bool, draws)), k) for draws in correct) / len(correct)
