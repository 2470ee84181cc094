"""Streams beside the model's own, on a pretended GPU: how many there are, and what goes where."""

import pytest
import torch
from torch import Tensor

from kvbench.benchmarks.pretend.cuda import Machine, Stream
from kvbench.engine.passes.streams import sent_home
from kvbench.engine.prefill import prefill
from kvbench.tests import conformance
from kvbench.tests.pretend.test_methods import moved
from kvbench.tests.tiny import prompt


def build(name: str) -> None:
    """Two samples in turn are read, and a row is built of each."""
    model = moved(conformance.model(), "cuda:0")
    one = conformance.ours(name)
    variant = conformance.variant(one, conformance.accepted(one, ["0.3", "1"])[0])
    for seed in (1, 2):
        rows = []

        def place(trace, layer, rows=rows):
            if not rows:
                rows.append(variant.row(trace, 2))
            rows[0].build(layer)

        with model.hooked():
            trace = prefill(model, prompt(conformance.S, seed), variant.observations, place, variant.pruning)
            rows[0].complete()
            trace.settle()


@pytest.mark.parametrize("name", ["infllm", "clusterkv"])
def test_copies_go_home_on_one_stream_beside_the_model(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """For all layers and samples; another one clusters."""
    copying: list[Stream] = []
    send = machine.send

    def noting(index: int, host: Tensor, device: Tensor, to_host: bool) -> None:
        if to_host and host.is_floating_point():
            copying.append(machine.stream(index))
        send(index, host, device, to_host)

    monkeypatch.setattr(machine, "send", noting)
    before = len(machine.all_streams)
    build(name)
    assert len(copying) >= 4, "K and V of several layers"
    assert {*copying} == {copying[0]} and copying[0] is not machine.defaults[0]
    assert len(machine.all_streams) - before == (2 if name == "clusterkv" else 1)


def test_a_copy_home_is_made_behind_what_was_asked_before(machine: Machine) -> None:
    x = torch.arange(6.0, device="cuda")
    home = sent_home(x)
    assert home.isnan().all(), "it is under way"
    stream = machine.stream()
    assert not stream.copies, "and the model's own stream does not wait for it"
    torch.cuda.synchronize()
    assert home.tolist() == [0, 1, 2, 3, 4, 5]
