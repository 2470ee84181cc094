"""A method's row in pages like vLLM's, with vLLM's chunks, preemptions and blocks, and without vLLM: tokens and books
are those of the main engine.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from math import ceil
from typing import Any

import pytest
import torch

from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.engine.prefill import prefill
from kvbench.methods.base import Variant
from kvbench.serving.order import DROPPING, PAGES, VISIBLE, Order
from kvbench.serving.pages import Pages, beside
from kvbench.tests import conformance
from kvbench.tests.conformance import model, ours
from kvbench.tests.serving.pretend import FORMS, Pretend
from kvbench.tests.tiny import prompt
from kvbench.tests.vectors import built

S, N_NEW = 240, 40
ON_GPUS = ("flash", "infer", "across")  # forms of pages
QUEST = "quest method.comm_mode=native method.page_len=16 method.page_generated=true method.agg=group_mean"
DROPPED = ("streamingllm", "snapkv", "knorm", "keydiff", "tova", "full")
SEEN = (*DROPPED, "oracle", "pqcache", "quest", "sparq", "clusterkv", "adakv", "lagkv", "h2o", "infllm", "magicpig")


def order_of(one: Callable[[int], Variant], model: Model, rung: str, slack: int | None = None) -> Order:
    """An order whose method is a variant of the tiny model's."""
    order = Order((), rung, slack)
    order.__dict__["variant"] = one
    order.__dict__["chosen"] = type("Tiny", (), {"shape": model.shape})()
    return order


def variants(name: str, ratio: str = "0.3") -> Callable[[int], Variant]:
    subject = ours(*name.split(), *(["method.full_layers=0"] if name == "knorm" else []))
    if name == QUEST:  # whose bounds are many for so short a prompt
        subject = replace(subject, comm="1/4")
    return lambda s: replace(conformance.variant(subject, ratio), is_checked=True) if s == S else fail(s)


def fail(s: int) -> Any:
    raise AssertionError(s)


def wanted(one: Variant, seed: int = 0) -> tuple[list[int], Any]:
    with model().hooked(), torch.inference_mode():
        trace = prefill(model(), prompt(S, seed), one.observations)
        row = built(one.row(trace, N_NEW))
        return decode(model(), trace, [row], max_new_tokens=N_NEW).answers[0].ids, row


def engine(name: str, rung: str, ratio: str = "0.3", slack: int | None = None, form: str = "cpu") -> Pretend:
    return Pretend(model(), order_of(variants(name, ratio), model(), rung, slack), form=FORMS[form])


def ratio_of(name: str) -> str:
    return "1" if name == "full" else "0.3"


@cache
def by_the_main_engine(name: str) -> tuple[list[int], Any]:
    return wanted(variants(name, ratio_of(name))(S))


@pytest.mark.parametrize(
    ("name", "chunk", "form"),
    [(name, chunk, "cpu") for name in SEEN for chunk in (None, 100)]
    + [(name, 100, form) for name in ("snapkv", "quest", "pqcache", "adakv") for form in ON_GPUS],
)
def test_visible_rows_say_what_the_main_engine_says(name: str, chunk: int | None, form: str) -> None:
    """A prompt may come in chunks that are no multiple of a block."""
    ids, row = by_the_main_engine(name)
    serving = engine(name, VISIBLE, ratio_of(name), form=form)
    one = serving.ask("a", prompt(S), N_NEW)
    with model().hooked():
        assert serving.answer(one, chunk) == ids
    books = serving.desk.readers["a"].row.store.ledger
    assert books.totals("attended") == row.store.ledger.totals("attended")
    assert books.totals("moved_kv_bytes") == row.store.ledger.totals("moved_kv_bytes")


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, "cpu") for name in DROPPED] + [(name, form) for name in ("snapkv", "tova") for form in ON_GPUS],
)
def test_dropping_rows_say_it_from_the_blocks_that_stay(name: str, form: str) -> None:
    """Freed blocks are filled with NaN by whoever takes them, so that a stale read would show."""
    ids, row = by_the_main_engine(name)
    serving = engine(name, DROPPING, ratio_of(name), form=form)
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
    assert len(a.blocks) == ceil((kept + N_NEW - 1) / serving.block)
    assert (before < len(serving.free)) == (name != "full")
    for each in (a, b):
        serving.end(each)
    assert len(serving.free) == 200


@pytest.mark.parametrize(
    ("name", "rung", "chunk", "form"),
    [(*at, "cpu") for at in product(("snapkv", "streamingllm", "tova", "knorm"), (VISIBLE, DROPPING), (None, 64))]
    + [("snapkv", DROPPING, chunk, form) for chunk in (None, 64) for form in ON_GPUS],
)
def test_a_preempted_request_reads_its_answer_again_and_goes_on(
    name: str, rung: str, chunk: int | None, form: str
) -> None:
    """Both after it was compacted: all of its blocks are gone, and come back as a prompt's do."""
    ids, row = by_the_main_engine(name)
    serving = engine(name, rung, form=form)
    one = serving.ask("a", prompt(S), N_NEW)
    with model().hooked():
        for _ in range(15):
            serving.step(one)
        serving.preempt(one)
        assert len(serving.free) == 200
        assert serving.answer(one, chunk) == ids
    assert serving.desk.replays == (chunk is None)  # in chunks, no pass has prompt and answer together
    assert serving.desk.readers["a"].row.store.ledger.totals("attended") == row.store.ledger.totals("attended")


@pytest.mark.parametrize("is_preempted", [False, True])
@pytest.mark.parametrize("form", ON_GPUS)
def test_a_paged_kernel_reads_what_quest_selects(form: str, is_preempted: bool) -> None:
    """From blocks of one head, which overlap where tokens come before heads in memory. An answer that is read again is
    not the kernel's.
    """
    ids, row = by_the_main_engine(QUEST)
    serving = engine(QUEST, PAGES, form=form)
    one = serving.ask("a", prompt(S), N_NEW)
    with model().hooked():
        if is_preempted:
            for _ in range(15):
                serving.step(one)
            serving.preempt(one)
        assert serving.answer(one, None if is_preempted else 100) == ids
    assert serving.desk.replays == is_preempted
    assert serving.desk.readers["a"].row.store.ledger.totals("attended") == row.store.ledger.totals("attended")


@pytest.mark.parametrize("form", ["cpu", "flash"])
def test_a_cancelled_request_leaves_nothing_behind(form: str) -> None:
    serving = engine("snapkv", DROPPING, form=form)
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
    assert len(one.blocks) == ceil((variants("streamingllm")(S).budget.tokens + 1) / serving.block)


@pytest.mark.parametrize("form", FORMS)
def test_a_page_is_written_and_read_as_vllm_has_it(form: str) -> None:
    """`vec` has K dimension by dimension and V token by token, in the two halves of a block; others have them side by
    side."""
    layout, block = FORMS[form].layout, FORMS[form].block
    cache = FORMS[form].caches(1, 3, 2, 8, torch.device("cpu"))[0]
    pages, table = Pages.of(cache, layout), torch.tensor([2, 0, 1])
    k, v = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    pages.write(table, torch.arange(40).unsqueeze(0), k, v)
    own = cache[2, 1]
    halves = own.chunk(2, -1) if layout is beside else (own.reshape(2, 8, block)[0].T, own.reshape(2, block, 8)[1])
    assert torch.equal(halves[0], k[0, 1, :block]) and torch.equal(halves[1], v[0, 1, :block])
    slots = torch.tensor([[3, 39], [0, 33]])
    read = pages.read(table, slots)
    assert torch.equal(read[0][0, 1], k[0, 1, slots[1]]) and torch.equal(read[1][0, 0], v[0, 0, slots[0]])
