import json
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from time import perf_counter, sleep

import pytest

from kvbench.engine.books.spans import following, recording, span
from kvbench.engine.budget import BudgetRequest
from kvbench.engine.decode import decode
from kvbench.engine.prefill import prefill
from kvbench.methods.full import Full
from kvbench.methods.retrieving.oracle import Oracle
from kvbench.tests.tiny import prompt, tiny
from kvbench.tests.vectors import row_for


def test_seconds_are_those_of_a_span_without_the_spans_inside() -> None:
    with recording() as record:
        start = perf_counter()
        with span("outer"):
            sleep(0.02)
            for layer in range(2):
                with span("inner", layer):
                    sleep(0.01)
        whole = perf_counter() - start
    seconds = record.seconds()
    assert list(seconds) == ["outer", "inner"] or seconds["inner"] >= 0.02
    assert 0.02 <= seconds["outer"] < 0.03 + whole - 0.04
    assert sum(seconds.values()) == pytest.approx(whole, abs=1e-3)
    assert [(at.name, at.layer, at.depth) for at in record.stretches()] == [
        ("outer", None, 0),
        ("inner", 0, 1),
        ("inner", 1, 1),
    ]


def test_nothing_is_noted_while_nobody_records() -> None:
    with recording() as record:
        pass
    with span("unheard"):
        pass
    assert record.seconds() == {}


def test_a_thread_that_follows_has_a_lane_and_adds_nothing_to_the_pass(tmp_path: Path) -> None:
    def work() -> None:
        with span("cluster"):
            sleep(0.01)

    with recording() as record, ThreadPoolExecutor(1) as pool:
        with span("build"):
            done = pool.submit(following(work))
            unheard = pool.submit(work)
        done.result()
        unheard.result()
    assert list(record.seconds()) == ["build"]
    assert sorted(at.name for at in record.stretches()) == ["build", "cluster"]
    record.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert lanes["build"] == 0 and lanes["cluster"] == 1
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


@pytest.mark.parametrize("kind", [Full, Oracle])
def test_spans_of_a_pass_add_up_to_it(kind: type) -> None:
    model = tiny("llama")
    ratio = Fraction(1) if kind is Full else Fraction(1, 4)
    request = BudgetRequest(ratio, None, Fraction(1, 64))
    rows = []

    def build(trace, layer: int) -> None:
        if not rows:
            params = Full.Params() if kind is Full else oracle_params()
            rows.append(row_for(kind, params, request, trace, 8))
        rows[0].build(layer)

    with model.hooked():
        with recording() as read:
            trace = prefill(model, prompt(200), (), build)
        with recording() as said:
            seconds = decode(model, trace, rows, max_new_tokens=8).step_seconds
    for record, measured in ((read, trace.seconds), (said, sum(seconds))):
        whole = sum(at.stop - at.start for at in record.stretches() if at.depth == 0)
        assert sum(record.seconds().values()) == pytest.approx(whole)
        assert whole <= measured
    wanted = {"step", "attention", "append", "after"} | (set() if kind is Full else {"search", "fetch"})
    assert set(said.seconds()) == wanted
    assert {"prefill", "attention", "build"} <= set(read.seconds())


def oracle_params() -> Oracle.Params:
    return Oracle.Params("group_sum", 4, Fraction(1, 2), "on_top", "fair", "renormalise")
