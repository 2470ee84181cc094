"""Methods that find tokens by an index: rows and feeds of the docs' example against its definition, token by token."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.search import Units, best_tokens, products
from kvbench.engine.turns.at_once import moments
from kvbench.engine.turns.feed import Feed
from kvbench.methods.indexed import Indexed
from kvbench.tests.tiny_run import example_files
from kvbench.tests.vectors import request, row_of, step, trace_of

H, H_KV, S, N_NEW, LENGTH = 6, 2, 70, 4, 8


def test_products_of_shared_keys_are_those_of_each_row() -> None:
    draw = torch.Generator().manual_seed(0)
    q, keys = torch.randn(3, 2, 4, 8, generator=draw), torch.randn(1, 2, 9, 8, generator=draw)
    torch.testing.assert_close(products(q, keys), products(q, keys.expand(3, -1, -1, -1).clone()))


def test_of_equal_units_the_first_are_taken_and_short_ones_end_with_no_token() -> None:
    scores = torch.tensor([[[1.0, 3.0, 3.0, 3.0]]])
    assert tokens(scores, Units(2, 8, length=2)) == [2, 3, 4, 5]
    assert tokens(scores, Units(3, 7, length=2)) == [2, 3, 4, 5, 6, -1]
    assert tokens(scores, Units(1, 4)) == [1] and tokens(scores, Units(9, 4, 2)) == [2, 3]
    assert tokens(scores, Units(2, 13, 5, length=2, origin=5)) == [7, 8, 9, 10]
    assert best_tokens(scores, Units(0, 4)) is None and best_tokens(scores, Units(2, 2, 2)) is None


def tokens(scores: Tensor, units: Units) -> list[int]:
    found = best_tokens(scores, units)
    assert found is not None
    return sorted(found[0, 0].tolist(), key=lambda token: (token < 0, token))


def mean_pages(folder: Path) -> type[Indexed]:
    """The fetching method of the docs."""
    path = example_files(folder, "smallest_keys", "mean_pages")[1]
    spec = importlib.util.spec_from_file_location("mean_pages", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MeanPages


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, S + N_NEW, 16, generator=draw) for heads in (H, H_KV, H_KV))
    return q, k, v


def at(x: Tensor, position: int) -> Tensor:
    return x[:, :, position : position + 1]


def rows(folder: Path, trace: Any) -> list[Any]:
    """Two budgets."""
    kind = mean_pages(folder)
    return [row_of(kind, kind.Params(LENGTH), trace, request(tokens=n, comm="1")) for n in (24, 40)]


def test_pages_of_the_docs_are_fetched_by_their_mean_keys(tmp_path: Path) -> None:
    q, k, v = drawn()
    each = rows(tmp_path, trace_of(k, v, H, S))
    assert each[0].index[0] is each[1].index[0]
    means = torch.stack([page.mean(2) for page in k[:, :, :S].split(LENGTH, 2)], 2)[0]  # (h_kv, pages, d_h)
    for t in range(N_NEW):
        now = at(q, S + t), at(k, S + t), at(v, S + t)
        for row, n_pages in zip(each, (3, 5), strict=True):
            out = step(row, *now, t=t + 1)
            for head in range(H):
                best = (means[head // 3] @ now[0][0, head, 0]).topk(n_pages).indices
                seen = torch.zeros(S + t + 1, dtype=torch.bool)
                seen[S:] = True
                for page in best.tolist():
                    seen[page * LENGTH : min(S, (page + 1) * LENGTH)] = True
                assert torch.equal(row.store.attended(0)[head], seen)
                logits = k[0, head // 3, : S + t + 1][seen] @ now[0][0, head, 0] / 4
                expected = logits.softmax(0) @ v[0, head // 3, : S + t + 1][seen]
                torch.testing.assert_close(out[0, head, 0], expected, atol=1e-5, rtol=0)
        entry = each[0].store.ledger.entries[-1]
        assert entry.moved_meta_bytes == 2 * H_KV * 16 * 9 and entry.resident_meta_bytes == entry.moved_meta_bytes


def test_a_feed_fetches_what_its_tokens_would_one_by_one(tmp_path: Path) -> None:
    q, k, v = drawn()
    row, other = rows(tmp_path, trace_of(k, v, H, S))[0], rows(tmp_path, trace_of(k, v, H, S))[0]
    feed = Feed(q[:, :, S:], k[:, :, S:], v[:, :, S:], row.trace.softmax[0], moments(row.store[0], N_NEW))
    assert row.selects_feeds(0)
    found = row.select_feed(0, feed)
    for t in range(N_NEW):
        step(other, at(q, S + t), at(k, S + t), at(v, S + t), t + 1)
        assert torch.equal(found.idx[t : t + 1], other.store[0].fetches[0])
        assert found.costs[t] == other.cost(0)
