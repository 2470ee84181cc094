"""A step compiles no kernel that the one before it had, though its numbers are others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvbench.kernels import clusters, pages
from kvbench.kernels.jit import triton
from kvbench.kernels.pq_codes import PackedCodes
from kvbench.kernels.pq_scores import Coded, pq_keys_triton, table_of
from kvbench.kernels.rows import chunks, columns, logits
from kvbench.kernels.rows.union import Ask, Far, FetchLaunch
from kvbench.tests.kernels.clocks import aged
from kvbench.tests.specialisations import noting

H, H_KV, D, S = 4, 2, 16, 800
N_STEPS = 40  # none of which needs another power of two than the others
pytestmark = [
    pytest.mark.skipif(triton is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not in Triton's interpreter"),
]
Step = Callable[[int], object]


def positions(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def search_chunks() -> Step:
    told = chunks.table_of([chunks.Chunked(torch.zeros(H_KV, 2 * D, S), S, 2, 3)], torch.device("cpu"))
    q, new = torch.zeros(1, H, 1, D), torch.zeros(1, H_KV, 1, D)
    return lambda age: chunks.chunk_keys(q, new, told, 1.0, since=aged(age, "cpu"))


def search_tokens() -> Step:
    prompt, late = torch.zeros(1, H_KV, S, D), torch.zeros(1, H_KV, 64, D)
    told = logits.table_of([logits.Searched(prompt, late, S, 3, S)], torch.device("cpu"))
    q = torch.zeros(1, H, 1, D)

    def step(age: int) -> None:
        found = logits.token_logits(q, told, 1.0, since=aged(age, "cpu"))
        logits.weigh_logits(*found, told, "group_mean", aged(age, "cpu"))

    return step


def search_columns() -> Step:
    prompt, late, mean = torch.zeros(H_KV, D, S), torch.zeros(1, H_KV, 64, D), torch.zeros(1, H_KV, 1, D)
    told = columns.table_of([columns.Columns(prompt, late, mean, S, 3, S, 20)], torch.device("cpu"))
    q, new = torch.zeros(1, H, 1, D), torch.zeros(1, H_KV, 1, D)

    def step(age: int) -> None:
        since = aged(age, "cpu")
        found = columns.find_components(q, new, told, 3, 1.0, since)
        keys, approximate, lses = columns.component_keys(q, *found, told, since=since)
        columns.cover(keys[..., :20].contiguous(), approximate, lses, told, since=since)

    return step


def search_channels() -> Step:
    """A candidate more at every step."""
    q, basis, partial = torch.zeros(1, H, 1, D), torch.zeros(H_KV, D, 4), torch.zeros(H_KV, S + N_STEPS, 4)
    return lambda age: logits.channel_keys(q, basis, partial[:, : S + age].contiguous(), "group_mean")


def search_blocks() -> Step:
    told, q = logits.blocks_of([torch.zeros(100, H_KV, D)]), torch.zeros(1, H, 1, D)
    return lambda age: logits.block_keys(q, told, 30 + age, True)


def search_pages() -> Step:
    """A page more at every step, and as many tokens as it has."""
    q, bounds = torch.zeros(1, H, 1, D), torch.zeros(1, H_KV, 100, D)

    def step(age: int) -> None:
        some = bounds[:, :, : 30 + age]
        keys = pages.page_keys_triton(q, some, some, "group_mean")
        pages.expand_keys_triton(keys[:, :, : 10 + age], age, 16, S + age)

    return step


def search_clusters() -> Step:
    """A token more of as many clusters more."""

    def step(age: int) -> None:
        tables = positions(H_KV, 99 + age), positions(H_KV, 99 + age), positions(H_KV, S + age)
        clusters.cluster_tokens_triton(positions(1, H, 70 + age), *tables, 50 + age, age)

    return step


def search_codes() -> Step:
    codes, n_first = PackedCodes(H_KV, 2, 4, S + 64, "cpu"), S - 60  # another block of tokens begins
    codes.n = S + 64
    row = Coded(torch.zeros(H_KV, 2, 16, D // 2), codes, 3, n_first)
    q, new = torch.zeros(1, H, 1, D), torch.zeros(1, H_KV, 1, D)

    def step(age: int) -> None:
        """Planned anew, as where a window is full."""
        pq_keys_triton(q, new, table_of([row._replace(stop=n_first + age)], q.device), 1.0)

    return step


def bring() -> Step:
    stamps, slots, tokens, sources = torch.zeros(4, H_KV, S, dtype=torch.int32)
    ask = Ask(positions(1, H, 20), stamps, slots, tokens, sources, 1, 2)
    k = torch.zeros(1, H_KV, S, D)
    launch = FetchLaunch([ask], [Far(k, k, (k, k), k, k)], 0, 3, N_STEPS)
    return lambda age: launch.take(aged(age, "cpu"))


SITES = {
    each.__name__: each
    for each in (
        search_chunks, search_tokens, search_columns, search_channels, search_blocks, search_pages, search_clusters,
        search_codes, bring,
    )
}  # fmt: skip


@pytest.mark.parametrize("site", SITES)
def test_steps_that_follow_each_other_ask_for_one_specialisation(site: str) -> None:
    step = SITES[site]()
    with noting(runs=False) as noted:
        for age in range(N_STEPS):
            step(age)
    assert noted and noted.changing() == {}
