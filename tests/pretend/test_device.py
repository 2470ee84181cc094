"""What a pretended device refuses, counts and delays, as a real one would."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.causal import causal
from kvbench.engine.softmax import Softmax
from kvbench.kernels.jit import jit, tl


def test_it_is_gone_outside(machine: Machine) -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    with torch.cuda.device(1):
        assert torch.zeros(1, device="cuda").device == torch.device("cuda", 1)
    assert torch.zeros(1, device="cuda").device == torch.device("cuda", 0)


def test_operands_on_two_devices_are_refused(machine: Machine) -> None:
    here, there, host = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"), torch.ones(3)
    for other in (there, host):
        with pytest.raises(RuntimeError, match="same device"):
            _ = here + other
    with pytest.raises(RuntimeError, match="same device"):
        host[torch.zeros(1, dtype=torch.int64, device="cuda")]
    assert (here + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a single number of the host may come along
    assert (here + there.to("cuda:0")).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "view",
    [lambda x: x[None, :, None], lambda x: x[:, 1:], lambda x: x.view(4), lambda x: x.mT, lambda x: x.chunk(2)[1]],
)
def test_what_was_made_before_is_looked_at_in_inference_mode(machine: Machine, view) -> None:
    host = torch.arange(4.0).view(2, 2)
    x = host.to("cuda")
    with torch.inference_mode():
        seen = view(x)
    assert seen.tolist() == view(host).tolist() and seen.is_inference() == x.is_inference()


def test_each_operator_that_computes_is_a_launch(machine: Machine) -> None:
    x = torch.ones(4, 4, device="cuda")
    with machine.counting() as counts:
        y = x @ x
        y.view(16)[3:].unsqueeze(0)
        torch.empty(5, device="cuda")
        y.add_(1)
        nn.functional.linear(y, x)
    assert (counts.launches, counts.waits) == (3, 0)


@pytest.mark.parametrize(
    ("call", "n"),
    [
        (lambda x: x.topk(9), 2),
        (lambda x: x.topk(9, sorted=False), 1),
        (lambda x: x.repeat(1, 80).topk(9, sorted=False), 35),  # 24,000 in each of two slices, and the copies
        (lambda x: x.sort(-1), 4),
        (lambda x: x.repeat(1, 20).argsort(dim=-1, stable=True), 16),
        (lambda x: x.cumsum(-1), 1),
        (lambda x: x.view(-1).cumsum(0), 2),
        (lambda x: x.masked_fill(x > 3, 0), 3),
    ],
)
def test_an_operator_counts_as_the_kernels_that_it_launches(machine: Machine, call, n: int) -> None:
    x = torch.arange(600, device="cuda").view(2, 300)
    with machine.counting() as counts:
        call(x)
    assert counts.launches == n


def test_what_waits_is_counted_with_its_line(machine: Machine) -> None:
    x, host = torch.arange(4, device="cuda"), torch.arange(4)
    with machine.counting() as counts:
        x.sum().item()
        x.tolist()
        x.cpu()
        host.to("cuda", non_blocking=True)  # pageable memory is staged first
        x[x > 1]
        x[[0, 2]]
        x.nonzero()
        torch.tensor([1], device="cuda")
        torch.equal(x, x)
        torch.cuda.synchronize()
    assert counts.waits == 10
    lines = counts.lines("wait")
    assert len(lines) == 10 and all(line.startswith("tests/pretend/test_device.py:") for line, _ in lines)


def test_a_copy_to_pinned_memory_arrives_when_somebody_waited(machine: Machine) -> None:
    x, host = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    with machine.counting() as counts:
        host.copy_(x, non_blocking=True)
        written = torch.cuda.Event()
        written.record()
        assert host.isnan().all()
        written.synchronize()
    assert host.tolist() == [1, 1, 1]
    assert (counts.waits, counts.by_kind["copy to pinned memory"]) == (1, 1)


def test_pinned_memory_is_left_alone_while_a_copy_reads_it(machine: Machine) -> None:
    host = torch.ones(3).pin_memory()
    x = host.to("cuda", non_blocking=True)
    host.zero_()
    with pytest.raises(RuntimeError, match="on its way"):
        x.tolist()


@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_writes_to_pinned_memory_behind_copies_from_it(machine: Machine, waits: bool) -> None:
    """Of streams that it waited for; and from then on the host must leave alone what the kernel wrote."""
    host, lane = torch.ones(8).pin_memory(), torch.cuda.Stream()
    with torch.cuda.stream(lane):
        x = host.to("cuda", non_blocking=True)
    if not waits:
        with pytest.raises(RuntimeError, match="did not wait for a copy"):
            double[(1,)](host, 8)
        return
    torch.cuda.current_stream().wait_stream(lane)
    double[(1,)](host, 8)
    assert x.tolist() == [1] * 8 and host.tolist() == [2] * 8
    with torch.cuda.stream(lane):
        x = host.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(lane)
    double[(1,)](host, 8)
    host.zero_()
    with pytest.raises(RuntimeError, match="on its way"):
        x.tolist()


def test_another_stream_sees_a_copy_only_behind_it(machine: Machine) -> None:
    x, host = torch.ones(3, device="cuda"), torch.zeros(3, pin_memory=True)
    lane = torch.cuda.Stream()
    with torch.cuda.stream(lane):
        host.copy_(x, non_blocking=True)
    assert host.to("cuda", non_blocking=True).isnan().all()
    torch.cuda.current_stream().wait_stream(lane)
    assert host.to("cuda", non_blocking=True).tolist() == [1, 1, 1]


def test_an_event_has_no_time_before_somebody_waited(machine: Machine) -> None:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    stop.record()
    with pytest.raises(RuntimeError, match="not ready"):
        start.elapsed_time(stop)
    torch.cuda.synchronize()
    assert start.elapsed_time(stop) >= 0


def test_threads_meet_the_same_rules(machine: Machine) -> None:
    x = torch.ones(3, device="cuda:1")
    with machine.counting() as counts, ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: x.sum().item()).result() == 3
        with pytest.raises(RuntimeError, match="same device"):
            pool.submit(lambda: torch.ones(3) + x).result()
    assert (counts.launches, counts.waits) == (1, 0)  # it waited, but not the thread that counts


def test_a_kernel_is_launched_where_its_tensors_are(machine: Machine) -> None:
    x = torch.ones(8, device="cuda:1")
    with pytest.raises(ValueError, match="cannot be accessed"):
        double[(1,)](torch.ones(8), 8)
    with machine.counting() as counts:
        double[(1,)](x, 8)  # whichever device is current
    assert x.tolist() == [2] * 8 and counts.launches == 1
    pinned = torch.ones(8, pin_memory=True)
    double[(1,)](pinned, 8)  # a kernel reads and writes pinned memory
    assert pinned.tolist() == [2] * 8


def test_modules_go_where_they_are_told(machine: Machine) -> None:
    layer = nn.Linear(3, 2)
    expected = layer(torch.ones(3))
    layer.to("cuda:1")
    assert {str(weight.device) for weight in layer.parameters()} == {"cuda:1"}
    assert torch.equal(layer(torch.ones(3, device="cuda:1")).cpu(), expected)


@jit
def double(x, n: tl.constexpr):  # pyright: ignore[reportInvalidTypeForm]
    at = tl.arange(0, n)
    tl.store(x + at, tl.load(x + at) * 2)


@pytest.mark.parametrize("window", [5, 130])
def test_a_sliding_window_in_float32_has_a_mask_that_the_kernel_takes(machine: Machine, window: int) -> None:
    """Whose rows begin at multiples of 8 numbers; the pretended operator refuses others."""
    q, k, v = (torch.randn(1, 2, 400, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    expected = causal(q, k, v, Softmax(0.25), window)
    found = causal(q.to("cuda"), k.to("cuda"), v.to("cuda"), Softmax(0.25), window)
    for x, right in zip(found, expected, strict=True):
        torch.testing.assert_close(x.cpu(), right)
