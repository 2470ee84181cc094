"""How many variants fit beside each other."""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine import machine
from kvbench.engine.books.width import prompt_bytes, variant_bytes, waves
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.errors import ConfigError
from kvbench.engine.machine import free_bytes, free_cgroup_bytes
from kvbench.engine.prefill import prefill
from kvbench.evals.studies.hardware import method_of
from kvbench.methods.dropping.streamingllm import StreamingLLM
from kvbench.methods.full import Full
from kvbench.methods.retrieving.oracle import Oracle
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.vectors import built, row_for


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(0, 120), st.none() | st.integers(1, 8))
def test_waves_keep_order_and_overflow_only_with_a_single_variant(
    sizes: list[int], room: int, limit: int | None
) -> None:
    found = [sizes[where] for where in waves(sizes, room, limit)]
    assert [size for wave in found for size in wave] == sizes
    assert all(found)
    if limit is None:
        assert all(sum(wave) <= room or len(wave) == 1 for wave in found)
        pairs = pairwise(found)
        assert all(sum(wave) + after[0] > room for wave, after in pairs), "a wave ended with room left"
    else:
        assert all(len(wave) == limit for wave in found[:-1])


@pytest.mark.parametrize("ratio", ["1/10", "1/2", "1"])
def test_the_bound_holds_for_what_variants_allocate(ratio: str) -> None:
    model, n_new = tiny(), 12
    request = BudgetRequest(Fraction(ratio), None, Fraction(1, 16))
    with model.hooked():
        trace = prefill(model, prompt(200))
    rows = [
        row_for(Full, Full.Params(), request, trace, n_new),
        row_for(
            Oracle,
            Oracle.Params("group_sum", 8, Fraction(1, 2), "inside", "fair", "renormalise"),
            request,
            trace,
            n_new,
        ),
        row_for(StreamingLLM, StreamingLLM.Params(4, "inside", "original"), request, trace, n_new),
    ]
    shared = 2 * trace.keys(0).nbytes * len(trace.shape.attention_layers)
    for row in map(built, rows):
        bound = variant_bytes(row.variant, trace.shape, n_new, element_bytes=4)
        own = row.store.allocated_bytes() - (shared if row.variant.is_full else 0)
        assert 0 < own <= bound


@pytest.mark.parametrize("name", ["quest", "clusterkv", "infllm", "pqcache", "sparq"])
def test_the_bound_holds_for_a_search(name: str) -> None:
    model, n_new = tiny(), 12
    kind, params = method_of(name, ["method.block_len=16"] if name == "infllm" else [])
    request = BudgetRequest(Fraction(1, 5), None, Fraction(1, 8))
    variant = kind.variant_for(params, request, model.shape, 200)
    with model.hooked():
        trace = prefill(model, prompt(200), variant.observations)
    row = built(row_for(kind, params, request, trace, n_new))
    assert 0 < row.store.allocated_bytes() <= variant_bytes(variant, trace.shape, n_new, element_bytes=4)


def test_a_search_is_given_room_for_its_own_index() -> None:
    """Bounds of pages are a sixteenth of the prompt's keys; of a method that says nothing they are taken whole."""

    class Silent(Oracle):
        @classmethod
        def footprint(cls, params: Any, plan: Any, budget: Any, shape: Any) -> Any:
            raise ConfigError("nothing is said")

    shape, request = tiny().shape, BudgetRequest(Fraction(1, 10), None, Fraction(0))
    oracle = Oracle.Params("group_sum", 8, Fraction(1, 2), "inside", "fair", "renormalise")
    said, silent = (
        variant_bytes(kind.variant_for(oracle, request, shape, 1000), shape, 8, element_bytes=2)
        for kind in (Oracle, Silent)
    )
    keys = 1000 * 2 * shape.h_kv * shape.d_h * shape.n_layers
    assert keys < silent - said < 1.2 * keys


def test_a_pass_in_chunks_needs_less() -> None:
    shape = tiny().shape
    whole, chunked = (prompt_bytes(shape, 4096, 2, chunk) for chunk in (None, 512))
    assert chunked < whole and prompt_bytes(shape, 4096, 2, 8192) == whole


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert 0 < free_bytes(torch.device("cpu")) < free_cgroup_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert 0 < free_bytes(torch.device("cpu")) < free_cgroup_bytes()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 250\n")
    assert free_bytes(torch.device("cpu")) == 550
