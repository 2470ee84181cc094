"""Every method on a pretended GPU: the paths that only a GPU takes, with the tokens and the books of the CPU's."""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kvbench.benchmarks.launches import BUDGETS
from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.books.ledger import Entry
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.caches.blocks import BlockCacheSpec
from kvbench.engine.decode import Decoded, decode
from kvbench.engine.model import Model
from kvbench.engine.passes import replay
from kvbench.engine.passes.second_pass import run_second_passes
from kvbench.engine.prefill import prefill
from kvbench.engine.selection import Behind, Reuse
from kvbench.evals.overrides import config_groups
from kvbench.kernels.pq_fit import Fit, pq_fit
from kvbench.methods.base import SelectiveAttention, Variant
from kvbench.methods.retrieving import pqcache_quantiser
from kvbench.methods.retrieving.pqcache import PQCache
from kvbench.methods.retrieving.pqcache_quantiser import Quantiser
from kvbench.tests import conformance
from kvbench.tests.tiny import prompt

N_NEW = 5
SLOW = {"pqcache": 1}  # rows of methods whose kernels take seconds in the interpreter; of others there are two
PRESETS = sorted({*config_groups()["method"]} - {*BUDGETS})


@pytest.fixture(autouse=True)
def graphs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step comes without graphs, the second one is captured, the others are replayed."""
    monkeypatch.setattr(replay, "LEAST", 1)


def moved(model: Model, device: str) -> Model:
    hf = copy.deepcopy(model.hf).to(device)
    return replace(model, hf=hf, device=torch.device(device))


def answer(
    model: Model, name: str, *settings: str, seen: list[Decoded] | None = None, n_new: int = N_NEW
) -> tuple[list[list[int]], list[list[Entry]]]:
    """Tokens and ledgers of a method's rows, built beside the prefill as in a run."""
    one = conformance.ours(name, *settings)
    variant = conformance.variant(one, conformance.accepted(one, ["0.3", "1"])[0])  # codes alone keep every token
    rows = []

    def build(trace, layer):
        if not rows:
            rows.extend(variant.row(trace, n_new) for _ in range(SLOW.get(name, 2)))
        for row in rows:
            row.build(layer)

    with model.hooked():
        trace = prefill(model, prompt(conformance.S), variant.observations, build, variant.pruning)
        run_second_passes(model, trace, variant.second_passes)
        for row in rows:
            row.complete()
        trace.settle()
        done = decode(model, trace, rows, max_new_tokens=n_new)
    if seen is not None:
        seen.append(done)
    return [each.ids for each in done.answers], [row.store.ledger.entries for row in rows]


@cache
def on_cpu(name: str) -> tuple[list[list[int]], list[list[Entry]]]:
    return answer(conformance.model(), name)


# A kind each; the interpreter takes up to half a minute for each of the others. One more answers on a second device.
TINY = ("kivi",)  # whose groups are too small here for a kernel that reads codes
QUICK = ("full", "streamingllm", "adakv", "duo_attention", "lagkv")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BUDGETS]
)
def test_it_answers_as_on_a_cpu(machine: Machine, name: str) -> None:
    """By graphs, unless the method says what it does at each step that none could hold."""
    expected, seen = on_cpu(name), list[Decoded]()
    assert answer(moved(conformance.model(), "cuda:0"), name, seen=seen) == expected
    one, (done,) = conformance.ours(name), seen
    if name in (*TINY, *PRESETS):  # some presets evict, or page what is generated, at each of so few steps
        return
    said = f"{one.kind.title} {one.kind.traits.eager}" if one.kind.traits.eager else None
    assert bool(done.by_graphs) == (said is None) and done.why_no_graphs == said


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_answers_as_on_a_cpu(machine: Machine, name: str) -> None:
    test_it_answers_as_on_a_cpu(machine, name)


@pytest.mark.parametrize("name", ["snapkv", pytest.param("pqcache", marks=pytest.mark.slow)])
def test_it_answers_on_another_device(machine: Machine, name: str) -> None:
    assert answer(moved(conformance.model(), "cuda:1"), name) == on_cpu(name)


@pytest.mark.parametrize(
    ("settings", "where"),
    [([], ("cuda", False)), (["method.cluster_on=cpu"], ("cpu", False)), (["method.overlap=false"], ("cuda", True))],
)
def test_keys_are_clustered_where_it_says(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, settings: list[str], where: tuple[str, bool]
) -> None:
    """PQCache's: on which device, and whether on the thread of the prefill."""
    seen = set()

    def noted(points: Tensor, *args: Any, **options: Any) -> Fit:
        seen.add((points.device.type, threading.current_thread() is threading.main_thread()))
        return pq_fit(points, *args, **options)

    def quantised(model: Model, *settings: str) -> Quantiser:
        variant = conformance.variant(conformance.ours("pqcache", *settings), "0.3")
        trace = conformance.read([variant], by=model)
        with torch.inference_mode():
            row = cast("PQCache", variant.row(trace, N_NEW))
            row.build(0)
            return row.ready(0, 1)

    expected = quantised(conformance.model())
    monkeypatch.setattr(pqcache_quantiser, "pq_fit", noted)
    found = quantised(moved(conformance.model(), "cuda:0"), *settings)
    assert seen == {where}
    assert found.resident.is_cuda and not found.centroids.is_cuda and found.codes.data.is_pinned()
    torch.testing.assert_close(found.resident.cpu(), expected.resident)
    assert torch.equal(found.codes.codes(), expected.codes.codes())


def together(
    model: Model, variants: Sequence[Variant], on_step: Callable[[int, int], None] | None = None
) -> tuple[list[list[int]], list[SelectiveAttention]]:
    """Tokens and rows of variants that answer in one batch."""
    with model.hooked():
        trace, rows = conformance.trace_and_rows(variants, N_NEW, model)
        done = decode(model, trace, rows, max_new_tokens=N_NEW, on_step=on_step)
    return [x.ids for x in done.answers], rows


CACHE = BlockCacheSpec(tokens=48, block_len=8, k_cache=3, policy="lfu")


@pytest.mark.parametrize(
    "name", ["oracle", *(pytest.param(x, marks=pytest.mark.slow) for x in ("pqcache", "quest", "sparq", "clusterkv"))]
)
def test_a_cache_of_blocks_answers_and_counts_as_on_a_cpu(machine: Machine, name: str) -> None:
    """And holds on the device what the ledger says, with nothing to wait for."""

    def cached(model: Model) -> tuple[list[list[int]], list[list[Entry]], int, int]:
        one = conformance.ours(name, *(["method.cache_steps=0"] if name == "clusterkv" else []))
        request = BudgetRequest(Fraction(2, 5), None, Fraction(one.comm))
        variant = one.kind.variant_for(one.params, request, model.shape, conformance.S, CACHE)
        waits = []
        with machine.counting() as counts:
            ids, rows = together(model, [variant] * 2, lambda *_: waits.append(counts.waits))
        caches = [getattr(x, "held", None) for x in rows[0].store.layers.values()]
        held = sum(cache.nbytes for cache in caches if cache is not None)
        return ids, [x.store.ledger.entries for x in rows], held, waits[-1] - waits[-2]

    ids, books, held, waits = cached(moved(conformance.model(), "cuda:0"))
    expected_ids, expected, _, _ = cached(conformance.model())
    assert ids == expected_ids and books == expected
    shape, n_layers = conformance.model().shape, len(layers_with_cache(expected[0]))
    assert held == n_layers * 48 * shape.h_kv * 2 * shape.d_h * 4 and waits == 1  # float32
    assert sum(entry.cache_hits for entry in expected[0]) > 0 < sum(entry.filled_bytes for entry in expected[0])


def layers_with_cache(entries: list[Entry]) -> set[int]:
    """Layers that looked something up."""
    return {entry.layer for entry in entries if entry.cache_lookups}


def test_rows_that_keep_what_they_fetched_stand_beside_others(machine: Machine) -> None:
    """What one row still has of earlier steps says nothing of another, whose copies live for a step."""

    kinds = [conformance.ours("clusterkv", f"method.cache_steps={n}") for n in (0, 1)]
    variants = [conformance.variant(one, "0.3") for one in kinds]
    (ids, rows), (expected, theirs) = (
        together(model, variants) for model in (moved(conformance.model(), "cuda:0"), conformance.model())
    )
    assert ids == expected
    assert [x.store.ledger.entries for x in rows] == [x.store.ledger.entries for x in theirs]


RETRIEVING = ("quest", "infllm", "sparq", "clusterkv", "pqcache", "double_sparsity", "loki", "shadowkv")


@pytest.mark.parametrize("name", ["oracle", *(pytest.param(x, marks=pytest.mark.slow) for x in RETRIEVING)])
def test_layers_that_take_over_a_choice_answer_as_on_a_cpu(machine: Machine, name: str) -> None:
    """Without graphs, and beside a row whose layers all search for themselves, which is planned as ever."""
    given = conformance.ours(name)
    one = replace(given, params=replace(given.params, full_layers=0)) if given.kind.traits.skips else given
    usual = conformance.variant(one, "0.3")
    mapped = Reuse((0, 1), (Behind(2, 1, (1, 0)),))
    variants = [replace(usual, reuse=Reuse((0,), (Behind(1, 0), Behind(2, 0)), all_too=(0,))), usual]
    variants += [replace(usual, reuse=mapped)] if name in ("oracle", "quest") else []
    seen = list[Decoded]()

    def answered(model: Model) -> tuple[list[list[int]], list[list[Entry]]]:
        with model.hooked():
            trace, rows = conformance.trace_and_rows(variants, N_NEW, model)
            seen.append(decode(model, trace, rows, max_new_tokens=N_NEW))
        return [x.ids for x in seen[-1].answers], [x.store.ledger.entries for x in rows]

    assert answered(moved(conformance.model(), "cuda:0")) == answered(conformance.model())
    assert seen[0].by_graphs == 0 and "attend to what another one chose (reuse)" in (seen[0].why_no_graphs or "")
