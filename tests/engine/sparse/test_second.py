"""Each rule of a sparse prefill against a second one, written out pair by pair in float64, on drawn settings.

Not here: what the authors' code keeps on reference vectors (`test_rules.py`).
"""

import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.softmax import Softmax
from kvbench.engine.sparse.a_shape import AShape, TriShape
from kvbench.engine.sparse.block_sparse import BlockSparse
from kvbench.engine.sparse.flexprefill import FlexPrefill
from kvbench.engine.sparse.top_cdf import TopCdf
from kvbench.engine.sparse.xattention import XAttention

Array = np.ndarray[Any, Any]
COMMON: dict[str, Any] = {"density": None, "dense_last": 0, "layers": None, "observe": "kept"}
CASES = range(60)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    return e / e.sum()


def falling(values: Array) -> list[int]:
    """Largest first, the lower one of equals first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def mean_blocks(x: Array, b: int, divide_by_block: bool = False) -> list[Array]:
    parts = [x[at : at + b] for at in range(0, len(x), b)]
    return [part.sum(0) / (b if divide_by_block else len(part)) for part in parts]


def spread(blocks: Array, s: int, b_q: int, b_k: int) -> Array:
    """Pairs of tokens of pairs of blocks."""
    return np.array([[bool(blocks[i // b_q, j // b_k]) and j <= i for j in range(s)] for i in range(s)])


# --- one head each: q, k (s, d) -> which pairs are computed (s, s) -------------------------------------------------


def a_shape(q: Array, k: Array, *, n_init: int, n_local: int, n_last: int = 0) -> Array:
    s = len(k)
    return np.array(
        [[j <= i and (j < n_init or i - j < n_local or i >= s - n_last) for j in range(s)] for i in range(s)]
    )


def block_sparse(q: Array, k: Array, *, block: int, top_chunks: int) -> Array:
    means_q, means_k = (mean_blocks(x, block, divide_by_block=True) for x in (q, k))
    n = len(means_q)
    kept = np.zeros((n, n), bool)
    for i in range(n):
        row = {0, i, max(i - 1, 0)}
        for j in falling(np.array([means_q[i] @ means_k[j] for j in range(i + 1)])):
            if len(row) < top_chunks:
                row.add(j)
        kept[i, list(row)] = True
    return spread(kept, len(k), block, block)


def flexprefill(
    q: Array, k: Array, *, block: int, gamma: float, tau: float, min_budget: int, max_budget: int | None,
    cover_unit: int | None,
) -> Array:  # fmt: skip
    (s, d), b = k.shape, block
    n = math.ceil(s / b)
    if s <= max(2 * b, math.ceil(min_budget / b) * b):
        return a_shape(q, k, n_init=0, n_local=s)
    last = q[-b:] @ k.T / math.sqrt(d)
    rows = [softmax(np.where(np.arange(s) <= s - b + r, last[r], -np.inf)) for r in range(b)]
    vertical, slash = np.mean(rows, 0), np.zeros(s)
    for r, row in enumerate(rows):
        for j in range(s - b + r + 1):
            slash[s - 1 - (s - b + r - j)] += row[j] / b

    def count(x: Array) -> int:
        found = sum(so_far <= gamma for so_far in np.cumsum(np.sort(x)[::-1])) + 1
        least, most = math.ceil(min_budget / b), n if max_budget is None else min(math.ceil(max_budget / b), n)
        return min(max(found // (cover_unit or b) + 1, least), most)

    def pooled(x: Array) -> Array:
        return np.array([x[at : at + b].sum() for at in range(0, s, b)])

    of_columns, of_slashes = pooled(vertical), pooled(slash)
    means_q, means_k = mean_blocks(q, b), mean_blocks(k, b)
    guess = softmax(np.array([q[-b:].mean(0) @ key / math.sqrt(d) for key in means_k]))
    middle = (guess + of_columns) / 2

    def kl(x: Array) -> float:
        return sum(a * math.log(a / m) for a, m in zip(x, middle, strict=True) if a > 0)

    aware = math.sqrt(max(0.0, (kl(guess) + kl(of_columns)) / 2)) < tau
    n_columns, n_slashes = count(vertical), count(slash)
    if aware:
        n_columns = n_slashes = math.ceil(min_budget / b)
    of_columns[0] = of_slashes[n - 1] = np.inf
    columns = falling(of_columns)[:n_columns]
    # Of equal distances the nearer one first: the highest block of slashes.
    distances = [n - 1 - m for m in sorted(range(n), key=lambda m: (-of_slashes[m], -m))][:n_slashes]
    kept = np.array([[j <= i and (j in columns or i - j in distances) for j in range(n)] for i in range(n)])
    if aware:
        weights = np.zeros((n, n))
        for i in range(n):
            weights[i, : i + 1] = softmax(np.array([means_q[i] @ means_k[j] / math.sqrt(d) for j in range(i + 1)]))
        so_far = 0.0
        for at in falling(weights.flatten()):
            so_far += weights.flatten()[at]
            if so_far > gamma * n:
                break
            kept[divmod(at, n)] = True
    kept[0, 0] = True
    return spread(kept, s, b, b)


def xattention(q: Array, k: Array, *, block: int, stride: int, threshold: float, select: str, chunk_size: int) -> Array:
    (s, d), n = k.shape, math.ceil(len(k) / block)
    if s <= block or threshold == 1:
        return a_shape(q, k, n_init=0, n_local=s)
    q, k = (np.concatenate([x, np.zeros((n * block - s, d))]) for x in (q, k))
    n_groups, per_block = n * block // stride, block // stride
    sums = np.zeros((n, n))
    for a in range(math.ceil(s / stride)):
        logits = np.array(
            [
                sum(q[a * stride + stride - 1 - m] @ k[c * stride + m] for m in range(stride)) / (math.sqrt(d) * stride)
                for c in range(a + 1)
            ]
        )
        for c, weight in enumerate(softmax(logits)):
            sums[a // per_block, c // per_block] += weight
    assert n_groups == n * per_block
    kept = np.zeros((n, n), bool)
    for i in range(n):
        need = threshold * sums[i].sum()
        order = [j for j in falling(sums[i, : i + 1]) if j not in (0, i)]
        if select == "paper" or i >= chunk_size // block:
            kept[i, [0, i]] = True
            for j in order:
                if sums[i, kept[i]].sum() >= need:
                    break
                kept[i, j] = True
            continue
        # As the authors' code: what is marked comes first, and one block too many counts as marked.
        others = [j for j in falling(sums[i, : i + 1]) if j != i]
        kept[i, [0, i]] = True
        for place, j in enumerate(others):
            so_far = 0.0 if place == 0 else sums[i, i] + sum(sums[i, one] for one in others[: place - 1])
            if so_far < need:
                kept[i, j] = True
    return spread(kept, s, block, block)


def top_cdf(
    q: Array, k: Array, *, block_q: int, block_k: int, sim_threshold: float, cdf: float | None, topk: float | None,
    smooth_k: bool, attention_sink: bool,
) -> Array:  # fmt: skip
    s, d = k.shape
    if s <= block_q or 1 in (cdf, topk):
        return a_shape(q, k, n_init=0, n_local=s)
    k = k - k.mean(0) if smooth_k else k

    def similar(x: Array, b: int) -> list[bool]:
        found = list[bool]()
        for at in range(0, s, b):
            part = x[at : at + b] / np.linalg.norm(x[at : at + b], axis=1, keepdims=True)
            found.append(bool((part @ part.T).mean() > sim_threshold))
        return found

    alike_q, alike_k = similar(q, block_q), similar(k, block_k)
    means_q, means_k = mean_blocks(q, block_q), mean_blocks(k, block_k)
    kept = np.zeros((len(means_q), len(means_k)), bool)
    for i, query in enumerate(means_q):
        causal = [j for j in range(len(means_k)) if j < (i + 1) * block_q / block_k]
        speaks = [j for j in causal if alike_k[j]]
        if speaks:
            weights = softmax(np.array([query @ means_k[j] / math.sqrt(d) for j in speaks]))
            order = falling(weights)
            n = sum(so_far <= cdf for so_far in np.cumsum(weights[order])) if cdf is not None else 0
            n = int(Fraction(str(topk)) * len(means_k)) if topk is not None else n
            kept[i, [speaks[at] for at in order[: max(n, 1)]]] = True
        for j in causal:
            kept[i, j] |= not alike_k[j] or not alike_q[i] or (attention_sink and j == 0)
    pairs = spread(kept, s, block_q, block_k)
    for i in range(s):  # a query's own block, and the others that its block of queries meets
        own = [j for j in range(i + 1) if j // block_k in {t // block_k for t in range(i // block_q * block_q, i + 1)}]
        pairs[i, own] = True
    return pairs


# --- drawn settings ------------------------------------------------------------------------------------------------


def share(rng: random.Random, *others: float) -> Fraction:
    return Fraction(str(rng.choice([0.05, 0.3, 0.5, 0.75, 0.9, 0.97, *others])))


def settings(name: str, rng: random.Random) -> dict[str, Any]:
    block = rng.choice([1, 4, 8, 16, 24])
    if name in ("a_shape", "tri_shape"):
        found = {"n_init": rng.choice([0, 1, 5, 40]), "n_local": rng.choice([1, 2, 17, 50, 64, 65])}
        return found | ({"n_last": rng.choice([1, 7, 20, 64])} if name == "tri_shape" else {})
    if name == "block_sparse":
        return {"block": block, "top_chunks": rng.randint(3, 9)}
    if name == "flexprefill":
        least = rng.choice([1, block, 3 * block + 1])
        return {
            "block": block, "gamma": share(rng, 0.01, 0.999), "tau": share(rng, 0, 1), "min_budget": least,
            "max_budget": rng.choice([None, least + 2 * block, 1000]), "cover_unit": rng.choice([None, 3, 128]),
        }  # fmt: skip
    if name == "xattention":
        block = rng.choice([4, 8, 16])
        return {
            "block": block, "stride": rng.choice([1, 2, 4]), "threshold": share(rng, 0, 1, 0.999),
            "select": rng.choice(["code", "paper"]), "chunk_size": block * rng.choice([1, 2, 4, 64]),
        }  # fmt: skip
    cut = {"cdf": share(rng, 1), "topk": None} if rng.random() < 0.6 else {"cdf": None, "topk": share(rng, 0.01)}
    block_k = rng.choice([4, 8, 16])
    return {
        "block_q": rng.choice([block_k, 2 * block_k, 3 * block_k, max(1, block_k // 2)]), "block_k": block_k,
        "sim_threshold": Fraction(str(rng.choice([-0.1, 0.1, 0.3, 0.99]))), **cut, "smooth_k": rng.random() < 0.7,
        "attention_sink": rng.random() < 0.3,
    }  # fmt: skip


RULES: dict[str, tuple[Any, Callable[..., Array]]] = {
    "a_shape": (AShape, a_shape), "tri_shape": (TriShape, a_shape), "block_sparse": (BlockSparse, block_sparse),
    "flexprefill": (FlexPrefill, flexprefill), "top_cdf": (TopCdf, top_cdf), "xattention": (XAttention, xattention),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_the_pairs_and_what_comes_out_are_those_of_a_second_implementation(name: str) -> None:
    kind, second = RULES[name]
    n_exact = 0
    for case in CASES:
        rng, draw = random.Random(f"{name} {case}"), torch.Generator().manual_seed(case)
        given = settings(name, rng)
        s, h_kv, g = rng.choice([1, 17, 47, 63, 64, 65, 96, 97, 120, 121, 127]), rng.randint(1, 2), rng.randint(1, 3)
        towards = torch.randn(1, 1, s // 8 + 1, 8, generator=draw).repeat_interleave(8, 2)[:, :, :s]  # alike, in runs
        q, k, v = (
            torch.randn(1, n, s, 8, generator=draw) + rng.choice([0, 2]) * towards for n in (g * h_kv, h_kv, h_kv)
        )
        rule, softmax = kind(**given, **COMMON), Softmax(8**-0.5)
        plain = {key: float(x) if isinstance(x, Fraction) else x for key, x in given.items()}
        want = np.stack(
            [second(q[0, head].double().numpy(), k[0, head // g].double().numpy(), **plain) for head in range(g * h_kv)]
        )
        if rule.is_exact(0, s):
            assert want.sum() == g * h_kv * s * (s + 1) / 2, (case, given, s)
            n_exact += 1
            continue
        out, _, density, kept = rule.attend(q, k, v, softmax)
        assert np.array_equal(kept.seen().numpy(), want), (case, given, s)
        assert density.item() == pytest.approx(want.sum() / (g * h_kv * s * (s + 1) / 2), abs=1e-12)
        logits = q.double().unflatten(1, (h_kv, g)) @ k.double().unsqueeze(2).mT * 8**-0.5
        logits = logits.flatten(1, 2).masked_fill(~torch.from_numpy(want), -torch.inf)
        exact = logits.softmax(-1).unflatten(1, (h_kv, g)) @ v.double().unsqueeze(2)
        torch.testing.assert_close(out.double(), exact.flatten(1, 2), atol=1e-5, rtol=1e-5)
    assert n_exact < len(CASES) * 2 // 3
