"""Several answers to one prompt: which lines belong together, and pass@k.

Not here: how answers are drawn (`engine/sampling`).
"""

from collections.abc import Iterable, Sequence
from math import comb, fsum

from results.schema import SampleRow


def by_prompt(rows: Iterable[SampleRow]) -> list[list[SampleRow]]:
    """Lines of one prompt together."""
    found: dict[str, list[SampleRow]] = {}
    for row in rows:
        found.setdefault(row.sample_id, []).append(row)
    return list(found.values())


def chance_of_one(n: int, n_right: int, k: int) -> float:
    """The chance that of `k` answers out of `n`, of which so many are right, one at least is: without bias."""
    assert 1 <= k <= n and 0 <= n_right <= n, (n, n_right, k)
    return 1 - comb(n - n_right, k) / comb(n, k)


def pass_at_k(rows: Sequence[SampleRow]) -> dict[str, float | None] | None:
    """By k = 1, 2, 4 … up to the draws of a prompt; None without draws, or where an answer is partly right."""
    drawn = [row for row in rows if "draw" in row.fields]
    if not drawn or any(row.score not in (0, 1) for row in drawn):
        return None
    prompts = by_prompt(drawn)
    n = min(map(len, prompts))
    ks = [1 << i for i in range(n.bit_length()) if 1 << i < n] + [n]
    right = [(len(each), sum(row.score == 1 for row in each)) for each in prompts]
    return {str(k): fsum(chance_of_one(*counts, k) for counts in right) / len(right) for k in ks}
