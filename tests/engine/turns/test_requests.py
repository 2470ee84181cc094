"""Requests that decode at once read memory of their own each: of a prompt that was read, or of a copy of such a one."""

from typing import Any

import pytest
import torch

from kvbench.engine.decode import decode
from kvbench.engine.passes.trace import Trace
from kvbench.engine.turns.state import request_like, request_tensors
from kvbench.methods.base import SelectiveAttention
from kvbench.tasks.latency import Timed, read
from kvbench.tests import conformance
from kvbench.tests.conformance import METHODS, Refused, variant
from kvbench.tests.tiny import prompt

NAMES = ("full", "snapkv", "duo_attention", "triattention", "oracle", "sparq", "quest", "pqcache", "clusterkv", "loki",
         "retroinfer", "shadowkv", "magicpig", "infllm", "infinigen")  # fmt: skip
FEED, N_NEW = prompt(3, 7), 12


def request(name: str, seed: int = 0) -> tuple[Trace, SelectiveAttention]:
    model = conformance.model()
    try:
        asked = variant(conformance.ours(name), "0.3")
    except Refused as refusal:
        pytest.skip(f"{name} refuses the small model: {refusal}")
    with model.hooked():
        return read(model, Timed(asked), prompt(conformance.S, seed), N_NEW)


def said(trace: Trace, *rows: Any) -> list[list[int]]:
    model = conformance.model()
    with model.hooked():
        done = decode(model, trace, rows, feed=FEED, max_new_tokens=N_NEW - len(FEED))
    return [answer.ids for answer in done.answers]


def memory(row: SelectiveAttention) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in request_tensors(row)}


@pytest.mark.parametrize("name", NAMES)
def test_requests_with_prompts_of_their_own_answer_as_each_alone(name: str) -> None:
    alone = [said(*request(name, seed))[0] for seed in (0, 1)]
    assert alone[0] != alone[1]
    (trace, first), (_, second) = request(name, 0), request(name, 1)
    assert said(trace, first, second) == alone


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in NAMES else pytest.mark.slow) for name in METHODS]
)
def test_a_request_like_another_answers_the_same_from_memory_of_its_own(name: str) -> None:
    trace, row = request(name)
    copies = [request_like(row) for _ in range(2)]
    places = [memory(one) for one in (row, *copies)]
    assert len(places[0]) == len(places[1]) > 0
    assert not places[0] & places[1] and not places[0] & places[2] and not places[1] & places[2]
    for x in request_tensors(row):
        if x.is_floating_point():
            torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).zero_()  # nobody else reads it
    expected = said(*request(name))[0]
    assert said(trace, *copies) == [expected, expected]


@pytest.mark.parametrize(("name", "held"), [("full", 1), ("oracle", 1), ("snapkv", 0), ("pqcache", 0)])
def test_a_request_holds_no_more_of_its_prompt_than_it_reads(name: str, held: int) -> None:
    trace, _ = request(name)
    shape = trace.shape
    whole = len(shape.attention_layers) * conformance.S * shape.h_kv * 2 * shape.d_h * 4
    assert trace.peak_bytes == whole and trace.held_bytes() == held * whole
