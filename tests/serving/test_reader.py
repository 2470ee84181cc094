"""A method's row in pages like vLLM's, with vLLM's chunks, preemptions and blocks, and without vLLM: tokens and books
are those of the main engine.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import ceil
from typing import Any

import pytest
import torch

from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.prefill import prefill
from kvbench.methods.base import Variant
from kvbench.serving.order import DROPPING, VISIBLE, Order
from kvbench.serving.pages import Pages
from kvbench.tests import conformance
from kvbench.tests.conformance import model, ours
from kvbench.tests.serving.pretend import BLOCK, Pretend
from kvbench.tests.tiny import prompt
from kvbench.tests.vectors import built

S, N_NEW = 240, 40
DROPPED = ("streamingllm", "snapkv", "knorm", "keydiff", "tova", "full")
SEEN = (*DROPPED, "oracle", "pqcache", "quest", "sparq", "clusterkv", "adakv", "lagkv", "h2o", "infllm", "magicpig")


def order_of(one: Callable[[int], Variant], model: Model, rung: str, slack: int | None = None) -> Order:
    """An order whose method is a variant of the tiny model's."""
    order = Order((), rung, slack)
    order.__dict__["variant"] = one
    order.__dict__["chosen"] = type("Tiny", (), {"shape": model.shape})()
    return order


def variants(name: str, ratio: str = "0.3") -> Callable[[int], Variant]:
    subject = ours(name, *(["method.full_layers=0"] if name == "knorm" else []))
    return lambda s: replace(conformance.variant(subject, ratio), is_checked=True) if s == S else fail(s)


def fail(s: int) -> Any:
    raise AssertionError(s)


def wanted(one: Variant, seed: int = 0) -> tuple[list[int], Any]:
    with model().hooked(), torch.inference_mode():
        trace = prefill(model(), prompt(S, seed), one.observations)
        row = built(one.row(trace, N_NEW))
        return decode(model(), trace, [row], max_new_tokens=N_NEW).answers[0].ids, row


def engine(name: str, rung: str, ratio: str = "0.3", slack: int | None = None) -> Pretend:
    return Pretend(model(), order_of(variants(name, ratio), model(), rung, slack))


def ratio_of(name: str) -> str:
    return "1" if name == "full" else "0.3"


@cache
def by_the_main_engine(name: str) -> tuple[list[int], Any]:
    return wanted(variants(name, ratio_of(name))(S))


@pytest.mark.parametrize("chunk", [None, 100])
@pytest.mark.parametrize("name", SEEN)
def test_visible_rows_say_what_the_main_engine_says(name: str, chunk: int | None) -> None:
    """A prompt may come in chunks that are no multiple of a block."""
    ids, row = by_the_main_engine(name)
    serving = engine(name, VISIBLE, ratio_of(name))
    one = serving.ask("a", prompt(S), N_NEW)
    with model().hooked():
        assert serving.answer(one, chunk) == ids
    books = serving.desk.readers["a"].row.store.ledger
    assert books.totals("attended") == row.store.ledger.totals("attended")
    assert books.totals("moved_kv_bytes") == row.store.ledger.totals("moved_kv_bytes")


@pytest.mark.parametrize("name", DROPPED)
def test_dropping_rows_say_it_from_the_blocks_that_stay(name: str) -> None:
    """Freed blocks are filled with NaN by whoever takes them, so that a stale read would show."""
    ids, row = wanted(variants(name, ratio_of(name))(S))
    serving = engine(name, DROPPING, ratio_of(name))
    a, b = serving.ask("a", prompt(S), N_NEW), serving.ask("b", prompt(S), N_NEW)
    with model().hooked():
        for each in (a, b):
            serving.step(each)
        before = len(serving.free)
        for _ in range(N_NEW - 1):
            for each in (a, b):
                serving.step(each)
    assert a.said == b.said == ids
    assert serving.desk.readers["a"].row.store.ledger.columns() == row.store.ledger.columns()
    kept = variants(name, ratio_of(name))(S).budget.tokens
    assert len(a.blocks) == ceil((kept + N_NEW - 1) / BLOCK)
    assert (before < len(serving.free)) == (name != "full")
    for each in (a, b):
        serving.end(each)
    assert len(serving.free) == 200


@pytest.mark.parametrize("rung", [VISIBLE, DROPPING])
@pytest.mark.parametrize("name", ["snapkv", "streamingllm", "tova", "knorm"])
@pytest.mark.parametrize("chunk", [None, 64])
def test_a_preempted_request_reads_its_answer_again_and_goes_on(name: str, rung: str, chunk: int | None) -> None:
    """Both after it was compacted: all of its blocks are gone, and come back as a prompt's do."""
    ids, row = wanted(variants(name)(S))
    serving = engine(name, rung)
    one = serving.ask("a", prompt(S), N_NEW)
    with model().hooked():
        for _ in range(15):
            serving.step(one)
        serving.preempt(one)
        assert len(serving.free) == 200
        assert serving.answer(one, chunk) == ids
    assert serving.desk.replays == (chunk is None)  # in chunks, no pass has prompt and answer together
    assert serving.desk.readers["a"].row.store.ledger.totals("attended") == row.store.ledger.totals("attended")


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    serving = engine("snapkv", DROPPING)
    gone, other = serving.ask("a", prompt(S), N_NEW), serving.ask("b", prompt(S, 1), N_NEW)
    with model().hooked():
        for _ in range(5):
            serving.step(gone)
        serving.end(gone)
        assert serving.answer(other) == wanted(variants("snapkv")(S), 1)[0]
    assert [*serving.desk.readers] == ["b"] and serving.desk.books["a"]["steps"] == 4


def test_a_rolling_window_takes_no_more_blocks_than_it_began_with() -> None:
    serving = engine("streamingllm", DROPPING, slack=1)
    one = serving.ask("a", prompt(S), N_NEW)
    with model().hooked():
        assert serving.answer(one) == wanted(variants("streamingllm")(S))[0]
    assert len(one.blocks) == ceil((variants("streamingllm")(S).budget.tokens + 1) / BLOCK)


def test_a_page_is_written_and_read_as_vllm_has_it() -> None:
    """K lies dimension by dimension and V token by token, in the two halves of a block."""
    cache = torch.zeros(3, 2, BLOCK, 16)
    pages, table = Pages.of(cache), torch.tensor([2, 0])
    k, v = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    pages.write(table, torch.arange(40).unsqueeze(0), k, v)
    half = cache[2, 1].view(2, -1)
    assert torch.equal(half[0].view(8, BLOCK).T, k[0, 1, :BLOCK]) and torch.equal(
        half[1].view(BLOCK, 8), v[0, 1, :BLOCK]
    )
    slots = torch.tensor([[3, 39], [0, 33]])
    read = pages.read(table, slots)
    assert torch.equal(read[0][0, 1], k[0, 1, slots[1]]) and torch.equal(read[1][0, 0], v[0, 0, slots[0]])
