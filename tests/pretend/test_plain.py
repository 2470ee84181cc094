"""`kernels=torch` on a pretended GPU: every method's torch form, with the tokens and the books of a CPU."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.benchmarks.launches import BUDGETS
from kvbench.benchmarks.pretend import machine as pretended
from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.benchmarks.pretend.tensors import Pretended
from kvbench.engine.batch import Batch
from kvbench.engine.books.ledger import Entry
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.caches.range_code import RangeCode
from kvbench.engine.caches.token_code import TokenCode
from kvbench.engine.decode import decode
from kvbench.engine.model import Model
from kvbench.kernels import build, fast, scratch
from kvbench.tests import conformance
from kvbench.tests.pretend.test_methods import CACHE, N_NEW, answer, moved, on_cpu

NAMES = [*BUDGETS]
# Those whose files ask for float64: of others every device says what one without it does, which is asked below.
FINE = (
    *("attention_matching", "clusterkv", "magicpig", "pqcache", "shadowkv", "think", "triattention", "turboquant"),
    *("full", "xkv"),
)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refused(*_: Any) -> None:
        raise AssertionError("a kernel of ours was launched")

    monkeypatch.setattr(pretended, "launch", refused)
    build.choose("torch")
    yield
    build.choose("auto")


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in FINE else pytest.mark.slow) for x in NAMES])
def test_torch_alone_answers_as_a_cpu(machine: Machine, plain: None, name: str) -> None:
    with conformance.wide_enough(conformance.ours(name)):
        build.choose("auto")
        expected = on_cpu(name)
        build.choose("torch")
        assert answer(moved(conformance.model(), "cuda:0"), name) == expected


ALONE = [  # an op, and a method whose steps or prompts use its kernel
    *(("codes", "kivi"), ("codes", "turboquant"), ("packing", "kivi"), ("packing", "turboquant"), ("soften", "h2o")),
    *(("evict", "h2o"), ("evict", "tova"), ("topk", "shadowkv"), ("landmarks", "shadowkv"), ("buckets", "magicpig")),
    *(("clusters", "retroinfer"), ("kmeans", "retroinfer"), ("column_sums", "h2o"), ("step", "retroinfer")),
    *(pytest.param(op, "pqcache", marks=pytest.mark.slow) for op in ("topk", "pq_scores")),
]


@pytest.mark.parametrize(("op", "name"), ALONE)
def test_an_op_that_is_left_out_alone_changes_no_answer(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, op: str, name: str
) -> None:
    expected, gpu = on_cpu(name), torch.device("cuda", 0)
    monkeypatch.setitem(fast.LEFT_OUT, gpu, {op: "it is wrong"})
    assert answer(moved(conformance.model(), "cuda:0"), name) == expected


def fetched(model: Model, name: str, cache: BlockCacheSpec | None, code: TokenCode | None) -> tuple[Any, list[Entry]]:
    """Tokens and ledger of a method that fetches from a host of codes, or keeps blocks of what it fetched."""
    one = conformance.ours(name)
    request = BudgetRequest(Fraction(2, 5), None, Fraction(one.comm))
    variant = one.kind.variant_for(one.params, request, model.shape, conformance.S, cache)
    with model.hooked():
        trace = conformance.read([variant], by=model)
        row = variant.row(trace, N_NEW)
        row.store.host_code = code
        for layer in trace.shape.attention_layers:
            row.build(layer)
        row.complete()
        trace.settle()
        done = decode(model, trace, [row], max_new_tokens=N_NEW)
    return done.answers[0].ids, row.store.ledger.entries


def test_a_cache_of_blocks_without_its_kernel_counts_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fetched(conformance.model(), "retroinfer", CACHE, None)
    monkeypatch.setitem(fast.LEFT_OUT, torch.device("cuda", 0), {"blocks": "it is wrong"})
    assert fetched(moved(conformance.model(), "cuda:0"), "retroinfer", CACHE, None) == expected


@pytest.mark.parametrize(("name", "cache"), [("pqcache", CACHE), ("retroinfer", CACHE), ("pqcache", None)])
@pytest.mark.parametrize("code", [None, RangeCode(4, 4, 8)])
def test_what_is_fetched_is_counted_as_on_a_cpu(
    machine: Machine, plain: None, name: str, cache: BlockCacheSpec | None, code: TokenCode | None
) -> None:
    """Whether the host has codes, and whether blocks of it are kept."""
    expected = fetched(conformance.model(), name, cache, code)
    assert fetched(moved(conformance.model(), "cuda:0"), name, cache, code) == expected
    assert cache is None or sum(entry.cache_hits for entry in expected[1]) > 0


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that know no float64, as Apple's."""
    make = Pretended.__new__

    def made(cls: type[Pretended], inner: Tensor, index: int) -> Pretended:
        if inner.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return make(cls, inner, index)

    monkeypatch.setattr(Pretended, "__new__", made)
    monkeypatch.setattr(scratch, "WITHOUT_FLOAT64", ("cuda",))


@pytest.mark.parametrize("name", NAMES)
def test_a_device_without_float64_answers_too(machine: Machine, plain: None, single: None, name: str) -> None:
    test_torch_alone_answers_as_a_cpu(machine, plain, name)


@pytest.mark.parametrize(
    "names", [("full", "h2o", "tova"), ("pqcache", "retroinfer", "magicpig"), ("kivi", "shadowkv")]
)
def test_feeds_are_read_and_answered_as_on_a_cpu(machine: Machine, plain: None, names: tuple[str, ...]) -> None:
    """Some tokens at once on a CPU, one by one where a device works."""

    def said(model: Model) -> list[list[int]]:
        kinds = [conformance.ours(name) for name in names]
        variants = [conformance.variant(one, conformance.accepted(one, ["0.3", "1"])[0]) for one in kinds]
        with model.hooked():
            trace, rows = conformance.trace_and_rows(variants, 4 * N_NEW, model)
            batch = Batch(model, trace, rows)
            logits = batch.read([[5, 6, 9], [8], [3, 4]][: len(rows)])
            return [each.ids for each in batch.answer(logits, [N_NEW] * len(rows))]

    expected = said(conformance.model())
    assert said(moved(conformance.model(), "cuda:0")) == expected
