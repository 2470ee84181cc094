"""Times on a GPU are those between events, recorded around the work and read when it is over."""

from concurrent.futures import ThreadPoolExecutor

import torch

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.books.spans import following, recording, span
from kvbench.engine.books.stopwatch import Stopwatch
from kvbench.engine.decode import decode
from kvbench.engine.prefill import prefill
from kvbench.tests import conformance
from kvbench.tests.pretend.test_methods import moved
from kvbench.tests.tiny import prompt

GPU = torch.device("cuda", 1)


def test_events_are_recorded_around_the_work_and_nobody_waits(machine: Machine) -> None:
    clock = Stopwatch()
    x = torch.ones(3, device=GPU)
    with machine.counting() as counts:
        for _ in range(3):
            with clock.running(GPU):
                x += 1
    assert (counts.by_kind["event"], counts.waits) == (6, 0)
    with machine.counting() as counts:
        seconds = clock.seconds()
    assert len(seconds) == 3 and min(seconds) >= 0
    assert counts.waits == 1


def test_steps_are_timed_without_a_wait_of_their_own(machine: Machine) -> None:
    variant = conformance.variant(conformance.ours("snapkv"), "0.3")
    model = moved(conformance.model(), "cuda:0")
    n_new = (3, 6)
    waits = []
    for n in n_new:
        with model.hooked():
            trace = prefill(model, prompt(conformance.S), variant.observations)
            row = variant.row(trace, n)
            for layer in trace.shape.attention_layers:
                row.build(layer)
            row.complete()
            trace.settle()
            with machine.counting() as counts:
                done = decode(model, trace, [row], max_new_tokens=n)
        assert len(done.step_seconds) == n - 1 and min(done.step_seconds) > 0
        assert counts.by_kind["event"] == 2 * (n - 1)
        waits.append(sum(count for line, count in counts.lines("wait") if line.startswith("engine/books/stopwatch.py")))
    assert waits == [1, 1]  # at the end, however many steps


def test_a_workers_spans_are_on_its_own_clock(machine: Machine) -> None:
    """On its own stream, and without one on the CPU's clock: the other thread's queue is not its work."""
    device = torch.device("cuda", 0)
    lane = torch.cuda.Stream(device)

    def on_a_stream() -> None:
        with torch.cuda.stream(lane), span("lane"):
            pass

    def on_the_cpu() -> None:
        with span("thread"):
            pass

    with recording(device) as record, ThreadPoolExecutor(1) as pool:
        with span("model"):
            for work in (on_a_stream, on_the_cpu):
                pool.submit(following(work)).result()
    kinds = {name: type(start) for name, _, start, *_ in record.marks}
    assert kinds["thread"] is float and kinds["lane"] is kinds["model"] is not float
    streams = {name: start.stream for name, _, start, *_ in record.marks if not isinstance(start, float)}
    assert streams["lane"] is lane and streams["model"] is torch.cuda.default_stream(device)
    lane.synchronize()
    assert all(0 <= each.start <= each.stop for each in record.stretches())
