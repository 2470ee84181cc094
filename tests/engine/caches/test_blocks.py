from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.engine.caches.blocks import BlockCache, BlockCacheSpec
from kvbench.engine.declared import build
from kvbench.engine.errors import ConfigError
from kvbench.tests.vectors import Check, differs, first, load

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "pqcache").glob("cache_*.npz"))


def run_vectors(path: Path) -> list[Check]:
    """Hits, order of updates and residents at every step, for both policies."""
    meta, x = load(path)
    return [(f"{path.stem}/{policy}", run_policy(policy, meta, x)) for policy in ("lfu", "lru")]


def run_policy(policy: Any, meta: dict, x: dict[str, np.ndarray]) -> str | None:
    spec = BlockCacheSpec(meta["capacity_blocks"] * meta["block"], meta["block"], meta["k_cache"], policy)
    cache = BlockCache(spec)
    for t, indices in enumerate(x["middle_indices"]):
        middle = torch.from_numpy(indices.astype(np.int64))
        cached = sorted(cache.frequency)
        per_head = np.isin(indices // meta["block"], cached).sum(-1)
        order = cache.refill_order(_counted(middle, meta["block"]))
        hits, _ = cache.access(middle, meta["num_blocks"])
        problem = first(
            differs(f"hits at step {t}", per_head, x[f"{policy}_hits"][t]),
            differs(f"sum of hits at step {t}", hits, x[f"{policy}_hits"][t].sum()),
            differs(f"updates at step {t}", order, x["update_blocks"][t][x["update_blocks"][t] >= 0]),
            differs(f"residents after step {t}", _padded(cache, x), x[f"{policy}_cached_after"][t]),
        )
        if problem:
            return problem
    return None


def _counted(middle: torch.Tensor, block: int):
    from collections import Counter

    return Counter((middle.flatten() // block).tolist())


def _padded(cache: BlockCache, x: dict[str, np.ndarray]) -> np.ndarray:
    """Sorted residents, -1 for free places where the vector has them."""
    width = x["lfu_cached_after"].shape[1]
    free = [-1] * (width - len(cache.frequency))
    ours = sorted(cache.frequency)
    first_row = x["lfu_cached_after"][0].tolist()
    return np.array(free + ours if first_row == sorted(first_row) else ours + free)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_block_cache_agrees_with_reference_vectors(path: Path) -> None:
    assert [problem for _, problem in run_vectors(path)] == [None, None]


def test_a_growing_block_is_never_taken_in() -> None:
    cache = BlockCache(BlockCacheSpec(8, 4, 4, "lru"))
    hits, filled = cache.access(torch.tensor([[0, 1, 9]]), n_complete=2)
    assert (hits, filled, list(cache.frequency)) == (0, 1, [0])


def test_a_block_evicted_within_one_step_costs_no_fill() -> None:
    cache = BlockCache(BlockCacheSpec(4, 4, 4, "lru"))  # room for one block
    assert cache.access(torch.tensor([[0, 0, 4]]), n_complete=2) == (0, 1)
    assert list(cache.frequency) == [1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((64, 128, 8, "lru"), "holds no block"),
        ((256, 128, 8, "fifo"), "use lfu or lru"),
        ((-1, 128, 8, "lru"), "0 or more"),
    ],
)
def test_impossible_caches_are_refused(arguments: tuple, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(BlockCacheSpec, dict(zip(("tokens", "block_len", "k_cache", "policy"), arguments, strict=True)), "cache")
