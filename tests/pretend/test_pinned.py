"""Pinned memory for what a pass sends home: taken before it begins, and no more than it needs."""

import pytest
import torch

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.engine.passes.pinned import PinnedBuffers, block_sizes
from kvbench.engine.passes.trace import Trace
from kvbench.engine.prefill import n_home, prefill
from kvbench.evals.overrides import config_groups
from kvbench.kernels.jit import power_of_2
from kvbench.tasks.latency import Timed, read
from kvbench.tests import conformance
from kvbench.tests.pretend.test_methods import moved
from kvbench.tests.tiny import prompt

PINNED = "pinned allocation"


@pytest.mark.parametrize("n", [1, 2, 3, 56, 64])
@pytest.mark.parametrize("piece", [256, 2048 * 34001, 2048 * 33000, 1 << 26])
def test_blocks_hold_all_pieces_in_little_more(piece: int, n: int) -> None:
    blocks = block_sizes(piece, n)
    assert all(block == power_of_2(block) for block in blocks)
    assert sum(block // piece for block in blocks) >= n
    assert sum(blocks) <= n * power_of_2(piece)
    assert sum(blocks) < n * piece + 2 * power_of_2(piece)


def test_pieces_lie_apart_and_others_have_memory_of_their_own(machine: Machine) -> None:
    with machine.counting() as counts:
        homes = PinnedBuffers({3 * 4 * 100: 5})
        assert counts.by_kind[PINNED] <= 2
        at_once = counts.by_kind[PINNED]
        taken = [homes.take((3, 100), torch.float32) for _ in range(5)]
        assert counts.by_kind[PINNED] == at_once
        for i, x in enumerate(taken):
            x.fill_(i)
        assert all((x == i).all() and x.is_pinned() for i, x in enumerate(taken))
        more = [homes.take((3, 100), torch.float32), homes.take((7,), torch.float32)]
        assert counts.by_kind[PINNED] == at_once + 2 and all(x.is_pinned() for x in more)


def test_a_pass_sends_layers_to_memory_that_was_there_before(machine: Machine) -> None:
    model = moved(conformance.model(), "cuda:0")
    one = conformance.ours("infllm")
    variant = conformance.variant(one, "0.3")
    n_layers, heads = len(model.shape.attention_layers), model.shape.h_kv * model.shape.d_h * 4
    s = 299

    def passed(n_home: int) -> tuple[int, int, list[torch.Tensor]]:
        """Bytes that are pinned before the first layer and from then on, and what the host has in the end."""
        ahead = list[int]()

        def send(trace: Trace, layer: int) -> None:
            ahead.append(counts.nbytes[PINNED])
            trace.offload(layer)

        with model.hooked(), machine.counting() as counts:
            trace = prefill(model, prompt(s), variant.observations, send, n_home=n_home)
            trace.settle()
            found = [x.clone() for layer in model.shape.attention_layers for x in trace.host(layer)]
        return ahead[0], counts.nbytes[PINNED] - ahead[0], found

    asked = n_home([variant], model.shape)
    assert asked == n_layers
    _, alone, expected = passed(0)
    before, later, found = passed(asked)
    assert all(map(torch.equal, found, expected))
    assert alone == 2 * n_layers * power_of_2(s * heads)
    assert later == 0 and before < 1.3 * 2 * n_layers * s * heads, (before, alone)


def test_a_pass_that_is_timed_takes_memory_before_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer takes on its way home falls into the time to the first or second token."""
    model, offload, ahead, s = moved(conformance.model(), "cuda:0"), Trace.offload, list[int](), 299
    variant = conformance.variant(conformance.ours("infllm"), "0.3")

    def noted(trace: Trace, layer: int) -> None:
        ahead.append(counts.nbytes[PINNED])
        offload(trace, layer)

    monkeypatch.setattr(Trace, "offload", noted)
    with model.hooked(), machine.counting() as counts:
        read(model, Timed(variant), prompt(s), 4)
        later = counts.nbytes[PINNED] - ahead[0]
    assert len(ahead) == n_home([variant], model.shape)
    assert later < s * model.shape.h_kv * model.shape.d_h * 4, (ahead, later)  # less than the keys of one layer


@pytest.mark.parametrize("name", sorted(config_groups()["method"]))
def test_a_method_knows_how_many_layers_go_home(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sent = set[int]()
    offload = Trace.offload

    def noted(trace: Trace, layer: int) -> None:
        sent.add(layer)
        offload(trace, layer)

    monkeypatch.setattr(Trace, "offload", noted)
    one = conformance.ours(name)
    with conformance.wide_enough(one):
        model = conformance.model()
        variant = conformance.variant(one, conformance.accepted(one, ["0.3", "1"])[0])
        trace = conformance.read([variant])
        row = variant.row(trace, 4)
        for layer in model.shape.attention_layers:
            row.build(layer)
        row.complete()
    assert len(sent) == n_home([variant], model.shape)
