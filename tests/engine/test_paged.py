"""The same method files over pages: the tokens and the books of the main engine, and blocks that come back."""

from math import ceil
from typing import Any

import pytest
import torch

from kvbench.engine.decode import decode
from kvbench.engine.errors import ConfigError, RunError
from kvbench.engine.paged.pool import BLOCK, Pages, Pool
from kvbench.engine.paged.serve import Serving
from kvbench.engine.prefill import prefill
from kvbench.methods.base import Variant
from kvbench.tests import conformance
from kvbench.tests.conformance import model, ours
from kvbench.tests.tiny import prompt
from kvbench.tests.vectors import built

S, N_NEW = 240, 40
METHODS = ("full", "streamingllm", "snapkv", "quest", "pqcache")
MORE = ("oracle", "tova", "h2o", "knorm", "clusterkv", "retroinfer", "magicpig", "pyramidkv", "attention_matching")


def variant(name: str, ratio: str, *settings: str) -> Variant:
    return conformance.variant(ours(name, *settings), ratio)


def both(one: Variant, heads: int = 1) -> tuple[Any, Any, Serving, Any]:
    """Answers and rows of the main engine and of pages."""
    with model().hooked():
        trace = prefill(model(), prompt(S), one.observations)
        with torch.inference_mode():
            row = built(one.row(trace, N_NEW))
        main = decode(model(), trace, [row], max_new_tokens=N_NEW).answers[0].ids
    serving = Serving(model(), 4000, 4000, heads)
    request = serving.read(prompt(S), one, N_NEW)
    return (main, row), (serving.answer(request, N_NEW), request.row), serving, request


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_tokens_and_ledger_are_those_of_the_main_engine(name: str, heads: int) -> None:
    (ids, row), (paged, own), *_ = both(variant(name, "0.2" if name != "full" else "1"), heads)
    assert paged == ids
    assert own.store.ledger.columns() == row.store.ledger.columns()
    assert own.store.ledger.rebuilt_bytes == row.store.ledger.rebuilt_bytes


@pytest.mark.parametrize("name", MORE)
def test_so_are_those_of_methods_that_ask_for_more(name: str) -> None:
    (ids, row), (paged, own), *_ = both(variant(name, "0.3"))
    assert paged == ids
    assert own.store.ledger.columns() == row.store.ledger.columns()


@pytest.mark.parametrize("name", METHODS)
def test_blocks_that_no_token_needs_go_back_to_the_pool(name: str) -> None:
    """Behind the prompt a layer has blocks for what its placement says, and a block more as its tokens need one."""
    one = variant(name, "0.2" if name != "full" else "1")
    serving = Serving(model(), 4000, 4000)
    request = serving.read(prompt(S), one, N_NEW)
    shape, layers = model().shape, request.row.store.layers.values()
    tables = shape.h_kv * len(layers)
    assert request.n_read == tables * ceil(S / BLOCK)
    assert request.n_kept == sum(shape.h_kv * ceil((at.n_kept + at.n_window) / BLOCK) for at in layers)
    assert serving.device.n_used == request.n_kept and (request.n_kept < request.n_read or name == "full")
    fetching = sum(at.can_fetch for at in layers)
    assert serving.host.n_used == fetching * shape.h_kv * ceil(S / BLOCK)
    assert (fetching > 0) == (name in ("quest", "pqcache"))
    serving.answer(request, N_NEW)
    assert serving.device.n_used == sum(shape.h_kv * ceil((at.n_kept + at.n_window) / BLOCK) for at in layers)
    request.end()
    assert serving.device.n_used == serving.host.n_used == 0


def test_what_is_given_back_serves_the_next_request() -> None:
    """A pool with room for two prompts reads four, one after the other, once each was compressed."""
    one, shape = variant("snapkv", "0.2"), model().shape
    of_prompt = shape.h_kv * len(shape.attention_layers) * ceil(S / BLOCK)
    serving = Serving(model(), 2 * of_prompt)
    requests = [serving.read(prompt(S, seed), one, N_NEW) for seed in range(4)]
    answers = [serving.answer(request, N_NEW) for request in requests]
    assert answers == [both(one)[0][0] if seed == 0 else answers[seed] for seed in range(4)]
    full = Serving(model(), 2 * of_prompt)
    with pytest.raises(RunError, match="blocks of the pool are taken"):
        for seed in range(4):
            full.read(prompt(S, seed), variant("full", "1"), N_NEW)


def test_a_layout_without_pages_is_refused_in_a_sentence() -> None:
    one = variant("adakv", "0.2")
    with pytest.raises(ConfigError, match="the paged engine has no pages for Ragged"):
        Serving(model(), 4000).read(prompt(S), one, N_NEW)


def test_slots_lie_in_blocks_that_are_taken_as_they_are_written() -> None:
    pool = Pool(20, model().shape, torch.float32)
    pages, h_kv = Pages(pool), pool.h_kv
    tokens = torch.randn(1, h_kv, 20, pool.k.shape[-1])
    pages.hold(tokens, -tokens, 30)
    assert pages.n_slots == 50 and pool.n_used == pages.n_blocks == h_kv * 2
    pages.write(20, tokens[:, :, :13], -tokens[:, :, :13])
    part = pages.part(0, 33)
    assert pool.n_used == h_kv * 3 and torch.equal(part.k, torch.cat([tokens, tokens[:, :, :13]], 2))
    assert torch.equal(part.v, -part.k)
    pages.move(30, None, torch.arange(3).expand(1, h_kv, -1))
    assert torch.equal(pages.part(0, 3).k, tokens[:, :, 10:13])
    pages.cover(16)
    assert pool.n_used == h_kv
